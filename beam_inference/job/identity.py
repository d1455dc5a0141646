"""The identity of a job's output: what determines its bytes, and enters its fingerprint.

A key that came after the first version enters only where it differs from its default, so that a new
key changes no fingerprint of jobs which do not use it. The keys of the first version enter always,
and so do all keys of other people's operators, whose defaults may change unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pydantic import BaseModel, TypeAdapter

from beam_inference.config.factories import factory_parts
from beam_inference.config.fields import Json
from beam_inference.config.inference import Inference
from beam_inference.config.job import OUTPUT
from beam_inference.config.network import Network
from beam_inference.config.operators import Operator
from beam_inference.config.volumes import Output
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.exact_sums import step_of
from beam_inference.geometry.plan import InferencePlan
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.operator_files import operator_key

if TYPE_CHECKING:
    from beam_inference.job.resolved_job import ResolvedJob

FIRST_KEYS: Mapping[str, frozenset[str]] = {
    "Input": frozenset(
        {"path", "spec", "scale", "select", "channel", "fill", "fill_value", "mask"}
    ),
    "Mask": frozenset({"path", "scale", "inverse", "fill_value"}),
    "Network": frozenset(
        {
            "input_channels",
            "output_channels",
            "channels",
            "activation",
            "normalize",
            "batch_norm",
            "crop_margin",
            "dims",
        }
    ),
    "Channel": frozenset({"affinity"}),
    "Affine": frozenset({"scale", "offset", "clip"}),
    "Sections": frozenset({"start", "levels", "clip"}),
    "Output": frozenset(
        {"format", "dtype", "encoding", "block_shape", "shard_shape", "value_range"}
    ),
    "FurtherOutput": frozenset(
        {"format", "dtype", "encoding", "block_shape", "shard_shape", "value_range"}
    ),
    "Smooth": frozenset({"operator", "sigma"}),
    "Select": frozenset({"operator", "channels"}),
    "Threshold": frozenset({"operator", "at"}),
    "Argmax": frozenset({"operator", "background"}),
    "Own": frozenset({"operator", "function", "output_channels", "halo"}),
}
"""Keys that enter always, by the class of the section (without the prefix Definite)."""

ALWAYS = frozenset({"operator"})
"""Keys that enter whatever their default is: they name what the other keys belong to."""

_FILES = frozenset({"path", "weights", "sha256"})
"""Keys that say where a network lies, which its hash stands for."""

_PLACES = {"Holes": frozenset({"path"})}
"""Keys inside sections that say where something lies, which a hash beside them stands for."""

_OF_NETWORK = ("parameters",)
"""Keys of an engine's description that are the same for every engine."""

ROUNDING = 1e-5
"""Difference that another engine, or another size of batches, may make, as a share of the values;
see guarantees.md."""

_EXACT_SUMS = 5
"""Numerics from which on sums do not depend on their order."""

_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)


