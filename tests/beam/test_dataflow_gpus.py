"""The GPU options: what they expand into, as Beam understands it, and what is refused."""

import argparse

import pytest
from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    WorkerOptions,
)
from apache_beam.runners.dataflow.internal import apiclient
from helpers import DATAFLOW

from beam_inference.beam.dataflow_gpus import (
    GPUS,
    GpuOptions,
    add_gpu_flags,
    check_device,
    dataflow_flags,
    gpu_options,
)
from beam_inference.beam.flags import beam_options
from beam_inference.errors import ConfigError

ONE_PROCESS = "no_use_multiple_sdk_containers"

# What the documentation of Dataflow and Compute Engine says: type, GPUs, machines that have them,
# the default first.
FITTING = [
    (
        "t4",
        "nvidia-tesla-t4",
        1,
        ["n1-standard-8", "n1-highmem-2", "n1-highcpu-48", "n1-custom-6-20480", "custom-4-8192"],
    ),
    ("t4", "nvidia-tesla-t4", 2, ["n1-highmem-2", "n1-standard-48", "n1-custom-8-65536-ext"]),
    ("t4", "nvidia-tesla-t4", 4, ["n1-highmem-4", "n1-standard-96"]),
    (
        "l4",
        "nvidia-l4",
        1,
        ["g2-standard-8", "g2-standard-4", "g2-standard-32", "g2-custom-4-32768"],
    ),
    ("l4", "nvidia-l4", 2, ["g2-standard-24"]),
    ("l4", "nvidia-l4", 4, ["g2-standard-48"]),
    ("l4", "nvidia-l4", 8, ["g2-standard-96"]),
    ("a100", "nvidia-tesla-a100", 1, ["a2-highgpu-1g"]),
    ("a100", "nvidia-tesla-a100", 8, ["a2-highgpu-8g"]),
    ("a100", "nvidia-tesla-a100", 16, ["a2-megagpu-16g"]),
    ("a100-80gb", "nvidia-a100-80gb", 1, ["a2-ultragpu-1g"]),
    ("a100-80gb", "nvidia-a100-80gb", 4, ["a2-ultragpu-4g"]),
    ("h100", "nvidia-h100-80gb", 8, ["a3-highgpu-8g", "a3-edgegpu-8g"]),
    ("h100-mega", "nvidia-h100-mega-80gb", 8, ["a3-megagpu-8g"]),
]


def options(gpu, count=1, sharing=None, **more):
    return GpuOptions(
        gpu, count, sharing=sharing or ("one-model" if count == 1 else "processes"), **more
    )


def landed(flags):
    """Beam's options of these flags, none of them unknown to it."""
    return beam_options(flags)


def test_every_gpu_is_in_the_table():
    assert {row[0] for row in FITTING} == set(GPUS)


@pytest.mark.parametrize(("gpu", "kind", "count", "machines"), FITTING)
def test_flags_land_where_dataflow_expects_them(gpu, kind, count, machines):
    given = [*DATAFLOW, "--experiments=shuffle_mode=service"]
    beam = landed([*given, *dataflow_flags(options(gpu, count), given)])
    service_options = beam.view_as(GoogleCloudOptions).dataflow_service_options
    assert service_options == [
        f"worker_accelerator=type:{kind};count:{count};install-nvidia-driver:latest"
    ]
    assert beam.view_as(WorkerOptions).machine_type == machines[0]
    assert beam.view_as(WorkerOptions).disk_size_gb >= 50
    assert beam.view_as(DebugOptions).number_of_worker_harness_threads == 2
    experiments = beam.view_as(DebugOptions).experiments
    assert experiments == ["shuffle_mode=service", *([ONE_PROCESS] if count == 1 else [])]


@pytest.mark.parametrize(("gpu", "kind", "count", "machines"), FITTING)
def test_machines_that_fit_are_kept(gpu, kind, count, machines):
    for machine in machines:
        for flag in ("--machine_type", "--worker_machine_type"):
            given = [*DATAFLOW, f"{flag}={machine}"]
            added = dataflow_flags(options(gpu, count), given)
            assert landed([*given, *added]).view_as(WorkerOptions).machine_type == machine
            assert not any("machine_type" in each for each in added)


