"""What the commands do, once their words are parsed: ``known.job`` is the job file, ``known.overrides`` change it."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from contextlib import nullcontext, redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from beam_inference.beam.dataflow_gpus import check_device, dataflow_flags, gpu_options
from beam_inference.errors import COMPLETE, FAILED, ConfigError, StateError

if TYPE_CHECKING:
    from beam_inference.config.job import JobConfig
    from beam_inference.job.resolved_job import ResolvedJob
    from beam_inference.job.state import State
    from beam_inference.launch.survey import Survey

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 5.0
_PICTURES = (".png", ".jpg", ".pdf", ".svg")

STRAGGLERS = 0.3
"""Standard deviation of a chunk's seconds over their mean, as ``plan --calibrate`` takes it."""


def plan(known: argparse.Namespace) -> int:
    """Tell what a job comes to."""
    from beam_inference.cli.plan_text import print_plan
    from beam_inference.launch.job_files import load_job
    from beam_inference.launch.output_pyramid import planned
    from beam_inference.launch.survey import survey

    if known.write and not known.suggest:
        raise ConfigError("--write puts what --suggest finds into the job file: give both")
    if (known.prices or known.worker_price is not None) and (known.suggest or not known.calibrate):
        raise ConfigError("prices say something only with --calibrate, without --suggest")
    found = survey(load_job(known.job, known.overrides))
    if known.suggest:
        return _suggested(found, known)
    if known.calibrate:
        return _calibrated(found, known)
    print_plan(found, planned(found), as_json=known.json)
    return COMPLETE


def _suggested(found: Survey, known: argparse.Namespace) -> int:
    from beam_inference.cli.plan_text import print_suggestions
    from beam_inference.job.place import THIS_PROCESS
    from beam_inference.launch.engine_trial import try_network_here
    from beam_inference.launch.job_files import set_chunk_shape
    from beam_inference.launch.survey import suggested

    if known.calibrate:  # what the network allocates is then counted
        found, _ = try_network_here(found, THIS_PROCESS, allow_pickle=known.allow_pickle)
    memory = round(known.worker_memory * 2**30)
    modes = found.job.config.seam_modes
    plans = {seams: suggested(found, seams, THIS_PROCESS, memory, known.workers) for seams in modes}
    print_suggestions(found, plans, memory, known.workers, as_json=known.json)
    if known.write:
        best = plans[found.job.plan.seams]
        if best is None:
            raise ConfigError(
                f"no chunk shape fits {known.worker_memory:g} GiB per worker; nothing was written"
            )
        set_chunk_shape(known.job, best.chunks.chunk_shape)
        told = f"{known.job}: inference.chunk_shape is now {list(best.chunks.chunk_shape)}"
        print(told, file=sys.stderr if known.json else sys.stdout)
    return COMPLETE


def _calibrated(found: Survey, known: argparse.Namespace) -> int:
    from beam_inference.cli.plan_text import print_estimates
    from beam_inference.job.place import THIS_PROCESS
    from beam_inference.launch.calibration import calibrate
    from beam_inference.launch.cost import Prices, estimates, totals
    from beam_inference.launch.engine_trial import try_network_here
    from beam_inference.launch.job_files import load_prices
    from beam_inference.launch.output_pyramid import planned, with_pyramid

    prices = Prices() if known.prices is None else load_prices(known.prices)
    if known.worker_price is not None:
        prices = prices.model_copy(update={"worker_hour": known.worker_price})
    found, predictor = try_network_here(found, THIS_PROCESS, allow_pickle=known.allow_pickle)
    pyramid = planned(found)
    measured = calibrate(found, predictor)
    whole = with_pyramid(totals(found), pyramid)
    expected = estimates(measured, whole, prices, known.workers, STRAGGLERS)
    print_estimates(found, pyramid, measured, whole, expected, as_json=known.json)
    return COMPLETE


