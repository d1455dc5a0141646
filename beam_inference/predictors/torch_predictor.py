"""PyTorch networks on the CPU or a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.bounding_box import grown_shape
from beam_inference.chunk_inference import AS_COMPUTED, Encoding
from beam_inference.config import Inference, Network
from beam_inference.errors import ConfigError, DeviceOutOfMemory, EngineError, ModelContractError
from beam_inference.predictors.convolutions import by_onednn
from beam_inference.predictors.devices import claimed_cuda_device, device_errors
from beam_inference.predictors.engine import CONVERTED_SUFFIXES, engine_description, parameters_sha256, suffix_of
from beam_inference.predictors.engines import (
    Forward,
    compiled_forward,
    onnxruntime_forward,
    openvino_forward,
    per_shape,
)
from beam_inference.predictors.folding import folded
from beam_inference.predictors.model_files import existing_file, load_module
from beam_inference.predictors.transfers import Downloads, Uploads

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchPredictor:
    """A torch network on one device, its accumulators beside it.

    ``forward`` maps a float32 tensor (N, C, Z, Y, X), or (N, C, Y, X) if ``dims`` is 2, to one of as many axes.
    ``threads`` are those of its arithmetic on a CPU: oneDNN divides some convolutions (1×1×1 ones, for instance) by
    them, so they change the last bits (3e-7 measured between 1 and 2) and belong to what describes the engine.
    ``memory_format`` is that of the network's input. ``description`` is what :meth:`describe` says.
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
        self._device = device = torch.device("cuda", torch.cuda.current_device()) if is_open else device
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
        torch.set_num_threads(self._threads)  # of the calling thread: OpenMP keeps a number for each
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
                    f"the network returns a {type(result).__name__}; expected one real tensor (batch, channels, z, y, "
                    "x). Wrap it in a module that returns the one to write."
                )
            if self._dims == 2 and result.ndim == 4:
                result = result[:, :, None]
            result = result.float()
            if self._activation == "sigmoid":
                return result.sigmoid()
            # A network may return its input, which the next batch overwrites: never more than one batch is alive.
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

    def download(self, array: torch.Tensor, encoding: Encoding = AS_COMPUTED) -> Callable[[], NDArray[Any]]:
        """The tensor, encoded, as a NumPy array; float32 ones on the CPU without a copy, all others as a copy.

        The same operations in the same order as :func:`beam_inference.operators.quantize.quantize`, and the same bits.
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
            arrived = self._downloads.begin(array.clone() if encoding.value_range is None else array, values)

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


def load_torch_predictor(model: Network, inference: Inference, *, allow_pickle: bool) -> TorchPredictor:
    """Load a job's network; errors as :func:`beam_inference.predictors.load_predictor` says."""
    if inference.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "inference.device: cuda, but PyTorch sees no CUDA device on this machine "
            f"(torch {torch.__version__}). Use device: cpu, or a machine with a GPU and a CUDA build of PyTorch."
        )
    device = torch.device(
        f"cuda:{claimed_cuda_device(torch.cuda.device_count())}" if inference.device == "cuda" else "cpu"
    )
    if suffix_of(model) in CONVERTED_SUFFIXES:
        return _predictor(_of_file(model, inference), model, inference, device)
    forward, kind = load_module(model, allow_pickle=allow_pickle)
    parameters = None
    if kind == "module" and model.weights is None:
        parameters = parameters_sha256(forward)
        if parameters != parameters_sha256(load_module(model, allow_pickle=allow_pickle)[0]):
            raise ModelContractError(
                f"model.path {model.path} makes a network with other parameters at every call (random initial"
                "values), so every worker would have another. Give its trained weights as model.weights."
            )
    if kind == "export":
        _check_exported(forward, model, inference)
        program: Any = forward
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        forward = program.module()
    else:
        module: Any = forward
        module.eval()
        _set_batch_norm(module, model.batch_norm, scripted=kind == "torchscript")
        forward = module.to(device)
        if inference.engine == "torch" and kind == "module" and model.batch_norm == "running":
            with device_errors():
                forward = folded(forward, (1, *_shape(model, inference)[1:]), device)
        _lay_out(forward, _memory_format(model, inference))
    if inference.engine == "torch":
        if device.type == "cpu" and kind != "torchscript":
            forward = by_onednn(forward)
    else:
        try:
            with device_errors():
                forward = _converted(forward, model, inference, device)
        except DeviceOutOfMemory as error:
            raise EngineError(
                f"inference.engine: {inference.engine}: out of memory for a batch of {inference.batch_size}: {error}. "
                "Write a smaller inference.batch_size."
            ) from None
    return _predictor(forward, model, inference, device, parameters)


def _predictor(
    forward: Any, model: Network, inference: Inference, device: torch.device, parameters: str | None = None
) -> TorchPredictor:
    return TorchPredictor(
        forward,
        device,
        inference.precision,
        model.activation,
        model.dims,
        inference.threads or 1,
        _memory_format(model, inference),
        engine_description(model, inference, parameters),
    )


def _lay_out(module: torch.nn.Module, memory_format: torch.memory_format) -> None:
    """Bring the weights of convolutions, of as many axes as the format is of, into it."""
    axes = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(memory_format)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == axes:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)