@pytest.mark.parametrize(
    ("gpu", "count", "machine"),
    [
        ("l4", 1, "n1-standard-8"),
        ("l4", 1, "g2-standard-24"),
        ("l4", 2, "g2-standard-8"),
        ("l4", 1, "g2-custom-24-98304"),
        ("t4", 1, "g2-standard-8"),
        ("t4", 1, "n1-standard-64"),
        ("t4", 1, "n1-megamem-96"),
        ("t4", 1, "g1-small"),
        ("t4", 1, "n2-standard-8"),
        ("a100", 1, "a2-ultragpu-1g"),
        ("a100", 2, "a2-highgpu-1g"),
        ("a100-80gb", 1, "a2-highgpu-1g"),
        ("h100", 8, "a3-megagpu-8g"),
        ("h100-mega", 8, "a3-highgpu-8g"),
    ],
)
def test_machines_that_do_not_fit_are_refused(gpu, count, machine):
    with pytest.raises(
        ConfigError,
        match=rf"--machine_type={machine} does not have {count} {gpu}.*Expected.*Remove",
    ):
        dataflow_flags(options(gpu, count), [*DATAFLOW, f"--machine_type={machine}"])


@pytest.mark.parametrize(
    ("gpu", "count", "message"),
    [
        ("t4", 3, "expected 1, 2 or 4"),
        ("l4", 16, "expected 1, 2, 4 or 8"),
        ("a100", 0, "expected 1, 2, 4, 8 or 16"),
        ("a100-80gb", 16, "expected 1, 2, 4 or 8"),
        ("h100", 1, "expected 8, .* Spot or flex-start"),
        ("h100-mega", 4, "expected 8, "),
    ],
)
def test_counts_that_no_machine_has(gpu, count, message):
    with pytest.raises(ConfigError, match=message):
        options(gpu, count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "p100"}, "expected one of t4, l4"),
        ({"gpu": "l4", "driver": "550;use_nvidia_mps"}, "expected default, latest"),
        ({"gpu": "l4", "sharing": "all"}, "expected one of one-model, mps"),
        ({"gpu": "l4", "count": 2}, "one-model runs one process.*Use --gpu_sharing=processes"),
        ({"gpu": "l4", "count": 2, "sharing": "mps"}, "MPS is for one"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ConfigError, match=message):
        GpuOptions(**options)


@pytest.mark.parametrize(
    ("driver", "text"),
    [
        ("default", "install-nvidia-driver"),
        ("latest", "install-nvidia-driver:latest"),
        ("5xx", "install-nvidia-driver:5xx"),
        ("580.95.05", "install-nvidia-driver:580.95.05"),
    ],
)
def test_drivers(driver, text):
    flag, *_ = dataflow_flags(options("l4", driver=driver), DATAFLOW)
    assert flag == f"--dataflow_service_options=worker_accelerator=type:nvidia-l4;count:1;{text}"


def test_mps_restricts_no_parallelism():
    added = dataflow_flags(options("l4", sharing="mps"), DATAFLOW)
    assert added[0].endswith(";install-nvidia-driver:latest;use_nvidia_mps")
    beam = landed([*DATAFLOW, *added])
    assert beam.view_as(DebugOptions).experiments is None
    assert beam.view_as(DebugOptions).number_of_worker_harness_threads is None


def test_what_is_given_is_kept_and_not_repeated():
    given = [
        *DATAFLOW,
        *(
            "--machine_type",
            "g2-standard-12",
            "--disk_size_gb=200",
            "--number_of_worker_harness_threads=4",
        ),
        *(
            f"--experiments=upload_graph,{ONE_PROCESS}",
            "--dataflow_service_options=enable_google_cloud_profiler",
        ),
    ]
    added = dataflow_flags(options("l4"), given)
    assert len(added) == 1
    beam = landed([*given, *added])
    assert beam.view_as(WorkerOptions).machine_type == "g2-standard-12"
    assert beam.view_as(WorkerOptions).disk_size_gb == 200
    assert beam.view_as(DebugOptions).number_of_worker_harness_threads == 4
    assert beam.view_as(DebugOptions).experiments == ["upload_graph", ONE_PROCESS]
    assert [o.split("=")[0] for o in beam.view_as(GoogleCloudOptions).dataflow_service_options] == [
        "enable_google_cloud_profiler",
        "worker_accelerator",
    ]


