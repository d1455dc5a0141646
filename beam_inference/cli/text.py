"""Numbers as the command line prints them."""

from __future__ import annotations

from collections.abc import Sequence


def format_shape(shape: Sequence[int]) -> str:
    """A shape in voxels, such as 16×32×32."""
    return "×".join(map(str, shape))


def format_voxel_size(sizes: Sequence[float] | None) -> str:
    """A voxel size, such as 40 × 4 × 4; "unknown" for None."""
    return "unknown" if sizes is None else " × ".join(f"{size:g}" for size in sizes)


def format_hours(hours: float) -> str:
    """A duration in hours, or in seconds if it is short."""
    return f"{hours:.3g} h" if hours >= 0.1 else f"{3600 * hours:.3g} s"
