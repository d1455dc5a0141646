"""Receipts and resolved jobs that no worker wrote, for tests of what reads them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from helpers import job_values
from numpy.typing import NDArray

from beam_inference.config.definite import EngineSettings, Settings, make_definite
from beam_inference.config.job_file import parse_job
from beam_inference.errors import Stage
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.records import (
    Part,
    Receipt,
)
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.seals import open_record, seal_record

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GRID = ChunkGrid(BoundingBox((3, -5, 2), (43, 65, 52)), (16, 32, 32))


FURTHER_INPUT = {
    "bounds": {"start": [0, 0, 0], "stop": [1, 1, 1]},
    "channels": 1,
    "dtype": "uint8",
    "block_bytes": 1,
}
"""What a record tells of a further input."""


def receipt(
    chunk: int,
    array: NDArray[Any] | None = None,
    *,
    at: float = 0.0,
    seconds: dict[Stage, float] | None = None,
    attempts: dict[Stage, int] | None = None,
    worker: str = "a:1",
    launch: str = "one",
    grid: ChunkGrid = GRID,
) -> Receipt:
    """A receipt of a chunk, finished so many seconds after :data:`NOW`."""
    box = grid.core_box(chunk)
    return Receipt(
        chunk=chunk,
        parts=[] if array is None else [Part.of(box, array)],
        batch_size=1,
        uniform_patches=0,
        seconds=seconds or {"read": 1.0, "infer": 2.0, "write": 1.0},
        attempts=attempts or {"read": 1, "infer": 1, "write": 1},
        finished_at=NOW + timedelta(seconds=at),
        worker=worker,
        launch=launch,
        fingerprint="f",
    )


def replace_in_record(path: Path, old: str, new: str) -> None:
    """Replace a text in a record of a chunk, which is sealed again as if written so."""
    text = open_record(path.read_bytes()).decode()
    assert old in text
    path.write_text(seal_record(text.replace(old, new)))


def resolved(chunk_shape: Zyx = (16, 16, 16), **sections: Any) -> ResolvedJob:
    """A small job of the identity network."""
    config = parse_job(job_values("in", "out", **sections), Path("/data"))
    inference = config.inference
    settings = Settings(
        device="cpu",
        threads=inference.threads or 1,
        normalize=cast("Any", config.model.normalize),
        chunk_shape=chunk_shape,
        strategy=config.stated_strategy or "recompute",
        chunk_crop_margin=inference.chunk_crop_margin,
        value_ranges={"output": config.output.value_range},
    )
    engine = EngineSettings(
        inference.engine, inference.memory_format, cast("int", inference.batch_size)
    )
    config = make_definite(config, settings, engine)
    box = BoundingBox((0, 0, 0), (64, 64, 64))
    return ResolvedJob(
        config=config,
        input_bounds=box,
        input_channels=1,
        input_dtype="uint8",
        input_block_shape=(16, 16, 16),
        roi=box,
        output_bounds=box,
        voxel_size_nm=(8.0, 8.0, 8.0),
        model_sha256="identity",
        engine={"engine": "identity"},
        working_set_bytes=0,
        versions={},
    )