@pytest.mark.parametrize(
    ("sharing", "given", "message"),
    [
        (
            "one-model",
            ["--dataflow_service_options=worker_accelerator=type:nvidia-l4;count:1"],
            "both given",
        ),
        (
            "one-model",
            ["--experiment=use_runner_v2,worker_accelerator=type:nvidia-l4;count:1"],
            "both given",
        ),
        ("one-model", ["--resource_hints=min_ram=8GB"], "right fitting.*Remove the hints"),
        ("mps", ["--resource_hint", "accelerator=type:nvidia-l4;count:1"], "right fitting"),
        ("one-model", ["--flexrs_goal=COST_OPTIMIZED"], "FlexRS has no GPUs"),
        (
            "one-model",
            ["--experiments=flexible_resource_scheduling,delayed_launch"],
            "FlexRS has no GPUs",
        ),
        ("one-model", ["--experiments=disable_runner_v2"], "Runner v2"),
        ("one-model", ["--experiments=use_multiple_sdk_containers"], "one per core"),
        ("mps", [f"--experiments={ONE_PROCESS}"], "--gpu_sharing=mps runs a process per core"),
        (
            "processes",
            [f"--experiments={ONE_PROCESS}"],
            "--gpu_sharing=processes runs a process per core",
        ),
        ("mps", ["--number_of_worker_harness_threads=1"], "restrict parallelism"),
        ("mps", ["--dataflow_service_options=enable_prime"], "Prime has no MPS"),
        ("one-model", ["--machine_type"], "expected one argument"),
    ],
)
def test_contradictions_are_refused(sharing, given, message):
    with pytest.raises(ConfigError, match=message):
        dataflow_flags(options("l4", sharing=sharing), [*DATAFLOW, *given])


@pytest.mark.parametrize("given", [[], ["--runner=DirectRunner"], ["--runner", "PortableRunner"]])
def test_other_runners_are_refused(given):
    with pytest.raises(
        ConfigError, match=r"--gpu=l4 asks Dataflow.*Remove --gpu, or add --runner=DataflowRunner"
    ):
        dataflow_flags(options("l4"), given)


@pytest.mark.parametrize("runner", ["DataflowRunner", "dataflowrunner", "TestDataflowRunner"])
def test_dataflow_by_any_name(runner):
    assert dataflow_flags(options("l4"), [f"--runner={runner}"])


def test_the_job_that_dataflow_gets():
    flags = [*DATAFLOW, *dataflow_flags(options("t4"), DATAFLOW)]
    environment = apiclient.Environment(
        [], PipelineOptions(flags), "2.77.0", "gs://b/pipeline.pb"
    ).proto
    assert list(environment.service_options) == [
        "worker_accelerator=type:nvidia-tesla-t4;count:1;install-nvidia-driver:latest"
    ]
    assert ONE_PROCESS in environment.experiments
    (pool,) = environment.worker_pools
    assert (pool.machine_type, pool.disk_size_gb, pool.num_threads_per_worker) == (
        "n1-standard-8",
        100,
        2,
    )


def parsed(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_gpu_flags(parser)
    return gpu_options(parser.parse_args(words))


def test_the_command_line():
    assert parsed() is None
    assert parsed("--gpu=l4") == GpuOptions("l4")
    words = ("--gpu=a100", "--gpu_count=4", "--gpu_driver=5xx", "--gpu_sharing=processes")
    assert parsed(*words) == GpuOptions("a100", 4, "5xx", "processes")
    # Forms pass every field.
    assert parsed("--gpu_count=1", "--gpu_driver=latest", "--gpu_sharing=one-model") is None
    for words in (["--gpu_count=2"], ["--gpu_driver=default"], ["--gpu_sharing=mps"]):
        with pytest.raises(ConfigError, match=rf"{words[0]} has an effect only with --gpu"):
            parsed(*words)
    with pytest.raises(argparse.ArgumentError, match="invalid choice"):
        parsed("--gpu=v100")


def test_the_jobs_device_is_held_against_the_gpus():
    with pytest.raises(ConfigError, match="paid for and idle"):
        check_device("cpu", options("l4"), DATAFLOW)
    with pytest.raises(ConfigError, match="asked for no GPU"):
        check_device("cuda", None, DATAFLOW)
    for given in (
        [
            "--dataflow_service_options=worker_accelerator=type:nvidia-l4;count:1;install-nvidia-driver"
        ],
        ["--resource_hints=accelerator=type:nvidia-l4;count:1;install-nvidia-driver"],
        ["--runner=DirectRunner"],
    ):
        check_device("cuda", None, [*DATAFLOW, *given])
    check_device("cuda", options("l4"), DATAFLOW)
    check_device("cpu", None, DATAFLOW)
    check_device("cuda", None, [])
