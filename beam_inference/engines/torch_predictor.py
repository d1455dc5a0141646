"""PyTorch networks on the CPU or a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.engines.device_errors import device_errors
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.engines.transfers import Downloads, Uploads
from beam_inference.errors import DeviceOutOfMemory, ModelContractError

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchPredictor:
    """A torch network on one device, its accumulators beside it.

    ``forward`` maps a float32 tensor (N, C, Z, Y, X), or (N, C, Y, X) if ``dims`` is 2, to one of
    as many axes. ``threads`` are those of its arithmetic on a CPU: oneDNN divides some convolutions
    (1×1×1 ones, for instance) by them, so they change the last bits (3e-7 measured between 1 and 2)
    and belong to what describes the engine. ``memory_format`` is that of the network's input.
    ``description`` is what :meth:`describe` says.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        device: torch.device,
        precision: str = "float32",
        activation: str = "none",
        dims: int = 3,
        threads: int = 1,
        memory_format: torch.memory_format = torch.contiguous_format,
        description: dict[str, str] | None = None,
    ) -> None:
        self._memory_format = memory_format
        self._description = description or {}
        self._threads = threads
        self._forward = forward
        # Of "cuda" it is settled here which: threads have a current one each.
        is_open = device.type == "cuda" and device.index is None
        self._device = device = (
            torch.device("cuda", torch.cuda.current_device()) if is_open else device
        )
        self._precision = precision
        self._activation = activation
        self._dims = dims
        self._uploads = Uploads(device) if device.type == "cuda" else None
        self._downloads = Downloads(device) if device.type == "cuda" else None

    @property
    def on_host(self) -> bool:
        """Whether the device is the CPU."""
        return self._device.type == "cpu"

    @contextmanager
    def session(self) -> Iterator[None]:
        """Inference mode, and arithmetic as the job's precision says: no TF32 unless asked for, no autotuning."""
        # of the calling thread: OpenMP keeps a number for each
        torch.set_num_threads(self._threads)
        if not self.on_host:
            with device_errors():
                torch.cuda.set_device(self._device)  # of the calling thread, too
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = self._precision == "tf32"
        torch.set_float32_matmul_precision("high" if self._precision == "tf32" else "highest")
        with torch.inference_mode():
            yield

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        """A tensor on the device, in the array's dtype."""
        with device_errors():
            return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(self._device)

    def begin_upload(self, array: NDArray[Any]) -> Callable[[], torch.Tensor]:
        """The same, begun; on the CPU there is nothing to begin."""
        if self._uploads is None:
            return lambda: self.upload(array)
        try:
            with device_errors():
                sent = self._uploads.begin(array)
        except DeviceOutOfMemory:
            self._uploads.stop()
            return lambda: self.upload(array)

        def arrived() -> torch.Tensor:
            with device_errors():
                tensor = sent()
            return self.upload(array) if tensor is None else tensor

        return arrived

    def make_room(self) -> bool:
        """Give up what was sent ahead, for good, and what PyTorch keeps for later: libraries need memory, too."""
        if self._uploads is None:
            return False
        was_there = self._uploads.give_up()
        torch.cuda.empty_cache()
        return was_there

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A float32 tensor of any values on the device."""
        with device_errors():
            if self.on_host:
                return torch.from_numpy(arrays.empty(shape, np.float32))
            return torch.empty(shape, dtype=torch.float32, device=self._device)

    def predict(self, batch: torch.Tensor) -> torch.Tensor:
        """Predict (N, C, Z, Y, X) float32; the activation is applied in float32."""
        with device_errors():
            batch = batch[:, :, 0] if self._dims == 2 else batch
            result = self._run(batch.contiguous(memory_format=self._memory_format))
            if not isinstance(result, torch.Tensor) or result.is_complex():
                raise ModelContractError(
                    f"the network returns a {type(result).__name__}; expected one real tensor "
                    "(batch, channels, z, y, x). Wrap it in a module that returns the one to "
                    "write."
                )
            if self._dims == 2 and result.ndim == 4:
                result = result[:, :, None]
            result = result.float()
            if self._activation == "sigmoid":
                return result.sigmoid()
            # A network may return its input, which the next batch overwrites: never more than one
            # batch is alive.
            return result.softmax(dim=1) if self._activation == "softmax" else result

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        """A tensor of its own, with the same values."""
        with device_errors():
            return array.clone()

    def flip(self, array: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        """A contiguous tensor of its own, reversed along some axes."""
        with device_errors():
            return array.flip(tuple(axes)).contiguous()

    def multiply(self, array: torch.Tensor, by: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product of two tensors into a third."""
        with device_errors():
            torch.mul(array, by, out=out)

    def download(
        self, array: torch.Tensor, encoding: Encoding = AS_COMPUTED
    ) -> Callable[[], NDArray[Any]]:
        """The tensor, encoded, as a NumPy array; float32 ones on the CPU without a copy, all others as a copy.

        The same operations in the same order as :func:`beam_inference.operators.quantize.quantize`,
        and the same bits.
        """
        values = array.untyped_storage().nbytes() // array.element_size()
        with device_errors():
            if encoding.value_range is not None:
                low, high = encoding.value_range
                info = np.iinfo(encoding.dtype)
                step = (float(info.max) - float(info.min)) / (high - low)
                array.sub_(np.float32(low).item()).mul_(np.float32(step).item()).round_()
                array = array.clamp_(0, float(info.max - info.min)).add_(float(info.min))
                array = array.to(getattr(torch, encoding.dtype.name))
            if self._downloads is None:
                return array.numpy
            arrived = self._downloads.begin(
                array.clone() if encoding.value_range is None else array, values
            )

        def awaited() -> NDArray[Any]:
            with device_errors():
                return arrived()

        return awaited

    def describe(self) -> dict[str, str]:
        """The engine with its version, the type of the device, the precision, and threads on a CPU."""
        return {"device": self._device.type, **self._description}

    def _run(self, batch: torch.Tensor) -> Any:
        dtype = _AUTOCAST.get(self._precision)
        if dtype is None:
            return self._forward(batch)
        with torch.autocast(self._device.type, dtype):
            return self._forward(batch)
