"""What of a job's keys enters its fingerprint.

A key that came after the first version enters only where it differs from its default, so that a new
key changes no fingerprint of jobs which do not use it. The keys of the first version enter always.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter

from beam_inference.config.fields import Json
from beam_inference.geometry.bounding_box import BoundingBox

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
    "Smooth": frozenset({"operator", "sigma"}),
    "Select": frozenset({"operator", "channels"}),
    "Threshold": frozenset({"operator", "at"}),
    "Argmax": frozenset({"operator", "background"}),
    "Own": frozenset({"operator", "function", "output_channels", "halo"}),
}
"""Keys that enter always, by the class of the section (without the prefix Definite)."""

ALWAYS = frozenset({"operator"})
"""Keys that enter whatever their default is: they name what the other keys belong to."""

_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)


def identify(section: BaseModel, without: frozenset[str] = frozenset()) -> Json:
    """Values of a section that belong to its identity, as JSON.

    Args:
        section: a section of the job file, or an operator.
        without: keys that do not determine the output's bytes, such as where a file lies.

    Returns:
        Values by key, in the order of the fields.
    """
    kind = type(section)
    first = FIRST_KEYS.get(kind.__name__.removeprefix("Definite"), frozenset()) | ALWAYS
    fields = kind.model_fields
    return {
        key: _as_json(value)
        for key, value in section
        if key not in without and (key in first or value != fields[key].get_default())
    }


def identify_box(box: BoundingBox) -> dict[str, list[int]]:
    """A bounding box as JSON."""
    return {"start": list(box.start), "stop": list(box.stop)}


def _as_json(value: object) -> Any:
    if isinstance(value, BaseModel):
        return identify(value)
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    return _ANYTHING.dump_python(value, mode="json")
