"""A picture of some finished chunks, input beside output, with what their receipts say: for a look before going on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import ceil_div
from beam_inference.job.records import Receipt
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.volumes.volume import Volume

COLUMNS = 4
"""Chunks in a row, each as two pictures."""


def draw(
    job: ResolvedJob, receipts: Sequence[Receipt], source: Volume, output: Volume, path: Path
) -> None:
    """Draw the middle z-slice of each chunk: the first input channel, and the output (three channels as RGB).

    All outputs have one brightness scale, that of all values shown. Needs matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pictures = []
    for receipt in receipts:
        z, y, x = (box := job.plan.chunks.core_box(receipt.chunk)).start
        stop, *beyond = box.stop
        middle = (z + stop) // 2
        plane = BoundingBox((middle, y, x), (middle + 1, beyond[0], beyond[1]))
        pictures.append((source.read(plane)[0, 0], output.read(plane)[:, 0]))
    low = min(float(np.nanmin(out)) for _, out in pictures)
    high = max(float(np.nanmax(out)) for _, out in pictures)
    rows = ceil_div(len(pictures), COLUMNS)
    figure, grid = pyplot.subplots(
        rows,
        2 * COLUMNS,
        figsize=(4.2 * COLUMNS, 2.6 * rows + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for axes in grid.flat:
        axes.set_axis_off()
    for place, (receipt, (image, out)) in enumerate(zip(receipts, pictures, strict=True)):
        left, right = grid[place // COLUMNS, 2 * (place % COLUMNS) : 2 * (place % COLUMNS) + 2]
        left.imshow(image, cmap="gray", interpolation="nearest")
        right.imshow(_shown(out, low, high), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        means = _means(receipt)
        left.set_title(f"chunk {receipt.chunk}", fontsize=8, loc="left")
        right.set_title(
            f"mean {' '.join(f'{mean:.3g}' for mean in means)} · "
            f"{sum(receipt.seconds.values()):.1f} s",
            fontsize=8,
            loc="left",
        )
    figure.suptitle(
        f"{len(receipts)} chunks of {job.config.output.path.rstrip('/').rpartition('/')[2]}: "
        f"input, output ({low:.3g} black to {high:.3g} white)",
        fontsize=10,
    )
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _shown(out: NDArray[Any], low: float, high: float) -> NDArray[np.float32]:
    """(channels, Y, X) as grey or, for three channels, RGB in 0 … 1."""
    scaled = np.clip((out.astype(np.float32) - low) / max(high - low, 1e-9), 0, 1)
    return np.moveaxis(scaled, 0, -1) if len(out) == 3 else scaled[0]


def _means(receipt: Receipt) -> list[float]:
    """Of each channel, over all parts of a chunk."""
    sizes = [part.box.size for part in receipt.parts]
    return [
        float(np.average([part.channels[channel].mean for part in receipt.parts], weights=sizes))
        for channel in range(len(receipt.parts[0].channels))
    ]
