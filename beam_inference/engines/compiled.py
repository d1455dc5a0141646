"""Networks compiled by torch.compile."""

from __future__ import annotations

from typing import Any

import torch

from beam_inference.engines.conversion import converting
from beam_inference.engines.per_shape import Forward
from beam_inference.errors import EngineError


def compiled_forward(
    source: Any, shape: tuple[int, ...], device: torch.device, memory_format: torch.memory_format
) -> Forward:
    """By torch.compile, with the weights as constants on a CPU; it needs a C++ compiler, and most of a minute.

    Raises:
        EngineError: it cannot compile the network.
    """
    if isinstance(source, torch.jit.ScriptModule):
        raise EngineError(
            "a TorchScript network cannot be compiled; write engine: openvino or torch"
        )
    with converting("torch.compile"):
        from torch._inductor import config

        config.freezing = device.type == "cpu"
        compiled: Forward = torch.compile(source, dynamic=False)
        with torch.inference_mode():
            compiled(torch.zeros(shape, device=device).contiguous(memory_format=memory_format))
    return compiled
