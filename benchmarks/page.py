"""``docs/performance.md`` from the committed results: ``python -m benchmarks.page``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_table import tabulate
from benchmarks.measure import take_no_arguments

RESULTS = Path(__file__).parent / "results"
GPUS = sorted((RESULTS / "gpus").glob("*.json"))
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

_PAGE = """\
# What it costs

This page is written from `benchmarks/results`, which `make bench` and `make bench-peers` measure
again. A ratio with a range is the median of runs taken in turn on one machine: below 1 means less
time than the reference. [Scale](scale.md) shows what a job of many chunks costs beyond its network.

{machine}.

## Goals

{goals}

## Against the bare network

The residual U-Net of `beam_inference.residual_unet` with its default widths, patches of 16×96×96 at
an overlap of a quarter, uint8 in and out, three channels.

| | ratio |
|---|---|
{against_forward}
| two processes of one thread at once / one alone, seconds per patch (OpenVINO) | {processes} |
| two processes of one thread / one of two threads, seconds, same patches (OpenVINO) | {threads} |
| peak memory of a worker / what `plan` projects (PyTorch) | {projection} |

{idle}

The share of the time from the first call of the network to the last in which nothing is computed,
with a network that sleeps and a store that answers late (`python -m benchmarks.latency`):

{latencies}

{startup}

A null network, patches of 16×64×64, 16×32×32 and 16×16×16. The memory beside each chunk's arrays
counts most where the arrays are small:

| | |
|---|---|
| a worker's peak memory, volumes of 144, 1,152 and 3,888 chunks of 64×128×128 | {memory} |
| the same, volumes of 216, 1,728 and 5,832 chunks of 32×64×64 | {small_memory} |
| the same, volumes of 1,296, 10,368 and 34,992 chunks of 16×16×16 | {tiny_memory} |
| seconds per voxel, 8 and 27 times the volume / the volume once, for each size | {time} |
| durable receipts per second, on a local disk | {receipts} |

{gpu}

{scaling}{flink}{cohort}{partition}## Objects in volumes

{objects}

{copies}

{integers}

{storage}

## Against other tools

{task}.

The volume is in memory. Our input is uint8, theirs float32, and the result is float32. Time is ours
/ theirs. Memory is the peak over the float32 result, beyond what the process holds between runs.

{peer_versions}.

| | time, null network | time, residual U-Net | memory, null network |
|---|---|---|---|
| beam-inference | 1 | 1 | {our_memory}; {uint8} of uint8 |
{peers}

With the U-Net, OpenVINO runs our network, because beam-inference chooses it by itself where it is
installed. The other tools run theirs in PyTorch's eager mode. nnU-Net sums in float16.

## A whole job against chunkflow

The same volume in eight chunks of 26×160×160, from a precomputed volume on disk to one of uint8,
with the U-Net. chunkflow grows each chunk by the overlap and crops, as our `crop` does. Start-up is
left out on both sides.

| ours | time, ours / theirs |
|---|---|
{jobs}

## A results folder against nnU-Net

From the image on disk to labels on disk ([I have an nnU-Net model](nnunet.md)), with the engine
that beam-inference chooses by itself. {nnunet}

{seams}

{estimates}

The memory that PyTorch leaves free on its heap differs from process to process by a tenth of the
whole. The projection is for the worst case that was seen.
"""

_STORAGE_LIBRARIES = ("tensorstore", "cloud-volume", "neuroglancer")

_STORAGE_SECONDS = {
    "write_seconds": "write",
    "read_seconds": "read",
    "block_seconds": "a block",
    "cloud_volume_seconds": "cloud-volume",
}
"""Headings of times, by their key in the results."""

_STARTUP_GOALS = {
    "`run` with nothing to do": 0.5,
    "`status`": 0.2,
    "`plan`": 0.3,
    "`run` until its first chunk": 1.5,
}
"""Largest ratios that are aimed at of the time that processes take to start."""


def page() -> str:
    """The page's text."""
    job, peers = (json.loads((RESULTS / name).read_text()) for name in ("job.json", "peers.json"))
    null = peers["null network"]
    unet = peers["residual U-Net"]
    machine = job["machine"]
    growths = [job[name] for name in ("growth", "growth, small chunks", "growth, tiny chunks")]
    memory = null["peak_bytes_over_float32_output"]
    versions = ", ".join(f"{name} {version}" for name, version in peers["peers"].items())
    libraries = ", ".join(
        f"{name} {machine[name]}" for name in ("torch", "openvino", "onnxruntime")
    )
    return _PAGE.format(
        machine=(
            f"{machine['cores']} cores of {machine['processor']}, Python {machine['python']}, "
            f"{libraries}"
        ),
        goals=_goals(job, peers, growths),
        against_forward=_against_forward(job, "OpenVINO"),
        processes=_ratio(job["two processes / one"]),
        threads=_ratio(job["two processes / one"]["one of two threads"]),
        idle=_idle(job, "a U-Net of widths 4 and 8"),
        latencies=_latencies(),
        nnunet=_nnunet(),
        startup=_startup(),
        gpu=_gpu(),
        scaling=_scaling(),
        flink=_flink(),
        cohort=_cohort(),
        partition=_partition(),
        objects=_objects(),
        copies=_copies(),
        integers=_integers(),
        storage=_storage(),
        memory=_megabytes(growths[0]),
        small_memory=_megabytes(growths[1]),
        tiny_memory=_megabytes(growths[2]),
        time="; ".join(
            ", ".join(f"{row[name]['seconds per voxel']:.2f}" for name in ("8x", "27x"))
            for row in growths
        ),
        projection=job["peak memory / projection"]["ratio"],
        receipts=f"{job['receipts']['written_per_second']:,}",
        task=peers["task"],
        peer_versions=f"Measured against {versions}",
        jobs="\n".join(
            _row(f"`{seams}`", _ratio(row)) for seams, row in peers["whole job"].items()
        ),
        uint8=peers["null network, uint8"],
        seams=_seams(),
        estimates=_estimates(),
        our_memory=memory["beam-inference"],
        peers="\n".join(
            f"| {tool} | {_ratio(row)} | {_ratio(unet['time'][tool])} | {memory[tool]} |"
            for tool, row in null["time"].items()
        ),
    )


