"""Volumes that hold one image at several scales: what making coarser ones needs of them.

Readers know a volume's scales from one small file. A scale is written before that file names it,
and named there once
it is complete: **no reader ever sees a scale that is listed and not there**. The file is replaced
    only if it is as it was when it was read, so that what several programs list at the same time is
    all kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.geometry.zyx import Zyx
from beam_inference.pyramid.levels import Level
from beam_inference.pyramid.ome_scales import ome_scales
from beam_inference.pyramid.precomputed_scales import precomputed_scales
from beam_inference.volumes.detection import json_object, neighbours, volume_at
from beam_inference.volumes.kvstores import open_kvstore
from beam_inference.volumes.volume import Volume


class MultiscaleVolume(Protocol):
    """A volume, and which of its scales levels are made from: a small picklable value."""

    @property
    def url(self) -> str:
        """Where the volume lies."""

    @property
    def storage(self) -> Storage:
        """How that is reached."""

    @property
    def holds_labels(self) -> bool:
        """Whether the volume says that its values are names of objects."""

    def description(self) -> dict[str, Any]:
        """What new levels take from the volume, as JSON values."""

    def open_base(self) -> Volume:
        """The scale that the first level is made from."""

    def block_shape(self, level: Level) -> Zyx:
        """The storage's write unit in a level, ZYX; creates nothing."""

    def open_level(self, level: Level) -> Volume:
        """A level for reading and writing, listed or not; created if need be."""

    def listed(self, levels: Sequence[Level]) -> list[Level]:
        """Those levels whose place in the volume is taken."""

    def list_levels(self, levels: Sequence[Level]) -> None:
        """Tell readers of complete levels, beside the scales that others have listed meanwhile."""

    def remove(self, levels: Sequence[Level]) -> None:
        """Tell readers no more of levels, then delete them."""


def multiscale_volume(url: str, storage: Storage, scale: int = 0) -> MultiscaleVolume:
    """The volume at a URL, as levels can be added to it; they are made from its scale number ``scale``.

    Raises:
        VolumeError: there is no volume, it has no such scale, or no place for scales.
    """
    found = volume_at(url, storage)
    if found is None:
        raise VolumeError(
            f"no volume at {url}: expected a precomputed volume or an OME-Zarr "
            f"group{neighbours(url)}"
        )
    if not found.is_multiscale:
        raise VolumeError(
            f"{url} is a single {found.driver} array, which has no place for levels: a precomputed "
            "volume or an OME-Zarr group is needed"
        )
    if not 0 <= scale < len(found.scales):
        raise VolumeError(f"{url} has the scales 0 … {len(found.scales) - 1}; --scale is {scale}")
    if found.driver == "neuroglancer_precomputed":
        return precomputed_scales(
            url, storage, json_object(open_kvstore(url, storage), "info", url), scale
        )
    return ome_scales(url, storage, found, scale)
