"""Networks of PyTorch that return several tensors, as modules that return one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from beam_inference.config.heads import Head
from beam_inference.engines.heads import pick_heads
from beam_inference.errors import ModelContractError


class JoinedHeads(torch.nn.Module):
    """A network whose heads are joined as channels, in float32.

    Args:
        network: returns a tuple, a list or a dict of tensors (N, C, …).
        heads: those that are joined, in this order.
    """

    def __init__(self, network: Any, heads: Sequence[Head]) -> None:
        super().__init__()
        self.network = network
        self._heads = list(heads)
        self.training = False  # as the network, which need not allow to be told so

    def forward(self, batch: Tensor) -> Tensor:
        """Run the network, and join what it returns."""
        return join_tensors(pick_heads(self.network(batch), self._heads), self._heads)

    @property
    def is_scripted(self) -> bool:
        """Whether the network is one of TorchScript."""
        return isinstance(self.network, torch.jit.ScriptModule)


def join_tensors(tensors: Sequence[Any], heads: Sequence[Head]) -> Tensor:
    """Join tensors (N, C, …) as channels, in float32.

    Raises:
        ModelContractError: one of them is no real tensor.
    """
    for tensor, head in zip(tensors, heads, strict=True):
        if not isinstance(tensor, Tensor) or tensor.is_complex():
            raise ModelContractError(
                f"the head {head.key} of the network is a {type(tensor).__name__}; expected a real "
                "tensor (batch, channels, z, y, x)"
            )
    return torch.cat([tensor.float() for tensor in tensors], 1)
