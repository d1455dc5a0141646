"""The page: one HTML file with its style and figures; it fetches nothing and runs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from beam_inference.config.fields import Json
from beam_inference.errors import BeamInferenceError, UserError
from beam_inference.geometry.bounding_box import AXES
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.parts import open_input_under_output, output_spec
from beam_inference.job.records import ChannelStatistics
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.launch.output_pyramid import (
    PyramidStatus,
    describe_pyramid_status,
    output_pyramid,
    pyramid_status,
)
from beam_inference.report.canvas import WIDTH
from beam_inference.report.chunk_map import ChunkMap
from beam_inference.report.facts import JobFacts
from beam_inference.report.measures import (
    StageTime,
    Timeline,
    channel_statistics,
    retries,
    stage_times,
    timeline,
    worker_hours,
)
from beam_inference.report.overlay import PALETTE, channels_to_colour, colour_ranges
from beam_inference.report.seam_profile import SeamProfile, seam_profiles
from beam_inference.report.slices import (
    Plane,
    centre_of,
    histograms,
    missing_share,
    place_to_show,
    read_planes,
)
from beam_inference.report.time_figures import draw_stages, draw_timeline, time_text
from beam_inference.report.volume_figures import (
    draw_histograms,
    draw_maps,
    draw_planes,
    draw_seams,
)
from beam_inference.volumes.outputs import open_output

Value = TypeVar("Value")

CHANNELS_LISTED = 64
LAUNCHES_LISTED = 12
RECORDS_LISTED = 12
_LATELY = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Report:
    """All that the page says, as values.

    Attributes:
        job: as it was launched. facts: what its state folder says. when: the page was made.
        place: that the planes go through. planes: of the volume. profiles: of its seams, by axis.
        statistics: of each channel, over the receipts that were read. stages: seconds, likewise.
            retries: likewise.
        in_smaller_batches: chunks, likewise, that were computed with fewer patches per call than
            the job says.
        speed: over time. worker_hours: so far. worker_price: of one of them, or None.
        pyramid: how far the output's is; None if the job has none to make.
        absent: what could not be opened, and why.
    """

    job: ResolvedJob
    facts: JobFacts
    when: datetime
    place: Zyx
    planes: list[Plane]
    profiles: list[SeamProfile]
    statistics: list[ChannelStatistics]
    stages: list[StageTime]
    retries: int
    in_smaller_batches: int
    speed: Timeline | None
    worker_hours: float
    worker_price: float | None
    pyramid: PyramidStatus | None
    absent: list[str]


def make_report(
    job: ResolvedJob,
    state: State,
    facts: JobFacts,
    when: datetime,
    worker_price: float | None = None,
) -> Report:
    """Read a few cut-outs, and compute what the page says. Input and output may be gone.

    Raises:
        WorkerFault: the state folder cannot be read.
    """
    absent: list[str] = []
    grid = job.plan.chunks
    state = state.of(job)
    source = _open_or_note(lambda: open_input_under_output(job), "input", absent)
    output = _open_or_note(lambda: open_output(output_spec(job)), "output", absent)
    pyramid = (
        None
        if output is None
        else _open_or_note(lambda: output_pyramid(job.config), "pyramid", absent, may_lack=True)
    )
    status = (
        None
        if pyramid is None
        else _open_or_note(lambda: pyramid_status(pyramid), "pyramid", absent)
    )
    finished = {"finished": (facts.receipts, facts.done)} if facts.receipts else {}
    if facts.sums:
        finished = {"patches computed": (facts.sums, facts.summed)} | finished
    place = place_to_show(grid, facts.receipts)
    return Report(
        job=job,
        facts=facts,
        when=when,
        place=place,
        planes=read_planes(job, state, place, source, output),
        profiles=[] if output is None else seam_profiles(grid, facts.receipts, state, output),
        statistics=channel_statistics(facts.receipts),
        stages=stage_times(facts.receipts),
        retries=sum(map(retries, facts.receipts)),
        in_smaller_batches=sum(
            receipt.batch_size < job.config.inference.patches_per_call for receipt in facts.receipts
        ),
        speed=timeline(finished, grid),
        worker_hours=worker_hours([*facts.receipts, *facts.sums], facts.done + facts.summed),
        worker_price=worker_price,
        pyramid=status,
        absent=absent,
    )


def _open_or_note(
    opening: Callable[[], Value | None], name: str, absent: list[str], *, may_lack: bool = False
) -> Value | None:
    try:
        value = opening()
    except UserError as error:
        absent.append(f"The {name} cannot be opened: {error}")
        return None
    except BeamInferenceError as error:
        absent.append(f"The {name} cannot be read: {error}")
        return None
    if value is None and not may_lack:
        absent.append(f"The {name} is gone.")
    return value


def render(report: Report) -> str:
    """Render the page as HTML; what comes from outside (paths, causes) is escaped."""
    return render_template("page.html", _values(report))


def render_template(name: str, values: Json) -> str:
    """Render one of this package's pages as HTML; all values are escaped."""
    environment = Environment(
        loader=PackageLoader("beam_inference.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "by": _sizes_text,
        "number": _number,
        "moment": _moment,
        "lengths": _lengths,
        "short": _short,
    }
    return environment.get_template(name).render(content_width=round(96 * WIDTH), **values)


def _values(report: Report) -> Json:
    """The values that the template names."""
    job = report.job
    facts = report.facts
    grid = report.job.plan.chunks
    hours = report.worker_hours
    return {
        "report": report,
        "facts": facts,
        "job": job,
        "plan": job.plan,
        "config": job.config,
        "name": job.config.output.path.rstrip("/").rpartition("/")[2],
        "input_path": job.config.input.path or job.config.input.spec,
        "job_file": yaml.safe_dump(
            job.config.model_dump(mode="json", exclude_defaults=True), sort_keys=False
        ),
        "verdict": judge(facts, report.when),
        "pyramid": (
            report.pyramid
            and describe_pyramid_status(report.pyramid, waits=facts.done < facts.chunks)
        ),
        "percent": percents(facts.done, len(facts.quarantined), facts.chunks),
        "voxels_done": job.plan.chunks.roi.size * facts.done / facts.chunks,
        "duration": _duration(report.speed),
        "work": time_text(3600 * hours),
        "money": money_of(hours, report.worker_price),
        "voxels_read": sum(grid.core_box(receipt.chunk).size for receipt in facts.receipts),
        "along": AXES[ChunkMap(grid).axis],
        "seams_at": [AXES[profile.axis] for profile in report.profiles if profile.stands_out],
        "places": sum(profile.cutouts for profile in report.profiles),
        "figures": {name: Markup(svg) for name, svg in _figures(report).items()},
        "legend": _legend(report),
        "missing_input": missing_share(report.planes, "source"),
        "missing_output": missing_share(report.planes, "output"),
        "centred": report.place == centre_of(grid.roi),
        "strided": any(plane.steps != (1, 1) for plane in report.planes),
        "windowed": any(
            plane.box.shape[axis] < job.plan.chunks.roi.shape[axis]
            for plane in report.planes
            for axis in plane.axes
        ),
        "stages_quarantined": Counter(record.stage for record in facts.records),
        "channels_listed": CHANNELS_LISTED,
        "launches_listed": LAUNCHES_LISTED,
        "records_listed": RECORDS_LISTED,
    }


def _figures(report: Report) -> dict[str, str]:
    """The figures there is anything to draw of, by name."""
    job = report.job
    facts = report.facts
    grid = job.plan.chunks
    voxel = job.voxel_size_nm
    chunk_map = ChunkMap(grid)
    figures = {}
    if not all(
        np.isnan(plane.source).all() and np.isnan(plane.output).all() for plane in report.planes
    ):
        coloured = _channels_to_colour(report)
        ranges = colour_ranges(job.config, report.planes)
        figures["planes"] = draw_planes(
            report.planes, grid, coloured, [ranges[c] for c in coloured], voxel
        )
    if shown := histograms(report.planes):
        figures["histograms"] = draw_histograms(shown)
    if report.profiles:
        figures["seams"] = draw_seams(report.profiles)
    if report.speed is not None:
        figures["timeline"] = draw_timeline(report.speed)
    if report.stages:
        figures["stages"] = draw_stages(report.stages)
    if facts.receipts or facts.quarantined:
        chunks = [receipt.chunk for receipt in facts.receipts]
        tried = [
            *((r.chunk, retries(r)) for r in facts.receipts),
            *((r.chunk, r.attempts - 1) for r in facts.records),
        ]
        figures["maps"] = draw_maps(
            chunk_map,
            facts.done_in_cells / chunk_map.totals(),
            chunk_map.means(chunks, [sum(receipt.seconds.values()) for receipt in facts.receipts]),
            chunk_map.maxima([chunk for chunk, _ in tried], [float(times) for _, times in tried]),
            chunk_map.counts(facts.quarantined),
            voxel,
        )
    return figures


def _channels_to_colour(report: Report) -> list[int]:
    return channels_to_colour(report.job.config, report.statistics, len(report.planes[0].output))


def _legend(report: Report) -> list[tuple[str, str]]:
    return [
        (PALETTE[place], f"channel {channel}")
        for place, channel in enumerate(_channels_to_colour(report))
    ]


def judge(facts: JobFacts, when: datetime) -> tuple[str, str, str]:
    """A class of the style, how the job stands in a word or two, and why that is said."""
    moments = [receipt.finished_at for receipt in [*facts.receipts, *facts.sums]]
    if facts.done == facts.chunks:
        return "good", "complete", "every chunk has a receipt"
    if not facts.missing:
        return (
            "bad",
            "finished, with quarantine",
            f"{len(facts.quarantined):,} chunks could not be done",
        )
    if any(abs(when - moment) < _LATELY for moment in moments):
        return (
            "busy",
            "not complete",
            f"{facts.missing:,} chunks missing; one was finished in the last five minutes",
        )
    return "busy", "not complete", f"{facts.missing:,} chunks missing"


def percents(done: int, quarantined: int, count: int) -> dict[str, float]:
    """Shares of some chunks that are done, quarantined and missing, in percent."""
    missing = count - done - quarantined
    return {
        "done": 100 * done / max(1, count),
        "quarantined": 100 * quarantined / max(1, count),
        "missing": 100 * missing / max(1, count),
    }


def _duration(speed: Timeline | None) -> str:
    return "–" if speed is None else time_text(float(speed.edges[-1]))


def _sizes_text(shape: Sequence[float]) -> str:
    return " × ".join(f"{length:,.15g}" for length in shape)


def _lengths(nanometres: Sequence[float]) -> str:
    """Voxel sizes in the largest unit that all of them reach."""
    units = ((1e6, "mm"), (1e3, "µm"), (1.0, "nm"))
    unit, name = next(((u, n) for u, n in units if min(nanometres) >= u), (1.0, "nm"))
    return f"{_sizes_text([float(f'{length / unit:.6g}') for length in nanometres])} {name}"


def money_of(hours: float, price: float | None) -> str | None:
    """What hours of workers cost, as text; None if no price is known."""
    if price is None:
        return None
    amount = hours * price
    return f"{amount:,.2f}" if amount >= 1 or not amount else f"{amount:.2g}"


def _number(value: float) -> str:
    """Three digits, or all of a whole number; large ones with the power of ten that people use."""
    for power, word in ((1e12, "× 10¹²"), (1e9, "× 10⁹"), (1e6, "million")):
        if abs(value) >= power:
            return f"{value / power:.3g} {word}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _short(value: float) -> str:
    """Three digits and a letter."""
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= power:
            return f"{value / power:.3g} {letter}"
    return f"{value:,.0f}"


def _moment(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
