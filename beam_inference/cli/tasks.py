"""The command ``tasks``: the chunks of a job, each with its box and its state."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from beam_inference.cli.command import Subparsers, add_command, set_action
from beam_inference.cli.job_options import JobOptions, add_job
from beam_inference.errors import COMPLETE, StateError

if TYPE_CHECKING:
    from beam_inference.config.cohort import Cohort
    from beam_inference.config.job import JobConfig
    from beam_inference.job.tasks import Task

STATES = ("done", "quarantined", "summed", "missing")
"""The states of a chunk, as :data:`beam_inference.job.tasks.TaskState` has them."""


@dataclass(frozen=True)
class TasksOptions(JobOptions):
    """Options of ``tasks``."""

    state: str | None
    json: bool
    csv: bool


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers,
        "tasks",
        "list the chunks of a job: index, box and state",
        "job.yaml",
        "job.yaml --state missing --csv",
    )
    add_job(parser)
    parser.add_argument("--state", choices=STATES, help="list only the chunks in this state")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print a JSON array")
    how.add_argument("--csv", action="store_true", help="print CSV, with a header")
    set_action(parser, TasksOptions, tasks)


def tasks(options: TasksOptions) -> int:
    """Print the chunks of a job."""
    from beam_inference.config.cohort import Cohort

    jobs = options.load_all()
    wanted = (each for each in _list_all(jobs) if options.state in (None, each[1].state))
    with suppress(BrokenPipeError):  # whoever reads may have seen enough
        if options.csv:
            _print_csv(wanted, has_volumes=isinstance(jobs, Cohort))
        elif options.json:
            _print_json(wanted)
        else:
            for volume, task in wanted:
                name = "" if volume is None else f"{volume} "
                print(f"{name}{task.chunk} {_box_text(task)} {task.state}")
        sys.stdout.flush()
    return COMPLETE


def _list_all(jobs: JobConfig | Cohort) -> Iterator[tuple[str | None, Task]]:
    """The chunks of a job, each with the name of its volume where the job has several."""
    from beam_inference.config.cohort import Cohort
    from beam_inference.job.tasks import list_tasks
    from beam_inference.launch.launched_cohort import find_launched_volumes
    from beam_inference.launch.launched_job import find_launched_job

    if isinstance(jobs, Cohort):
        for each in find_launched_volumes(jobs, "nothing to list"):
            if each.trouble is not None:
                raise StateError(f"volume {each.name}: {each.trouble}")
            if each.job is not None:
                listed = list_tasks(each.job.job, each.job.state)
                yield from ((each.name, task) for task in listed)
        return
    launched = find_launched_job(jobs, "nothing to list")
    yield from ((None, task) for task in list_tasks(launched.job, launched.state))


def _box_text(task: Task) -> str:
    """The box as ``z0:z1,y0:y1,x0:x1``."""
    return ",".join(f"{a}:{b}" for a, b in zip(task.box.start, task.box.stop, strict=True))


def _print_csv(tasks: Iterator[tuple[str | None, Task]], *, has_volumes: bool) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    named = ["volume"] if has_volumes else []
    writer.writerow([*named, "chunk", "z0", "z1", "y0", "y1", "x0", "x1", "state"])
    for volume, task in tasks:
        bounds = chain.from_iterable(zip(task.box.start, task.box.stop, strict=True))
        name = [] if volume is None else [volume]
        writer.writerow([*name, task.chunk, *bounds, task.state])


def _print_json(tasks: Iterator[tuple[str | None, Task]]) -> None:
    """Print a JSON array, one object a line, without holding all of them."""
    separator = "["
    for volume, task in tasks:
        named = {} if volume is None else {"volume": volume}
        values = named | {
            "chunk": task.chunk,
            "start": task.box.start,
            "stop": task.box.stop,
            "state": task.state,
        }
        print(f"{separator}{json.dumps(values)}", end="")
        separator = ",\n"
    print("[]" if separator == "[" else "]")
