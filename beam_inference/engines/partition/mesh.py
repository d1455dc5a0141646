"""The processes that share a patch, and what passes between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from beam_inference.geometry.shares import (
    Box,
    Division,
    box_shape,
    intersect,
    is_empty,
    slices_in,
)

Addressed = tuple[int, Tensor]
"""The number of a member, and what it is sent or sends."""


@dataclass
class Mesh:
    """A block of processes, each with the part of every array that lies at its place.

    Attributes:
        shape: processes along each axis, ZYX; numbered in C order.
        rank: the number of this one.
        group: the process group of ``torch.distributed`` that has just these processes. It need
            not be the default group: of several meshes, each has its own.
        meshes: number of meshes that train together, with equal shares of each batch.
        everybody: the process group of the members of all of them; None if there is one mesh.
        layers: names of the modules that are computing now, the outermost first: for messages.
        has_gradients: whether gradients are kept of what is computed now.
        refusal: of an operation that a network called past the functions of PyTorch.
    """

    shape: tuple[int, int, int]
    rank: int
    group: Any
    meshes: int = 1
    everybody: Any = None
    layers: list[str] = field(default_factory=list)
    has_gradients: bool = False
    refusal: Exception | None = None

    @property
    def size(self) -> int:
        """Number of processes."""
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[int, int, int]:
        """Number of this process along each axis, ZYX."""
        _, height, width = self.shape
        rest, x = divmod(self.rank, width)
        z, y = divmod(rest, height)
        return z, y, x

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Raise the refusal of an operation, of which TorchScript makes another error."""
        self.refusal = None
        try:
            yield
        except Exception:
            if self.refusal is None:
                raise
            raise self.refusal from None

    def exchange(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed]
    ) -> Callable[[], None]:
        """Begin to send tensors, and to receive into others.

        Between two members messages arrive in the order in which they were sent.

        Returns:
            A function that waits until all have been sent and received.
        """
        # what is sent must live until it is sent
        kept = [(peer, tensor.contiguous()) for peer, tensor in sends]
        works = [self.group.send([tensor], peer, 0) for peer, tensor in kept]
        works += [self.group.recv([tensor], peer, 0) for peer, tensor in receives]

        def wait() -> None:
            for work in works:
                work.wait()
            kept.clear()

        return wait

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all members, in place."""
        self.group.allreduce([values]).wait()
        return values

    def add_up_batch(self, values: Tensor) -> Tensor:
        """The sum over the members of all meshes that train together, in place."""
        group = self.group if self.everybody is None else self.everybody
        group.allreduce([values]).wait()
        return values


@dataclass(frozen=True)
class Piece:
    """Part of an array: its box in the whole, and its values (N, C, *box)."""

    box: Box
    values: Tensor


@dataclass(frozen=True)
class FetchPlan:
    """What a member sends and receives, so that it has what it needs of a divided array.

    Attributes:
        mesh: between whom.
        held: what this member has.
        sends: to whom, and which box.
        receives: from whom, and which box.
    """

    mesh: Mesh
    held: Box
    sends: list[tuple[int, Box]]
    receives: list[tuple[int, Box]]

    @property
    def is_idle(self) -> bool:
        """Whether this member neither sends nor receives."""
        return not self.sends and not self.receives


def plan_fetch(mesh: Mesh, division: Division, needs: Sequence[Box]) -> FetchPlan:
    """Plan an exchange after which every member has what it needs.

    Args:
        mesh: the members.
        division: who holds what.
        needs: for every member, the box that it needs; what lies beyond the array does not count.
    """
    boxes = division.boxes
    own = boxes[mesh.rank]
    sends = []
    receives = []
    for peer, held in enumerate(boxes):
        if peer == mesh.rank:
            continue
        if not is_empty(needs[peer]) and (box := intersect(needs[peer], own)):
            sends.append((peer, box))
        if not is_empty(needs[mesh.rank]) and (box := intersect(needs[mesh.rank], held)):
            receives.append((peer, box))
    return FetchPlan(mesh, own, sends, receives)


def _part(values: Tensor, box: Box, frame: Box) -> Tensor:
    return values[slices_in(box, frame)]


def begin_fetch(plan: FetchPlan, values: Tensor) -> Callable[[], list[Piece]]:
    """Begin an exchange; what is returned waits for the pieces. No gradient passes through it."""
    pieces = [
        Piece(box, values.new_empty((*values.shape[:2], *box_shape(box))))
        for _, box in plan.receives
    ]
    wait = plan.mesh.exchange(
        [(peer, _part(values, box, plan.held)) for peer, box in plan.sends],
        [(peer, piece.values) for (peer, _), piece in zip(plan.receives, pieces, strict=True)],
    )

    def arrived() -> list[Piece]:
        wait()
        return pieces

    return arrived


class _Fetch(torch.autograd.Function):
    """An exchange; its backward pass sends gradients back to whose voxels they are of."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, plan: FetchPlan) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.shape = values.shape
        ctx.set_materialize_grads(True)
        # The values themselves come out again: a member that only sends has gradients to receive.
        return (values.view_as(values), *(piece.values for piece in begin_fetch(plan, values)()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        plan: FetchPlan = ctx.plan
        gradient = gradients[0].clone()
        arriving = [
            (peer, gradient.new_empty((*ctx.shape[:2], *box_shape(box))))
            for peer, box in plan.sends
        ]
        outgoing = [
            (peer, each) for (peer, _), each in zip(plan.receives, gradients[1:], strict=True)
        ]
        plan.mesh.exchange(outgoing, arriving)()
        for (_, box), (_, values) in zip(plan.sends, arriving, strict=True):
            _part(gradient, box, plan.held).add_(values)
        return gradient, None


class _Connect(torch.autograd.Function):
    """A tensor as it is; backward it also leads to another one, whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, values: Tensor) -> Tensor:
        ctx.shape = values.shape
        return result.clone()  # networks may change no view of it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_zeros(ctx.shape)


def connect(result: Tensor, values: Tensor) -> Tensor:
    """Let gradients pass back, as zeros, from what is made of values but not computed from them.

    All members must take part in the backward pass of each exchange before.
    """
    if not needs_gradient(values):
        return result
    connected: Tensor = _Connect.apply(result, values)  # type: ignore[no-untyped-call]
    return connected


def needs_gradient(values: Tensor) -> bool:
    """Whether a gradient is to pass through what is made of these values."""
    return torch.is_grad_enabled() and values.requires_grad


def fetch(plan: FetchPlan, values: Tensor) -> list[Piece]:
    """Exchange: the member's own piece and those of others; gradients pass through it."""
    if plan.is_idle:
        return [Piece(plan.held, values)]
    if not needs_gradient(values):
        return [Piece(plan.held, values), *begin_fetch(plan, values)()]
    own, *others = _Fetch.apply(values, plan)  # type: ignore[no-untyped-call]
    pieces = [Piece(box, each) for (_, box), each in zip(plan.receives, others, strict=True)]
    return [Piece(plan.held, own), *pieces]


def assemble(pieces: Sequence[Piece], box: Box, fill: float = 0) -> Tensor:
    """One tensor of a box, from pieces; what none of them has is ``fill``."""
    own = pieces[0]
    if own.box == box:
        return own.values
    if all(a <= c and d <= b for (a, b), (c, d) in zip(own.box, box, strict=True)):
        return _part(own.values, box, own.box)
    whole = own.values.new_full((*own.values.shape[:2], *box_shape(box)), fill)
    is_filled = True
    for piece in pieces:
        if common := intersect(piece.box, box):
            _part(whole, common, box).copy_(_part(piece.values, common, piece.box))
            is_filled = False
    return connect(whole, own.values) if is_filled else whole


class _AddUp(torch.autograd.Function):
    """The sum over the members, which all of them use: so their gradients add up, too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return mesh.add_up(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.mesh.add_up(gradients[0].clone()), None


def add_up(values: Tensor, mesh: Mesh) -> Tensor:
    """The sum over the members; gradients pass through it."""
    if not needs_gradient(values):
        return mesh.add_up(values.clone())
    total: Tensor = _AddUp.apply(values, mesh)  # type: ignore[no-untyped-call]
    return total
