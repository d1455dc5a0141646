"""Picture of some finished chunks: input beside output, with figures from their receipts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
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
    """Draw the middle z-slice of each chunk: its first input channel, and its output.

    Three output channels are drawn as RGB. All outputs have one brightness scale, that of all
    values in the picture. Needs matplotlib.

    Args:
        job: the job.
        receipts: receipts of the chunks to draw.
        source: the input, open.
        output: the output, open.
        path: image file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pictures = []
    for receipt in receipts:
        plane = _middle_plane(job.plan.chunks.core_box(receipt.chunk))
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
    for number, (receipt, (image, out)) in enumerate(zip(receipts, pictures, strict=True)):
        row, column = divmod(number, COLUMNS)
        left, right = grid[row, 2 * column : 2 * column + 2]
        left.imshow(image, cmap="gray", interpolation="nearest")
        right.imshow(
            _brightness(out, low, high), cmap="gray", vmin=0, vmax=1, interpolation="nearest"
        )
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
        "input (each from its own black to white), "
        f"output ({low:.3g} black to {high:.3g} white)",
        fontsize=10,
    )
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _middle_plane(box: BoundingBox) -> BoundingBox:
    z, y, x = box.start
    z_stop, y_stop, x_stop = box.stop
    middle = (z + z_stop) // 2
    return BoundingBox((middle, y, x), (middle + 1, y_stop, x_stop))


def _brightness(out: AnyArray, low: float, high: float) -> NDArray[np.float32]:
    """Grey values 0 … 1 of (channels, y, x); three channels become RGB, (y, x, 3)."""
    scaled = np.clip((out.astype(np.float32) - low) / max(high - low, 1e-9), 0, 1)
    return np.moveaxis(scaled, 0, -1) if len(out) == 3 else scaled[0]


def _means(receipt: Receipt) -> list[float]:
    """Mean of each channel over all parts of a chunk."""
    sizes = [part.box.size for part in receipt.parts]
    return [
        float(np.average([part.channels[channel].mean for part in receipt.parts], weights=sizes))
        for channel in range(len(receipt.parts[0].channels))
    ]
