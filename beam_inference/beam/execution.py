"""Runs a pipeline on a thread of its own, while the main one shows progress and handles signals."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from types import FrameType

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineResult

from beam_inference.beam.cancellation import Cancellation
from beam_inference.beam.engine_messages import explain_text, find_own_messages, without_step
from beam_inference.beam.flags import has_no_workers, with_job_name, with_partitions
from beam_inference.beam.idle_cluster import IdleCluster
from beam_inference.beam.job_news import JobNews
from beam_inference.beam.job_server import job_server
from beam_inference.beam.progress import Progress
from beam_inference.errors import INTERRUPTED, BeamInferenceError, WorkerFault
from beam_inference.foreign_text import clean_text

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_KEPT_TEXTS = 10_000
"""Texts printed between two polls that are kept for the log: the latest ones."""


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """End of a pipeline.

    Attributes:
        interrupted: whether it was asked to stop, by a signal or because its time was over.
        error: what it failed with, if it did.
        by_person: whether it was Ctrl-C that asked.
    """

    interrupted: bool
    error: BaseException | None
    by_person: bool = False


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a pipeline ends early, and with which exit code if it cannot end gently.

    Attributes:
        deadline: time of :func:`time.monotonic` from which nothing more is begun; None for never.
        exit_code: of a launch that a second SIGTERM ends at once.
        notice: what becomes of the work that is under way.
    """

    deadline: float | None = None
    exit_code: int = INTERRUPTED
    notice: str = "no further chunk is started, writes under way are finished"

    def is_due(self) -> bool:
        """Whether the time is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline


WHEN_ASKED = Stopping()


def execute(
    options: PipelineOptions,
    build: Callable[[beam.Pipeline], object],
    partitions: int,
    progress: Progress,
    request_stop: Callable[[], None],
    name: str,
    stopping: Stopping = WHEN_ASKED,
) -> ExecutionResult:
    """Run a pipeline to its end.

    From the main thread, SIGINT, SIGTERM and SIGUSR1 call ``request_stop`` once; a second SIGINT or
    SIGTERM ends the process.

    Args:
        options: of Beam.
        build: applies transforms to the pipeline.
        partitions: number of elements that the pipeline begins with; some runners share the work
            out by them.
        progress: shown meanwhile.
        request_stop: asks the workers to start nothing more.
        name: of the launch, as the job is called where it runs on Flink, Spark or Prism, if no
            flag says otherwise.
        stopping: when it ends early.
    """
    stop = _Stop()
    options = with_job_name(options, name)
    cancellation = Cancellation(options)
    news = JobNews(options)
    printed = CapturedStderr()
    with _signals(stop, stopping), progress, redirect_stderr(printed), ExitStack() as servers:
        thread = _PipelineThread(options, build, partitions, servers, stop)
        workers = IdleCluster(lambda: thread.result is not None and has_no_workers(thread.result))
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if stopping.is_due():
                stop.set()
            if stop.is_set() and not cancellation.has_begun:
                progress.say(f"stopping: {stopping.notice} (once more: end at once)")
                _try_to_stop(request_stop)
                cancellation.begin()
            for line in (news.look(), cancellation.look(thread.result)):
                if line is not None:
                    progress.say(line)
            if cancellation.is_over(thread.result):
                break
            if workers.are_given_up() and thread.result is not None:
                thread.result.cancel()
            printed.log()
            progress.update()
        printed.log()
    error = None if cancellation.was_done else thread.error
    return ExecutionResult(cancellation.has_begun, error, stop.signal == signal.SIGINT)


def _try_to_stop(request_stop: Callable[[], None]) -> None:
    try:
        request_stop()
    except BeamInferenceError as error:
        logger.warning(
            "cannot ask the workers to stop; they continue until they are done: %s", error
        )


class _Stop(threading.Event):
    """Set when a pipeline is to stop.

    Attributes:
        signal: the first signal that asked for it; None if none did.
    """

    signal: int | None = None


class _PipelineThread(threading.Thread):
    """Builds and runs a pipeline, and keeps the error that it ends with."""

    def __init__(
        self,
        options: PipelineOptions,
        build: Callable[[beam.Pipeline], object],
        partitions: int,
        servers: ExitStack,
        stop: threading.Event,
    ) -> None:
        super().__init__(name="pipeline", daemon=True)
        self._servers = servers
        self._stop_event = stop
        self._options = options
        self._build = build
        self._partitions = partitions
        self.result: PipelineResult | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the pipeline to its end."""
        # Slurm sends SIGUSR1 to all processes of a step. It is the launcher that acts on it: worker
        # processes are started from here, inherit what is blocked, and are asked to stop.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            self._run()
        except BaseException as error:  # of any kind: the main thread reports it
            self.error = error

    def _run(self) -> None:
        options = self._servers.enter_context(job_server(self._options, self._stop_event.is_set))
        pipeline = beam.Pipeline(options=with_partitions(options, self._partitions))
        self._build(pipeline)
        result = pipeline.run()
        self.result = result
        try:
            result.wait_until_finish()
            if any(future.status != "finished" for future in getattr(result, "futures", [])):
                raise WorkerFault("the Dask cluster was lost, or did not finish the work")
        finally:
            # The client of a Dask cluster would look for its scheduler for ever.
            if hasattr(result, "client"):
                result.client.close()


