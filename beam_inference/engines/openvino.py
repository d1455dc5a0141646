"""The engine ``openvino``: networks run by OpenVINO, on the CPU.

In precision int8, NNCF makes a network of 8-bit integers: see
:mod:`beam_inference.engines.openvino_int8`.
"""

from __future__ import annotations

import io
import math
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beam_inference.config.engines import Engine, LoadRequest, make_anew
from beam_inference.config.heads import Head
from beam_inference.errors import EngineError
from beam_inference.foreign_text import shorten_text
from beam_inference.models.onnx_file import check_operators
from beam_inference.models.openvino_file import check_structure

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from openvino import Core, Model
    from torch import Tensor

_LENGTH_BYTES = 8
_GIVEN_TYPES = frozenset({"f16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "boolean"})
"""Types that NumPy and PyTorch both have."""

_core_lock = threading.Lock()


def load(request: LoadRequest) -> Callable[[Tensor], Tensor]:
    """Load the forward pass of a network of PyTorch, or of one in a file.

    Raises:
        EngineError: OpenVINO is absent, or cannot convert the network.
    """
    return openvino_forward(
        request.network,
        request.batch_shape,
        request.threads,
        request.weights,
        request.keep,
        request.quantized,
        request.model.heads or (),
    )


def quantize(request: LoadRequest, samples: Sequence[NDArray[np.float32]]) -> bytes:
    """Make a network of 8-bit integers; see :attr:`beam_inference.config.engines.Engine.quantize`.

    Raises:
        EngineError: OpenVINO or NNCF is absent, or cannot convert the network.
    """
    from beam_inference.engines.conversion import quiet_conversion

    with quiet_conversion("openvino"):
        core = _open_core()
        network = _read_network(
            core, request.network, request.batch_shape, request.weights, request.keep
        )
        from beam_inference.engines.openvino_int8 import quantize_network

        # NNCF goes through a network by the names of its layers
        named = core.read_model(*_name_by_place(network))
        return _join(*_name_by_place(quantize_network(named, samples)))


def openvino_forward(
    source: Any,
    shape: tuple[int, ...],
    threads: int,
    weights: Path | None = None,
    keep: Callable[[Callable[[], bytes]], bytes] = make_anew,
    quantized: bytes | None = None,
    heads: Sequence[Head] = (),
) -> Callable[[Tensor], Tensor]:
    """Convert a network for OpenVINO, in float32.

    Args:
        source: a network of PyTorch, or the path of an ONNX file or of a file of OpenVINO's own.
        shape: of its batches.
        threads: that it may use. OpenVINO would bind them to cores, the same ones in every process,
            which would then wait for each other; here it does not.
        weights: the file that holds the weights of ``source``, if that is a file of OpenVINO's.
        keep: see :attr:`beam_inference.config.engines.LoadRequest.keep`.
        quantized: what :func:`quantize` has made of the network, to be run in its place.
        heads: outputs of a file that are joined; none if it has one.

    Raises:
        EngineError: OpenVINO is absent, or cannot convert the network.
    """
    import torch

    from beam_inference.engines.conversion import check_one_output, quiet_conversion
    from beam_inference.engines.heads import pick_heads, place_of
    from beam_inference.engines.torch_heads import join_tensors

    places: list[int] = []
    with quiet_conversion("openvino"):
        core = _open_core()
        if quantized is None:
            network = _read_network(core, source, shape, weights, keep)
        else:
            network = _read_quantized(core, quantized, shape)
        name = source if isinstance(source, Path) else "the network"
        network = _take_and_give_floats(network, name)
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        if quantized is None:
            # A file may hold a network of integers, whose products of 8 bits overflow on some CPUs.
            settings["LP_TRANSFORMS_MODE"] = "NO"
        compiled = core.compile_model(network, "CPU", settings)
        if isinstance(source, Path) and heads:
            names = [sorted(each.get_names()) for each in compiled.outputs]
            places = [place_of(head, names, str(source)) for head in heads]
        else:
            check_one_output(len(compiled.outputs))
        request = compiled.create_infer_request()

    def forward(batch: Tensor) -> Tensor:
        # With one thread, infer() of OpenVINO 2026.4.1 is silent on what fails in the network, and
        # gives what memory held.
        request.start_async([batch.contiguous().numpy()], share_inputs=True)
        request.wait()
        if not places:
            return _mark_lost(batch, torch.from_numpy(request.get_output_tensor(0).data))
        arrays = {
            head.key: request.get_output_tensor(n).data
            for head, n in zip(heads, places, strict=True)
        }
        answers = join_tensors(list(map(torch.from_numpy, pick_heads(arrays, heads))), heads)
        return _mark_lost(batch, answers)

    return forward


def _mark_lost(batch: Tensor, answers: Tensor) -> Tensor:
    """Make NaN of the answers to patches that hold NaN or infinite values.

    OpenVINO's activations and poolings make numbers of them (2026.4.1), and nobody would see that.
    """
    least, largest = batch.flatten(1).aminmax(dim=1)
    is_lost = ~(least.isfinite() & largest.isfinite())
    if not is_lost.any():
        return answers
    marked = answers.float()
    marked[is_lost] = math.nan
    return marked


def _open_core() -> Core:
    """Return the one core of this process.

    OpenVINO gives the thread that makes a core a stack for signal handlers, and takes it back from
    whichever thread lets the core go. Were that another thread, the next signal (Ctrl-C, a
    scheduler's SIGTERM) would end the process by a segmentation fault. So ours is never let go.
    """
    with _core_lock:
        return _make_core()


@cache
def _make_core() -> Core:
    # Its telemetry forks this process and calls home at every conversion; without the package
    # it goes without.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    core = openvino.Core()
    # Weights that are mapped from their file change with it, also while the network runs.
    core.set_property({"ENABLE_MMAP": False})
    return core


def _read_network(
    core: Core,
    source: Any,
    shape: tuple[int, ...],
    weights: Path | None,
    keep: Callable[[Callable[[], bytes]], bytes],
) -> Model:
    """Read or convert a network in float32; see :func:`openvino_forward`."""
    from beam_inference.engines.conversion import check_one_input
    from beam_inference.engines.openvino_norms import replace_long_sums
    from beam_inference.engines.openvino_operations import check_operations

    if isinstance(source, Path):
        if source.suffix != ".xml":
            check_operators(source)
        network = core.read_model(source, *([] if weights is None else [weights]))
        check_one_input(len(network.inputs))
        _check_stateless(network, source)
        _check_extent(network, shape, source)
        _reshape(network, shape, source)
        check_operations(network, source)
        return replace_long_sums(network)
    # Kept or not, the network is read from OpenVINO's own form, so that bits are the same.
    network = core.read_model(*_unpack(keep(lambda: _pack(_convert(source, shape)))))
    check_operations(network, "the network")
    return network


def _read_quantized(core: Core, quantized: bytes, shape: tuple[int, ...]) -> Model:
    """Read a network of integers, which lay where others may have written.

    Raises:
        ModelContractError: it is no network as OpenVINO saves it, or draws random numbers.
        EngineError: it keeps a state, or takes other batches.
    """
    from beam_inference.engines.conversion import check_one_input
    from beam_inference.engines.openvino_operations import check_operations

    name = "the network of integers in the state folder"
    structure, constants = _unpack(quantized)
    check_structure(io.BytesIO(structure), name)
    network = core.read_model(structure, constants)
    check_one_input(len(network.inputs))
    _check_stateless(network, name)
    stated = network.inputs[0].get_partial_shape()
    if stated.is_dynamic or list(stated.get_shape()) != list(shape):
        raise EngineError(
            f"{name} is for batches of the shape {stated.to_string()}, and gets {list(shape)} "
            "(batch, channels, z, y, x; crop margin included): it is another job's"
        )
    check_operations(network, name)
    return network


def _take_and_give_floats(network: Model, name: Path | str) -> Model:
    """Refuse a network that takes no floats; have it give what NumPy can tell.

    OpenVINO cuts values off where a network takes integers, and NumPy has no bfloat16.

    Raises:
        EngineError: it takes others.
    """
    import openvino

    taken = {each.get_element_type().get_type_name() for each in network.inputs}
    others = sorted(taken - {"f16", "f32", "f64"})
    if others:
        raise EngineError(
            f"{name} takes values of type {others[0]}, and is given normalised ones, of float32: "
            "they would be cut off. Export the network for float32, with what makes its integers "
            "of them inside."
        )
    given = [each.get_element_type().get_type_name() for each in network.outputs]
    if all(each in _GIVEN_TYPES for each in given):
        return network
    conversion = openvino.preprocess.PrePostProcessor(network)
    for number, each in enumerate(given):
        if each not in _GIVEN_TYPES:
            conversion.output(number).tensor().set_element_type(openvino.Type.f32)
    converted: Model = conversion.build()
    return converted


def _check_stateless(network: Model, name: Path | str) -> None:
    """Refuse a network that keeps something from one batch to the next.

    Raises:
        EngineError: it does.
    """
    states = [each.get_info().variable_id for each in network.get_variables()]
    if states:
        raise EngineError(
            f"{name} keeps {shorten_text(', '.join(states))} from one batch to the next: its "
            "results would depend on the order in which patches are computed. Export the network "
            "without state."
        )


def _check_extent(network: Model, shape: tuple[int, ...], name: Path | str) -> None:
    """Refuse a network of a file that is for patches of another extent.

    OpenVINO would give it the extent that is wanted, and leave constants of the former one in it.

    Raises:
        EngineError: it is.
    """
    stated = network.inputs[0].get_partial_shape()
    if stated.rank.is_dynamic or len(stated) != len(shape):
        return
    extent = [dimension.get_length() if dimension.is_static else None for dimension in stated][2:]
    if any(found not in (None, wanted) for found, wanted in zip(extent, shape[2:], strict=True)):
        raise EngineError(
            f"{name} was exported for patches of {stated.to_string()}, and gets {list(shape)} "
            "(batch, channels, z, y, x; crop margin included): write an inference.patch_shape of "
            "that extent, or export it for any"
        )


def _reshape(network: Model, shape: tuple[int, ...], name: Path) -> None:
    """Give a network of a file the shape of a job's batches.

    Raises:
        EngineError: it is for batches of another number of patches, which its constants hold.
    """
    stated = network.inputs[0].get_partial_shape()
    try:
        network.reshape(list(shape))
    except RuntimeError:
        if stated.rank.is_dynamic or stated[0].is_dynamic or stated[0].get_length() == shape[0]:
            raise
        patches = stated[0].get_length()
        raise EngineError(
            f"{name} was exported for batches of {patches}, and gets {shape[0]}: write "
            f"inference.batch_size: {patches}, or export it for any (for 1 in precision: int8, "
            "which is calibrated on one patch at a time)"
        ) from None


def _convert(source: Any, shape: tuple[int, ...]) -> Model:
    """Convert a network of PyTorch."""
    import openvino
    import torch

    from beam_inference.engines.conversion import export_network
    from beam_inference.engines.openvino_norms import replace_long_sums
    from beam_inference.engines.torch_heads import JoinedHeads

    example = torch.zeros(shape, dtype=torch.float32, device="cpu")
    if isinstance(source, JoinedHeads) and source.is_scripted:
        source = torch.jit.trace(  # type: ignore[no-untyped-call]
            source, example, check_trace=False
        )
    is_script = isinstance(source, torch.jit.ScriptModule)
    graph = source if is_script else export_network(source, shape)
    network = openvino.convert_model(graph, example_input=example)
    network.reshape(list(shape))
    return replace_long_sums(network)


def _pack(network: Model) -> bytes:
    """The two files of a network in OpenVINO's own form, with the length of the first before it."""
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        structure = Path(folder) / "network.xml"
        weights = Path(folder) / "network.bin"
        openvino.serialize(network, structure, weights)
        return _join(structure.read_bytes(), weights.read_bytes())


def _name_by_place(network: Model) -> tuple[bytes, bytes]:
    """The two files of a network whose layers are named by their numbers."""
    from beam_inference.engines.openvino_int8 import name_by_place

    structure, constants = _unpack(_pack(network))
    return name_by_place(structure), constants


def _join(structure: bytes, constants: bytes) -> bytes:
    return len(structure).to_bytes(_LENGTH_BYTES) + structure + constants


def _unpack(content: bytes) -> tuple[bytes, bytes]:
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES])
    return content[_LENGTH_BYTES:start], content[start:]


ENGINE = Engine(
    name="openvino",
    package="openvino",
    load=load,
    install="pip install 'beam-inference[openvino]'",
    suffixes=(".onnx", ".xml"),
    precisions=("float32", "int8"),
    keeps_memory=True,
    auto_rank=50,
    quantize=quantize,
    joins_heads=True,
)
