"""Operators on the blended values before they are written, as a job file describes them.

An operator is one class, which derives from :class:`Operator` and is installed under its name as an
entry point ``beam_inference.operators``. This module knows operators by name alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializationInfo,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from beam_inference.config.fields import Json, Model, unknown_key_hint
from beam_inference.config.plugins import list_plugins, load_plugin, load_usable
from beam_inference.errors import ConfigError
from beam_inference.foreign_text import shorten_value
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue

Values = NDArray[np.float32]
"""Values of a box, float32, axes (channel, z, y, x)."""

Interval = tuple[float, float]
"""The lowest and the highest value there can be."""


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """Where the values are that an operator is given.

    Attributes:
        box: the voxels of the output that they belong to, halo included.
        voxel_size_nm: the size of these voxels, ZYX.
    """

    box: BoundingBox
    voxel_size_nm: VoxelSizeNm


PlacedFunction = Callable[[Values, ArrayPlace], Values]
"""An operator as a function of the values of a box, which it may overwrite, and of their place."""


class Operator(Model):
    """Base of all operators: its fields are the operator's parameters.

    A subclass states what it does in :meth:`make_function`, and overrides what else differs from an
    operator that changes each voxel by itself. The result at a voxel may depend only on the
    values around it, never on where a box begins: then chunks have no seams.

    Attributes:
        operator: the name by which job files choose it.
    """

    operator: str

    @property
    def display_name(self) -> str:
        """The name for messages."""
        return self.operator

    @property
    def halo_zyx(self) -> Zyx:
        """Voxels around a voxel that its result depends on, per side, ZYX."""
        return (0, 0, 0)

    @property
    def gives_labels(self) -> bool:
        """Whether results are whole numbers that name something: they are written as they are."""
        return False

    @property
    def keeps_labels(self) -> bool:
        """Whether whole numbers that name something are such numbers afterwards, too."""
        return False

    def channels_after(self, channels: int) -> int:
        """Number of channels of the result.

        Args:
            channels: number of channels of the values that it is given.

        Raises:
            ValueError: it cannot take so many channels.
        """
        return channels

    def largest_label(self, channels: int) -> int:
        """The largest result there can be; asked for only where the operator gives labels.

        Args:
            channels: number of channels of the values that it is given.
        """
        raise NotImplementedError(
            f"operator {self.operator} gives labels, but does not say how large they are"
        )

    def interval_after(self, interval: Interval | None, channels: int) -> Interval | None:  # noqa: ARG002
        """The interval of the results; None if it is not known.

        Args:
            interval: that of the values that it is given; None if it is not known.
            channels: number of channels of these values.

        Raises:
            ValueError: its parameters make no sense for values of this interval.
        """
        return None

    def bytes_per_voxel(self, channels: int) -> int:
        """The most that it holds at a time per voxel, its result included, its argument not.

        Args:
            channels: number of channels of the values that it is given.
        """
        after = self.channels_after(channels)
        return 4 * after + 4 * max(channels, after)  # one array on the way

    def with_absolute_paths(self, absolute: Callable[[str], str]) -> Operator:  # noqa: ARG002
        """The operator with the paths of its files replaced by what a function gives for them."""
        return self

    @property
    def needed_files(self) -> Sequence[str]:
        """Paths and URLs of the files that it needs wherever the job runs.

        Their hashes are part of the job's fingerprint. :meth:`make_function` is called on an
        operator whose files are on this machine.
        """
        return ()

    def make_function(self) -> Callable[[Values], Values]:
        """Return the operator as a function of the values of a box, which it may overwrite.

        Raises:
            ModelContractError: something that it needs is absent.
        """
        raise NotImplementedError(f"operator {self.operator} has no function")

    def make_placed_function(self) -> PlacedFunction:
        """Return the operator as a function that is also told where the values are.

        By default it does not matter: :meth:`make_function` says all.

        Raises:
            ModelContractError: something that it needs is absent.
        """
        function = self.make_function()
        return lambda values, _place: function(values)


class _InstalledOperator:
    """Pydantic's schema of an operator: looked up by name, and validated by its own class."""

    def __get_pydantic_core_schema__(
        self, _source: object, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            validate_operator,
            serialization=core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True),
        )

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        classes = load_usable("operators", _operator_class)
        choices = {name: TypeAdapter(each).core_schema for name, each in classes.items()}
        return handler(core_schema.tagged_union_schema(choices, "operator"))