def run(known: argparse.Namespace) -> int:
    """Run a job, or what is missing of it."""
    from beam_inference.cli.status_text import as_json, outcome_values, print_outcome
    from beam_inference.launch.job_files import load_job
    from beam_inference.launch.run_job import run_job

    if (
        "://" not in known.job
        and not Path(known.job).exists()
        and any(not flag.startswith("-") for flag in known.beam_flags)
    ):
        raise ConfigError(
            f"there is no job file {known.job}. Put the job file first, or write flags with =: "
            "--runner=DirectRunner"
        )
    config = load_job(known.job, known.overrides)
    gpu = gpu_options(known)
    flags = list(known.beam_flags)
    if gpu is not None:
        flags += dataflow_flags(gpu, flags)
        asked = f"--gpu={gpu.gpu} asks for: {' '.join(flags[len(known.beam_flags) :])}"
        if known.log_format == "json":
            logger.info(asked)
        else:
            print(asked, file=sys.stderr)
    check_device(config.inference.device, gpu, flags)
    # of what a network prints, too
    with redirect_stdout(sys.stderr) if known.json else nullcontext():
        outcome = run_job(
            config,
            flags,
            chunks_file=known.chunks,
            sample=None if known.sample is None else (known.sample, known.seed),
            overwrite=known.overwrite,
            allow_pickle=known.allow_pickle,
        )
    # who reads the summary may have gone; what the job came to is the same
    with suppress(BrokenPipeError):
        if known.json:
            print(as_json(outcome_values(outcome, config)))
        else:
            view = [
                "beam-inference",
                "view",
                known.job,
                *(f"--set={each}" for each in known.overrides),
            ]
            print_outcome(outcome, config, known.words, view)
        sys.stdout.flush()
    return outcome.exit_code


def _launched(known: argparse.Namespace, nothing: str) -> tuple[JobConfig, State, ResolvedJob]:
    """The job file as it is now, its state, and the job as it was launched; ``nothing`` is what it means if it was not.

    Raises:
        StateError: the state holds no job.
    """
    from beam_inference.job.state import State, default_state_url
    from beam_inference.launch.job_files import load_job

    config = load_job(known.job, known.overrides)
    state = State(default_state_url(config), config.storage)
    job = state.load_job()
    if job is None:
        raise StateError(
            f"{nothing}: {state.url} holds no job. Has it been run, and with this output.path?"
        )
    return config, state, job


def status(known: argparse.Namespace) -> int:
    """Tell how far a job is."""
    from beam_inference.cli.status_text import (
        as_json,
        print_pyramid_status,
        print_status,
        status_values,
    )
    from beam_inference.job.status import job_status
    from beam_inference.launch.output_pyramid import pyramid_of, status_of

    while True:
        start = time.monotonic()
        config, state, job = _launched(known, "nothing to tell")
        found = job_status(job, state, datetime.now(UTC))
        pyramid = pyramid_of(config)
        levels = status_of(pyramid) if pyramid else None
        if known.json:
            print(as_json(status_values(found, levels)))
        else:
            print_status(found)
            if levels:
                print_pyramid_status(levels, waits=found.done < found.planned)
        sys.stdout.flush()
        to_come = levels is not None and not levels.complete and not found.quarantined
        if not known.watch or not (found.missing or to_come):
            return COMPLETE
        time.sleep(max(_WATCH_SECONDS, 10 * (time.monotonic() - start)))


def verify(known: argparse.Namespace) -> int:
    """Tell whether a job is complete."""
    from rich.console import Console

    from beam_inference.cli.status_text import (
        as_json,
        print_pyramid_status,
        print_verification,
        verification_values,
    )
    from beam_inference.job.parts import output_spec
    from beam_inference.job.verification import verify as verified
    from beam_inference.launch.output_pyramid import pyramid_of, status_of
    from beam_inference.launch.resume import as_launched
    from beam_inference.volumes.outputs import open_output

    config, state, job = _launched(known, "nothing to verify")
    job = as_launched(config, job, state.url)
    output = open_output(output_spec(job)) if known.deep else None
    if known.deep and output is None:
        raise StateError(f"nothing to verify: the output {job.config.output.path} is gone")
    with Console(stderr=True).status("verifying") as status:
        report = verified(
            job, state, output, lambda done: status.update(f"verifying: {done:,} chunks looked at")
        )
    pyramid = pyramid_of(config)
    levels = status_of(pyramid) if pyramid else None
    values = verification_values(report, levels, deep=known.deep)
    with suppress(BrokenPipeError):  # as in run
        if known.json:
            print(as_json(values))
        else:
            print_verification(report, deep=known.deep)
            if levels:
                print_pyramid_status(levels, waits=report.receipts < report.chunks)
        sys.stdout.flush()
    return COMPLETE if values["complete"] else FAILED


