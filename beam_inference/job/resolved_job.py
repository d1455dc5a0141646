"""A job with everything definite: what workers and later launches go by, and what identifies its output."""

from __future__ import annotations

import hashlib
import json
import math
from functools import cached_property
from pathlib import PurePath
from typing import Any

import numpy as np

from beam_inference.config.factories import factory_parts
from beam_inference.config.fields import Frozen
from beam_inference.config.job import JobConfig
from beam_inference.config.normalize import Contrast, Standard
from beam_inference.config.operators import total_halo
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.plan import InferencePlan, SeamMode, make_plan
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.identity import identify, identify_box
from beam_inference.limits import cached_cutouts

_TOLD = 120
"""Characters of a value that are told of a difference."""


NUMERICS = 4
"""Raised whenever the same job would have other bits: then what began before is not gone on with."""


class ResolvedJob(Frozen):
    """A job with every default and ``auto`` made definite: what workers and later launches go by.

    Attributes:
        config: the job, paths absolute, device definite; ``model.normalize`` as what was made of a
            levels file.
        asked_normalize: what the job file says instead, where it names such a file; not part of the
            fingerprint.
        asked_batch_size: what was asked for, where the device had too little memory for it at first
            launch; ``config`` has what it had room for. Not part of the fingerprint.
        input_bounds, input_channels, input_dtype: of the volume read.
        input_block_shape: of its storage, ZYX; not part of the fingerprint.
        roi: the box to produce.
        output_bounds: extent of the output.
        voxel_size_nm: of the output, ZYX.
        model_sha256: see :func:`beam_inference.models.files.model_sha256`.
        engine: what of the engine determines bits, see
            :meth:`beam_inference.engines.loading.Predictor.describe`.
        working_set_bytes: what the network allocates for a batch, measured; not part of the
            fingerprint.
        numerics: :data:`NUMERICS` at first launch.
        versions: of the libraries at first launch; not part of the fingerprint, only warned about.
    """

    config: JobConfig
    asked_normalize: Contrast | Standard | None = None
    asked_batch_size: int | None = None
    input_bounds: BoundingBox
    input_channels: int
    input_dtype: str
    input_block_shape: Zyx
    roi: BoundingBox
    output_bounds: BoundingBox
    voxel_size_nm: tuple[float, float, float]
    model_sha256: str
    engine: dict[str, str]
    working_set_bytes: int
    versions: dict[str, str]
    numerics: int = 1

    @cached_property
    def plan(self) -> InferencePlan:
        """The job's geometry; with chunks of one block as long as their shape is not decided."""
        return self.plan_in(self.config.inference.seams)

    def plan_in(self, seams: SeamMode) -> InferencePlan:
        """The plan as it would be in a seam mode: exchange, recompute or crop."""
        inference = self.config.inference
        output = self.config.output
        roi = self.config.roi
        return make_plan(
            volume=self.input_bounds,
            roi=self.roi,
            context=roi.context if roi else (0, 0, 0),
            patch_shape=inference.patch_shape,
            patch_overlap=inference.patch_overlap,
            chunk_shape=(
                output.write_shape if inference.chunk_shape == "auto" else inference.chunk_shape
            ),
            crop_margin=self.config.model.crop_margin,
            seams=seams,
            chunk_crop_margin=inference.chunk_crop_margin or inference.patch_overlap,
            block_shape=output.write_shape,
            halo=total_halo(self.config.postprocess),
            input_block_shape=self.input_block_shape,
        )

    def input_bytes(self, shape: Zyx) -> int:
        """Of so many of its voxels, decoded."""
        return self.input_channels * math.prod(shape) * np.dtype(self.input_dtype).itemsize

    def cached_input_bytes(self, threads: int) -> int:
        """Decoded input blocks that a process of so many threads keeps: what the next chunks of runs read again."""
        return cached_cutouts(threads) * self.input_bytes(self.plan.totals.extremes.input_blocks)

    @cached_property
    def identity(self) -> dict[str, dict[str, Any]]:
        """Everything that determines the output's bytes, in sections of JSON values."""
        config = self.config
        plan = self.plan
        # Where the network lies is not in it: its hash is. Nor is the pyramid: its scales are made
        # of the output and change none of its bytes, so a finished job that is given one has only
        # that to make; what determines them is in records of their own.
        files = frozenset({"path", "weights", "sha256", "voxel_size_nm"})
        places = frozenset({"path", "bounds", "pyramid"})
        engine: dict[str, Any] = dict(self.engine)
        if self.numerics != 1:  # records of 1 do not have it
            engine["numerics"] = self.numerics
        return {
            "input": {
                **identify(config.input),
                "bounds": identify_box(self.input_bounds),
                "dtype": self.input_dtype,
            },
            "model": {
                **identify(config.model, without=files),
                "sha256": self.model_sha256,
                "factory": _factory_name(config.model.path),
            },
            "engine": {
                **engine,
                "batch_size": config.inference.batch_size,
                "augment": config.inference.augment,
            },
            "geometry": {
                "roi": identify_box(self.roi),
                "domain": identify_box(plan.lattice.domain),
                "patch_shape": list(plan.lattice.patch_shape),
                "patch_overlap": list(plan.lattice.patch_overlap),
                "chunk_shape": list(plan.chunks.chunk_shape),
                "seams": plan.seams,
                "chunk_crop_margin": list(plan.chunk_crop_margin),
            },
            "postprocess": {
                str(number): identify(operator)
                for number, operator in enumerate(config.postprocess)
            },
            "mask": {} if config.mask is None else identify(config.mask),
            "output": identify(config.output, without=places),
        }

    @cached_property
    def fingerprint(self) -> str:
        """Hash of :attr:`identity`: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def differences(self, other: ResolvedJob) -> list[str]:
        """What differs between the identities of this job and another, one line per key."""
        lines = []
        for section, values in self.identity.items():
            theirs = other.identity[section]
            for key in sorted({*values, *theirs}):
                lines += _differences(f"{section}.{key}", values.get(key), theirs.get(key))
        return lines


def _differences(key: str, here: object, there: object) -> list[str]:
    """What differs between two JSON values: the values if they are short, else the first part that differs."""
    if here == there:
        return []
    if max(len(str(here)), len(str(there))) > _TOLD:
        if isinstance(here, dict) and isinstance(there, dict) and here.keys() == there.keys():
            return [
                line
                for part in here
                for line in _differences(f"{key}.{part}", here[part], there[part])
            ]
        if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
            first = next(place for place, value in enumerate(here) if value != there[place])
            return _differences(f"{key}[{first}]", here[first], there[first])
    return [f"{key}: {_short(here)} here, {_short(there)} there"]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _TOLD else f"{text[:_TOLD]}…"


def _factory_name(path: str) -> str | None:
    """Which function makes the network, without the folder that its file lies in."""
    factory = factory_parts(path)
    return f"{PurePath(factory[0]).name}:{factory[1]}" if factory else None