def _memory_format(model: Network, inference: Inference) -> torch.memory_format:
    if inference.memory_format == "contiguous":
        return torch.contiguous_format
    return torch.channels_last if model.dims == 2 else torch.channels_last_3d


def _of_file(model: Network, inference: Inference) -> Forward:
    """A network that is in a file of an engine's own format."""
    if model.batch_norm == "batch":
        raise ModelContractError(
            f"{model.path} has BatchNorm as it was exported, which cannot be changed by "
            "model.batch_norm: batch. Remove that."
        )
    path, threads = existing_file(model.path, "model.path"), inference.threads or 1
    weights = None if model.weights is None else existing_file(model.weights, "model.weights")
    if inference.engine == "openvino":
        return per_shape(lambda shape: openvino_forward(path, shape, threads, weights), _shape(model, inference))
    return per_shape(lambda shape: onnxruntime_forward(path, shape, threads), _shape(model, inference))


def _converted(network: Any, model: Network, inference: Inference, device: torch.device) -> Forward:
    """A network of PyTorch's, run by ``inference.engine``."""
    threads = inference.threads or 1
    if inference.engine == "compile":
        torch.set_num_threads(threads)
        layout = _memory_format(model, inference)
        return per_shape(lambda shape: compiled_forward(network, shape, device, layout), _shape(model, inference))
    engine = openvino_forward if inference.engine == "openvino" else onnxruntime_forward
    return per_shape(lambda shape: engine(network, shape, threads), _shape(model, inference))


def _shape(model: Network, inference: Inference) -> tuple[int, ...]:
    """Of the job's batches."""
    patch = grown_shape(inference.patch_shape, model.crop_margin)
    return (inference.patches_per_call, model.input_channels, *patch[3 - model.dims :])


def _set_batch_norm(module: torch.nn.Module, statistics: str, *, scripted: bool) -> None:
    """Let BatchNorm layers use the statistics asked for, without touching the stored ones, all else in eval mode."""
    layers = [layer for layer in module.modules() if _is_batch_norm(layer)]
    if scripted:
        traced = _traced_batch_norm(module)
        fixed = " and ".join(sorted(traced))
        if traced and traced != {statistics}:
            raise ModelContractError(
                f"the TorchScript file was traced with BatchNorm using {fixed} statistics, which cannot be changed; "
                f"the job says model.batch_norm: {statistics}. Write batch_norm: {fixed}, or use a scripted file or "
                "a factory."
            )
    if statistics == "running":
        if any(getattr(layer, "running_mean", None) is None for layer in layers):
            raise ModelContractError(
                "the network has BatchNorm layers without stored statistics, which use those of the batch, whatever "
                "is in it; the job says model.batch_norm: running. Write batch_norm: batch."
            )
        return
    if not layers:
        raise ModelContractError(
            "the job says model.batch_norm: batch, but the network has no BatchNorm layer whose statistics could be "
            "chosen. Remove batch_norm; if the network calls batch_norm itself, its factory must choose."
        )
    for layer in layers:
        if scripted:
            layer.train()
        else:
            setattr(layer, "track_running_stats", False)  # noqa: B010  # typed as a tensor by torch's stubs
            layer.running_mean = layer.running_var = None  # type: ignore[assignment]


def _is_batch_norm(layer: Any) -> bool:
    return isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) or "BatchNorm" in getattr(
        layer, "original_name", ""
    )


def _traced_batch_norm(module: Any) -> set[str]:
    """The statistics, "running" or "batch", that a TorchScript file has fixed for BatchNorm layers."""
    fixed = set()
    graph = module.inlined_graph  # must outlive its nodes
    for node in graph.findAllNodes("aten::batch_norm", recurse=True):
        training = list(node.inputs())[5]
        if training.node().kind() == "prim::Constant":
            fixed.add("batch" if training.toIValue() else "running")
    return fixed


def _check_exported(program: Any, model: Network, inference: Inference) -> None:
    """Refuse job keys that contradict what a torch.export file has fixed: its batch size and its BatchNorm mode."""
    inputs = [
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in program.graph_signature.user_inputs
    ]
    batch = inputs[0][0] if inputs else None
    if isinstance(batch, int) and batch != inference.patches_per_call:
        raise ModelContractError(
            f"the torch.export file {model.path} takes batches of exactly {batch}; the job says inference.batch_size: "
            f"{inference.batch_size}. Write batch_size: {batch}, or export it with a dynamic batch dimension."
        )
    modes = {_exported_batch_norm(node) for node in program.graph.nodes} - {None}
    if modes != {model.batch_norm} and (modes or model.batch_norm == "batch"):
        raise ModelContractError(
            f"the torch.export file {model.path} has BatchNorm using {' and '.join(sorted(map(str, modes))) or 'no'} "
            f"statistics, which cannot be changed; the job says model.batch_norm: {model.batch_norm}."
        )


def _exported_batch_norm(node: Any) -> str | None:
    name = str(node.target) if node.op == "call_function" else ""
    if "batch_norm" not in name or "instance" in name:
        return None
    if "no_training" in name:
        return "running"
    return "batch" if any(argument is True for argument in node.args[5:6]) else "running"
