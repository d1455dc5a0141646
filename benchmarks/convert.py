"""Convert a stack of slices of 4 GiB into blocks: seconds, and peak memory of all processes.

    python -m benchmarks.convert [--slices 1024] [--folder FOLDER]

The slices are PNG files of 2048 × 2048 voxels, which are decoded whole. Blocks of 16 × 128 × 128
voxels take slabs of 64 MiB, which are held in memory; blocks of 64 × 64 × 64 take slabs of 256 MiB,
which go by way of the disk. Written to ``benchmarks/results/convert.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.opening import open_volume
from benchmarks.measure import machine

EDGE = 2048
PICTURES = 32
RESULTS = Path(__file__).parent / "results" / "convert.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slices", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="where to work; default a temporary folder")
    known = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="convert", dir=known.folder))
    try:
        pictures = write_slices(folder / "slices", known.slices)
        runs = {
            shape: converted(folder, shape, pictures, known.slices)
            for shape in ("16,128,128", "64,64,64")
        }
    finally:
        shutil.rmtree(folder)
    figures = {
        "machine": machine("pillow", "tensorstore", "apache-beam"),
        "slices": known.slices,
        "gibibytes": known.slices * EDGE**2 / 2**30,
        "by_block_shape": runs,
    }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def write_slices(folder: Path, count: int) -> list[Any]:
    """Slices of noise in six bits; some are made, and the others are copies of these."""
    folder.mkdir()
    random = np.random.default_rng(0)
    pictures = [
        random.integers(0, 64, (EDGE, EDGE), dtype=np.uint8) for _ in range(min(PICTURES, count))
    ]
    for z in range(count):
        path = folder / f"s{z}.png"
        if z < PICTURES:
            Image.fromarray(pictures[z]).save(path, compress_level=1)
        else:
            shutil.copyfile(folder / f"s{z % PICTURES}.png", path)
    return pictures


def converted(folder: Path, block_shape: str, pictures: list[Any], count: int) -> dict[str, Any]:
    """Convert, compare slices here and there, and delete what was made."""
    command = [
        sys.executable,
        "-m",
        "beam_inference",
        "convert",
        str(folder / "slices"),
        str(folder / "out"),
    ]
    start = time.monotonic()
    peak = [0]
    flags = ["--voxel-size", "40,4,4", "--block_shape", block_shape]
    with subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL) as process:
        watch = threading.Thread(target=watched, args=(process, peak))
        watch.start()
        process.wait()
        watch.join()
    assert process.returncode == 0
    seconds = time.monotonic() - start
    volume = open_volume(f"file://{folder}/out")
    for z in range(0, count, 37):
        plane = volume.read(BoundingBox((z, 0, 0), (z + 1, EDGE, EDGE)))[0, 0]
        assert np.array_equal(plane, pictures[z % PICTURES]), z
    shutil.rmtree(folder / "out")
    return {
        "seconds": round(seconds, 1),
        "megabytes_per_second": round(count * EDGE**2 / 1e6 / seconds, 1),
        "peak_mebibytes_of_all_processes": round(peak[0] / 2**20),
    }


def watched(process: subprocess.Popen[bytes], peak: list[int]) -> None:
    """Keep the peak of resident memory of the process and its descendants, with mapped files."""
    while process.poll() is None:
        peak[0] = max(peak[0], sum(map(resident, family(process.pid))))
        time.sleep(0.1)


def family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:
            continue
        for child in found:
            yield from family(int(child))


def resident(pid: int) -> int:
    """Bytes of a process's resident memory; 0 once it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


if __name__ == "__main__":
    main()
