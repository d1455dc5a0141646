"""Networks of planes: how the sections of a batch become the channels of a 2-D network."""

from __future__ import annotations

from typing import Any


def sections_as_channels(batch: Any) -> Any:
    """A batch (N, C, Z, Y, X), of NumPy or PyTorch, as (N, C * Z, Y, X).

    All sections of the first channel come first, from the lowest z to the highest, then those of
    the second.
    """
    count, channels, depth, height, width = batch.shape
    return batch.reshape(count, channels * depth, height, width)
