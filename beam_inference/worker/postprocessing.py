"""From a chunk's blended values to what is written: operators, the output's dtype, and the mask.

A job may have several outputs, which are made of the same values: each of its own channels, by its
own operators. They come in the order of the job file, the one that every job has first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.arrays import AnyArray
from beam_inference.config.definite import DefiniteConfig
from beam_inference.config.job import OUTPUT
from beam_inference.config.operators import ArrayPlace, Operator
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.errors import ChunkFault
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.operators.postprocess import apply_functions, build_functions
from beam_inference.operators.quantize import quantize
from beam_inference.worker.output_mask import OutputMask


class Postprocessing:
    """The steps of a job between its blended values and its outputs.

    Args:
        job: the job.
        mask: where the outputs are wanted.
        operators: those of each output, with their files on this machine.

    Raises:
        ModelContractError: an operator's function cannot be imported.
    """

    def __init__(
        self, job: ResolvedJob, mask: OutputMask, operators: Sequence[Sequence[Operator]]
    ) -> None:
        config = job.config
        self._outputs = [
            _OutputSteps(key, single, job.roi, mask, some, job.voxel_size_nm)
            for (key, single), some in zip(config.by_output.items(), operators, strict=True)
        ]
        self._channels = [
            config.model.channels_of_head(single.output.head)
            for single in config.by_output.values()
        ]
        self._is_split = self._channels != [range(config.model.output_channels)]
        self._to_output = job.to_output
        self._finished_box = job.plan.finished_box

    @property
    def device_encoding(self) -> Encoding:
        """Encoding in which values leave the device.

        It is the output's, unless resampling or operators come first, or there are several outputs.
        """
        if self._is_split or self._to_output is not None:
            return AS_COMPUTED
        return self._outputs[0].device_encoding

    def finish(self, values: AnyArray, box: BoundingBox, core: BoundingBox) -> list[AnyArray]:
        """Finish values that left the device in :attr:`device_encoding`.

        Args:
            values: shape (C, Z, Y, X), of ``box``; may be overwritten.
            box: a box around ``core``, which operators may need; it need not reach beyond the
                ROI. Where the output has other voxels than the network, it is in the network's.
            core: the box to write, of whole blocks; beyond the ROI it is zero.

        Returns:
            Each output at ``core``, shape (output channels, Z, Y, X).

        Raises:
            ChunkFault: an operator fails on these values.
            WorkerFault: the mask cannot be read.
        """
        if self._is_split or self._to_output is not None:
            return self.encode(values, box, core)
        return [self._outputs[0].finish(values, box, core)]

    def encode(
        self, values: NDArray[np.float32], box: BoundingBox, core: BoundingBox
    ) -> list[AnyArray]:
        """Finish float32 values; otherwise as :meth:`finish`."""
        if self._to_output is not None:
            finished = self._finished_box(core)
            values = self._to_output.resample(values, box, finished).astype(np.float32, copy=False)
            box = finished
        if not self._is_split:
            return [self._outputs[0].encode(values, box, core)]
        # Each gets a copy: what it does to its values must not be seen by the next one.
        return [
            output.encode(_copy(values[channels.start : channels.stop]), box, core)
            for output, channels in zip(self._outputs, self._channels, strict=True)
        ]

    def blank(self, box: BoundingBox) -> list[AnyArray]:
        """Each output of a box in which it is wanted nowhere."""
        return [output.blank(box) for output in self._outputs]


def _copy(values: NDArray[np.float32]) -> NDArray[np.float32]:
    copied: NDArray[np.float32] = arrays.empty(values.shape, values.dtype)
    np.copyto(copied, values)
    return copied


class _OutputSteps:
    """The steps between the values that one output is made of, and that output.

    Args:
        key: the key of the output in the job file.
        config: the job, as if it wrote this output alone.
        roi: the box to produce.
        mask: where the output is wanted.
        operators: with their files on this machine.
        voxel_size_nm: of the output, ZYX.
    """

    def __init__(
        self,
        key: str,
        config: DefiniteConfig,
        roi: BoundingBox,
        mask: OutputMask,
        operators: Sequence[Operator],
        voxel_size_nm: VoxelSizeNm,
    ) -> None:
        self._voxel_size_nm = voxel_size_nm
        self._name = "postprocess" if key == OUTPUT else f"{key}.postprocess"
        self._functions = build_functions(operators)
        self._encoding = Encoding(np.dtype(config.output.dtype), config.output.value_range)
        self._channels = config.output_channels
        self._mask = mask
        self._roi = roi

    @property
    def device_encoding(self) -> Encoding:
        return AS_COMPUTED if self._functions else self._encoding

    def finish(self, values: AnyArray, box: BoundingBox, core: BoundingBox) -> AnyArray:
        if self._functions:
            return self.encode(values, box, core)
        return self._complete(values[(slice(None), *self._inside(core).slices_in(box))], core)

    def encode(self, values: NDArray[np.float32], box: BoundingBox, core: BoundingBox) -> AnyArray:
        inside = self._inside(core)
        values = self._apply_functions(values, box)[(slice(None), *inside.slices_in(box))]
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
        shape = (self._channels, *box.shape)
        return np.full(shape, self._mask.fill_value, self._encoding.dtype)

    def _apply_functions(
        self, values: NDArray[np.float32], box: BoundingBox
    ) -> NDArray[np.float32]:
        if not self._functions:
            return values
        try:
            # contiguous, as a function of the user's may need it
            place = ArrayPlace(box, self._voxel_size_nm)
            values = apply_functions(self._functions, np.ascontiguousarray(values), place)
        # a function of the user's may raise anything; other chunks may be right
        except Exception as error:
            raise ChunkFault(f"{self._name}: {describe_error(error)}", "postprocess", 1) from error
        if not np.isfinite(values).all():
            raise ChunkFault(f"{self._name} gives NaN or infinite values", "postprocess", 1)
        return values
