"""Commands on a volume whose blocks cloud-volume has packed, against the same volume unpacked.

    python -m benchmarks.packed_blocks --image IMAGE.npy [--gibibytes 4] [--rounds 3]

The image, a real one of uint8, is cut into blocks of 64³ voxels, which are packed by gzip, as
cloud-volume does unless told otherwise. The volume repeats them until it has its size: the files
of repetitions are hard links, so that it is there within seconds. What is read is therefore in the
machine's memory, for both volumes alike; a disk would add to both, and more to the unpacked one.
``run`` copies voxels through patches, without a network, which is the worst case: whatever a
network takes is the same for both. What libdeflate takes alone to unpack every block is the least
that packing can add. Seconds of the commands in turn, and the peak memory of all
processes of those on the packed volume, mapped files included. Written to
``benchmarks/results/packed_blocks.json``, which has the commands that were finished.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from deflate import gzip_decompress

from beam_inference.config.fields import Json
from beam_inference.config.formats import OutputSpec
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output
from benchmarks.convert import watched
from benchmarks.measure import machine, ratio_of_pairs

EDGE = 1024
BLOCK = 64
RESULTS = Path(__file__).parent / "results" / "packed_blocks.json"
COMMANDS = ("convert", "run", "levels")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--gibibytes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; default a temporary folder")
    parser.add_argument(
        "--commands", nargs="+", choices=COMMANDS, default=COMMANDS, help="the others stay as told"
    )
    arguments = parser.parse_args()
    image = np.load(arguments.image)
    folder = Path(tempfile.mkdtemp(prefix="packed", dir=arguments.folder))
    figures: Json = {
        "machine": machine("tensorstore", "apache-beam"),
        "gibibytes": arguments.gibibytes,
        "load_before": round(os.getloadavg()[0], 1),
    }
    try:
        for name in ("plain", "packed"):
            stored = write(
                folder / name, image, arguments.gibibytes * 1024, packed=name == "packed"
            )
        figures["packed_gibibytes"] = round(stored / 2**30, 2)
        figures["unpacking_processor_seconds"] = round(measure_unpacking(folder / "packed"), 2)
        figures["commands"] = json.loads(RESULTS.read_text())["commands"]
        for command in arguments.commands:
            figures["commands"][command] = compare(folder, command, arguments.rounds)
            RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    finally:
        shutil.rmtree(folder)
    print(json.dumps(figures, indent=1))


def write(folder: Path, image: np.ndarray, depth: int, *, packed: bool) -> int:
    """Write ``depth`` × EDGE × EDGE voxels: the image's blocks, repeated. Returns stored bytes."""
    volume = create_output(
        OutputSpec(
            url=f"file://{folder}",
            format="precomputed",
            dtype="uint8",
            channels=1,
            bounds=BoundingBox((0, 0, 0), (depth, EDGE, EDGE)),
            block_shape=(BLOCK, BLOCK, BLOCK),
            voxel_size_nm=(8.0, 8.0, 8.0),
        )
    )
    period = zyx.triple(length // BLOCK for length in image.shape)
    for index in np.ndindex(period):
        box = block_box(index)
        volume.write(box, image[tuple(map(slice, box.start, box.stop))][None])
    scale = next(path for path in folder.rglob("*-*_*-*_*-*") if path.is_file()).parent
    stored = 0
    for index in np.ndindex(depth // BLOCK, EDGE // BLOCK, EDGE // BLOCK):
        path = scale / block_name(index)
        first = scale / block_name(tuple(np.mod(index, period)))
        if path == first:
            stored_path = pack_block(path) if packed else path
        else:
            stored_path = path.with_name(path.name + ".gz") if packed else path
            os.link(first.with_name(first.name + ".gz") if packed else first, stored_path)
        stored += stored_path.stat().st_size
    return stored


def block_box(index: Sequence[int]) -> BoundingBox:
    """The voxels of a block, by its position among the blocks, ZYX."""
    return BoundingBox(
        zyx.triple(BLOCK * each for each in index), zyx.triple(BLOCK * (each + 1) for each in index)
    )


def block_name(index: Sequence[int]) -> str:
    """The file of a block, as precomputed volumes name it: x first."""
    box = block_box(index)
    intervals = zip(reversed(box.start), reversed(box.stop), strict=True)
    return "_".join(f"{start}-{stop}" for start, stop in intervals)


def pack_block(path: Path) -> Path:
    """Pack the file of a block; the path of the packed one."""
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), compresslevel=6))
    path.unlink()
    return packed


def measure_unpacking(folder: Path) -> float:
    """Processor seconds that libdeflate takes to unpack all blocks, and nothing else."""
    seconds = 0.0
    of_file: dict[int, float] = {}
    for path in folder.rglob("*.gz"):
        file = path.stat().st_ino
        if file not in of_file:
            packed = path.read_bytes()
            start = time.process_time()
            gzip_decompress(packed, BLOCK**3)
            of_file[file] = time.process_time() - start
        seconds += of_file[file]
    return seconds


def compare(folder: Path, command: str, rounds: int) -> Mapping[str, float]:
    """Run a command on both volumes in turn, and see that it gives the same."""
    pairs = []
    peaks = []
    processor = []
    for _ in range(rounds):
        packed = run_command(folder, command, "packed")
        plain = run_command(folder, command, "plain")
        check_equal(folder / f"{command}-packed", folder / f"{command}-plain")
        pairs.append((packed.seconds, plain.seconds))
        processor.append((packed.processor_seconds, plain.processor_seconds))
        peaks.append(packed.peak_mebibytes)
        print(command, packed, plain, flush=True)
        for name in ("packed", "plain"):
            shutil.rmtree(folder / f"{command}-{name}")
    return ratio_of_pairs(pairs) | {
        "peak_mebibytes_of_all_processes": max(peaks),
        "processor_ratio": ratio_of_pairs(processor)["ratio"],
    }


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


@dataclass(frozen=True)
class Run:
    """One run of a command.

    Attributes:
        seconds: wall time.
        processor_seconds: of all cores together, which other programs change less.
        peak_mebibytes: memory of all processes.
    """

    seconds: float
    processor_seconds: float
    peak_mebibytes: int


def run_command(folder: Path, command: str, name: str) -> Run:
    """Run a command on a volume."""
    source = folder / name
    target = folder / f"{command}-{name}"
    words = {
        "levels": ["levels", str(source), "--to", f"{target}/levels.json"],
        "convert": ["convert", str(source), str(target), "--format", "zarr3"],
        "run": ["run", str(write_job(folder, name, target))],
    }[command]
    peak = [0]
    start = time.monotonic()
    before = os.times()
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
    after = os.times()
    children = (after.children_user, after.children_system)
    used = sum(children) - before.children_user - before.children_system
    return Run(time.monotonic() - start, used, round(peak[0] / 2**20))


def write_job(folder: Path, name: str, target: Path) -> Path:
    path = folder / f"{name}.yaml"
    job = {
        "input": {"path": str(folder / name)},
        "output": {"path": str(target), "dtype": "uint8", "value_range": [0, 256]},
        "model": {"path": "identity"},
        "inference": {
            "patch_shape": [BLOCK] * 3,
            "patch_overlap": [0] * 3,
            "chunk_shape": [128, 256, 256],
        },
    }
    path.write_text(yaml.safe_dump(job))
    return path


if __name__ == "__main__":
    main()