def _goals(job: dict[str, Any], peers: dict[str, Any], growths: list[dict[str, Any]]) -> str:
    """What was to be reached, and was or was not."""
    null = peers["null network"]
    grown = [row["27x"]["memory"] for row in growths]
    megabytes = [
        f"{(row['27x']['peak_bytes'] - row['1x']['peak_bytes']) / 1e6:.1f}" for row in growths
    ]
    over_output = null["peak_bytes_over_float32_output"]["beam-inference"]
    rows: list[tuple[str, float, list[float], str]] = [
        (
            "a forward pass, OpenVINO / PyTorch's eager mode",
            0.60,
            [job["engines"]["openvino / eager"]["ratio"]],
            "",
        ),
        (
            "a chunk, from cutout to core / its forward passes",
            1.03,
            [job["loop / forward"]["ratio"]],
            "",
        ),
        (
            "the loop without a network / MONAI's",
            0.5,
            [null["time"]["MONAI"]["ratio"]],
            ("by profile, mostly accumulation, then copies for the network, then weighting"),
        ),
        ("peak memory / float32 output", 1.2, [over_output], ""),
        ("the same, of uint8", 0.5, [peers["null network, uint8"]], "a volume 13 patches deep"),
        (
            "a whole job, from its first chunk on / forward passes",
            1.05,
            [job["job / forward"]["ratio"]],
            f"from {job['job / forward']['min']} to {job['job / forward']['max']}; "
            "in so short a job, what follows its last chunk counts",
        ),
        ("a whole job in `crop` / chunkflow", 0.55, [peers["whole job"]["crop"]["ratio"]], ""),
        (
            "two processes / one, seconds per patch",
            1.053,
            [job["two processes / one"]["ratio"]],
            "",
        ),
        (
            "a worker's memory, 27 times the volume / the volume once",
            1.10,
            grown,
            f"three sizes of chunks; by {_listed(megabytes)} MB, ever more slowly",
        ),
        (
            "share of the time without computation, slow store",
            0.05,
            [job["idle"]["idle share"]],
            "on a CPU",
        ),
    ]
    startup = json.loads((RESULTS / "startup.json").read_text())["rows"]
    rows += [
        (f"{name}, over importing the libraries", goal, [startup[name]["ratio"]], "")
        for name, goal in _STARTUP_GOALS.items()
    ]
    nnunet = json.loads((RESULTS / "nnunet.json").read_text())
    remark = (
        "its multiplications alone, as products of matrices on the same cores: "
        f"{_products_of_matrices(nnunet) / nnunet['time']['against_seconds']:.3f}"
    )
    name = "an nnU-Net folder, image to labels / nnU-Net"
    rows.append((name, 0.6, [nnunet["time"]["ratio"]], remark))
    rows += _goals_of_objects()
    packed = json.loads((RESULTS / "packed_blocks.json").read_text())["commands"]
    remark = "`run`, `convert`, `levels`: what is added is unpacking, on cores that are busy anyway"
    found = [packed[command]["ratio"] for command in ("run", "convert", "levels")]
    rows.append(("a volume of .gz blocks / the same unpacked", 1.3, found, remark))
    cards = [json.loads(path.read_text()) for path in GPUS]
    kits = _listed(
        f"{row['loop / forward']:.3f}" for card in cards for row in card["KiTS19-like"].values()
    )
    remark = (
        "one patch of 16×96×96 a call, for which the host tells the GPU as long as it computes; "
        f"patches of 128³ take {kits}"
    )
    loops = [card["loop / forward"]["ratio"] for card in cards]
    rows.append(("a chunk / its forward passes, on a GPU", 1.05, loops, remark))
    idle = [card["job"]["idle share"] for card in cards]
    rows.append(("share of the time without computation, on a GPU", 0.05, idle, ""))
    lines = [_row("", "at most", "measured", "", ""), "|---|---|---|---|---|"]
    for what, goal, found, remark in rows:
        told = _listed(f"{each:.3f}" for each in found) if len(found) > 1 else f"{found[0]:.3f}"
        lines.append(
            _row(what, f"{goal:.3g}", told, "met" if max(found) <= goal else "**missed**", remark)
        )
    lines.append(
        _row(
            "blending / the same in float64",
            "1e-6",
            "in tests",
            "met",
            "[what is promised](guarantees.md)",
        )
    )
    return "\n".join(lines)


