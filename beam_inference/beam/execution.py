"""Run a pipeline on a thread of its own, while the main one shows progress and listens for signals."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from types import FrameType

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineResult

from beam_inference.beam.flags import has_no_workers, with_partitions
from beam_inference.beam.progress import Progress
from beam_inference.errors import INTERRUPTED, BeamInferenceError, WorkerFault

logger = logging.getLogger(__name__)

_LAST_CHUNKS_SECONDS = 10
_KEPT_TEXTS = 10_000
"""Of what is printed between two looks, a fifth of a second: the latest."""


def execute(
    options: PipelineOptions,
    build: Callable[[beam.Pipeline], object],
    partitions: int,
    progress: Progress,
    request_stop: Callable[[], None],
) -> tuple[bool, BaseException | None]:
    """Run what ``build`` applies to a pipeline: whether it was interrupted, and what it failed with.

    ``partitions`` is the number of the elements that the pipeline begins with: some runners share
    the work out by them. From the main thread, SIGINT and SIGTERM call ``request_stop`` once, which
    asks the workers to start nothing more; a second one ends the process.
    """
    failures: list[BaseException] = []
    results: list[PipelineResult] = []

    def run() -> None:
        try:
            pipeline = beam.Pipeline(options=with_partitions(options, partitions))
            build(pipeline)
            result = pipeline.run()
            results.append(result)
            try:
                result.wait_until_finish()
                if any(future.status != "finished" for future in getattr(result, "futures", [])):
                    raise WorkerFault("the Dask cluster was lost, or did not finish the work")
            finally:
                # of a Dask cluster: it would look for its scheduler for ever
                if hasattr(result, "client"):
                    result.client.close()
        except BaseException as failure:  # whatever it is, it is told of in the main thread
            failures.append(failure)

    thread = threading.Thread(target=run, name="pipeline", daemon=True)
    stop = threading.Event()
    asked = False
    asked_at = 0.0
    printed = _Printed()
    with _signals(stop), progress, redirect_stderr(printed):
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            if stop.is_set() and not asked:
                asked = True
                progress.say(
                    "stopping: no further chunk is started, writes under way are finished (once "
                    "more: end at once)"
                )
                try:
                    request_stop()
                except BeamInferenceError as error:
                    logger.warning(
                        "cannot ask the workers to stop, they go on to their end: %s", error
                    )
                asked_at = time.monotonic()
            if (
                asked
                and time.monotonic() > asked_at + _LAST_CHUNKS_SECONDS
                and any(map(has_no_workers, results))
            ):
                # a terminal's Ctrl-C reaches workers that it has started, too
                results.pop().cancel()
            printed.log()
            progress.update()
        printed.log()
    return asked, failures[0] if failures else None


def explain(error: BaseException) -> str:
    """The message of our own error inside what a runner made of it; else the last line of that."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BeamInferenceError):
            break
        seen = seen.__cause__ or seen.__context__
    text = str(seen if seen is not None else error).strip()
    if "Channel closed prematurely" in text:
        return "a worker process died (killed, or out of memory); its runner does not start another"
    own = re.findall(r"beam_inference\.\w+\.\w+: (.+)", text)
    # Dataflow's, where the job's log says nothing
    text = text.removesuffix("Error:\nNone").strip()
    lines = (own[-1:] or text.splitlines() or [type(error).__name__])[-1:]
    return re.sub(
        r"\s*\[?while running '[^']*'\]?",
        "",
        lines[0] if own else text if seen is not None else lines[0],
    )


class _Printed(io.TextIOBase):
    """What is printed to standard error meanwhile, for the log, where --debug shows it.

    Beam's local runner prints the stack of every exception; we tell of it once, as a message. It is
    only kept here, and
    logged by the thread that waits: logging itself prints when a handler fails, and still holds
        that handler's lock. Two threads that would log it there, each in another handler, would
        wait for each other for ever.
    """

    def __init__(self) -> None:
        self._texts = deque[str](maxlen=_KEPT_TEXTS)
        self._logged_by: int | None = None

    def write(self, text: str) -> int:
        """Keep it; but not what the log says when it cannot be written, while this is logged: that had no end."""
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
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set ``stop``; a second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
