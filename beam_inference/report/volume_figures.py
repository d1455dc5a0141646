"""Draw planes of input and output, histograms, seams, and maps of the chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from beam_inference.geometry.bounding_box import AXES
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import VoxelSizeNm, ceil_div
from beam_inference.report.canvas import ACCENT, ALERT, MUTED, SECOND, WIDTH, as_svg, bare, style
from beam_inference.report.chunk_map import ChunkMap
from beam_inference.report.overlay import brightness_range, draw_overlay, grey
from beam_inference.report.seam_profile import SeamProfile
from beam_inference.report.slices import Plane

_MOST_BORDERS = 24


def draw_planes(
    planes: Sequence[Plane],
    grid: ChunkGrid,
    coloured: Sequence[int],
    ranges: Sequence[tuple[float, float]],
    voxel: VoxelSizeNm,
) -> str:
    """Draw the input on the left, and the output over it on the right, in true proportions.

    Of a volume that is one voxel thick somewhere, the plane that has all of it.
    """
    brightness = brightness_range([plane.source for plane in planes])
    shown = [
        plane for plane in planes if min(plane.box.shape[axis] for axis in plane.axes) > 1
    ] or planes[:1]
    aspects = [
        plane.box.shape[plane.axes[1]]
        * voxel[plane.axes[1]]
        / (plane.box.shape[plane.axes[0]] * voxel[plane.axes[0]])
        for plane in shown
    ]
    main = min(max(aspects[0], 0.25), 4)
    side = min(max(*aspects[1:], 0.4), 2 * main, 4) if len(shown) > 1 else 0.0
    height = min(4.4, (WIDTH / 2 - 0.75) / (main + side / 2) - 0.2)
    with style():
        figure = Figure(figsize=(WIDTH, height + 0.75), layout="constrained")
        halves: Any = figure.subfigures(1, 2, wspace=0.03)
        for half, title in zip(halves, ("Input", "Output upon input"), strict=True):
            half.suptitle(title, x=0.01, ha="left", fontsize=9.5, fontweight="bold")
            if len(shown) > 1:
                places = half.add_gridspec(2, 2, width_ratios=[main, side / 2])
                spots = [places[:, 0], places[0, 1], places[1, 1]]
            else:
                spots = [half.add_gridspec(1, 1)[0, 0]]
            for plane, spot in zip(shown, spots, strict=True):
                axes = half.add_subplot(spot)
                picture = (
                    grey(plane.source, *brightness)
                    if title == "Input"
                    else draw_overlay(
                        plane.source, plane.output[list(coloured)], brightness, ranges
                    )
                )
                _show(axes, plane, picture, voxel)
                if title != "Input":
                    _mark_borders(axes, plane, grid)
                elif plane is shown[0]:
                    _scale_bar(axes, plane, voxel)
        return as_svg(
            figure, "planes", "planes through the volume: the input, and the output upon it"
        )


def _show(axes: Axes, plane: Plane, picture: NDArray[np.uint8], voxel: VoxelSizeNm) -> None:
    rows, columns = plane.axes
    (top, left), (bottom, right) = (
        [corner[rows], corner[columns]] for corner in (plane.box.start, plane.box.stop)
    )
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
    axes.set_title(
        f"{AXES[columns]}{AXES[rows]} at {AXES[plane.axis]} = {plane.box.start[plane.axis]}"
    )
    axes.set_xlabel(AXES[columns], labelpad=1)
    axes.set_ylabel(AXES[rows], labelpad=6, rotation=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(3, integer=True))


def _mark_borders(axes: Axes, plane: Plane, grid: ChunkGrid) -> None:
    for axis, line in zip(plane.axes, (axes.axhline, axes.axvline), strict=True):
        low = plane.box.start[axis]
        high = plane.box.stop[axis]
        chunk = grid.chunk_shape[axis]
        start = grid.roi.start[axis]
        borders = [
            start + chunk * k
            for k in range((low - start) // chunk + 1, ceil_div(high - start, chunk))
        ]
        if len(borders) <= _MOST_BORDERS:
            for border in borders:
                line(border, color="white", alpha=0.55, lw=0.6, ls=(0, (4, 4)))


def _scale_bar(axes: Axes, plane: Plane, voxel: VoxelSizeNm) -> None:
    """A bar of 1, 2 or 5 × 10^n, about a quarter of the width."""
    rows, columns = plane.axes
    width = plane.box.shape[columns]
    height = plane.box.shape[rows]
    quarter = width * voxel[columns] / 4
    power = 10.0 ** np.floor(np.log10(quarter))
    length = power * max(step for step in (1, 2, 5) if step * power <= quarter)
    unit, name = next(
        ((u, n) for u, n in ((1e6, "mm"), (1e3, "µm"), (1.0, "nm")) if length >= u), (1.0, "nm")
    )
    left = plane.box.start[columns] + 0.05 * width
    bottom = plane.box.start[rows] + 0.06 * height
    for colour, thick in (("black", 4), ("white", 2)):
        axes.plot(
            [left, left + length / voxel[columns]],
            [bottom] * 2,
            color=colour,
            lw=thick,
            solid_capstyle="butt",
        )
    axes.annotate(
        f"{length / unit:g} {name}",
        (left, bottom),
        (1, 5),
        textcoords="offset points",
        color="white",
        fontsize=7.5,
        bbox={"facecolor": "black", "alpha": 0.5, "linewidth": 0, "pad": 1.2},
    )


def draw_histograms(histograms: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> str:
    """One small graph per channel, of edges and shares."""
    columns = min(4, len(histograms))
    rows = ceil_div(len(histograms), columns)
    with style():
        figure = Figure(figsize=(WIDTH, 1.45 * rows + 0.35), layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        lowest = min(float(shares[shares > 0].min()) for _, shares in histograms)
        for channel, axes in enumerate(grid.flat):
            if channel >= len(histograms):
                axes.set_axis_off()
                continue
            edges, shares = histograms[channel]
            axes.stairs(shares, edges, fill=True, color=ACCENT, alpha=0.75, lw=0)
            axes.set_yscale("log")
            axes.set_ylim(lowest / 2, 1.5)
            axes.set_title(f"channel {channel}")
            axes.xaxis.set_major_locator(MaxNLocator(6))
            if channel + columns >= len(histograms):
                axes.set_xlabel("stored value")
            if channel % columns == 0:
                axes.set_ylabel("share of voxels")
        return as_svg(figure, "histograms", "histogram of each output channel")


def draw_seams(profiles: Sequence[SeamProfile]) -> str:
    """Draw a curve per axis: how much neighbours differ, by their distance from a chunk border."""
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
                    0.5,
                    0.5,
                    "no border between finished chunks",
                    transform=axes.transAxes,
                    ha="center",
                    color=MUTED,
                )
                axes.set_xticks([])
                continue
            distances = np.arange(len(profile.differences))
            axes.axhline(profile.elsewhere, color=MUTED, lw=0.8, ls=(0, (4, 3)))
            axes.plot(distances, profile.differences, color=ACCENT, lw=1.4, marker="o", ms=2.4)
            colour = ALERT if profile.stands_out else SECOND
            axes.plot(
                [0], [profile.at_border], marker="o", ms=6.5, color=colour, ls="none", zorder=3
            )
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
        return as_svg(
            figure,
            "seams",
            "difference of neighbouring voxels by distance to the nearest chunk border",
        )


def _tints(colour: str) -> LinearSegmentedColormap:
    """Colour map from a hint of a colour to all of it, on paper of any colour."""
    return LinearSegmentedColormap.from_list(colour, [to_rgba(colour, 0.08), to_rgba(colour, 1.0)])


def draw_maps(
    chunk_map: ChunkMap,
    done: NDArray[np.float64],
    seconds: NDArray[np.float64],
    retries: NDArray[np.float64],
    quarantined: NDArray[np.int64],
    voxel: VoxelSizeNm,
) -> str:
    """Draw the chunks that are done, their seconds and retries, in the cells of a ChunkMap.

    ``done`` is a share of each cell's chunks; ``seconds`` and ``retries`` are NaN where nothing is
    known; ``quarantined`` counts chunks.
    """
    rows, columns = chunk_map.plane
    aspect = (
        _extent(chunk_map, columns)[2]
        * voxel[columns]
        / (_extent(chunk_map, rows)[2] * voxel[rows])
    )
    height = min(3.2, max(1.2, (WIDTH / 3 - 1.1) / aspect))
    slowest, most = (float(np.nanmax(values, initial=0)) for values in (seconds, retries))
    with style():
        figure = Figure(figsize=(WIDTH, height + 0.7), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        for axes, title, values, colours, high, ticks in (
            (left, "chunks done", done, _tints(ACCENT), 1.0, MaxNLocator(4)),
            (
                middle,
                "seconds per chunk, mean",
                seconds,
                "viridis",
                max(slowest, 1e-9),
                MaxNLocator(4),
            ),
            (
                right,
                "attempts beyond the first, most",
                retries,
                _tints(ALERT),
                max(most, 1.0),
                MaxNLocator(4, integer=True),
            ),
        ):
            image = _show_map(axes, chunk_map, values, colours, high, voxel[rows] / voxel[columns])
            bar = figure.colorbar(image, cax=axes.inset_axes((1.03, 0, 0.045, 1)), ticks=ticks)
            bar.outline.set(visible=False)
            if axes is left:
                bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.set_title(title)
            _mark_quarantined(axes, chunk_map, quarantined)
        return as_svg(
            figure, "maps", "chunks seen from one side: done, seconds, attempts beyond the first"
        )


def _extent(chunk_map: ChunkMap, axis: int) -> tuple[int, int, int]:
    """Start of the ROI, length of a cell and length of the ROI on an axis of the map, in voxels."""
    grid = chunk_map.grid
    place = chunk_map.plane.index(axis)
    return (
        grid.roi.start[axis],
        grid.chunk_shape[axis] * chunk_map.chunks_per_cell[place],
        grid.roi.shape[axis],
    )


def _show_map(
    axes: Axes,
    chunk_map: ChunkMap,
    values: NDArray[np.float64],
    colours: Any,
    high: float,
    aspect: float,
) -> AxesImage:
    rows, columns = chunk_map.plane
    (bottom, tall, height), (left, broad, width) = (
        _extent(chunk_map, axis) for axis in (rows, columns)
    )
    bare(axes)
    axes.patch.set(hatch=None)
    corners = (left, left + broad * chunk_map.shape[1], bottom, bottom + tall * chunk_map.shape[0])
    image = axes.imshow(
        values,
        cmap=colours,
        vmin=0,
        vmax=high,
        origin="lower",
        extent=corners,
        interpolation="none",
        aspect=aspect,
    )
    # the last chunks are clipped
    axes.set(xlim=(left, left + width), ylim=(bottom, bottom + height))
    axes.set_xlabel(AXES[columns], labelpad=1)
    axes.set_ylabel(AXES[rows], labelpad=8, rotation=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
    return image


def _mark_quarantined(axes: Axes, chunk_map: ChunkMap, quarantined: NDArray[np.int64]) -> None:
    middles = []
    for axis, places in zip(chunk_map.plane, np.nonzero(quarantined), strict=True):
        start, cell, length = _extent(chunk_map, axis)
        middles.append(start + (cell * places + np.minimum(cell * (places + 1), length)) / 2)
    for colour, thick in (("white", 3.4), (ALERT, 1.6)):
        axes.scatter(middles[1], middles[0], marker="x", s=26, linewidths=thick, color=colour)
