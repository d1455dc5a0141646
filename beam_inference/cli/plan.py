"""The command ``plan``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from beam_inference.cli.argument_types import gib, positive, price
from beam_inference.cli.command import PipelineOptions, Subparsers, add_command, set_action
from beam_inference.cli.job_options import JobOptions, TrustOptions, add_job, add_trust
from beam_inference.cli.run import check_job_comes_first
from beam_inference.errors import COMPLETE, ConfigError

if TYPE_CHECKING:
    from beam_inference.config.cohort import Cohort
    from beam_inference.config.job import JobConfig
    from beam_inference.config.steps import Steps
    from beam_inference.job.place import Place
    from beam_inference.launch.planned_job import PlannedJob

CHUNK_TIME_VARIATION = 0.3
"""Assumed standard deviation of the seconds per chunk over their mean, for ``--calibrate``."""


@dataclass(frozen=True)
class PlanOptions(JobOptions, PipelineOptions, TrustOptions):
    """Options of ``plan``."""

    suggest: bool
    calibrate: bool
    prices: str | None
    worker_price: float | None
    json: bool
    workers: int
    worker_memory: float
    write: bool


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers,
        "plan",
        "show the size and cost of a job; submits nothing",
        "job.yaml",
        "job.yaml --suggest --workers 16 --worker-memory 8 --write",
        "job.yaml --calibrate --workers 16 --worker-price 0.40",
        description=(
            "Show the size and cost of a job; submits nothing. Flags of Apache Beam may follow, as "
            "for run: they say where the workers are, which are not asked."
        ),
    )
    add_job(parser)
    parser.add_argument(
        "--suggest", action="store_true", help="find the best chunk shape for each strategy"
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help=(
            "time the network, the input and the store here, and estimate run time and cost. With "
            "--suggest: count the memory that the network takes here"
        ),
    )
    parser.add_argument(
        "--prices",
        metavar="PRICES.YAML",
        help="prices for --calibrate, a file such as templates/prices.yaml",
    )
    parser.add_argument(
        "--worker-price",
        type=price,
        metavar="P",
        help="price of one hour of one worker; overrides the one in --prices",
    )
    add_trust(parser, "; for --calibrate only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--workers",
        type=positive,
        default=1,
        metavar="N",
        help="number of worker processes, for --suggest and --calibrate (default: 1)",
    )
    parser.add_argument(
        "--worker-memory",
        type=gib,
        default=2.0,
        metavar="GIB",
        help="memory for the chunks of one worker process, for --suggest (default: 2)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the suggested chunk_shape into the job file; with --suggest",
    )
    set_action(parser, PlanOptions, plan, takes_beam_flags=True)


def plan(options: PlanOptions) -> int:
    """Print the size of a job, the best chunk shapes for it, or an estimate of time and cost."""
    from beam_inference.cli.plan_text import print_plan
    from beam_inference.config.cohort import Cohort
    from beam_inference.config.steps import Steps
    from beam_inference.launch.cost import job_totals
    from beam_inference.launch.output_pyramid import add_pyramids, plan_output_pyramids
    from beam_inference.launch.planned_job import plan_job, warn_if_inputs_unfinished
    from beam_inference.launch.stored_size import stored_size

    if options.write and not options.suggest:
        raise ConfigError("--write writes what --suggest finds into the job file: give both")
    has_prices = options.prices is not None or options.worker_price is not None
    if has_prices and (options.suggest or not options.calibrate):
        raise ConfigError("prices are used only with --calibrate, without --suggest")
    check_job_comes_first(options.job, options.beam_flags)
    config = options.load_chosen()
    if isinstance(config, Steps):
        return _plan_steps(config, options)
    if isinstance(config, Cohort):
        return _plan_volumes(config, options)
    place = _find_place(config, options)
    job = plan_job(config, place)
    warn_if_inputs_unfinished(config)
    if options.suggest:
        return _suggest(job, options)
    if options.calibrate:
        return _calibrate(job, options)
    pyramids = plan_output_pyramids(job)
    stored = stored_size(job, add_pyramids(job_totals(job), pyramids.values()), pyramids)
    undecided = [] if place.is_this_machine else _list_undecided(config)
    print_plan(job, pyramids, stored, place, undecided, as_json=options.json)
    return COMPLETE


def _find_place(config: JobConfig, options: PlanOptions) -> Place:
    """Where the workers would run, by the flags of Beam; no runner is asked.

    Raises:
        ConfigError: a flag or a path is wrong.
    """
    from beam_inference.job.place import THIS_PROCESS

    if not options.beam_flags:
        return THIS_PROCESS
    from beam_inference.beam.flags import beam_options, place_of
    from beam_inference.launch.checks import check_paths

    if options.suggest or options.calibrate:
        raise ConfigError(
            "--suggest and --calibrate count for this machine, so no flags of Apache Beam can be "
            f"given with them: leave out {' '.join(options.beam_flags)}"
        )
    place = place_of(beam_options(options.beam_flags))
    check_paths(config, place)
    return place


def _list_undecided(config: JobConfig) -> list[str]:
    """The keys of ``inference`` that the first launch will have a worker decide."""
    from beam_inference.job.state import State, default_state_url
    from beam_inference.launch.decide import left_to_workers

    is_launched = State(default_state_url(config), config.storage).load_job() is not None
    return [] if is_launched else left_to_workers(config.inference)


def _plan_steps(steps: Steps, options: PlanOptions) -> int:
    from beam_inference.cli.steps import plan_steps

    if options.suggest or options.calibrate or options.beam_flags:
        raise ConfigError(
            "--suggest, --calibrate and flags of Apache Beam are for one job, and the job file has "
            "several steps: name one with --step"
        )
    return plan_steps(steps, options.step, as_json=options.json)


def _plan_volumes(cohort: Cohort, options: PlanOptions) -> int:
    from beam_inference.cli.cohort_text import cohort_plan_values, print_cohort_plan
    from beam_inference.cli.status_text import as_json
    from beam_inference.launch.planned_cohort import plan_cohort
    from beam_inference.launch.planned_job import warn_if_inputs_unfinished

    if options.suggest or options.calibrate or options.beam_flags:
        raise ConfigError(
            "--suggest, --calibrate and flags of Apache Beam are for one volume, and the job file "
            "has several: name one with --volume"
        )
    planned = plan_cohort(cohort)
    for config in cohort.volumes.values():
        warn_if_inputs_unfinished(config)
    if options.json:
        print(as_json(cohort_plan_values(planned)))
    else:
        print_cohort_plan(planned)
    return COMPLETE


def _suggest(job: PlannedJob, options: PlanOptions) -> int:
    from beam_inference.cli.plan_text import print_suggestions
    from beam_inference.geometry.plan import Strategy
    from beam_inference.job.place import THIS_PROCESS
    from beam_inference.launch.engine_trial import try_network_here
    from beam_inference.launch.job_files import set_chunk_shape
    from beam_inference.launch.planned_job import best_plan_for

    needs = job.default_needs
    if options.calibrate:
        needs = try_network_here(job, THIS_PROCESS, trust=options.trust).needs
    memory = round(options.worker_memory * 2**30)
    plans = {
        strategy: best_plan_for(job, strategy, THIS_PROCESS, memory, options.workers, needs)
        for strategy in get_args(Strategy)
    }
    print_suggestions(job, needs, plans, memory, options.workers, as_json=options.json)
    if options.write:
        best = plans[job.settings.strategy]
        if best is None:
            raise ConfigError(
                f"no chunk shape fits {options.worker_memory:g} GiB per worker; nothing was written"
            )
        set_chunk_shape(options.job, best.chunks.chunk_shape)
        print(
            f"{options.job}: inference.chunk_shape is now {list(best.chunks.chunk_shape)}",
            file=sys.stderr if options.json else sys.stdout,
        )
    return COMPLETE


def _calibrate(job: PlannedJob, options: PlanOptions) -> int:
    from beam_inference.cli.plan_text import print_estimates
    from beam_inference.job.place import THIS_PROCESS
    from beam_inference.launch.calibration import calibrate
    from beam_inference.launch.cost import Prices, estimates, job_totals
    from beam_inference.launch.engine_trial import try_network_here
    from beam_inference.launch.job_files import load_prices
    from beam_inference.launch.output_pyramid import add_pyramids, plan_output_pyramids
    from beam_inference.launch.stored_size import stored_size

    prices = Prices() if options.prices is None else load_prices(options.prices)
    if options.worker_price is not None:
        prices = prices.model_copy(update={"worker_hour": options.worker_price})
    trial = try_network_here(job, THIS_PROCESS, trust=options.trust)
    pyramids = plan_output_pyramids(job)
    measured = calibrate(job, trial)
    totals = job_totals(job, batch_size=trial.needs.batch_size)
    whole = add_pyramids(totals, pyramids.values())
    stored = stored_size(job, whole, pyramids)
    kept_bytes = None if stored is None else stored.stored_bytes
    expected = estimates(measured, whole, prices, options.workers, CHUNK_TIME_VARIATION, kept_bytes)
    print_estimates(job, pyramids, measured, whole, expected, stored, as_json=options.json)
    return COMPLETE
