"""Which engine the options of a portable runner mean, and where its workers are."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from apache_beam.options.pipeline_options import (
    DebugOptions,
    FlinkRunnerOptions,
    JobServerOptions,
    PipelineOptions,
    PortableOptions,
    SparkRunnerOptions,
    StandardOptions,
)

from beam_inference.beam.dataflow_gpus import runner_name
from beam_inference.environment import usable_cores
from beam_inference.errors import ConfigError
from beam_inference.job.place import Place

Engine = Literal["Flink", "Spark", "Prism"]

_ENGINES: dict[str, Engine] = {
    "flinkrunner": "Flink",
    "sparkrunner": "Spark",
    "prismrunner": "Prism",
}
_EMBEDDED_FLINK = ("[local]", "[auto]")
_SPARK_PARALLELISM = re.compile(r"-Dspark\.default\.parallelism=(\d+)")
_LOCAL_SPARK = re.compile(r"local(\[.+\])?$")


def engine_of(options: PipelineOptions) -> Engine | None:
    """The engine that a runner is named after; None for a runner of another kind."""
    return _ENGINES.get(_name(options))


def is_embedded(options: PipelineOptions) -> bool:
    """Whether the engine runs inside a job server of ours, with no cluster."""
    if options.view_as(PortableOptions).job_endpoint:
        return False
    engine = engine_of(options)
    if engine == "Flink":
        return options.view_as(FlinkRunnerOptions).flink_master.strip() in _EMBEDDED_FLINK
    if engine == "Spark":
        return bool(_LOCAL_SPARK.match(options.view_as(SparkRunnerOptions).spark_master_url))
    return engine == "Prism"


def is_uber_jar(options: PipelineOptions) -> bool:
    """Whether Beam itself submits the job to a cluster, as one jar, without a job server."""
    engine = engine_of(options)
    if engine == "Flink":
        flink = options.view_as(FlinkRunnerOptions)
        return bool(flink.flink_submit_uber_jar) and not is_embedded(options)
    return engine == "Spark" and bool(options.view_as(SparkRunnerOptions).spark_submit_uber_jar)


def with_scheme(flink_master: str) -> str:
    """The address of a Flink cluster as Beam passes it on: with http://, if it has no scheme."""
    flink_master = flink_master.strip()
    if flink_master in _EMBEDDED_FLINK or re.match("https?://", flink_master):
        return flink_master
    return f"http://{flink_master}"


def flink_url(options: PipelineOptions) -> str | None:
    """Address of the REST interface of a Flink cluster, if flags name one."""
    master = with_scheme(options.view_as(FlinkRunnerOptions).flink_master)
    return master if master.startswith("http") else None


def is_portable(options: PipelineOptions) -> bool:
    """Whether workers get their work through Beam's job service, from whatever engine."""
    return engine_of(options) is not None or _name(options) == "portablerunner"


def environment_of(options: PipelineOptions) -> str:
    """What workers of a portable runner run in: LOOPBACK, EXTERNAL, PROCESS or DOCKER.

    An engine inside our own job server has its workers in the launching process, if no flag says
    otherwise; all others have Beam's default.
    """
    portable = options.view_as(PortableOptions)
    if portable.environment_type:
        return str(portable.environment_type).upper()
    is_prism = engine_of(options) == "Prism"
    if (is_embedded(options) or is_prism) and not portable.output_executable_path:
        return "LOOPBACK"
    return "DOCKER"


def check_pool_is_named(options: PipelineOptions) -> None:
    """Check that flags say where worker pools are, if workers come from pools.

    Raises:
        ConfigError: they do not.
    """
    portable = options.view_as(PortableOptions)
    if environment_of(options) != "EXTERNAL":
        return
    if not (portable.environment_config or portable.environment_options):
        raise ConfigError(
            "--environment_type=EXTERNAL needs --environment_config=localhost:50000: where the "
            "worker pool of each TaskManager or executor listens, as seen from its own host"
        )


def portable_place(options: PipelineOptions) -> Place:
    """Where the workers of a portable runner are: on this machine only by LOOPBACK."""
    place = Place(
        is_this_machine=environment_of(options) == "LOOPBACK",
        threads_per_process=_threads_of_engine(options) or Place().threads_per_process,
    )
    threads = options.view_as(DebugOptions).number_of_worker_harness_threads
    return place if threads is None else replace(place, threads_per_process=threads)


def parallelism_of(options: PipelineOptions) -> int | None:
    """How many tasks flags ask Flink or Spark for at a time; None if none does."""
    parallelism = options.view_as(FlinkRunnerOptions).parallelism
    if parallelism > 0:
        return int(parallelism)
    # Java takes the last of several.
    for word in reversed(options.view_as(JobServerOptions).job_server_jvm_properties):
        if found := _SPARK_PARALLELISM.match(word):
            return int(found[1])
    return None


def _threads_of_engine(options: PipelineOptions) -> int | None:
    """How many elements an engine on this machine works on at a time; None if nothing says."""
    engine = engine_of(options)
    if engine == "Flink":
        parallelism = options.view_as(FlinkRunnerOptions).parallelism
        return parallelism if parallelism > 0 else None
    if engine == "Spark" and is_embedded(options):
        master = options.view_as(SparkRunnerOptions).spark_master_url
        count = re.match(r"local\[(\d+|\*)", master)
        if count is None:
            return 1
        return usable_cores() if count[1] == "*" else int(count[1])
    return None


def _name(options: PipelineOptions) -> str:
    return runner_name(options.view_as(StandardOptions).runner)
