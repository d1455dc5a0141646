"""Chunks that are done bear witness that an output is the one that they were written to.

An output that was emptied or replaced is refused. One in which single blocks were changed is not:
their chunks are done again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from beam_inference.errors import StateError
from beam_inference.geometry.partition import index_ranges
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER
from beam_inference.job.records import Receipt
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.job.verification import written_fault
from beam_inference.volumes.volume import Volume

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_MOST = 16
"""Further witnesses of each stage that are heard where the first says no."""

_AGREEING = 3
"""Witnesses that must say yes for each one that says no, where there are more than are heard."""


@dataclass(frozen=True, slots=True)
class Witnesses:
    """The first chunk that has a receipt, and the first of the first stage of ``exchange``.

    Attributes:
        state: the state folder of the job.
        job: the job.
        receipt: a believed receipt; None if there is none.
        sums: a believed first-stage receipt, preferably one that lists written blocks; None if
            there is none.
    """

    state: State
    job: ResolvedJob
    receipt: Receipt | None
    sums: Receipt | None

    def __bool__(self) -> bool:
        return self.receipt is not None or self.sums is not None

    def damaged_chunks(self, outputs: Mapping[str, Volume]) -> list[int]:
        """Find chunks whose blocks are not what their receipts say, though others are.

        As long as the first witnesses, one in the middle and the last say yes, no other is heard:
        ``verify --deep`` finds all damaged blocks.

        Args:
            outputs: the volumes that the job writes, by their keys in the job file.

        Returns:
            Chunks that are to be done again.

        Raises:
            StateError: the output as a whole may be another one.
        """
        places = ", ".join(output.url for output in outputs.values())
        first = [each for each in (self.receipt, self.sums) if each is not None]
        first += _later_receipts(self.state, self.job.plan.chunks.count)  # copies lack what is last
        heard = _hear(first, outputs)
        if not heard.faults:
            return []
        further, are_all = _further_witnesses(self.state, self.job)
        heard = _hear([*first, *further], outputs)
        needed = 1 if are_all else _AGREEING * len(heard.faults)
        if len(heard.agreeing) < needed:
            chunk, fault = next(iter(heard.faults.items()))
            raise StateError(
                f"{self.state.url} says that chunk {chunk} is done, but in {places} "
                f"{fault}, and other chunks bear no witness that only this one was changed. The "
                "output was changed, or these receipts belong to another output. See what is left "
                "with verify --deep, or pass --overwrite to compute every chunk again."
            )
        for chunk, fault in heard.faults.items():
            logger.warning(
                "chunk %d is done again. Its receipt says that it is done, but in %s %s. %d others "
                "that were looked at hold what they should; verify --deep looks at all",
                chunk,
                places,
                fault,
                len(heard.agreeing),
            )
        return sorted(heard.faults)


def find_witnesses(state: State, job: ResolvedJob) -> Witnesses:
    """Find the first witnesses of a job; there are none before its first chunk is done."""
    count = job.plan.chunks.count
    sums = None if job.exchange is None else _first_sums(state, count)
    return Witnesses(state, job, _first_receipt(state, count), sums)


def find_comparable(state: State, job: ResolvedJob) -> Receipt | None:
    """Find a receipt, of either stage, that names written boxes, preferably of varied values."""
    found = find_witnesses(state, job)
    further, _ = _further_witnesses(state, job)
    receipts = [each for each in (found.receipt, found.sums, *further) if each and each.parts]
    return next(filter(_varies, receipts), next(iter(receipts), None))


@dataclass(frozen=True, slots=True)
class _Heard:
    """What witnesses said.

    Attributes:
        faults: what is wrong with the blocks of a chunk.
        agreeing: chunks whose blocks are right, and are not all one value, as those of an empty
            output are.
    """

    faults: dict[int, str]
    agreeing: Collection[int]


def _hear(receipts: Sequence[Receipt], outputs: Mapping[str, Volume]) -> _Heard:
    faults: dict[int, str] = {}
    agreeing = set()
    for receipt in receipts:
        fault = written_fault(receipt, outputs)
        if fault is not None:
            faults.setdefault(receipt.chunk, fault)
        elif _varies(receipt):
            agreeing.add(receipt.chunk)
    return _Heard(faults, agreeing - faults.keys())


def _varies(receipt: Receipt) -> bool:
    """Whether every output has more than one value where a receipt names its blocks."""
    return all(
        any(each.min != each.max for part in parts for each in part.channels)
        for parts in receipt.parts_by_output.values()
    )


def _further_witnesses(state: State, job: ResolvedJob) -> tuple[list[Receipt], bool]:
    """Witnesses from the whole job, and whether they are all that there are."""
    count = job.plan.chunks.count
    receipts = _spread_indices(state.receipt_indices, count)
    sums = _Indices([], 0) if job.exchange is None else _spread_indices(state.sums_indices, count)
    are_all = receipts.are_all and sums.are_all
    return [*state.read_receipts(receipts.chosen), *state.read_sums(sums.chosen)], are_all


@dataclass(frozen=True, slots=True)
class _Indices:
    """Chunks that have a receipt: some of them, and how many there are."""

    chosen: list[int]
    count: int | None

    @property
    def are_all(self) -> bool:
        return self.count == len(self.chosen)


def _spread_indices(list_indices: Callable[[int, int], Iterator[int]], count: int) -> _Indices:
    """Choose some chunks that have a receipt, spread over all that have."""
    listed = _spread(list(_folders(count)), _MOST)
    found = [list(list_indices(start, stop)) for start, stop in listed]
    chosen = [chunk for each in found for chunk in _spread(each, max(1, _MOST // len(listed)))]
    are_listed = sum(stop - start for start, stop in listed) == count
    return _Indices(chosen, sum(map(len, found)) if are_listed else None)


def _spread(items: Sequence[Item], most: int) -> Sequence[Item]:
    return items[:: max(1, -(-len(items) // most))]


def _first_receipt(state: State, count: int) -> Receipt | None:
    """The first believed receipt among those first in the folders that are listed."""
    for start, stop in _folders(count):
        some = islice(state.receipt_indices(start, stop), 64)
        for receipt in state.read_receipts(some):
            return receipt
    return None


def _later_receipts(state: State, count: int) -> list[Receipt]:
    """A believed receipt from the middle and the last one; from two folders, where there are."""
    ranges = list(_folders(count))
    found: list[int] = []
    for start, stop in dict.fromkeys((ranges[len(ranges) // 2], ranges[-1])):
        done = list(state.receipt_indices(start, stop))
        found += [done[len(done) // 2], done[-1]] if done else []
    return state.read_receipts([found[0], found[-1]]) if found else []


def _first_sums(state: State, count: int) -> Receipt | None:
    """A first-stage receipt, preferably one that lists written blocks."""
    last = None
    for start, stop in _folders(count):
        for receipt in state.read_sums(list(islice(state.sums_indices(start, stop), 64))):
            if receipt.parts:
                return receipt
            last = receipt
    return last


def _folders(count: int) -> Iterator[tuple[int, int]]:
    """Ranges of chunks whose receipts are listed: a bounded number, also for 10^9 chunks."""
    few = count <= 512 * CHUNKS_PER_FOLDER
    for start in (
        range(0, count, CHUNKS_PER_FOLDER) if few else [start for start, _ in index_ranges(count)]
    ):
        yield start, min(count, start + CHUNKS_PER_FOLDER)
