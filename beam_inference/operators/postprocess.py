"""What is done to the blended values of a box before they are written: pure, and the same wherever a chunk ends."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from beam_inference.config.operators import (
    SMOOTH_RADIUS,
    Argmax,
    Operator,
    Own,
    Select,
    Smooth,
    Threshold,
)
from beam_inference.errors import ModelContractError

Values = NDArray[np.float32]


def opened(operators: Sequence[Operator]) -> list[Callable[[Values], Values]]:
    """What each operator does to float32 values (C, Z, Y, X).

    Raises:
        ModelContractError: a function of the user's cannot be imported.
    """
    return [_opened(operator) for operator in operators]


def applied(operators: Sequence[Callable[[Values], Values]], values: Values) -> Values:
    """The values after all operators, of the same box."""
    for operator in operators:
        values = operator(values)
    return values


def _opened(operator: Operator) -> Callable[[Values], Values]:
    if isinstance(operator, Smooth):
        return _smoothing(operator.sigma)
    if isinstance(operator, Select):
        return lambda values: values[operator.channels]
    if isinstance(operator, Threshold):
        return lambda values: (values >= np.float32(operator.at)).astype(np.float32)
    if isinstance(operator, Argmax):
        return _vote(operator.background)
    return _own(operator)


def _smoothing(sigma: tuple[float, float, float]) -> Callable[[Values], Values]:
    def smooth(values: Values) -> Values:
        smoothed: Values = ndimage.gaussian_filter(
            values,
            (0.0, *sigma),
            mode="nearest",
            radius=[0, *(int(np.ceil(SMOOTH_RADIUS * s)) for s in sigma)],
        )
        return smoothed

    return smooth


def _vote(background: float | None) -> Callable[[Values], Values]:
    def vote(values: Values) -> Values:
        classes: Values = values.argmax(axis=0)[None].astype(np.float32)
        if background is not None:
            classes += 1
            classes[values.max(axis=0)[None] < np.float32(background)] = 0
        return classes

    return vote


def _own(operator: Own) -> Callable[[Values], Values]:
    module, _, name = operator.function.partition(":")
    try:
        function: Callable[[Values], Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module's own code runs, and may raise anything
        raise ModelContractError(
            f"postprocess: cannot import {operator.function}: {type(error).__name__}: {error}. It "
            "must be installed where the job runs."
        ) from None

    def own(values: Values) -> Values:
        result = np.asarray(function(values))
        expected = (operator.output_channels, *values.shape[1:])
        if result.shape != expected:
            raise ModelContractError(
                f"postprocess: {operator.function} returned an array of shape {list(result.shape)} "
                f"for one of {list(values.shape)}; expected {list(expected)} (channels, z, y, x)"
            )
        return result.astype(np.float32, copy=False)

    return own
