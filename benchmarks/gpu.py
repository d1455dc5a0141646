"""What a GPU gets through, and what the loop around the network costs there: ``make bench-gpu``.

It ends within eight minutes whatever the GPU: each section has a share of the time that is left,
measures less where that does not do, and says what it left out. Writes
``benchmarks/results/gpus/CARD.json`` after every section, so that what was measured stays if it is
stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.devices import kind_of
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job
from beam_inference.engines.devices import device_peak, find_accelerator, start_device_peak
from beam_inference.engines.loading import load_predictor
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.protocol import Encoding
from beam_inference.errors import DeviceOutOfMemory
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.place import Place
from beam_inference.launch.planned_job import NetworkNeeds, plan_job
from beam_inference.launch.prepare import prepare
from beam_inference.operators.normalize import unit
from beam_inference.training.config import parse_training
from beam_inference.training.trainer import train
from beam_inference.worker.chunk_inference import ChunkInference
from beam_inference.worker.predict import plan_array
from beam_inference.worker.worker import Worker
from benchmarks.bench import write_input, write_voxels
from benchmarks.gpu_table import tabulate
from benchmarks.measure import machine, ratio_of_pairs

RESULTS = Path(__file__).parent / "results" / "gpus"
NETWORKS = Path(__file__).with_name("networks.py")
BUDGET_SECONDS = 450.0
"""Of eight minutes; the rest is for imports, and for a call that cannot be cut short."""

UINT8 = Encoding(np.dtype("uint8"), (0.0, 1.0))
CHANNELS = 3

CALLS = 4
"""Of the bare network that are timed together: one alone would show how late its start is."""


@dataclass(frozen=True)
class Target:
    """A device to measure, as functions of values.

    Attributes:
        name: of the device.
        device: as ``inference.device`` names it.
        wrap: makes what is measured of a predictor on that device.
        synchronize: waits until the device has done all that it was told.
        start_peak: returns bytes in use now, from which ``peak`` counts.
        peak: the most bytes in use since then; 0 where that is not known.
        record: has the device keep what an action tells it to do, and returns what has it do that
            again; None where there is no such thing.
    """

    name: str
    device: str
    wrap: Callable[[Predictor], Predictor]
    synchronize: Callable[[], None]
    start_peak: Callable[[], int]
    peak: Callable[[], int]
    record: Callable[[Callable[[], object]], Callable[[], None]] | None = None


def as_it_is(predictor: Predictor) -> Predictor:
    """Return the predictor: a real device is measured as it is."""
    return predictor


def target_of(device: str) -> Target:
    """The accelerator of a kind, through PyTorch."""
    import torch

    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", lambda: device)()
    return Target(
        name=name,
        device=device,
        wrap=as_it_is,
        synchronize=torch.accelerator.synchronize,
        start_peak=partial(start_device_peak, device),
        peak=partial(device_peak, device),
        record=record_graph if kind_of(device) == "cuda" else None,
    )


def record_graph(action: Callable[[], object]) -> Callable[[], None]:
    """Record a CUDA graph of what an action has the GPU do, and return what launches it.

    The action is done beforehand on another stream, as PyTorch's documentation of graphs asks for.
    """
    import torch

    here = torch.accelerator.current_stream()
    beside = torch.Stream(here.device)
    beside.wait_stream(here)
    with beside:
        for _ in range(3):
            action()
    here.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


@dataclass(frozen=True)
class Scale:
    """How large things are: real ones, or tiny ones for a test.

    Attributes:
        network: factory in ``networks.py`` of the first sections.
        patch: its patches, overlapping by a quarter.
        chunks: of the whole job, along each axis; a chunk is two patches along each.
        copied: a volume of uint8, whose copies are timed.
        kits_network: factory of the KiTS19-like section.
        kits_patch: its patches, overlapping by half.
        kits_volumes: volumes for it, the largest first: that is taken which the time does for.
        batches: sizes of batches to sweep.
        repeats: of each measurement, at most.
        trained: samples of a step of a training.
        steps: of a short and of a long training, whose difference is what a step takes.
    """

    network: str
    patch: Zyx
    chunks: Zyx
    copied: Zyx
    kits_network: str
    kits_patch: Zyx
    kits_volumes: tuple[Zyx, ...]
    batches: tuple[int, ...]
    repeats: int
    trained: int
    steps: tuple[int, int]


FULL = Scale(
    network="residual",
    patch=(16, 96, 96),
    chunks=(4, 3, 3),
    copied=(256, 1024, 1024),
    kits_network="plain",
    kits_patch=(128, 128, 128),
    kits_volumes=((256, 256, 256), (192, 192, 192), (128, 128, 128)),
    batches=(1, 2, 4, 8, 16),
    repeats=5,
    trained=8,
    steps=(20, 220),
)


@dataclass
class Budget:
    """The time that is left, and what was left out for want of it.

    Attributes:
        deadline: of the section under way, by the clock.
        cut: what the section under way has left out.
    """

    deadline: float
    clock: Callable[[], float] = time.monotonic
    cut: list[str] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        """Seconds until the section's deadline."""
        return self.deadline - self.clock()

    def allows(self, what: str, seconds: float = 0.0) -> bool:
        """Whether there is time for something; it is noted as left out if there is none."""
        if self.seconds_left > seconds:
            return True
        self.cut.append(what)
        return False


