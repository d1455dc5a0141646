"""What tests share: volumes written for them, job files, and the oracle."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from beam_inference.config.formats import OutputSpec
from beam_inference.config.job_file import parse_job
from beam_inference.config.storage import Storage
from beam_inference.geometry import zyx
from beam_inference.geometry.blending import BUMP, BlendWindow
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import PatchLattice
from beam_inference.geometry.plan import InferencePlan, make_plan
from beam_inference.job.messages import Launch
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.launch.prepare import prepare
from beam_inference.operators.level_stages import plan_level_stages
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output
from beam_inference.volumes.provenance import KEY
from beam_inference.worker.worker import Worker

TOYS = Path(__file__).parent / "toy_networks.py"
SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"

DATAFLOW = [
    *(
        "--runner=DataflowRunner",
        "--sdk_container_image=host/image:1",
        "--project=my-project",
        "--region=europe-west4",
    ),
    *("--staging_location=gs://bucket/staging", "--temp_location=gs://bucket/temp"),
]
"""Flags of a launch on Dataflow that is complete."""


OF_RANGE = 1e-6 * 256
"""Differences that are allowed between a uint8 volume and what the identity gives of it."""


def vary_each(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by all combinations of values; those that vary several at once are slow.

    Args:
        values: of each parameter, the usual one first.
    """
    combined = []
    for places in product(*map(enumerate, values.values())):
        varied = sum(number > 0 for number, _ in places)
        marks = [pytest.mark.slow] if varied > 1 else []
        combined.append(pytest.param(*(each for _, each in places), marks=marks))
    return pytest.mark.parametrize(list(values), combined)


def write_volume(
    folder: Path,
    array: np.ndarray,
    start: tuple[int, int, int] = (0, 0, 0),
    *,
    block_shape: tuple[int, int, int] = (32, 32, 32),
    voxel_size_nm: tuple[float, float, float] = (10.0, 10.0, 10.0),
    format: str = "precomputed",
    shard_shape: tuple[int, int, int] | None = None,
) -> str:
    """Write an array (z, y, x) or (channels, z, y, x) as a volume; its URL."""
    array = array if array.ndim == 4 else array[None]
    box = BoundingBox(start, zyx.add(start, zyx.triple(array.shape[1:])))
    spec = OutputSpec(
        url=f"file://{folder}",
        format=format,
        dtype=array.dtype.name,
        channels=array.shape[0],
        bounds=box,
        block_shape=block_shape,
        voxel_size_nm=voxel_size_nm,
        shard_shape=shard_shape,
    )
    create_output(spec).write(box, array)
    return spec.url


def write_levels(url: str, folder: Path, *, finds_object: bool = False) -> Path:
    """Write the file that ``beam-inference levels`` writes of a volume, without Beam."""
    target = f"file://{folder}/levels.json"
    for stage in plan_level_stages(
        url, target, scale=0, channel=None, storage=Storage(), finds_object=finds_object
    ):
        for index in range(stage.count):
            stage.make_worker()(index)
    return folder / "levels.json"


def read_volume(path: Path | str) -> np.ndarray:
    """All voxels of a volume: (channels, z, y, x)."""
    volume = open_volume(str(path) if "://" in str(path) else f"file://{path}")
    return volume.read(volume.bounds)


@contextmanager
def truncated(block: Path) -> Iterator[None]:
    """A stored block has lost all but its first bytes, and is whole again in the end."""
    whole = block.read_bytes()
    block.write_bytes(whole[:10])
    try:
        yield
    finally:
        block.write_bytes(whole)


def job_values(
    source: Path | str, output: Path | str, /, **sections: dict[str, Any]
) -> dict[str, Any]:
    """A small job as nested dicts: identity over small patches, with the keys of ``sections``."""
    values: dict[str, Any] = {
        "input": {"path": str(source)},
        "output": {
            "path": str(output),
            "dtype": "float32",
            "block_shape": [16, 16, 16],
            "shard_shape": None,  # so that tests can count blocks, and damage one
        },
        "model": {"path": "identity"},
        "inference": {
            "patch_shape": [8, 16, 16],
            "patch_overlap": [2, 8, 8],
            "chunk_shape": [16, 32, 32],
            "batch_size": 2,
            "device": "cpu",
            "engine": "torch",
        },
    }
    for section, keys in sections.items():
        if keys is None:
            values.pop(section, None)
        else:
            values.setdefault(section, {}).update(keys)
    return values


def write_job(path: Path, values: dict[str, Any]) -> Path:
    """Write a job file."""
    path.write_text(yaml.safe_dump(values))
    return path


def plan_of(
    roi: BoundingBox,
    patch: tuple[int, int, int],
    overlap: tuple[int, int, int],
    chunk: tuple[int, int, int],
    **other: Any,
) -> InferencePlan:
    """A plan for a volume that ends with the ROI, with blocks of one voxel and no margins.

    Arguments of :func:`make_plan` in ``other`` take precedence.
    """
    defaults: dict[str, Any] = {
        "volume": roi,
        "context": (0, 0, 0),
        "crop_margin": (0, 0, 0),
        "strategy": "recompute",
        "chunk_crop_margin": (0, 0, 0),
        "block_shape": (1, 1, 1),
    }
    return make_plan(
        **defaults | other,
        roi=roi,
        patch_shape=patch,
        patch_overlap=overlap,
        chunk_shape=chunk,
    )


