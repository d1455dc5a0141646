"""Compare connected components with cc3d: seconds of the processor, all threads together.

    python -m benchmarks.components --data ../shared/data

The foreground is what is bright in FIB-25: one large component and many small ones. Ours go through
all stages of ``components``, from a volume to a volume, both in memory, in chunks of 128³, one
thread. cc3d labels the whole array and measures the components, as our table does; once with
reading and writing the same volumes, and once without. Written to
``benchmarks/results/components.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cc3d
import numpy as np
from numpy.typing import NDArray

from beam_inference.config.formats import OutputSpec
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.segmentation.component_job import plan_components
from beam_inference.segmentation.component_stages import component_stages
from beam_inference.segmentation.layout import Layout
from beam_inference.segmentation.numbering import Stage
from beam_inference.segmentation.plans import ComponentPlan
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output
from benchmarks.measure import machine, peak_bytes, ratio

SOURCE = "memory://image"
THRESHOLD = 140
CHUNK = (128, 128, 128)
RESULTS = Path(__file__).parent / "results" / "components.json"
_names = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of FIB-25")
    parser.add_argument("--repeats", type=int, default=5)
    known = parser.parse_args()
    image = np.load(known.data / "fib25_medulla_train2_image.npy")
    box = BoundingBox((0, 0, 0), image.shape)
    spec = OutputSpec(SOURCE, "precomputed", "uint8", 1, box, (64, 64, 64), (10.0, 10.0, 10.0))
    create_output(spec).write(box, image[np.newaxis])
    figures: dict[str, Any] = {
        "machine": machine("connected-components-3d", "tensorstore"),
        "voxels": image.size,
        "components": int(label(image >= THRESHOLD)),
        "time": ratio(ours, volume_to_volume, known.repeats, time.process_time),
        "time, cc3d in memory": ratio(
            ours, lambda: label(image >= THRESHOLD), known.repeats, time.process_time
        ),
        "peak_bytes_per_voxel": {
            "beam-inference": round(peak_bytes(ours) / image.size, 1),
            "cc3d": round(peak_bytes(volume_to_volume) / image.size, 1),
        },
        "stages": stage_seconds(),
    }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def label(foreground: NDArray[np.bool_]) -> int:
    """Label and measure in memory; the number of components."""
    labels, count = cc3d.connected_components(
        foreground, connectivity=6, return_N=True, out_dtype=np.uint32
    )
    cc3d.statistics(labels)
    return int(count)


def volume_to_volume() -> None:
    """The same from a volume to a volume."""
    volume = open_volume(SOURCE)
    foreground = volume.read(volume.bounds)[0] >= THRESHOLD
    labels = cc3d.connected_components(foreground, connectivity=6, out_dtype=np.uint32)
    cc3d.statistics(labels)
    create_output(_plan().output).write(volume.bounds, labels[np.newaxis])


def ours() -> None:
    """All stages, one after the other."""
    for stage in _stages():
        _do_all(stage)


def stage_seconds() -> dict[str, float]:
    """Seconds of the processor that each stage takes."""
    seconds = {}
    for stage in _stages():
        start = time.process_time()
        _do_all(stage)
        seconds[stage.name] = round(time.process_time() - start, 3)
    return seconds


def _stages() -> Iterator[Stage]:
    work = _plan()
    yield from component_stages(replace(work, scratch_url=f"{work.output.url}/scratch"))


def _plan() -> ComponentPlan:
    return plan_components(
        SOURCE,
        f"memory://components{next(_names)}",
        threshold=THRESHOLD,
        layout=Layout(chunk_shape=CHUNK),
        storage=LOCAL,
    )


def _do_all(stage: Stage) -> None:
    do = stage.make_worker()
    for index in range(stage.count):
        do(index)


if __name__ == "__main__":
    main()