@dataclass(frozen=True)
class Bench:
    """What a section is given: the device, the sizes and the time."""

    target: Target
    scale: Scale
    budget: Budget

    def seconds(self, action: Callable[[], object], what: str) -> float:
        """The median of the times of an action after a warm-up, as often as the time allows."""
        self.time(action)
        times = [self.time(action)]
        while len(times) < self.scale.repeats and self.budget.seconds_left > times[-1]:
            times.append(self.time(action))
        if len(times) < self.scale.repeats:
            self.budget.cut.append(f"{what}: {len(times)} of {self.scale.repeats} repeats")
        return median(times)

    def time(self, action: Callable[[], object]) -> float:
        """Seconds until the device has done an action."""
        self.target.synchronize()
        start = time.perf_counter()
        action()
        self.target.synchronize()
        return time.perf_counter() - start


def job(
    bench: Bench, network: str, patch: Zyx, overlap: Zyx, chunk: Zyx, **inference: object
) -> JobConfig:
    """A job for the device, over the volume ``in`` of the folder that it is parsed in."""
    values = {
        "input": {"path": "/nowhere/in"},
        "output": {"path": "/nowhere/out", "dtype": "uint8", "block_shape": list(chunk)},
        "model": {
            "path": f"{NETWORKS}:{network}",
            "output_channels": CHANNELS,
            "activation": "sigmoid",
            "normalize": "unit",
        },
        "inference": {
            "patch_shape": list(patch),
            "patch_overlap": list(overlap),
            "chunk_shape": list(chunk),
            "device": bench.target.device,
            "engine": "torch",
            "threads": 1,
            "strategy": "recompute",
            **inference,
        },
    }
    return parse_job(values, Path.cwd())


def chunk_shape(bench: Bench) -> Zyx:
    """Chunks of the first sections: two patches along each axis."""
    z, y, x = bench.scale.patch
    return (2 * z, 2 * y, 2 * x)


