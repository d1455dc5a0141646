"""From a chunk's blended values to what is written: operators, the output's dtype, and the mask."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.errors import ChunkFault, TransientReadError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.operators.postprocess import apply_functions, build_functions
from beam_inference.operators.quantize import quantize
from beam_inference.volumes.mask import open_mask
from beam_inference.worker.retries import attempt

logger = logging.getLogger(__name__)


STAGE = "postprocess"
"""Of a chunk's fault: an operator failed."""

_REMEMBERED = 2**12
"""Boxes of which it is kept whether the output is wanted there: neighbours ask, too, with seams: exchange."""

Value = TypeVar("Value")


class Finishing:
    """What a job does to values after its network; opened once per process."""

    def __init__(self, job: ResolvedJob) -> None:
        config = job.config
        self._operators = build_functions(config.postprocess)
        self._encoding = Encoding(np.dtype(config.output.dtype), config.output.value_range)
        self._channels = config.output_channels
        self._attempts = config.job.attempts
        self._mask = (
            None
            if config.mask is None
            else open_mask("mask", config.mask, job.voxel_size_nm, config.storage)
        )
        self._fill_value = 0.0 if self._mask is None else self._mask.fill_value
        self._kept = lru_cache(_REMEMBERED)(self._is_kept)

    @property
    def on_device(self) -> Encoding:
        """How values leave the device: as they are written, unless operators want them first."""
        return AS_COMPUTED if self._operators else self._encoding

    def finished(self, values: NDArray[Any], box: BoundingBox, core: BoundingBox) -> NDArray[Any]:
        """What is written at ``core``, of values of ``box`` around it, (C, Z, Y, X), that left the device so.

        Raises:
            ChunkFault: an operator fails on these values.
            WorkerFault: the mask cannot be read.
        """
        if self._operators:
            return self.encoded(values, box, core)
        self._fill_masked(values, core)
        return values

    def encoded(
        self, values: NDArray[np.float32], box: BoundingBox, core: BoundingBox
    ) -> NDArray[Any]:
        """The same of float32 values."""
        values = self._operated(values)[(slice(None), *core.slices_in(box))]
        array = quantize(values, self._encoding.dtype, self._encoding.value_range)
        self._fill_masked(array, core)
        return array

    def _operated(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if not self._operators:
            return values
        try:
            # as a function of the user's may want
            values = apply_functions(self._operators, np.ascontiguousarray(values))
        # a function of the user's may raise anything; other chunks may be right
        except Exception as error:
            cause = " ".join(str(error).split())[:500] or type(error).__name__
            raise ChunkFault(f"postprocess: {type(error).__name__}: {cause}", STAGE, 1) from error
        if not np.isfinite(values).all():
            raise ChunkFault("postprocess gives NaN or infinite values", STAGE, 1)
        return values

    def is_masked(self, box: BoundingBox) -> bool:
        """Whether the output is wanted nowhere in a box."""
        return not self._kept(box)

    def blank(self, box: BoundingBox) -> NDArray[Any]:
        """What is written where the output is not wanted."""
        return np.full((self._channels, *box.shape), self._fill_value, self._encoding.dtype)

    def _is_kept(self, box: BoundingBox) -> bool:
        mask = self._mask
        return mask is None or self._looked_up(lambda: mask.keeps_any(box), box)

    def _fill_masked(self, array: NDArray[Any], box: BoundingBox) -> None:
        mask = self._mask
        if mask is not None:
            self._looked_up(lambda: mask.fill(array, box), box)

    def _looked_up(self, action: Callable[[], Value], box: BoundingBox) -> Value:
        def tell(number: int, cause: str) -> None:
            logger.warning("the mask at %s cannot be read, attempt %d: %s", box, number, cause)

        try:
            result, _ = attempt(action, self._attempts, "read", _may_pass, tell)
        except ChunkFault as error:  # a chunk must not be left out because of a mask
            raise WorkerFault(f"the mask cannot be read: {error}") from error
        return result


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, TransientReadError)
