"""Pre- and postprocessing of MONAI bundles, as keys of a job file.

What each transform computes was read in MONAI 1.6.1.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beam_inference.config.fields import Json
from beam_inference.foreign_text import shorten_value
from beam_inference.models.monai_config import Component, Config
from beam_inference.models.packages import LEVELS

_KEYS_ONLY = frozenset({"keys", "allow_missing_keys"})
_CONVERTED = _KEYS_ONLY | {"data_type", "dtype", "device", "wrap_sequence", "track_meta"}
_META_KEYS = frozenset({"meta_keys", "meta_key_postfix"})
_WITHOUT_EFFECT = {
    "LoadImage": _KEYS_ONLY
    | _META_KEYS
    | {"dtype", "ensure_channel_first", "expanduser", "image_only", "overwriting"}
    | {"prune_meta_pattern", "prune_meta_sep", "reader", "simple_keys"}
    | {"affine_lps_to_ras", "squeeze_non_spatial_dims"},
    "EnsureChannelFirst": _KEYS_ONLY | {"channel_dim", "strict_check"},
    "AddChannel": _KEYS_ONLY,
    "EnsureType": _CONVERTED,
    "ToTensor": _CONVERTED,
    "ToDevice": _KEYS_ONLY | {"device", "non_blocking"},
    "Invert": _KEYS_ONLY
    | _META_KEYS
    | {"device", "nearest_interp", "orig_keys", "orig_meta_keys", "to_tensor", "transform"},
    "SaveImage": _KEYS_ONLY
    | _META_KEYS
    | {"data_root_dir", "dtype", "folder_layout", "mode", "output_dir", "output_dtype"}
    | {"output_ext", "output_format", "output_name_formatter", "output_postfix", "padding_mode"}
    | {"print_log", "resample", "savepath_in_metadict", "separate_folder", "squeeze_end_dims"}
    | {"writer"},
    "Identity": _KEYS_ONLY,
}
NOT_OF_VALUES: Mapping[str, Container[str]] = {
    f"{name}{suffix}": arguments
    for name, arguments in _WITHOUT_EFFECT.items()
    for suffix in ("", "d")
}
"""Transforms that read, carry and write values, and their arguments by which they change none."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is done to an image before the network sees it.

    Attributes:
        normalize: ``model.normalize``.
        voxel_size: that images are brought to, X, Y, Z, millimetres; None if they are not.
        orientation: of the axes X, Y, Z, such as RAS; None if they stay as they are.
        reason: the transforms that say so.
    """

    normalize: Any
    voxel_size: tuple[float, float, float] | None
    orientation: str | None
    reason: str


def prepare(config: Config, channels: int) -> Preparation:
    """What a bundle does to an image before its network sees it.

    Args:
        config: of the bundle.
        channels: of the network's input.

    Raises:
        ModelContractError: it does what is not known here.
    """
    steps: list[Json] = []
    voxel_size = None
    orientation = None
    names = []
    for transform in config.transforms("preprocessing", NOT_OF_VALUES):
        names.append(transform.name)
        _find_key(transform, "image")
        if transform.name in ("Orientationd", "Orientation"):
            orientation = str(transform.arguments.get("axcodes"))
        elif transform.name in ("Spacingd", "Spacing"):
            if voxel_size is not None:
                raise transform.refuse("follows another one")
            voxel_size = _voxel_size(transform)
        else:
            steps += _intensity_steps(transform, channels)
    reason = f"the bundle: {', '.join(names) or 'no preprocessing'}"
    return Preparation(steps or "none", voxel_size, orientation, reason)


def _intensity_steps(transform: Component, channels: int) -> list[Json]:
    make = _BEFORE.get(transform.name.removesuffix("d"))
    if make is None:
        raise transform.refuse(
            f"is none of the transforms that are known here: Orientationd, Spacingd, "
            f"{', '.join(f'{name}d' for name in _BEFORE)}"
        )
    return make(transform, channels)


_KEYS = {"keys": ..., "allow_missing_keys": ..., "dtype": "float32"}


def _voxel_size(transform: Component) -> tuple[float, float, float]:
    size = transform.arguments.get("pixdim")
    if not isinstance(size, list) or len(size) != 3 or not all(map(_is_positive, size)):
        raise transform.refuse(f"has pixdim {shorten_value(size)}; expected three numbers")
    x, y, z = size
    return (float(x), float(y), float(z))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6


def _number(transform: Component, name: str, default: float | None = None) -> float:
    value = transform.arguments.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise transform.refuse(f"has {name}: {shorten_value(value)}; expected a number")
    return float(value)


def _scale_range(transform: Component, _: int) -> list[Json]:
    ends = dict.fromkeys(("a_min", "a_max", "b_min", "b_max", "clip"), ...)
    transform.check_arguments(_KEYS | ends)
    low = _number(transform, "a_min")
    high = _number(transform, "a_max")
    if low == high:
        raise transform.refuse("has a_min and a_max of one value")
    return _onto(transform, 1 / (high - low), -low / (high - low))


def _onto(transform: Component, scale: float, offset: float) -> list[Json]:
    """Steps that bring 0 and 1, after scale and offset, to b_min and b_max, and clip there."""
    ends = [transform.arguments.get(name) for name in ("b_min", "b_max")]
    if None in ends:
        if transform.arguments.get("clip"):
            raise transform.refuse("clips, and has no b_min or b_max")
        return [{"scale": scale, "offset": offset}]
    low = _number(transform, "b_min")
    high = _number(transform, "b_max")
    steps: list[Json] = []
    if (scale, offset) != (1.0, 0.0) or (low, high) != (0.0, 1.0):
        steps.append({"scale": scale * (high - low), "offset": offset * (high - low) + low})
    if transform.arguments.get("clip"):
        steps.append({"clip": [low, high]})
    return steps


def _percentiles(transform: Component, channels: int) -> list[Json]:
    known = dict.fromkeys(("lower", "upper", "b_min", "b_max", "clip", "channel_wise"), ...)
    transform.check_arguments(_KEYS | known | {"relative": False})
    _check_channels(transform, channels)
    low = _number(transform, "lower") / 100
    high = _number(transform, "upper") / 100
    if not 0 <= low < high <= 1:
        raise transform.refuse(f"has the percentiles {100 * low:g} and {100 * high:g}")
    return [_rescale(low, high), *_onto(transform, 1.0, 0.0)]


def _rescale(low: float, high: float) -> Json:
    return {"rescale": {"levels": LEVELS, "low": low, "high": high, "floor": 0.0}}


def _scale(transform: Component, channels: int) -> list[Json]:
    transform.check_arguments(
        _KEYS | {"minv": ..., "maxv": ..., "channel_wise": ..., "factor": None}
    )
    _check_channels(transform, channels)
    low = _number(transform, "minv", 0.0)
    high = _number(transform, "maxv", 1.0)
    if (low, high) == (0.0, 1.0):
        return [_rescale(0.0, 1.0)]
    return [_rescale(0.0, 1.0), {"scale": high - low, "offset": low}]


def _normalize(transform: Component, channels: int) -> list[Json]:
    known = dict.fromkeys(("subtrahend", "divisor", "channel_wise"), ...)
    transform.check_arguments(_KEYS | known | {"nonzero": ...})
    of = {"of": "nonzero"} if transform.arguments.get("nonzero") else {}
    mean = transform.arguments.get("subtrahend")
    std = transform.arguments.get("divisor")
    if (mean is None) != (std is None):
        raise transform.refuse("has one of subtrahend and divisor, and not the other")
    if mean is not None:
        return [{"standard": {"mean": mean, "std": std} | of}]
    _check_channels(transform, channels)
    return [{"standard": {"levels": LEVELS, "floor": 0.0} | of}]


def _check_channels(transform: Component, channels: int) -> None:
    if channels > 1 and not transform.arguments.get("channel_wise"):
        raise transform.refuse("takes values of all channels together; a job takes them of each")


def _cast(transform: Component, _: int) -> list[Json]:
    transform.check_arguments(_KEYS)
    return []


_BEFORE: dict[str, Callable[[Component, int], list[Json]]] = {
    "ScaleIntensityRange": _scale_range,
    "ScaleIntensityRangePercentiles": _percentiles,
    "ScaleIntensity": _scale,
    "NormalizeIntensity": _normalize,
    "CastToType": _cast,
}


def finish(config: Config) -> list[Json]:
    """What a bundle does to its network's values, as ``postprocess``.

    Raises:
        ModelContractError: it does what is not known here.
    """
    operators: list[Json] = []
    for transform in config.transforms("postprocessing", NOT_OF_VALUES):
        make = _AFTER.get(transform.name.removesuffix("d"))
        if make is None:
            raise transform.refuse(
                f"is none of the transforms that are known here: "
                f"{', '.join(f'{name}d' for name in _AFTER)}"
            )
        _find_key(transform, "pred")
        if operators and operators[-1]["operator"] in ("argmax", "threshold"):
            raise transform.refuse("follows one that makes labels")
        operators += make(transform)
    return operators


def _find_key(transform: Component, key: str) -> int:
    """The place of a key of MONAI's evaluators among those that a transform changes.

    Raises:
        ModelContractError: it changes others alone, such as labels.
    """
    keys = transform.arguments.get("keys", key)
    names = keys if isinstance(keys, list) else [keys]
    if key not in names:
        raise transform.refuse(f"changes {shorten_value(keys)}, where {key} is expected")
    return names.index(key)


def _of_result(transform: Component, name: str) -> Any:
    """An argument, or its value for the network's result among several keys."""
    value = transform.arguments.get(name)
    if not isinstance(value, list):
        return value
    place = _find_key(transform, "pred")
    if place >= len(value):
        raise transform.refuse(f"has {name}: {shorten_value(value)}, not one for each key")
    return value[place]


def _activations(transform: Component) -> list[Json]:
    transform.check_arguments(_KEYS | {"softmax": ..., "sigmoid": ..., "other": None})
    named = [name for name in ("sigmoid", "softmax") if _of_result(transform, name)]
    if len(named) > 1:
        raise transform.refuse("has sigmoid and softmax")
    return [{"operator": name} for name in named]


def _discrete(transform: Component) -> list[Json]:
    known = {"argmax": ..., "threshold": ..., "to_onehot": ..., "rounding": None}
    transform.check_arguments(_KEYS | known)
    if _of_result(transform, "to_onehot"):
        raise transform.refuse("makes a channel of each label")
    operators: list[Json] = []
    if _of_result(transform, "argmax"):
        operators.append({"operator": "argmax"})
    if _of_result(transform, "threshold") is not None:
        at = _of_result(transform, "threshold")
        if operators or isinstance(at, bool) or not isinstance(at, int | float):
            raise transform.refuse(f"has argmax and a threshold, {shorten_value(at)}")
        operators.append({"operator": "threshold", "at": float(at)})
    return operators


_AFTER: dict[str, Callable[[Component], Sequence[Json]]] = {
    "Activations": _activations,
    "AsDiscrete": _discrete,
}
