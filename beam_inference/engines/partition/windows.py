"""Convolutions and pools of divided arrays: what moves a window over its input.

Without gradients, each member computes its outputs while the halos are still on their way, as if
nothing lay beyond its part; then it computes those near the cuts again, of which that is not true.
So there is no second, larger copy of the input, and no wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from beam_inference.engines.partition.mesh import (
    Piece,
    assemble,
    begin_fetch,
    fetch,
    needs_gradient,
    plan_fetch,
)
from beam_inference.engines.partition.part import Part, connect_empty, gather_box
from beam_inference.errors import ModelContractError
from beam_inference.geometry.shares import (
    Box,
    Division,
    TransposedWindow,
    Window,
    box_shape,
    is_empty,
    slices_in,
)

Windows = Sequence[Window]
"""A window for each axis."""

LocalConvolution = Callable[[Tensor, tuple[int, ...]], Tensor]
"""Convolves an array with so much padding on both sides of each axis."""


def out_division(division: Division, windows: Windows) -> Division:
    """How the outputs of windows are divided.

    Raises:
        ModelContractError: the input is smaller than a window.
    """
    if any(w.out_length(n) < 1 for w, n in zip(windows, division.shape, strict=True)):
        raise ModelContractError(f"an input of {list(division.shape)} smaller than the window")
    return Division(tuple(w.out_cuts(cuts) for w, cuts in zip(windows, division.cuts, strict=True)))


def _seen(windows: Windows, outputs: Box) -> Box:
    return tuple(w.sees(interval) for w, interval in zip(windows, outputs, strict=True))


def convolve(part: Part, windows: Windows, channels: int, local: LocalConvolution) -> Part:
    """Convolve a divided array.

    Args:
        part: the input.
        windows: of the convolution.
        channels: of the output.
        local: the same convolution of an array that is not divided.
    """
    division = out_division(part.division, windows)
    result = replace(part, division=division)
    outputs = division.boxes
    seen = [_seen(windows, box) for box in outputs]
    own = outputs[part.mesh.rank]
    margins = _margins(part, windows, own)
    if margins is None or needs_gradient(part.values):
        pieces = fetch(plan_fetch(part.mesh, part.division, seen), part.values)
        if is_empty(own):
            values = pieces[0].values
            empty = connect_empty(values, box_shape(own), channels)
            kernel = [w.reach + 1 for w in windows]
            none = local(values.new_zeros((0, values.shape[1], *kernel)), (0, 0, 0))
            return result.with_values(empty + none.sum())  # weights have gradients everywhere
        box = seen[part.mesh.rank]
        with _pieces_kept(pieces, box) as values:
            return result.with_values(local(values, (0, 0, 0)))
    arrived = begin_fetch(plan_fetch(part.mesh, part.division, seen), part.values)
    values = local(part.values, margins)
    pieces = [Piece(part.box, part.values), *arrived()]
    for shell in shells(own, _inner(part, windows, own)):
        near = assemble(pieces, _seen(windows, shell))
        values[slices_in(shell, own)] = local(near, (0, 0, 0))
    return result.with_values(values)


@contextmanager
def _pieces_kept(pieces: Sequence[Piece], box: Box) -> Iterator[Tensor]:
    """Assemble a box; for gradients not it is kept, but the pieces, of which the others are small.

    So a convolution keeps no copy of what the layer before it keeps anyway.

    Raises:
        RuntimeError: in the backward pass, as PyTorch would: the values were changed in place.
    """
    whole = assemble(pieces, box)
    own = pieces[0].values.detach()
    if not torch.is_grad_enabled() or whole.data_ptr() == own.data_ptr():
        yield whole  # nothing is kept, or nothing was copied
        return
    kept = [Piece(pieces[0].box, own)]
    kept += [Piece(each.box, each.values.detach()) for each in pieces[1:]]
    version = own._version

    def pack(saved: Tensor) -> Tensor | None:
        return None if saved.data_ptr() == whole.data_ptr() else saved

    def unpack(saved: Tensor | None) -> Tensor:
        if saved is not None:
            return saved
        if own._version != version:
            raise RuntimeError("the input of a convolution was changed in place after it")
        return assemble(kept, box)

    with saved_tensors_hooks(pack, unpack):
        yield whole


def _margins(part: Part, windows: Windows, own: Box) -> tuple[int, ...] | None:
    """Padding with which the member's input alone gives as many outputs as it must; else None."""
    if is_empty(own) or is_empty(part.box):
        return None
    margins = []
    for window, (start, stop), (first, last) in zip(windows, part.box, own, strict=True):
        margin = start - window.sees((first, last))[0]
        room = stop - start + 2 * margin - window.reach - 1
        if margin < 0 or room < 0 or room // window.stride + 1 != last - first:
            return None
        margins.append(margin)
    return tuple(margins)


