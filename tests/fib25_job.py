"""Jobs over the FIB-25 volume with the affinity network of ``networks/fib25.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from helpers import read_volume

from beam_inference.cli.main import main
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State

NETWORKS = Path(__file__).parent / "networks"


def affinity_job(
    source: Path,
    output: Path,
    chunk_shape: tuple[int, int, int],
    *,
    batch_size: int = 4,
    roi: dict[str, Any] | None = None,
    block_shape: tuple[int, int, int] | None = None,
) -> dict[str, Any]:
    """Values of a job file with patches of 20×48×48 at an overlap of 4×16×16.

    Blocks are as large as chunks by default.
    """
    return {
        "input": {"path": str(source)},
        "output": {
            "path": str(output),
            "dtype": "float32",
            "block_shape": list(block_shape or chunk_shape),
        },
        "model": {
            "path": f"{NETWORKS / 'fib25.py'}:fib25_network",
            "weights": str(NETWORKS / "fib25.safetensors"),
            "output_channels": 3,
            "activation": "sigmoid",
            "normalize": "unit",
            "voxel_size_nm": [10, 10, 10],
        },
        "inference": {
            "patch_shape": [20, 48, 48],
            "patch_overlap": [4, 16, 16],
            "chunk_shape": list(chunk_shape),
            "batch_size": batch_size,
            "device": "cpu",
            "engine": "torch",
            "threads": 2,  # whatever the runner: they change the last bits
        },
        **({"roi": roi} if roi else {}),
    }


def run_affinities(path: Path, values: dict[str, Any]) -> tuple[np.ndarray, ResolvedJob]:
    """Run a job to its complete end; its output's voxels, and the job."""
    path.write_text(yaml.safe_dump(values))
    assert main(["run", str(path)]) == 0
    job = State(f"file://{values['output']['path']}/_beam_inference").load_job()
    assert job is not None
    return read_volume(values["output"]["path"]), job