def _against_forward(job: dict[str, Any], engine: str) -> str:
    """Rows of the engines, the loop and the whole job."""
    lines = [_row(f"a forward pass, {name}", _ratio(row)) for name, row in job["engines"].items()]
    loop = job["loop / forward"]
    whole = job["job / forward"]
    lines += [
        _row(
            f"a chunk, from uint8 cutout to uint8 core / its forward passes ({engine})",
            _ratio(loop),
        ),
        _row(
            f"a whole job, from its first chunk to its exit / its forward passes ({engine})",
            _ratio(whole),
        ),
        _row(
            "the same, from its start: imports, conversion and trial",
            _ratio(whole["from start to exit"]),
        ),
    ]
    return "\n".join(lines)


def _idle(job: dict[str, Any], network: str) -> str:
    found = job["idle"]
    seconds = found["seconds per chunk"]
    return (
        f"With {network} and a store that takes 100 ms to answer each request, nothing\n"
        f"was computed for {found['idle share']:.0%} of the time: {found['chunks']} chunks, each "
        f"with {seconds['infer']:.2f} s of computing,\n{seconds['read']:.2f} s of reading and "
        f"{seconds['write']:.2f} s of writing."
    )


def _latencies() -> str:
    """Idle shares of a network that sleeps, by what the store and the network take."""
    rows = json.loads((RESULTS / "latency.json").read_text())["rows"]
    computing = sorted({(row["computing"], row["chunks"]) for row in rows})
    head = " | ".join(f"{chunks} chunks of {seconds:g} s" for seconds, chunks in computing)
    lines = [f"| a request takes | {head} |", "|---" * (1 + len(computing)) + "|"]
    for latency in sorted({row["latency"] for row in rows}):
        of_latency = {
            (row["computing"], row["chunks"]): row["idle share"]
            for row in rows
            if row["latency"] == latency
        }
        cells = " | ".join(f"{of_latency[each]:.1%}" for each in computing)
        lines.append(f"| {latency:g} s | {cells} |")
    return "\n".join(lines)


def _goals_of_objects() -> list[tuple[str, float, list[float], str]]:
    """Goals of labels, as rows of the table."""
    segment, components = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("segment", "components")
    )
    memory = segment["peak_bytes_per_voxel"]
    slowest = min(row["watershed_voxels_per_second"] for row in segment["saturated"].values())
    return [
        (
            "`segment` / waterz, seconds of one core",
            1.0,
            [segment["time"]["ratio"]],
            f"by profile: {_longest(segment['stages'])}",
        ),
        ("its memory / waterz's", 0.5, [memory["beam-inference"] / memory["waterz"]], ""),
        (
            "watershed of saturated affinities, seconds a megavoxel",
            1.0,
            [1e6 / slowest],
            "",
        ),
        (
            "`components` / cc3d with the same reading and writing, seconds of one core",
            1.0,
            [components["time"]["ratio"]],
            f"by profile: {_longest(components['stages'])}",
        ),
    ]


def _objects() -> str:
    """Segmentation against waterz, and components against cc3d."""
    segment, components = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("segment", "components")
    )
    peaks, theirs = (each["peak_bytes_per_voxel"] for each in (segment, components))
    joined, apart = segment["saturated"].values()
    return f"""\
Seconds of the processor, all threads together, in turns; from a volume to a volume in memory, with
the table of objects (`python -m benchmarks.segment` and `benchmarks.components`). waterz and cc3d
hold the whole array, and write no table; cc3d measures the components, too.

| | ratio |
|---|---|
| `segment` / waterz, {segment["voxels"] / 1e6:.1f} megavoxels of FIB-25 | \
{_ratio(segment["time"])} |
| the same, waterz being given our fragments | \
{_ratio(segment["time, waterz of our fragments"])} |
| peak memory, bytes a voxel | {peaks["beam-inference"]} and {peaks["waterz"]} |
| `components` / cc3d, the same reading and writing, \
{components["voxels"] / 1e6:.1f} megavoxels | {_ratio(components["time"])} |
| `components` / cc3d in memory alone | {_ratio(components["time, cc3d in memory"])} |
| peak memory, bytes a voxel | {theirs["beam-inference"]} and {theirs["cc3d"]} |

Most of the time of `segment` is {_longest(segment["stages"])}; of `components`,
{_longest(components["stages"])}.
Stages write for one another what a single process would keep in memory. Others used the machine
meanwhile: with caches that are shared, ratios come out higher and lower by a quarter.

Affinities that are saturated, 0 or 255 everywhere, in millions of voxels per second:

| | fragments | watershed | all stages |
|---|---|---|---|
{_row("255 joins in any case", *_rates(joined))}
{_row("it does not: plateaus fall apart", *_rates(apart))}"""


