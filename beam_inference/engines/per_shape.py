"""Forward passes that are made for one shape of batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from beam_inference.engines.protocol import Forward


def per_shape(
    make: Callable[[tuple[int, ...]], Forward], shapes: Sequence[tuple[int, ...]]
) -> Forward:
    """A forward pass for batches of any shape.

    Args:
        make: makes a forward pass for one shape, when a batch of it is first met. Only a device
            that runs out of memory needs others than ``shapes``.
        shapes: for which they are made at once; batches of one size.
    """
    made = {shape: make(shape) for shape in shapes}

    def forward(batch: Any) -> Any:
        batch_shape = tuple(batch.shape)
        if batch_shape not in made:
            if any(len(batch) != size for size, *_ in made):
                made.clear()  # the memory of those for larger batches is what is short
            made[batch_shape] = make(batch_shape)
        return made[batch_shape](batch)

    return forward


def patch_by_patch(forward: Forward, join: Callable[[list[Any]], Any]) -> Forward:
    """A forward pass for batches of any number of patches, made of one for a single patch.

    Args:
        forward: takes a batch of one patch; its next call may overwrite what a call returned.
        join: joins batches along their first axis.
    """

    def answer(batch: Any) -> Any:
        if len(batch) == 1:
            return forward(batch)
        return join([deepcopy(forward(batch[n : n + 1])) for n in range(len(batch))])

    return answer
