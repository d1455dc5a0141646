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
from beam_inference.cli.job_options import JobOptions, add_job, load_launched_job
from beam_inference.errors import COMPLETE

if TYPE_CHECKING:
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
    from beam_inference.job.tasks import list_tasks

    launched = load_launched_job(options, "nothing to list")
    listed = list_tasks(launched.job, launched.state)
    wanted = (task for task in listed if options.state in (None, task.state))
    with suppress(BrokenPipeError):  # whoever reads may have seen enough
        if options.csv:
            _print_csv(wanted)
        elif options.json:
            _print_json(wanted)
        else:
            for task in wanted:
                print(f"{task.chunk} {_box_text(task)} {task.state}")
        sys.stdout.flush()
    return COMPLETE


def _box_text(task: Task) -> str:
    """The box as ``z0:z1,y0:y1,x0:x1``."""
    return ",".join(f"{a}:{b}" for a, b in zip(task.box.start, task.box.stop, strict=True))


def _print_csv(tasks: Iterator[Task]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["chunk", "z0", "z1", "y0", "y1", "x0", "x1", "state"])
    for task in tasks:
        bounds = chain.from_iterable(zip(task.box.start, task.box.stop, strict=True))
        writer.writerow([task.chunk, *bounds, task.state])


def _print_json(tasks: Iterator[Task]) -> None:
    """Print a JSON array, one object a line, without holding all of them."""
    separator = "["
    for task in tasks:
        values = {
            "chunk": task.chunk,
            "start": task.box.start,
            "stop": task.box.stop,
            "state": task.state,
        }
        print(f"{separator}{json.dumps(values)}", end="")
        separator = ",\n"
    print("[]" if separator == "[" else "]")