def toy(name: str, **keys: Any) -> dict[str, Any]:
    """The model section of a job with a network of ``toy_networks.py``."""
    return {"path": f"{TOYS}:{name}", **keys}


POSITION = toy("position", output_channels=2, normalize="unit")
"""The model section of a job with a network that notices any error of geometry."""


def launch_of(
    source: Path | str, output: Path | str, /, seams: str = "exchange", **sections: dict[str, Any]
) -> Launch:
    """A launch of a small job, of :data:`POSITION` unless ``sections`` say otherwise."""
    sections["inference"] = {"seams": seams, **sections.get("inference", {})}
    values = job_values(source, output, **{"model": POSITION, **sections})
    return prepare(parse_job(values, Path(output).parent))


def do_job(values: dict[str, Any], folder: Path) -> ResolvedJob:
    """Do all chunks of a job without Beam, in both stages where there are two; its resolved form.

    Args:
        values: the job file.
        folder: which its paths are relative to.
    """
    worker = Worker(prepare(parse_job(values, folder)))
    chunks = range(worker.job.plan.chunks.count)
    if worker.job.plan.exchange is None:
        records = list(worker.infer_chunks(chunks))
    else:
        sums = list(worker.sum_chunks(chunks))
        assert {record.outcome for record in sums} <= {"summed"}
        records = list(worker.merge_seams(chunks))
    assert {record.outcome for record in records} == {"done"}
    return worker.job


def do_and_read(values: dict[str, Any], folder: Path) -> np.ndarray:
    """Do all chunks of a job without Beam; its output, (channels, z, y, x)."""
    do_job(values, folder)
    return read_volume(values["output"]["path"])


def bump(length: int) -> np.ndarray:
    """The bump of one patch on one axis, in the form of the paper; underflows for long patches."""
    d = 2 * (np.arange(length) + 0.5) / length - 1
    return np.exp(-1 / (1 - d**2))


def window_of(shape: tuple[int, int, int], window: BlendWindow) -> np.ndarray:
    """The window of a patch in three dimensions, by its formula; long patches' bumps underflow."""
    if window.kind == "constant":
        return np.ones(shape)
    if window.kind == "bump":
        values: np.ndarray = np.einsum("i,j,k->ijk", *map(bump, shape))
        return values.clip(window.floor)
    centres = [n // 2 if window.is_on_voxel else (n - 1) / 2 for n in shape]
    squares = [
        ((np.arange(n) - c) / (window.sigma * n)) ** 2 for n, c in zip(shape, centres, strict=True)
    ]
    gaussian: np.ndarray = np.exp(-sum(np.meshgrid(*squares, indexing="ij")) / 2)
    return gaussian.clip(window.floor)


def lattice_starts(lattice: PatchLattice, axis: int) -> list[int]:
    """Starts of patches on one axis, one by one."""
    start = lattice.domain.start[axis]
    room = lattice.domain.shape[axis] - lattice.patch_shape[axis]
    stride = lattice.patch_shape[axis] - lattice.patch_overlap[axis]
    if lattice.kind == "spread":
        steps = int(np.ceil(room / stride))
        return [start + int(np.round(room / max(1, steps) * k)) for k in range(steps + 1)]
    return sorted({start + min(k, room) for k in range(0, room + stride, stride)})


def oracle(
    lattice: PatchLattice,
    predict: Callable[[BoundingBox], np.ndarray],
    channels: int,
    window: BlendWindow = BUMP,
) -> tuple[np.ndarray, np.ndarray]:
    """The blended prediction over the whole domain and the sum of windows, in float64.

    It is computed without chunks and without the algebra of lattices. ``predict`` gives the float32
    prediction (channels, *patch) of a patch's box.
    """
    domain = lattice.domain
    total = np.zeros((channels, *domain.shape))
    weights = np.zeros(domain.shape)
    values = window_of(lattice.patch_shape, window)
    starts = [lattice_starts(lattice, axis) for axis in range(3)]
    for start in product(*starts):
        box = BoundingBox(zyx.triple(start), zyx.add(zyx.triple(start), lattice.patch_shape))
        where = box.slices_in(domain)
        total[(slice(None), *where)] += predict(box).astype(np.float64) * values
        weights[where] += values
    return total / weights, weights


def without_provenance(path: Path) -> bytes:
    """A file's content without what a volume tells of its making, such as shapes of chunks."""
    content = path.read_bytes()
    if path.name == "provenance":
        return b""
    if path.name not in ("zarr.json", ".zattrs", "attributes.json") or KEY.encode() not in content:
        return content
    values = json.loads(content)
    values.pop(KEY, None)
    values.get("attributes", {}).pop(KEY, None)
    return json.dumps(values).encode()


def files_of(output: Path) -> dict[str, bytes]:
    """What was made: voxels and table, without the state, and without what tells of the making."""
    return {
        str(path.relative_to(output)): without_provenance(path)
        for path in output.rglob("*")
        if path.is_file()
        and "_beam_inference" not in path.parts
        and not path.name.endswith(".__lock")
    }


def killed_in_each(command: list[str], output: Path, kind: str, stages: list[str]) -> Iterator[str]:
    """Run a command once for each stage, and kill it when a chunk of that stage is done.

    Yields:
        the stage in which the command was killed.
    """
    for stage in stages:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        deadline = time.monotonic() + 90
        while not list((output / "_beam_inference" / kind).glob(f"**/{stage}/done/*/*.json")):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        yield stage


def wait_for_text(path: Path) -> None:
    """Wait until a file is there, and not empty."""
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.1)
