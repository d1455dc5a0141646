"""A process among all that work on a job: it claims what it does, and leaves the rest to others.

Every launch has an element for every stretch of chunks that was missing when it began. A worker
that comes to one which another has claimed does a free one first, whose own element then finds it
done. Only where nothing is free does it wait, and does the chunks of workers that fall silent.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from typing import Protocol

from beam_inference.errors import WorkerFault
from beam_inference.geometry.zyx import ceil_div
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER
from beam_inference.job.crew_records import CrewRecords, FoundClaim, SignOfLife, SilenceWatch
from beam_inference.job.messages import Record
from beam_inference.worker.open_job import OpenJob
from beam_inference.worker.pace import Pace
from beam_inference.worker.stretches_ahead import StretchesAhead

logger = logging.getLogger(__name__)

_SIGNS_PER_PATIENCE = 6
"""Signs of life in the time after which a worker counts as silent."""

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0


class ClaimedStage(Protocol):
    """A stage of a job whose chunks are claimed.

    Attributes:
        name: of the stage, as claims have it.
    """

    name: str

    def run(self, indices: Sequence[int]) -> Iterator[Record]:
        """Do chunks, as far as they are not done."""

    def list_done(self, start: int, stop: int) -> Collection[int]:
        """List the chunks of ``start … stop`` with nothing left to do, as far as names tell."""

    def undone_chunks(self, indices: Sequence[int]) -> list[int]:
        """Return those of some chunks that have something left to do; their records are read."""


class Crew:
    """This process as one of those that work on a job; its threads share it.

    Args:
        opened: the job.
        length: chunks of a stretch, which are claimed at once.
        should_stop: whether the launch was asked to stop.
        pace: says how many stretches are begun before their turn.
    """

    def __init__(
        self, opened: OpenJob, length: int, should_stop: Callable[[], bool], pace: Pace
    ) -> None:
        self._length = length
        self._launch = opened.launch
        self._state = opened.state
        self._count = opened.job.plan.chunks.count
        self._should_stop = should_stop
        self._records: CrewRecords = opened.state.crew()
        self._name = f"{opened.launch.id}-{uuid.uuid4().hex[:8]}"
        patience = opened.job.config.job.timeouts.claim
        self._silence = SilenceWatch(patience)
        self._signs = _Signs(self._records, self._name, opened, patience / _SIGNS_PER_PATIENCE)
        self._quarantined_before = {
            record.chunk: record.launch
            for record in opened.state.read_quarantine(
                opened.state.quarantine_indices(0, self._count)
            )
        }
        self._held: set[tuple[str, int]] = set()
        self._offered: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._has_met_others = False
        self._is_without_claims = False
        self._pace = pace
        self._ahead: dict[str, StretchesAhead] = {}

    def do(self, stage: ClaimedStage, indices: Sequence[int]) -> Iterator[Record]:
        """Do chunks of one stretch, or leave them to the worker that has claimed them.

        Meanwhile other stretches may be done. Returns when nothing is left to do of these chunks,
        or the launch was asked to stop.

        Args:
            stage: what is done to them.
            indices: the chunks.

        Yields:
            A record per chunk, after the stretch is given back.
        """
        with self._signs:
            records = self._do(stage, indices)
        yield from records

    def _do(self, stage: ClaimedStage, indices: Sequence[int]) -> list[Record]:
        number = indices[0] // self._length
        ahead = self._begin_ahead(stage, number)
        records = ahead.take(number)
        if records is not None:
            return [record for record in records if record.chunk in indices]
        return self._do_in_turn(stage, number, indices)

    def _do_in_turn(self, stage: ClaimedStage, number: int, indices: Sequence[int]) -> list[Record]:
        pause = _FIRST_PAUSE
        while not self._should_stop():
            with self._claim(stage, number) as is_ours:
                if is_ours:
                    return self._run(stage, indices)
            self._has_met_others = True
            left = self._left_chunks(stage, indices)
            if not left:
                return self._run(stage, indices)
            claim = self._find_claim(stage, number)
            is_silent = claim is not None and self._is_silent(claim)
            if claim is not None and is_silent and self._take_over(stage, number, claim):
                return self._run_held(stage, number, indices)
            if self._do_free_stretch(stage, number):
                pause = _FIRST_PAUSE
                continue
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, 1.5 * pause)
        return []

    def _begin_ahead(self, stage: ClaimedStage, number: int) -> StretchesAhead:
        """Begin stretches that follow one, as many as hide what they wait for."""
        with self._lock:
            if stage.name not in self._ahead:
                self._ahead[stage.name] = StretchesAhead(
                    self._free_stretches(stage, number),
                    partial(self._do_before_turn, stage),
                    self._count_ahead,
                )
            ahead = self._ahead[stage.name]
        ahead.top_up()
        return ahead

    def _count_ahead(self) -> int:
        """How many stretches are to be under way before their turn."""
        return 0 if self._should_stop() else self._pace.suitable_stretches(self._length)

    def _do_before_turn(self, stage: ClaimedStage, number: int) -> list[Record] | None:
        """Do a stretch whose turn will come; None if another worker does it."""
        with self._signs, self._claim(stage, number) as is_ours:
            return self._run(stage, self._chunks_of(number)) if is_ours else None

    def _chunks_of(self, number: int) -> range:
        start = number * self._length
        return range(start, min(self._count, start + self._length))

    def _run(self, stage: ClaimedStage, indices: Sequence[int]) -> list[Record]:
        """Do chunks, but for those that were put into quarantine since this process began."""
        quarantined = self._lately_quarantined(indices) if self._has_met_others else set()
        left = [index for index in indices if index not in quarantined]
        records = []
        for record in stage.run(left) if left else ():
            self._signs.count(record)
            records.append(record)
        return records + [Record(index, "quarantined") for index in sorted(quarantined)]

    def _run_held(self, stage: ClaimedStage, number: int, indices: Sequence[int]) -> list[Record]:
        """Do chunks of a stretch that was taken over, and give it back."""
        try:
            return self._run(stage, indices)
        finally:
            self._release(stage, number)

    def _left_chunks(self, stage: ClaimedStage, indices: Sequence[int]) -> list[int]:
        left = stage.undone_chunks(indices)
        quarantined = self._lately_quarantined(left)
        return [index for index in left if index not in quarantined]

    def _lately_quarantined(self, indices: Sequence[int]) -> set[int]:
        """Those of some chunks that a launch of now has given up: each is tried once."""
        if not indices:
            return set()
        listed = self._state.quarantine_indices(min(indices), max(indices) + 1)
        wanted = sorted(set(listed).intersection(indices))
        before = self._quarantined_before
        return {
            record.chunk
            for record in self._state.read_quarantine(wanted)
            if record.launch in (self._launch.id,) or before.get(record.chunk) != record.launch
        }

    def _do_free_stretch(self, stage: ClaimedStage, after: int) -> bool:
        """Do the first stretch after one that nobody has claimed; False if there is none."""
        for number in self._free_stretches(stage, after):
            if (stage.name, number) in self._offered:
                continue  # what it leaves undone now, its own element tries
            with self._claim(stage, number) as is_ours:
                if is_ours:
                    self._offered.add((stage.name, number))
                    self._run(stage, self._chunks_of(number))
                    return True
        return False

    def _free_stretches(self, stage: ClaimedStage, after: int) -> Iterator[int]:
        """Stretches that are neither claimed nor done, from one on, and then from the beginning."""
        count = ceil_div(self._count, self._length)
        size = max(1, CHUNKS_PER_FOLDER // self._length)
        behind = pairwise([*range(after, count, size), count])
        before = pairwise([*range(0, after, size), after])
        for start, stop in chain(behind, before):
            yield from self._free_among(stage, start, stop)

    def _free_among(self, stage: ClaimedStage, start: int, stop: int) -> Iterator[int]:
        first = start * self._length
        last = min(self._count, stop * self._length)
        settled = {*stage.list_done(first, last)}
        left = [index for index in range(first, last) if index not in settled]
        if not left:
            return
        quarantined = self._lately_quarantined(left)
        claimed = self._records.claimed_numbers(stage.name, self._length, start, stop)
        numbers = dict.fromkeys(index // self._length for index in left if index not in quarantined)
        yield from (number for number in numbers if number not in claimed)

    @contextmanager
    def _claim(self, stage: ClaimedStage, number: int) -> Iterator[bool]:
        """Claim a stretch, and give it back at the end; whether it is ours."""
        if self._is_without_claims:
            yield True
            return
        is_ours = self._try_to_claim(stage, number)
        try:
            yield is_ours
        finally:
            if is_ours:
                self._release(stage, number)

    def _try_to_claim(self, stage: ClaimedStage, number: int) -> bool:
        with self._lock:
            if (stage.name, number) in self._held:  # by another thread
                return False
            self._held.add((stage.name, number))
        is_ours = False
        try:
            is_ours = self._pace.measure(
                "claim", self._records.claim, stage.name, self._length, number, self._name
            )
        except WorkerFault as error:
            logger.warning(
                "this worker claims nothing, so that others may do the same chunks: %s", error
            )
            self._is_without_claims = True
            is_ours = True
        finally:
            if not is_ours:
                self._let_go(stage, number)
        return is_ours

    def _release(self, stage: ClaimedStage, number: int) -> None:
        try:
            self._records.release(stage.name, self._length, number, self._name)
        except WorkerFault as error:
            logger.warning("others wait for chunks that are done, or begun anew: %s", error)
        finally:
            self._let_go(stage, number)

    def _let_go(self, stage: ClaimedStage, number: int) -> None:
        with self._lock:
            self._held.discard((stage.name, number))

    def _find_claim(self, stage: ClaimedStage, number: int) -> FoundClaim | None:
        return self._records.find_claim(stage.name, self._length, number)

    def _is_silent(self, claim: FoundClaim) -> bool:
        """Whether the worker that holds a claim has shown nothing new for too long."""
        if claim.worker == self._name:  # another thread, or an attempt whose answer was lost
            return False
        self._silence.begin(self._records.read_stored_signs)
        worker = claim.worker or "unknown"
        return self._silence.is_silent(worker, self._records.read_sign(worker))

    def _take_over(self, stage: ClaimedStage, number: int, claim: FoundClaim) -> bool:
        with self._lock:
            if (stage.name, number) in self._held:
                return False
            self._held.add((stage.name, number))
        is_ours = False
        try:
            is_ours = self._records.take_over(stage.name, self._length, number, claim, self._name)
        finally:
            if not is_ours:
                self._let_go(stage, number)
        if is_ours:
            if claim.worker:
                self._records.remove_sign(claim.worker)
            logger.warning(
                "worker %s has given no sign of life: its chunks from %d are done here",
                claim.worker or "(unknown)",
                number * self._length,
            )
        return is_ours


class _Signs:
    """Gives signs of life as long as any thread of this process works for a job.

    Args:
        records: where they are written.
        name: the worker's.
        opened: the job that it works for.
        interval: seconds between two of them.
    """

    def __init__(self, records: CrewRecords, name: str, opened: OpenJob, interval: float) -> None:
        self._records = records
        self._name = name
        self._interval = interval
        self._launch = opened.launch
        self._engine = opened.job.engine.get("engine", opened.job.config.inference.engine)
        self._device = opened.job.config.inference.device
        self._lock = threading.Lock()
        self._active = 0
        self._beat = 0
        self._chunks = 0
        self._start = time.monotonic()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        _ALL_SIGNS.add(self)

    def end(self) -> None:
        """Give no more signs, and wait for the last one: no thread may write as Python ends."""
        self._end.set()
        thread = self._thread
        if thread is not None:
            thread.join(_LONGEST_PAUSE)

    def __enter__(self) -> None:
        with self._lock:
            self._active += 1
            if self._thread is None:
                self._try_to_give()
                self._thread = threading.Thread(target=self._repeat, name="signs", daemon=True)
                self._thread.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._active -= 1

    def count(self, record: Record) -> None:
        """Count a chunk, if this process has done it."""
        if record.outcome in ("done", "summed"):
            with self._lock:
                self._chunks += 1

    def _repeat(self) -> None:
        while True:
            if self._end.wait(self._interval):
                return  # the launch removes the sign
            with self._lock:
                if not self._active:
                    self._try_to_remove()
                    self._thread = None
                    return
            self._try_to_give()

    def _try_to_give(self) -> None:
        self._beat += 1
        sign = SignOfLife(
            beat=self._beat,
            launch=self._launch.id,
            host=platform.node(),
            pid=os.getpid(),
            engine=self._engine,
            device=self._device,
            versions=self._launch.versions,
            chunks=self._chunks,
            seconds=time.monotonic() - self._start,
        )
        try:
            self._records.give_sign(self._name, sign)
        except WorkerFault as error:
            logger.warning("others may take this worker for dead: %s", error)

    def _try_to_remove(self) -> None:
        try:
            self._records.remove_sign(self._name)
        except WorkerFault as error:
            logger.warning("a sign of life is left behind: %s", error)


_ALL_SIGNS = weakref.WeakSet[_Signs]()


@atexit.register
def _end_signs() -> None:
    for signs in list(_ALL_SIGNS):
        signs.end()
