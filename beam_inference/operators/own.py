"""The operator ``own``: a function of the user's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from beam_inference.config.factories import factory_parts, load_object
from beam_inference.config.fields import Count, Margin, Url
from beam_inference.config.operators import ArrayPlace, Operator, PlacedFunction, Values
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.zyx import Zyx

LARGEST_LABEL = 2**24
"""The largest label of an operator: float32 holds all whole numbers up to this one."""


class Own(Operator):
    """A function of yours.

    It takes float32 (C, Z, Y, X) and returns float32 (output_channels, Z, Y, X). Where it has
    parameters ``box`` or ``voxel_size_nm``, it is told where the array lies.
    """

    operator: Literal["own"]
    function: Url = Field(
        description=(
            "package.module:function, importable where the job runs, or file.py:function, the file "
            "by path or URL"
        )
    )
    output_channels: Count
    halo: Margin = Field((0, 0, 0), description="voxels that a result depends on, per side, ZYX")
    labels: Annotated[Count, Field(le=LARGEST_LABEL)] | None = Field(
        None,
        description=(
            "the function returns labels, whole numbers from 0 to this one, which are written as "
            "they are; default: values"
        ),
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        module, name = factory_parts(self.function) or ("", "")
        if not name or not (module.endswith(".py") or re.fullmatch(r"[A-Za-z_][\w.]*", module)):
            raise ValueError(
                f"function {self.function} is not of the form package.module:function or "
                "file.py:function"
            )
        return self

    @property
    def display_name(self) -> str:
        """Place at which the function is defined."""
        return self.function

    @property
    def halo_zyx(self) -> Zyx:
        """What the job file says."""
        return self.halo

    @property
    def needed_files(self) -> Sequence[str]:
        """The file that defines the function, if it is one."""
        module, _ = factory_parts(self.function) or ("", "")
        return [module] if module.endswith(".py") else []

    def channels_after(self, channels: int) -> int:  # noqa: ARG002
        """What the job file says."""
        return self.output_channels

    @property
    def gives_labels(self) -> bool:
        """Whether the job file says how large labels are."""
        return self.labels is not None

    def largest_label(self, channels: int) -> int:  # noqa: ARG002
        """What the job file says."""
        return self.labels or 0

    def with_absolute_paths(self, absolute: Callable[[str], str]) -> Operator:
        """The operator with another path of its file, if it has one."""
        if not self.needed_files:
            return self
        module, name = factory_parts(self.function) or ("", "")
        return self.model_copy(update={"function": f"{absolute(module)}:{name}"})

    def make_placed_function(self) -> PlacedFunction:
        """Import the function.

        Raises:
            ModelContractError: it cannot be imported.
        """
        function = self._load()
        wanted = _wanted_of_place(function)

        def run(values: Values, place: ArrayPlace) -> Values:
            result = function(values, **{name: getattr(place, name) for name in wanted})
            largest = self.labels
            return result if largest is None else self._check_labels(np.asarray(result), largest)

        return run

    def _check_labels(self, result: Values, largest: int) -> Values:
        """Refuse labels that could not be written as they are.

        Raises:
            ModelContractError: there are fractions, or numbers beyond the largest.
        """
        is_label = (result >= 0) & (result <= largest) & (result == np.rint(result))
        if not is_label.all():
            raise ModelContractError(
                f"postprocess: {self.display_name} returned {result[~is_label].flat[0]:g}; labels: "
                f"{largest} expects whole numbers from 0 to {largest}"
            )
        return result

    def _load(self) -> Callable[..., Any]:
        try:
            function: Callable[..., Any] = load_object(self.function)
        except Exception as error:  # the module's own code runs, and may raise anything
            raise ModelContractError(
                f"postprocess: cannot import {self.function}: {describe_error(error)}. It "
                "must be installed where the job runs."
            ) from None
        return function


def _wanted_of_place(function: Callable[..., Any]) -> list[str]:
    """What a function asks to be told of the place of its values, by names of its parameters."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of an object without a signature
        return []
    return [name for name in ("box", "voxel_size_nm") if name in names]
