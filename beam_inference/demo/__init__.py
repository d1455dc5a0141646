"""The demo: tissue segmentation of a brain MRI template, on data that nilearn's wheel carries.

It takes the same path as a user's job: a volume on disk, a job file, ``run``, ``verify --deep``.
Then it draws what came out. One averaged brain, a network of minutes: a demonstration, not for
clinical use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.config.formats import OutputSpec
from beam_inference.demo.mni import load_t1
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
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
            f"{folder / 'tissue'} has lost its state folder while the demo ran; run it again"
        )
    draw(_voxels(folder / "t1"), _voxels(folder / "tissue"), resolved.plan.chunks, figure)
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


def draw(t1: NDArray[np.uint8], tissue: NDArray[np.uint8], chunks: ChunkGrid, path: Path) -> None:
    """A figure of one coronal and one axial slice: input, grey and white matter, and all overlaid.

    ``t1`` is (1, z, y, x); ``tissue`` (3, z, y, x) with the channels other, grey, white. Dashed
    lines are the places
    where chunks meet: no seam is to be seen there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, depth, height, _ = t1.shape
    views = [
        ("coronal", (slice(None), height // 2), (0, 2)),
        ("axial", (depth // 2, slice(None)), (1, 2)),
    ]
    figure, rows = pyplot.subplots(2, 4, figsize=(15, 8), facecolor="black", layout="constrained")
    for row, (view, (z, y), (vertical, horizontal)) in zip(rows, views, strict=True):
        image = t1[0, z, y]
        grey = tissue[1, z, y]
        white = tissue[2, z, y]
        overlay = np.stack([image / 255] * 3, -1) * 0.6
        overlay[..., 0] += 0.4 * (white / 255)
        overlay[..., 1] += 0.3 * (grey / 255)
        titles = ("T1 (input)", "grey matter", "white matter", "grey in green, white in red")
        for axes, title, picture in zip(row, titles, (image, grey, white, overlay), strict=True):
            axes.imshow(
                picture,
                cmap="gray",
                vmin=0,
                vmax=255 if picture.ndim == 2 else None,
                origin="lower",
            )
            for border in _borders(chunks, vertical):
                axes.axhline(border - 0.5, color="deepskyblue", lw=0.7, ls=(0, (4, 4)))
            for border in _borders(chunks, horizontal):
                axes.axvline(border - 0.5, color="deepskyblue", lw=0.7, ls=(0, (4, 4)))
            axes.set_title(f"{title}, {view}", color="white", fontsize=11)
            axes.set_axis_off()
    figure.suptitle(
        "dashed: where chunks meet. A demonstration on one averaged brain, not for clinical use",
        color="white",
    )
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _borders(chunks: ChunkGrid, axis: int) -> list[int]:
    return [chunks.axis_interval(axis, position)[0] for position in range(1, chunks.shape[axis])]