def _copies() -> str:
    """Pyramids against igneous, and conversions against a plain copy by TensorStore."""
    found = json.loads((RESULTS / "copies.json").read_text())
    pyramid = found["pyramid"]
    peaks = [f"{pyramid[key] / 1e6:.0f}" for key in ("peak_bytes", "against_peak_bytes")]
    rows = [_row("two scales of a pyramid / igneous", _ratio(pyramid["seconds"]))]
    rows += [
        _row(f"`convert` of raw blocks into {target} / the same by one call", _ratio(row))
        for target, row in found["conversion"].items()
    ]
    return f"""\
## Scales and conversions

{found["megavoxels"]:.0f} megavoxels of FIB-25, mirrored, in raw blocks of 64³ on a local disk, in
seconds of the processor, all threads together, without imports (`python -m benchmarks.copies`).
igneous makes its scales in one task, which holds {peaks[1]} MB for our {peaks[0]} MB. TensorStore
copies the array into one of the same description in one call, without windows, receipts or checks
of blocks.

| | ratio |
|---|---|
{chr(10).join(rows)}"""


def _longest(stages: dict[str, float]) -> str:
    """The three stages that take most of the time, with their shares."""
    total = sum(stages.values())
    longest = sorted(stages, key=lambda name: -stages[name])[:3]
    return _listed(f"`{name}` ({stages[name] / total:.0%})" for name in longest)


def _rates(row: dict[str, int]) -> list[str]:
    """Cells of one kind of saturated affinities."""
    keys = ("watershed_voxels_per_second", "all_stages_voxels_per_second")
    return [f"{row['fragments']:,}", *(f"{row[key] / 1e6:.1f}" for key in keys)]


def _scaling() -> str:
    """Rates of many workers over those of one."""
    path = RESULTS / "scaling.json"
    if not path.exists():
        return ""
    results = json.loads(path.read_text())
    names = {"threads": "threads", "local": "processes, local runner", "dask": "processes, Dask"}
    lines = [_row("workers", "rate / ideal", "busy", "ms here", "ms elsewhere", "load")]
    lines.append("|---|---|---|---|---|---|")
    for mode, name in names.items():
        for row in results.get(mode, []):
            milliseconds = row["processor_ms_per_chunk"].values()
            shown = f"{row['workers']} {name}"
            busy = f"{row['busy']:.1%}"
            lines.append(
                _row(
                    shown,
                    f"{row['over_ideal']:.3f}",
                    busy,
                    *map(str, milliseconds),
                    str(row["load_before"]),
                )
            )
    table = "\n".join(lines)
    last = max(results["threads"], key=lambda row: row["workers"])
    most = 1000 * results["machine"]["cores"] / sum(last["processor_ms_per_chunk"].values())
    return f"""\
## Many workers

A network that sleeps for {results["seconds_per_chunk"]:g} s a chunk, on a store that waits for
{results["latency_seconds"]:g} s before each answer, input, output, claims and receipts all in it
(`python -m benchmarks.scaling`): the rate of N workers over N times that of one, while all are at
work; the share of their time in which the network was at work; and the processor's time for each
chunk in the process that measures, and in the store and the other processes, all of which share
{results["machine"]["cores"]} cores. Threads are workers in one process, each with a job opened for
itself. The load is that of the machine before.

{table}

So the rate does not bend up to {last["workers"]} workers. What the last row takes of the processor
would fill these cores at {most:.0f} chunks a second, the store's share included. That no worker is
always at work is the run's length: of so few chunks each is a run of its own, and a worker of one
thread claims, reads and writes between two of them; the local runner has two threads for that.

"""


def _flink() -> str:
    """What Flink costs, against as many local processes."""
    path = RESULTS / "on_flink.json"
    if not path.exists():
        return ""
    results = json.loads(path.read_text())
    cores = results["machine"]["cores"]
    work, batch, quick = (
        results["work"]["flink"],
        results["work"]["batch"],
        results["quick"]["flink"],
    )
    rows = "\n".join(
        f"| {name} | {_ratio(row['rate'])} | {row['first_chunk_later_by']:g} s | {memory} |"
        for name, row, memory in (
            (f"{work['chunks']} chunks of a U-Net", work, _flink_memory(work)),
            ("the same, `--execution_mode_for_batch=BATCH`", batch, _flink_memory(batch)),
            (f"{quick['chunks']:,} chunks of nothing", quick, _flink_memory(quick)),
        )
    )
    return f"""\
## On Flink

Two workers of a Flink cluster against two local processes, on the same {cores} cores, with a job
server that runs already: four JVMs beside them (`make bench-flink`). The rate is from the first
chunk's start to the last one's end, the memory that of the launch and of the workers, in the last
quarter of that time over the first. The load was {results["load_before"]} before.

| | rate, Flink / local | first chunk, later than locally | memory |
|---|---|---|---|
{rows}

"""


