"""The plan of an evaluation: the values that all its stages share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.evaluation.map_scores import Bins
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.unfinished import Making
from beam_inference.segmentation.scratch import Scratch
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.volume import Volume

Kind: TypeAlias = Literal["objects", "classes", "map"]
"""What a volume holds: ids of objects, numbers of classes, or a map of probabilities."""

_STAGES_VERSION = 3
"""Counts up when the files that stages write for one another change."""


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """Plan of an evaluation.

    Attributes:
        output: URL of the volume that is judged; scale and channel: of it.
        labels: URL of the labels; labels_scale: of them.
        kind: what the output holds.
        ignore: labels whose voxels are not judged.
        positive: labels that a map should find; none: all but 0.
        thresholds: at which a map is scored; the first one ranks places.
        bins: of a map's values.
        grid: chunks; they tile the box that is judged.
        cell_shape: of the places that are ranked, ZYX; a chunk's shape is a multiple of it.
        worst: how many objects and places are listed.
        storage: how object stores are reached.
        making: how far a job has made the output.
        scratch_url: a folder for the files that stages write for one another.
    """

    output: str
    scale: int
    channel: int
    labels: str
    labels_scale: int
    kind: Kind
    ignore: tuple[int, ...]
    positive: tuple[int, ...]
    thresholds: tuple[float, ...]
    bins: Bins
    grid: ChunkGrid
    cell_shape: Zyx
    worst: int
    storage: Storage
    making: Making = field(default_factory=Making)
    scratch_url: str = ""

    @property
    def description(self) -> Json:
        """Everything that determines what is counted, as JSON values."""
        return {
            "output": {
                "path": self.output,
                "scale": self.scale,
                "channel": self.channel,
                **self.making.description,
            },
            "labels": {"path": self.labels, "scale": self.labels_scale},
            "as": self.kind,
            "ignore": self.ignore,
            "positive": self.positive,
            "thresholds": self.thresholds,
            "range": [self.bins.low, self.bins.high],
            "bounds": [self.grid.roi.start, self.grid.roi.stop],
            "chunk_shape": self.grid.chunk_shape,
            "cell_shape": self.cell_shape,
            "worst": self.worst,
            "stages": _STAGES_VERSION,
        }

    def scratch(self) -> Scratch:
        """The arrays that stages write for one another."""
        return Scratch(self.scratch_url, self.storage)

    def open_output(self) -> Volume:
        """Open the channel that is judged."""
        return open_volume(
            self.output, scale=self.scale, channel=[self.channel], storage=self.storage
        )

    def open_labels(self) -> Volume:
        """Open the labels."""
        return open_volume(self.labels, scale=self.labels_scale, storage=self.storage)
