"""The words of the command line: what each command takes, and what its words mean.

Exit codes: 0 complete, 1 failed, 2 bad input, 3 finished with quarantined chunks within the bound, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

from beam_inference import commands
from beam_inference.accelerators import add_gpu_flags

Number = TypeVar("Number", int, float)
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_EPILOG = """\
exit codes: 0 complete, 1 failed, 2 bad input, 3 finished with quarantined chunks within job.max_failed_chunks,
130 interrupted
"""

_VIEW_EPILOG = """\
examples:
  beam-inference view job.yaml
  beam-inference view job.yaml segments --no-open --port=9000
  beam-inference view gs://bucket/em gs://bucket/affinities
"""


def command_parser() -> argparse.ArgumentParser:
    """All commands, each with its flags; ``known.command`` is the function in ``commands``."""
    parser = argparse.ArgumentParser(
        prog="beam-inference",
        description="Run a trained 3-D ConvNet over a volume of any size.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(takes_beam_flags=False)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    plan = subparsers.add_parser("plan", help="show what a job comes to; submits nothing", allow_abbrev=False)
    _add_job(plan)
    plan.add_argument("--suggest", action="store_true", help="the best chunk shape for each seam mode")
    plan.add_argument(
        "--calibrate", action="store_true", help="time the network, the input and the store; foretell hours and money"
    )
    plan.add_argument("--prices", metavar="PRICES.YAML", help="for --calibrate, see templates/prices.yaml")
    plan.add_argument("--worker-price", type=float, metavar="P", help="of an hour of a worker, instead of the prices'")
    plan.add_argument("--allow_pickle", action="store_true", help="as for run, with --calibrate")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument(
        "--workers", type=_positive, default=1, metavar="N", help="worker processes, for --suggest and --calibrate"
    )
    plan.add_argument(
        "--worker-memory", type=_gib, default=2.0, metavar="GIB", help="for the chunks of each (default: 2)"
    )
    plan.add_argument("--write", action="store_true", help="put the suggested chunk_shape into the job file")
    plan.set_defaults(command=commands.plan)

    run = subparsers.add_parser(
        "run",
        help="run a job, or what is missing of it",
        description="Run a job, or what is missing of it. Any flag of Apache Beam may follow, such as --runner=…",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("job", metavar="JOB.YAML", help="the job file")
    _add_run_flags(run)
    run.set_defaults(command=commands.run, takes_beam_flags=True)

    status = subparsers.add_parser(
        "status", help="how far a job is, on any runner, seen from any machine", allow_abbrev=False
    )
    _add_job(status)
    status.add_argument("--watch", action="store_true", help="look again every few seconds, until nothing is missing")
    status.set_defaults(command=commands.status)

    verify = subparsers.add_parser("verify", help="is a job complete? exit 0 only if it is", allow_abbrev=False)
    _add_job(verify)
    verify.add_argument("--deep", action="store_true", help="read every chunk back and compare its checksum")
    verify.set_defaults(command=commands.verify)

    mosaic = subparsers.add_parser(
        "mosaic", help="draw some finished chunks, input beside output, as a picture", allow_abbrev=False
    )
    _add_job(mosaic)
    mosaic.add_argument("--to", default="mosaic.png", metavar="FILE.PNG", help="(default: mosaic.png)")
    mosaic.add_argument("--count", type=_positive, default=16, metavar="N", help="chunks at most (default: 16)")
    mosaic.set_defaults(command=commands.mosaic)

    _add_pyramid(subparsers.add_parser("pyramid", help="make coarser levels of a volume", allow_abbrev=False))
    _add_thumbnail(subparsers.add_parser("thumbnail", help="draw planes of a coarse level", allow_abbrev=False))
    _add_components(subparsers)
    _add_report(subparsers)
    _add_view(subparsers)

    clean = subparsers.add_parser(
        "clean", help="remove seam files that a complete job has left behind", allow_abbrev=False
    )
    _add_job(clean)
    clean.set_defaults(command=commands.clean)

    _add_levels(subparsers.add_parser("levels", help="count a volume's values, for a contrast", allow_abbrev=False))

    demo = subparsers.add_parser("demo", help="segment a brain MRI template, end to end", allow_abbrev=False)
    demo.add_argument("folder", nargs="?", default="demo-output", help="where to put it (default: demo-output)")
    _add_debug(demo)
    demo.set_defaults(command=commands.demo)

    schema = subparsers.add_parser("schema", help="print the job file's JSON schema", allow_abbrev=False)
    schema.set_defaults(command=commands.schema)
    return parser


def _add_pyramid(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make coarser levels of a volume, or what is missing of them. Any flag of Apache Beam may follow."
    )
    parser.epilog = (
        "examples: beam-inference pyramid gs://bucket/em --dry-run\n"
        "          beam-inference pyramid segmentation --method=mode --factor=1x2x2 --levels=3"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("volume", metavar="VOLUME", help="a precomputed volume or OME-Zarr group, a path or URL")
    parser.add_argument(
        "--method",
        choices=("mean", "mode"),
        help="mean for images and maps, mode for labels (default: mode if the volume says it is a segmentation)",
    )
    parser.add_argument(
        "--factor",
        type=_shape,
        metavar="ZxYxX",
        help="from level to level (default: until isotropic 1x2x2, say, then 2x2x2)",
    )
    parser.add_argument(
        "--levels", type=_positive, metavar="N", help="how many (default: until one block holds the volume)"
    )
    parser.add_argument(
        "--scale", type=_natural, default=0, metavar="N", help="made from this one (default: 0, the finest)"
    )
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="tell what would be made; write nothing")
    parser.add_argument("--overwrite", action="store_true", help="remove such levels, and make them anew")
    _add_logging(parser)
    parser.set_defaults(command=commands.pyramid, takes_beam_flags=True)


def _add_thumbnail(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example: beam-inference thumbnail gs://bucket/affinities --to affinities.png"
    parser.add_argument("volume", metavar="VOLUME", help="a volume, a path or URL")
    parser.add_argument("--to", default="thumbnail.png", metavar="FILE.PNG", help="(default: thumbnail.png)")
    parser.add_argument("--planes", type=_positive, default=16, metavar="N", help="at most (default: 16)")
    _add_logging(parser)
    parser.set_defaults(command=commands.thumbnail)


_COMPONENTS_EPILOG = """\
examples:
  beam-inference components boundaries objects --threshold 0.5 --min-size 100
  beam-inference components gs://bucket/labels gs://bucket/parts --multilabel --runner=DataflowRunner …
