"""Compare pyramids with igneous, and conversions with a plain copy by TensorStore.

    python -m benchmarks.copies --image IMAGE.npy --python PYTHON

The image, a real one of uint8, is mirrored to twice its size along each axis. PYTHON is that of an
environment with ``tests/igneous/requirements.txt``. Pyramids have two scales of factor 2; both
tools begin with a copy of the same volume in raw blocks of 64³, in a process that has done so once
before. A conversion goes from those blocks into a zarr volume and into a sharded precomputed one;
against it, TensorStore copies one array into another of the same description, in one call. Seconds
are of the processor, all threads together, without imports. What both have written is compared.
Written to ``benchmarks/results/copies.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.formats import OutputSpec
from beam_inference.conversion.block_conversion import BlockConversion
from beam_inference.conversion.convert import plan_conversion
from beam_inference.conversion.options import ConversionOptions
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.pyramid.multiscale import multiscale_volume
from beam_inference.pyramid.pyramid import Pyramid, plan_pyramid
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output, open_output
from benchmarks.measure import machine, peak_bytes, ratio, ratio_of_pairs

BLOCK_SHAPE = (64, 64, 64)
SCALES = 2
RESULTS = Path(__file__).parent / "results" / "copies.json"
IGNEOUS = Path(__file__).with_name("igneous_run.py")
TARGETS = {"zarr": "zarr3", "sharded precomputed": "precomputed"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--python", required=True, help="of an environment with igneous")
    parser.add_argument("--repeats", type=int, default=5)
    known = parser.parse_args()
    image = np.load(known.image)
    for axis in range(3):
        image = np.concatenate([image, np.flip(image, axis)], axis)
    with tempfile.TemporaryDirectory(prefix="copies") as name:
        folder = Path(name)
        figures: dict[str, Any] = {
            "machine": machine("tensorstore", "numpy"),
            "megavoxels": round(image.size / 1e6, 1),
            "pyramid": compare_pyramids(folder / "pyramid", image, known.python, known.repeats),
            "conversion": {
                target: compare_conversions(folder / format, image, format, known.repeats)
                for target, format in TARGETS.items()
            },
        }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def write_blocks(folder: Path, image: NDArray[np.uint8]) -> str:
    """Write an image as a precomputed volume of raw blocks, which both tools read; its URL."""
    box = BoundingBox((0, 0, 0), image.shape)
    spec = OutputSpec(
        url=f"file://{folder}",
        format="precomputed",
        dtype="uint8",
        channels=1,
        bounds=box,
        block_shape=BLOCK_SHAPE,
        voxel_size_nm=(10.0, 10.0, 10.0),
    )
    create_output(spec).write(box, image[None])
    return spec.url


def compare_pyramids(
    folder: Path, image: NDArray[np.uint8], python: str, repeats: int
) -> dict[str, Any]:
    """Seconds and memory of ours over those of igneous, for the same scales of the same volume."""
    write_blocks(folder / "base", image)
    pairs = []
    peaks = []
    for repeat in range(repeats + 1):
        ours = folder / "ours"
        shutil.copytree(folder / "base", ours)
        theirs = folder / "theirs"
        shutil.copytree(folder / "base", theirs)
        start = process_time()
        pyramid = plan_pyramid(multiscale_volume(ours.as_uri(), LOCAL), num_scales=SCALES)
        peak = peak_bytes(partial(make_scales, pyramid))
        seconds = process_time() - start
        printed = subprocess.check_output([python, IGNEOUS, theirs, str(SCALES)], text=True)
        told = json.loads(printed.splitlines()[-1])
        check_same_scales(pyramid, theirs)
        if repeat:
            pairs.append((seconds, told["seconds"]))
            peaks.append((peak, told["peak_bytes"]))
        shutil.rmtree(ours)
        shutil.rmtree(theirs)
    return {
        "seconds": ratio_of_pairs(pairs),
        "peak_bytes": peaks[-1][0],
        "against_peak_bytes": peaks[-1][1],
    }


def make_scales(pyramid: Pyramid) -> None:
    """Make the scales of a volume, in this thread."""
    for stage in pyramid.stages:
        do = stage.make_worker()
        for index in range(stage.count):
            do(index)


def check_same_scales(pyramid: Pyramid, theirs: Path) -> None:
    """Compare the voxels of all scales: rounding may differ by one."""
    for number, scale in enumerate(pyramid.scales, 1):
        found = pyramid.volume.open_scale(scale).read(scale.bounds)
        expected = open_volume(theirs.as_uri(), scale=number)
        assert expected.bounds == scale.bounds
        assert np.abs(found.astype(int) - expected.read(scale.bounds)).max() <= 1


def compare_conversions(
    folder: Path, image: NDArray[np.uint8], format: str, repeats: int
) -> dict[str, Any]:
    """Seconds of a conversion over those of a copy by TensorStore in one call."""
    source = write_blocks(folder / "source", image)
    plan = plan_conversion(source, f"file://{folder}/ours", ConversionOptions(format=format))
    assert isinstance(plan, BlockConversion)
    spec = replace(plan.spec, url=f"file://{folder}/theirs")

    def convert() -> None:
        fresh(plan.spec)
        copy = plan.task.make_worker()
        for index in range(plan.task.count):
            copy(index)

    def copy_at_once() -> None:
        fresh(spec)
        target = open_output(spec)
        assert target is not None
        target.store.write(open_volume(source).store).result()

    seconds = ratio(convert, copy_at_once, repeats, process_time)
    for url in (plan.spec.url, spec.url):
        volume = open_volume(url)
        assert np.array_equal(volume.read(volume.bounds)[0], image)
    return seconds


def fresh(spec: OutputSpec) -> None:
    """Create an empty volume in place of what is there."""
    shutil.rmtree(spec.url.removeprefix("file://"), ignore_errors=True)
    create_output(spec)


if __name__ == "__main__":
    main()
