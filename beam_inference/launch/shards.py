"""Jobs that are done in shards: divided once, and finished once all shards have come to their end.

Between the two, :func:`beam_inference.launch.run_job.run_job` does one shard after the other, on
any machines, in any order, at the same time or not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from beam_inference.config.job import JobConfig
from beam_inference.errors import ConfigError, StateError
from beam_inference.job.messages import Launch
from beam_inference.job.shards import MOST_SHARDS
from beam_inference.launch.checks import check_division
from beam_inference.launch.launched_job import find_launched_job
from beam_inference.launch.output_pyramid import begin_all_scales, check_scales
from beam_inference.launch.prepare import prepare
from beam_inference.launch.run_job import JobOutcome, run_job, settle
from beam_inference.models.trust import Trust

logger = logging.getLogger(__name__)

_LISTED_SHARDS = 20
"""Most shards that a message names."""


def prepare_shards(
    config: JobConfig,
    shards: int,
    flags: Sequence[str] = (),
    *,
    resplit: bool = False,
    overwrite: bool = False,
    trust: Trust = Trust.NOTHING,
) -> Launch:
    """Check a job, create its output and its state, and divide it into shards.

    Args:
        config: the job file.
        shards: number of shards.
        flags: Beam's command-line flags that the shards will be run with.
        resplit: divide a job anew that was divided into another number of shards.
        overwrite: delete an earlier launch's state first, so that every chunk is done anew.
        trust: which code that the network's files carry may run.

    Returns:
        The launch, which does nothing more.

    Raises:
        UserError: something is wrong with the job, or it was divided otherwise; nothing was
            created.
    """
    if not 1 <= shards <= MOST_SHARDS:
        raise ConfigError(f"--shards {shards}: expected a number from 1 to {MOST_SHARDS:,}")
    if not config.job.resume:
        raise ConfigError(
            "job.resume is false, and each shard goes on with what others have begun: remove the "
            "key. To do every chunk again, pass --overwrite to prepare."
        )
    setting = settle(config, flags)
    check_scales(config, overwrite=overwrite)
    if not overwrite:
        check_division(config, shards, resplit=resplit)
    launch = prepare(
        config,
        setting.place,
        overwrite=overwrite,
        trust=trust,
        workers=setting.workers,
        ask_worker=setting.asker(),
    )
    begin_all_scales(launch, overwrite=overwrite)
    state = launch.state()
    state.write_shard_count(shards, replace=resplit)
    if state.read_shard_count() != shards:
        check_division(config, shards, resplit=False)  # another was faster
    chunks = launch.read_job().plan.chunks.count
    if chunks < shards:
        logger.warning(
            "the job has %d chunks, so that %d of the %d shards have nothing to do",
            chunks,
            shards - chunks,
            shards,
        )
    return launch


def finish_job(
    config: JobConfig, flags: Sequence[str] = (), *, trust: Trust = Trust.NOTHING
) -> JobOutcome:
    """Do what is left of a job once all its shards have come to their end.

    That is the second stage of ``strategy: exchange``, the pyramids, and any chunk that is still
    missing. To do it again does no harm.

    Args:
        config: the job file.
        flags: Beam's command-line flags.
        trust: which code that the network's files carry may run.

    Returns:
        The outcome of the whole job.

    Raises:
        StateError: the job was not divided, or some shards have not come to their end.
        UserError: something is wrong with the job.
    """
    launched = find_launched_job(config, "nothing to finish")
    shards = launched.state.read_shard_count()
    if shards is None:
        raise StateError(
            f"{launched.state.url} says of no shards, so that there is nothing to finish: run does "
            "all that is missing of such a job"
        )
    state = launched.state.of(launched.job)
    left = sorted(set(range(shards)) - state.ended_shards(shards))
    count = launched.job.plan.chunks.count
    if left and state.tally_receipts(count).chunks < count:
        named = ", ".join(f"{index}/{shards}" for index in left[:_LISTED_SHARDS])
        more = f" and {len(left) - _LISTED_SHARDS} more" if len(left) > _LISTED_SHARDS else ""
        raise StateError(
            f"{len(left)} of {shards} shards have not come to their end: {named}{more}. Run them "
            "(run --shard …), then finish; or do all that is missing here, with run."
        )
    return run_job(config, flags, trust=trust)
