"""The words of the command line: what each command takes, and what its words mean.

Exit codes: 0 complete, 1 failed, 2 bad input, 3 finished with quarantined chunks within the bound,
    130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence

from beam_inference.beam.dataflow_gpus import add_gpu_flags
from beam_inference.cli import commands
from beam_inference.cli.argument_types import (
    EXIT_CODES,
    Subparsers,
    add_command,
    add_debug,
    add_logging,
    gib,
    port,
    positive,
    price,
    seed,
    share,
)
from beam_inference.cli.volume_arguments import add_volume_commands


def command_parser() -> argparse.ArgumentParser:
    """All commands, each with its flags; ``known.command`` is the function in ``commands``."""
    parser = argparse.ArgumentParser(
        prog="beam-inference",
        description="Run a trained 3-D ConvNet over a volume of any size.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(takes_beam_flags=False)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    plan = add_command(
        subparsers,
        "plan",
        "show what a job comes to; submits nothing",
        "job.yaml",
        "job.yaml --suggest --workers 16 --worker-memory 8 --write",
        "job.yaml --calibrate --workers 16 --worker-price 0.40",
    )
    _add_job(plan)
    plan.add_argument(
        "--suggest", action="store_true", help="the best chunk shape for each seam mode"
    )
    plan.add_argument(
        "--calibrate",
        action="store_true",
        help=(
            "time the network, the input and the store; foretell hours and money. With --suggest: "
            "count the memory that the network takes here"
        ),
    )
    plan.add_argument(
        "--prices", metavar="PRICES.YAML", help="for --calibrate, see templates/prices.yaml"
    )
    plan.add_argument(
        "--worker-price",
        type=float,
        metavar="P",
        help="of an hour of a worker, instead of the prices'",
    )
    plan.add_argument("--allow_pickle", action="store_true", help="as for run, with --calibrate")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument(
        "--workers",
        type=positive,
        default=1,
        metavar="N",
        help="worker processes, for --suggest and --calibrate",
    )
    plan.add_argument(
        "--worker-memory",
        type=gib,
        default=2.0,
        metavar="GIB",
        help="for the chunks of each (default: 2)",
    )
    plan.add_argument(
        "--write", action="store_true", help="put the suggested chunk_shape into the job file"
    )
    plan.set_defaults(command=commands.plan)

    run = add_command(
        subparsers,
        "run",
        "run a job, or what is missing of it",
        "job.yaml",
        "job.yaml --sample 0.001",
        "job.yaml --chunks quarantine.jsonl",
        "gs://bucket/job.yaml --runner=DataflowRunner --project=… --region=… "
        "--sdk_container_image=…",
        description=(
            "Run a job, or what is missing of it. Any flag of Apache Beam may follow, such as "
            "--runner=…"
        ),
    )
    run.add_argument("job", metavar="JOB.YAML", help="the job file")
    _add_run_flags(run)
    run.add_argument("--json", action="store_true", help="print what the launch came to as JSON")
    run.set_defaults(command=commands.run, takes_beam_flags=True)

    _add_status(subparsers)

    verify = add_command(
        subparsers,
        "verify",
        "is a job complete? exit 0 only if it is",
        "job.yaml",
        "job.yaml --deep",
    )
    _add_job(verify)
    verify.add_argument(
        "--deep", action="store_true", help="read every chunk back and compare its checksum"
    )
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(command=commands.verify)

    mosaic = add_command(
        subparsers,
        "mosaic",
        "draw some finished chunks, input beside output, as a picture",
        "job.yaml --to mosaic.png --count 25",
    )
    _add_job(mosaic)
    mosaic.add_argument(
        "--to", default="mosaic.png", metavar="FILE.PNG", help="(default: mosaic.png)"
    )
    mosaic.add_argument(
        "--count", type=positive, default=16, metavar="N", help="chunks at most (default: 16)"
    )
    mosaic.set_defaults(command=commands.mosaic)

    _add_report(subparsers)
    _add_view(subparsers)

    clean = add_command(
        subparsers, "clean", "remove seam files that a complete job has left behind", "job.yaml"
    )
    _add_job(clean)
    clean.set_defaults(command=commands.clean)

    add_volume_commands(subparsers)

    demo = add_command(
        subparsers, "demo", "segment a brain MRI template, end to end", "demo-output"
    )
    demo.add_argument(
        "folder", nargs="?", default="demo-output", help="where to put it (default: demo-output)"
    )
    add_debug(demo)
    demo.set_defaults(command=commands.demo)

    schema = add_command(
        subparsers, "schema", "print the job file's JSON schema", "> job.schema.json"
    )
    schema.set_defaults(command=commands.schema)

    completion = add_command(
        subparsers,
        "completion",
        "print what makes a shell complete these words",
        "bash > ~/.local/share/bash-completion/completions/beam-inference",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(command=commands.completion, parser=parser)
    return parser


def _add_status(subparsers: Subparsers) -> None:
    status = add_command(
        subparsers,
        "status",
        "how far a job is, on any runner, seen from any machine",
        "job.yaml",
        "job.yaml --watch",
    )
    _add_job(status)
    how = status.add_mutually_exclusive_group()
    how.add_argument(
        "--watch",
        action="store_true",
        help="look again every few seconds, until nothing is missing",
    )
    how.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(command=commands.status)


def _add_view(subparsers: Subparsers) -> None:
    view = add_command(
        subparsers,
        "view",
        "look at a job and at volumes in Neuroglancer, in the browser; also while the job runs",
        "job.yaml",
        "job.yaml segments --no-open --port=9000",
        "gs://bucket/em gs://bucket/affinities",
    )
    view.add_argument(
        "things", nargs="+", metavar="JOB_OR_VOLUME", help="a job file, and volumes: paths or URLs"
    )
    view.add_argument(
        "--patches", action="store_true", help="show the patch lattice, too, around the middle"
    )
    view.add_argument(
        "--bind", default="127.0.0.1", metavar="ADDRESS", help="to serve at (default: 127.0.0.1)"
    )
    view.add_argument(
        "--port", type=port, default=0, metavar="N", help="to serve at (default: any that is free)"
    )
    view.add_argument("--no-open", action="store_true", help="start no browser")
    view.add_argument(
        "--link",
        action="store_true",
        help=(
            "serve nothing; print a link to the hosted viewer, or, of local volumes, "
            "Neuroglancer's state as JSON"
        ),
    )
    _add_overrides(view)
    add_logging(view)
    view.set_defaults(command=commands.view)


def _add_report(subparsers: Subparsers) -> None:
    report = add_command(
        subparsers,
        "report",
        "write a page about a job: result, seams, speed, quarantine, hours",
        "job.yaml --to report.html --worker-price 0.40",
        description=(
            "Write a page (HTML, one file) about a job that has run or runs: what it made, how it "
            "went."
        ),
    )
    _add_job(report)
    report.add_argument(
        "--to", default="report.html", metavar="FILE.HTML", help="(default: report.html)"
    )
    report.add_argument(
        "--worker-price",
        type=price,
        metavar="P",
        help="of an hour of a worker, to tell what it cost",
    )
    report.set_defaults(command=commands.report)


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB.YAML", help="the job file, a path or URL")
    _add_overrides(parser)
    add_logging(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    """What changes between runs of a job file has a flag of its own; any other key is reached by --set."""
    group = parser.add_argument_group("instead of what the job file says")
    for name, (key, metavar, help) in _OVERRIDES.items():
        choices = ("true", "false") if metavar is None else None
        group.add_argument(f"--{name}", metavar=metavar, choices=choices, help=f"{help} ({key})")
    group.add_argument(
        "--roi",
        type=_roi,
        metavar="START:STOP",
        help="the box to produce, as 0x0x0:64x512x512, z y x",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.KEY=VALUE",
        help="any key of the job file; repeatable",
    )


_OVERRIDES = {
    "input": ("input.path", "URL", "the volume to read"),
    "output": ("output.path", "URL", "the volume to write"),
    "model": ("model.path", "URL", "the network"),
    "weights": ("model.weights", "URL", "the network's weights, where model is a factory"),
    "resume": ("job.resume", None, "skip chunks that have a receipt"),
    "max_failed_chunks": (
        "job.max_failed_chunks",
        "N",
        "with more quarantined chunks the job fails",
    ),
}


def _roi(text: str) -> str:
    corner = r"-?\d+x-?\d+x-?\d+"
    if not re.fullmatch(f"{corner}:{corner}", text):
        raise argparse.ArgumentTypeError(
            f"expected START:STOP such as 0x0x0:64x512x512, in z, y, x; found {text}"
        )
    return text


def overrides(known: argparse.Namespace) -> list[str]:
    """All overrides as --set takes them; what was given with --set comes last."""
    given = [
        f"{key}={json.dumps(value)}" if metavar == "URL" else f"{key}={value}"
        for name, (key, metavar, _) in _OVERRIDES.items()
        if (value := getattr(known, name)) is not None
    ]
    if known.roi is not None:
        start, _, stop = known.roi.partition(":")
        given += [f"roi.start={start}", f"roi.stop={stop}"]
    return [*given, *known.set]


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    _add_overrides(parser)
    parser.add_argument(
        "--chunks",
        metavar="FILE",
        help="do only the chunks of a quarantine file, or indices one a line",
    )
    parser.add_argument(
        "--sample",
        type=share,
        metavar="SHARE",
        help="do only such a share of the chunks, 0.001 say, as a pilot",
    )
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="of the sample; another one, other chunks",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="delete an earlier launch's state; do every chunk anew",
    )
    parser.add_argument(
        "--allow_pickle",
        action="store_true",
        help="load model files that can execute code they carry",
    )
    add_gpu_flags(parser)
    add_logging(parser)


def flags_parser() -> argparse.ArgumentParser:
    """The flags of :func:`run_with_flags`, without Beam's own."""
    parser = argparse.ArgumentParser(
        description="Run a beam-inference job.", epilog=EXIT_CODES, allow_abbrev=False
    )
    parser.add_argument(
        "--job", required=True, metavar="JOB.YAML", help="the job file, a path or URL"
    )
    _add_run_flags(parser)
    return parser


def as_given(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The words of a form that passes every field, as they would be typed: without empty flags, switches on or off."""
    switches = {
        option
        for action in parser._actions
        if action.nargs == 0
        for option in action.option_strings
    }
    given = []
    for word in words:
        name, separator, value = word.partition("=")
        if separator and name in switches:
            if value not in ("true", "false", ""):
                parser.error(f"{name} takes true or false; found {value}")
            given += [name] if value == "true" else []
        elif not (separator and not value and name in parser._option_string_actions):
            given.append(word)
    return given
