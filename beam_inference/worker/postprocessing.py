"""From a chunk's blended values to what is written: operators, the output's dtype, and the mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.arrays import AnyArray
from beam_inference.config.operators import Operator
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.errors import ChunkFault
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.operators.postprocess import apply_functions, build_functions
from beam_inference.operators.quantize import quantize
from beam_inference.worker.output_mask import OutputMask


class Postprocessing:
    """The steps of a job between its blended values and its output.

    Args:
        job: its output's encoding is used.
        mask: where the output is wanted.
        operators: the job's, with their files on this machine.

    Raises:
        ModelContractError: an operator's function cannot be imported.
    """

    def __init__(self, job: ResolvedJob, mask: OutputMask, operators: Sequence[Operator]) -> None:
        config = job.config
        self._functions = build_functions(operators)
        self._encoding = Encoding(np.dtype(config.output.dtype), config.output.value_range)
        self._channels = config.output_channels
        self._mask = mask
        self._roi = job.roi

    @property
    def device_encoding(self) -> Encoding:
        """Encoding in which values leave the device: the output's, unless operators come first."""
        return AS_COMPUTED if self._functions else self._encoding

    def finish(self, values: AnyArray, box: BoundingBox, core: BoundingBox) -> AnyArray:
        """Finish values that left the device in :attr:`device_encoding`.

        Args:
            values: shape (C, Z, Y, X), of ``box``; may be overwritten.
            box: a box around ``core``, which operators may need; it need not reach beyond the
                ROI.
            core: the box to write, of whole blocks; beyond the ROI it is zero.

        Returns:
            The output at ``core``, shape (output channels, Z, Y, X).

        Raises:
            ChunkFault: an operator fails on these values.
            WorkerFault: the mask cannot be read.
        """
        if self._functions:
            return self.encode(values, box, core)
        return self._complete(values[(slice(None), *self._inside(core).slices_in(box))], core)

    def encode(self, values: NDArray[np.float32], box: BoundingBox, core: BoundingBox) -> AnyArray:
        """Finish float32 values; otherwise as :meth:`finish`."""
        inside = self._inside(core)
        values = self._apply_functions(values)[(slice(None), *inside.slices_in(box))]
        array = quantize(values, self._encoding.dtype, self._encoding.value_range)
        return self._complete(array, core)

    def _inside(self, core: BoundingBox) -> BoundingBox:
        return core.intersection(self._roi)

    def _complete(self, array: AnyArray, core: BoundingBox) -> AnyArray:
        """Add the background around what lies in the ROI, and what the mask puts elsewhere."""
        inside = self._inside(core)
        if inside != core:
            whole = arrays.zeros((array.shape[0], *core.shape), array.dtype)
            whole[(slice(None), *inside.slices_in(core))] = array
            array = whole
        self._mask.fill(array, core)
        return array

    def blank(self, box: BoundingBox) -> AnyArray:
        """The output of a box in which it is wanted nowhere."""
        shape = (self._channels, *box.shape)
        return np.full(shape, self._mask.fill_value, self._encoding.dtype)

    def _apply_functions(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if not self._functions:
            return values
        try:
            # contiguous, as a function of the user's may need it
            values = apply_functions(self._functions, np.ascontiguousarray(values))
        # a function of the user's may raise anything; other chunks may be right
        except Exception as error:
            raise ChunkFault(f"postprocess: {describe_error(error)}", "postprocess", 1) from error
        if not np.isfinite(values).all():
            raise ChunkFault("postprocess gives NaN or infinite values", "postprocess", 1)
        return values
