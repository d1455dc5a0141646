"""Counts a volume's values by a Beam pipeline, and writes the levels that jobs normalize by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beam_inference.beam.stage_runner import StageOutcome, check_place, run_stages
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import Mask
from beam_inference.errors import ConfigError
from beam_inference.job.stage_job import StageJob
from beam_inference.job.stage_records import StageRecords, stage_job
from beam_inference.job.unfinished import warn_if_unfinished
from beam_inference.operators.level_counts import (
    CountValues,
    describe_input,
)
from beam_inference.operators.level_stages import plan_level_stages
from beam_inference.volumes.drafts import sweep_drafts_of_file
from beam_inference.volumes.folders import delete_folder
from beam_inference.volumes.holes import holes_url
from beam_inference.volumes.kvstores import (
    LOCAL,
    is_within,
    open_kvstore,
    place_of_url,
    read_key,
    refuse_link,
    storage_of_environment,
    url_of,
)
from beam_inference.volumes.mask import open_mask

_BEGINNING = b'{"input":'
"""How files of levels begin."""


def count_levels(
    volume: str,
    to: str,
    *,
    scale: int = 0,
    channel: Sequence[int] | None = None,
    storage: Storage | None = None,
    flags: Sequence[str] = (),
    overwrite: bool = False,
    beside: Sequence[str] = (),
    finds_object: bool = False,
    mask: Mask | None = None,
) -> StageOutcome:
    """Count a volume's values, overall and in each section along z, and write their levels.

    A count that was interrupted goes on; one that is complete is not repeated.

    Args:
        volume: path or URL of the volume.
        to: path or URL of the file to write; see :class:`beam_inference.operators.levels.Levels`.
        scale: scale of the volume, 0 for the finest.
        channel: channels to count; None for all.
        storage: settings of the object stores; None for those of the environment.
        flags: of Beam.
        overwrite: whether to count again what was counted before; holes that were found are
            removed.
        beside: further volumes of the same voxels, whose channels are counted with its own.
        finds_object: whether the inside of the object that they show is counted, too; its holes are
            written to a folder beside the file, see :mod:`beam_inference.volumes.holes`.
        mask: where voxels count; None for all. A section of which it keeps nothing has the levels
            of the whole.

    Raises:
        UserError: the values cannot be counted, or other records are in the way.
    """
    storage = storage_of_environment(LOCAL) if storage is None else storage
    masks = () if mask is None else (mask.path,)
    check_place(flags, [url_of(each) for each in (volume, *beside, *masks, to)])
    plan = plan_levels(
        volume,
        to,
        scale=scale,
        channel=channel,
        storage=storage,
        beside=beside,
        finds_object=finds_object,
        mask=mask,
    )
    plan.check_file()
    for each in (volume, *beside, *masks):
        warn_if_unfinished(url_of(each), storage)
    refuse_link(plan.job.state_url)
    StageRecords(plan.job).begin(overwrite=overwrite or plan.begins_anew())
    holes = holes_url(url_of(to))
    if overwrite:
        delete_folder(holes, storage)
    count = plan.count
    outcome = run_stages(plan.job, flags, count.chunks.roi.size / count.count)
    if outcome.is_complete:
        delete_folder(count.counts_url, storage)
        sweep_drafts_of_file(url_of(to))
    return outcome


@dataclass(frozen=True, slots=True)
class LevelsPlan:
    """What is counted, and the file that is written.

    Attributes:
        job: the stages.
        count: the first of them, which counts.
        folder: URL of the folder of the file.
        name: of the file.
    """

    job: StageJob
    count: CountValues
    folder: str
    name: str

    def is_written(self) -> bool:
        """Whether the file is there."""
        store = open_kvstore(self.folder, self.job.storage)
        return read_key(store, self.name, self.folder) is not None

    def check_file(self) -> None:
        """Check that the file is absent, or one of levels.

        Raises:
            ConfigError: another lies there, or it would lie in a volume that is counted.
            VolumeError: it cannot be read.
        """
        storage = self.job.storage
        place = place_of_url(self.folder, storage)
        counted = [self.count.path, *self.count.beside]
        counted += [] if self.count.mask is None else [self.count.mask.path]
        for volume in counted:
            if is_within(place, place_of_url(volume, storage)):
                raise ConfigError(
                    f"--to {self.folder}/{self.name} lies in the volume {volume}, "
                    "which is read. Write it beside the volume"
                )
        text = read_key(open_kvstore(self.folder, storage), self.name, self.folder)
        if text and not text.startswith(_BEGINNING):  # one that is cut off is made again
            raise ConfigError(
                f"--to {self.folder}/{self.name}: another file lies there, which is not one of "
                "levels. Remove it, or write another name"
            )

    def begins_anew(self) -> bool:
        """Whether there is no file, and no count of this job that could go on to make it.

        Raises:
            StateError: the records cannot be read.
        """
        if self.is_written():
            return False
        earlier = StageRecords(self.job).earlier_job()
        if earlier is None or earlier.fingerprint != self.job.fingerprint:
            return True
        return bool(earlier.done_chunks(self.job.stages[-1], [0]))  # the counts were removed then


def plan_levels(
    volume: str,
    to: str,
    *,
    scale: int,
    channel: Sequence[int] | None,
    storage: Storage,
    beside: Sequence[str],
    finds_object: bool,
    mask: Mask | None = None,
) -> LevelsPlan:
    """Open the volumes whose values are counted; nothing is written. See :func:`count_levels`.

    Raises:
        UserError: the values cannot be counted.
    """
    url = url_of(volume)
    others = [url_of(each) for each in beside]
    if mask is not None:
        if finds_object:
            raise ConfigError(
                "--object finds where the volume itself shows something, --mask says so: give one"
            )
        mask = mask.model_copy(update={"path": url_of(mask.path)})
    stages = plan_level_stages(
        url,
        url_of(to),
        scale=scale,
        channel=channel,
        storage=storage,
        beside=others,
        finds_object=finds_object,
        mask=mask,
    )
    count = stages.count
    opened = count.volume()
    masked_by = None
    if mask is not None:
        found = open_mask("--mask", mask, opened.voxel_size_nm, opened.origin.rest, storage)
        if not found.reaches(opened.bounds):
            raise ConfigError(
                f"--mask {mask.path}, which is {found.volume.bounds} in voxels of its own, lies "
                f"wholly beside {url}, {opened.bounds}. Check its voxel size and where it begins"
            )
        masked_by = (mask, found.volume)
    job = stage_job(
        "levels",
        describe_input(
            url,
            scale,
            count.channel,
            opened,
            others,
            finds_object=finds_object,
            mask=masked_by,
        ),
        levels_records_url(to),
        storage,
        tuple(stages),
    )
    return LevelsPlan(job, count, *stages.write.to)


def levels_records_url(to: str) -> str:
    """URL of the folder beside a file of levels that holds the records of its making."""
    return f"{url_of(to)}.parts"
