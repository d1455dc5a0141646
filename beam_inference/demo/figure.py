"""Draws the demo's figure: slices of the template, of the result, and the chunks over them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.grids import ChunkGrid


def draw_figure(
    t1: NDArray[np.uint8], tissue: NDArray[np.uint8], chunks: ChunkGrid, path: Path
) -> None:
    """Draw a coronal and an axial slice: input, grey and white matter, and all overlaid.

    ``t1`` is (1, z, y, x); ``tissue`` (3, z, y, x) with the channels other, grey, white. Dashed
    lines are the places
    where chunks meet: no seam is to be seen there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, depth, height, _ = t1.shape
    views = [
        ("coronal", (slice(None), height // 2), (0, 2)),
        ("axial", (depth // 2, slice(None)), (1, 2)),
    ]
    figure, rows = pyplot.subplots(2, 4, figsize=(15, 8), facecolor="black", layout="constrained")
    for row, (view, (z, y), (vertical, horizontal)) in zip(rows, views, strict=True):
        image = t1[0, z, y]
        grey = tissue[1, z, y]
        white = tissue[2, z, y]
        overlay = np.stack([image / 255] * 3, -1) * 0.6
        overlay[..., 0] += 0.4 * (white / 255)
        overlay[..., 1] += 0.3 * (grey / 255)
        titles = ("T1 (input)", "grey matter", "white matter", "grey in green, white in red")
        for axes, title, picture in zip(row, titles, (image, grey, white, overlay), strict=True):
            axes.imshow(
                picture,
                cmap="gray",
                vmin=0,
                vmax=255 if picture.ndim == 2 else None,
                origin="lower",
            )
            for border in _borders(chunks, vertical):
                axes.axhline(border - 0.5, color="deepskyblue", lw=0.7, ls=(0, (4, 4)))
            for border in _borders(chunks, horizontal):
                axes.axvline(border - 0.5, color="deepskyblue", lw=0.7, ls=(0, (4, 4)))
            axes.set_title(f"{title}, {view}", color="white", fontsize=11)
            axes.set_axis_off()
    figure.suptitle(
        "dashed: where chunks meet. A demonstration on one averaged brain, not for clinical use",
        color="white",
    )
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _borders(chunks: ChunkGrid, axis: int) -> list[int]:
    return [chunks.axis_interval(axis, position)[0] for position in range(1, chunks.shape[axis])]
