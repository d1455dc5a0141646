"""Compare watershed and agglomeration with waterz, in memory: seconds, and memory.

    python -m benchmarks.segment --data ../shared/data [--side 160]

The affinities are of FIB-25's bodies and membranes, see :func:`affinities`; ours go through all
stages of ``segment``, in chunks of 96³, one thread, from a volume to a volume, both in memory.
Seconds are of the processor, all threads of the process together.

Of maps that are saturated, 0 or 255 everywhere, the watershed alone is timed, and all stages: where
255 joins in any case, and where it does not, so that plateaus fall apart into lines of voxels.
Written to ``benchmarks/results/segment.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import waterz
from numpy.typing import NDArray
from scipy import ndimage

from beam_inference.config.formats import OutputSpec
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.segmentation.affinities import read_links
from beam_inference.segmentation.layout import Layout
from beam_inference.segmentation.numbering import Stage
from beam_inference.segmentation.segment_job import plan_segmentation
from beam_inference.segmentation.segment_stages import segment_stages
from beam_inference.segmentation.watershed import Links, find_fragments
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output
from benchmarks.measure import machine, peak_bytes, ratio

LOW = 0.1
HIGH = 0.9999
THRESHOLD = 0.6
CHUNK = (96, 96, 96)
RESULTS = Path(__file__).parent / "results" / "segment.json"
_names = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of FIB-25")
    parser.add_argument("--side", type=int, default=160, help="voxels of the volume on a side")
    parser.add_argument("--repeats", type=int, default=5)
    known = parser.parse_args()
    crop = (slice(0, known.side),) * 3
    image = np.load(known.data / "fib25_medulla_train2_image.npy")[crop]
    with np.load(known.data / "fib25_medulla_train2_labels.npz") as file:
        made = affinities(image, file["labels"][crop])
    box = BoundingBox((0, 0, 0), image.shape)
    create_output(_spec("memory://affinities", "float32", box)).write(box, made)

    def theirs() -> None:
        next(
            waterz.agglomerate(
                made, [1 - THRESHOLD], aff_threshold_low=LOW, aff_threshold_high=HIGH
            )
        )

    fragments, _, _ = find_fragments(_links("memory://affinities"), LOW, HIGH)

    def theirs_of_fragments() -> None:
        next(waterz.agglomerate(made, [1 - THRESHOLD], fragments=fragments.astype(np.uint64)))

    figures = {
        "machine": machine("waterz", "connected-components-3d", "tensorstore"),
        "voxels": image.size,
        "time": ratio(segmented, theirs, known.repeats, time.process_time),
        "time, waterz of our fragments": ratio(
            segmented, theirs_of_fragments, known.repeats, time.process_time
        ),
        "peak_bytes_per_voxel": {
            "beam-inference": round(peak_bytes(segmented) / image.size, 1),
            "waterz": round(peak_bytes(theirs) / image.size, 1),
        },
        "stages": stage_seconds(),
        "saturated": saturated(made, known.repeats),
    }
    figures["voxels_per_second"] = round(image.size / figures["time"]["seconds"])
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def saturated(made: NDArray[np.float32], repeats: int) -> dict[str, Any]:
    """Voxels per second of the watershed, and of all stages, where affinities are 0 or 255."""
    values = np.where(made >= 0.5, np.uint8(255), np.uint8(0))
    box = BoundingBox((0, 0, 0), made.shape[1:])
    create_output(_spec("memory://saturated", "uint8", box)).write(box, values)
    links = _links("memory://saturated")
    rows = {}
    for name, high in (("255 joins", 255), ("plateaus fall apart", 256)):

        def basins(high: int = high) -> None:
            find_fragments(links, 1, high)

        def stages(high: int = high) -> None:
            segmented("memory://saturated", threshold=128, low=1, high=high)

        seconds = ratio(basins, stages, repeats, time.process_time)
        rows[name] = {
            "fragments": find_fragments(links, 1, high)[1],
            "watershed_voxels_per_second": round(box.size / seconds["seconds"]),
            "all_stages_voxels_per_second": round(box.size / seconds["against_seconds"]),
        }
    return rows


def _links(url: str) -> Links:
    volume = open_volume(url, channel=[0, 1, 2])
    return read_links(volume, volume.bounds, to_next=False)


def _spec(url: str, dtype: str, box: BoundingBox) -> OutputSpec:
    return OutputSpec(url, "precomputed", dtype, 3, box, (48, 48, 48), (10.0, 10.0, 10.0))


def affinities(image: NDArray[np.uint8], labels: NDArray[Any]) -> NDArray[np.float32]:
    """Affinities (3, z, y, x) to the voxels before along z, y and x, right at every boundary.

    Within a body they are 0.5 … 1, as bright as the smoothed image is there; else 0 … 0.45,
    likewise.
    """
    bright = np.clip((ndimage.gaussian_filter(image.astype(np.float32), 1) - 90) / 80, 0, 1)
    made = np.empty((3, *labels.shape), np.float32)
    for axis in range(3):
        lesser = np.minimum(bright, np.roll(bright, 1, axis))
        inside = (labels == np.roll(labels, 1, axis)) & (labels > 0)
        made[axis] = np.where(inside, 0.5 + 0.5 * lesser, 0.45 * lesser)
    return made


def segmented(
    source: str = "memory://affinities",
    *,
    threshold: float = THRESHOLD,
    low: float = LOW,
    high: float = HIGH,
) -> None:
    """All stages, one after the other."""
    for _, do_all in _stages(source, threshold, low, high):
        do_all()


def stage_seconds() -> dict[str, float]:
    """Seconds of the processor that each stage takes."""
    seconds = {}
    for name, do_all in _stages("memory://affinities", THRESHOLD, LOW, HIGH):
        start = time.process_time()
        do_all()
        seconds[name] = round(time.process_time() - start, 3)
    return seconds


def _stages(
    source: str, threshold: float, low: float, high: float
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The name of each stage, and what does all of it."""
    url = f"memory://segments{next(_names)}"
    work = plan_segmentation(
        source,
        url,
        threshold=threshold,
        low=low,
        high=high,
        layout=Layout(chunk_shape=CHUNK),
        storage=LOCAL,
    )
    work = replace(work, scratch_url=f"{url}/scratch")
    for stage in segment_stages(work):
        yield stage.name, partial(_do_all, stage)


def _do_all(stage: Stage) -> None:
    do = stage.make_worker()
    for index in range(stage.count):
        do(index)


if __name__ == "__main__":
    main()