def identify_job(job: ResolvedJob) -> dict[str, Json]:
    """Everything that determines the bytes of a job's output, in sections of JSON values."""
    config = job.config
    plan = job.plan
    # Where the network lies is not in it: its hash is. Nor is the pyramid: its scales are made of
    # the output and change none of its bytes, so a finished job that is given one has only that to
    # make; what determines them is in records of their own.
    # Of the prediction bound the resolved one is in it.
    files = _FILES | {"voxel_size_nm", "prediction_bound", "ensemble"}
    # The boxes say which voxels the output has, whatever the words for them are.
    places = frozenset({"path", "bounds", "pyramid", "voxel_size_nm", "resample"})
    engine: Json = _identify_engine(job)
    if job.numerics != 1:  # records of 1 do not have it
        engine["numerics"] = job.numerics
    return {
        "input": {
            **identify(config.input, without=frozenset({"resample"})),
            **_identify_resampling(job),
            **_identify_origin("mask_origin", job.mask_origins.get("input.mask")),
            "bounds": identify_box(job.input_bounds),
            "dtype": job.input_dtype,
        },
        **_identify_further_inputs(job),
        "model": {
            **identify(config.model, without=files),
            "sha256": job.model_sha256,
            "factory": _factory_name(config.model.path),
            **_identify_ensemble(config.model),
        },
        "engine": {
            **engine,
            **_identify_sums(job),
            "augment": _as_json(config.inference.augment),
        },
        "geometry": {
            **_identify_roi(job),
            "domain": identify_box(plan.lattice.domain),
            **_identify_ends(plan),
            "patch_shape": list(plan.lattice.patch_shape),
            "patch_overlap": list(plan.lattice.patch_overlap),
            **_identify_blending(config.inference),
            "chunk_shape": list(plan.chunks.chunk_shape),
            "seams": _identify_seams(job),
            "chunk_crop_margin": list(plan.chunk_crop_margin),
        },
        "postprocess": _identify_operators(job, OUTPUT),
        "mask": {}
        if config.mask is None
        else {**identify(config.mask), **_identify_origin("origin", job.mask_origins.get("mask"))},
        "output": {**_identify_output(config.output, places), **_identify_output_voxels(job)},
        **_identify_outputs(job, places),
    }


def _identify_roi(job: ResolvedJob) -> Json:
    """The ROI, unless the lattice lies in a box of its own, so that no voxel depends on the ROI."""
    return {} if job.may_be_enlarged else {"roi": identify_box(job.roi)}


def _identify_ends(plan: InferencePlan) -> Json:
    """Where operators repeat the last voxel, if not at the domain's ends, as in all first jobs."""
    if not any(plan.halo) or plan.inside == plan.lattice.domain:
        return {}
    return {"inside": identify_box(plan.inside)}


def _identify_output(output: Output, places: frozenset[str]) -> Json:
    values = identify(output, without=places)
    if output.preview is not None:
        values["preview"] = identify(output.preview, without=places)
    return values


def _identify_further_inputs(job: ResolvedJob) -> Json:
    """The further inputs, by their number; nothing where there are none, as in all first jobs."""
    inputs = {}
    pairs = zip(job.config.inputs, job.further_inputs, strict=True)
    for number, (section, found) in enumerate(pairs):
        resampling = found.resampling
        made: Json = {} if resampling is None else {"resampled": _as_json(resampling)}
        inputs[str(number)] = {
            **identify(section, without=frozenset({"resample"})),
            **made,
            **({"clip": [list(pair) for pair in found.limits]} if found.limits else {}),
            "bounds": identify_box(found.bounds),
            "dtype": found.dtype,
        }
    return {"inputs": inputs} if inputs else {}


def _identify_outputs(job: ResolvedJob, places: frozenset[str]) -> Json:
    """The further outputs, by their names; nothing where there are none, as in all first jobs."""
    outputs = {
        name: {
            **_identify_output(output, places | {"postprocess"}),
            "postprocess": _identify_operators(job, f"outputs.{name}"),
        }
        for name, output in sorted(job.config.outputs.items())
    }
    return {"outputs": outputs} if outputs else {}


def _identify_operators(job: ResolvedJob, output: str) -> Json:
    """The operators of an output, by their number."""
    return {
        str(number): _identify_operator(
            operator, job.operator_sha256.get(operator_key(number, output))
        )
        for number, operator in enumerate(job.config.by_output[output].postprocess)
    }


def _identify_resampling(job: ResolvedJob) -> Json:
    """How voxels are made of stored ones, unless they are these, as in all first jobs.

    The voxel size asked for is not in it: the boxes say all.
    """
    resampling = job.resampling
    request = job.config.input.resample
    if resampling is None or request is None:  # of others model.output_scale says all
        return {}
    limits = [list(pair) for pair in request.limits]
    clip = {"clip": limits[0] if len(limits) == 1 else limits} if limits else {}
    source = identify_box(resampling.source)
    return {"resampled": {"source": source, "orders": list(resampling.orders), **clip}}


