"""Where a job's output is wanted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from beam_inference.arrays import AnyArray
from beam_inference.errors import ChunkFault, TransientReadError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import Rest
from beam_inference.job.parts import record_mask
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.volumes.mask import Mask, open_mask
from beam_inference.worker.retries import attempt

logger = logging.getLogger(__name__)

_REMEMBERED_BOXES = 2**12
"""Boxes for which the answer is kept: with strategy: exchange neighbours look them up, too."""

Value = TypeVar("Value")


class OutputMask:
    """The mask of a job's output, read with retries; without one all output is wanted.

    Args:
        mask: the opened mask, if the job has one.
        attempts: how often a read is attempted.

    Attributes:
        fill_value: value of the output where it is not wanted.
    """

    def __init__(self, mask: Mask | None, attempts: int) -> None:
        self.fill_value = 0.0 if mask is None else mask.fill_value
        self._mask = mask
        self._attempts = attempts
        self._keeps_any = lru_cache(_REMEMBERED_BOXES)(self._look_up)

    def excludes(self, box: BoundingBox) -> bool:
        """Whether the output is wanted nowhere in a box.

        Raises:
            WorkerFault: the mask cannot be read.
        """
        return not self._keeps_any(box)

    def fill(self, array: AnyArray, box: BoundingBox) -> None:
        """Put the fill value into the voxels of a box (C, Z, Y, X) where no output is wanted.

        Raises:
            WorkerFault: the mask cannot be read.
        """
        mask = self._mask
        if mask is not None:
            self._attempt(lambda: mask.fill(array, box), box)

    def _look_up(self, box: BoundingBox) -> bool:
        mask = self._mask
        return mask is None or self._attempt(lambda: mask.keeps_any(box), box)

    def _attempt(self, action: Callable[[], Value], box: BoundingBox) -> Value:
        def log(number: int, cause: str) -> None:
            logger.warning("the mask at %s cannot be read, attempt %d: %s", box, number, cause)

        try:
            return attempt(action, self._attempts, "read", _is_transient, log).value
        except ChunkFault as error:  # a chunk must not be left out because of a mask
            raise WorkerFault(f"the mask cannot be read: {error}") from error


def open_output_mask(job: ResolvedJob, rest: Rest) -> OutputMask:
    """Open the mask of a job's output.

    Args:
        job: the job.
        rest: how far the output begins beyond whole coordinates, in its voxels, ZYX.

    Raises:
        UserError: as :func:`beam_inference.volumes.mask.open_mask`.
        WorkerFault: it is another one than at the launch.
    """
    config = job.config
    mask = None
    if config.mask is not None:
        mask = open_mask("mask", config.mask, job.voxel_size_nm, rest, config.storage)
        check_mask("mask", mask, job)
    return OutputMask(mask, config.job.attempts)


def check_mask(key: str, mask: Mask, job: ResolvedJob) -> None:
    """Refuse a mask that lies elsewhere than at the launch, or holds other values.

    Args:
        key: its key in the job file.
        mask: the mask, as this process found it.
        job: the job.

    Raises:
        WorkerFault: it does.
    """
    known = job.masks.get(key)
    found = record_mask(mask)
    if known is not None and found != known:
        raise WorkerFault(
            f"{key}: the volume {mask.volume.url} is {found.describe()}, and was "
            f"{known.describe()}, when the job began: it is another volume, or lies elsewhere. Put "
            "that one back, or launch a job with another output.path"
        )


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, TransientReadError)
