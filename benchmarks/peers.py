"""Compare the patch loop with other tools: ``make bench-peers``, or this module with --python.

Every run is a process of its own (see ``benchmarks.contenders``), the tools taken in turn, round
after round. A ratio is ours over theirs in the same round. Writes
``benchmarks/results/peers.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import contenders
from benchmarks.measure import machine, ratio_of_pairs
from benchmarks.page import PAGE, page

RESULTS = Path(__file__).parent / "results" / "peers.json"
PEERS = ("MONAI", "nnU-Net", "torchio", "chunkflow")
_VERSIONS = (
    "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in "
    "sys.argv[1:]}))"
)


def run(python: str, tool: str, network: str, threads: int, repeats: int) -> dict[str, Any]:
    """One process of a tool; its figures."""
    command = [python, contenders.__file__, tool, network, str(threads), str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tool} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def over_output(peak: int, network: str) -> float:
    """A peak of memory over the float32 output."""
    shape = contenders.DEEP if network.startswith("null") else contenders.SHAPE
    return round(peak / (4 * contenders.CHANNELS * math.prod(shape)), 2)


def rounds(
    python: str, ours: str, network: str, threads: int, count: int, repeats: int
) -> dict[str, Any]:
    """Run ours and each peer in turn: ratios of time, and peaks of memory over the output."""
    pairs: dict[str, list[tuple[float, float]]] = {tool: [] for tool in PEERS}
    peaks: dict[str, float] = {}
    for _ in range(count):
        mine = run(sys.executable, "beam-inference", ours, threads, repeats)
        peaks["beam-inference"] = over_output(mine["peak_bytes"], network)
        for tool in PEERS:
            theirs = run(python, tool, network, threads, repeats)
            pairs[tool].append((min(mine["seconds"]), min(theirs["seconds"])))
            peaks[tool] = over_output(theirs["peak_bytes"], network)
    times = {tool: ratio_of_pairs(measured) for tool, measured in pairs.items()}
    return {"time": times, "peak_bytes_over_float32_output": peaks}


def jobs(python: str, threads: int, count: int) -> dict[str, Any]:
    """Compare a whole job of ours, from its first chunk on, with chunkflow on the same chunks."""
    pairs: dict[str, list[tuple[float, float]]] = {"crop": [], "recompute": [], "exchange": []}
    for _ in range(count):
        theirs = run(python, "chunkflow job", "unet", threads, 1)
        for seams, measured in pairs.items():
            mine = run(sys.executable, "job", seams, threads, 1)
            measured.append((mine["seconds"][0], theirs["seconds"][0]))
    return {seams: ratio_of_pairs(measured) for seams, measured in pairs.items()}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", required=True, help="of an environment with benchmarks/peers-requirements.txt"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--network-rounds",
        type=int,
        default=2,
        help="of the rows with a real network, minutes each",
    )
    known = parser.parse_args()
    packages = ["monai", "nnunetv2", "torchio", "chunkflow", "torch"]
    peers = json.loads(
        subprocess.check_output([known.python, "-c", _VERSIONS, *packages], text=True)
    )
    figures = {
        "machine": machine("torch", "openvino"),
        "peers": peers,
        "task": (
            f"Patches of {contenders.PATCH}, 3 channels, 2 threads: {contenders.DEEP_PATCHES} "
            f"patches of {contenders.DEEP} voxels with the null network, {contenders.PATCHES} of "
            f"{contenders.SHAPE} with the U-Net"
        ),
        "null network": rounds(known.python, "null", "null", 2, known.rounds, 5),
        "null network, uint8": over_output(
            run(sys.executable, "beam-inference", "null-uint8", 2, 5)["peak_bytes"], "null"
        ),
        "whole job": jobs(known.python, 2, known.network_rounds),
        "residual U-Net": rounds(known.python, "unet-openvino", "unet", 2, known.network_rounds, 1),
    }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(page())
    print(page())


if __name__ == "__main__":
    main()