def _flink_memory(row: dict[str, Any]) -> str:
    growth = row["memory_last_over_first_quarter"]
    return f"{growth['launch']:.3f}, {growth['workers']:.3f}"


def _cohort() -> str:
    """What it costs that voxels lie in many small volumes."""
    path = RESULTS / "cohort.json"
    if not path.exists():
        return ""
    results = json.loads(path.read_text())
    seconds = results["seconds"]
    two, four = (results[f"half_a_batch_each_{threads}_threads"]["ratio"] for threads in (2, 4))
    return f"""\
## Many volumes

{results["volumes"]} volumes of 96³ voxels in one `run`, against one volume of the same voxels, both
from the command line with start-up, on the local runner with {results["machine"]["cores"]} cores
(`python -m benchmarks.cohort`). Patches are the same in number, and the network sleeps for
{results["milliseconds_per_patch"]:g} ms a patch. The load was {results["load_before"]} before.

| | seconds |
|---|---|
| {results["volumes"]} volumes | {seconds["many"]} |
| one volume | {seconds["one"]} |

So the rate is {results["rate_over_one"]:.2f} of that of one volume. What a volume takes for itself,
to be opened and checked and for its records, does not depend on the network: a faster network makes
the ratio worse.

As many volumes of 56³, each of half the patches that a call of the network takes, took {two:.2f}
times as long as their patches take the network, and {four:.2f} times with four threads
(`--direct_num_workers=4`), start-up included: a call is filled up with patches of other volumes
that wait. With repeats it could not be less than 2.

"""


def _partition() -> str:
    """What a patch takes of each process that shares it, and what exchanges cost."""
    results = json.loads((RESULTS / "partition.json").read_text())
    lines = ["| | undivided | of two | of four | time |", "|---|---|---|---|---|"]
    for row in results["patches"]:
        shares = row["peak_over_undivided"]
        lines.append(
            _row(
                "×".join(map(str, row["patch"])),
                f"{row['undivided_peak_bytes'] / 2**20:.0f} MiB",
                f"{shares['2']:.2f}",
                f"{shares['4']:.2f}",
                _ratio(row["two_processes_over_two_threads"]),
            )
        )
    training = [_row("a step of training", "undivided", "of two", "of four"), "|---|---|---|---|"]
    for row in results["training"]:
        shares = row["peak_over_undivided"]
        training.append(
            _row(
                "×".join(map(str, row["patch"])),
                f"{row['undivided_peak_bytes'] / 2**20:.0f} MiB",
                f"{shares['2']:.2f}",
                f"{shares['4']:.2f}",
            )
        )
    largest = results["patches"][-1]["layers"]
    layers = ["| layers | one process | two | of that, waiting |", "|---|---|---|---|"]
    layers += [
        _row(
            f"`{kind}`",
            f"{row['undivided_seconds']:.2f} s",
            f"{row['divided_seconds']:.2f} s",
            f"{row['waited_seconds']:.2f} s",
        )
        for kind, row in largest.items()
    ]
    return f"""\
## Patches that processes share

The residual U-Net of three channels, run by PyTorch, on one patch
(`python -m benchmarks.partition`): peak memory of the network's arrays in one process, and of it
what each of two and of four processes takes at most; and the time of two processes of one thread
each, which halve x, over that of one process of two threads, in turns. The load was
{results["load_before"]} before.

{chr(10).join(lines)}

The same of the forward and the backward pass of one sample, in
[training](training.md#patches-that-ranks-share):

{chr(10).join(training)}

By layer, seconds for the largest patch. Waiting counts until the other member has sent its border,
or its sums, and so what it is late:

{chr(10).join(layers)}

"""


def _products_of_matrices(nnunet: dict[str, Any]) -> float:
    """Seconds of a run's operations as products of matrices, the fastest use of a processor."""
    bound = nnunet["bound"]
    seconds: float = bound["operations"] / bound["operations_per_second"]
    return seconds


