"""The operator ``own``: a function of the user's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from beam_inference.config.factories import factory_parts, load_object
from beam_inference.config.fields import Count, Margin, Url
from beam_inference.config.operators import Operator, Values
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.zyx import Zyx


class Own(Operator):
    """A function of yours, the same for every place.

    It takes float32 (C, Z, Y, X) and returns float32 (output_channels, Z, Y, X).
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

    def with_absolute_paths(self, absolute: Callable[[str], str]) -> Operator:
        """The operator with another path of its file, if it has one."""
        if not self.needed_files:
            return self
        module, name = factory_parts(self.function) or ("", "")
        return self.model_copy(update={"function": f"{absolute(module)}:{name}"})

    def make_function(self) -> Callable[[Values], Values]:
        """Import the function.

        Raises:
            ModelContractError: it cannot be imported.
        """
        try:
            function: Callable[[Values], Values] = load_object(self.function)
        except Exception as error:  # the module's own code runs, and may raise anything
            raise ModelContractError(
                f"postprocess: cannot import {self.function}: {describe_error(error)}. It "
                "must be installed where the job runs."
            ) from None
        return function
