"""Forward passes that are made for one shape of batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beam_inference.engines.protocol import Forward


def per_shape(make: Callable[[tuple[int, ...]], Forward], shape: tuple[int, ...]) -> Forward:
    """A forward pass for batches of any shape.

    Args:
        make: makes a forward pass for one shape, when a batch of it is first met. Only a device
            that runs out of memory needs a second one.
        shape: for which one is made at once.
    """
    made = {shape: make(shape)}  # one at a time: the old one's memory is what is short

    def forward(batch: Any) -> Any:
        batch_shape = tuple(batch.shape)
        if batch_shape not in made:
            made.clear()
            made[batch_shape] = make(batch_shape)
        return made[batch_shape](batch)

    return forward
