"""Tells where a job's page is, once the engine has the job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from apache_beam.options.pipeline_options import PipelineOptions

from beam_inference.beam.flink_cluster import FlinkError, own_job

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_PATIENCE_SECONDS = 120.0


class JobPage:
    """Looks for a job on its Flink cluster; of other engines no page is known.

    Args:
        options: of Beam, before the pipeline was built, with the job's name.
        clock: seconds that pass.
    """

    def __init__(
        self, options: PipelineOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._job = own_job(options)
        self._next_look = self._clock() + _LOOK_SECONDS
        self._last_look = self._clock() + _PATIENCE_SECONDS

    def look(self) -> str | None:
        """A line with the job's page and its id, once, as soon as the cluster has the job."""
        now = self._clock()
        if self._job is None or now < self._next_look:
            return None
        self._next_look = now + _LOOK_SECONDS
        try:
            job = self._job.find()
        except FlinkError as error:
            logger.debug("cannot ask the cluster: %s", error)
            job = None
        line = None if job is None else f"Flink job {job.id}: {self._job.cluster.page_of(job)}"
        if line is not None or now > self._last_look:
            self._job = None
        return line
