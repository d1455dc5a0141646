"""Pre- and postprocessing of bioimage.io models, as keys of a job file.

What each operation computes was read in ``bioimageio.core`` 0.11.0, ``proc_ops.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field, FiniteFloat

from beam_inference.config.fields import LEAST_NUMBER, Json
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import shorten_text, shorten_value
from beam_inference.models.bioimageio_spec import Description, Operation, Tensor
from beam_inference.models.package_files import ForeignModel, parse_foreign
from beam_inference.models.packages import LEVELS

Numbers = FiniteFloat | list[FiniteFloat]


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """``model.normalize``, with what it needs.

    Attributes:
        value: as a job file has it.
        reason: the operations that say so.
    """

    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Postprocessing:
    """What follows the network.

    Attributes:
        activation: ``model.activation``.
        operators: ``postprocess``.
        dtype: ``output.dtype``.
        reason: the operations that say so.
    """

    activation: str
    operators: Sequence[Json]
    dtype: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an operation stands.

    Attributes:
        model: the package.
        tensor: its input or output.
        operation: the operation.
    """

    model: Description
    tensor: Tensor
    operation: Operation

    def refuse(self, reason: str) -> ModelContractError:
        side = "input" if self.tensor is self.model.input else "output"
        return ModelContractError(
            f"{self.model.file}: the operation {shorten_text(self.operation.name)} of the {side} "
            f"{reason}. Write the job file by hand."
        )

    def read(self, model: type[_Arguments]) -> Any:
        return parse_foreign(
            self.operation.values, model, self.model.file, f"the {self.operation.name} of a model"
        )


class _Arguments(ForeignModel):
    pass


class _Reduced(_Arguments):
    """Arguments of operations that take statistics.

    Attributes:
        axes: over which statistics are taken together; None for all.
        mode: in format 0.4, of what they are.
    """

    axes: list[str] | str | None = None
    mode: str | None = None
    eps: Annotated[FiniteFloat, Field(ge=0)] = 1e-6
    reference_tensor: str | None = None

    @property
    def names(self) -> set[str] | None:
        """Names of the axes; None for all."""
        letters = {"c": "channel", "b": "batch"}
        return None if self.axes is None else {letters.get(a, a) for a in self.axes}


class _Range(_Reduced):
    min_percentile: Annotated[FiniteFloat, Field(ge=0, le=100)] = 0.0
    max_percentile: Annotated[FiniteFloat, Field(ge=0, le=100)] = 100.0


class _Clip(_Reduced):
    min: FiniteFloat | None = None
    max: FiniteFloat | None = None
    min_percentile: FiniteFloat | None = None
    max_percentile: FiniteFloat | None = None


class _Moments(_Reduced):
    mean: Numbers | None = None
    std: Numbers | None = None
    axis: str | None = None


class _Linear(_Arguments):
    gain: Numbers = 1.0
    offset: Numbers = 0.0
    axis: str | None = None


class _Threshold(_Arguments):
    threshold: Numbers


class _Dtype(_Arguments):
    dtype: str


class _Softmax(_Arguments):
    axis: str = "channel"


def preprocess(model: Description, *, is_plane: bool) -> Preprocessing:
    """What a package does to an image before its network sees it.

    Args:
        model: the package.
        is_plane: whether the network takes sections, each of which is a sample of its own.

    Raises:
        ModelContractError: it does what is not known here.
    """
    steps: list[Json] = []
    for operation in model.input.operations:
        place = _Place(model, model.input, operation)
        make = _BEFORE.get(operation.name)
        if make is None:
            raise place.refuse(f"is none of those that are known here: {', '.join(_BEFORE)}")
        made = make(place)
        if made is None:
            continue
        if "axes" in made and steps:
            raise place.refuse(
                "takes values of the image after an operation that changes it: bioimageio.core "
                "takes them of the image as it was before all operations, and jobs and other "
                "programs of the image as it is then"
            )
        step = {key: value for key, value in made.items() if key != "axes"}
        steps.append(_by_section(step, place) if is_plane and _is_by_section(made, place) else step)
    return Preprocessing(steps or "none", _reason(model.input, "no preprocessing"))


def _reason(tensor: Tensor, absence: str) -> str:
    names = [each.name for each in tensor.operations if each.name != "ensure_dtype"]
    return f"the package: {', '.join(names) or absence}"


def _is_by_section(step: Json, place: _Place) -> bool:
    """Whether an operation takes values of each section of a stack by itself."""
    if "axes" not in step:
        return False
    mode = place.operation.values.get("mode", "per_sample")
    return mode == "per_sample" and step["axes"] is not None and "batch" not in step["axes"]


