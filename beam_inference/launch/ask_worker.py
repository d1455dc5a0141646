"""Asks a worker about a job's network, by a pipeline of one element before the job's own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    GoogleCloudOptions,
    PipelineOptions,
    WorkerOptions,
)

from beam_inference.beam.dask_workers import stop_sampling
from beam_inference.beam.execution import ExecutionResult, Stopping, execute, explain
from beam_inference.beam.progress import Phase, Progress, tell
from beam_inference.environment import use_one_heap
from beam_inference.errors import AskedToStop, RunnerError
from beam_inference.foreign_text import clean_text
from beam_inference.job.state import State
from beam_inference.launch.network_question import (
    NetworkQuestion,
    WorkerChoice,
    WorkerRefusal,
    read_answer,
    record_answer,
)
from beam_inference.launch.state_errors import state_errors
from beam_inference.volumes.kvstores import local_folder

logger = logging.getLogger(__name__)

_NOTICE = "a worker that is trying the network comes to its end"


def ask_worker(
    question: NetworkQuestion, options: PipelineOptions, deadline: float | None = None
) -> WorkerChoice:
    """Have a worker answer a question, and wait for its answer. Nothing of it is left behind.

    From the main thread, SIGINT, SIGTERM and SIGUSR1 end it as they end a run.

    Args:
        question: the question.
        options: of Beam, for the job's own pipeline.
        deadline: time of :func:`time.monotonic` at which nobody waits any more; None for never.

    Raises:
        UserError: what the worker has found wrong.
        RunnerError: the pipeline has ended without an answer.
        KeyboardInterrupt: Ctrl-C has ended it.
        AskedToStop: another signal has, or the deadline.
    """
    tell("the network is tried on a worker, which decides what the job file leaves open")
    state = question.state()
    with state_errors(), _without_new_folders(state):
        execution = _run(question, options, state, deadline)
        answer = read_answer(state, question.launch)
        state.forget_question(question.launch)
    if execution.interrupted:
        raise KeyboardInterrupt if execution.by_person else AskedToStop
    if answer is None:
        cause = "its pipeline came to its end without an answer"
        if execution.error is not None:
            cause = explain(execution.error)
        raise RunnerError(
            f"the network could not be tried on a worker: {cause}. Nothing was created. Mend that, "
            "and give the same command again"
        )
    if isinstance(answer, WorkerRefusal):
        raise answer.error
    _tell(answer)
    return answer


def _run(
    question: NetworkQuestion, options: PipelineOptions, state: State, deadline: float | None
) -> ExecutionResult:
    def count_answers() -> int:
        return int(state.read_answer(question.launch) is not None)

    return execute(
        options_for_one_worker(options),
        lambda pipeline: build(pipeline, question),
        1,
        Progress(Phase("networks tried", 1, 0.0, count_answers)),
        lambda: state.request_stop(question.launch),
        f"beam-inference-{question.launch}-trial",
        Stopping(deadline, notice=_NOTICE),
    )


def build(pipeline: beam.Pipeline, question: NetworkQuestion) -> None:
    """Apply the question to a pipeline: one element, whose worker records the answer."""
    _ = (
        pipeline
        | "Question" >> beam.Create([question.launch])
        | "TryNetwork" >> beam.Map(_answer_on_worker, question).with_output_types(str)
    )


def _answer_on_worker(launch: str, question: NetworkQuestion) -> str:
    use_one_heap()
    stop_sampling()
    record_answer(question)
    return launch


def options_for_one_worker(options: PipelineOptions) -> PipelineOptions:
    """Options of a job beside the one that they are for: theirs must stay as they are.

    On Dataflow it has a name of its own, and starts one machine.
    """
    options = copy.deepcopy(options)
    scale = options.view_as(WorkerOptions)
    scale.num_workers = None if scale.num_workers is None else 1
    scale.max_num_workers = None if scale.max_num_workers is None else 1
    cloud = options.view_as(GoogleCloudOptions)
    if cloud.job_name:
        cloud.job_name = f"{cloud.job_name}-trial"
    return options


@contextmanager
def _without_new_folders(state: State) -> Iterator[None]:
    """Remove local folders afterwards that were not there before, and are empty: the record's."""
    folder = local_folder(state.url)
    new: list[Path] = []
    if folder is not None:
        path = folder / "launches"
        while not path.exists():
            new.append(path)
            path = path.parent
    try:
        yield
    finally:
        with suppress(OSError):  # another launch may have put something into them
            for path in new:
                path.rmdir()


def _tell(choice: WorkerChoice) -> None:
    findings = choice.findings
    for warning in findings.warnings:
        logger.warning("%s", clean_text(warning))
    tell(
        f"decided on the worker {choice.host}: device: {choice.device}, engine: {findings.engine}, "
        f"batch_size: {findings.fitting_batch_size}"
    )
