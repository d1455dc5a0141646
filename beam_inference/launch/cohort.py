"""Run a job of several volumes: one launch, one pipeline, one outcome.

Each volume is a job with a state folder of its own. They share the network, which is tried on one
of them, and the workers. A volume that cannot be opened is put aside by name, and the others go on.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from beam_inference.beam.progress import Phase, Progress
from beam_inference.config.cohort import Cohort
from beam_inference.errors import (
    COMPLETE,
    COMPLETE_BUT_QUARANTINED,
    FAILED,
    INTERRUPTED,
    TRY_AGAIN,
    ConfigError,
    ModelContractError,
    UserError,
)
from beam_inference.job.cohort import CohortLaunch, request_stop
from beam_inference.job.messages import Launch
from beam_inference.job.state import State
from beam_inference.launch.prepare import KnownNetwork, prepare
from beam_inference.launch.run_job import (
    ChunksToDo,
    Ending,
    JobOutcome,
    Setting,
    forget_signs,
    judge,
    judge_finished,
    settle,
    template_of,
)
from beam_inference.launch.state_errors import state_errors
from beam_inference.models.trust import Trust

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CohortOutcome:
    """Outcome of a launch of several volumes.

    Attributes:
        exit_code: 0 complete; 1 failed; 3 finished, but for quarantined chunks or volumes within
            the bound; 75 stopped, to be tried again; 130 interrupted.
        volumes: outcome of each volume that could be opened, by name.
        faults: why the others could not, by name.
        seconds: wall time of the pipeline.
        error: text of the error that ended the launch early, if one did.
    """

    exit_code: int
    volumes: Mapping[str, JobOutcome]
    faults: Mapping[str, str]
    seconds: float
    error: str | None

    @property
    def chunks(self) -> int:
        """Number of chunks of all volumes that could be opened."""
        return sum(each.chunks for each in self.volumes.values())

    @property
    def done(self) -> int:
        """Number of these that have a receipt."""
        return sum(each.done for each in self.volumes.values())

    @property
    def complete(self) -> int:
        """Number of volumes of which every chunk is done."""
        return sum(not each.missing_of_job for each in self.volumes.values())


@dataclass(frozen=True, slots=True)
class PreparedVolumes:
    """The volumes of a launch.

    Attributes:
        launches: of the volumes that could be opened, by name.
        faults: why the others could not, by name.
    """

    launches: dict[str, Launch] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


def run_cohort(
    cohort: Cohort,
    flags: Sequence[str] = (),
    *,
    stop_after: float | None = None,
    overwrite: bool = False,
    trust: Trust = Trust.NOTHING,
    claims: bool = True,
) -> CohortOutcome:
    """Check a job of several volumes, run it to its end, and judge it.

    From the main thread, SIGINT, SIGTERM and SIGUSR1 stop the launch after the chunks under way.

    Args:
        cohort: the volumes, see :func:`beam_inference.launch.job_files.load_jobs`.
        flags: Beam's command-line flags.
        stop_after: seconds after which no further chunk is begun.
        overwrite: delete the state of earlier launches first, so that every chunk is done anew.
        trust: which code that the network's files carry may run.
        claims: whether workers claim what they do, so that other launches leave it to them.

    Returns:
        The outcome; ``exit_code`` says whether all volumes are complete.

    Raises:
        UserError: something is wrong with what all volumes share, or with every volume.
    """
    ending = Ending(
        deadline=None if stop_after is None else time.monotonic() + stop_after,
        exit_code=INTERRUPTED if stop_after is None else TRY_AGAIN,
    )
    first = next(iter(cohort.volumes.values()))
    setting = settle(first, flags)
    if setting.options is not None and template_of(setting.options):
        raise ConfigError(
            "a pipeline that is staged for another to run does one volume: the volumes of a job "
            "of several are judged here, in the end. Leave out --template_location or "
            "--output_executable_path"
        )
    launch = CohortLaunch(
        state_url=cohort.state_url,
        id=uuid.uuid4().hex[:12],
        storage=first.storage,
        threads_per_process=setting.place.threads_per_process,
    )
    prepared = prepare_volumes(
        cohort,
        launch,
        setting,
        overwrite=overwrite,
        trust=trust,
        claims=claims,
        deadline=ending.deadline,
    )
    works = {name: ChunksToDo.of(each) for name, each in prepared.launches.items()}
    finished = {name: judge_finished(work, ()) for name, work in works.items()}
    outcomes = {name: outcome for name, outcome in finished.items() if outcome is not None}
    left = {name: work for name, work in works.items() if name not in outcomes}
    most = first.job.max_failed_chunks
    if not left:
        return judge_volumes(list(works), outcomes, prepared.faults, most)
    return _execute(launch, left, outcomes, prepared.faults, setting, ending, most)


def prepare_volumes(
    cohort: Cohort,
    launch: CohortLaunch,
    setting: Setting,
    *,
    overwrite: bool = False,
    trust: Trust = Trust.NOTHING,
    claims: bool = False,
    deadline: float | None = None,
) -> PreparedVolumes:
    """Check each volume, create its output and its state, and record its launch for the workers.

    The network is loaded and tried on the first volume with work left; the others take what it
    told. What is found out at the first launch of all is recorded in the shared state folder, and
    volumes that come later follow it.

    Args:
        cohort: the volumes.
        launch: the launch.
        setting: where it runs.
        overwrite: delete the state of earlier launches first.
        trust: which code that the network's files carry may run.
        claims: whether workers claim what they do.
        deadline: time of :func:`time.monotonic` from which no worker is waited for.

    Raises:
        UserError: the network does not answer as the job says, or no volume can be opened.
    """
    shared = State(cohort.state_url, launch.storage)
    known = None
    ask = setting.asker(deadline)
    with state_errors("job.state_path"):
        if overwrite:
            shared.clear()
        elif (job := shared.load_job()) is not None:
            known = KnownNetwork(job, is_tried=False)
        prepared = PreparedVolumes()
        first_error: UserError | None = None
        for name, config in cohort.volumes.items():
            try:
                single = prepare(
                    config,
                    setting.place,
                    overwrite=overwrite,
                    trust=trust,
                    workers=setting.workers,
                    claims=claims,
                    launch_id=launch.id,
                    known=known,
                    ask_worker=ask,
                )
            except ModelContractError:
                raise  # of the network, which all share
            except UserError as error:
                first_error = first_error or error
                prepared.faults[name] = str(error)
                logger.warning("volume %s is put aside: %s", name, error)
                launch.volume_state(name).write_fault(str(error))
                continue
            known = _known_after(single, known, shared)
            launch.volume_state(name).write_fault(None)
            launch.record(name, single)
            prepared.launches[name] = single
    if first_error is not None and not prepared.launches:
        raise first_error
    return prepared


def _known_after(single: Launch, known: KnownNetwork | None, shared: State) -> KnownNetwork:
    """Returns what the next volume need not find out again, once one was prepared."""
    if known is None:
        return KnownNetwork(shared.create_job(single.read_job()), is_tried=True)
    if known.is_tried or ChunksToDo.of(single).is_done:
        return known
    return replace(known, is_tried=True)


def _execute(
    launch: CohortLaunch,
    left: Mapping[str, ChunksToDo],
    outcomes: Mapping[str, JobOutcome],
    faults: Mapping[str, str],
    setting: Setting,
    ending: Ending,
    most_quarantined: int | None,
) -> CohortOutcome:
    """Run the pipeline of the volumes with work left to its end, and judge all."""
    from beam_inference.beam.execution import Stopping, execute
    from beam_inference.beam.flags import beam_options
    from beam_inference.launch import pipeline as job_pipeline

    start = time.monotonic()
    options = beam_options(()) if setting.options is None else setting.options
    exchanging = {name: work.job.plan.exchange is not None for name, work in left.items()}
    voxels = sum(work.job.plan.chunks.roi.size for work in left.values())
    count = sum(work.count for work in left.values())
    execution = execute(
        options,
        lambda pipeline: job_pipeline.build_volumes(pipeline, launch, exchanging, setting.workers),
        len(left),
        Progress(Phase("chunks", count, voxels / count, _Counter(left.values()))),
        lambda: request_stop(launch, left),
        f"beam-inference-{launch.id}",
        Stopping(ending.deadline, ending.exit_code),
    )
    seconds = time.monotonic() - start
    judged = dict(outcomes)
    found = dict(faults)
    for name, work in left.items():
        forget_signs(work)
        tally = work.state.tally_receipts(work.count_of_job)
        outcome = judge(work, (), tally, seconds, execution)
        if outcome.missing and (cause := work.state.read_fault()) is not None:
            found[name] = cause
            continue
        if outcome.exit_code == INTERRUPTED and not execution.by_person:
            outcome = replace(outcome, exit_code=ending.exit_code)
        judged[name] = outcome
    names = [*outcomes, *left]
    return replace(judge_volumes(names, judged, found, most_quarantined), seconds=seconds)


class _Counter:
    """Counts the chunks of volumes that have a receipt; those of finished volumes once."""

    def __init__(self, works: Iterable[ChunksToDo]) -> None:
        self._left = list(works)
        self._finished = 0

    def __call__(self) -> int:
        counts = [(work, work.list_done()) for work in self._left]
        self._left = [work for work, done in counts if done < work.count]
        unfinished = sum(done for work, done in counts if done < work.count)
        self._finished += sum(done for work, done in counts if done == work.count)
        return self._finished + unfinished


def judge_volumes(
    names: Sequence[str],
    outcomes: Mapping[str, JobOutcome],
    faults: Mapping[str, str],
    most_quarantined: int | None,
) -> CohortOutcome:
    """Judge a launch by the outcomes of its volumes.

    Args:
        names: of the volumes, in the order in which outcomes are told.
        outcomes: of those that could be opened.
        faults: why the others could not.
        most_quarantined: quarantined chunks above which the job fails; a volume that cannot be
            opened counts as one. None for no bound.
    """
    codes = {outcome.exit_code for outcome in outcomes.values()}
    quarantined = sum(len(outcome.quarantined) for outcome in outcomes.values()) + len(faults)
    stopped = codes & {INTERRUPTED, TRY_AGAIN}
    if stopped:
        exit_code = min(stopped)
    elif FAILED in codes or (most_quarantined is not None and quarantined > most_quarantined):
        exit_code = FAILED
    else:
        exit_code = COMPLETE_BUT_QUARANTINED if quarantined else COMPLETE
    errors = [outcome.error for outcome in outcomes.values() if outcome.error is not None]
    ordered = {name: outcomes[name] for name in names if name in outcomes}
    return CohortOutcome(exit_code, ordered, faults, 0.0, errors[0] if errors else None)
