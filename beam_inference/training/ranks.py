"""The processes of one training: alone, or several that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class Ranks:
    """This process among those of the training.

    Attributes:
        rank: its number.
        count: how many there are.
        local: its number on its machine.
    """

    rank: int = 0
    count: int = 1
    local: int = 0

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all ranks, without gradient."""
        total = values.detach().clone()
        if self.count > 1:
            distributed.all_reduce(total)
        return total


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the ranks that torchrun has started, if it has, and leave them in the end."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Ranks()
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(
            distributed.get_rank(),
            distributed.get_world_size(),
            int(os.environ.get("LOCAL_RANK", "0")),
        )
    finally:
        distributed.destroy_process_group()