def mosaic(known: argparse.Namespace) -> int:
    """Draw some finished chunks."""
    from beam_inference.geometry.sampling import spread
    from beam_inference.job.parts import open_input, output_spec
    from beam_inference.launch.resume import as_launched
    from beam_inference.report.mosaic import draw
    from beam_inference.volumes.outputs import open_output

    check_picture(known.to)
    config, state, job = _launched(known, "nothing to draw")
    job = as_launched(config, job, state.url)  # its output may have moved
    indices = list(state.of(job).receipt_indices(0, job.plan.chunks.count))
    if not indices:
        raise StateError(
            f"nothing to draw: {state.url} holds no receipt. Run the job, or a sample of it, first."
        )
    output = open_output(output_spec(job))
    if output is None:
        raise StateError(f"nothing to draw: the output {job.config.output.path} is gone")
    receipts = state.of(job).read_receipts(spread(indices, known.count))
    draw(job, receipts, open_input(job.config), output, Path(known.to))
    print(f"{known.to}: {len(receipts)} of {len(indices)} finished chunks")
    return COMPLETE


def check_picture(path: str) -> None:
    """Refuse a path that no picture can be written to, and a machine that cannot draw."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("a picture needs matplotlib: pip install 'beam-inference[demo]'")
    if not path.endswith(_PICTURES):
        raise ConfigError(f"--to {path}: write a name that ends with {', '.join(_PICTURES)}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--to {path}: there is no folder {Path(path).absolute().parent}")


def report(known: argparse.Namespace) -> int:
    """Write a page about a job."""
    from importlib.util import find_spec

    from beam_inference.launch.resume import as_launched

    absent = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"report needs {' and '.join(absent)}: pip install 'beam-inference[report]'"
        )
    path = Path(known.to)
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"--to {known.to}: write a name that ends with .html")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--to {known.to}: there is no folder {path.absolute().parent}")
    from beam_inference.report.facts import gather
    from beam_inference.report.page import make_report, render

    config, state, job = _launched(known, "nothing to report")
    job = as_launched(config, job, state.url)  # its output may have moved
    facts = gather(job, state)
    page = render(make_report(job, state, facts, datetime.now(UTC), known.worker_price))
    path.write_text(page, encoding="utf-8")
    print(f"{known.to}: {facts.done:,} of {facts.chunks:,} chunks done")
    return COMPLETE


def view(known: argparse.Namespace) -> int:
    """Look at a job and at volumes in Neuroglancer."""
    from beam_inference.view.command import look

    return look(
        known.things,
        known.overrides,
        patches=known.patches,
        bind=known.bind,
        port=known.port,
        browser=not known.no_open,
        link=known.link,
    )


def clean(known: argparse.Namespace) -> int:
    """Remove the seam files of a complete job: a worker that was thought dead may have written some late."""
    from beam_inference.worker.seam_files import SeamFiles

    config, state, job = _launched(known, "nothing to clean")
    count = job.plan.chunks.count
    left = count - state.of(job).count_receipts(0, count)
    if left:
        raise StateError(
            f"{left} of {count} chunks have no receipt, and may still need their seam files: run "
            "them first"
        )
    removed = SeamFiles(state.url, config.storage, job.fingerprint).forget_all()
    print(f"{removed} seam files removed")
    return COMPLETE


def demo(known: argparse.Namespace) -> int:
    """Segment a brain MRI template, with the commands that a user would give."""
    from beam_inference.demo import run_demo

    return run_demo(Path(known.folder), known.main)


def schema(_: argparse.Namespace) -> int:
    """Print the job file's JSON schema."""
    from beam_inference.config.job import JobConfig

    print(json.dumps(JobConfig.model_json_schema(), indent=2))
    return COMPLETE


def completion(known: argparse.Namespace) -> int:
    """Print what makes a shell complete the words of a command."""
    import shtab

    print(shtab.complete(known.parser, known.shell))
    return COMPLETE
