"""Counts a volume's values by a Beam pipeline, and writes the levels that jobs normalize by."""

from __future__ import annotations

from collections.abc import Sequence

from beam_inference.beam.stage_runner import StageOutcome, check_place, run_stages
from beam_inference.config.storage import Storage
from beam_inference.job.stage_records import StageRecords, stage_job
from beam_inference.operators.level_counts import describe_input, plan_level_stages
from beam_inference.volumes.drafts import sweep_drafts_of_file
from beam_inference.volumes.kvstores import (
    LOCAL,
    delete_folder,
    open_kvstore,
    read_key,
    storage_of_environment,
    url_of,
)


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
        overwrite: whether to count again what was counted before.
        beside: further volumes of the same voxels, whose channels are counted with its own.

    Raises:
        UserError: the values cannot be counted, or other records are in the way.
    """
    storage = storage_of_environment(LOCAL) if storage is None else storage
    url = url_of(volume)
    target = url_of(to)
    others = [url_of(each) for each in beside]
    check_place(flags, [url, *others, target])
    stages = plan_level_stages(
        url, target, scale=scale, channel=channel, storage=storage, beside=others
    )
    count = stages[0]
    job = stage_job(
        "levels",
        describe_input(url, scale, count.channel, count.volume(), others),
        f"{target}.parts",
        storage,
        stages,
    )
    folder, name = stages[-1].to
    is_absent = read_key(open_kvstore(folder, storage), name, folder) is None
    StageRecords(job).begin(overwrite=overwrite or is_absent)
    outcome = run_stages(job, flags, count.chunks.roi.size / count.count)
    if outcome.is_complete:
        delete_folder(open_kvstore(count.counts_url, storage), count.counts_url)
        sweep_drafts_of_file(target)
    return outcome
