"""What is asked of Flink, Spark or a job service before a launch, and told or refused then.

A launch that cannot work would otherwise fail within a minute or hang, with the last line of a
Java stack for a message.
"""

from __future__ import annotations

import logging
import math
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    PipelineOptions,
    PortableOptions,
    SetupOptions,
    SparkRunnerOptions,
)

from beam_inference.beam.flink_cluster import FlinkCluster, FlinkError, TaskManager
from beam_inference.beam.job_server import needs_job_server
from beam_inference.beam.job_server_program import check_program
from beam_inference.beam.job_service import list_service_options
from beam_inference.beam.portable_engines import (
    Engine,
    engine_of,
    environment_of,
    flink_url,
    is_embedded,
    is_portable,
    is_uber_jar,
    parallelism_of,
)
from beam_inference.beam.progress import tell
from beam_inference.errors import ConfigError
from beam_inference.job.place import Place

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
_DEFAULT_POOL = "localhost:50000"
_NO_RESTART = ("", "none", "off", "disable")
_PAGE = "docs/flink-spark.md says how."


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a launch learned of its engine.

    Attributes:
        notes: lines to tell.
        warnings: likewise, of what may go wrong.
        parallelism: slots to ask for, where no flag says; None to leave it to the engine.
        flink_version: the cluster's, such as "1.19", where it is known.
        processes_per_host: worker processes on a host; None if that is not known.
        threads_per_process: slots that share a worker process; None if that is not known.
    """

    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    parallelism: int | None = None
    flink_version: str | None = None
    processes_per_host: int | None = None
    threads_per_process: int | None = None


def settle_engine(options: PipelineOptions, place: Place) -> Place:
    """Ask the engine, tell what it says, and set what the launch takes from it.

    Args:
        options: of Beam; parallelism and version of Flink are set.
        place: of the workers, as far as flags say.

    Returns:
        The place, with the processes and threads that the engine's slots mean.

    Raises:
        ConfigError: the launch cannot work.
    """
    facts = ask_engine(options)
    for warning in facts.warnings:
        logger.warning("%s", warning)
    for note in facts.notes:
        tell(note)
    flink = options.view_as(FlinkRunnerOptions)
    if facts.parallelism is not None:
        flink.parallelism = facts.parallelism
    if facts.flink_version is not None:
        flink.flink_version = facts.flink_version
    return replace(
        place,
        processes_per_host=facts.processes_per_host or place.processes_per_host,
        threads_per_process=facts.threads_per_process or place.threads_per_process,
    )


def ask_engine(options: PipelineOptions) -> EngineFacts:
    """Ask the engine of a portable runner; of other runners nothing is known.

    Raises:
        ConfigError: the launch cannot work: something is not there, or does not fit.
    """
    if not is_portable(options):
        return EngineFacts()
    _check_environment(options)
    _check_executable(options)
    served = _check_job_service(options)
    engine = engine_of(options) or served
    facts = EngineFacts()
    if engine == "Flink":
        facts = _ask_flink(options)
    elif engine == "Spark" and not is_embedded(options):
        _check_spark_master(options)
        facts = _note_on_spark(options)
    if is_embedded(options):
        _check_pool_here(options)
    if needs_job_server(options) or is_uber_jar(options):
        notes = check_program(options, facts.flink_version)
        facts = replace(facts, notes=[*facts.notes, *notes])
    return facts


def _check_environment(options: PipelineOptions) -> None:
    """Check from the flags alone that workers have this package, and can be reached.

    Raises:
        ConfigError: they do not.
    """
    portable = options.view_as(PortableOptions)
    image = portable.environment_config or portable.environment_options
    kind = environment_of(options)
    if kind == "DOCKER" and not (
        image or options.view_as(SetupOptions).prebuild_sdk_container_engine
    ):
        raise ConfigError(
            "workers would run in Beam's own container, which lacks beam-inference: that is what "
            "Beam means where no --environment_type is given. Start worker pools on the engine's "
            "hosts and add --environment_type=EXTERNAL --environment_config=localhost:50000; or "
            "name an image that has beam-inference: --environment_type=DOCKER "
            f"--environment_config=IMAGE. {_PAGE}"
        )
    if kind == "LOOPBACK":
        for flag, host in _hosts_of_flags(options):
            if not is_this_machine(host):
                raise ConfigError(
                    f"--environment_type=LOOPBACK: workers would be in this process, which the "
                    f"engine at {host} ({flag}) cannot reach as localhost. Start worker pools on "
                    "its hosts: --environment_type=EXTERNAL --environment_config=localhost:50000. "
                    f"{_PAGE}"
                )


def _hosts_of_flags(options: PipelineOptions) -> list[tuple[str, str]]:
    """Flags that lead to an engine elsewhere, and the hosts that they name."""
    found = []
    endpoint = options.view_as(PortableOptions).job_endpoint
    if endpoint and endpoint != "embed":
        found.append(("--job_endpoint", endpoint.rpartition(":")[0]))
    elif url := flink_url(options):
        found.append(("--flink_master", urlsplit(url).hostname or ""))
    elif engine_of(options) == "Spark":
        found += [("--spark_master_url", host) for host, _ in _spark_masters(options)]
    return found


def _check_executable(options: PipelineOptions) -> None:
    """Check that a jar can be written, where one is asked for.

    Raises:
        ConfigError: the runner has no such jar, or a job server elsewhere would write it.
    """
    portable = options.view_as(PortableOptions)
    path = portable.output_executable_path
    if not path:
        return
    if engine_of(options) != "Flink" or is_uber_jar(options):
        raise ConfigError(
            f"--output_executable_path={path} writes a jar for Flink: it needs "
            "--runner=FlinkRunner, without --flink_submit_uber_jar"
        )
    if portable.job_endpoint:
        raise ConfigError(
            f"--output_executable_path={path}: the job server at --job_endpoint="
            f"{portable.job_endpoint} would write its own master into the jar, which no cluster "
            "then runs. Remove --job_endpoint: the launch starts a job server for this."
        )


def _check_job_service(options: PipelineOptions) -> Engine | None:
    """Check the job service of ``--job_endpoint``.

    Returns:
        The engine behind it, as far as its options tell.

    Raises:
        ConfigError: it does not answer, or is another engine's than the runner.
    """
    endpoint = options.view_as(PortableOptions).job_endpoint
    if not endpoint or endpoint == "embed":
        return None
    names = list_service_options(endpoint)
    has_flink = "flink_master" in names
    has_spark = "spark_master" in names
    engine: Engine | None = None
    if has_flink != has_spark:  # a server that holds both does not tell which it is
        engine = "Flink" if has_flink else "Spark"
    wanted = engine_of(options)
    if engine and wanted and engine != wanted:
        raise ConfigError(
            f"--job_endpoint={endpoint} is a job server for {engine}, but the runner is "
            f"{wanted}Runner: take --runner={engine}Runner"
        )
    return engine


def _ask_flink(options: PipelineOptions) -> EngineFacts:
    url = flink_url(options)
    flink = options.view_as(FlinkRunnerOptions)
    if url is None:
        if is_embedded(options) or flink.parallelism > 0:
            return EngineFacts()
        return EngineFacts(
            notes=[
                "Flink runs the job in one slot: --parallelism=N takes more, and "
                "--flink_master=HOST:PORT lets the launch ask how many are free"
            ]
        )
    cluster = FlinkCluster(url)
    try:
        version = cluster.version()
        managers = cluster.task_managers()
        settings = cluster.settings()
    except FlinkError as error:
        if error.is_secured:
            return EngineFacts(
                warnings=[
                    f"{error}: slots and settings of the cluster are not looked at. Without "
                    "--parallelism=N the job runs in one slot."
                ]
            )
        raise ConfigError(
            f"--flink_master={flink.flink_master}: {error}. Is the cluster running, and is this "
            "its REST interface (port 8081 by default)?"
        ) from None
    _check_hosts(options, managers)
    warnings = [*_warn_of_restarts(settings), *_warn_of_pools(options, managers)]
    slots = _choose_slots(flink.parallelism, managers, f"Flink {version} at {url}")
    processes = _processes_per_manager(options, managers)
    shared = max((manager.slots for manager in managers), default=1)
    on_a_host = max(Counter(manager.host for manager in managers).values(), default=1)
    return EngineFacts(
        notes=slots.notes,
        warnings=[*warnings, *slots.warnings],
        parallelism=slots.parallelism,
        flink_version=_check_version(flink.flink_version, version),
        processes_per_host=processes * on_a_host,
        threads_per_process=math.ceil(shared / processes),
    )


def _processes_per_manager(options: PipelineOptions, managers: Sequence[TaskManager]) -> int:
    """Worker processes of a TaskManager: ``--sdk_worker_parallelism``; 0 stands for its cores."""
    flag = options.view_as(PortableOptions).sdk_worker_parallelism
    return int(flag) or max((manager.cores - 1 for manager in managers), default=1) or 1


def _choose_slots(parallelism: int, managers: Sequence[TaskManager], where: str) -> EngineFacts:
    """How many slots the job asks for, and what is to be told of them."""
    free = sum(manager.free_slots for manager in managers)
    total = sum(manager.slots for manager in managers)
    if not managers:
        count = max(parallelism, 1)
        return EngineFacts(
            warnings=[
                f"{where} has no TaskManager yet. The job asks for {_slots(count)} "
                f"(--parallelism=N), and waits until TaskManagers are there."
            ]
        )
    if parallelism > free:
        return EngineFacts(
            warnings=[
                f"{where}: --parallelism={parallelism}, but only {free} of {_slots(total)} "
                "free: the job waits for the others (slot.request.timeout, 5 minutes by "
                "default, then the next restart)."
            ]
        )
    if parallelism > 0:
        return EngineFacts()
    if not free:
        return EngineFacts(
            warnings=[
                f"{where}: none of its {_slots(total)} is free. The job asks for 1 slot "
                "(--parallelism=N asks for more), and waits for it."
            ]
        )
    return EngineFacts(
        notes=[f"{where}: {free} of {_slots(total)} free: --parallelism={free}"],
        parallelism=free,
    )


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def _check_version(flag: str, version: str) -> str:
    """The cluster's version of Flink as a value of ``--flink_version``.

    Raises:
        ConfigError: the flag names another one.
    """
    found = ".".join(version.split(".")[:2])
    is_given = flag != FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS[-1]
    if is_given and flag != found:
        raise ConfigError(
            f"--flink_version={flag}, but the cluster has Flink {version}: remove the flag, or "
            f"give --flink_version={found}"
        )
    return found


def _check_hosts(options: PipelineOptions, managers: Sequence[TaskManager]) -> None:
    """Check that TaskManagers reach their workers, by the hosts that they are on.

    Raises:
        ConfigError: several share a worker pool, or workers would be in this process, elsewhere.
    """
    kind = environment_of(options)
    counts = Counter(manager.host for manager in managers)
    if kind == "LOOPBACK":
        others = sorted(host for host in counts if host and not is_this_machine(host))
        if others:
            raise ConfigError(
                "--environment_type=LOOPBACK: workers would be in this process, which the "
                f"TaskManagers on {', '.join(others)} cannot reach as localhost. Start a worker "
                "pool on each of their hosts: --environment_type=EXTERNAL "
                f"--environment_config=localhost:50000. {_PAGE}"
            )
    host, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if kind == "EXTERNAL" and host and count > 1:
        raise ConfigError(
            f"{count} TaskManagers are on {host}, and would share the worker pool at "
            f"{_pool_of(options)} (--environment_config): they would end each other's workers, and "
            "the job would hang. Run one TaskManager with several slots on each host, or each in "
            "a container with a pool of its own."
        )


def _warn_of_restarts(settings: dict[str, str]) -> list[str]:
    strategy = settings.get("restart-strategy.type", settings.get("restart-strategy", ""))
    if strategy.strip().lower() not in _NO_RESTART:
        return []
    return [
        "the Flink cluster has no restart strategy: a lost worker ends the job. Set "
        "restart-strategy.type: fixed-delay, and restart-strategy.fixed-delay.attempts: 100 (one "
        "by default), in its configuration (config.yaml)."
    ]


def _warn_of_pools(options: PipelineOptions, managers: Sequence[TaskManager]) -> list[str]:
    """Look for the worker pool of each TaskManager, as far as this machine sees it.

    Raises:
        ConfigError: a TaskManager is on this machine, and its pool is not.
    """
    if environment_of(options) != "EXTERNAL":
        return []
    pool_host, _, port = _pool_of(options).rpartition(":")
    warnings = []
    for host in sorted({manager.host for manager in managers}):
        place = host if _is_loopback(pool_host) else pool_host
        if not place or not port.isdigit() or listens(place, int(port)):
            continue
        message = (
            f"nobody listens at {place}:{port}, where the TaskManager on {host} has its worker "
            f"pool by --environment_config={_pool_of(options)}"
        )
        start = f"Start it there: python -m {_POOL_PROGRAM} --service_port={port}"
        if is_this_machine(place):
            raise ConfigError(f"{message}. {start}")
        warnings.append(f"{message}, as far as this machine can see. {start}")
    return warnings


_POOL_PROGRAM = "apache_beam.runners.worker.worker_pool_main"


def _check_pool_here(options: PipelineOptions) -> None:
    """Check the worker pool of an engine in our own job server.

    Raises:
        ConfigError: nobody listens there.
    """
    if environment_of(options) != "EXTERNAL":
        return
    if options.view_as(PortableOptions).output_executable_path:
        return
    host, _, port = _pool_of(options).rpartition(":")
    if port.isdigit() and not listens(host, int(port)):
        raise ConfigError(
            f"nobody listens at --environment_config={host}:{port}, where workers would be "
            f"started. Start a worker pool: python -m {_POOL_PROGRAM} --service_port={port}"
        )


def _pool_of(options: PipelineOptions) -> str:
    return str(options.view_as(PortableOptions).environment_config or _DEFAULT_POOL)


def _spark_masters(options: PipelineOptions) -> list[tuple[str, int]]:
    """Hosts and ports of a standalone master; several if others stand by."""
    url = options.view_as(SparkRunnerOptions).spark_master_url
    return [(host, int(port)) for host, port in re.findall(r"(?:spark://|,)([^,:]+):(\d+)", url)]


def _check_spark_master(options: PipelineOptions) -> None:
    if engine_of(options) is None or options.view_as(PortableOptions).job_endpoint:
        return
    masters = _spark_masters(options)
    if masters and not any(listens(host, port) for host, port in masters):
        raise ConfigError(
            f"--spark_master_url={options.view_as(SparkRunnerOptions).spark_master_url}: nobody "
            "listens there. Is the Spark master running (port 7077 by default)?"
        )


def _note_on_spark(options: PipelineOptions) -> EngineFacts:
    if parallelism_of(options) is not None:
        return EngineFacts()
    return EngineFacts(
        notes=[
            "how many tasks Spark makes is decided by spark.default.parallelism, which cannot be "
            "asked: --job_server_jvm_property=-Dspark.default.parallelism=N sets it for a job "
            "server that the launch starts; take a few times the cluster's cores, since a lost "
            "task repeats its partition"
        ]
    )


def listens(host: str, port: int) -> bool:
    """Whether somebody listens at a port, within some seconds."""
    try:
        with socket.create_connection((host, port), timeout=_ANSWER_SECONDS):
            return True
    except OSError:
        return False


def is_this_machine(host: str) -> bool:
    """Whether a host's address is one of this machine's: only those can be bound."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in addresses:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")
