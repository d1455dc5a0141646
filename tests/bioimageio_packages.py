"""bioimage.io packages in both formats, with a small network of random weights."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

HALO = 4
"""More than the receptive radius of the network, which is 2."""


def make_network(dims: int = 2, channels: int = 1, outputs: int = 2) -> torch.nn.Module:
    """Two convolutions."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d if dims == 2 else torch.nn.Conv3d
    return torch.nn.Sequential(
        conv(channels, 4, 3, padding=1), torch.nn.ReLU(), conv(4, outputs, 3, padding=1)
    ).eval()


def space(dims: int) -> str:
    """Names of the axes of space."""
    return "zyx"[3 - dims :]


def described(
    dims: int = 2,
    preprocessing: Sequence[Any] = (),
    postprocessing: Sequence[Any] = (),
    channels: int = 1,
    classes: int = 2,
    **changes: Any,
) -> dict[str, Any]:
    """A description in format 0.5."""
    names = [f"c{number}" for number in range(channels)]
    sizes = {"min": 16, "step": 8}
    return {
        "format_version": "0.5.4",
        "type": "model",
        "name": "Two convolutions",
        "license": "MIT",
        "inputs": [
            {
                "id": "raw",
                "axes": [
                    {"type": "batch"},
                    {"type": "channel", "channel_names": names},
                    *({"type": "space", "id": axis, "size": sizes} for axis in space(dims)),
                ],
                "test_tensor": {"source": "test_input.npy"},
                "preprocessing": list(preprocessing),
            }
        ],
        "outputs": [
            {
                "id": "answer",
                "axes": [
                    {"type": "batch"},
                    {"type": "channel", "channel_names": ["a", "b"][:classes]},
                    *(
                        {
                            "type": "space",
                            "id": axis,
                            "halo": HALO,
                            "size": {"tensor_id": "raw", "axis_id": axis},
                        }
                        for axis in space(dims)
                    ),
                ],
                "test_tensor": {"source": "test_output.npy"},
                "postprocessing": list(postprocessing),
            }
        ],
        "weights": {"torchscript": {"source": "weights.pt", "pytorch_version": "2.13"}},
    } | changes


def described_04(
    dims: int = 2,
    preprocessing: Sequence[Any] = (),
    postprocessing: Sequence[Any] = (),
    **changes: Any,
) -> dict[str, Any]:
    """A description in format 0.4."""
    axes = f"bc{space(dims)}"
    return {
        "format_version": "0.4.9",
        "type": "model",
        "name": "Two convolutions",
        "license": "MIT",
        "inputs": [
            {
                "name": "raw",
                "axes": axes,
                "shape": {"min": [1, 1, *[16] * dims], "step": [0, 0, *[8] * dims]},
                "preprocessing": list(preprocessing),
            }
        ],
        "outputs": [
            {
                "name": "answer",
                "axes": axes,
                "shape": {
                    "reference_tensor": "raw",
                    "scale": [1.0, 0.0, *[1.0] * dims],
                    "offset": [0.0, 1.0, *[0.0] * dims],
                },
                "halo": [0, 0, *[HALO] * dims],
                "postprocessing": list(postprocessing),
            }
        ],
        "test_inputs": ["test_input.npy"],
        "test_outputs": ["test_output.npy"],
        "weights": {"torchscript": {"source": "weights.pt", "pytorch_version": "2.13"}},
    } | changes


def make_package(
    folder: Path,
    content: Any = None,
    *,
    dims: int = 2,
    before: Callable[[Any], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
    channels: int = 1,
    outputs: int = 2,
) -> Path:
    """Write a package, and return its folder.

    Args:
        folder: where.
        content: the description; by default one of format 0.5.
        dims: of the network.
        before: what is done to the example before the network sees it.
        after: what is done to the network's answer.
        channels: of the input.
        outputs: channels of the output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    network = make_network(dims, channels, outputs)
    shape = (1, channels, *[24] * dims)
    image = np.random.default_rng(0).integers(0, 255, shape).astype(np.float32)
    given = image if before is None else before(image)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is an old form
        answer = network(torch.from_numpy(given.astype(np.float32))).numpy()
        torch.jit.save(torch.jit.script(network), folder / "weights.pt")
    np.save(folder / "test_input.npy", image)
    np.save(folder / "test_output.npy", answer if after is None else after(answer))
    write_description(folder, content or described(dims, channels=channels))
    return folder


SOURCE = """\
import pathlib
import torch

pathlib.Path({planted!r}).write_text("run")


def make(channels):
    return torch.nn.Conv2d(channels, 2, 1)
"""


def make_source_package(folder: Path, planted: Path, **changes: Any) -> Path:
    """Write a package whose network is made by Python source, which writes a file when it runs.

    Args:
        folder: where.
        planted: the file.
        changes: of what describes the architecture.
    """
    make_package(folder)
    (folder / "network.py").write_text(SOURCE.format(planted=str(planted)))
    network = torch.nn.Conv2d(1, 2, 1)
    torch.save(network.state_dict(), folder / "state.pt")
    image = np.load(folder / "test_input.npy")
    with torch.no_grad():
        np.save(folder / "test_output.npy", network(torch.from_numpy(image)).numpy())
    architecture = {"source": "network.py", "callable": "make", "kwargs": {"channels": 1}}
    weights = {"source": "state.pt", "architecture": architecture | changes}
    content = described(weights={"pytorch_state_dict": weights})
    for axis in content["inputs"][0]["axes"][2:]:
        axis["size"] = 24
    write_description(folder, content)
    return folder


def write_description(folder: Path, content: Any) -> None:
    """Write a package's description."""
    (folder / "bioimageio.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def sha256(path: Path) -> str:
    """Hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