def validate_operator(value: object) -> Operator:
    """An operator from its keys, or as it is.

    Raises:
        ValidationError: the keys are wrong; places in it are relative to ``value``.
        ValueError: it is no mapping of keys, or its class is no operator.
    """
    if isinstance(value, Operator):
        return value
    if not isinstance(value, dict):
        raise ValueError(
            f"expected a mapping such as {{operator: argmax}}; found {shorten_value(value)}"
        )
    try:
        kind = _operator_class(value.get("operator"))
    except ConfigError as error:
        cause = PydanticCustomError("value_error", "{message}", {"message": str(error)})
        line = InitErrorDetails(type=cause, loc=("operator",), input=value.get("operator"))
        raise ValidationError.from_exception_data("operator", [line], hide_input=True) from None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _with_hints(error, kind) from None


def _operator_class(name: object) -> type[Operator]:
    installed = list_plugins("operators")
    if not isinstance(name, str) or name not in installed:
        raise ConfigError(
            f"{shorten_value(name)} is not among the installed operators: {', '.join(installed)}"
        )
    kind = load_plugin("operators", name)
    if not (isinstance(kind, type) and issubclass(kind, Operator)):
        raise ConfigError(
            f"{name} is installed as {installed[name].object}, which does not derive from "
            "beam_inference.config.operators.Operator"
        )
    return kind


def _with_hints(error: ValidationError, kind: type[Operator]) -> ValidationError:
    """The errors of an operator's keys; an unknown key comes with the nearest known one."""
    lines = []
    for line in error.errors():
        details = InitErrorDetails(type=line["type"], loc=line["loc"], input=line["input"])
        if "ctx" in line:
            details["ctx"] = line["ctx"]
        if line["type"] == "extra_forbidden" and len(line["loc"]) == 1:
            hint = f"unknown key; {unknown_key_hint(str(line['loc'][0]), kind.model_fields)}"
            details["type"] = PydanticCustomError("value_error", "{hint}", {"hint": hint})
        lines.append(details)
    return ValidationError.from_exception_data(error.title, lines, hide_input=True)


def _dump(operator: Operator, info: SerializationInfo) -> Json:
    return operator.model_dump(mode=info.mode)


InstalledOperator = Annotated[Operator, _InstalledOperator()]
"""Any operator that is installed, as a field of a model."""


def total_halo(operators: Sequence[Operator]) -> Zyx:
    """Voxels beyond its core that a chunk must compute for all operators, per side, ZYX."""
    halo: Zyx = (0, 0, 0)
    for operator in operators:
        halo = zyx.add(halo, operator.halo_zyx)
    return halo


def channels_after(operators: Sequence[Operator], channels: int) -> int:
    """Channels of the result of all operators.

    Args:
        operators: in the order in which they are applied.
        channels: number of channels of the network.

    Raises:
        ValueError: an operator cannot take what the one before it gives.
    """
    for operator in operators:
        channels = operator.channels_after(channels)
    return channels


def interval_after(
    operators: Sequence[Operator], interval: Interval | None, channels: int
) -> Interval | None:
    """Interval of the result of all operators; None if it is not known.

    Args:
        operators: in the order in which they are applied.
        interval: interval of the network's values; None if it is not known.
        channels: number of channels of the network.

    Raises:
        ValueError: an operator makes no sense for the values that it is given.
    """
    for number, operator in enumerate(operators):
        try:
            interval = operator.interval_after(interval, channels)
        except ValueError as error:
            raise ValueError(f"postprocess.{number}: {error}") from None
        channels = operator.channels_after(channels)
    return interval


def gives_labels(operators: Sequence[Operator]) -> bool:
    """Whether the result is whole numbers, which are written as they are."""
    found = False
    for operator in operators:
        found = operator.gives_labels or (found and operator.keeps_labels)
    return found


def largest_label(operators: Sequence[Operator], channels: int) -> int:
    """The largest value that operators which give labels can give.

    Args:
        operators: at least one, in the order in which they are applied.
        channels: number of channels of the network.
    """
    giving = max(number for number, each in enumerate(operators) if each.gives_labels)
    return operators[giving].largest_label(channels_after(operators[:giving], channels))


def operator_bytes(operators: Sequence[Operator], channels: int) -> int:
    """The most that operators hold at a time per voxel, beyond the values that the first is given.

    Args:
        operators: in the order in which they are applied.
        channels: number of channels of the network.
    """
    if not operators:
        return 0
    most = 0
    held = 0
    for operator in operators:
        most = max(most, held + operator.bytes_per_voxel(channels))
        channels = operator.channels_after(channels)
        held = 4 * channels
    return max(most, held + channels)  # what is finite, as bools
