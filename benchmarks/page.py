"""``docs/performance.md`` from the committed results: ``python -m benchmarks.page``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

_PAGE = """\
# What it costs

Written by `python -m benchmarks.page` from `benchmarks/results`; `make bench`, `make bench-peers` measure anew. Every
ratio is from runs taken in turn on one machine, the median with its range: below 1 is less time than what it is held
against. What a job of many chunks costs beyond its network is in [scale](scale.md).

{machine}. No GPU was at hand: nothing here speaks of one.

## Against the bare network

The residual U-Net of `beam_inference.residual_unet` with its default widths, patches of 16×96×96 at an overlap of a
quarter, uint8 in and out, three channels.

| | ratio | goal |
|---|---|---|
{engines}
| a chunk, from uint8 cutout to uint8 core / its forward passes (OpenVINO) | {loop} | 1.03 |
{job}
| two processes of one thread at once / one alone, seconds per patch (OpenVINO) | {processes} | 1.05 |

| | |
|---|---|
| a worker's peak memory, volume 8 times as large / once | {memory} |
| seconds per voxel, volume 8 times as large / once | {time} |
| peak memory of a worker / what `plan` projects | {projection} |
| durable receipts per second, on a local disk | {receipts} |

## Against other tools

{task}. The volume is in memory; ours is uint8, theirs float32, and the result is float32. Time is ours / theirs, memory
is the peak over the float32 result, beyond what the process holds between runs.

{peer_versions}.

| | time, null network | time, residual U-Net | memory, null network |
|---|---|---|---|
| beam-inference | 1 | 1 | {our_memory} |
{peers}

With the U-Net, ours is run by OpenVINO, which it chooses by itself where that is installed; theirs by PyTorch's eager
mode, which is what they run. nnU-Net adds up in float16.{remark}

Goals that are missed: OpenVINO's forward pass was to take 0.60 of PyTorch's. The loop with a null network was to take
half of MONAI's time, and takes as long: much of it is the first touch of the result's memory, and the network's own
answer, which all of them pay. Its memory was to stay below 1.2 times the float32 result; the slab, as deep as a patch,
is a third of so shallow a volume, and the rest is not explained yet. A worker's memory was not to grow with the volume:
with chunks of a megabyte it grows by what the threads' allocators keep (27 MB instead of 64 with MALLOC_ARENA_MAX=1).
"""


def page() -> str:
    """The page's text."""
    job, peers = (json.loads((RESULTS / name).read_text()) for name in ("job.json", "peers.json"))
    null, unet = peers["null network"], peers["residual U-Net"]
    machine = job["machine"]
    memory = null["peak_bytes_over_float32_output"]
    versions = ", ".join(f"{name} {version}" for name, version in peers["peers"].items())
    libraries = ", ".join(f"{name} {machine[name]}" for name in ("torch", "openvino", "onnxruntime"))
    return _PAGE.format(
        machine=f"{machine['cores']} cores of {machine['processor']}, Python {machine['python']}, {libraries}",
        engines="\n".join(
            f"| a forward pass, {name} | {_ratio(row)} | {'0.60' if name.startswith('openvino') else ''} |"
            for name, row in job["engines"].items()
        ),
        loop=_ratio(job["loop / forward"]),
        job=_job(job.get("job / forward")),
        processes=_ratio(job["two processes / one"]),
        memory=job["growth"]["memory, 8x / 1x"],
        time=job["growth"]["seconds per voxel, 8x / 1x"],
        projection=job["peak memory / projection"]["ratio"],
        receipts=f"{job['receipts']['written_per_second']:,}",
        task=peers["task"],
        peer_versions=f"Measured against {versions}",
        remark=f" The U-Net's column: {unet['remark']}." if "remark" in unet else "",
        our_memory=memory["beam-inference"],
        peers="\n".join(
            f"| {tool} | {_ratio(row)} | {_ratio(unet['time'][tool])} | {memory[tool]} |"
            for tool, row in null["time"].items()
        ),
    )


def _job(row: dict[str, Any] | None) -> str:
    what = "a whole job's pipeline / the forward passes of its patches (OpenVINO)"
    return f"| {what} | {'not measured in this run' if row is None else _ratio(row)} | 1.05 |"


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f} ({row['min']:.2f}–{row['max']:.2f})"


if __name__ == "__main__":
    PAGE.write_text(page())
