"""Compare with other tools themselves, in an environment of theirs (requirements.txt)."""

import json

import nibabel
import numpy as np
import pytest
from helpers import SHARED_DATA, job_values, read_volume, write_levels, write_volume
from interop_tools import needs_tools, results_of
from scipy import ndimage

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


def test_what_is_not_zero_is_normalised_as_by_monai(tmp_path):
    with np.load(results_of("monai_normalized.py", tmp_path) / "normalized.npz") as file:
        image, expected = file["image"], file["result"]
    url = write_volume(tmp_path / "in", image, block_shape=(16, 16, 16), format="zarr3")
    write_levels(url, tmp_path)
    steps = [{"standard": {"levels": "levels.json", "of": "nonzero", "floor": 0}}]
    job = job_values(
        url,
        tmp_path / "out",
        model={"normalize": steps, "input_channels": 3, "output_channels": 3},
        output={"format": "zarr3"},
    )
    launch = prepare(parse_job(job, tmp_path))
    list(Worker(launch).infer_chunks(range(launch.read_job().plan.chunks.count)))
    found = read_volume(tmp_path / "out")
    error = np.abs(found - expected).max(axis=(1, 2, 3)) / np.ptp(expected, axis=(1, 2, 3))
    print(f"\nwhat is not zero: {error} of the range, at most")
    assert error.max() <= 2e-6
    assert not found[image == 0].any()


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


def test_a_tomogram_is_denoised_as_by_topaz(tmp_path):
    """The volume is standardised, then each padded patch; both are undone after the network."""
    with np.load(results_of("topaz_denoised.py", tmp_path) / "denoised.npz") as file:
        image, expected = (file["image"], file["result"])
    write_volume(tmp_path / "in", image, format="zarr3")
    steps = [
        {"standard": {"mean": float(image.mean()), "std": float(image.std())}},
        {"standard": {"by": "patch", "ddof": 1}},
    ]
    job = job_values(
        tmp_path / "in",
        tmp_path / "out",
        input={"fill": "constant"},
        model={
            "path": str(tmp_path / "network.ts"),
            "normalize": steps,
            "denormalize": True,
            "crop_margin": [16, 16, 16],
        },
        inference={
            "patch_shape": [32, 32, 32],
            "patch_overlap": [0, 0, 0],
            "chunk_shape": [48, 64, 64],
            "lattice": "pad",
            "engine": "torch",
            "batch_size": 1,
        },
        output={"format": "zarr3"},
    )
    launch = prepare(parse_job(job, tmp_path))
    list(Worker(launch).infer_chunks(range(launch.read_job().plan.chunks.count)))
    found = read_volume(tmp_path / "out")[0]
    error = np.abs(found - expected).max() / np.ptp(expected)
    print(f"\ntopaz: {error:.1e} of the range, at most")
    assert error <= 1e-5


def deepbet_job(folder, box, size, **model):
    """A job over a box of the image, resampled by nearest voxels to so many on each axis."""
    voxel = [1e6 * (stop - start) / size for start, stop in zip(*box, strict=True)]
    return job_values(
        folder / "in",
        folder / f"out{size}",
        input={
            "box": {"start": list(box[0]), "stop": list(box[1])},
            "resample": {"voxel_size_nm": voxel, "order": 0},
        },
        model=model,
        inference={
            "patch_shape": [size] * 3,
            "patch_overlap": [0, 0, 0],
            "chunk_shape": [size] * 3,
            "batch_size": 1,
        },
        output={"format": "ome_zarr", "block_shape": [64, 64, 64]},
    )


def run_deepbet(folder, network, box, size, levels):
    """The probability of what one of its networks finds in a box, on the network's grid."""
    low, high = levels
    steps = [
        {"scale": 1 / (high - low), "offset": -low / (high - low)},
        {"clip": [0, 1]},
        {"standard": {"by": "patch", "ddof": 1}},
        {"scale": 0.226, "offset": 0.449},
    ]
    job = deepbet_job(folder, box, size, path=network, output_channels=2, normalize=steps)
    job["postprocess"] = [{"operator": "select", "channels": [1]}]
    launch = prepare(parse_job(job, folder))
    list(Worker(launch).infer_chunks([0]))
    return read_volume(folder / f"out{size}")[0]


def is_between(size, stored):
    """Whether the centre of a voxel lies just between those of two of the voxels stored."""
    return (2 * np.arange(size) + 1) * stored % (2 * size) == 0


def head_box(mask, shape):
    """deepbet's box around the largest object of a small mask, with a tenth on either side."""
    labels, _ = ndimage.label(mask)
    largest = labels == np.bincount(labels[labels != 0]).argmax()
    start, stop = [], []
    for axis, size in enumerate(shape):
        share = largest.mean(axis=tuple({0, 1, 2} - {axis}))
        (inside,) = np.nonzero(share > 0.02)
        factor = np.float32(size / mask.shape[axis])
        center = np.round(factor * np.float32((inside[-1] + 1 + inside[0]) / 2))
        extent = np.round(np.float32(1.2) * factor * np.float32(inside[-1] + 1 - inside[0]))
        start.append(max(0, int(center - extent / 2)))
        stop.append(min(size, int(center + extent / 2)))
    return (start, stop)


def test_a_brain_is_found_as_by_deepbet(tmp_path):
    """Two jobs: one finds the head in a small image, the other the brain in the head's box."""
    path = SHARED_DATA / "mri_meshnet" / "t1_crop.nii.gz"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    image = np.asarray(nibabel.as_closest_canonical(nibabel.load(path)).dataobj)
    np.save(tmp_path / "image.npy", image)
    results_of("deepbet_mask.py", tmp_path)
    own = json.loads((tmp_path / "deepbet.json").read_text())
    with np.load(tmp_path / "mask.npz") as file:
        expected = file["probability"]
    write_volume(tmp_path / "in", image, voxel_size_nm=(1e6, 1e6, 1e6), format="zarr3")
    whole = ([0, 0, 0], list(image.shape))
    small = open_input(parse_job(deepbet_job(tmp_path, whole, 128), tmp_path))
    # deepbet's levels are those of the small image
    low, high = np.quantile(small.read(small.bounds).astype(np.float32), [0.005, 0.995])
    levels = (float(low), float(high))
    head = run_deepbet(tmp_path, f"{own['models']}/bbox_model.pt", whole, 128, levels)
    box = head_box(head > 0.5, image.shape)
    assert [list(pair) for pair in zip(*box, strict=True)] == own["box"]
    run_deepbet(tmp_path, f"{own['models']}/model.pt", box, 256, levels)
    how = ResamplingOptions(how=Resample(order=0), like=str(tmp_path / "in"))
    options = ConversionOptions(resampling=how)
    plan = plan_conversion(str(tmp_path / "out256"), str(tmp_path / "back"), options)
    found = plan.source.open()(plan.source.info.bounds)[0]
    inside = tuple(slice(*pair) for pair in own["box"])
    # of two voxels that are equally near, deepbet's float32 takes one and we the other
    elsewhere = np.ix_(*(~is_between(size, 256) for size in found.shape))
    ours, theirs = (values[elsewhere] for values in (found, expected[inside]))
    error = np.abs(ours - theirs).max()
    differ = ((found > 0.5) != (expected[inside] > 0.5)).mean()
    print(
        f"\ndeepbet: {error:.1e} at most; {differ:.1e} of the voxels of the mask differ, all of "
        "them between two voxels"
    )
    assert error <= 1e-5
    assert np.array_equal(ours > 0.5, theirs > 0.5)
    assert differ < 1e-4
    expected[inside] = 0
    assert not expected.any()
