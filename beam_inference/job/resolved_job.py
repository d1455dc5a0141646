"""The resolved job: what workers and later launches follow, and what identifies an output."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import Field, PositiveFloat, model_validator

from beam_inference.config.definite import DefiniteConfig
from beam_inference.config.fields import Frozen, Json, Shape
from beam_inference.config.normalize import LevelsRequest
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import largest_block_cover
from beam_inference.geometry.plan import InferencePlan, Strategy
from beam_inference.geometry.resampling import Resampling
from beam_inference.geometry.seam_exchange import SeamExchangePlan
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
from beam_inference.job.geometry import plan_geometry
from beam_inference.job.identity import identify_job
from beam_inference.job.operator_files import operator_key
from beam_inference.limits import Numbers, cached_cutouts

_LONGEST_VALUE = 120
"""Characters of a value that a difference shows."""

_FIRST_NAMES = {
    "asked_normalize": "requested_normalize",
    "asked_batch_size": "requested_batch_size",
}

NUMERICS = 5
"""A number that is raised when the same job would give other bits; older jobs are then refused."""


class QuantizationError(Frozen):
    """How far a network of integers is from the one in float32, on the patches that were tried.

    Attributes:
        root_mean_square: over a patch, the largest of the patches.
        largest: of any value of that patch.
        allowed: what the root mean square may be.
    """

    root_mean_square: float
    largest: float
    allowed: float


class ResolvedInput(Frozen):
    """A further input of a job, as it was at first launch.

    Attributes:
        bounds: bounding box of what is stored.
        channels: number of its channels that are read.
        dtype: its dtype, as stored.
        block_bytes: of the decoded storage blocks that a chunk's input is made of, at most; not
            part of the fingerprint.
        resampling: how the voxels that are read are made of stored ones; None where they are these.
        limits: lowest and highest value of each channel, or of all, before and after resampling.
        axis_layout: see :attr:`beam_inference.volumes.volume.Volume.axis_layout`; not part of the
            fingerprint; older records have none.
    """

    bounds: BoundingBox
    channels: int
    dtype: str
    block_bytes: int
    resampling: Resampling | None = None
    limits: list[tuple[float, float]] = Field(default_factory=list)
    axis_layout: list[list[int]] = Field(default_factory=list)


class ResolvedMask(Frozen):
    """A mask of a job, as a launch found it; not part of the fingerprint.

    Attributes:
        bounds: bounding box of it, in its own voxels.
        per_voxel: its voxels per voxel of what it masks, ZYX.
        begins: where the corner of voxel 0 of what it masks lies, in its own voxels, ZYX.
        dtype: its dtype, as stored.
    """

    bounds: BoundingBox
    per_voxel: tuple[float, float, float]
    begins: tuple[float, float, float] = (0.0, 0.0, 0.0)
    dtype: str

    def describe(self) -> str:
        """Tell, in messages, what the mask is and where it lies."""
        return (
            f"{self.bounds} (z, y, x) of {self.dtype}, {list(self.per_voxel)} of its voxels per "
            f"voxel, from {list(self.begins)} on"
        )


class ResolvedJob(Frozen):
    """A job with every default and every ``auto`` made definite.

    Attributes:
        config: the job file, with absolute paths and nothing left open.
        requested_normalize: what the job file says of normalisation, where it names a levels file;
            not part of the fingerprint. ``config`` has the values that were made of that file.
        requested_batch_size: the job file's batch size, where the device had too little memory for
            it at first launch; not part of the fingerprint. ``config`` has the one that fitted.
        input_bounds: bounding box of the input.
        resampling: how its voxels are made of stored ones; None where they are the stored ones.
        to_output: how the output's voxels are made of those that the network answers at; None where
            they are the same.
        input_channels: number of the input's channels that are read.
        input_dtype: the input's dtype, as stored.
        input_block_shape: shape of the input's storage blocks, ZYX, in stored voxels; not part of
            the fingerprint.
        input_axis_layout: see :attr:`beam_inference.volumes.volume.Volume.axis_layout`; not part of
            the fingerprint; older records have none.
        further_inputs: the volumes whose channels follow those of the input.
        mask_origins: where index zero of the masks' arrays lies, ZYX, by their keys in the job
            file; without those at 0.
        masks: the masks by their keys in the job file; older records have none.
        roi: the box to produce, in the output's voxels.
        output_bounds: bounding box of the output.
        voxel_size_nm: voxel size of the output, ZYX.
        model_sha256: hash of the network, see :func:`beam_inference.models.hashes.model_sha256`.
        operator_sha256: hashes of the files that operators need, see
            :func:`beam_inference.job.operator_files.operator_sha256`; older records have none.
        engine: properties of the engine that determine bits, by name.
        prediction_bound: a power of two, how large the network's values are expected to be; see
            :mod:`beam_inference.geometry.exact_sums`. None in records of numerics less than 5.
        head_bounds: the same for each head of the network, of which the former is the largest;
            none if the network has no heads.
        working_set_bytes: memory that the network allocates for a batch, as measured; not part of
            the fingerprint.
        patch_seconds: time that the network took for a patch when it was tried, 0 if it was not;
            not part of the fingerprint.
        quantization_error: in precision int8, what the trial has measured; not part of the
            fingerprint. The hash of the network of integers is in ``engine``.
        versions: versions of libraries at first launch; not part of the fingerprint. Another
            version is only warned about.
        numerics: :data:`NUMERICS` at first launch.
    """

    config: DefiniteConfig
    requested_normalize: LevelsRequest | None = None
    requested_batch_size: int | None = None
    input_bounds: BoundingBox
    resampling: Resampling | None = None
    to_output: Resampling | None = None
    input_channels: int
    input_dtype: str
    input_block_shape: Shape
    input_axis_layout: list[list[int]] = Field(default_factory=list)
    further_inputs: list[ResolvedInput] = Field(default_factory=list)
    mask_origins: dict[str, Zyx] = Field(default_factory=dict)
    masks: dict[str, ResolvedMask] = Field(default_factory=dict)
    roi: BoundingBox
    output_bounds: BoundingBox
    voxel_size_nm: VoxelSizeNm
    model_sha256: str
    operator_sha256: dict[str, str] = Field(default_factory=dict)
    engine: dict[str, str]
    prediction_bound: PositiveFloat | None = None
    head_bounds: list[PositiveFloat] = Field(default_factory=list)
    working_set_bytes: int
    patch_seconds: float = 0.0
    quantization_error: QuantizationError | None = None
    versions: dict[str, str]
    numerics: int = 1

    @model_validator(mode="before")
    @classmethod
    def _read_first_version(cls, values: Any) -> Any:
        """Two keys had other names in the records of 7b7144c."""
        if not isinstance(values, dict):
            return values
        return {_FIRST_NAMES.get(key, key): value for key, value in values.items()}

    @model_validator(mode="after")
    def _check_numbers(self) -> ResolvedJob:
        """Refuse a record of another number of further inputs, or heads, than its job has."""
        if len(self.further_inputs) != len(self.config.inputs):
            raise ValueError(
                f"it tells of {len(self.further_inputs)} further inputs, and its job has "
                f"{len(self.config.inputs)}"
            )
        heads = len(self.config.model.heads or ())
        if self.head_bounds and len(self.head_bounds) != heads:
            raise ValueError(
                f"it has prediction bounds of {len(self.head_bounds)} heads, and its network has "
                f"{heads}"
            )
        return self

    @property
    def whole_roi(self) -> BoundingBox:
        """All that the input covers, in the output's voxels: the ROI where a job names none."""
        return self.input_bounds if self.to_output is None else self.to_output.target

    @property
    def axis_layouts(self) -> list[list[list[int]]]:
        """How the axes of each input are stored; empty for those of which that is not known."""
        return [self.input_axis_layout, *(each.axis_layout for each in self.further_inputs)]

    @property
    def sum_bounds(self) -> tuple[float, ...]:
        """The prediction bound of each head; one if the network has none, none if it is unknown."""
        if self.head_bounds:
            return tuple(self.head_bounds)
        return () if self.prediction_bound is None else (self.prediction_bound,)

    @property
    def quantized_sha256(self) -> str | None:
        """Hash of the network of integers that is run in precision int8; None in any other."""
        return self.engine.get("quantized")

    @cached_property
    def plan(self) -> InferencePlan:
        """The job's geometry, by the strategy of its launch."""
        return self.plan_in(self.config.inference.plan_strategy)

    @cached_property
    def exchange(self) -> SeamExchangePlan | None:
        """What chunks exchange by that strategy, whatever the launch's is; None of crops."""
        return None if self.config.inference.seams == "crop" else self.plan_in("exchange").exchange

    def plan_in(self, strategy: Strategy) -> InferencePlan:
        """Plan the job's geometry as it would be by another strategy."""
        return plan_geometry(
            self.config,
            volume=self.input_bounds,
            roi=self.roi,
            chunk_shape=self.config.inference.chunk_shape,
            strategy=strategy,
            input_block_shape=self.input_block_shape,
            output=self.output_bounds,
            resampling=self.resampling,
            to_output=self.to_output,
        )

    def of_output(self, key: str) -> ResolvedJob:
        """This job as if it wrote one of its outputs alone, which has the same bits then.

        Args:
            key: the key of the output in the job file.
        """
        if not self.config.outputs:
            return self
        keys = {
            operator_key(number, key): operator_key(number)
            for number in range(len(self.config.by_output[key].postprocess))
        }
        hashes = {keys[k]: value for k, value in self.operator_sha256.items() if k in keys}
        # Not a copy: that would keep what was derived of this one.
        values = {name: getattr(self, name) for name in ResolvedJob.model_fields}
        single = {"config": self.config.by_output[key], "operator_sha256": hashes}
        return ResolvedJob(**(values | single))

    def with_config(
        self,
        config: DefiniteConfig,
        roi: BoundingBox,
        requested_normalize: LevelsRequest | None,
        bounds: Sequence[float],
    ) -> ResolvedJob:
        """This job as another job file puts it; input, network and output are taken as they were.

        Args:
            config: the other job file, definite.
            roi: the box that it produces.
            requested_normalize: what it says of normalisation, where it names a levels file.
            bounds: prediction bounds as they follow from that file: of each head, or one.
        """
        return ResolvedJob(
            config=config,
            requested_normalize=requested_normalize,
            requested_batch_size=self.requested_batch_size,
            input_bounds=self.input_bounds,
            resampling=self.resampling,
            to_output=self.to_output,
            input_channels=self.input_channels,
            input_dtype=self.input_dtype,
            input_block_shape=self.input_block_shape,
            input_axis_layout=self.input_axis_layout,
            further_inputs=self.further_inputs,
            mask_origins=self.mask_origins,
            masks=self.masks,
            roi=roi,
            output_bounds=self.output_bounds,
            voxel_size_nm=self.voxel_size_nm,
            model_sha256=self.model_sha256,
            operator_sha256=self.operator_sha256,
            engine=self.engine,
            prediction_bound=max(bounds, default=None),
            head_bounds=list(bounds) if config.model.heads else [],
            working_set_bytes=self.working_set_bytes,
            patch_seconds=self.patch_seconds,
            quantization_error=self.quantization_error,
            versions=self.versions,
            numerics=self.numerics,
        )

    def input_bytes(self, shape: Zyx) -> int:
        """Bytes of the decoded storage blocks that a box of a shape, ZYX, is made of, at most."""
        if self.resampling is None:
            blocks = largest_block_cover(shape, self.input_block_shape, self.input_bounds.shape)
            return self._decoded_bytes(blocks)
        return self._decoded_bytes(self.resampling.source_blocks(shape, self.input_block_shape))

    def _decoded_bytes(self, shape: Sequence[Numbers]) -> int:
        return (
            self.input_channels * math.prod(map(int, shape)) * np.dtype(self.input_dtype).itemsize
        )

    def cached_input_bytes(self, threads: int) -> list[int]:
        """Bytes of decoded blocks that a process keeps for the next chunks, of each input."""
        extremes = self.plan.totals.extremes
        if self.resampling is None:
            first = self._decoded_bytes(extremes.input_blocks)
        else:
            first = self.input_bytes(extremes.input)
        of_chunk = [first, *(each.block_bytes for each in self.further_inputs)]
        count = cached_cutouts(threads, self.config.job.cached_cutouts)
        return [count * each for each in of_chunk]

    @cached_property
    def identity(self) -> dict[str, Json]:
        """Everything that determines the output's bytes, in sections of JSON values."""
        return identify_job(self)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of :attr:`identity`: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    @property
    def may_be_enlarged(self) -> bool:
        """Whether a later launch may enlarge the ROI: the lattice lies in a box of its own."""
        return self.config.roi is not None and self.config.roi.domain is not None

    @cached_property
    def records_key(self) -> str:
        """Name of the folders of records of chunks: 64 hexadecimal digits.

        It is the fingerprint, or, where that says nothing of the ROI, from which chunks are
        numbered, a hash of both.
        """
        if not self.may_be_enlarged:
            return self.fingerprint
        numbered = json.dumps([self.fingerprint, self.roi.start, self.roi.stop])
        return hashlib.sha256(numbered.encode()).hexdigest()

    def with_roi(self, roi: BoundingBox) -> ResolvedJob:
        """This job with another ROI."""
        # Not a copy: that would keep what was derived of this one.
        values = {name: getattr(self, name) for name in ResolvedJob.model_fields}
        return ResolvedJob(**(values | {"roi": roi}))

    def differences(self, other: ResolvedJob) -> list[str]:
        """List the keys in which this job's identity and another's differ, one line per key."""
        lines = []
        sections = {**self.identity, **other.identity}
        for section in sections:
            values = self.identity.get(section, {})
            theirs = other.identity.get(section, {})
            for key in sorted({*values, *theirs}):
                lines += _differences(f"{section}.{key}", values.get(key), theirs.get(key))
        return lines


def _differences(key: str, new: object, old: object) -> list[str]:
    """Describe how two JSON values differ: both if short, else the first part that differs."""
    if new == old:
        return []
    if max(len(str(new)), len(str(old))) > _LONGEST_VALUE:
        if isinstance(new, dict) and isinstance(old, dict) and new.keys() == old.keys():
            return [
                line for part in new for line in _differences(f"{key}.{part}", new[part], old[part])
            ]
        if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
            first = next(place for place, value in enumerate(new) if value != old[place])
            return _differences(f"{key}[{first}]", new[first], old[first])
    return [f"{key}: {_short(new)} here, {_short(old)} there"]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