"""


def _add_components(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "components",
        help="connected components of a map or a segmentation, exact across chunks",
        description="Label the connected components of a volume, as if all of it were in memory. Any flag of Apache "
        "Beam may follow.",
        epilog=_COMPONENTS_EPILOG + "\n" + _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="IN", help="the volume to read, a path or URL")
    parser.add_argument("target", metavar="OUT", help="the segmentation to write, a path or URL")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--threshold", type=float, metavar="T", help="voxels of T or more, in stored units, are foreground"
    )
    what.add_argument(
        "--multilabel",
        action="store_true",
        help="IN is a segmentation: touching voxels of equal label are one; 0 is none",
    )
    parser.add_argument("--channel", type=_natural, metavar="C", help="of IN; needed where it has several")
    parser.add_argument("--scale", type=_natural, default=0, metavar="S", help="of a precomputed IN (default: 0)")
    parser.add_argument(
        "--connectivity",
        type=int,
        choices=(6, 18, 26),
        default=6,
        help="voxels touch by faces, edges, corners (default: 6)",
    )
    parser.add_argument(
        "--min-size",
        "--min_size",
        type=_positive,
        default=1,
        metavar="N",
        help="components of fewer voxels are removed",
    )
    parser.add_argument(
        "--format",
        choices=("precomputed", "zarr3", "zarr2", "ome_zarr", "n5"),
        default="precomputed",
        help="of OUT (default: precomputed, compressed as a segmentation)",
    )
    parser.add_argument(
        "--chunk_shape",
        "--chunk-shape",
        type=_shape,
        metavar="ZxYxX",
        help="done at once (default: some 256 on a side)",
    )
    parser.add_argument(
        "--block_shape", "--block-shape", type=_shape, metavar="ZxYxX", help="of OUT (default: as IN's)"
    )
    parser.add_argument(
        "--shard_shape",
        "--shard-shape",
        type=_shape,
        metavar="ZxYxX",
        help="of OUT: many blocks in a file (default: none)",
    )
    parser.add_argument("--overwrite", action="store_true", help="forget what was done for OUT; make everything anew")
    _add_logging(parser)
    parser.set_defaults(command=commands.components, takes_beam_flags=True)


def _shape(text: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8}){2}", text):
        raise argparse.ArgumentTypeError(f"expected z, y, x such as 64x512x512; found {text}")
    z, y, x = map(int, text.split("x"))
    return (z, y, x)


def _add_view(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    view = subparsers.add_parser(
        "view",
        help="look at a job and at volumes in Neuroglancer, in the browser; also while the job runs",
        epilog=_VIEW_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    view.add_argument("things", nargs="+", metavar="JOB_OR_VOLUME", help="a job file, and volumes: paths or URLs")
    view.add_argument("--patches", action="store_true", help="show the patch lattice, too, around the middle")
    view.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="to serve at (default: 127.0.0.1)")
    view.add_argument("--port", type=_port, default=0, metavar="N", help="to serve at (default: any that is free)")
    view.add_argument("--no-open", action="store_true", help="start no browser")
    view.add_argument(
        "--link",
        action="store_true",
        help="serve nothing; print a link to the hosted viewer, or, of local volumes, Neuroglancer's state as JSON",
    )
    _add_overrides(view)
    _add_logging(view)
    view.set_defaults(command=commands.view)


def _add_levels(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Count a volume's values, of the whole and of each section along z, and write their quantiles to a file, which "
        "model.normalize: {levels: FILE} of a job makes a contrast of. Any flag of Apache Beam may follow."
    )
    parser.epilog = "example: beam-inference levels gs://bucket/em --to levels.json"
    parser.add_argument("volume", metavar="VOLUME", help="a path or URL")
    parser.add_argument("--to", required=True, metavar="FILE.JSON", help="the file to write, a path or URL")
    parser.add_argument("--scale", type=int, default=0, metavar="N", help="of a multiscale volume (default: 0)")
    parser.add_argument("--channel", type=int, action="append", metavar="C", help="only this one; repeatable")
    _add_logging(parser)
    parser.set_defaults(command=commands.levels, takes_beam_flags=True)


def _add_report(subparsers: Subparsers) -> None:
    report = subparsers.add_parser(
        "report",
        help="write a page about a job: result, seams, speed, quarantine, hours",
        description="Write a page (HTML, one file) about a job that has run or runs: what it made, how it went.",
        epilog="beam-inference report job.yaml --to report.html --worker-price 0.40",
        allow_abbrev=False,
    )
    _add_job(report)
    report.add_argument("--to", default="report.html", metavar="FILE.HTML", help="(default: report.html)")
    report.add_argument("--worker-price", type=_price, metavar="P", help="of an hour of a worker, to tell what it cost")
    report.set_defaults(command=commands.report)


def _number(parse: Callable[[str], Number], fits: Callable[[Number], bool], what: str) -> Callable[[str], Number]:
    """The type of an option that takes a number of which ``fits`` holds."""

    def parsed(text: str) -> Number:
        with suppress(ValueError):
            if fits(number := parse(text)):
                return number
        raise argparse.ArgumentTypeError(f"{text} is not {what}")

    return parsed


_positive = _number(int, lambda number: number >= 1, "a whole number above 0")
_natural = _number(int, lambda number: number >= 0, "a whole number from 0 on")
_gib = _number(float, lambda number: 0 < number < float("inf"), "a number of GiB")
_price = _number(float, lambda number: 0 <= number < float("inf"), "a price")
_seed = _number(int, lambda number: 0 <= number < 2**64, "a whole number from 0 to 2^64 - 1")
_port = _number(int, lambda number: 0 <= number < 2**16, "a port, 0 to 65535")
_share = _number(float, lambda share: 0 < share <= 1, "a share above 0 and at most 1")


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB.YAML", help="the job file, a path or URL")
    _add_overrides(parser)
    _add_logging(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    """What changes between runs of a job file has a flag of its own; any other key is reached by --set."""
    group = parser.add_argument_group("instead of what the job file says")
    for name, (key, metavar, help) in _OVERRIDES.items():
        choices = ("true", "false") if metavar is None else None
        group.add_argument(f"--{name}", metavar=metavar, choices=choices, help=f"{help} ({key})")
    group.add_argument("--roi", type=_roi, metavar="START:STOP", help="the box to produce, as 0x0x0:64x512x512, z y x")
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY.KEY=VALUE", help="any key of the job file; repeatable"
    )


_OVERRIDES = {
    "input": ("input.path", "URL", "the volume to read"),
    "output": ("output.path", "URL", "the volume to write"),
    "model": ("model.path", "URL", "the network"),
    "weights": ("model.weights", "URL", "the network's weights, where model is a factory"),
    "resume": ("job.resume", None, "skip chunks that have a receipt"),
    "max_failed_chunks": ("job.max_failed_chunks", "N", "with more quarantined chunks the job fails"),
}


def _roi(text: str) -> str:
    corner = r"-?\d+x-?\d+x-?\d+"
    if not re.fullmatch(f"{corner}:{corner}", text):
        raise argparse.ArgumentTypeError(f"expected START:STOP such as 0x0x0:64x512x512, in z, y, x; found {text}")
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
        "--chunks", metavar="FILE", help="do only the chunks of a quarantine file, or indices one a line"
    )
    parser.add_argument(
        "--sample", type=_share, metavar="SHARE", help="do only such a share of the chunks, 0.001 say, as a pilot"
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the sample; another one, other chunks")
    parser.add_argument(
        "--overwrite", action="store_true", help="delete an earlier launch's state; do every chunk anew"
    )
    parser.add_argument("--allow_pickle", action="store_true", help="load model files that can execute code they carry")
    add_gpu_flags(parser)
    _add_logging(parser)


def _add_logging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log_format",
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="how to log: lines for people, or JSON, an object a line",
    )
    _add_debug(parser)


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show all log messages, Beam's too, and stack traces")


def flags_parser() -> argparse.ArgumentParser:
    """The flags of :func:`run_with_flags`, without Beam's own."""
    parser = argparse.ArgumentParser(description="Run a beam-inference job.", epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("--job", required=True, metavar="JOB.YAML", help="the job file, a path or URL")
    _add_run_flags(parser)
    return parser


def as_given(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The words of a form that passes every field, as they would be typed: without empty flags, switches on or off."""
    switches = {option for action in parser._actions if action.nargs == 0 for option in action.option_strings}
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
