"""GPUs of Dataflow workers: short options, checked and expanded into flags of Beam.

Which GPUs there are, and in which machines, is Google's documentation as of April 2026 ("Dataflow
support for GPUs", "GPU machine types", "Use NVIDIA MPS", "Right fitting", "FlexRS"). P4, P100 and
V100 are left out, though Dataflow has
them: PyTorch as requirements.txt pins it is built for compute capability 7.5 and later.

A flag that was given is never overridden: it is kept, or it is refused.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from beam_inference.errors import ConfigError


class _Gpu(NamedTuple):
    """Dataflow's name of a GPU, and its machines by number of GPUs; the default machine first.

    ``n1_cores``: GPUs that are attached to N1 machines go with any of up to so many cores, by
    number of GPUs.
    """

    type: str
    machines: Mapping[int, tuple[str, ...]]
    n1_cores: Mapping[int, int] | None = None


_G2_CORES = {1: (8, 4, 12, 16, 32), 2: (24,), 4: (48,), 8: (96,)}
_GPUS = {
    "t4": _Gpu(
        "nvidia-tesla-t4",
        # With several GPUs a process per core uses them: by default there are as many of each.
        {1: ("n1-standard-8",), 2: ("n1-highmem-2",), 4: ("n1-highmem-4",)},
        {1: 48, 2: 48, 4: 96},
    ),
    "l4": _Gpu(
        "nvidia-l4",
        {n: tuple(f"g2-standard-{c}" for c in cores) for n, cores in _G2_CORES.items()},
    ),
    "a100": _Gpu(
        "nvidia-tesla-a100",
        {**{n: (f"a2-highgpu-{n}g",) for n in (1, 2, 4, 8)}, 16: ("a2-megagpu-16g",)},
    ),
    "a100-80gb": _Gpu("nvidia-a100-80gb", {n: (f"a2-ultragpu-{n}g",) for n in (1, 2, 4, 8)}),
    "h100": _Gpu("nvidia-h100-80gb", {8: ("a3-highgpu-8g", "a3-edgegpu-8g")}),
    "h100-mega": _Gpu("nvidia-h100-mega-80gb", {8: ("a3-megagpu-8g",)}),
}
GPUS = tuple(_GPUS)
"""The values of ``--gpu``."""

SHARINGS = ("one-model", "mps", "processes")
"""The values of ``--gpu_sharing``."""

DRIVERS = "default|latest|[0-9][0-9a-z.]*"
"""A regular expression of the values of ``--gpu_driver``."""

# CUDA 13, PyTorch's, needs a driver that may not be the default
_COUNT = 1
_DRIVER = "latest"
_SHARING = "one-model"
# one reads and writes while the other computes; they share the network and take turns on the device
_THREADS = 2
# Google asks for 50 or more, since images with CUDA are large; weights are fetched there too
_DISK_GB = 100


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """GPUs of each worker.

    Attributes:
        gpu: which, one of :data:`GPUS`.
        count: how many per worker.
        driver: ``default`` is the one of the worker's system, ``latest`` the newest that system
            has.
        sharing: one of :data:`SHARINGS`. ``one-model``: one process with one copy of the network.
            ``mps``: a process per core, each with its copy, sharing one GPU through NVIDIA MPS.
            ``processes``: a process per core, spread over the GPUs.

    Raises:
        ConfigError: these do not go together.
    """

    gpu: str
    count: int = _COUNT
    driver: str = _DRIVER
    sharing: str = _SHARING

    def __post_init__(self) -> None:
        if self.gpu not in _GPUS:
            raise ConfigError(f"--gpu={self.gpu}: expected one of {', '.join(GPUS)}")
        if self.sharing not in SHARINGS:
            raise ConfigError(
                f"--gpu_sharing={self.sharing}: expected one of {', '.join(SHARINGS)}"
            )
        if not re.fullmatch(DRIVERS, self.driver):
            raise ConfigError(
                f"--gpu_driver={self.driver}: expected default, latest, or a version such as 5xx"
            )
        counts = _GPUS[self.gpu].machines
        if self.count not in counts:
            hint = "Fewer are available only as Spot or flex-start machines: see docs/dataflow.md. "
            raise ConfigError(
                f"--gpu_count={self.count} with --gpu={self.gpu}: expected "
                f"{_either(map(str, counts))}, as many as a machine has. "
                f"{hint if self.gpu == 'h100' else ''}Write another count, or another GPU."
            )
        if self.count > 1 and self.sharing != "processes":
            why = (
                "one-model runs one process, which uses one GPU"
                if self.sharing == "one-model"
                else "MPS is for one"
            )
            raise ConfigError(
                f"--gpu_count={self.count} with --gpu_sharing={self.sharing}: {why}, so the others "
                "would be paid for and idle. Use --gpu_sharing=processes, or better: more "
                "workers of one GPU each (--max_num_workers)."
            )


def add_gpu_flags(parser: argparse.ArgumentParser) -> None:
    """Add the GPU options to a command line; :func:`gpu_options` reads them."""
    group = parser.add_argument_group("GPUs of Dataflow workers")
    group.add_argument(
        "--gpu",
        choices=GPUS,
        help="give each worker this GPU; the job must say inference.device: cuda",
    )
    group.add_argument(
        "--gpu_count", type=int, default=_COUNT, metavar="N", help="GPUs per worker (default: 1)"
    )
    group.add_argument(
        "--gpu_driver",
        default=_DRIVER,
        metavar="VERSION",
        help=(
            "NVIDIA driver to install: latest, default (the one of the worker's system) or a "
            "branch such as 5xx (default: latest)"
        ),
    )
    group.add_argument(
        "--gpu_sharing",
        choices=SHARINGS,
        default=_SHARING,
        help=(
            "one-model: one process per worker, with one copy of the network. mps: a process per "
            "core, each with its copy, on one GPU through NVIDIA MPS. processes: a process per "
            "core, each with its copy, spread over the GPUs (default: one-model)"
        ),
    )


def gpu_options(args: argparse.Namespace) -> GpuOptions | None:
    """The GPU options of a parsed command line; None without ``--gpu``.

    Raises:
        ConfigError: they do not go together.
    """
    if args.gpu is not None:
        return GpuOptions(args.gpu, args.gpu_count, args.gpu_driver, args.gpu_sharing)
    defaults = {"gpu_count": _COUNT, "gpu_driver": _DRIVER, "gpu_sharing": _SHARING}
    idle = [
        f"--{name}={getattr(args, name)}"
        for name, value in defaults.items()
        if getattr(args, name) != value
    ]
    if idle:  # forms pass every field: defaults alone are no wish for a GPU
        raise ConfigError(
            f"{idle[0]} has an effect only with --gpu: say which GPU, such as --gpu=l4, or "
            "remove it"
        )
    return None


def dataflow_flags(gpu: GpuOptions, beam_flags: Sequence[str]) -> list[str]:
    """The flags of Beam that a GPU needs in addition to those that are given.

    Raises:
        ConfigError: a given flag contradicts the GPU options.
    """
    flags = _parse(beam_flags)
    if not is_dataflow(flags.runner):
        raise ConfigError(
            f"--gpu={gpu.gpu} asks Dataflow for machines, but the runner is "
            f"{flags.runner or 'the local one'}, which uses the GPUs that its machines have. "
            "Remove --gpu, or add --runner=DataflowRunner."
        )
    _check_services(gpu, flags)
    accelerator = f"type:{_GPUS[gpu.gpu].type};count:{gpu.count};install-nvidia-driver"
    accelerator += "" if gpu.driver == "default" else f":{gpu.driver}"
    accelerator += ";use_nvidia_mps" if gpu.sharing == "mps" else ""
    new = [f"--dataflow_service_options=worker_accelerator={accelerator}"]
    if flags.machine_type is None:
        new.append(f"--machine_type={_GPUS[gpu.gpu].machines[gpu.count][0]}")
    else:
        _check_machine(gpu, flags.machine_type)
    if flags.disk_size_gb is None:
        new.append(f"--disk_size_gb={_DISK_GB}")
    if gpu.sharing == "one-model" and _ONE_PROCESS not in flags.experiments:
        new.append(f"--experiments={_ONE_PROCESS}")
    # MPS excludes options that restrict parallelism
    if gpu.sharing != "mps" and flags.threads is None:
        new.append(f"--number_of_worker_harness_threads={_THREADS}")
    return new


def check_device(device: str, gpu: GpuOptions | None, beam_flags: Sequence[str]) -> None:
    """Hold ``inference.device`` against the GPUs that Dataflow's workers will have.

    Raises:
        ConfigError: a GPU would idle, or be missing.
    """
    flags = _parse(beam_flags)
    if gpu is not None and device == "cpu":
        raise ConfigError(
            f"inference.device: cpu with --gpu={gpu.gpu}: the GPUs would be paid for and idle. "
            "Write device: cuda, or remove --gpu."
        )
    has_gpu = gpu is not None or any(
        "accelerator" in text for text in (*flags.services, *flags.experiments, *flags.hints)
    )
    if device.startswith("cuda") and is_dataflow(flags.runner) and not has_gpu:
        raise ConfigError(
            "inference.device: cuda, but Dataflow is asked for no GPU: every worker would fail as "
            "it starts. Add one, such as --gpu=l4, or write device: cpu."
        )


_ONE_PROCESS = "no_use_multiple_sdk_containers"


def _parse(beam_flags: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of Beam that matter here, under Beam's names for them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--runner")
    parser.add_argument("--machine_type", "--worker_machine_type")
    parser.add_argument("--disk_size_gb")
    parser.add_argument("--number_of_worker_harness_threads", dest="threads")
    parser.add_argument("--flexrs_goal")
    for option, name in (
        ("resource_hint", "hints"),
        ("experiment", "experiments"),
        ("dataflow_service_option", "services"),
    ):
        parser.add_argument(f"--{option}", f"--{option}s", dest=name, action="append", default=[])
    try:
        flags, _ = parser.parse_known_args(list(beam_flags))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}") from None
    for name in ("experiments", "services"):  # Beam takes several in one flag, with commas
        setattr(
            flags,
            name,
            [part.strip() for text in getattr(flags, name) for part in text.split(",")],
        )
    return flags


def runner_name(runner: str | None) -> str:
    """Short name of a runner in lower case, as ``dataflowrunner`` for ``a.b.DataflowRunner``."""
    name = (runner or "DirectRunner").rsplit(".")[-1].lower()
    return name if name.endswith("runner") else f"{name}runner"


def runner_of_flags(beam_flags: Sequence[str]) -> str:
    """The name of the runner that flags of Beam choose, as from :func:`runner_name`."""
    return runner_name(_parse(beam_flags).runner)


def is_dataflow(runner: str | None) -> bool:
    """Whether a runner, by whatever name, is Dataflow's."""
    return runner_name(runner) in ("dataflowrunner", "testdataflowrunner")