def _nnunet() -> str:
    """Time and memory of whole results folders, against nnU-Net."""
    results = json.loads((RESULTS / "nnunet.json").read_text())
    peaks = results["peak_bytes"]
    rows = [
        _row(
            f"peak memory of an image of {name}",
            *(f"{peaks[key][tool] / 2**20:.0f} MiB" for tool in ("beam-inference", "nnU-Net")),
            f"{peaks[key]['beam-inference'] / peaks[key]['nnU-Net']:.2f}",
        )
        for key, name in (("once", "1 megavoxel"), ("eight times", "8 megavoxels"))
    ]
    time = results["time"]
    rows.append(
        _row(
            "time",
            f"{time['seconds']:.0f} s",
            f"{time['against_seconds']:.0f} s",
            _ratio(time),
        )
    )
    return "\n".join(
        [
            f"nnU-Net {results['nnunetv2']}, one fold, no mirroring. Memory is the peak beyond "
            "what the process holds between runs. Start-up is left out on both sides. The "
            f"{results['bound']['operations'] / 1e12:.2f} trillion floating-point operations of "
            f"the network take {_products_of_matrices(results):.1f} s as products of float32 "
            "matrices on the same cores.",
            "",
            *(f"- {each}" for each in results["task"].split(". ")),
            "",
            _row("", "ours", "nnU-Net", "ratio"),
            "|---|---|---|---|",
            *rows,
        ]
    )


def _startup() -> str:
    """What starting takes, over imports alone."""
    rows = json.loads((RESULTS / "startup.json").read_text())["rows"]
    lines = [
        "Seconds from the start of a process to its end, over those of importing PyTorch, Beam and",
        "TensorStore alone; of `run` also until its first chunk is begun, over",
        "importing PyTorch and Beam (`python -m benchmarks.startup`):\n",
        "| | ratio | longest imports |",
        "|---|---|---|",
    ]
    for name, row in rows.items():
        imports = row.get("longest imports", {})
        told = ", ".join(f"{package} {seconds:.2f} s" for package, seconds in imports.items())
        lines.append(_row(name, _ratio(row), told))
    return "\n".join(lines)


def _gpu() -> str:
    """What a GPU gets through."""
    return (
        "### On a GPU\n\n`make bench-gpu` measures a GPU in eight minutes at most; [GPUs](gpu.md) "
        "says what, and what follows. Each card was in another machine:\n\n"
        f"{tabulate([json.loads(path.read_text()) for path in GPUS])}"
    )


_INSTRUCTIONS = {
    "all": "all instructions",
    "AVX512_CORE": "AVX-512 without VNNI",
    "AVX2_VNNI": "AVX2 with VNNI",
    "AVX2": "AVX2 alone",
}


def _storage() -> str:
    """What outputs cost to store, by format and compression."""
    found = json.loads((RESULTS / "storage.json").read_text())
    versions = ", ".join(f"{name} {found['machine'][name]}" for name in _STORAGE_LIBRARIES)
    heads = ["values", "format", "blocks", "share", "objects", *_STORAGE_SECONDS.values()]
    lines = [
        "## Stored bytes\n",
        (
            "Affinities of a part of FIB-25 by the network of the tests, and the labels of its "
            f"bodies:\n{found['voxels']:,} voxels, the last six planes along x mirrored, in blocks "
            "of 64³, written in two\nchunks of 128³ to a local disk (`python -m "
            f"benchmarks.storage`;\n{versions}). Seconds are those to write\nall, to read all, to "
            "read one block by TensorStore, and to read all by cloud-volume. Neuroglancer,\nin a "
            "headless Chromium, shows a section through all of it: requests and megabytes that it "
            "fetches.\nWhat is left blank was not measured. Others used the machine meanwhile: "
            "seconds tell tenfold\ndifferences, not those of a third, and only within a format: "
            "those of precomputed were measured on a\nbusier machine.\n"
        ),
        _row(*heads, "Neuroglancer"),
        "|---" * (len(heads) + 1) + "|",
        *map(_storage_row, found["rows"]),
        "",
        _storage_decision(),
        "",
        _storage_exchange(found["exchange"]),
        "",
        _storage_integers(found["integers"]),
    ]
    return "\n".join(lines)


def _storage_row(row: dict[str, Any]) -> str:
    seconds = [row.get(key) for key in _STORAGE_SECONDS]
    shown = row.get("neuroglancer")
    packing = {0: "", 1: ", a shard a block"}.get(row["blocks"], f", {row['blocks']} in a shard")
    return _row(
        row["values"],
        row["format"],
        f"{row['codec']}{packing}",
        f"{row['share']:.1%}",
        row["objects"],
        *("" if each is None else f"{each:.3f}" for each in seconds),
        "" if shown is None else f"{shown['requests']}, {shown['bytes'] / 1e6:.1f} MB",
    )


def _storage_decision() -> str:
    return (
        "So new zarr, OME-Zarr and N5 outputs are packed block by block by zstd at level 1, "
        "floating-point\nnumbers shuffled before it; N5 has the same codecs and was not measured. "
        "They have a file for each\nblock, because cloud-volume reads no shards of zarr. New "
        "precomputed outputs have shards of up to\neight blocks, as far as chunks are made of "
        "them, packed by gzip; a shard of one block where no more\nfit. TensorStore packs them at "
        "zlib's highest level and knows no other; jobs pack them at level 4,\nfloating-point "
        "numbers at 1. Labels of uint32 and uint64 are `compressed_segmentation` in them. What\n"
        "was begun, and what is there, stays as it is."
    )


