"""The CPU or an accelerator, with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from beam_inference import arrays
from beam_inference.arrays import AnyArray
from beam_inference.config.devices import TRAITS, kind_of
from beam_inference.engines.device_errors import device_errors, empty_cache
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.engines.transfers import Downloads, Uploads
from beam_inference.errors import DeviceOutOfMemory


@contextmanager
def without_autocast() -> Iterator[None]:
    """Leave the autocast that the calling thread may be in: a job's precision is its own."""
    with ExitStack() as stack:
        for kind in TRAITS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class TorchDevice:
    """PyTorch tensors on one device; see :class:`beam_inference.engines.protocol.Device`.

    Args:
        device: the CPU or an accelerator; without an index, the one that is current now.
        precision: ``inference.precision``; tf32 is allowed in a session only if it says so.
        threads: of the arithmetic on a CPU. oneDNN divides some convolutions (1×1×1 ones, for
            instance) by them, so they change the last bits (3e-7 measured between 1 and 2) and
            belong to what describes the engine.
        uploads: what sends arrays ahead; None, on the CPU, if each is brought when it is needed.
    """

    def __init__(
        self,
        device: torch.device,
        precision: str = "float32",
        threads: int = 1,
        uploads: Uploads | None = None,
    ) -> None:
        if device.type != "cpu" and device.index is None:
            # each thread has a current device of its own, and all must use this one
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._device = device
        self._precision = precision
        self._threads = threads
        overlaps = TRAITS[kind_of(device.type)].copies_overlap
        self._uploads = Uploads(device) if overlaps and uploads is None else uploads
        self._downloads = Downloads(device) if overlaps else None

    @property
    def on_host(self) -> bool:
        """Whether the device is the CPU."""
        return self._device.type == "cpu"

    @contextmanager
    def session(self) -> Iterator[None]:
        """Record no gradients; arithmetic is deterministic, and in the job's precision.

        In PyTorch's inference mode, networks that differentiate inside would answer zeros.
        """
        torch.set_num_threads(self._threads)  # of the calling thread: OpenMP keeps one for each
        if not self.on_host:
            with device_errors():
                torch.accelerator.set_device_index(self._device)  # of the calling thread, too
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = self._precision == "tf32"
        torch.set_float32_matmul_precision("high" if self._precision == "tf32" else "highest")
        with torch.no_grad(), without_autocast():
            yield

    def upload(self, array: AnyArray) -> torch.Tensor:
        """Bring an array to the device: a tensor of its dtype."""
        with device_errors():
            return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(self._device)

    def begin_upload(self, array: AnyArray) -> Callable[[], torch.Tensor]:
        """Begin to bring an array to the device; on the CPU there is nothing to begin."""
        if self._uploads is None:
            return lambda: self.upload(array)
        try:
            with device_errors():
                sent = self._uploads.begin(array)
        except DeviceOutOfMemory:
            self._uploads.stop()
            return lambda: self.upload(array)

        def wait() -> torch.Tensor:
            with device_errors():
                tensor = sent()
            return self.upload(array) if tensor is None else tensor

        return wait

    def make_room(self) -> bool:
        """Give up what was sent ahead, for good, and the memory that PyTorch keeps for later."""
        if self._uploads is None:
            return False
        has_given_up = self._uploads.give_up()
        empty_cache()
        return has_given_up

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A float32 tensor of any values on the device."""
        with device_errors():
            if self.on_host:
                return torch.from_numpy(arrays.empty(shape, np.float32))
            return torch.empty(shape, dtype=torch.float32, device=self._device)

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        """Return a tensor of its own, with the same values."""
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

    def add_rounded(self, sums: torch.Tensor, terms: torch.Tensor, step: float) -> None:
        """Round terms to whole numbers, and add them to sums as so many steps.

        The product with a power of two is exact, so a fused multiply-add gives the same bits.
        """
        with device_errors():
            sums.add_(terms.round_(), alpha=step)

    def largest_magnitude(self, array: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude in a tensor, on its device.

        Of whole arrays, amin and amax together take two thirds of aminmax's time; of what was cut
        out of larger ones they take six times as much.
        """
        with device_errors():
            if array[0].is_contiguous():
                return torch.maximum(array.amax(), -array.amin())
            low, high = torch.aminmax(array)
            return torch.maximum(high, -low)

    def download(
        self, array: torch.Tensor, encoding: Encoding = AS_COMPUTED
    ) -> Callable[[], AnyArray]:
        """Encode a tensor, and begin to bring it to the host as a NumPy array.

        Float32 tensors on the CPU are not copied, all others are. The operations, their order and
        the bits are those of :func:`beam_inference.operators.quantize.quantize`.
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
                return array.cpu().numpy  # of a tensor on the CPU, itself
            arrived = self._downloads.begin(
                array.clone() if encoding.value_range is None else array, values
            )

        def wait() -> AnyArray:
            with device_errors():
                return arrived()

        return wait