def _check_services(gpu: GpuOptions, flags: argparse.Namespace) -> None:
    """Refuse what Dataflow does not do together with a GPU, or with this way of sharing it."""
    modes = [*flags.services, *flags.experiments]
    if any(mode.startswith("worker_accelerator") for mode in modes):
        raise ConfigError(
            f"--gpu={gpu.gpu} and worker_accelerator=… are both given, and say the same thing "
            "twice or two different things. Keep one of them."
        )
    if flags.hints:
        raise ConfigError(
            f"--resource_hints={flags.hints[0]} with --gpu={gpu.gpu}: hints turn on right fitting, "
            "which Dataflow does not combine with worker_accelerator, and which ignores "
            "--machine_type. Remove the hints or --gpu."
        )
    if flags.flexrs_goal is not None or "flexible_resource_scheduling" in modes:
        raise ConfigError(
            f"FlexRS has no GPUs: remove --flexrs_goal, or remove --gpu={gpu.gpu} and run on CPUs"
        )
    if any(mode.startswith("disable_runner_v2") for mode in modes):
        raise ConfigError(
            f"--gpu={gpu.gpu} needs Dataflow's Runner v2: remove the experiment disable_runner_v2"
        )
    if gpu.sharing != "one-model" and _ONE_PROCESS in modes:
        raise ConfigError(
            f"--gpu_sharing={gpu.sharing} runs a process per core, the experiment {_ONE_PROCESS} "
            "one per worker. Remove the experiment, or use --gpu_sharing=one-model."
        )
    if gpu.sharing == "one-model" and "use_multiple_sdk_containers" in modes:
        raise ConfigError(
            "--gpu_sharing=one-model runs one process per worker, the experiment "
            "use_multiple_sdk_containers one per core. Remove the experiment, or use "
            "--gpu_sharing=mps."
        )
    if gpu.sharing == "mps" and flags.threads is not None:
        raise ConfigError(
            f"--number_of_worker_harness_threads={flags.threads} with --gpu_sharing=mps: "
            "Dataflow's MPS excludes flags that restrict parallelism. Remove it, and choose a "
            "machine of as many cores as you want processes."
        )
    if gpu.sharing == "mps" and "enable_prime" in modes:
        raise ConfigError(
            "--gpu_sharing=mps: Dataflow Prime has no MPS. Remove enable_prime, or use another "
            "sharing."
        )


def _check_machine(gpu: GpuOptions, machine: str) -> None:
    description = _GPUS[gpu.gpu]
    machines = description.machines[gpu.count]
    expected = _either(machines)
    if description.n1_cores is not None:
        most = description.n1_cores[gpu.count]
        expected = f"an N1 machine of up to {most} cores, such as {machines[0]}"
        n1 = re.fullmatch(
            r"n1-(?:standard|highmem|highcpu)-(\d+)|(?:n1-)?custom-(\d+)-\d+(?:-ext)?", machine
        )
        fits = n1 is not None and int(n1[1] or n1[2]) <= most
    else:  # a custom G2 machine has another amount of memory than the standard one of its cores
        fits = re.sub(r"g2-custom-(\d+)-\d+", r"g2-standard-\1", machine) in machines
    if not fits:
        raise ConfigError(
            f"--machine_type={machine} does not have {gpu.count} {gpu.gpu}: Dataflow could not "
            f"start the workers. Expected {expected}. Remove --machine_type for {machines[0]}, or "
            "name a machine that fits."
        )


def _either(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
