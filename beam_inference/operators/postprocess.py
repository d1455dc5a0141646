"""Operators applied to the blended values of a box before they are written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from beam_inference.config.operators import ArrayPlace, Operator, PlacedFunction, Values
from beam_inference.errors import ModelContractError


def build_functions(operators: Sequence[Operator]) -> list[PlacedFunction]:
    """Return operators as functions of float32 values (C, Z, Y, X) that check their result's shape.

    They are also told where the values are.

    Raises:
        ModelContractError: a function of the user's cannot be imported.
    """
    return [_with_checked_result(operator) for operator in operators]


def apply_functions(
    functions: Sequence[PlacedFunction], values: Values, place: ArrayPlace
) -> Values:
    """Apply functions to values (C, Z, Y, X), one after the other; the box stays the same."""
    for function in functions:
        values = function(values, place)
    return values


def _with_checked_result(operator: Operator) -> PlacedFunction:
    function = operator.make_placed_function()

    def run_and_check(values: Values, place: ArrayPlace) -> Values:
        shape = values.shape
        result = np.asarray(function(values, place))
        expected = (operator.channels_after(shape[0]), *shape[1:])
        if result.shape != expected:
            raise ModelContractError(
                f"postprocess: {operator.display_name} returned an array of shape "
                f"{list(result.shape)} for one of {list(shape)}; expected {list(expected)} "
                "(channels, z, y, x)"
            )
        return result.astype(np.float32, copy=False)

    return run_and_check
