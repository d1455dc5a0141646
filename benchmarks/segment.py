"""Compare watershed and agglomeration with waterz, in memory: seconds, and memory.

    python -m benchmarks.segment --data ../shared/data [--side 160]

The affinities are of FIB-25's bodies and membranes, see :func:`affinities`; ours go through all
stages of ``segment``, in chunks of 96³, one thread, from a volume to a volume, both in memory.
Written to ``benchmarks/results/segment.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import waterz
from numpy.typing import NDArray
from scipy import ndimage

from beam_inference.config.formats import OutputSpec
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.segmentation.layout import Layout
from beam_inference.segmentation.segment_job import plan_segmentation
from beam_inference.segmentation.segment_stages import segment_stages
from beam_inference.volumes.kvstores import LOCAL
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
    parser.add_argument("--repeats", type=int, default=3)
    known = parser.parse_args()
    crop = (slice(0, known.side),) * 3
    image = np.load(known.data / "fib25_medulla_train2_image.npy")[crop]
    with np.load(known.data / "fib25_medulla_train2_labels.npz") as file:
        made = affinities(image, file["labels"][crop])
    box = BoundingBox((0, 0, 0), image.shape)
    spec = OutputSpec(
        "memory://affinities", "precomputed", "float32", 3, box, (48, 48, 48), (10.0, 10.0, 10.0)
    )
    create_output(spec).write(box, made)

    def theirs() -> None:
        next(
            waterz.agglomerate(
                made, [1 - THRESHOLD], aff_threshold_low=LOW, aff_threshold_high=HIGH
            )
        )

    figures = {
        "machine": machine("waterz", "connected-components-3d", "tensorstore"),
        "voxels": image.size,
        "time": ratio(segmented, theirs, known.repeats),
        "peak_bytes_per_voxel": {
            "beam-inference": round(peak_bytes(segmented) / image.size, 1),
            "waterz": round(peak_bytes(theirs) / image.size, 1),
        },
    }
    figures["voxels_per_second"] = round(image.size / figures["time"]["seconds"])
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


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


def segmented() -> None:
    """All stages, one after the other."""
    url = f"memory://segments{next(_names)}"
    work = plan_segmentation(
        "memory://affinities",
        url,
        threshold=THRESHOLD,
        low=LOW,
        high=HIGH,
        layout=Layout(chunk_shape=CHUNK),
        storage=LOCAL,
    )
    work = replace(work, scratch_url=f"{url}/scratch")
    for stage in segment_stages(work):
        do = stage.make_worker()
        for index in range(stage.count):
            do(index)


if __name__ == "__main__":
    main()