def _inner(part: Part, windows: Windows, own: Box) -> Box:
    return tuple(
        w.inner(outputs, held, n)
        for w, outputs, held, n in zip(windows, own, part.box, part.division.shape, strict=True)
    )


def shells(outer: Box, inner: Box) -> list[Box]:
    """Boxes that cover what lies in one box and not in another; they do not overlap."""
    found = []
    rest = list(outer)
    for axis, ((start, stop), (first, last)) in enumerate(zip(outer, inner, strict=True)):
        for interval in ((start, first), (last, stop)):
            box = (*rest[:axis], interval, *rest[axis + 1 :])
            if not is_empty(box):
                found.append(box)
        rest[axis] = (first, last)
    return found


def convolve_transposed(
    part: Part,
    windows: Sequence[TransposedWindow],
    channels: int,
    local: Callable[[Tensor, tuple[int, ...], tuple[int, ...]], Tensor],
) -> Part:
    """Convolve a divided array by the transpose of a convolution.

    Args:
        part: the input.
        windows: of the convolution.
        channels: of the output.
        local: the same of an array that is not divided, with other padding and output padding.
    """
    lengths = part.division.shape
    division = Division(
        tuple(w.out_cuts(cuts) for w, cuts in zip(windows, part.division.cuts, strict=True))
    )
    result = replace(part, division=division)
    needs = [
        tuple(w.sees(o, n) for w, o, n in zip(windows, box, lengths, strict=True))
        for box in division.boxes
    ]
    own = division.boxes[part.mesh.rank]
    values = gather_box(part, needs)
    if is_empty(own):
        empty = connect_empty(values, box_shape(own), channels)
        none = local(values.new_zeros((0, values.shape[1], 1, 1, 1)), (0, 0, 0), (0, 0, 0))
        return result.with_values(empty + none.sum())  # weights have gradients everywhere
    before = []
    further = []
    index = []
    for window, (start, stop), (first, last) in zip(
        windows, needs[part.mesh.rank], own, strict=True
    ):
        # outputs of these inputs without padding are numbered from here
        offset = start * window.stride - window.padding
        full = (stop - start - 1) * window.stride + window.reach + 1
        margin = min(max(0, first - offset), max(0, offset + full - last))
        before.append(margin)
        further.append(max(0, last - offset - full))
        index.append(slice(first - offset - margin, last - offset - margin))
    values = local(values, tuple(before), tuple(further))[(slice(None), slice(None), *index)]
    return result.with_values(values.contiguous())


def pool(part: Part, windows: Windows, fill: float, local: Callable[[Tensor], Tensor]) -> Part:
    """Pool a divided array.

    Args:
        part: the input.
        windows: of the pool.
        fill: what stands for voxels beyond the array.
        local: the same pool of an array that is not divided, without padding.
    """
    division = out_division(part.division, windows)
    result = replace(part, division=division)
    seen = [_seen(windows, box) for box in division.boxes]
    values = gather_box(part, seen, fill)
    own = division.boxes[part.mesh.rank]
    if is_empty(own):
        return result.with_values(connect_empty(values, box_shape(own)))
    return result.with_values(local(values))


def padded_windows(
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
) -> list[Window]:
    """Windows as a convolution's arguments say; ``padding`` may be "same" or "valid"."""
    windows = []
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        if isinstance(padding, str):
            total = d * (k - 1) if padding == "same" else 0
            before = total // 2
            after = total - before
        else:
            before = padding[axis]
            after = before
        windows.append(Window(k, s, d, before, after))
    return windows
