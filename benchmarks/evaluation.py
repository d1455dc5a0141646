"""Time and memory of judging a segmentation of 520³ voxels; compared with scikit-image."""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from skimage import metrics

from beam_inference.evaluation.evaluate import evaluate
from benchmarks.bench import write_voxels


def make_labels(side: int, cell: int, seed: int) -> np.ndarray:
    """Labels of about ``(side / cell)³`` slanted blocks with rough borders."""
    random = np.random.default_rng(seed)
    count = 2 * side // cell + 3
    z, y, x = np.ogrid[:side, :side, :side]
    rough = random.integers(0, 3, (side, side, 1))
    slanted = ((z + y // 2 + rough) // cell, (y + x // 2) // cell, (x + z // 2) // cell)
    labels: np.ndarray = (slanted[0] * count + slanted[1]) * count + slanted[2] + 1
    return labels.astype(np.uint32)


def main() -> None:
    """Write two segmentations, judge one by the other, and print seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", type=int, nargs="?", default=520, help="voxels along each axis")
    side = parser.parse_args().side
    with tempfile.TemporaryDirectory() as folder:
        urls = []
        arrays = []
        for number, cell in enumerate((40, 52)):
            path = Path(folder) / f"labels{number}"
            labels = make_labels(side, cell, number)
            write_voxels(path, labels[None])
            urls.append(path.as_uri())
            arrays.append(labels)
        start = time.monotonic()
        evaluation = evaluate(urls[0], urls[1]).evaluation
        seconds = time.monotonic() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        assert evaluation is not None
        assert evaluation.objects is not None
        print(f"evaluate: {seconds:.1f} s for {side}³ voxels; process peak {peak:.2f} GiB")
        start = time.monotonic()
        split, merge = metrics.variation_of_information(  # type: ignore[no-untyped-call]
            arrays[1], arrays[0]
        )
        error = metrics.adapted_rand_error(  # type: ignore[no-untyped-call]
            arrays[1], arrays[0], ignore_labels=()
        )[0]
        print(f"scikit-image: {time.monotonic() - start:.1f} s")
        difference = max(
            abs(evaluation.objects.information_split - split),
            abs(evaluation.objects.information_merge - merge),
            abs(evaluation.objects.adapted_rand_error - error),
        )
        print(f"greatest difference: {difference:.2g}")


if __name__ == "__main__":
    main()
