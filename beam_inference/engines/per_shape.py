"""Forward passes that are made for one shape of batch.

Each engine's function returns a forward pass on float32 tensors, which it may give back in a buffer
of its own that the next call overwrites. Its ``source`` is a network as PyTorch has it, or a file
of the engine's own format.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Forward = Callable[[Tensor], Tensor]


def per_shape(make: Callable[[tuple[int, ...]], Forward], shape: tuple[int, ...]) -> Forward:
    """A forward pass for batches of any shape, each made by ``make`` when it is first met, that of ``shape`` at once.

    Only a device that runs out of memory needs a second one.
    """
    made = {shape: make(shape)}  # one at a time: the old one's memory is what is short

    def forward(batch: Tensor) -> Tensor:
        met = tuple(batch.shape)
        if met not in made:
            made.clear()
            made[met] = make(met)
        return made[met](batch)

    return forward