def explain(error: BaseException) -> str:
    """Return one message for an error that a runner raised.

    It is the message of our own error inside the runner's, if there is one; else what the runner's
    means, where that is known; else its last line.
    """
    own = _own_error(error)
    text = str(error if own is None else own).strip()
    if "Channel closed prematurely" in text:
        return "a worker process died (killed, or out of memory); its runner does not start another"
    # Dataflow says this where the job's log says nothing.
    text = text.removesuffix("Error:\nNone").strip()
    if own is not None and not find_own_messages(text):
        return clean_text(without_step(text)) or type(error).__name__
    return explain_text(text) or type(error).__name__


def _own_error(error: BaseException) -> BeamInferenceError | None:
    """The first error of ours in a chain of causes."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, BeamInferenceError):
        cause = cause.__cause__ or cause.__context__
    return cause


class CapturedStderr(io.TextIOBase):
    """Text printed to standard error, kept for the log, where --debug shows it.

    Beam's local runner prints the stack of every exception, which we report once, as a message.
    The text is only kept here, and logged by the thread that waits: logging itself prints when a
    handler fails, and still holds that handler's lock. Two threads that logged it there, each in
    another handler, would wait for each other for ever.
    """

    def __init__(self) -> None:
        self._texts = deque[str](maxlen=_KEPT_TEXTS)
        self._logged_by: int | None = None

    def write(self, text: str) -> int:
        """Keep a text, unless a log handler prints it that fails while this is logged."""
        if text.strip() and threading.get_ident() != self._logged_by:
            self._texts.append(text.rstrip())
        return len(text)

    def log(self) -> None:
        """Log what was printed since the last time."""
        self._logged_by = threading.get_ident()
        try:
            while self._texts:
                logger.debug("%s", self._texts.popleft())
        finally:
            self._logged_by = None


@contextmanager
def _signals(stop: _Stop, stopping: Stopping) -> Iterator[None]:
    """Let signals set ``stop``, and a second SIGINT or SIGTERM end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.signal is None:
            stop.signal = number
        elif number != signal.SIGUSR1:  # which wrappers of schedulers pass on more than once
            os._exit(stopping.exit_code if number == signal.SIGTERM else INTERRUPTED)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        if stop.signal == signal.SIGUSR1:
            # Slurm may repeat it while the launch is judged: to the end of the process it says
            # nothing new, and would otherwise kill it.
            before[signal.SIGUSR1] = signal.SIG_IGN
        for number, handler in before.items():
            signal.signal(number, handler)
