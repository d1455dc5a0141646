"""The task list of a job: what each of its chunks is, and how far it is, from the state folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.chunk_records import folders
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State

TaskState: TypeAlias = Literal["done", "quarantined", "summed", "missing"]


@dataclass(frozen=True, slots=True)
class Task:
    """A chunk of a job.

    Attributes:
        chunk: its index.
        box: its core box, which it writes.
        state: "done" (it has a receipt that can be believed), "quarantined", "summed" (with
            ``strategy: exchange``: its patches are computed, and it waits to be put together), or
            "missing".
    """

    chunk: int
    box: BoundingBox
    state: TaskState


def list_tasks(job: ResolvedJob, state: State) -> Iterator[Task]:
    """Yield the chunks of a job in order, each with its state; all receipts are read.

    Args:
        job: the job.
        state: its state folder.

    Raises:
        WorkerFault: the state folder cannot be read.
    """
    state = state.of(job)
    for start, stop in folders(job.plan.chunks.count):
        done = {each.chunk for each in state.read_receipts(state.receipt_indices(start, stop))}
        quarantined = {each.chunk for each in state.read_quarantined(start, stop)}
        summed = {each.chunk for each in state.read_sums(state.sums_indices(start, stop))}
        for chunk in range(start, stop):
            name: TaskState = "missing"
            if chunk in done:
                name = "done"
            elif chunk in quarantined:
                name = "quarantined"
            elif chunk in summed:
                name = "summed"
            yield Task(chunk, job.plan.chunks.core_box(chunk), name)
