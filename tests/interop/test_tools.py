"""Compare with other tools themselves, in an environment of theirs (requirements.txt)."""

import numpy as np
import pytest
from helpers import job_values, read_volume, write_levels, write_volume
from interop_tools import needs_tools, results_of

from beam_inference import predict, prepare
from beam_inference.config.job_file import parse_job
from beam_inference.config.volumes import Resample
from beam_inference.conversion.convert import plan_conversion
from beam_inference.conversion.options import ConversionOptions, ResamplingOptions
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.resampling import Resampling
from beam_inference.job.parts import open_input
from beam_inference.worker.worker import Worker

pytestmark = needs_tools
NNUNET = {"lattice": "spread", "blend": {"gaussian": 0.125, "floor": "nnunet"}}
AXES = "zyx"


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


def test_images_are_cropped_and_normalised_as_by_nnunet(tmp_path):
    with np.load(results_of("nnunet_normalized.py", tmp_path) / "normalized.npz") as file:
        image, box, expected = (file[name] for name in ("image", "box", "result"))
    url = write_volume(tmp_path / "in", image, block_shape=(16, 16, 16), format="zarr3")
    write_levels(url, tmp_path)
    box_of_nonzero = {"levels": "levels.json", "of": "nonzero_box"}
    steps = [
        {"clip": [-150, 390], "channels": [0]},
        {"standard": {"mean": 40.5, "std": 110.25}, "channels": [0]},
        {"standard": box_of_nonzero, "channels": [1]},
        {"rescale": box_of_nonzero, "channels": [2]},
        {"scale": 1 / 255, "channels": [3]},
    ]
    job = job_values(
        url,
        tmp_path / "out",
        input={"box": {"levels": "levels.json"}},
        model={"normalize": steps, "input_channels": 4, "output_channels": 4},
        output={"format": "zarr3"},
    )
    launch = prepare(parse_job(job, tmp_path))
    assert launch.read_job().input_bounds == BoundingBox(*map(tuple, box.T.tolist()))
    list(Worker(launch).infer_chunks(range(launch.read_job().plan.chunks.count)))
    found = read_volume(tmp_path / "out")
    inside = (slice(None), *(slice(*pair) for pair in box))
    error = np.abs(found[inside] - expected).max(axis=(1, 2, 3)) / np.ptp(expected, axis=(1, 2, 3))
    print(f"\nCT, z-score, 0 to 1, RGB: {error} of the range, at most")
    # sums are rounded to 2^-23 of the largest prediction, here that of another channel
    assert error.max() <= 2e-6
    found[inside] = 0
    assert found.shape == image.shape
    assert not found.any()


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


@pytest.mark.parametrize("name", ["isotropic", "thick sections", "thick sections wanted"])
def test_volumes_are_resampled_as_by_nnunet_and_back(tmp_path, name):
    with np.load(results_of("nnunet_resampled.py", tmp_path) / "resampled.npz") as file:
        values = dict(file)
    size, wanted = (tuple(map(float, each)) for each in values[f"{name}: sizes"])
    write_volume(tmp_path / "in", values["image"], voxel_size_nm=size, format="zarr3")
    resample = {
        "voxel_size_nm": list(wanted),
        "order": 3,
        "separate_z": "auto",
        "clip": values["clip"].tolist(),
    }
    job = job_values(tmp_path / "in", tmp_path / "out", input={"resample": resample})
    volume = open_input(parse_job(job, tmp_path))
    made = values[f"{name}: made"]
    assert volume.bounds.shape == made.shape[1:]
    forth = np.abs(volume.read(volume.bounds) - made).max() / np.ptp(made)
    logits = values[f"{name}: logits"]
    write_volume(tmp_path / "out", logits, voxel_size_nm=volume.voxel_size_nm, format="zarr3")
    # 4 sections of what was to be 4 mm are 3.5 mm each, and no longer three times their breadth
    separate_z = True if name == "thick sections wanted" else "auto"
    how = ResamplingOptions(
        how=Resample(order=1, separate_z=separate_z), like=str(tmp_path / "in"), postprocess="[]"
    )
    options = ConversionOptions(format="zarr3", resampling=how)
    plan = plan_conversion(str(tmp_path / "out"), str(tmp_path / "back"), options)
    expected = values[f"{name}: back"]
    found = plan.source.open()(plan.source.info.bounds)
    back = np.abs(found - expected).max() / np.ptp(expected)
    labels = (found.argmax(0) != expected.argmax(0)).mean()
    print(
        f"\n{name}: {forth:.1e} of the range forth, {back:.1e} back, at most; labels that differ: "
        f"{labels:.1e}"
    )
    assert max(forth, back) <= 1e-5
    assert labels <= 1e-5
