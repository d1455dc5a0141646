"""The page about a job of several volumes: how far each of them is, those to look at first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from beam_inference.launch.launched_cohort import LaunchedVolume
from beam_inference.report.facts import gather_facts
from beam_inference.report.measures import worker_hours
from beam_inference.report.page import judge, money_of, percents, render_template
from beam_inference.report.time_figures import time_text

_RECEIPTS_READ = 200
"""Of each volume; its own page reads more."""
_ORDER = ("bad", "busy", "good")


@dataclass(frozen=True, slots=True)
class VolumeRow:
    """What the page says of a volume.

    Attributes:
        name: of the volume.
        verdict: a class of the style, how it stands in a word or two, and why that is said.
        chunks: of the volume; 0 if it was not launched.
        done: chunks with a receipt.
        quarantined: chunks that could not be done.
        voxels: of its output that are done.
        hours: of worker processes, so far.
    """

    name: str
    verdict: tuple[str, str, str]
    chunks: int = 0
    done: int = 0
    quarantined: int = 0
    voxels: float = 0.0
    hours: float = 0.0

    @property
    def work(self) -> str:
        """The hours, as text."""
        return time_text(3600 * self.hours) if self.hours else "–"


def describe_volume(volume: LaunchedVolume, when: datetime) -> VolumeRow:
    """Describe a volume by its state folder.

    Raises:
        WorkerFault: the folder cannot be read.
    """
    fault = volume.fault
    if volume.trouble is not None:
        return VolumeRow(volume.name, ("bad", "cannot be read", volume.trouble))
    if volume.job is None:
        told = ("busy", "not launched", "") if fault is None else ("bad", "cannot be opened", fault)
        return VolumeRow(volume.name, told)
    job = volume.job.relocated_job
    facts = gather_facts(job, volume.job.state, _RECEIPTS_READ)
    verdict = judge(facts, when) if fault is None else ("bad", "cannot be opened", fault)
    return VolumeRow(
        volume.name,
        verdict,
        facts.chunks,
        facts.done,
        len(facts.quarantined),
        job.plan.chunks.roi.size * facts.done / facts.chunks,
        worker_hours([*facts.receipts, *facts.sums], facts.done + facts.summed),
    )


def render_volumes(
    name: str, rows: Sequence[VolumeRow], when: datetime, price: float | None
) -> str:
    """Render the page as HTML.

    Args:
        name: of the job.
        rows: its volumes, in any order.
        when: the page was made.
        price: of an hour of a worker; None if it is not known.
    """
    complete = sum(row.verdict[0] == "good" for row in rows)
    is_bad = any(row.verdict[0] == "bad" for row in rows)
    kind = "good" if complete == len(rows) else "bad" if is_bad else "busy"
    chunks, done, quarantined = (
        sum(getattr(row, key) for row in rows) for key in ("chunks", "done", "quarantined")
    )
    hours = sum(row.hours for row in rows)
    return render_template(
        "volumes.html",
        {
            "name": name,
            "kind": kind,
            "complete": complete,
            "when": when,
            "rows": sorted(rows, key=lambda row: (_ORDER.index(row.verdict[0]), row.name)),
            "chunks": chunks,
            "done": done,
            "quarantined": quarantined,
            "voxels": sum(row.voxels for row in rows),
            "percent": percents(done, quarantined, chunks),
            "work": time_text(3600 * hours),
            "money": money_of(hours, price),
            "price": price,
        },
    )
