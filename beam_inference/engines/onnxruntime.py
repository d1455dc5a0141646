"""The engine ``onnxruntime``: networks run by ONNX Runtime, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beam_inference.config.engines import Engine, LoadRequest
from beam_inference.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


def load(request: LoadRequest) -> Callable[[Tensor], Tensor]:
    """Load a network of PyTorch, or one in an ONNX file, as ONNX Runtime runs it.

    Raises:
        EngineError: ONNX Runtime or what exports to it is absent, or cannot convert the network.
    """
    import torch

    from beam_inference.engines.conversion import (
        check_one_input,
        check_one_output,
        quiet_conversion,
    )
    from beam_inference.engines.heads import pick_heads, place_of
    from beam_inference.engines.torch_heads import join_tensors

    source = request.network
    heads = request.model.heads or ()
    wanted: list[str] | None = None
    with quiet_conversion("onnxruntime"):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = request.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _FATAL  # what fails is raised, too
        # its threads share cores with others
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        network = (
            str(source)
            if isinstance(source, Path)
            else request.keep(lambda: _as_onnx(source, request.batch_shape))
        )
        # A file may hold a network of integers, whose products of 8 bits overflow on some CPUs.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        session = onnxruntime.InferenceSession(network, options, ["CPUExecutionProvider"])
        names = [each.name for each in session.get_outputs()]
        if isinstance(source, Path) and heads:
            listed = [[each] for each in names]
            wanted = [names[place_of(head, listed, str(source))] for head in heads]
        else:
            check_one_output(len(names))
        check_one_input(len(session.get_inputs()))
        taken = session.get_inputs()[0]
        name = taken.name
        dtype = _dtype_of(taken.type, request)
        _check_given([each.type for each in session.get_outputs()], request)

    def forward(batch: Tensor) -> Tensor:
        values = batch.contiguous().numpy().astype(dtype, copy=False)
        results = session.run(wanted, {name: values})
        if wanted is None:
            return torch.from_numpy(results[0])
        arrays = {head.key: result for head, result in zip(heads, results, strict=True)}
        return join_tensors(list(map(torch.from_numpy, pick_heads(arrays, heads))), heads)

    return forward


def _dtype_of(taken: str, request: LoadRequest) -> str:
    """The dtype that a network takes, by ONNX Runtime's name of it.

    Raises:
        EngineError: it takes no floats.
    """
    if taken not in _FLOATS:
        raise EngineError(
            f"{request.model.path} takes values of type {taken}, and is given normalised ones, of "
            "float32: they would be cut off. Export the network for float32, with what makes its "
            "integers of them inside."
        )
    return _FLOATS[taken]


def _check_given(types: Sequence[str], request: LoadRequest) -> None:
    """Refuse a network whose answers NumPy has no dtype for. Raises EngineError."""
    if "tensor(bfloat16)" in types:
        raise EngineError(
            f"{request.model.path} answers in bfloat16, which ONNX Runtime gives to nobody. Export "
            "the network with a cast to float32 at its end."
        )


_FLOATS = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}
"""Dtypes by ONNX Runtime's names."""


def _as_onnx(source: Any, shape: tuple[int, ...]) -> bytes:
    import torch

    from beam_inference.engines.conversion import export_network
    from beam_inference.engines.torch_heads import JoinedHeads

    is_joined_script = isinstance(source, JoinedHeads) and source.is_scripted
    if is_joined_script or isinstance(source, torch.jit.ScriptModule):
        raise EngineError(
            "a TorchScript network cannot be exported to ONNX; write engine: openvino or torch"
        )
    program = torch.onnx.export(export_network(source, shape), dynamo=True, verbose=False)
    if program is None:
        raise EngineError("PyTorch exported nothing")
    content: bytes = program.model_proto.SerializeToString()
    return content


_FATAL = 4

ENGINE = Engine(
    name="onnxruntime",
    package="onnxruntime",
    load=load,
    install="pip install 'beam-inference[onnxruntime]'",
    suffixes=(".onnx",),
    keeps_memory=True,
    joins_heads=True,
)
