"""Run the stages of a job of labels, components or a segmentation, from start to exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from beam_inference.errors import COMPLETE, ConfigError
from beam_inference.outputs import create_output
from beam_inference.pyramid import make_pyramid, plan_pyramid
from beam_inference.scales import multiscale_volume
from beam_inference.segmentation.job import memory_gib
from beam_inference.segmentation.numbering import Stage
from beam_inference.segmentation.table import count_of
from beam_inference.segmentation.work import Labelling
from beam_inference.stores import delete_folder, open_kvstore
from beam_inference.task_runner import begin, print_task_outcome, run_tasks, task_job

Work = TypeVar("Work", bound=Labelling)


def make_labels(
    kind: str,
    work: Work,
    description: dict[str, Any],
    stages: Callable[[Work], tuple[Stage, ...]],
    flags: Sequence[str],
    again: str,
    *,
    overwrite: bool,
    pyramid: bool,
) -> int:
    """Make what was planned, or what is missing of it, and say what it came to; returns the exit code.

    ``kind`` is what the job is called, ``flags`` are Beam's, ``again`` is the command that goes on. The scratch folder
    is in the output's state folder, but not among the records of what is done, which are listed. ``pyramid`` is whether
    coarser levels are made of it as well.

    Raises:
        UserError: it cannot be done as asked.
    """
    if pyramid and work.output.format not in ("precomputed", "ome_zarr"):
        raise ConfigError(f"--pyramid: {work.output.format} holds one scale; precomputed and ome_zarr hold several")
    job = task_job(kind, description, work.output.url, work.storage, ())
    scratch = f"{job.state_url}/{kind}_scratch"
    work = replace(work, scratch_url=f"{scratch}/{job.fingerprint[:16]}")
    job = replace(job, tasks=stages(work))
    begin(job, overwrite=overwrite)
    if overwrite:
        for url in (scratch, work.table_url):
            delete_folder(open_kvstore(url, work.storage), url)
    create_output(work.output)
    grid = work.grid
    print(f"{grid.count} chunks, {memory_gib(work):.2g} GiB for each that is under way{work.more_memory}", flush=True)
    outcome = run_tasks(job, flags, grid.roi.size / sum(task.count for task in job.tasks))
    done = outcome.exit_code == COMPLETE
    made = f"{count_of(work)} {work.table_folder} in {work.output.url}, listed in {work.table_url}" if done else ""
    print_task_outcome(outcome, made, again)
    return _coarser(work, flags, again, overwrite=overwrite) if done and pyramid else outcome.exit_code


def _coarser(work: Labelling, flags: Sequence[str], again: str, *, overwrite: bool) -> int:
    planned = plan_pyramid(multiscale_volume(work.output.url, work.storage), "mode")
    outcome = make_pyramid(planned, flags, overwrite=overwrite)
    print_task_outcome(outcome, f"{len(planned.levels)} coarser levels", again)
    return outcome.exit_code
