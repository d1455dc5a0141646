"""The engine ``compile``: networks compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beam_inference.config.engines import Engine, LoadRequest
from beam_inference.errors import EngineError


def load(request: LoadRequest) -> Callable[[Any], Any]:
    """Compile a network, with its weights as constants on a CPU.

    It needs a C++ compiler, and most of a minute.

    Raises:
        EngineError: the network cannot be compiled.
    """
    import torch

    from beam_inference.engines.conversion import quiet_conversion
    from beam_inference.engines.torch_heads import JoinedHeads
    from beam_inference.engines.torch_network import lay_out, memory_format_of

    source = request.network
    lay_out(source, request)
    torch.set_num_threads(request.threads)
    is_joined_script = isinstance(source, JoinedHeads) and source.is_scripted
    if is_joined_script or isinstance(source, torch.jit.ScriptModule):
        raise EngineError(
            "a TorchScript network cannot be compiled; write engine: openvino or torch"
        )
    with quiet_conversion("torch.compile"):
        from torch._inductor import config

        config.freezing = request.device == "cpu"
        compiled: Callable[[Any], Any] = torch.compile(source, dynamic=False)
        batch = torch.zeros(request.batch_shape, device=request.device)
        with torch.no_grad():
            compiled(batch.contiguous(memory_format=memory_format_of(request)))
    return compiled


ENGINE = Engine(
    name="compile",
    package="torch",
    load=load,
    install="pip install torch",
    devices=("cpu", "cuda"),
    precisions=("float32", "tf32", "bfloat16", "float16"),
    memory_formats=("contiguous", "channels_last"),
)
