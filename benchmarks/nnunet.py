"""Compare whole results folders with nnU-Net itself: ``make bench-nnunet``; half an hour.

A U-Net of nnU-Net's widths with random weights for the time, a narrow one for the memory. Every run
is a process of its own (see ``benchmarks.nnunet_run``), the tools taken in turn. Writes
``benchmarks/results/nnunet.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nnunet_folders
import numpy as np

from beam_inference.cli.main import main as run_command
from beam_inference.config.formats import OutputSpec
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx
from beam_inference.volumes.outputs import create_output
from benchmarks import nnunet_run
from benchmarks.measure import machine, ratio_of_pairs
from benchmarks.page import PAGE, page

RESULTS = Path(__file__).parent / "results" / "nnunet.json"
_SPACING = (2.0, 1.0, 1.0)
_MILLIMETRE = 1e6
_WIDE = (32, 64, 128, 256)
_NARROW = (8, 16, 32)


def make_folder(folder: Path, widths: Sequence[int], patch: Zyx, shape: Zyx) -> None:
    """Make a results folder, an image, and the job for both."""
    architecture = nnunet_folders.architecture()
    stages = len(widths)
    architecture["arch_kwargs"] |= {
        "n_stages": stages,
        "features_per_stage": list(widths),
        "kernel_sizes": [[3, 3, 3]] * stages,
        "strides": [[1, 1, 1], *[[2, 2, 2]] * (stages - 1)],
        "n_conv_per_stage": [2] * stages,
        "n_conv_per_stage_decoder": [2] * (stages - 1),
    }
    plans = nnunet_folders.plans(
        configurations={
            "3d_fullres": nnunet_folders.configuration(
                architecture=architecture, patch_size=list(patch), spacing=list(_SPACING)
            )
        }
    )
    nnunet_folders.make_folder(folder / "model", made=plans, mirror_axes=None)
    array = np.random.default_rng(0).integers(1, 256, (1, *shape), dtype=np.uint8)
    np.save(folder / "image.npy", array)
    (folder / "spacing.json").write_text(json.dumps(_SPACING))
    z, y, x = (size * _MILLIMETRE for size in _SPACING)
    box = BoundingBox((0, 0, 0), shape)
    spec = OutputSpec(
        f"file://{folder}/image", "precomputed", "uint8", 1, box, (32, 64, 64), (z, y, x)
    )
    create_output(spec).write(box, array)
    words = ["--model", str(folder / "model"), "--input", str(folder / "image")]
    assert run_command(["init", *words, "--to", str(folder / "job.yaml")]) == 0


def run(python: str, tool: str, folder: Path, repeats: int) -> dict[str, Any]:
    """One process of a tool; its figures."""
    command = [python, "-W", "ignore", nnunet_run.__file__, tool, str(folder), str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tool} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare_times(python: str, folder: Path, rounds: int) -> dict[str, float]:
    """Seconds of both in turn."""
    pairs = []
    for _ in range(rounds):
        ours = run(sys.executable, "beam-inference", folder, 1)
        theirs = run(python, "nnU-Net", folder, 1)
        pairs.append((ours["seconds"][0], theirs["seconds"][0]))
    return ratio_of_pairs(pairs)


def compare_memory(python: str, folder: Path) -> dict[str, int]:
    """Peaks of memory of both, in bytes."""
    return {
        tool: run(interpreter, tool, folder, 1)["peak_bytes"]
        for tool, interpreter in (("beam-inference", sys.executable), ("nnU-Net", python))
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", required=True, help="of an environment with tests/interop/requirements.txt"
    )
    parser.add_argument("--rounds", type=int, default=3)
    known = parser.parse_args()
    program = "import importlib.metadata as m; print(m.version('nnunetv2'))"
    version = subprocess.check_output([known.python, "-c", program], text=True).strip()
    patch, shape = (32, 96, 96), (64, 192, 192)
    narrow_patch, once = (32, 64, 64), (64, 128, 128)
    with tempfile.TemporaryDirectory() as top:
        places = {name: Path(top) / name for name in ("wide", "once", "eight times")}
        for folder in places.values():
            folder.mkdir()
        make_folder(places["wide"], _WIDE, patch, shape)
        make_folder(places["once"], _NARROW, narrow_patch, once)
        eight = (2 * once[0], 2 * once[1], 2 * once[2])
        make_folder(places["eight times"], _NARROW, narrow_patch, eight)
        figures = {
            "machine": machine("torch", "openvino"),
            "nnunetv2": version,
            "task": (
                f"Time: a PlainConvUNet of widths {_WIDE}, patches of {patch}, an image of "
                f"{shape} voxels. Memory: widths {_NARROW}, patches of {narrow_patch}, images of "
                f"{once} and {eight} voxels"
            ),
            "time": compare_times(known.python, places["wide"], known.rounds),
            "bound": run(known.python, "bound", places["wide"], 1),
            "peak_bytes": {
                name: compare_memory(known.python, places[name]) for name in ("once", "eight times")
            },
        }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
