"""The commands that show results: ``view``, ``report``, ``mosaic`` and ``thumbnail``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from beam_inference.cli.argument_types import port, positive, price
from beam_inference.cli.command import Options, Subparsers, add_command, add_logging, set_action
from beam_inference.cli.job_options import (
    JobOptions,
    OverrideOptions,
    add_job,
    add_overrides,
    load_launched_job,
)
from beam_inference.cli.written_files import check_folder, check_page, replace_file
from beam_inference.errors import COMPLETE, ConfigError, StateError

if TYPE_CHECKING:
    from beam_inference.config.cohort import Cohort

PICTURE_SUFFIXES = (".png", ".jpg", ".pdf", ".svg")


def add(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_view(subparsers)
    _add_report(subparsers)
    _add_mosaic(subparsers)
    _add_thumbnail(subparsers)


@dataclass(frozen=True)
class ViewOptions(OverrideOptions):
    """Options of ``view``."""

    things: Sequence[str]
    patches: bool
    bind: str
    port: int
    no_open: bool
    link: bool


def _add_view(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "view",
        "show a job and volumes in Neuroglancer, in the browser; also while the job runs",
        "job.yaml",
        "job.yaml segments --no-open --port=9000",
        "gs://bucket/em gs://bucket/affinities",
    )
    parser.add_argument(
        "things", nargs="+", metavar="JOB_OR_VOLUME", help="a job file, and volumes: paths or URLs"
    )
    parser.add_argument(
        "--patches", action="store_true", help="also show the patch lattice, around the middle"
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to serve at (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--port", type=port, default=0, metavar="N", help="port to serve at (default: a free one)"
    )
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument(
        "--link",
        action="store_true",
        help=(
            "do not serve; print a link to the hosted viewer or, for local volumes, "
            "Neuroglancer's state as JSON"
        ),
    )
    add_overrides(parser)
    add_logging(parser)
    set_action(parser, ViewOptions, view)


def view(options: ViewOptions) -> int:
    """Show a job and volumes in Neuroglancer."""
    from beam_inference.view.command import look

    return look(
        options.things,
        options.overrides,
        volume=options.volume,
        step=options.step,
        patches=options.patches,
        bind=options.bind,
        port=options.port,
        browser=not options.no_open,
        link=options.link,
    )


@dataclass(frozen=True)
class ReportOptions(JobOptions):
    """Options of ``report``."""

    to: str
    worker_price: float | None


def _add_report(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "report",
        "write a page about a job: result, seams, speed, quarantine, hours",
        "job.yaml --to report.html --worker-price 0.40",
        description=(
            "Write a page (one HTML file) about a job that has run or is running: its result and "
            "how the run went. Of a job of several volumes: how far each of them is."
        ),
    )
    add_job(parser)
    parser.add_argument(
        "--to",
        default="report.html",
        metavar="FILE.HTML",
        help="file to write (default: report.html)",
    )
    parser.add_argument(
        "--worker-price",
        type=price,
        metavar="P",
        help="price of one hour of one worker, to show what the job cost",
    )
    set_action(parser, ReportOptions, report)


def report(options: ReportOptions) -> int:
    """Write a page about a job."""
    absent = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"report needs {' and '.join(absent)}: pip install 'beam-inference[report]'"
        )
    check_page("--to", options.to)
    from beam_inference.config.cohort import Cohort

    jobs = options.load_chosen()
    if isinstance(jobs, Cohort):
        return _report_volumes(jobs, options)
    from beam_inference.report.facts import gather_facts
    from beam_inference.report.page import make_report, render

    launched = load_launched_job(options, "nothing to report")
    job = launched.relocated_job
    facts = gather_facts(job, launched.state)
    page = make_report(job, launched.state, facts, datetime.now(UTC), options.worker_price)
    with replace_file(options.to) as file:
        file.write_text(render(page), encoding="utf-8")
    print(f"{options.to}: {facts.done:,} of {facts.chunks:,} chunks done")
    return COMPLETE


def _report_volumes(cohort: Cohort, options: ReportOptions) -> int:
    """Write a page about a job of several volumes."""
    from beam_inference.launch.launched_cohort import find_launched_volumes
    from beam_inference.report.volumes_page import describe_volume, render_volumes

    when = datetime.now(UTC)
    volumes = find_launched_volumes(cohort, "nothing to report")
    rows = [describe_volume(volume, when) for volume in volumes]
    name = Path(options.job).stem
    page = render_volumes(name, rows, when, options.worker_price)
    with replace_file(options.to) as file:
        file.write_text(page, encoding="utf-8")
    complete = sum(row.verdict[0] == "good" for row in rows)
    print(f"{options.to}: {complete:,} of {len(rows):,} volumes complete")
    return COMPLETE


@dataclass(frozen=True)
class MosaicOptions(JobOptions):
    """Options of ``mosaic``."""

    to: str
    count: int


def _add_mosaic(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "mosaic",
        "draw a sample of the finished chunks, input beside output",
        "job.yaml --to mosaic.png --count 25",
    )
    add_job(parser)
    parser.add_argument(
        "--to",
        default="mosaic.png",
        metavar="FILE.PNG",
        help="picture to write (default: mosaic.png)",
    )
    parser.add_argument(
        "--count", type=positive, default=16, metavar="N", help="most chunks drawn (default: 16)"
    )
    set_action(parser, MosaicOptions, mosaic)


def mosaic(options: MosaicOptions) -> int:
    """Draw a sample of the finished chunks."""
    from beam_inference.geometry.sampling import spread
    from beam_inference.job.parts import open_input_under_output
    from beam_inference.report.mosaic import draw

    check_picture(options.to)
    launched = load_launched_job(options, "nothing to draw")
    job = launched.relocated_job
    state = launched.state.of(job)
    indices = list(state.receipt_indices(0, job.plan.chunks.count))
    if not indices:
        raise StateError(
            f"nothing to draw: {state.url} holds no receipt. Run the job, or a sample of it, first."
        )
    output = launched.open_output("nothing to draw")
    receipts = state.read_receipts(spread(indices, options.count))
    with replace_file(options.to) as picture:
        draw(job, receipts, open_input_under_output(job), output, picture)
    print(f"{options.to}: {len(receipts)} of {len(indices)} finished chunks")
    return COMPLETE


@dataclass(frozen=True)
class ThumbnailOptions(Options):
    """Options of ``thumbnail``."""

    volume: str
    to: str
    planes: int


def _add_thumbnail(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "thumbnail",
        "draw planes of a coarse scale of a volume",
        "gs://bucket/affinities --to affinities.png",
    )
    parser.add_argument("volume", metavar="VOLUME", help="a volume, a path or URL")
    parser.add_argument(
        "--to",
        default="thumbnail.png",
        metavar="FILE.PNG",
        help="picture to write (default: thumbnail.png)",
    )
    parser.add_argument(
        "--planes", type=positive, default=16, metavar="N", help="most planes drawn (default: 16)"
    )
    add_logging(parser)
    set_action(parser, ThumbnailOptions, thumbnail)


def thumbnail(options: ThumbnailOptions) -> int:
    """Draw planes of a coarse scale of a volume."""
    from beam_inference.job.unfinished import warn_if_unfinished
    from beam_inference.pyramid.thumbnail import draw_thumbnail
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment, url_of

    check_picture(options.to)
    storage = storage_of_environment(LOCAL)
    url = url_of(options.volume)
    warn_if_unfinished(url, storage)
    with replace_file(options.to) as picture:
        told = draw_thumbnail(url, storage, picture, options.planes)
    print(f"{options.to}: {told}")
    return COMPLETE


def check_picture(path: str) -> None:
    """Refuse a path that no picture can be written to, and a machine that cannot draw.

    Raises:
        ConfigError: Matplotlib is absent, or the name or the folder of the file is wrong.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a picture needs matplotlib: pip install 'beam-inference[demo]'")
    if not path.endswith(PICTURE_SUFFIXES):
        raise ConfigError(f"--to {path}: write a name that ends with {', '.join(PICTURE_SUFFIXES)}")
    check_folder("--to", path)
