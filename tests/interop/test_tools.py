"""Compare with other tools themselves, in an environment of theirs (requirements.txt)."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from beam_inference import predict
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.resampling import Resampling

PYTHON = os.environ.get("INTEROP_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        PYTHON is None, reason="INTEROP_PYTHON names no Python with nnU-Net: make interop-test"
    ),
]
HERE = Path(__file__).parent
NNUNET = {"lattice": "spread", "blend": {"gaussian": 0.125, "floor": "nnunet"}}
AXES = "zyx"


def results_of(script, folder):
    """The folder in which a script has written what a tool gives."""
    command = [PYTHON, "-W", "ignore", str(HERE / script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def nnunet(tmp_path_factory):
    return results_of("nnunet_logits.py", tmp_path_factory.mktemp("nnunet"))


@pytest.fixture(scope="module")
def monai(tmp_path_factory):
    return results_of("monai_windows.py", tmp_path_factory.mktemp("monai"))


@pytest.mark.parametrize(
    ("case", "network", "patch", "axes"),
    [
        ("plain", "plain", (32, 48, 40), ()),
        ("mirrored", "plain", (32, 48, 40), (0, 1, 2)),
        ("mirrored in the plane", "residual", (16, 48, 48), (1, 2)),
        ("smaller than a patch", "residual", (32, 48, 40), ()),
    ],
)
def test_logits_are_those_of_nnunet(nnunet, case, network, patch, axes):
    with np.load(nnunet / f"{case}.npz") as file:
        image, as_it_is, in_float = (file[name] for name in ("image", "as_it_is", "in_float"))
    logits = predict(
        image,
        str(nnunet / f"{network}.pt"),
        patch_shape=patch,
        patch_overlap=[n // 2 for n in patch],
        output_channels=3,
        augment={"mirror": [AXES[axis] for axis in axes]} if axes else "none",
        fill="constant",
        device="cpu",
        **NNUNET,
    )
    extent = np.ptp(in_float)
    error = np.abs(logits - in_float).max() / extent
    of_half = np.abs(logits - as_it_is).mean() / extent
    labels, float_labels, half_labels = (each.argmax(0) for each in (logits, in_float, as_it_is))
    print(
        f"\n{case}: {error:.1e} of the range from its float32 sums, at most; {of_half:.1e} from "
        "its own in half precision, in the mean; labels that differ from these: "
        f"{(labels != half_labels).mean():.1e}"
    )
    assert error <= 1e-5
    # What its half precision costs itself; random weights are undecided between classes.
    own = np.abs(in_float - as_it_is).mean() / extent
    assert of_half <= 1.01 * own
    assert (labels != half_labels).mean() <= 1.01 * (float_labels != half_labels).mean() + 1e-5
    differ = labels != float_labels
    first, second = np.sort(in_float, axis=0)[-2:][::-1]
    assert (first - second)[differ].max(initial=0) <= 2e-5 * extent, "labels differ at ties alone"
    assert ((labels != half_labels) <= ((half_labels != float_labels) | differ)).all()


CASES = [
    ((40, 50, 60), "gaussian", 0.25, "constant"),
    ((40, 50, 60), "constant", 0.5, "constant"),
    ((33, 47, 61), "gaussian", 0.625, "constant"),
    ((33, 47, 61), "constant", 0.25, "constant"),
    ((10, 20, 40), "gaussian", 0.5, "constant"),
    ((10, 20, 9), "constant", 0.25, "reflect"),
    ((11, 50, 9), "gaussian", 0.5, "replicate"),
]
"""As in monai_windows.py: image, weights, overlap, padding."""


@pytest.mark.parametrize("number", range(len(CASES)))
def test_windows_are_those_of_monai(monai, number):
    _, mode, overlap, padding = CASES[number]
    with np.load(monai / f"{number}.npz") as file:
        image, expected = (file["image"], file["result"])
    window = (16, 24, 16)
    result = predict(
        image,
        str(monai / "ramps.pt"),
        patch_shape=window,
        # MONAI's windows are int(length · (1 - overlap)) voxels apart
        patch_overlap=[n - int(n * (1 - overlap)) for n in window],
        output_channels=2,
        blend="constant" if mode == "constant" else {"gaussian": 0.125, "floor": "monai"},
        fill="edge" if padding == "replicate" else padding,
        device="cpu",
    )
    error = np.abs(result - expected).max() / np.ptp(expected)
    print(f"\n{CASES[number]}: {error:.1e} of the range")
    assert error <= 1e-5


def test_arrays_are_resampled_as_by_scikit_image(tmp_path):
    with np.load(results_of("resized.py", tmp_path) / "resized.npz") as file:
        results = dict(file)
    image = results.pop("image")
    assert len(results) == 9
    for name, expected in results.items():
        source, target = (BoundingBox((0, 0, 0), each.shape) for each in (image, expected))
        resampling = Resampling(source, target, (int(name.split()[0]),) * 3)
        found = resampling.resample(image[None], source, target)[0]
        error = np.abs(found - expected).max()
        print(f"\norder and shape {name}: {error:.1e} at most")
        assert error <= 1e-5
