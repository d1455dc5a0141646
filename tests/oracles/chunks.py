"""Small plans, and all chunks of them computed one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from fakes.networks import unchanged
from helpers import plan_of
from numpy.typing import NDArray

from beam_inference.engines.predictor import Predictor
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.fill import Fill, fill_outside, source_box
from beam_inference.geometry.plan import InferencePlan
from beam_inference.worker.chunk_inference import ChunkInference, ChunkResult

SHAPE = (17, 23, 29)


def small_plan(
    shape: tuple[int, int, int] = SHAPE,
    patch: tuple[int, int, int] = (6, 8, 10),
    overlap: tuple[int, int, int] = (2, 4, 3),
    chunk: tuple[int, int, int] = (5, 9, 13),
    start: tuple[int, int, int] = (3, -2, 7),
    **other: Any,
) -> InferencePlan:
    """A plan for a volume of odd sizes; ``other`` as for :func:`helpers.plan_of`."""
    volume = BoundingBox(start, zyx.add(start, shape))
    return plan_of(other.pop("roi", volume), patch, overlap, chunk, volume=volume, **other)


def random_volume(shape: tuple[int, int, int], dtype: type = np.float32) -> NDArray[Any]:
    """Random values between 0 and 1, the same at each call."""
    return np.random.default_rng(1).random(shape).astype(dtype)


def cut_out(
    array: NDArray[Any], plan: InferencePlan, box: BoundingBox, fill: Fill = "reflect"
) -> NDArray[Any]:
    """The voxels (1, Z, Y, X) of a box, from an array that holds the plan's volume."""
    source = source_box(box, plan.volume, fill)
    return fill_outside(
        array[source.slices_in(plan.volume)][None], source, box, plan.volume, fill, 0
    )


def infer_once(
    cutout: NDArray[Any],
    work: ChunkWork,
    network: Predictor,
    channels: int = 1,
    batch_size: int = 1,
    encoding: Encoding = AS_COMPUTED,
    normalize: Any = unchanged,
    bound: float = 64.0,  # of what networks of tests predict for values from 0 to 1
    **options: Any,
) -> ChunkResult:
    """The result of a new :class:`ChunkInference` for one chunk's input (C, Z, Y, X)."""
    inference = ChunkInference(network, normalize, channels, batch_size, bound, **options)
    return infer(inference, cutout, work, encoding)


def infer(
    inference: ChunkInference,
    cutout: NDArray[Any],
    work: ChunkWork,
    encoding: Encoding = AS_COMPUTED,
) -> ChunkResult:
    """The result for one chunk's input (C, Z, Y, X)."""
    return inference.infer(inference.start_upload(cutout, work.input_box), work, encoding)


def infer_all(
    array: NDArray[Any],
    plan: InferencePlan,
    network: Predictor,
    channels: int = 1,
    batch_size: int = 1,
    fill: Fill = "reflect",
    **options: Any,
) -> NDArray[np.float32]:
    """The ROI (C, Z, Y, X), chunk by chunk, each by a new :class:`ChunkInference`."""
    roi = plan.chunks.roi
    result = np.full((channels, *roi.shape), np.nan, np.float32)
    for index in range(plan.chunks.count):
        work = plan.work(index)
        cutout = cut_out(array, plan, work.input_box, fill)
        core = infer_once(cutout, work, network, channels, batch_size, **options).core
        result[(slice(None), *work.core_box.slices_in(roi))] = core
    return result