def _storage_exchange(rows: list[dict[str, Any]]) -> str:
    """What shards add to the sums that chunks pass on."""
    lines = [
        "A chunk writes whole shards. By `strategy: exchange` it passes on sums of all voxels of a "
        "shard that\na neighbour's patch touches: bytes for each voxel of three channels, of 1024³ "
        "voxels in patches of\n64³ that overlap by 16. The share of `auto` is between that of "
        "blocks and that of shards as large as\nchunks, for an eighth of the objects.\n",
        _row("chunk", "written at once", "bytes a voxel"),
        "|---|---|---|",
    ]
    lines += [
        _row(f"{row['chunk']}³", f"{row['shard']}³", row["seam_bytes_per_voxel"]) for row in rows
    ]
    return "\n".join(lines)


def _storage_integers(rows: list[dict[str, Any]]) -> str:
    """What codecs make of affinities in uint8."""
    by_codec: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_codec.setdefault(row["codec"], {})[row["how"]] = row
    lines = [
        "Affinities in uint8 are nearly halved by each of these, without loss. Neither differences "
        "of\nneighbours, nor shuffled bits, nor a block for each channel make them smaller, and "
        "higher\nlevels hardly do: shares of their bytes by codecs of zarr, and megabytes packed "
        "in a second of the\nprocessor.\n",
        _row("codec", "share", "MB/s", "differences along x", "a block a channel"),
        "|---" * 5 + "|",
    ]
    lines += [
        _row(
            codec,
            f"{each['']['share']:.1%}",
            f"{each['']['megabytes_per_cpu_second']:.3g}",
            f"{each['delta']['share']:.1%}",
            f"{each['a block a channel']['share']:.1%}",
        )
        for codec, each in by_codec.items()
    ]
    return "\n".join(lines)


