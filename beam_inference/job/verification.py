"""Verification of a job: its receipts against its plan, and its blocks against its receipts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from beam_inference.config.job import OUTPUT
from beam_inference.errors import BeamInferenceError
from beam_inference.job.chunk_records import folders
from beam_inference.job.recomputed import Recomputation
from beam_inference.job.records import DamagedRecord, Part, QuarantineRecord, Receipt, crc32
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.volumes.volume import Volume

_MOST_MISSING = 20


@dataclass(slots=True)
class VerifyReport:
    """Result of a verification.

    Attributes:
        chunks: number of chunks of the job.
        receipts: number of chunks with a receipt.
        missing_count: number of chunks with neither receipt nor quarantine record.
        missing: indices of the first of these.
        quarantined: records of the chunks that could not be done.
        wrong: faults of receipts, and of blocks that receipts name, one line each.
        patches_beyond_bound: patches whose predictions were too large for exact sums.
        recomputation: chunks that were computed again; None if that was not asked for.
    """

    chunks: int
    receipts: int = 0
    missing_count: int = 0
    missing: list[int] = field(default_factory=list)
    quarantined: list[QuarantineRecord] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    patches_beyond_bound: int = 0
    recomputation: Recomputation | None = None

    @property
    def complete(self) -> bool:
        """Whether every chunk has a receipt and all that was checked is right."""
        is_different = self.recomputation is not None and bool(self.recomputation.different)
        is_whole = self.receipts == self.chunks and not self.missing_count
        return is_whole and not self.wrong and not is_different


def verify(
    job: ResolvedJob,
    state: State,
    outputs: Mapping[str, Volume] | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Compare a job's receipts with its plan, and its output with its receipts.

    Args:
        job: the job.
        state: its state folder.
        outputs: its outputs, by their keys in the job file: every chunk is read back and compared
            by its CRC-32. None to look at the receipts alone.
        progress: is called with the number of chunks looked at so far.

    Raises:
        WorkerFault: the state folder cannot be read.
    """
    grid = job.plan.chunks
    state = state.of(job)
    report = VerifyReport(grid.count)
    for start, stop in folders(grid.count):
        present = set()
        for receipt in state.scan_receipts(state.receipt_indices(start, stop)):
            if isinstance(receipt, DamagedRecord):
                report.wrong.append(receipt.message)
                continue
            present.add(receipt.chunk)
            if progress and len(present) % 64 == 0:
                progress(start + len(present))
            report.receipts += 1
            report.patches_beyond_bound += receipt.patches_beyond_bound
            wrong = None if outputs is None else written_fault(receipt, outputs)
            if wrong:
                report.wrong.append(
                    f"chunk {receipt.chunk} {grid.core_box(receipt.chunk)}: {wrong}"
                )
        quarantined = [
            record for record in state.read_quarantined(start, stop) if record.chunk not in present
        ]
        report.quarantined += quarantined
        absent = sorted(
            set(range(start, stop)) - present - {record.chunk for record in quarantined}
        )
        report.missing_count += len(absent)
        report.missing += absent[: _MOST_MISSING - len(report.missing)]
        if progress:
            progress(stop)
    return report


def written_fault(receipt: Receipt, outputs: Mapping[str, Volume]) -> str | None:
    """Describe what is wrong with the blocks that a receipt names.

    Args:
        receipt: the receipt, which names all of these outputs.
        outputs: the volumes, by their keys in the job file.

    Returns:
        The end of a sentence, or None if nothing is wrong.
    """
    for key, parts in receipt.parts_by_output.items():
        fault = parts_fault(parts, outputs[key])
        if fault is not None:
            return fault if key == OUTPUT else f"{key}: {fault}"
    return None


def parts_fault(parts: Sequence[Part], output: Volume) -> str | None:
    """Describe what is wrong with blocks that were written.

    Args:
        parts: the boxes, as a receipt names them.
        output: the volume that they were written to.

    Returns:
        The end of a sentence, or None if nothing is wrong.
    """
    for part in parts:
        box = part.box
        try:
            checksum = crc32(output.read(box))
        except BeamInferenceError as error:
            return str(error)
        if checksum != part.crc32:
            return f"its blocks at {box} have CRC {checksum:08x}, the receipt says {part.crc32:08x}"
    return None