def _by_section(step: Json, place: _Place) -> Json:
    if place.tensor.channels > 1:
        raise place.refuse(
            "takes values of each channel of a section; a job takes them of all channels together"
        )
    return {key: statistics | {"by": "section"} for key, statistics in step.items()}


def _check_reduced(place: _Place, arguments: _Reduced) -> None:
    """Refuse statistics that are taken over other axes than a job knows."""
    if arguments.reference_tensor not in (None, place.tensor.name):
        raise place.refuse("takes values of another tensor")
    names = arguments.names
    space = {axis.name for axis in place.tensor.axes} - {"batch", "channel"}
    if names is None:
        names = space | {"batch", "channel"}
    if not space <= names or names - space - {"batch", "channel"}:
        raise place.refuse(
            f"takes values over the axes {', '.join(sorted(names))}; a job takes them over all of "
            "space"
        )
    if place.tensor.channels > 1 and "channel" in names:
        raise place.refuse("takes values of all channels together; a job takes them of each")


def _standardise(place: _Place) -> Json | None:
    arguments: _Moments = place.read(_Moments)
    if arguments.mean is not None or arguments.mode == "fixed":
        return _standard_step(place, arguments)
    _check_reduced(place, arguments)
    return {"standard": _statistics(arguments), "axes": arguments.names}


def _standardise_by_stated_moments(place: _Place) -> Json:
    return _standard_step(place, place.read(_Moments))


def _standard_step(place: _Place, arguments: _Moments) -> Json:
    if arguments.mean is None or arguments.std is None:
        raise place.refuse("has no mean and std")
    _check_axis(place, arguments.axis)
    eps = arguments.eps if arguments.mode == "fixed" else 0.0
    std = arguments.std
    divisor = [each + eps for each in std] if isinstance(std, list) else std + eps
    least = min(divisor if isinstance(divisor, list) else [divisor], default=0)
    if not least >= LEAST_NUMBER:
        raise place.refuse(f"divides by {shorten_value(divisor)}")
    return {"standard": {"mean": _numbers(place, arguments.mean), "std": _numbers(place, divisor)}}


def _statistics(arguments: _Reduced) -> Json:
    return {"levels": LEVELS, "eps": arguments.eps, "floor": 0.0}


def _scale_range(place: _Place) -> Json:
    arguments: _Range = place.read(_Range)
    _check_reduced(place, arguments)
    if arguments.min_percentile >= arguments.max_percentile:
        raise place.refuse(
            f"has the percentiles {arguments.min_percentile:g} and {arguments.max_percentile:g}"
        )
    quantiles = {"low": arguments.min_percentile / 100, "high": arguments.max_percentile / 100}
    return {"rescale": _statistics(arguments) | quantiles, "axes": arguments.names}


def _clip_before(place: _Place) -> Json:
    arguments: _Clip = place.read(_Clip)
    if arguments.min_percentile is None and arguments.max_percentile is None:
        return {"clip": list(_limits(place, arguments))}
    if arguments.min is not None or arguments.max is not None:
        raise place.refuse("has a limit and a percentile")
    _check_reduced(place, arguments)
    low = arguments.min_percentile
    high = arguments.max_percentile
    if low is not None and high is not None and low >= high:
        raise place.refuse(f"has the percentiles {low:g} and {high:g}")
    return {
        "clip": {
            "levels": LEVELS,
            "low": 0.0 if low is None else low / 100,
            "high": 1.0 if high is None else high / 100,
        },
        "axes": arguments.names,
    }


_ENDS = (float(np.finfo(np.float32).min), float(np.finfo(np.float32).max))


def _limits(place: _Place, arguments: _Clip) -> tuple[float, float]:
    low = _ENDS[0] if arguments.min is None else arguments.min
    high = _ENDS[1] if arguments.max is None else arguments.max
    if low >= high:
        raise place.refuse(f"has the limits {low:g} and {high:g}")
    return low, high


def _linear_before(place: _Place) -> Json:
    arguments = _linear(place)
    return {"scale": _numbers(place, arguments.gain), "offset": _numbers(place, arguments.offset)}


def _linear(place: _Place) -> _Linear:
    arguments: _Linear = place.read(_Linear)
    _check_axis(place, arguments.axis)
    return arguments


def _check_axis(place: _Place, axis: str | None) -> None:
    """Refuse lists of numbers that are for another axis than that of channels."""
    if axis not in (None, "channel", "c"):
        raise place.refuse(f"changes values along the axis {shorten_text(axis)}")


