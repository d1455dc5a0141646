"""The stages by which ``beam-inference levels`` counts a volume's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from beam_inference.config.storage import Storage
from beam_inference.config.volumes import Mask as MaskConfig
from beam_inference.operators.level_counts import (
    CountInBins,
    CountValues,
    FindBins,
    WriteLevels,
    chunks_to_count,
    open_volumes,
)
from beam_inference.operators.object_counts import FindOutside, MarkHoles


@dataclass(frozen=True, slots=True)
class LevelStages:
    """The stages, each begun once the one before it is complete.

    Attributes:
        count: the first one, which counts.
        between: those that follow: two to find an object, two for floats.
        write: the last one, which writes the file.
    """

    count: CountValues
    between: tuple[FindOutside | MarkHoles | FindBins | CountInBins, ...]
    write: WriteLevels

    def __iter__(
        self,
    ) -> Iterator[CountValues | FindOutside | MarkHoles | FindBins | CountInBins | WriteLevels]:
        """All stages, in their order."""
        return iter((self.count, *self.between, self.write))


def plan_level_stages(
    url: str,
    to: str,
    *,
    scale: int,
    channel: Sequence[int] | None,
    storage: Storage,
    beside: Sequence[str] = (),
    finds_object: bool = False,
    mask: MaskConfig | None = None,
) -> LevelStages:
    """The stages of counting a volume's values.

    Args:
        url: of the volume.
        to: URL of the file to write; counts are put into a folder beside it.
        scale: of the volume.
        channel: channels to count; None for all.
        storage: settings of the object stores.
        beside: URLs of further volumes of the same voxels, whose channels follow.
        finds_object: whether the inside of the object that they show is counted, too.
        mask: where voxels count; None for all.

    Raises:
        VolumeError: the volume cannot be opened.
        ConfigError: values of its dtype cannot be counted one by one.
    """
    volume = open_volumes([url, *beside], scale, channel, storage)
    count = CountValues(
        path=url,
        scale=scale,
        channel=None if channel is None else tuple(channel),
        storage=storage,
        counts_url=f"{to}.parts/counts",
        chunks=chunks_to_count(volume),
        channels=volume.channels,
        dtype=volume.dtype.name,
        beside=tuple(beside),
        finds_object=finds_object,
        mask=mask,
    )
    folder, _, name = to.rpartition("/")
    of_object = (FindOutside(count), MarkHoles(count, to)) if finds_object else ()
    of_floats = (FindBins(count), CountInBins(count)) if count.dtype == "float32" else ()
    return LevelStages(count, (*of_object, *of_floats), WriteLevels(count, (folder, unquote(name))))
