"""The plan of a segmentation of affinities."""

from __future__ import annotations

from collections.abc import Sequence

from beam_inference.arrays import AnyDtype
from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.unfinished import warn_if_unfinished
from beam_inference.segmentation.affinities import MOST
from beam_inference.segmentation.layout import (
    Layout,
    check_urls,
    open_input,
    plan_output,
)
from beam_inference.segmentation.plans import SegmentationPlan
from beam_inference.segmentation.thresholds import check_threshold, comparable_threshold
from beam_inference.volumes.kvstores import url_of

_SIDE = 128
_DTYPES = ("uint8", "uint16", "float16", "float32", "float64")


def plan_segmentation(
    source: str,
    target: str,
    *,
    threshold: float,
    low: float,
    high: float,
    channels: Zyx = (0, 1, 2),
    to_next: bool = False,
    scale: int = 0,
    min_size: int = 1,
    layout: Layout,
    storage: Storage,
    flags: Sequence[str] = (),
    overwrite: bool = False,
) -> SegmentationPlan:
    """Plan a segmentation; nothing is created.

    Args:
        source: path or URL of the input.
        target: path or URL of the output.
        threshold: fragments are joined while their mean affinity, in stored units, is at least
            this.
        low: the watershed joins no voxels of a lower affinity.
        high: the watershed joins all voxels of this affinity or more.
        channels: channels of the input that hold the affinities along z, y and x.
        to_next: whether a voxel's affinities are to the next voxels; else to the previous ones.
        scale: number of the input's scale.
        min_size: segments of fewer voxels are removed.
        layout: layout of the output; chunks are about 128 on a side by default.
        storage: how object stores are reached.
        flags: Beam's flags.
        overwrite: whether an existing output will be replaced.

    Raises:
        UserError: the segmentation cannot be made so.
    """
    source = url_of(source)
    target = url_of(target)
    check_urls(source, target, flags)
    volume = open_input(source, target, scale, storage)
    if len(set(channels)) < 3 or max(channels) >= volume.channels:
        raise ConfigError(
            f"--channels {','.join(map(str, channels))}: three different ones are needed, the "
            f"affinities along z, y and x; {source} has the channels 0 … {volume.channels - 1}"
        )
    if volume.dtype.name not in _DTYPES:
        raise ConfigError(f"{source} holds {volume.dtype}: affinities are {', '.join(_DTYPES)}")
    check_agglomeration_threshold(threshold, volume.dtype, source)
    for name, value in (("--low", low), ("--high", high)):
        _check_limit(name, value, volume.dtype, source, may_exclude_all=name == "--high")
    if low > high:
        raise ConfigError(f"--low {low:g} is more than --high {high:g}")
    making = warn_if_unfinished(source, storage)
    output, grid = plan_output(volume, target, layout, _SIDE, storage, overwrite=overwrite)
    return SegmentationPlan(
        source=source,
        scale=scale,
        channels=channels,
        to_next=to_next,
        low=comparable_threshold(low, volume.dtype),
        high=comparable_threshold(high, volume.dtype),
        threshold=float(threshold),  # as the command line has it, which finds the same records
        floats=volume.dtype.kind == "f",
        min_size=min_size,
        grid=grid,
        output=output,
        storage=storage,
        input_dtype=volume.dtype.name,
        making=making,
    )


def check_agglomeration_threshold(threshold: float, dtype: AnyDtype, source: str) -> None:
    """Refuse a threshold of mean affinities that those of a volume cannot be compared with.

    Args:
        threshold: in stored units.
        dtype: what the volume holds.
        source: its URL, for messages.

    Raises:
        ConfigError: it is refused.
    """
    _check_limit("--threshold", threshold, dtype, source, may_exclude_all=True)


def _check_limit(
    flag: str, value: float, dtype: AnyDtype, source: str, *, may_exclude_all: bool
) -> None:
    check_threshold(flag, value, dtype, source, may_exclude_all=may_exclude_all)
    if dtype.kind == "f" and abs(value) > MOST:
        raise ConfigError(
            f"{flag} {value:g}: affinities that are not integers are distinguished from -1024 "
            "to 1024"
        )
