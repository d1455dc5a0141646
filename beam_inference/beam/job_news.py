"""News of a job from its engine: where its page is, and why its tasks are started again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from apache_beam.options.pipeline_options import PipelineOptions

from beam_inference.beam.engine_messages import explain_text
from beam_inference.beam.flink_cluster import FlinkCluster, FlinkError, FlinkJob, OwnJob, own_job
from beam_inference.foreign_text import shorten_text

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_FAILURE_LOOK_SECONDS = 5.0
_PATIENCE_SECONDS = 120.0
_REPEAT_SECONDS = 60.0
"""How long the same reason is not told again: some clusters start tasks every second."""


class JobNews:
    """Asks a Flink cluster about a job; other engines are not asked.

    Args:
        options: of Beam, before the pipeline was built, with the job's name.
        clock: seconds that pass.
    """

    def __init__(
        self, options: PipelineOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._own = own_job(options)
        self._job: FlinkJob | None = None
        self._last_failure_ms = 0
        self._last_reason = ""
        self._next_telling = 0.0
        self._next_look = self._clock() + _LOOK_SECONDS
        self._last_look = self._clock() + _PATIENCE_SECONDS

    def look(self) -> str | None:
        """Return the next line of news, if there is one.

        The first has the job's page and its id, as soon as the cluster has the job; each later one
        tells why a task of it failed, if that is not what was told just before.
        """
        own = self._own
        if own is None or self._clock() < self._next_look:
            return None
        try:
            if self._job is None:
                return self._find_page(own)
            return self._find_failure(own.cluster, self._job)
        except FlinkError as error:
            logger.debug("cannot ask the cluster: %s", error)
            return None

    def _find_page(self, own: OwnJob) -> str | None:
        now = self._clock()
        self._next_look = now + _LOOK_SECONDS if now < self._last_look else float("inf")
        self._job = own.find()
        if self._job is None:
            return None
        return f"Flink job {self._job.id}: {own.cluster.page_of(self._job)}"

    def _find_failure(self, cluster: FlinkCluster, job: FlinkJob) -> str | None:
        self._next_look = self._clock() + _FAILURE_LOOK_SECONDS
        failure = cluster.last_failure(job)
        if failure is None or failure.at_ms <= self._last_failure_ms:
            return None
        self._last_failure_ms = failure.at_ms
        reason = shorten_text(explain_text(failure.trace))
        if reason == self._last_reason and self._clock() < self._next_telling:
            return None
        self._last_reason = reason
        self._next_telling = self._clock() + _REPEAT_SECONDS
        return (
            f"a task of the Flink job failed: {reason}. With a restart strategy, Flink starts all "
            "tasks again: what is done stays done, and chunks that a lost worker had begun are "
            "waited for, about a minute"
        )