def _numbers(place: _Place, numbers: float | list[float]) -> float | list[float]:
    """A number, or one for each channel."""
    if isinstance(numbers, list) and len(numbers) == 1:
        return numbers[0]
    if isinstance(numbers, list) and len(numbers) != place.tensor.channels:
        raise place.refuse(
            f"lists {len(numbers)} numbers, and there are {place.tensor.channels} channels"
        )
    return numbers


def _ensure_float(place: _Place) -> None:
    dtype = place.read(_Dtype).dtype
    if dtype not in ("float32", "float64"):
        raise place.refuse(f"makes {shorten_text(dtype)} of the values; jobs compute in float32")


_BEFORE: dict[str, Callable[[_Place], Json | None]] = {
    "ensure_dtype": _ensure_float,
    "scale_linear": _linear_before,
    "clip": _clip_before,
    "scale_range": _scale_range,
    "zero_mean_unit_variance": _standardise,
    "fixed_zero_mean_unit_variance": _standardise_by_stated_moments,
}


def postprocess(model: Description) -> Postprocessing:
    """What a package does to its network's values.

    Raises:
        ModelContractError: it does what is not known here.
    """
    operators: list[Json] = []
    dtype = "float32"
    for operation in model.output.operations:
        place = _Place(model, model.output, operation)
        if dtype != "float32" and operation.name != "ensure_dtype":
            raise place.refuse("follows binarize")
        make = _AFTER.get(operation.name)
        if make is None:
            raise place.refuse(f"is none of those that are known here: {', '.join(_AFTER)}")
        operators += make(place, dtype)
        dtype = "uint8" if operation.name == "binarize" else dtype
    reason = _reason(model.output, "no postprocessing")
    first = operators[0]["operator"] if operators else ""
    if first in ("sigmoid", "softmax"):
        return Postprocessing(first, operators[1:], dtype, reason)
    return Postprocessing("none", operators, dtype, reason)


def _ensure_written(place: _Place, dtype: str) -> list[Json]:
    wanted = place.read(_Dtype).dtype
    if dtype == "float32":
        _ensure_float(place)
    elif wanted not in ("uint8", "bool", "float32", "int8", "uint16", "int16", "int32"):
        raise place.refuse(f"makes {shorten_value(wanted)} of 0 and 1")
    return []


def _softmax(place: _Place, _: str) -> list[Json]:
    axis = place.read(_Softmax).axis
    if axis not in ("channel", "c"):
        raise place.refuse(f"goes along the axis {shorten_text(axis)}, not along the channels")
    return [{"operator": "softmax"}]


def _clip_after(place: _Place, _: str) -> list[Json]:
    arguments: _Clip = place.read(_Clip)
    if arguments.min_percentile is not None or arguments.max_percentile is not None:
        raise place.refuse("takes percentiles of the result, which a job does not know")
    limits = {"low": arguments.min, "high": arguments.max}
    _limits(place, arguments)
    return [
        {"operator": "clip", **{key: value for key, value in limits.items() if value is not None}}
    ]


def _linear_after(place: _Place, _: str) -> list[Json]:
    made = _linear_before(place)
    return [{"operator": "affine", **made}]


def _moments_after(place: _Place, _: str) -> list[Json]:
    arguments: _Moments = place.read(_Moments)
    moments = _standard_step(place, arguments)["standard"]
    mean, std = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(moments[key], np.float64)) for key in ("mean", "std"))
    )
    scale = (1 / std).tolist()
    offset = (-mean / std).tolist()
    return [
        {
            "operator": "affine",
            "scale": _numbers(place, scale),
            "offset": _numbers(place, offset),
        }
    ]


def _binarize(place: _Place, _: str) -> list[Json]:
    threshold = place.read(_Threshold).threshold
    if isinstance(threshold, list):
        if len(set(threshold)) != 1:
            raise place.refuse("has other than one threshold for all channels")
        threshold = threshold[0]
    if not abs(threshold) < _ENDS[1]:
        raise place.refuse(f"has the threshold {threshold:g}, which no value of float32 can pass")
    # above, where the operator takes what is at least: the next number of float32
    at = float(np.nextafter(np.float32(threshold), np.float32(np.inf)))
    return [{"operator": "threshold", "at": at}]


_AFTER: dict[str, Callable[[_Place, str], list[Json]]] = {
    "ensure_dtype": _ensure_written,
    "sigmoid": lambda _, __: [{"operator": "sigmoid"}],
    "softmax": _softmax,
    "clip": _clip_after,
    "scale_linear": _linear_after,
    "fixed_zero_mean_unit_variance": _moments_after,
    "binarize": _binarize,
}
