"""Ends a pipeline that was asked to stop, where no worker is left that could read the request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import grpc
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineResult

from beam_inference.beam.flags import has_no_workers
from beam_inference.beam.flink_cluster import FlinkError, OwnJob, own_job
from beam_inference.beam.portable_engines import is_portable

logger = logging.getLogger(__name__)

_LAST_CHUNKS_SECONDS = 10.0
"""How long after a request to stop nothing is cancelled."""
_UNKNOWN_SECONDS = 60.0
"""How long nothing is cancelled where the engine cannot be asked whether anything runs."""
_LEAVE_SECONDS = 10.0
_LOOK_SECONDS = 1.0


class Cancellation:
    """Cancels a pipeline some time after a request to stop, where nobody follows that request.

    Args:
        options: of Beam, before the pipeline was built.
        clock: seconds that pass.
    """

    def __init__(
        self, options: PipelineOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._job = own_job(options)
        self._is_portable = is_portable(options)
        self._since: float | None = None
        self._next_look = 0.0
        self._cancelled_at: float | None = None

    def begin(self) -> None:
        """Note that the workers have been asked to stop."""
        self._since = self._clock()

    @property
    def has_begun(self) -> bool:
        """Whether the workers have been asked to stop."""
        return self._since is not None

    @property
    def was_done(self) -> bool:
        """Whether the pipeline was cancelled here."""
        return self._cancelled_at is not None

    def look(self, result: PipelineResult | None) -> str | None:
        """Cancel the pipeline, once, if it is time and no worker is at work.

        Args:
            result: of the pipeline; None if it was not submitted yet.

        Returns:
            A line that tells so, if it was cancelled now.
        """
        now = self._clock()
        waited = 0.0 if self._since is None else now - self._since
        if self.was_done or result is None or now < self._next_look:
            return None
        if waited < _LAST_CHUNKS_SECONDS:
            return None
        self._next_look = now + _LOOK_SECONDS
        how = self._cancel(result, waited)
        if how is not None:
            self._cancelled_at = now
        return how

    def _cancel(self, result: PipelineResult, waited: float) -> str | None:
        if has_no_workers(result):
            result.cancel()
            return "no worker is left: the job is cancelled"
        if not self._is_portable:
            return None
        if self._job is not None:
            try:
                is_cancelled = _cancel_if_idle(self._job)
            except FlinkError as error:
                logger.debug("cannot ask the cluster: %s", error)
            else:
                return "nothing of the job runs: it is cancelled" if is_cancelled else None
        if waited < _UNKNOWN_SECONDS:
            return None
        try:
            result.cancel()
        except grpc.RpcError as error:
            logger.debug("the job service does not cancel: %s", error)
        return f"the job has not ended after {waited:.0f} s: it is cancelled"

    def is_over(self, result: PipelineResult | None) -> bool:
        """Whether nothing is to be waited for any more, though the pipeline has not ended.

        It was cancelled some time ago; or it was not even submitted after a request to stop.
        """
        if self._since is None or not self._is_portable:
            return False
        now = self._clock()
        if self._cancelled_at is not None:
            return now > self._cancelled_at + _LEAVE_SECONDS
        return result is None and now > self._since + _LAST_CHUNKS_SECONDS


def _cancel_if_idle(own: OwnJob) -> bool:
    """Cancel a job on a Flink cluster, if none of its tasks runs; whether that was done.

    Raises:
        FlinkError: the cluster does not answer.
    """
    job = own.find()
    if job is None or job.is_over or job.running_tasks:
        return False
    own.cluster.cancel(job)
    return True
