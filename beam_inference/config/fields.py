"""Types of fields that several sections of the job file share: numbers, URLs, axes in threes."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeAlias
from urllib.parse import unquote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    PositiveFloat,
    Strict,
    Tag,
    ValidationError,
)

from beam_inference.foreign_text import clean_line, clean_text, holds_credentials, shorten_text
from beam_inference.geometry.origin import FARTHEST

Json: TypeAlias = dict[str, Any]
"""An object as it stands in JSON or YAML: values by key."""

_LONGEST_PATH = 4096
_LONGEST_NAME = 255


Integer = Annotated[int, Strict(), Field(ge=-FARTHEST, le=FARTHEST)]
Label = Annotated[int, Strict(), Field(ge=-(2**63), le=2**64 - 1)]


Count = Annotated[int, Strict(), Field(gt=0, le=FARTHEST)]


Natural = Annotated[int, Strict(), Field(ge=0, le=FARTHEST)]


Seconds = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
"""Seconds, at most some eleven days."""


def _as_path(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("an empty path")
    if isinstance(value, str):
        refuse_credentials(value)
        refuse_overlong(value)
    return value


def refuse_credentials(url: str) -> None:
    """Refuse a URL that carries credentials; the message does not repeat it. Raises ValueError."""
    if holds_credentials(url):
        raise ValueError(
            "this URL holds credentials (user:password@, or a signature or token after ? or #). "
            "What a job names is recorded beside its output and named in messages, where others "
            "can read it. Let the store find its credentials, see docs/object-stores.md"
        )


def refuse_overlong(path: str) -> None:
    """Refuse a local path that no file system can hold. Raises ValueError."""
    if "://" in path and not path.startswith("file://"):
        return
    name = unquote(path) if path.startswith("file://") else path
    size = len(os.fsencode(name))
    longest = max(len(os.fsencode(part)) for part in name.split("/"))
    if size >= _LONGEST_PATH or longest > _LONGEST_NAME:
        raise ValueError(
            f"a path of {size:,} bytes, with up to {longest:,} between slashes; file systems hold "
            f"less than {_LONGEST_PATH:,}, and at most {_LONGEST_NAME} between slashes"
        )


def refuse_unwritable(url: str) -> None:
    """Refuse a URL that can only be read from, or not be read back. Raises ValueError."""
    if re.match("https?://", url):
        raise ValueError(
            "http(s):// can only be read from; write to a local folder, gs:// or s3://"
        )
    patterns = "" if "://" not in url or url.startswith("file://") else "*[\n"
    odd = [sign for sign in f"|\\{patterns}" if sign in unquote(url)]
    if odd:
        signs = " and ".join(odd).replace("\n", "a line break")
        raise ValueError(
            f"the name of what is written has {signs} in it, which stands for something else when "
            "it is read back: give it another name"
        )


def _as_writable(value: object) -> object:
    if isinstance(value, str):
        refuse_unwritable(value)
    return _as_path(value)


Url = Annotated[str, BeforeValidator(_as_path)]


WritableUrl = Annotated[str, BeforeValidator(_as_writable)]


SafeText = Annotated[str, AfterValidator(clean_text)]
"""Text from elsewhere, such as an error of a user's code; a record holds it clean."""

SafeLine = Annotated[str, AfterValidator(clean_line)]
"""The same on one line, for messages."""


class Model(BaseModel):
    """Frozen, and strict about unknown keys and numbers that are none."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )


class Frozen(BaseModel):
    """A record as it stands in JSON: frozen, strict about unknown keys, of finite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False
    )


def describe_fault(error: ValidationError) -> str:
    """What pydantic finds wrong first, and where in the values; for messages."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    fault = shorten_text(first["msg"])
    return f"{shorten_text(place)}: {fault}" if place else fault


def unknown_key_hint(key: str, fields: Iterable[str]) -> str:
    """A hint at the key that may have been meant by one that a section does not have."""
    close = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(fields)}"


def meant_hint(name: str, known: Iterable[str]) -> str:
    """The names that may have been meant by an unknown one, after a sentence; empty if none."""
    close = difflib.get_close_matches(name.lower(), list(known), n=2)
    return f". Did you mean {' or '.join(sorted(close))}?" if close else ""


INTEGER_DTYPES = ("uint8", "uint16", "int8", "int16")
"""Integer dtypes that a network's values are scaled to; float32 holds each of their values."""


LABEL_DTYPES = ("uint32", "uint64")
"""Integer dtypes for labels alone."""


def _three(value: object) -> object:
    """Accept ``64x64x64`` for a shape: it needs no quoting where other tools pass flags on."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+x-?\d+x-?\d+", value):
        return [int(n) for n in value.split("x")]
    return value


def as_list(value: object) -> object:
    """A single integer as a list of one; anything else as it is."""
    return [value] if isinstance(value, int) else value


_InThree = BeforeValidator(
    _three,
    json_schema_input_type=tuple[int, int, int]
    | Annotated[str, Field(pattern=r"^-?\d+x-?\d+x-?\d+$")],
)


Point = Annotated[tuple[Integer, Integer, Integer], _InThree]


Shape = Annotated[tuple[Count, Count, Count], _InThree]
Scale = Annotated[
    Count | Annotated[str, Field(pattern=r"^1/([2-9]|[1-9][0-9]{1,3})$")],
    Field(description="a whole number, or one over a whole number, such as 1/2"),
]
Scales = Annotated[
    tuple[Scale, Scale, Scale],
    BeforeValidator(
        _three,
        json_schema_input_type=tuple[Scale, Scale, Scale]
        | Annotated[str, Field(pattern=r"^-?\d+x-?\d+x-?\d+$")],
    ),
]


Margin = Annotated[tuple[Natural, Natural, Natural], _InThree]


VoxelSize = tuple[PositiveFloat, PositiveFloat, PositiveFloat]


Range = tuple[FiniteFloat, FiniteFloat]


Numbers = Annotated[
    Annotated[FiniteFloat, Tag("number")]
    | Annotated[list[FiniteFloat], Field(min_length=1), Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "number"),
]
"""A number for all channels, or a list with one for each."""

LEAST_NUMBER = 2.0**-126
"""The least positive number of float32 that every machine computes with: others become 0."""


def has_zero(numbers: float | list[float]) -> bool:
    """Whether a number, or one of a list, is 0 in float32."""
    return any(
        abs(each) < LEAST_NUMBER for each in (numbers if isinstance(numbers, list) else [numbers])
    )