def _integers() -> str:
    """What networks of integers save and lose, by the instructions that they may use."""
    found = json.loads((RESULTS / "int8.json").read_text())
    machine = found["machine"]
    rows = found["rows"]
    lines = [
        "## Integers\n",
        (
            "`precision: int8` over float32, both by OpenVINO, in seconds of the processor for one "
            "thread, on\nnetworks of the tests with real data, and on the residual U-Net above "
            f"(`python -m benchmarks.int8`).\nNNCF {machine['nncf']} calibrated each on eight "
            "patches.\n"
        ),
        _row("", *(_INSTRUCTIONS[name] for name in rows)),
        "|---" * (1 + len(rows)) + "|",
    ]
    names = list(rows["all"])
    for name in names:
        lines.append(_row(name, *(_ratio(some[name]["int8 / float32"]) for some in rows.values())))
    lines += [
        (
            f"\nThe processor ({machine['processor']}) has {', '.join(machine['instructions'])}.\n"
            "The other columns are of the same processor, with oneDNN kept from using some of its\n"
            "instructions: that shows what one with AVX2 alone computes, and about what it saves.\n"
            "Not measured: real processors without AVX-512, those with AMX, and ARM.\n"
        ),
        (
            "Differences from PyTorch in float32 on six other patches, with all instructions. The\n"
            f"trial allows {found['allowed']:g}, root mean square over a patch. Decisions are "
            "those of each network's\nusers (a threshold, or the likeliest tissue); their overlap "
            "is Dice's coefficient of the\nvoxels chosen.\n"
        ),
        _row(
            "",
            "root mean square over a patch",
            "99.9th percentile",
            "largest",
            "other decisions",
            "overlap of decisions",
            "calibration, seconds",
            "the trial",
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        row = rows["all"][name]
        errors = row["root mean square"]
        bound = found["allowed"] * max(1, row["largest value"])
        lines.append(
            _row(
                name,
                f"{min(errors):.4f}–{max(errors):.4f}",
                f"{row['99.9th percentile']:.3f}",
                f"{row['largest']:.2f}",
                f"{row['other decisions']:.2%}",
                f"{row['overlap of decisions']:.3f}",
                f"{row['calibration seconds']:.0f}",
                "takes it" if max(errors) <= bound else "**refuses it**",
            )
        )
    lines.append(f"\n{_bits_of_integers(rows)}")
    return "\n".join(lines)


def _bits_of_integers(rows: dict[str, Any]) -> str:
    """What was equal in every bit, and what was not."""
    names = list(rows["all"])
    again = [n for n in names if not all(some[n]["same network again"] for some in rows.values())]
    networks = [n for n in names if len({some[n]["network"] for some in rows.values()}) > 1]
    batches = [n for n in names if any(len(some[n]["bits"]) > 1 for some in rows.values())]
    values = [
        n for n in names if len({bit for some in rows.values() for bit in some[n]["bits"]}) > 1
    ]
    return (
        "What differs in any bit:\n\n"
        f"- the network, calibrated again in the same process: {_told_of(again)};\n"
        f"- the network, calibrated with other instructions: {_told_of(networks)};\n"
        f"- values in batches of 1, 2 and 4 (`batch_norm: batch` of 1), and with two threads: "
        f"{_told_of(batches)};\n"
        f"- values with other instructions: {_told_of(values)}."
    )


def _told_of(names: list[str]) -> str:
    if not names:
        return "none"
    return _listed(names) if len(names) > 1 else names[0]


def _megabytes(growth: dict[str, Any]) -> str:
    return " MB, ".join(f"{row['peak_bytes'] / 1e6:.1f}" for row in growth.values()) + " MB"


def _seams() -> str:
    """The seam modes side by side, with what is at chunk borders."""
    found = json.loads((RESULTS / "seams.json").read_text())
    unet = found["residual U-Net"]
    trained = found["trained"]
    columns = ["", "seconds", "over `crop`", "network calls", "patch voxels per voxel"]
    columns += ["largest error", "99.9th percentile", "largest, trained network"]
    lines = [
        "## Seams\n",
        (
            f"{tuple(found['voxels'])} voxels of FIB-25 in chunks of {tuple(found['chunk'])}; "
            "patches and network as above."
        ),
        "Errors are measured against `recompute` within one overlap of chunk borders, as shares of",
        "the output's range. The trained network is that of the tests.\n",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
    ]
    for mode, row in unet.items():
        error = row["seam error"]
        other = trained[mode]["seam error"]["max"]
        times = (f"`{mode}`", row["seconds"], f"{row['seconds'] / unet['crop']['seconds']:.2f}")
        calls = (row["network calls"], row["patch voxels per voxel"])
        lines.append(
            _row(
                *times,
                *calls,
                f"{error['max']:.1e}",
                f"{error['99.9th percentile']:.1e}",
                f"{other:.1e}",
            )
        )
    if "chunkflow" in found:
        row = found["chunkflow"]
        crop = unet["crop"]
        error = row["seam error"]
        times = ("chunkflow", row["seconds"], f"{row['seconds'] / crop['seconds']:.2f}")
        calls = (crop["network calls"], crop["patch voxels per voxel"])
        lines.append(
            _row(*times, *calls, f"{error['max']:.1e}", f"{error['99.9th percentile']:.1e}", "")
        )
    lines.append("\n![error at chunk borders](seams.png)")
    return "\n".join(lines)


def _estimates() -> str:
    """The section that compares the estimates of ``plan`` with measurements."""
    found = json.loads((RESULTS / "foretold.json").read_text())
    lines = [
        "## Estimates\n",
        "Ten jobs over a volume mirrored from FIB-25: a worker's peak of memory, divided by the",
        "projection of `plan`. The projection should be larger, by at most 15 %. Each job runs in",
        "a process of its own. The constants of the projection were chosen by earlier runs of",
        "these jobs and others; the 32 MiB that the libraries keep, by the runs of the ninth job",
        "below. On the slow store each request takes 100 ms. On a disk, most of a chunk is",
        "written before the next one takes memory. Chunks of `exchange` are of whole strides, as",
        "`--suggest` proposes.\n",
        _row("job", "measured, MB", "measured / projected, slow store", "on a disk"),
        "|---|---|---|---|",
    ]
    for name, row in found["memory"].items():
        ratios = [
            row[place]["measured / projected"] if place in row else []
            for place in ("slow store", "disk")
        ]
        each = [", ".join(f"{ratio:.2f}" for ratio in some) or "not measured" for some in ratios]
        lines.append(_row(name, f"{max(row['slow store']['peak_bytes']) / 1e6:.0f}", *each))
    lines += [
        "\nSeconds from the first chunk to the last, as `plan --calibrate` estimates them, over",
        "the measured ones, for all of FIB-25 in chunks of 64×128×128: the median of seven",
        "calibrations, each before a run, with its range.\n",
        _row("job", "estimated / measured"),
        "|---|---|",
    ]
    for name, row in found["seconds"].items():
        lines.append(
            _row(
                name, f"{row['foretold / real']:.2f} ({min(row['all']):.2f}–{max(row['all']):.2f})"
            )
        )
    killed = found["killed"]
    real = killed["real_seconds"]
    lines.append(
        f"\n{len(real)} jobs that were killed at random moments, every "
        f"{killed['seconds_between_kills']} s on average, and started again, took {min(real)} to\n"
        f"{max(real)} s, {sum(real) / len(real):.1f} on average. The simulation estimates "
        f"{killed['foretold_seconds']} s, {killed['foretold / real']:.2f} times that."
    )
    return "\n".join(lines)


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f} ({row['min']:.2f}–{row['max']:.2f})"


if __name__ == "__main__":
    take_no_arguments(__doc__)
    PAGE.write_text(page())
