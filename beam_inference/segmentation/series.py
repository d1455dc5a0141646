"""Segmentations of one volume at several thresholds: a folder that holds a volume for each.

Fragments and the graph of them do not depend on the threshold, so all volumes share them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.config.json_text import parse_json
from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.segmentation.plans import SegmentationPlan
from beam_inference.segmentation.segment_job import check_agglomeration_threshold, plan_segmentation
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.kvstores import (
    TRANSFER_SECONDS,
    open_kvstore,
    read_key,
    retry_request,
)
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import check_output, open_output

_MOST_THRESHOLDS = 1000
SERIES_FILE = "thresholds.json"
"""Names the thresholds of a folder whose volumes are all complete."""


@dataclass(frozen=True, slots=True)
class Series:
    """Segmentations that differ in their threshold.

    Attributes:
        url: URL of the folder.
        plans: in the order of thresholds, each with a name and an output of its own.
    """

    url: str
    plans: tuple[SegmentationPlan, ...]

    @property
    def description(self) -> Json:
        """Everything that determines the bytes that are written, as JSON values."""
        return self.plans[0].description | {"threshold": [plan.threshold for plan in self.plans]}


def volume_name(threshold: float) -> str:
    """The name of the volume of a threshold in the folder."""
    return f"threshold_{np.format_float_positional(threshold, trim='-')}"


def plan_series(
    source: str,
    target: str,
    *,
    thresholds: Sequence[float],
    overwrite: bool = False,
    **options: Any,
) -> Series:
    """Plan segmentations at several thresholds; nothing is created.

    Args:
        source: path or URL of the affinities.
        target: path or URL of the folder.
        thresholds: of the mean affinity, in stored units; each counts once.
        overwrite: whether what is there will be replaced.
        options: as of :func:`~beam_inference.segmentation.segment_job.plan_segmentation`.

    Raises:
        UserError: the segmentations cannot be made so.
    """
    ordered = sorted(set(thresholds))
    first = plan_segmentation(source, target, threshold=ordered[0], overwrite=overwrite, **options)
    dtype = open_volume(first.source, scale=first.scale, storage=first.storage).dtype
    for threshold in ordered:
        check_agglomeration_threshold(threshold, dtype, first.source)
    plans = tuple(_plan_at(first, threshold) for threshold in ordered)
    for plan in plans:
        check_output(plan.output)
        if not overwrite:
            open_output(plan.output)  # raises if an existing volume differs
    return Series(first.output.url, plans)


def _plan_at(plan: SegmentationPlan, threshold: float) -> SegmentationPlan:
    name = volume_name(threshold)
    output = replace(plan.output, url=f"{plan.output.url}/{name}")
    return replace(plan, threshold=threshold, name=name, output=output)


def write_thresholds(series: Series) -> None:
    """Record that all volumes of a series are complete.

    Raises:
        WorkerFault: the record cannot be written.
    """
    store = open_kvstore(series.url, series.plans[0].storage)
    text = json.dumps({"thresholds": [plan.threshold for plan in series.plans]})
    retry_request(
        "write",
        f"{series.url}/{SERIES_FILE}",
        lambda: store.write(SERIES_FILE, text.encode()).result(TRANSFER_SECONDS),
    )


def read_thresholds(url: str, storage: Storage) -> tuple[float, ...] | None:
    """The thresholds of the complete series in a folder, ascending.

    Returns:
        None if there is a volume at the URL, or no series.

    Raises:
        VolumeError: the record of them cannot be read or understood.
    """
    if "|" in url or volume_at(url, storage) is not None:  # TensorStore's own URLs name volumes
        return None
    content = read_key(open_kvstore(url, storage), SERIES_FILE, url)
    if content is None:
        return None
    try:
        thresholds = _parse_thresholds(parse_json(content))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise VolumeError(
            f"{url}/{SERIES_FILE} does not list thresholds ({type(error).__name__}): segment wrote "
            "it. Give that command again with --overwrite."
        ) from None
    return thresholds


def _parse_thresholds(values: Any) -> tuple[float, ...]:
    listed = values["thresholds"]
    if not isinstance(listed, list) or not 0 < len(listed) <= _MOST_THRESHOLDS:
        raise ValueError("no thresholds, or too many")
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in listed):
        raise TypeError("no numbers")
    thresholds = tuple(map(float, listed))
    if not np.isfinite(thresholds).all() or list(thresholds) != sorted(set(thresholds)):
        raise ValueError("not finite, or not ascending")
    return thresholds
