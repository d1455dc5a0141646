"""Networks that take the axes of a volume in another order than a job has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Transposed(torch.nn.Module):
    """A network that takes and gives the axes in another order than Z, Y, X."""

    def __init__(self, network: torch.nn.Module, order: Sequence[int]) -> None:
        super().__init__()
        self.network = network
        self.there = (0, 1, *(2 + axis for axis in order))
        self.back = (0, 1, *(2 + list(order).index(axis) for axis in range(3)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The network's answer, its axes Z, Y, X again."""
        answer: torch.Tensor = self.network(batch.permute(self.there))
        return answer.permute(self.back)
