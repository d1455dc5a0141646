"""Compare seam modes: costs and errors at chunk borders, of the volume given as ``--data``.

A part of FIB-25 is run in every mode with the same chunks, patches and network; and, with
``--python``, by chunkflow with margins of a whole overlap, as our ``crop`` has them. Errors are
against ``recompute``, which is within 3e-7 of a float64 sum over the whole volume
(docs/guarantees.md). Writes ``benchmarks/results/seams.json`` and a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.formats import OutputSpec
from beam_inference.config.job_file import parse_job
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.launch.planned_job import plan_job
from beam_inference.launch.run_job import run_job
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output
from benchmarks import contenders
from benchmarks.measure import machine, work_of

RESULTS = Path(__file__).parent / "results" / "seams.json"
PICTURE = Path(__file__).parents[1] / "docs" / "seams.png"
NETWORKS = Path(__file__).parents[1] / "tests" / "networks"
SHAPE = (52, 250, 250)
CHUNK = (26, 125, 125)
MODES = ("exchange", "recompute", "crop")


def values_of(folder: Path, network: str, seams: str) -> dict[str, Any]:
    """A job over the volume ``in``."""
    model: dict[str, Any] = {"path": f"{contenders.__file__}:unet"}
    if network == "trained":
        weights = str(NETWORKS / "fib25.safetensors")
        model = {
            "path": f"{NETWORKS / 'fib25.py'}:fib25_network",
            "weights": weights,
            "activation": "sigmoid",
        }
    return {
        "input": {"path": str(folder / "in")},
        "output": {
            "path": str(folder / f"{network}-{seams}"),
            "dtype": "float32",
            "block_shape": [13, 25, 25],
        },
        "model": {**model, "output_channels": 3, "normalize": "unit"},
        "inference": {
            "patch_shape": list(contenders.PATCH),
            "patch_overlap": list(contenders.OVERLAP),
            "chunk_shape": list(CHUNK),
            "seams": seams,
            "device": "cpu",
            "engine": "openvino",
        },
    }


def near_borders(shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Voxels within one overlap of where chunks meet."""
    near = np.zeros(shape, bool)
    for axis, (n, chunk, overlap) in enumerate(zip(shape, CHUNK, contenders.OVERLAP, strict=True)):
        distance = np.min([np.abs(np.arange(n) + 0.5 - b) for b in range(chunk, n, chunk)], axis=0)
        near |= (distance < overlap).reshape([-1 if a == axis else 1 for a in range(3)])
    return near


def errors(found: NDArray[np.float32], exact: NDArray[np.float32]) -> dict[str, float]:
    """Near chunk borders, as a share of the output's range."""
    difference = np.abs(found - exact)[:, near_borders(exact.shape[1:])] / np.ptp(exact)
    return {
        "max": float(difference.max()),
        "99.9th percentile": float(np.percentile(difference, 99.9)),
    }


def ours(
    folder: Path, network: str, repeats: int
) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Every mode, in turn; seconds are the medians, from the first chunk on."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    outputs = {}
    rows = {}
    for repeat in range(repeats):
        for mode in MODES:
            config = parse_job(values_of(folder, network, mode), folder)
            outcome = run_job(config, overwrite=repeat > 0)
            ended = time.time()
            assert outcome.exit_code == 0, outcome
            first, *_ = work_of(config.output.path)
            seconds[mode].append(ended - first)
            volume = open_volume(f"file://{folder / f'{network}-{mode}'}")
            outputs[mode] = volume.read(volume.bounds)
    for mode in MODES:
        plan = plan_job(parse_job(values_of(folder, network, mode), folder)).plan
        rows[mode] = {
            "seconds": round(float(np.median(seconds[mode])), 2),
            "network calls": plan.totals.patch_count,
            "patch voxels per voxel": round(plan.totals.patch_voxels_per_voxel, 2),
            "seam error": errors(outputs[mode], outputs["recompute"]),
        }
    return rows, outputs


def chunkflows(python: str, folder: Path, exact: NDArray[np.float32]) -> dict[str, Any]:
    """Chunkflow's seconds and errors, with the residual U-Net."""
    keys = {
        "CONTENDER_VOLUME": str(folder / "volume.npy"),
        "CONTENDER_OUTPUT": str(folder / "theirs.npy"),
    }
    keys["CONTENDER_CHUNK"] = json.dumps(CHUNK)
    command = [
        python,
        contenders.__file__,
        "chunkflow job",
        "unet",
        str(len(os.sched_getaffinity(0))),
        "1",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | keys
    )
    if done.returncode:
        raise SystemExit(f"chunkflow failed:\n{done.stderr[-2000:]}")
    seconds = json.loads(done.stdout.splitlines()[-1])["seconds"][0]
    return {
        "seconds": round(seconds, 2),
        "seam error": errors(np.load(folder / "theirs.npy"), exact),
    }


def draw(image: NDArray[np.uint8], outputs: dict[str, NDArray[np.float32]], path: Path) -> None:
    """Draw a slice: input, result, and errors of ``crop`` and ``exchange``, logarithmically."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    z = CHUNK[0] - 1
    exact = outputs["recompute"]
    figure, axes = pyplot.subplots(1, 4, figsize=(17, 4.6), layout="constrained")
    axes[0].imshow(image[z], cmap="gray")
    axes[1].imshow(exact[0, z], cmap="gray", vmin=0, vmax=1)
    for panel, mode in zip(axes[2:], ("crop", "exchange"), strict=True):
        off = np.abs(outputs[mode] - exact).max(axis=0)[z] / np.ptp(exact)
        shown = panel.imshow(np.maximum(off, 1e-9), cmap="magma", norm=LogNorm(1e-8, 1))
    figure.colorbar(
        shown, ax=axes[2:], label="|output − exact|, share of the output's range", shrink=0.85
    )
    for panel, title in zip(
        axes, ("input", "affinity along z", "seams: crop", "seams: exchange"), strict=True
    ):
        for n, line in ((1, panel.axhline), (2, panel.axvline)):
            for border in range(CHUNK[n], exact.shape[n + 1], CHUNK[n]):
                line(border - 0.5, color="deepskyblue", lw=0.8, ls=(0, (4, 4)))
        panel.set_title(title)
        panel.set_axis_off()
    figure.suptitle("a slice next to a chunk border; dashed: where chunks meet within it")
    figure.savefig(path, dpi=75)
    pyplot.close(figure)


def main() -> None:
    """Measure, write and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="fib25_medulla_train2_image.npy")
    parser.add_argument("--python", help="of an environment with benchmarks/peers-requirements.txt")
    parser.add_argument("--repeats", type=int, default=2)
    known = parser.parse_args()
    z, y, x = SHAPE
    volume = np.ascontiguousarray(np.load(known.data)[:z, :y, :x])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        box = BoundingBox((0, 0, 0), SHAPE)
        np.save(folder / "volume.npy", volume)
        spec = OutputSpec(
            f"file://{folder}/in", "precomputed", "uint8", 1, box, (64, 64, 64), (10.0, 10.0, 10.0)
        )
        create_output(spec).write(box, volume[None])
        results: dict[str, Any] = {
            "machine": machine("torch", "openvino"),
            "voxels": SHAPE,
            "chunk": CHUNK,
        }
        results["residual U-Net"], outputs = ours(folder, "unet", known.repeats)
        if known.python:
            results["chunkflow"] = chunkflows(known.python, folder, outputs["recompute"])
        results["trained"], outputs = ours(folder, "trained", known.repeats)
        draw(volume, outputs, PICTURE)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1), file=sys.stdout)


if __name__ == "__main__":
    main()
