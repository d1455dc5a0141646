"""Commands on a volume whose blocks cloud-volume has packed, against the same volume unpacked.

    python -m benchmarks.packed_blocks --image IMAGE.npy [--gibibytes 4] [--rounds 3]

The image, a real one of uint8, is repeated by mirroring until the volume has its size; its blocks
of 64³ voxels are packed by gzip, as cloud-volume does unless told otherwise. ``run`` copies voxels
through patches, without a network, which is the worst case: whatever a network takes is the same
for both. Seconds of the commands in turn, and the peak memory of all processes of those on the
packed volume. Written to ``benchmarks/results/packed_blocks.json``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import yaml

from beam_inference.config.formats import OutputSpec
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output
from benchmarks.convert import watched
from benchmarks.measure import machine, ratio_of_pairs

EDGE = 1024
BLOCK = 64
RESULTS = Path(__file__).parent / "results" / "packed_blocks.json"
COMMANDS = ("levels", "convert", "run")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--gibibytes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; default a temporary folder")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="packed", dir=arguments.folder))
    load = os.getloadavg()[0]
    try:
        write(folder / "plain", np.load(arguments.image), arguments.gibibytes * 1024)
        shutil.copytree(folder / "plain", folder / "packed")
        stored = pack(folder / "packed")
        commands = {command: compare(folder, command, arguments.rounds) for command in COMMANDS}
    finally:
        shutil.rmtree(folder)
    figures = {
        "machine": machine("tensorstore", "apache-beam"),
        "gibibytes": arguments.gibibytes,
        "packed_gibibytes": round(stored / 2**30, 2),
        "load_before": round(load, 1),
        "commands": commands,
    }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def write(folder: Path, image: np.ndarray, depth: int) -> None:
    """Write the image, mirrored until it fills ``depth`` × EDGE × EDGE voxels."""
    bounds = BoundingBox((0, 0, 0), (depth, EDGE, EDGE))
    volume = create_output(
        OutputSpec(
            url=f"file://{folder}",
            format="precomputed",
            dtype="uint8",
            channels=1,
            bounds=bounds,
            block_shape=(BLOCK, BLOCK, BLOCK),
            voxel_size_nm=(8.0, 8.0, 8.0),
        )
    )
    rows = mirrored(image.shape[1], EDGE)
    columns = mirrored(image.shape[2], EDGE)
    for z in range(0, depth, BLOCK):
        layers = mirrored(image.shape[0], depth)[z : z + BLOCK]
        slab = image[np.ix_(layers, rows, columns)]
        volume.write(BoundingBox((z, 0, 0), (z + BLOCK, EDGE, EDGE)), slab[None])


def mirrored(length: int, count: int) -> np.ndarray:
    """Indices 0 … length - 1, forth and back, until there are so many."""
    positions = np.arange(count) % (2 * length)
    return np.where(positions < length, positions, 2 * length - 1 - positions)


def pack(folder: Path) -> int:
    """Pack each block; the bytes that they then take."""
    blocks = [path for path in folder.rglob("*-*_*-*_*-*") if path.is_file()]
    with ProcessPoolExecutor() as processes:
        return sum(processes.map(pack_block, blocks, chunksize=64))


def pack_block(path: Path) -> int:
    content = gzip.compress(path.read_bytes(), compresslevel=6)
    path.with_name(f"{path.name}.gz").write_bytes(content)
    path.unlink()
    return len(content)


def compare(folder: Path, command: str, rounds: int) -> Mapping[str, float]:
    """Run a command on both volumes in turn, and see that it gives the same."""
    pairs = []
    peaks = []
    for _ in range(rounds):
        packed_seconds, peak = run_command(folder, command, "packed")
        plain_seconds, _ = run_command(folder, command, "plain")
        check_equal(folder / f"{command}-packed", folder / f"{command}-plain")
        pairs.append((packed_seconds, plain_seconds))
        peaks.append(peak)
        print(command, pairs[-1], peak, flush=True)
        for name in ("packed", "plain"):
            shutil.rmtree(folder / f"{command}-{name}")
    return ratio_of_pairs(pairs) | {"peak_mebibytes_of_all_processes": max(peaks)}


def check_equal(packed: Path, plain: Path) -> None:
    """Compare slabs here and there of two volumes, or the statistics in two files."""
    if (plain / "levels.json").exists():
        records = [json.loads((folder / "levels.json").read_text()) for folder in (packed, plain)]
        assert records[0]["sections"] == records[1]["sections"]
        return
    volumes = [open_volume(f"file://{folder}") for folder in (packed, plain)]
    for z in range(0, volumes[0].bounds.shape[0], 5 * BLOCK):
        box = BoundingBox((z, 0, 0), (z + BLOCK, EDGE, EDGE))
        voxels = volumes[1].read(box)
        assert voxels.any()
        assert np.array_equal(volumes[0].read(box), voxels)


def run_command(folder: Path, command: str, name: str) -> tuple[float, int]:
    """Seconds of a command on a volume, and its peak memory in MiB."""
    source = folder / name
    target = folder / f"{command}-{name}"
    words = {
        "levels": ["levels", str(source), "--to", f"{target}/levels.json"],
        "convert": ["convert", str(source), str(target), "--format", "zarr3"],
        "run": ["run", str(write_job(folder, name, target))],
    }[command]
    peak = [0]
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "beam_inference", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        watch = threading.Thread(target=watched, args=(process, peak))
        watch.start()
        process.wait()
        watch.join()
    assert process.returncode == 0, words
    return time.monotonic() - start, round(peak[0] / 2**20)


def write_job(folder: Path, name: str, target: Path) -> Path:
    path = folder / f"{name}.yaml"
    job = {
        "input": {"path": str(folder / name)},
        "output": {"path": str(target), "dtype": "uint8"},
        "model": {"path": "identity"},
    }
    path.write_text(yaml.safe_dump(job))
    return path


if __name__ == "__main__":
    main()
