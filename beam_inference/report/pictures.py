"""Figures of the volume: planes of input and output, histograms, seams, and the chunks from one side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from beam_inference.grids import ChunkGrid
from beam_inference.plan import AXES
from beam_inference.report.canvas import ACCENT, ALERT, MUTED, SECOND, WIDTH, as_svg, bare, style
from beam_inference.report.chunk_map import ChunkMap
from beam_inference.report.overlay import brightness_range, grey, overlaid
from beam_inference.report.seam_profile import SeamProfile
from beam_inference.report.slices import Plane
from beam_inference.volumes import VoxelSizeNm

_MOST_BORDERS = 24


def draw_planes(
    planes: Sequence[Plane], grid: ChunkGrid, coloured: Sequence[int], values: tuple[float, float], voxel: VoxelSizeNm
) -> str:
    """Left the input, right the output upon it: the xy plane, beside it xz above yz, in true proportions."""
    levels = brightness_range([plane.source for plane in planes])
    aspects = [
        plane.box.shape[plane.axes[1]] * voxel[plane.axes[1]] / (plane.box.shape[plane.axes[0]] * voxel[plane.axes[0]])
        for plane in planes
    ]
    main = min(max(aspects[0], 0.25), 4)
    side = min(max(*aspects[1:], 0.4), 2 * main, 4)
    height = min(4.4, (WIDTH / 2 - 0.75) / (main + side / 2) - 0.2)
    with style():
        figure = Figure(figsize=(WIDTH, height + 0.75), layout="constrained")
        halves: Any = figure.subfigures(1, 2, wspace=0.03)
        for half, title in zip(halves, ("Input", "Output upon input"), strict=True):
            half.suptitle(title, x=0.01, ha="left", fontsize=9.5, fontweight="bold")
            places = half.add_gridspec(2, 2, width_ratios=[main, side / 2])
            spots = (places[:, 0], places[0, 1], places[1, 1])
            for plane, spot in zip(planes, spots, strict=True):
                axes = half.add_subplot(spot)
                picture = (
                    grey(plane.source, *levels)
                    if title == "Input"
                    else overlaid(plane.source, plane.output[list(coloured)], levels, values)
                )
                _show(axes, plane, picture, voxel)
                if title != "Input":
                    _mark_borders(axes, plane, grid)
                elif plane.axis == 0:
                    _scale_bar(axes, plane, voxel)
        return as_svg(figure, "planes", "planes through the volume: the input, and the output upon it")


def _show(axes: Axes, plane: Plane, picture: NDArray[np.uint8], voxel: VoxelSizeNm) -> None:
    rows, columns = plane.axes
    (top, left), (bottom, right) = ([corner[rows], corner[columns]] for corner in (plane.box.start, plane.box.stop))
    bare(axes)
    axes.imshow(
        picture,
        extent=(left, right, top, bottom),
        origin="lower",
        interpolation="none",
        aspect=voxel[rows] / voxel[columns],
    )
    if plane.axis:
        axes.set_anchor("W")
    axes.set_title(f"{AXES[columns]}{AXES[rows]} at {AXES[plane.axis]} = {plane.box.start[plane.axis]}")
    axes.set_xlabel(AXES[columns], labelpad=1)
    axes.set_ylabel(AXES[rows], labelpad=2, rotation=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(3, integer=True))


def _mark_borders(axes: Axes, plane: Plane, grid: ChunkGrid) -> None:
    for axis, line in zip(plane.axes, (axes.axhline, axes.axvline), strict=True):
        low, high = plane.box.start[axis], plane.box.stop[axis]
        chunk, start = grid.chunk_shape[axis], grid.roi.start[axis]
        borders = [start + chunk * k for k in range((low - start) // chunk + 1, -(-(high - start) // chunk))]
        if len(borders) <= _MOST_BORDERS:
            for border in borders:
                line(border, color="white", alpha=0.55, lw=0.6, ls=(0, (4, 4)))


def _scale_bar(axes: Axes, plane: Plane, voxel: VoxelSizeNm) -> None:
    """A bar of 1, 2 or 5 × 10^n, about a quarter of the width."""
    rows, columns = plane.axes
    width, height = plane.box.shape[columns], plane.box.shape[rows]
    quarter = width * voxel[columns] / 4
    power = 10.0 ** np.floor(np.log10(quarter))
    length = power * max(step for step in (1, 2, 5) if step * power <= quarter)
    unit, name = next(((u, n) for u, n in ((1e6, "mm"), (1e3, "µm"), (1.0, "nm")) if length >= u), (1.0, "nm"))
    left = plane.box.start[columns] + 0.05 * width
    bottom = plane.box.start[rows] + 0.06 * height
    axes.plot([left, left + length / voxel[columns]], [bottom] * 2, color="white", lw=2, solid_capstyle="butt")
    axes.annotate(
        f"{length / unit:g} {name}", (left, bottom), (0, 4), textcoords="offset points", color="white", fontsize=7.5
    )


def draw_histograms(edges: NDArray[np.float64], shares: NDArray[np.float64]) -> str:
    """One small graph per channel, (channels, bins), with the same axes."""
    columns = min(4, len(shares))
    rows = -(-len(shares) // columns)
    with style():
        figure = Figure(figsize=(WIDTH, 1.45 * rows + 0.35), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        lowest = shares[shares > 0].min()
        for channel, axes in enumerate(grid.flat):
            if channel >= len(shares):
                axes.set_axis_off()
                continue
            axes.stairs(shares[channel], edges, fill=True, color=ACCENT, alpha=0.75, lw=0)
            axes.set_yscale("log")
            axes.set_ylim(lowest / 2, 1.5)
            axes.set_title(f"channel {channel}")
            if channel + columns >= len(shares):
                axes.set_xlabel("stored value")
                axes.tick_params(labelbottom=True)
            if channel % columns == 0:
                axes.set_ylabel("share of voxels")
        return as_svg(figure, "histograms", "histogram of each output channel")


def draw_seams(profiles: Sequence[SeamProfile]) -> str:
    """A curve per axis: how much neighbours differ, by their distance from a chunk border."""
    with style():
        figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
        row = figure.subplots(1, 3, sharey=True)
        by_axis = {profile.axis: profile for profile in profiles}
        for axis, axes in enumerate(row):
            axes.set_title(f"along {AXES[axis]}")
            axes.set_xlabel("voxels from the nearest chunk border")
            profile = by_axis.get(axis)
            if profile is None:
                axes.text(
                    0.5, 0.5, "no border between finished chunks", transform=axes.transAxes, ha="center", color=MUTED
                )
                axes.set_xticks([])
                continue
            distances = np.arange(len(profile.differences))
            axes.axhline(profile.elsewhere, color=MUTED, lw=0.8, ls=(0, (4, 3)))
            axes.plot(distances, profile.differences, color=ACCENT, lw=1.4, marker="o", ms=2.4)
            colour = ALERT if profile.stands_out else SECOND
            axes.plot([0], [profile.at_border], marker="o", ms=6.5, color=colour, ls="none", zorder=3)
            axes.annotate(
                f"across the border {profile.at_border:.3g}\nelsewhere {profile.elsewhere:.3g}",
                (1, 1),
                (-2, -2),
                xycoords="axes fraction",
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=8,
            )
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        top = max(float(profile.differences.max()) for profile in profiles)
        row[0].set_ylim(0, 1.45 * top if top > 0 else 1)
        row[0].set_ylabel("mean |difference|, stored units")
        return as_svg(figure, "seams", "difference of neighbouring voxels by distance to the nearest chunk border")


def draw_maps(
    chunk_map: ChunkMap,
    done: NDArray[np.float64],
    seconds: NDArray[np.float64],
    retries: NDArray[np.float64],
    quarantined: NDArray[np.int64],
    voxel: VoxelSizeNm,
) -> str:
    """What is done, how long it took, and what had to be tried again; cells as :class:`ChunkMap` has them."""
    rows, columns = chunk_map.plane
    roi = chunk_map.grid.roi
    tall = [n * chunk_map.grid.chunk_shape[a] for n, a in zip(chunk_map.shape, (rows, columns), strict=True)]
    per_cell = chunk_map.chunks_per_cell
    bottom, left = roi.start[rows], roi.start[columns]
    top, right = (start + cells * each for start, cells, each in zip((bottom, left), tall, per_cell, strict=True))
    aspect = (right - left) * voxel[columns] / ((top - bottom) * voxel[rows])
    height = min(4.0, max(1.2, (WIDTH / 3 - 1.1) / aspect))
    marked_rows, marked_columns = np.nonzero(quarantined)
    with style():
        figure = Figure(figsize=(WIDTH, height + 0.7), layout="constrained")
        panels = (
            ("chunks done", done, "Blues", (0.0, 1.0)),
            ("seconds per chunk, mean", seconds, "viridis", None),
            ("attempts beyond the first, most", retries, "OrRd", (0.0, max(1.0, float(np.nanmax(retries, initial=0))))),
        )
        for axes, (title, values, colours, limits) in zip(figure.subplots(1, 3), panels, strict=True):
            bare(axes)
            low, high = limits or (0.0, max(1e-9, float(np.nanmax(values, initial=0))))
            image = axes.imshow(
                values,
                cmap=colours,
                vmin=low,
                vmax=high,
                origin="lower",
                extent=(left, right, bottom, top),
                interpolation="none",
                aspect=voxel[rows] / voxel[columns],
            )
            axes.set_xlim(left, max(left + 1, roi.stop[columns]))
            axes.set_ylim(bottom, max(bottom + 1, roi.stop[rows]))
            axes.set_title(title)
            axes.set_xlabel(AXES[columns], labelpad=1)
            axes.set_ylabel(AXES[rows], labelpad=8, rotation=0)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(4, integer=True))
            ticks = MaxNLocator(4, integer=True) if colours == "OrRd" else MaxNLocator(4)
            bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, aspect=22, ticks=ticks)
            bar.outline.set(visible=False)
            if colours == "Blues":
                bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            if len(marked_rows):
                cell = [chunk_map.grid.chunk_shape[a] * n for a, n in zip((rows, columns), per_cell, strict=True)]
                axes.scatter(
                    np.minimum(
                        left + (marked_columns + 0.5) * cell[1],
                        (left + marked_columns * cell[1] + roi.stop[columns]) / 2,
                    ),
                    np.minimum(
                        bottom + (marked_rows + 0.5) * cell[0], (bottom + marked_rows * cell[0] + roi.stop[rows]) / 2
                    ),
                    marker="x",
                    s=26,
                    linewidths=1.6,
                    color=ALERT,
                )
        return as_svg(figure, "maps", "chunks seen from one side: done, seconds, attempts beyond the first")
