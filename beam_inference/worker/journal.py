"""What one process records of chunks: receipts, quarantine records, and lines in the log."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from beam_inference.config.job import OUTPUT
from beam_inference.errors import ChunkFault, Stage
from beam_inference.job.messages import Launch, Record
from beam_inference.job.records import DamagedRecord, Part, QuarantineRecord, Receipt
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.worker.effort import Effort
from beam_inference.worker.retries import Success, attempt

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class Journal:
    """Writes and reads the records of a launch's chunks.

    Args:
        launch: the launch that this process works for.
        job: its job.
        state: the job's state folder.
    """

    def __init__(self, launch: Launch, job: ResolvedJob, state: State) -> None:
        self._launch = launch
        self._job = job
        self._state = state
        self._first_of_run: dict[int, int] = {}  # of chunks under way: the first one of their run

    def read_receipts(self, indices: Sequence[int]) -> dict[int, Receipt]:
        """Read the receipts of chunks that count as done, by chunk.

        A receipt that cannot be believed does not count. It is removed, so that its chunk does not
        seem done if it cannot be done again; the log tells of it.
        """
        if not self._launch.honour_receipts:
            return {}
        receipts = {}
        for receipt in self._state.scan_receipts(indices):
            if isinstance(receipt, DamagedRecord):
                logger.warning(
                    "a receipt does not count, its chunk is done again: %s",
                    receipt.message,
                    extra=self._log_fields(receipt.chunk),
                )
                self._state.remove_damaged_receipt(receipt)
            else:
                receipts[receipt.chunk] = receipt
        return receipts

    def without_receipt(self, indices: Sequence[int]) -> list[int]:
        """Return the chunks that do not count as done."""
        done = self.read_receipts(indices)
        return [index for index in indices if index not in done]

    def record_of(self, receipt: Receipt) -> Record:
        """Record of a chunk that has a receipt already."""
        # A replayed bundle finds what its own first attempt did: that is done, not skipped.
        return Record(receipt.chunk, "done" if receipt.launch == self._launch.id else "skipped")

    def receipt(self, index: int, parts: Mapping[str, Sequence[Part]], effort: Effort) -> Receipt:
        """A receipt of this process, finished now.

        Args:
            index: the chunk.
            parts: what was written, by the key of the output; an output without any may be absent.
            effort: what it took.
        """
        by_output = {key: list(parts.get(key, ())) for key in self._job.config.written_keys}
        return Receipt(
            chunk=index,
            parts=by_output.pop(OUTPUT),
            further_parts=by_output,
            batch_size=effort.batch_size,
            uniform_patches=effort.uniform_patches,
            patches_beyond_bound=effort.patches_beyond_bound,
            seconds=dict(effort.seconds),
            attempts=dict(effort.attempts),
            finished_at=datetime.now(UTC),
            worker=f"{platform.node()}:{os.getpid()}",
            launch=self._launch.id,
            fingerprint=self._job.fingerprint,
        )

    def quarantine(self, index: int, fault: ChunkFault) -> Record:
        """Record that a chunk cannot be done."""
        core_box = self._job.plan.chunks.core_box(index)
        extra = {**self._log_fields(index), "stage": fault.stage, "attempt": fault.attempts}
        logger.warning("chunk %d %s quarantined: %s", index, core_box, fault, extra=extra)
        self._state.write_quarantine(
            QuarantineRecord(
                chunk=index,
                box=core_box,
                input_box=self._job.plan.work(index).input_box,
                stage=fault.stage,
                cause=str(fault),
                attempts=fault.attempts,
                launch=self._launch.id,
                fingerprint=self._job.fingerprint,
            )
        )
        return Record(index, "quarantined")

    def log_run(self, indices: Sequence[int], records: Iterator[Record]) -> Iterator[Record]:
        """Pass on the records of a run under way, and log a line at its end."""
        self._first_of_run.update(dict.fromkeys(indices, indices[0]))
        start = time.perf_counter()
        outcomes = Counter[str]()
        for record in records:
            outcomes[record.outcome] += 1
            yield record
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        extra = {
            **self._log_fields(indices[0]),
            "seconds": round(time.perf_counter() - start, 3),
            "outcomes": dict(outcomes),
        }
        logger.info(
            "run of %d chunks from %d: %s",
            len(indices),
            indices[0],
            counts or "stopped before its first",
            extra=extra,
        )
        for index in indices:
            self._first_of_run.pop(index, None)

    def attempt(
        self,
        action: Callable[[], Value],
        index: int,
        stage: Stage,
        is_transient: Callable[[BaseException], bool],
    ) -> Success[Value]:
        """Run an action for a chunk, with retries, and log each attempt that failed.

        Arguments and errors are those of :func:`beam_inference.worker.retries.attempt`.
        """

        def log(number: int, cause: str) -> None:
            extra = {**self._log_fields(index), "stage": stage, "attempt": number}
            logger.warning(
                "chunk %d: %s failed, attempt %d: %s", index, stage, number, cause, extra=extra
            )

        return attempt(action, self._job.config.job.attempts, stage, is_transient, log)

    def _log_fields(self, index: int) -> dict[str, object]:
        """Fields of a structured log beside a message about a chunk."""
        return {
            "job": self._job.fingerprint[:16],
            "launch": self._launch.id,
            "run": self._first_of_run.get(index, index),
            "chunk": index,
        }
