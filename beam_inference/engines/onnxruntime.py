"""Networks run by ONNX Runtime, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beam_inference.engines.conversion import converting, export_network
from beam_inference.engines.per_shape import Forward
from beam_inference.errors import EngineError


def onnxruntime_forward(source: Any, shape: tuple[int, ...], threads: int) -> Forward:
    """By ONNX Runtime.

    Raises:
        EngineError: ONNX Runtime or what exports to it is absent, or cannot convert the network.
    """
    with converting("onnxruntime"):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # its threads share cores with others
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        network = str(source) if isinstance(source, Path) else _as_onnx(source, shape)
        session = onnxruntime.InferenceSession(network, options, ["CPUExecutionProvider"])
        if len(session.get_outputs()) != 1:
            raise EngineError(f"the network has {len(session.get_outputs())} outputs; expected one")
        name = session.get_inputs()[0].name

    def forward(batch: Tensor) -> Tensor:
        (result,) = session.run(None, {name: batch.contiguous().numpy()})
        return torch.from_numpy(result)

    return forward


def _as_onnx(source: Any, shape: tuple[int, ...]) -> bytes:
    if isinstance(source, torch.jit.ScriptModule):
        raise EngineError(
            "a TorchScript network cannot be exported to ONNX; write engine: openvino or torch"
        )
    program = torch.onnx.export(export_network(source, shape), dynamo=True, verbose=False)
    if program is None:
        raise EngineError("PyTorch exported nothing")
    content: bytes = program.model_proto.SerializeToString()
    return content
