"""Runs the demo: imports the template, runs and verifies the job, and draws the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from beam_inference.arrays import AnyArray
from beam_inference.config.formats import OutputSpec
from beam_inference.demo.figure import draw_figure
from beam_inference.demo.mni import load_t1
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.state import State
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output, open_output

_HERE = Path(__file__).parent
_MILLIMETRE = 1e6


def run_demo(folder: Path, command: Callable[[Sequence[str]], int]) -> int:
    """Import the template, run the job, verify it and draw a figure.

    Args:
        folder: where the demo's files are written.
        command: the command line; it takes the words after ``beam-inference``, and returns an exit
            code.

    Returns:
        the exit code of the first step that fails, or 0.

    Raises:
        ConfigError: what the demo needs beside the package is not installed.
    """
    missing = [name for name in ("nilearn", "matplotlib") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {' and '.join(missing)}: pip install 'beam-inference[demo]'"
        )
    folder = folder.absolute()
    job = folder / "job.yaml"
    print(f"1. importing the MNI152 T1 template into {folder / 't1'}")
    _import_t1(f"file://{folder / 't1'}")
    job.write_text(
        (_HERE / "job.yaml").read_text().replace("WEIGHTS", str(_HERE / "tissue.safetensors"))
    )
    for number, words in enumerate((["run", str(job)], ["verify", str(job), "--deep"]), 2):
        print(f"{number}. beam-inference {' '.join(words)}", flush=True)
        code = command(words)
        if code:
            return code
    figure = folder / "tissue.png"
    resolved = State(f"file://{folder / 'tissue' / '_beam_inference'}").load_job()
    if resolved is None:
        raise ConfigError(
            f"{folder / 'tissue'} lost its state folder while the demo ran; run the demo again"
        )
    draw_figure(_voxels(folder / "t1"), _voxels(folder / "tissue"), resolved.plan.chunks, figure)
    print(f"4. {figure}: the input, each tissue, and where the chunks meet")
    return 0


def _import_t1(url: str) -> None:
    t1 = load_t1()[None]
    spec = OutputSpec(
        url=url,
        format="precomputed",
        dtype="uint8",
        channels=1,
        bounds=BoundingBox((0, 0, 0), t1.shape[1:]),
        block_shape=(64, 64, 64),
        voxel_size_nm=(_MILLIMETRE, _MILLIMETRE, _MILLIMETRE),
    )
    (open_output(spec) or create_output(spec)).write(spec.bounds, t1)


def _voxels(folder: Path) -> AnyArray:
    volume = open_volume(f"file://{folder}")
    return volume.read(volume.bounds)