def small_job(bench: Bench, **inference: object) -> JobConfig:
    """The job of the first sections."""
    z, y, x = bench.scale.patch
    overlap = (z // 4, y // 4, x // 4)
    return job(bench, bench.scale.network, (z, y, x), overlap, chunk_shape(bench), **inference)


def predictor_of(bench: Bench, config: JobConfig) -> Predictor:
    """The network of a job on the device that is measured."""
    return bench.target.wrap(load_predictor(config.model, config.inference))


def random_voxels(shape: Zyx) -> NDArray[np.uint8]:
    """A cutout of one channel."""
    return np.random.default_rng(0).integers(0, 256, (1, *shape), dtype=np.uint8)


def forward(predictor: Predictor, config: JobConfig, calls: int) -> Callable[[], None]:
    """So many calls of the bare network on one batch, which is on the device already."""
    with predictor.device.session():
        uploaded = upload_batch(predictor, config)

    def run() -> None:
        with predictor.device.session():
            for _ in range(calls):
                predictor.predict(uploaded)

    return run


def upload_batch(predictor: Predictor, config: JobConfig) -> Any:
    """Bring a batch of random voxels to the device."""
    shape = (config.inference.patches_per_call, 1, *config.inference.patch_shape)
    return predictor.device.upload(np.random.default_rng(0).random(shape, np.float32))


def seconds_per_call(bench: Bench, predictor: Predictor, config: JobConfig, what: str) -> float:
    """Seconds of the bare network for a batch, of a few calls at a time."""
    return bench.seconds(forward(predictor, config, CALLS), what) / CALLS


def chunk(predictor: Predictor, config: JobConfig, volume: Zyx) -> tuple[Callable[[], object], int]:
    """One volume as one chunk, from the uint8 cutout to the uint8 core; and its network calls."""
    work = plan_array(volume, config).work(0)
    cutout = random_voxels(work.input_box.shape)
    normalize = unit(cutout.dtype)
    batch_size = config.inference.patches_per_call

    def infer() -> object:
        inference = ChunkInference(predictor, normalize, CHANNELS, batch_size, 1.0)
        return inference.infer(inference.start_upload(cutout, work.input_box), work, UINT8)

    return infer, -(-work.patch_count // batch_size)


def measure_loop(bench: Bench) -> dict[str, Any]:
    """A chunk over its forward passes alone, in turn."""
    config = small_job(bench)
    predictor = predictor_of(bench, config)
    infer, calls = chunk(predictor, config, chunk_shape(bench))
    bare = forward(predictor, config, calls)
    pairs: list[tuple[float, float]] = []
    for repeat in range(bench.scale.repeats + 1):
        if repeat > 1 and not bench.budget.allows(f"repeats from {repeat} on", sum(pairs[-1])):
            break
        pairs.append((bench.time(infer), bench.time(bare)))
    return ratio_of_pairs(pairs[1:]) | {"calls": calls}


def measure_job(bench: Bench) -> dict[str, Any]:
    """A worker over a volume on disk: idle share of the device, voxels per second, peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        small = small_job(bench)
        shape = chunk_shape(bench)
        z, y, x = (n * m for n, m in zip(shape, bench.scale.chunks, strict=True))
        write_input(Path(folder), (z, y, x))
        values = small.model_dump(mode="json")
        values["input"]["path"] = f"{folder}/in"
        values["output"]["path"] = f"{folder}/out"
        config = parse_job(values, Path(folder))
        launch = prepare(config)
        resolved = launch.read_job()
        predictor = predictor_of(bench, resolved.config)
        call = seconds_per_call(bench, predictor, resolved.config, "forward passes")
        worker = Worker(launch, predictor=predictor)
        chunks = range(resolved.plan.chunks.count)
        calls = resolved.plan.work(0).patch_count
        most = max(1, int(bench.budget.seconds_left / (2 * calls * call)))
        if most < len(chunks):
            bench.budget.cut.append(f"{most} of {len(chunks)} chunks")
        before = bench.target.start_peak()
        for _ in worker.infer_chunks(chunks[:most]):
            pass
        peak = max(0, bench.target.peak() - before)
        receipts = worker.state.read_receipts(chunks[:most])
        needs = NetworkNeeds.of_engine("torch", 1, resolved.working_set_bytes)
        projected = plan_job(config).memory(Place(threads_per_process=1), needs).device_bytes
    ends = [each.finished_at.timestamp() - each.seconds["write"] for each in receipts]
    first = min(end - each.seconds["infer"] for end, each in zip(ends, receipts, strict=True))
    seconds = max(ends) - first
    in_turn = sum(each.seconds["infer"] for each in receipts)
    patches = sum(resolved.plan.work(index).patch_count for index in chunks[:most])
    voxels = sum(resolved.plan.work(index).core_box.size for index in chunks[:most])
    return {
        "idle share": round(1 - in_turn / seconds, 3),
        "without a forward pass": round(1 - patches * call / seconds, 3),
        "chunks": len(receipts),
        "voxels per second": round(voxels / seconds),
        "peak_bytes": peak,
        "projected_bytes": projected,
        "peak / projection": round(peak / projected, 3) if peak else None,
    }


def measure_copies(bench: Bench) -> dict[str, Any]:
    """Bytes per second up and down, and what an upload costs the forward passes beside it.

    As in a job, another thread than that of the forward passes begins the upload.
    """
    config = small_job(bench)
    predictor = predictor_of(bench, config)
    device = predictor.device
    array = random_voxels(bench.scale.copied)
    z, y, x = bench.scale.copied
    with device.session():
        resident = device.empty((1, z // 4, y, x))  # as many bytes
        resident[...] = 0

    def upload() -> None:
        with device.session():
            device.begin_upload(array)()

    def download() -> None:
        with device.session():
            device.download(resident)()

    up = bench.seconds(upload, "uploads")
    down = bench.seconds(download, "downloads")
    call = seconds_per_call(bench, predictor, config, "forward passes")
    # twice as long as the upload, which therefore can be hidden behind them
    bare = forward(predictor, config, max(CALLS, round(2 * up / call)))

    def beside() -> None:
        sent = readers.submit(device.begin_upload, array)
        bare()
        with device.session():
            sent.result()()

    alone = bench.seconds(bare, "forward passes alone")
    with ThreadPoolExecutor(1) as readers:
        both = bench.seconds(beside, "forward passes and an upload")
    return {
        "bytes": array.nbytes,
        "uploaded bytes per second": round(array.nbytes / up),
        "downloaded bytes per second": round(resident.numel() * 4 / down),
        "share of an upload that is hidden": round(1 - (both - alone) / up, 2),
    }


def measure_batches(bench: Bench) -> dict[str, Any]:
    """Patches per second by size of batch and layout of memory."""
    rows: dict[str, Any] = {}
    for layout in ("contiguous", "channels_last"):
        for batch in bench.scale.batches:
            name = f"{layout}, {batch}"
            if not bench.budget.allows(name):
                continue
            config = small_job(bench, batch_size=batch, memory_format=layout)
            try:
                predictor = predictor_of(bench, config)
                seconds = seconds_per_call(bench, predictor, config, name)
            except DeviceOutOfMemory:
                rows[name] = "out of memory"
                break
            rows[name] = round(batch / seconds, 2)
    return {"patches per second": rows}


def measure_precisions(bench: Bench) -> dict[str, Any]:
    """Patches per second by precision, of the smallest and the largest batch; and what it costs.

    ``recorded`` are calls that the device repeats by itself: what the others lose to being told
    each operation.
    """
    names = ["float32", "bfloat16", "float16"]
    if kind_of(bench.target.device) == "cuda":
        names.insert(1, "tf32")
    batch = np.random.default_rng(1).random((1, 1, *bench.scale.patch), np.float32)
    exact: NDArray[np.float32] | None = None
    rows: dict[str, Any] = {}
    for name in names:
        if not bench.budget.allows(name):
            continue
        predictor = predictor_of(bench, small_job(bench, precision=name))
        with predictor.device.session():
            answer = predictor.predict(predictor.device.upload(batch))
            values = np.array(predictor.device.download(predictor.device.copy(answer))())
        exact = values if exact is None else exact
        difference = float(f"{np.sqrt(((values - exact) ** 2).mean()):.2g}")
        rows[name] = {"root mean square difference": difference}
        for size in (bench.scale.batches[0], bench.scale.batches[-1]):
            config = small_job(bench, precision=name, batch_size=size)
            seconds = seconds_per_call(bench, predictor, config, f"{name}, {size}")
            rows[name][f"patches per second, {size}"] = round(size / seconds, 2)
            if bench.target.record is not None:
                recorded = seconds_recorded(bench, bench.target.record, predictor, config)
                rows[name][f"patches per second, {size}, recorded"] = round(size / recorded, 2)
    return rows


def seconds_recorded(
    bench: Bench,
    record: Callable[[Callable[[], object]], Callable[[], None]],
    predictor: Predictor,
    config: JobConfig,
) -> float:
    """Seconds of the bare network for a batch, where the device repeats what it was told once."""
    with predictor.device.session():
        uploaded = upload_batch(predictor, config)
        repeat = record(lambda: predictor.predict(uploaded))

        def run() -> None:
            for _ in range(CALLS):
                repeat()

        return bench.seconds(run, "recorded calls") / CALLS


def measure_kits(bench: Bench) -> dict[str, Any]:
    """Voxels per second as MLPerf's KiTS19 has them: large patches, half overlap, a plain U-Net.

    The largest volume is taken that the time does for. MLPerf weighs patches by a Gaussian, here
    they are weighed as everywhere in this project; the network has random weights.
    """
    patch = bench.scale.kits_patch
    overlap = (patch[0] // 2, patch[1] // 2, patch[2] // 2)
    rows: dict[str, Any] = {}
    for precision in ("float32", "float16"):
        if not bench.budget.allows(precision):
            continue
        config = job(bench, bench.scale.kits_network, patch, overlap, patch, precision=precision)
        try:
            predictor = predictor_of(bench, config)
            call = seconds_per_call(bench, predictor, config, f"{precision}, forward passes")
            for volume in bench.scale.kits_volumes:
                infer, calls = chunk(predictor, config, volume)
                if bench.budget.allows(f"{precision}, {list(volume)}", 2 * calls * call):
                    seconds = bench.time(infer)
                    rows[precision] = {
                        "volume": list(volume),
                        "calls": calls,
                        "voxels per second": round(volume[0] * volume[1] * volume[2] / seconds),
                        "loop / forward": round(seconds / (calls * call), 3),
                    }
                    break
        except DeviceOutOfMemory:
            rows[precision] = "out of memory"
    return rows


def labels_of_cubes(shape: Zyx) -> NDArray[np.uint32]:
    """Labels of one channel: cubes of eight voxels, each an object."""
    cubes = [-(-n // 8) for n in shape]
    labels = np.arange(1, math.prod(cubes) + 1, dtype=np.uint32).reshape(1, *cubes)
    for axis in (1, 2, 3):
        labels = labels.repeat(8, axis)
    z, y, x = shape
    return labels[:, :z, :y, :x]


def measure_training(bench: Bench) -> dict[str, Any]:
    """Steps of a training in bfloat16, of affinities of labels on disk, and the wait for samples.

    Samples are made by threads of the process alone, as by default.
    """
    device = kind_of(bench.target.device)
    if device not in ("cpu", "cuda"):
        return {}  # no other trains
    spent: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        z, y, x = bench.scale.patch
        write_input(folder, (8 * z, 6 * y, 6 * x))
        write_voxels(folder / "labels", labels_of_cubes((8 * z, 6 * y, 6 * x)))
        fewer, more = bench.scale.steps
        for steps in (fewer, fewer, more):  # the first one warms up
            values = {
                "volumes": [{"image": "in", "labels": "labels"}],
                "output": f"training {len(spent)}",
                "target": {"kind": "affinities"},
                "network": {"path": f"{NETWORKS}:{bench.scale.network}"},
                "precision": "bfloat16",
                "patch_shape": [z, y, x],
                "batch_size": bench.scale.trained,
                "steps": steps,
                "checkpoint_every": steps,
                "split": {"validation": 0, "test": 0},
                "device": device,
            }
            begun = time.monotonic()
            done = train(parse_training(values, folder))
            seconds = time.monotonic() - begun
            spent.append((seconds, done.waiting_share * seconds))
    _, (short, waited), (long, waited_long) = spent
    return {
        "samples of a step": bench.scale.trained,
        "steps per second": round((more - fewer) / (long - short), 2),
        "share of a step in which samples are waited for": round(
            (waited_long - waited) / (long - short), 3
        ),
    }


SECTIONS: dict[str, tuple[float, Callable[[Bench], dict[str, Any]]]] = {
    "loop / forward": (0.12, measure_loop),
    "job": (0.2, measure_job),
    "copies": (0.1, measure_copies),
    "batches and layouts": (0.3, measure_batches),
    "precisions": (0.35, measure_precisions),
    "training": (0.4, measure_training),
    "KiTS19-like": (1.0, measure_kits),
}
"""Sections in their order, each with its share of the time that is left when it begins."""


def dollars_per_teravoxel(voxels_per_second: float, dollars_per_hour: float) -> float:
    """What 10^12 voxels cost on a machine of a price that is busy all the time."""
    return float(f"{dollars_per_hour / 3600 / voxels_per_second * 1e12:.4g}")


def add_prices(results: dict[str, Any], prices: Sequence[float]) -> dict[str, Any]:
    """Prices per teravoxel of what has voxels per second, by dollars per hour."""
    rates = {}
    if "job" in results:
        rates["job"] = results["job"]["voxels per second"]
    for precision, row in results.get("KiTS19-like", {}).items():
        if "voxels per second" in row:
            rates[f"KiTS19-like, {precision}"] = row["voxels per second"]
    return {
        f"{price:g} $/hour": {
            name: dollars_per_teravoxel(rate, price) for name, rate in rates.items()
        }
        for price in prices
    }


def measure(
    target: Target,
    scale: Scale,
    prices: Sequence[float],
    path: Path,
    seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Measure all sections within a time, and write them.

    Args:
        target: the device.
        scale: how large things are.
        prices: of the machine, in dollars per hour.
        path: of the JSON file, which is written after each section.
        seconds: that all sections together may take.
        clock: tells seconds.

    Returns:
        The results; by section, ``cut`` says what was left out, and ``failed`` with what error one
        ended.
    """
    end = clock() + seconds
    results: dict[str, Any] = {"machine": machine("torch") | {"gpu": target.name}}
    cut: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    for name, (share, section) in SECTIONS.items():
        now = clock()
        budget = Budget(now + share * (end - now), clock)
        if budget.allows("all of it"):
            try:
                results[name] = section(Bench(target, scale, budget))
            except Exception as error:  # of any kind: the other sections are worth having
                failed[name] = f"{type(error).__name__}: {error}"
        if budget.cut:
            cut[name] = budget.cut
        results.pop("dollars per teravoxel", None)  # it stands after the sections
        results["dollars per teravoxel"] = add_prices(results, prices)
        results |= {"cut": cut, "failed": failed, "seconds": round(seconds - (end - clock()), 1)}
        path.write_text(json.dumps(results, indent=1) + "\n")
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this machine's GPU, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dollars-per-hour", type=float, nargs="*", default=[], help="prices of the machine"
    )
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="at most so many")
    parser.add_argument("--output", type=Path, help=f"JSON file, instead of {RESULTS}/CARD.json")
    args = parser.parse_args(arguments)
    device = find_accelerator()
    if device is None:
        raise SystemExit(
            "PyTorch sees no GPU on this machine, so there is nothing to measure. Install a build "
            "of PyTorch for the GPU, or look whether its driver is there."
        )
    target = target_of(device)
    path = args.output or RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', target.name.lower())}.json"
    results = measure(target, FULL, args.dollars_per_hour, path, args.seconds)
    print(tabulate([results]))
    if results["failed"]:
        raise SystemExit(f"failed: {', '.join(results['failed'])}; the table says why")


if __name__ == "__main__":
    main()
