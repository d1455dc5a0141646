"""Run one tool on an nnU-Net results folder: ``python nnunet_run.py TOOL FOLDER REPEATS``.

With "bound" as TOOL, and the python of nnU-Net, it prints what the machine itself allows: the
floating-point operations of nnU-Net's run, and how many of them per second products of matrices do.

Run by ``benchmarks.nnunet``, with the python of this project for "beam-inference", and with that of
nnU-Net for "nnU-Net". FOLDER has ``model``, the results folder, the image as ``image.npy`` (C, Z,
Y, X) and as a volume ``image``, and ``job.yaml``, which ``beam-inference init`` wrote. Both go from
the image on disk to labels on disk. Prints JSON: seconds of each run after the first, and the peak
of memory beyond what is held between them. A run of ours is the count of levels, and the job from
its first chunk on; one of nnU-Net has its network loaded.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

# this file is run by name, also where nothing is installed
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.measure import peak_bytes, work_of


def beam_inference(folder: Path) -> Callable[[], float]:
    from beam_inference import arrays
    from beam_inference.config.job_file import parse_job
    from beam_inference.config.yaml_text import parse_yaml
    from beam_inference.launch.count_levels import count_levels
    from beam_inference.launch.run_job import run_job

    values = parse_yaml((folder / "job.yaml").read_text())
    assert isinstance(values, dict)
    output = folder / "labels"
    values["output"]["path"] = output.name

    def run() -> float:
        shutil.rmtree(output, ignore_errors=True)  # of an earlier run, which would be resumed
        start = time.perf_counter()
        count_levels(str(folder / "image"), str(folder / "levels.json"), overwrite=True)
        counted = time.perf_counter() - start
        outcome = run_job(parse_job(values, folder))
        ended = time.time()
        assert outcome.exit_code == 0, outcome
        first, *_ = work_of(f"file://{output}")
        arrays.give_back()  # else the next peak would be counted from what this run has left
        return counted + ended - first

    return run


def nnunet(folder: Path) -> Callable[[], float]:
    for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        os.environ[variable] = str(folder)
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(
        perform_everything_on_device=False, device=torch.device("cpu"), allow_tqdm=False
    )
    predictor.initialize_from_trained_model_folder(str(folder / "model"), None)

    def run() -> float:
        start = time.perf_counter()
        image = np.load(folder / "image.npy").astype(np.float32)
        spacing = {"spacing": json.loads((folder / "spacing.json").read_text())}
        labels = predictor.predict_single_npy_array(image, spacing)
        np.save(folder / "labels.npy", labels)
        return time.perf_counter() - start

    return run


TOOLS: dict[str, Callable[[Path], Callable[[], float]]] = {
    "beam-inference": beam_inference,
    "nnU-Net": nnunet,
}


def _multiply(size: int = 2048, repeats: int = 20) -> float:
    """Multiply float32 matrices; the operations per second of the fastest of all repeats."""
    left, right = torch.rand(2, size, size)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def bound(folder: Path) -> dict[str, float]:
    """Count the operations of nnU-Net's run, and measure how fast the machine multiplies."""
    run = nnunet(folder)
    with FlopCounterMode(display=False) as counter:
        run()
    return {"operations": counter.get_total_flops(), "operations_per_second": _multiply()}


def main(tool: str, folder: str, repeats: str) -> None:
    """Run a tool, and print its figures as the last line."""
    logging.disable(logging.WARNING)
    if tool == "bound":
        figures = bound(Path(folder))
        print()
        print(json.dumps(figures))
        return
    run = TOOLS[tool](Path(folder))
    run()  # libraries load what they need, and make their threads
    seconds: list[float] = []
    peak = peak_bytes(lambda: seconds.extend(run() for _ in range(int(repeats))))
    print()
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
