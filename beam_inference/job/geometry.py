"""The inference plan of a job: its job file and its input, put into boxes and shapes."""

from __future__ import annotations

import math

from beam_inference.config.job import JobConfig
from beam_inference.config.operators import total_halo
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.plan import InferencePlan, Strategy, make_plan
from beam_inference.geometry.resampling import Resampling
from beam_inference.geometry.zyx import Zyx


def plan_geometry(
    config: JobConfig,
    *,
    volume: BoundingBox,
    roi: BoundingBox,
    chunk_shape: Zyx,
    strategy: Strategy,
    input_block_shape: Zyx,
    output: BoundingBox,
    resampling: Resampling | None = None,
    to_output: Resampling | None = None,
) -> InferencePlan:
    """Derive all geometry of a job.

    Args:
        config: the job file.
        volume: the input's bounds.
        roi: the box to produce, in the output's voxels.
        chunk_shape: the unit of work, voxels ZYX.
        strategy: the strategy; it need not be the job's own.
        input_block_shape: the input's storage blocks, stored voxels ZYX.
        output: the output's bounds.
        resampling: how the input's voxels are made of stored ones; None where they are these.
        to_output: how the output's voxels are made of the network's; None where they are these.
    """
    inference = config.inference
    written = None if config.input.box is None else _whole_blocks(config, roi, output)
    needed = roi
    if to_output is not None:
        written = written or roi
        needed = _reach_ends(to_output.source_box(roi), roi, to_output)
        needed = _whole_voxels(needed, config.model.finer_by)
        needed = whole_cells(needed, config.model.coarser_by, volume)
    return make_plan(
        volume=volume,
        roi=needed,
        context=config.roi.context if config.roi else (0, 0, 0),
        patch_shape=inference.patch_shape,
        patch_overlap=inference.patch_overlap,
        chunk_shape=chunk_shape,
        crop_margin=config.model.input_margin,
        strategy=strategy,
        chunk_crop_margin=inference.chunk_crop_margin or inference.patch_overlap,
        block_shape=common_write_shape(config),
        halo=_largest_halo(config),
        input_block_shape=input_block_shape if resampling is None else (1, 1, 1),
        lattice=inference.lattice,
        written=written,
        to_output=to_output,
        domain=lattice_box(config, volume),
    )


def lattice_box(config: JobConfig, volume: BoundingBox) -> BoundingBox | None:
    """The box that the lattice tiles, if a job names one apart from its ROI.

    Args:
        config: the job file.
        volume: the input's bounds.
    """
    domain = None if config.roi is None else config.roi.domain
    if domain is None:
        return None
    return volume if domain == "volume" else domain.box


def _reach_ends(needed: BoundingBox, roi: BoundingBox, to_output: Resampling) -> BoundingBox:
    """The voxels that an ROI needs, and up to the source's ends where it reaches the target's.

    The nearest voxels need not be the outermost ones; but patches of the whole lie over the whole.
    """
    source = to_output.source
    target = to_output.target
    start = zyx.triple(
        end if own == last else first
        for first, end, own, last in zip(
            needed.start, source.start, roi.start, target.start, strict=True
        )
    )
    stop = zyx.triple(
        end if own == last else first
        for first, end, own, last in zip(
            needed.stop, source.stop, roi.stop, target.stop, strict=True
        )
    )
    return BoundingBox(start, stop)


def _whole_voxels(box: BoundingBox, output_scale: Zyx) -> BoundingBox:
    """The voxels of the network's input that a box of its output touches, in the output's voxels.

    They lie in the volume, which begins and ends with such a voxel.
    """
    return box.coarsen(output_scale).refine(output_scale)


def whole_cells(box: BoundingBox, cell: Zyx, volume: BoundingBox) -> BoundingBox:
    """The cells, counted from a volume's first voxel, that a box touches, in the same voxels."""
    inside = box.translate(zyx.negative(volume.start))
    return inside.coarsen(cell).refine(cell).translate(volume.start)


def common_write_shape(config: JobConfig) -> Zyx:
    """The smallest shape, ZYX, that is made of whole blocks, or shards, of every output."""
    shapes = [single.output.write_shape for single in config.by_output.values()]
    return zyx.triple(math.lcm(*sizes) for sizes in zip(*shapes, strict=True))


def _largest_halo(config: JobConfig) -> Zyx:
    """Voxels beyond its core that a chunk computes for the operators of any output."""
    halo: Zyx = (0, 0, 0)
    for single in config.by_output.values():
        halo = zyx.maximum(halo, total_halo(single.postprocess))
    return halo


def _whole_blocks(config: JobConfig, roi: BoundingBox, output: BoundingBox) -> BoundingBox:
    """The blocks of the output that hold the ROI, which no levels file has put on their grid."""
    shape = common_write_shape(config)
    relative = roi.translate(zyx.negative(output.start))
    blocks = relative.coarsen(shape).refine(shape).translate(output.start)
    return blocks.intersection(output)
