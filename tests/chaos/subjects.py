"""The commands that are disturbed, and the volumes that they read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import toy_networks
from helpers import job_values, read_volume, toy, write_job, write_volume

CHUNK_SHAPE = (8, 8, 8)
SECTION_SHAPE = (80, 96)
"""Voxels of the input along y and x, of 120 chunks; how many sections there are is asked for."""


@dataclass(frozen=True)
class Subject:
    """A command that makes something.

    Attributes:
        name: what it is called in messages.
        words: returns the command, given the URL of the inputs, the folder of the output, and a
            folder for a job file.
        is_job: whether it is ``run``, whose result ``status``, ``verify`` and ``clean`` know.
        begin: makes what must be there before the command, given the inputs' and output's folders.
    """

    name: str
    words: Callable[[str, Path, Path], list[str]]
    is_job: bool = False
    begin: Callable[[Path, Path], None] | None = None


def write_inputs(folder: Path, chunks: int) -> None:
    """Write the volumes that the commands read, of at least so many chunks of a job.

    They are called ``em``, ``map`` and ``affinities``.
    """
    random = np.random.default_rng(0)
    layers = -(-chunks * math.prod(CHUNK_SHAPE[1:]) // math.prod(SECTION_SHAPE))
    em = random.integers(0, 256, (layers * CHUNK_SHAPE[0], *SECTION_SHAPE), np.uint8)
    write_volume(folder / "em", em, block_shape=(16, 32, 32))
    write_volume(folder / "map", smooth(em), block_shape=(16, 16, 16))
    affinities = np.stack([smooth(np.roll(em, axis, axis)) for axis in range(3)])
    write_volume(folder / "affinities", affinities, block_shape=(16, 16, 16))


def smooth(array: np.ndarray) -> np.ndarray:
    """Return an array of uint8 in which neighbours are alike, so that objects are seen in it."""
    from scipy.ndimage import gaussian_filter

    blurred = gaussian_filter(array.astype(np.float32), 2)
    low = blurred.min()
    stretched: np.ndarray = np.rint(255 * (blurred - low) / (blurred.max() - low))
    return stretched.astype(np.uint8)


def make_job(seams: str) -> Callable[[str, Path, Path], list[str]]:
    """Return a function that writes the job file, and returns the words of ``run``."""

    def words(inputs: str, output: Path, folder: Path) -> list[str]:
        # workers elsewhere know by the file that they have the same network
        weights = folder / "network.pt"
        torch.save(toy_networks.conv().state_dict(), weights)
        values = job_values(
            f"{inputs}/em",
            output,
            model=toy(
                "conv",
                weights=str(weights),
                output_channels=2,
                normalize="unit",
                # a launch on Dask has no trial that could tell
                prediction_bound=4,
            ),
            output={"block_shape": list(CHUNK_SHAPE)},
            inference={
                "patch_shape": [4, 8, 8],
                "patch_overlap": [1, 2, 2],
                "chunk_shape": list(CHUNK_SHAPE),
                "batch_size": 8,
                "threads": 1,
                "seams": seams,
            },
            # what killed workers have claimed is done by others before the time is up
            job={"timeouts": {"claim": 6}},
        )
        return ["run", str(write_job(folder / "job.yaml", values))]

    return words


def _copy_em(inputs: Path, output: Path) -> None:
    write_volume(output, read_volume(inputs / "em"), block_shape=CHUNK_SHAPE)


RECOMPUTE = Subject("run, recompute", make_job("recompute"), is_job=True)
EXCHANGE = Subject("run, exchange", make_job("exchange"), is_job=True)
OTHERS = (
    Subject(
        "convert",
        lambda inputs, output, _: [
            "convert",
            f"{inputs}/em",
            str(output),
            "--format=zarr3",
            "--block_shape=8,8,8",
        ],
    ),
    Subject(
        "pyramid",
        lambda _inputs, output, _: ["pyramid", str(output), "--factor=2x2x2", "--levels=2"],
        begin=_copy_em,
    ),
    Subject(
        "levels",
        lambda inputs, output, _: ["levels", f"{inputs}/em", "--to", f"{output}/levels.json"],
    ),
    Subject(
        "components",
        lambda inputs, output, _: [
            "components",
            f"{inputs}/map",
            str(output),
            "--threshold=140",
            "--chunk_shape=16x16x16",
            "--block_shape=16x16x16",
        ],
    ),
    Subject(
        "segment",
        lambda inputs, output, _: [
            "segment",
            f"{inputs}/affinities",
            str(output),
            "--threshold=150",
            "--low=60",
            "--high=240",
            "--chunk_shape=16x16x16",
            "--block_shape=16x16x16",
        ],
    ),
)
