"""The heads of a network that returns several arrays, as a job file describes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import Discriminator, Field, PositiveFloat, Tag, model_validator

from beam_inference.config.fields import Count, Model, Natural
from beam_inference.geometry.exact_sums import bound_above

HeadKey = Annotated[
    Annotated[Natural, Tag("place")]
    | Annotated[str, Field(min_length=1, max_length=256), Tag("name")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "place"),
]
"""A place in what a network returns, or a name there."""


class Head(Model):
    """One of the arrays that a network returns."""

    key: HeadKey = Field(
        description=(
            "which one: its place in a tuple or list, 0 the first, or its name in a dict; of an "
            "ONNX or OpenVINO file, the place or the name of an output"
        )
    )
    channels: Count = 1
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    prediction_bound: PositiveFloat | None = Field(
        None, description="how large its values are; as model.prediction_bound"
    )

    @model_validator(mode="after")
    def _check(self) -> Head:
        self.stated_bound  # noqa: B018  # raises ValueError for one that is out of reach
        return self

    @property
    def stated_bound(self) -> float | None:
        """The power of two that its values stay within; None if only a trial can tell."""
        if self.prediction_bound is not None:
            return bound_above(self.prediction_bound)
        return None if self.activation == "none" else 1.0


def channel_ranges(heads: Sequence[Head]) -> list[range]:
    """The channels of each head once all of them are joined, one after another."""
    stops = list(accumulate(head.channels for head in heads))
    return [range(stop - head.channels, stop) for head, stop in zip(heads, stops, strict=True)]


def common_activation(heads: Sequence[Head]) -> Literal["none", "sigmoid", "softmax"]:
    """The activation of all heads; "sigmoid" where all have one, but not the same."""
    activations = {head.activation for head in heads}
    if len(activations) == 1:
        return activations.pop()
    return "none" if "none" in activations else "sigmoid"
