"""The processes of one training: alone, or several that torchrun has started.

Ranks are numbered so that neighbours share samples: of 4 ranks and a partition of [1, 1, 2], ranks
0 and 1 divide the first samples of a step between them, and ranks 2 and 3 the others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from beam_inference.engines.partition.mesh import Mesh, add_up
from beam_inference.errors import ConfigError, WorkerFault
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.zyx import Zyx


@dataclass(frozen=True)
class Ranks:
    """This process among those of the training.

    Attributes:
        rank: its number.
        count: how many there are.
        local: its number on its machine.
        mesh: those that divide each of their samples between them; None if this one has samples
            of its own.
    """

    rank: int = 0
    count: int = 1
    local: int = 0
    mesh: Mesh | None = None

    @property
    def everybody(self) -> Mesh:
        """All ranks, without regard to how they share samples."""
        group = distributed.group.WORLD if self.count > 1 else None
        return Mesh((1, 1, self.count), self.rank, group)

    @property
    def teams(self) -> int:
        """How many groups of ranks there are that have samples of their own."""
        return self.count if self.mesh is None else self.count // self.mesh.size

    @property
    def team(self) -> int:
        """The number of this rank's group."""
        return self.rank if self.mesh is None else self.rank // self.mesh.size

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all ranks, without gradient."""
        total = values.detach().clone()
        if self.count > 1:
            distributed.all_reduce(total)
        return total

    def gather(self, value: int) -> list[int]:
        """The values of all ranks, in their order; all must call this."""
        values = [value] * self.count
        if self.count > 1:
            distributed.all_gather_object(values, value)
        return values

    def add_up_patch(self, values: Tensor) -> Tensor:
        """The sum over the ranks that share a patch, through which gradients pass."""
        return values if self.mesh is None else add_up(values, self.mesh)


@contextmanager
def join_ranks(device: torch.device, partition: Zyx) -> Iterator[Ranks]:
    """Join the ranks that torchrun has started, if it has, and leave them in the end.

    Args:
        device: that ranks compute on.
        partition: ranks that share a patch, along z, y and x.

    Raises:
        ConfigError: there are not as many ranks as share patches, or a multiple of them; or more
            ranks on this machine than GPUs, where ranks compute on these.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    members = math.prod(partition)
    if count % members:
        raise ConfigError(
            f"partition is {list(partition)}: {members} ranks share each patch, and there are "
            f"{count}. Start a multiple of {members}: torchrun --nproc-per-node={members} "
            "-m beam_inference train …"
        )
    if count == 1:
        yield Ranks()
        return
    if device.type == "cuda":
        _check_gpus()
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        rank = distributed.get_rank()
        mesh = _join_mesh(partition, rank, count) if members > 1 else None
        yield Ranks(rank, count, int(os.environ.get("LOCAL_RANK", "0")), mesh)
    finally:
        distributed.destroy_process_group()


def _check_gpus() -> None:
    """Compare the ranks of this machine with its GPUs, before any waits for another one.

    Raises:
        ConfigError: there are more ranks.
    """
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if ranks > gpus:
        raise ConfigError(
            f"each rank takes a GPU, and there are {ranks} ranks on this machine, of whose GPUs "
            f"PyTorch sees {gpus}. Start as many ranks: torchrun --nproc-per-node={gpus} "
            "-m beam_inference train …"
        )


def _join_mesh(partition: Zyx, rank: int, count: int) -> Mesh:
    """Join the mesh of this rank; all ranks must take part in making every mesh."""
    members = math.prod(partition)
    groups = [
        distributed.new_group(range(first, first + members)) for first in range(0, count, members)
    ]
    meshes = len(groups)
    everybody = distributed.new_group() if meshes > 1 else None
    return Mesh(partition, rank % members, groups[rank // members], meshes, everybody)


class LostRank(WorkerFault):
    """Another rank of the training has ended."""


@contextmanager
def lost_ranks_told() -> Iterator[None]:
    """Turn errors of messages between ranks into one that says what they mean.

    Raises:
        LostRank: a message to or from another rank failed.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        raise LostRank(
            "another rank of this training has ended: its own message says why. Give the command "
            f"again to go on from the last checkpoint ({describe_error(error)})"
        ) from None
