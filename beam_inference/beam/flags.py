"""Beam's command-line flags: which are known, which runner they mean, and where its workers are."""

from __future__ import annotations

import argparse
import copy
import difflib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from apache_beam.options.pipeline_options import (
    DebugOptions,
    DirectOptions,
    GoogleCloudOptions,
    PipelineOptions,
    PortableOptions,
    SetupOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.runners.runner import create_runner

from beam_inference.beam.dataflow_gpus import is_dataflow, runner_name, runner_of_flags
from beam_inference.beam.job_service import list_engine_options
from beam_inference.beam.portable_engines import (
    check_pool_is_named,
    is_portable,
    parallelism_of,
    portable_place,
)
from beam_inference.errors import BeamInferenceError, ConfigError
from beam_inference.job.place import Place

if TYPE_CHECKING:
    from distributed import Client, Scheduler

logger = logging.getLogger(__name__)

_LOCAL = ("fnapirunner", "bundlebaseddirectrunner")
_LOCAL_FLAGS = ("--direct_running_mode=multi_threading", "--direct_num_workers=2")
_SCHEDULER_SECONDS = 10
_FIRST_WORKER_SECONDS = 60
LONGEST_WORKER_TTL_SECONDS = 300.0
"""Dask's own default: a cluster that takes longer to notice a worker that hangs is told of."""
_OWN_FLAGS = (
    "--job",
    "--input",
    "--output",
    "--model",
    "--weights",
    "--roi",
    "--resume",
    "--max_failed_chunks",
    "--set",
    "--chunks",
    "--redo",
    "--overwrite",
    "--allow_pickle",
    "--trust_model",
    "--log_format",
    "--debug",
    "--gpu",
    "--gpu_count",
    "--gpu_driver",
    "--gpu_sharing",
)
"""Flags of ours, one of which may have been meant by an unknown one."""
_USED_BY_ALL = {"--job_name", "--labels", "--label", "--project", "--temp_location"}
"""Flags of Dataflow that other runners use, too, or that launchers pass in any case."""
_DASK = "apache_beam.runners.dask.dask_runner.DaskRunner"


def beam_options(flags: Sequence[str]) -> PipelineOptions:
    """Parse Beam's options from command-line flags.

    Without a runner, or with DirectRunner, the runner is Beam's local FnApiRunner.

    Raises:
        ConfigError: a flag is not one of Beam's, which Beam itself would only log; or the runner
            cannot be used.
    """
    if runner_of_flags(flags) == "daskrunner":
        _need_dask()  # before parsing: Dask's own flags are known once its runner is imported
    flags = _flags_of_beam(flags)
    options = PipelineOptions(list(flags))
    if options.view_as(DirectOptions).direct_num_workers < 0:
        raise ConfigError("--direct_num_workers must be 0 (as many as cores) or more")
    standard = options.view_as(StandardOptions)
    if standard.streaming:
        raise ConfigError(
            "--streaming: a job has an end, and is run as a batch. A streaming runner would try "
            "work that fails again for ever, where the job is to end with a message. Remove the "
            "flag."
        )
    runner = runner_name(standard.runner)
    if options.view_as(GoogleCloudOptions).template_location and not is_dataflow(runner):
        raise ConfigError(
            "--template_location stages a job for Dataflow, but the runner is "
            f"{standard.runner or 'the local one'}: add --runner=DataflowRunner, or remove it"
        )
    if runner in ("directrunner", "fnapirunner"):
        return _local_options(flags)
    if runner == "portablerunner" and not options.view_as(PortableOptions).job_endpoint:
        raise ConfigError(
            "--runner=PortableRunner needs --job_endpoint=host:port, where the job service listens"
        )
    if is_dataflow(runner):
        options = _with_image(flags)
    if runner == "daskrunner":
        standard.runner = _DASK  # Beam has no short name for it
    try:
        create_runner(str(standard.runner))
    except (ImportError, AttributeError, ValueError):
        raise ConfigError(
            f"--runner={standard.runner}: unknown runner, or what it needs is not installed"
        ) from None
    return options


def _flags_of_beam(flags: Sequence[str]) -> Sequence[str]:
    """Select the flags that Beam knows.

    Raises:
        ConfigError: Beam does not know one, or refuses its value.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_value_provider_argument = parser.add_argument  # type: ignore[attr-defined]  # as Beam's own parser has
    for kind in {cls.__name__: cls for cls in PipelineOptions.__subclasses__()}.values():
        kind._add_argparse_args(parser)  # type: ignore[arg-type]
    try:
        _, unknown = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}") from None
    if unknown:
        unknown = _flags_unknown_to_engine(flags, unknown)
    if not unknown:
        return flags
    if any(flag.startswith("--template_location") for flag in flags):
        # Dataflow's own launcher passes what this version of Beam need not know.
        logger.warning("flags that Apache Beam does not know: %s", " ".join(unknown))
        return [flag for flag in flags if flag not in unknown]
    name = unknown[0].split("=")[0]
    if name in _OWN_FLAGS:
        raise ConfigError(f"{name} is no flag of this command, though others have it; see --help")
    close = difflib.get_close_matches(name, [*parser._option_string_actions, *_OWN_FLAGS], n=1)
    hint = (
        f"did you mean {close[0]}?"
        if close
        else "see beam-inference run --help, and Beam's own options"
    )
    raise ConfigError(
        f"unknown flag {name}: neither one of beam-inference nor of Apache Beam; {hint}"
    )


def warn_of_unused_flags(flags: Sequence[str], options: PipelineOptions) -> None:
    """Tell of flags that the chosen runner does not use, such as a machine type on a laptop."""
    name = _name(options)
    unused = {
        DirectOptions: name not in _LOCAL,
        WorkerOptions: not is_dataflow(name),
        GoogleCloudOptions: not is_dataflow(name),
        PortableOptions: not is_portable(options) and not is_dataflow(name),
    }
    names: set[str] = set()
    for kind, is_unused in unused.items():
        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        parser.add_value_provider_argument = parser.add_argument  # type: ignore[attr-defined]  # as Beam's own parser has
        kind._add_argparse_args(parser)  # type: ignore[arg-type]
        if is_unused:
            names.update(parser._option_string_actions)
    given = [flag.split("=")[0] for flag in flags if flag.startswith("--")]
    idle = [flag for flag in given if flag in names - _USED_BY_ALL]
    if idle:
        logger.warning(
            "%s %s without effect: the runner %s does not use %s",
            ", ".join(idle),
            "is" if len(idle) == 1 else "are",
            options.view_as(StandardOptions).runner.rpartition(".")[2],
            "it" if len(idle) == 1 else "them",
        )


def _flags_unknown_to_engine(flags: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """Keep the flags that the job service of a portable runner does not take either."""
    options = PipelineOptions(list(flags))
    if not is_portable(options):
        return list(unknown)
    try:
        known = list_engine_options(options)
    except BeamInferenceError as error:
        logger.debug("the engine's own options cannot be asked: %s", error)
        return list(unknown)
    left = []
    is_taken = False
    for word in unknown:
        if word.startswith("--"):
            is_taken = word.split("=")[0].removeprefix("--") in known
        if not is_taken:
            left.append(word)
    return left


def _local_options(flags: Sequence[str]) -> PipelineOptions:
    """Options for FnApiRunner: DirectRunner is a switch that may download another runner."""
    names = {flag.split("=")[0] for flag in flags}
    has_mode = bool(names & {"--direct_running_mode", "--direct_num_workers"})
    options = PipelineOptions([*flags, *(() if has_mode else _LOCAL_FLAGS)])
    options.view_as(StandardOptions).runner = "FnApiRunner"
    return options


def check_options(options: PipelineOptions) -> None:
    """Check what Beam itself would check only as it submits, when output and state exist.

    Raises:
        ConfigError: a flag that the runner needs is missing, or has no such value. Buckets that
            are named are looked up.
    """
    if is_portable(options):
        check_pool_is_named(options)
    runner = create_runner(str(options.view_as(StandardOptions).runner))
    faults = PipelineOptionsValidator(options, runner).validate()
    if faults:
        raise ConfigError("\n".join(map(str, faults)))


def place_of(options: PipelineOptions) -> Place:
    """Where the workers of a runner are."""
    name = _name(options)
    if name in _LOCAL:
        direct = options.view_as(DirectOptions)
        workers = direct.direct_num_workers or os.cpu_count() or 1
        mode = direct.direct_running_mode if name == "fnapirunner" else "in_memory"
        return Place(
            processes_per_host=workers if mode == "multi_processing" else 1,
            threads_per_process=workers if mode == "multi_threading" else 1,
        )
    if name == "daskrunner" and _dask_scheduler(options) == (None, None):
        from distributed.deploy.utils import nprocesses_nthreads

        # what a cluster on this machine will be started with
        processes, threads = nprocesses_nthreads()
        return Place(processes_per_host=processes, threads_per_process=threads)
    if is_portable(options):
        return portable_place(options)
    place = Place(is_this_machine=False, shares_files=not is_dataflow(name))
    threads = options.view_as(DebugOptions).number_of_worker_harness_threads
    return place if threads is None else replace(place, threads_per_process=threads)


def workers_of(options: PipelineOptions) -> int:
    """Number of workers that will share the job, from the flags or from a Dask scheduler.

    Raises:
        ConfigError: the Dask cluster does not answer, or has no workers.
    """
    place = place_of(options)
    scale = options.view_as(WorkerOptions)
    if place.is_this_machine:
        return place.processes_per_host * place.threads_per_process
    if is_portable(options) and (count := parallelism_of(options)):
        return count
    if _name(options) == "daskrunner":
        return _dask_workers(options)
    return int(scale.max_num_workers or scale.num_workers or 1)


def with_job_name(options: PipelineOptions, name: str) -> PipelineOptions:
    """Options that name a job on a portable runner, if they did not before.

    Workers have their packages already: what the launch's environment holds is not staged, which
    would take a ``pip freeze``, and a folder that the engine's hosts share.
    """
    if not is_portable(options):
        return options
    options = copy.deepcopy(options)
    cloud = options.view_as(GoogleCloudOptions)
    cloud.job_name = cloud.job_name or name
    options.view_as(DebugOptions).add_experiment("disable_logging_submission_environment")
    return options


def with_partitions(options: PipelineOptions, count: int) -> PipelineOptions:
    """Options with which Dask, if it is the runner, makes ``count`` partitions of the input.

    A partition is Dask's unit of work and of retry; left to itself it makes one of 128 elements, so
    that most workers would have nothing to do.
    """
    if _name(options) == "daskrunner":
        from apache_beam.runners.dask.dask_runner import DaskOptions

        dask = options.view_as(DaskOptions)
        if dask.npartitions is None and dask.partition_size is None:
            dask.npartitions = count
    return options


def _name(options: PipelineOptions) -> str:
    return runner_name(options.view_as(StandardOptions).runner)


def _with_image(flags: Sequence[str]) -> PipelineOptions:
    """Options for Dataflow, whose workers have what their image has.

    Raises:
        ConfigError: Beam's own image is meant, which has neither this package nor PyTorch.
    """
    options = PipelineOptions(list(flags))
    if not options.view_as(WorkerOptions).sdk_container_image:
        raise ConfigError(
            "--runner=DataflowRunner needs --sdk_container_image=IMAGE: Beam's own image has "
            "neither beam-inference nor PyTorch. docs/dataflow.md says how to build one."
        )
    setup = options.view_as(SetupOptions)
    names = {flag.split("=")[0] for flag in flags}
    if "--sdk_location" not in names:
        # it is in the image; Beam would fetch it from PyPI to upload it
        setup.sdk_location = "container"
    if not names & {"--save_main_session", "--no_save_main_session"}:
        setup.save_main_session = False  # everything is importable there
    return options


def _need_dask() -> None:
    try:
        import apache_beam.runners.dask.dask_runner  # noqa: F401
        import distributed  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--runner=DaskRunner needs Dask, which is not installed: pip install "
            "'beam-inference[dask]', here and on the cluster's workers"
        ) from None
    # it sets a level of its own, and tells of every connection
    if logging.getLogger().level > logging.DEBUG:
        for name in (
            "distributed",
            *(n for n in logging.root.manager.loggerDict if n.startswith("distributed.")),
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # some have levels of their own


def has_no_workers(result: object) -> bool:
    """Whether a pipeline waits on a Dask cluster that has lost all its workers."""
    client = getattr(result, "client", None)
    try:
        return client is not None and not client.scheduler_info(n_workers=-1)["workers"]
    except (OSError, ValueError, RuntimeError):
        return True


def _dask_scheduler(options: PipelineOptions) -> tuple[str | None, str | None]:
    """Address and file of the scheduler, as far as they are given."""
    from apache_beam.runners.dask.dask_runner import DaskOptions

    dask = options.view_as(DaskOptions)
    return dask.address, dask.scheduler_file


def _tell_worker_ttl(client: Client) -> None:
    """Say so where a cluster does not notice soon that a worker hangs."""
    try:
        ttl = client.run_on_scheduler(worker_ttl)
    except Exception as error:  # of any kind: the scheduler may lack this package
        logger.debug("the scheduler's worker-ttl is unknown: %s", error)
        return
    if ttl is None or ttl > LONGEST_WORKER_TTL_SECONDS:
        after = "never" if ttl is None else f"after {ttl:.0f} s only"
        logger.warning(
            "this Dask cluster notices %s that a worker process hangs. Start its scheduler with "
            "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL='5 minutes'.",
            after,
        )


def worker_ttl(dask_scheduler: Scheduler) -> float | None:
    """Return the seconds after which a Dask scheduler gives up a silent worker; None for never."""
    ttl: float | None = dask_scheduler.worker_ttl
    return ttl


def _dask_workers(options: PipelineOptions) -> int:
    from apache_beam.runners.dask.dask_runner import DaskOptions
    from distributed import Client

    address, scheduler_file = _dask_scheduler(options)
    where = address or scheduler_file
    patience = options.view_as(DaskOptions).timeout or _SCHEDULER_SECONDS
    try:
        with Client(
            address=address, scheduler_file=scheduler_file, timeout=patience, set_as_default=False
        ) as client:
            client.wait_for_workers(1, timeout=_FIRST_WORKER_SECONDS)
            workers = client.scheduler_info(n_workers=-1)["workers"]
            _tell_worker_ttl(client)
    except TimeoutError:
        raise ConfigError(
            f"the Dask cluster at {where} has no workers, after {_FIRST_WORKER_SECONDS} s. Start "
            "some: dask worker …"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the Dask scheduler at {where} does not answer: {error}. Is the cluster running?"
        ) from None
    return sum(int(worker["nthreads"]) for worker in workers.values())
