"""The engine ``onnxruntime``: networks run by ONNX Runtime, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
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

    from beam_inference.engines.conversion import check_one_output, quiet_conversion
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
        # its threads share cores with others
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        network = (
            str(source)
            if isinstance(source, Path)
            else request.keep(lambda: _as_onnx(source, request.batch_shape))
        )
        session = onnxruntime.InferenceSession(network, options, ["CPUExecutionProvider"])
        names = [each.name for each in session.get_outputs()]
        if isinstance(source, Path) and heads:
            listed = [[each] for each in names]
            wanted = [names[place_of(head, listed, str(source))] for head in heads]
        else:
            check_one_output(len(names))
        name = session.get_inputs()[0].name

    def forward(batch: Tensor) -> Tensor:
        results = session.run(wanted, {name: batch.contiguous().numpy()})
        if wanted is None:
            return torch.from_numpy(results[0])
        arrays = {head.key: result for head, result in zip(heads, results, strict=True)}
        return join_tensors(list(map(torch.from_numpy, pick_heads(arrays, heads))), heads)

    return forward


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


ENGINE = Engine(
    name="onnxruntime",
    package="onnxruntime",
    load=load,
    install="pip install 'beam-inference[onnxruntime]'",
    suffixes=(".onnx",),
    keeps_memory=True,
    joins_heads=True,
)