def _identify_output_voxels(job: ResolvedJob) -> Json:
    """How the output's voxels are made of the network's, unless they are these."""
    resampling = job.to_output
    if resampling is None:
        return {}
    target = identify_box(resampling.target)
    return {"resampled": {"target": target, "orders": list(resampling.orders)}}


def _identify_ensemble(model: Network) -> Json:
    """What further networks count, and what makes them, unless there are none; see ``sha256``."""
    if not model.ensemble:
        return {}
    return {
        "ensemble": [
            {**identify(each, without=_FILES), "factory": _factory_name(each.path)}
            for each in model.ensemble
        ]
    }


def _identify_engine(job: ResolvedJob) -> Json:
    """What computes patches; of a job for several kinds, what their results have in common."""
    inference = job.config.inference
    if not inference.mixed_devices:
        return {**job.engine, "batch_size": inference.batch_size}
    shared = {key: job.engine[key] for key in _OF_NETWORK if key in job.engine}
    return {**shared, "precision": inference.precision, "agree_to": ROUNDING}


def _identify_sums(job: ResolvedJob) -> Json:
    """The steps of sums: one, as in all first jobs, or one for each head."""
    if job.head_bounds:
        return {"sum_steps": [step_of(bound) for bound in job.head_bounds]}
    return {} if job.prediction_bound is None else {"sum_step": step_of(job.prediction_bound)}


def _identify_blending(inference: Inference) -> Json:
    """Where patches lie and how they are weighted, unless it is as in all first jobs."""
    keys = {"lattice": inference.lattice, "blend": inference.blend}
    return {
        key: _as_json(value)
        for key, value in keys.items()
        if value != Inference.model_fields[key].get_default()
    }


def _identify_seams(job: ResolvedJob) -> str:
    """The seams of a job: two strategies with one result, which gave different bits once."""
    inference = job.config.inference
    return inference.plan_strategy if job.numerics < _EXACT_SUMS else inference.seams


def _identify_origin(key: str, origin: Zyx | None) -> Json:
    """Where index zero of a mask's array lies; nothing for one at 0, as for all first jobs."""
    return {} if origin is None else {key: list(origin)}


def identify(section: BaseModel, without: frozenset[str] = frozenset()) -> Json:
    """Values of a section that belong to its identity, as JSON.

    Args:
        section: a section of the job file, or an operator.
        without: keys that do not determine the output's bytes, such as where a file lies.

    Returns:
        Values by key, in the order of the fields.
    """
    kind = type(section)
    if not kind.__module__.startswith("beam_inference."):
        return {key: _as_json(value) for key, value in section if key not in without}
    first = FIRST_KEYS.get(kind.__name__.removeprefix("Definite"), frozenset()) | ALWAYS
    without |= _PLACES.get(kind.__name__, frozenset())
    fields = kind.model_fields
    return {
        key: _as_json(value)
        for key, value in section
        if key not in without and (key in first or value != fields[key].get_default())
    }


def _identify_operator(operator: Operator, sha256: str | None) -> Json:
    """Identity of an operator; files whose hash is known are named without their folders."""
    if sha256 is None or not operator.needed_files:  # older records have no hashes
        return identify(operator)
    return {**identify(operator.with_absolute_paths(_base_name)), "sha256": sha256}


def identify_box(box: BoundingBox) -> dict[str, list[int]]:
    """A bounding box as JSON."""
    return {"start": list(box.start), "stop": list(box.stop)}


def _as_json(value: object) -> Any:
    if isinstance(value, BaseModel):
        return identify(value)
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return _ANYTHING.dump_python(value, mode="json")


def _factory_name(path: str) -> str | None:
    """Name of the function that makes the network, without the folder of its file."""
    factory = factory_parts(path)
    return f"{PurePath(factory[0]).name}:{factory[1]}" if factory else None


def _base_name(path: str) -> str:
    """Name of a file, given by its path or URL, without its folder."""
    name = PurePath(path).name
    return unquote(name) if "://" in path else name
