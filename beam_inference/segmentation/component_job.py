"""The plan of a volume's connected components."""

from __future__ import annotations

from collections.abc import Sequence

from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError
from beam_inference.job.unfinished import warn_if_unfinished
from beam_inference.segmentation.layout import (
    Layout,
    check_urls,
    open_input,
    plan_output,
)
from beam_inference.segmentation.plans import ComponentPlan
from beam_inference.segmentation.thresholds import (
    check_separates,
    check_threshold,
    comparable_threshold,
)
from beam_inference.volumes.kvstores import url_of

_SIDE = 256


def plan_components(
    source: str,
    target: str,
    *,
    threshold: float | None,
    channel: int | None = None,
    scale: int = 0,
    connectivity: int = 6,
    min_size: int = 1,
    layout: Layout,
    storage: Storage,
    flags: Sequence[str] = (),
    overwrite: bool = False,
) -> ComponentPlan:
    """Plan a volume of components; nothing is created.

    Args:
        source: path or URL of the input.
        target: path or URL of the output.
        threshold: voxels of this value or more, in stored units, are foreground; None: the input is
            a segmentation.
        channel: channel of the input; may be left out where there is one.
        scale: number of the input's scale.
        connectivity: 6, 18 or 26 neighbours.
        min_size: components of fewer voxels are removed.
        layout: layout of the output; chunks are about 256 on a side by default.
        storage: how object stores are reached.
        flags: Beam's flags.
        overwrite: whether an existing output will be replaced.

    Raises:
        UserError: the components cannot be made so.
    """
    source = url_of(source)
    target = url_of(target)
    check_urls(source, target, flags)
    volume = open_input(source, target, scale, storage)
    if channel is None and volume.channels > 1:
        raise ConfigError(
            f"{source} has the channels 0 … {volume.channels - 1}: say which with --channel"
        )
    if channel is not None and not 0 <= channel < volume.channels:
        raise ConfigError(
            f"--channel {channel}: {source} has the channels 0 … {volume.channels - 1}"
        )
    if threshold is None and volume.dtype.kind not in "iu":
        raise ConfigError(
            f"{source} holds {volume.dtype}: --multilabel takes a segmentation, of integers"
        )
    if threshold is not None:
        check_threshold("--threshold", threshold, volume.dtype, source)
        check_separates("--threshold", threshold, volume.dtype, source)
    making = warn_if_unfinished(source, storage)
    output, grid = plan_output(volume, target, layout, _SIDE, storage, overwrite=overwrite)
    return ComponentPlan(
        source=source,
        scale=scale,
        channel=channel or 0,
        threshold=None if threshold is None else comparable_threshold(threshold, volume.dtype),
        connectivity=connectivity,
        min_size=min_size,
        grid=grid,
        output=output,
        storage=storage,
        input_dtype=volume.dtype.name,
        making=making,
    )
