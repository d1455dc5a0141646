"""Jobs that init writes for results folders, against nnU-Net's own predictor on these folders."""

import json
import shlex
import subprocess
import sys

import nnunet_folders as made
import numpy as np
import pytest
from helpers import SHARED_DATA, write_volume
from interop_tools import PYTHON, needs_tools, results_of

from beam_inference.cli.main import main
from beam_inference.config.volumes import VolumeSource
from beam_inference.volumes.opening import open_source

pytestmark = needs_tools
pytest.importorskip("dynamic_network_architectures")

SPACING = (2.0, 1.0, 1.0)
ENGINE = ["--set=inference.engine=torch", "--set=inference.device=cpu"]
REGIONS = {"background": 0, "whole": [1, 2], "core": 2}


def plans(
    name="PlainConvUNet",
    schemes=("CTNormalization",),
    spacing=SPACING,
    is_masked=False,
    **properties,
):
    """Plans with another network, normalisation or voxel size."""
    return made.plans(
        configurations={
            "3d_fullres": made.configuration(
                architecture=made.architecture(name),
                normalization_schemes=list(schemes),
                use_mask_for_norm=[is_masked] * len(schemes),
                spacing=list(spacing),
            )
        },
        foreground_intensity_properties_per_channel={
            str(channel): made.CT_PROPERTIES | properties for channel in range(len(schemes))
        },
    )


def noise(shape=(40, 60, 50)):
    """An image without zeros, so that nnU-Net crops nothing."""
    return np.random.default_rng(0).integers(1, 256, shape, dtype=np.uint8)


def with_border(image):
    """An image with zeros around it, more of them on some sides."""
    return np.pad(image, [(3, 2), (0, 9), (6, 5)])


def with_holes(shape=(36, 60, 50)):
    """Two channels of one object in a background of zeros, with holes, and a dent."""
    z, y, x = np.ogrid[*(slice(-1, 1, n * 1j) for n in shape)]
    image = np.random.default_rng(3).gamma(4, 25, (2, *shape)).clip(1, 255).astype(np.uint8)
    image[:, z**2 + y**2 + x**2 > 0.8] = 0
    image[:, (z**2 + y**2 + x**2 < 0.1) | ((z - 0.5) ** 2 + y**2 + x**2 < 0.02)] = 0
    image[:, (abs(z) < 0.2) & (abs(y) < 0.2) & (x > 0.6)] = 0
    image[0, (abs(z + 0.4) < 0.1) & (abs(y) < 0.3) & (abs(x) < 0.4)] = 0  # of one channel alone
    return image


def fib25():
    """A part of the FIB-25 data."""
    image = np.load(SHARED_DATA / "fib25_medulla_train2_image.npy")
    return np.maximum(image[:40, :64, :64].astype(np.uint8), 1)


def example_ct():
    """nnU-Net's own example, in Hounsfield units, with its voxel size."""
    import nibabel

    scan = nibabel.load(SHARED_DATA / "nnunet" / "example_ct_sm.nii.gz")
    values = np.asarray(scan.dataobj).astype(np.float32).transpose(2, 1, 0)
    return values[:48, :80, :80], tuple(float(size) for size in scan.header.get_zooms()[2::-1])


def cases():
    """Name, image, voxel size in millimetres, and what the folder is made of."""
    ct, ct_spacing = example_ct()
    yield "plain", noise(), SPACING, {"made": plans(), "mirror_axes": None}
    yield (
        "residual, mirrored, two folds",
        noise(),
        SPACING,
        {"made": plans("ResidualEncoderUNet"), "mirror_axes": (0, 1, 2), "folds": (0, 1)},
    )
    yield (
        "regions",
        noise(),
        SPACING,
        {
            "made": plans(),
            "described": made.dataset(labels=REGIONS, regions_class_order=[1, 2]),
            "mirror_axes": (1, 2),
        },
    )
    yield "smaller than a patch", noise((10, 60, 50)), SPACING, {"made": plans()}
    yield (
        "fib25, z-score",
        fib25(),
        (1.0, 1.0, 1.0),
        {"made": plans(schemes=["ZScoreNormalization"], spacing=(1, 1, 1)), "mirror_axes": None},
    )
    yield "border of zeros", with_border(noise()), SPACING, {"made": plans(), "mirror_axes": (1,)}
    schemes = ["ZScoreNormalization", "CTNormalization", "RescaleTo01Normalization"]
    yield (
        "three channels",
        np.stack([with_border(noise()), with_border(noise())[::-1], with_border(noise()) // 2]),
        SPACING,
        {
            "made": plans(schemes=schemes),
            "described": made.dataset(channel_names={"0": "T1", "1": "CT", "2": "T2"}),
            "mirror_axes": None,
        },
    )
    for name in ("inside an object", "inside an object, finer", "inside an object, two volumes"):
        yield (
            name,
            with_holes(),
            (1.2, 0.8, 0.7) if "finer" in name else SPACING,
            {
                "made": plans(schemes=["ZScoreNormalization"] * 2, is_masked=True),
                "described": made.dataset(channel_names={"0": "T1", "1": "T2"}),
                "mirror_axes": None,
            },
        )
    yield (
        "finer voxels",
        with_border(noise()),
        (1.0, 0.8, 0.7),
        {"made": plans(), "mirror_axes": None},
    )
    yield (
        "thick sections",
        with_border(noise((16, 60, 50))),
        (5.0, 0.8, 0.8),
        {"made": plans(), "mirror_axes": None},
    )
    yield (
        "fib25 of finer voxels, z-score",
        with_border(fib25()),
        (1.0, 1.0, 1.0),
        {
            "made": plans(schemes=["ZScoreNormalization"], spacing=(1.3, 1, 1.2)),
            "mirror_axes": None,
        },
    )
    yield (
        "example ct",
        ct,
        ct_spacing,
        {
            "made": plans(
                spacing=ct_spacing,
                mean=50.0,
                std=300.0,
                percentile_00_5=-900.0,
                percentile_99_5=600.0,
            ),
            "mirror_axes": None,
        },
    )


NAMES = [
    "plain",
    "residual, mirrored, two folds",
    "regions",
    "smaller than a patch",
    "fib25, z-score",
    "border of zeros",
    "three channels",
    "inside an object",
    "inside an object, finer",
    "inside an object, two volumes",
    "finer voxels",
    "thick sections",
    "fib25 of finer voxels, z-score",
    "example ct",
]


def inputs_of(name):
    """The volumes that a case has, of a channel each if there are several."""
    return ["t1", "t2"] if "two volumes" in name else ["image"]


def make_case(folder, wanted):
    """A results folder, an image, and what nnU-Net gives."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real test data are not there: {SHARED_DATA}")
    for name, image, spacing, keys in cases():
        if name != wanted:
            continue
        made.make_folder(folder / "model", **keys)
        channels = image if image.ndim == 4 else image[None]
        np.savez(folder / "image.npz", image=channels.astype(np.float32), spacing=np.array(spacing))
        paths = inputs_of(name)
        for path, values in zip(paths, [image] if len(paths) == 1 else image, strict=True):
            write_volume(folder / path, values, voxel_size_nm=tuple(1e6 * n for n in spacing))
    return results_of("nnunet_folder.py", folder)


def read(path):
    """The whole of a volume."""
    volume = open_source(VolumeSource(path.as_uri()))
    return volume.read(volume.bounds)


def cut(array, box):
    """What of an array (C, Z, Y, X) lies in a box, and the array without it."""
    rest = array.copy()
    rest[:, *box] = 0
    return array[:, *box], rest


def follow(printed):
    """Run what init says is next, on the CPU, by PyTorch."""
    for line in printed.partition("next:\n")[2].splitlines():
        _, command, *words = shlex.split(line)
        options = ENGINE if command == "run" else []
        assert main([command, *words, *options]) == 0, line


def nonzero_box(image):
    """The smallest box, as slices, that holds all that is not zero in any channel."""
    places = np.argwhere(image.any(axis=0))
    return tuple(
        slice(low, high + 1) for low, high in zip(places.min(0), places.max(0), strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_job_gives_what_nnunet_gives(name, tmp_path, monkeypatch, capsys):
    folder = make_case(tmp_path, name)
    monkeypatch.chdir(folder)
    inputs = ["--input", *inputs_of(name)]
    assert main(["init", "--model", "model", *inputs, "--output", "labels"]) == 0
    follow(capsys.readouterr().out)
    with np.load(folder / "result.npz") as file:
        own = dict(file)
    with np.load(folder / "image.npz") as file:
        box = nonzero_box(file["image"])
    logits_too = [
        *("--set=postprocess=[]", "--set=output.dtype=float32", "--set=output.format=ome_zarr"),
        *("--set=output.voxel_size_nm=network", "--set=output.resample=null", "--output=logits"),
    ]
    assert main(["run", "job.yaml", *ENGINE, *logits_too]) == 0
    (labels,), background = cut(read(folder / "labels"), box)
    assert not background.any()
    logits = read(folder / "logits")
    if logits.shape != own["logits"].shape:  # those of a resampled job have the box alone
        logits, background = cut(logits, box)
        assert not background.any()
    for key in ("labels", "float_labels"):
        (own[key],), background = cut(own[key][None], box)
        assert not background.any()
    assert labels.shape == own["labels"].shape
    extent = np.ptp(own["float_logits"])
    error = np.abs(logits - own["float_logits"]).max() / extent
    of_half = np.abs(logits - own["logits"]).mean() / extent
    own_of_half = np.abs(own["float_logits"] - own["logits"]).mean() / extent
    differ = labels != own["float_labels"]
    differ_half = labels != own["labels"]
    own_half = own["labels"] != own["float_labels"]
    print(
        f"\n{name}: {error:.1e} of the range from its float32 sums, at most; {of_half:.1e} from "
        f"its own in half precision, in the mean; labels that differ: {differ.mean():.1e} and "
        f"{differ_half.mean():.1e}; between its own two: {own_half.mean():.1e}"
    )
    assert error <= 1e-5
    # What its half precision costs itself, which is more where flips and folds are summed.
    assert of_half <= 1.01 * own_of_half
    # One in a thousand, or, where these untrained networks hesitate more, as many as its own two.
    assert differ_half.mean() <= max(1e-3, own_half.mean() + differ.mean())
    assert (differ_half <= (own_half | differ)).all()
    if "regions" in name:
        undecided = np.abs(own["float_answers"]).min(axis=0)
    else:
        first, second = np.sort(own["float_answers"], axis=0)[-2:][::-1]
        undecided = first - second
    assert undecided[differ].max(initial=0) <= 2e-5 * extent, "labels differ at ties alone"


_MODEL_TEST = """
import os, sys
sys.path.append(sys.argv[1])  # nnU-Net, and what it needs, behind what is installed here
os.environ.update(dict.fromkeys(("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"), "."))
from beam_inference.cli.main import main
sys.exit(main(["model", "test", *sys.argv[2:]]))
"""


def model_test(folder, *words):
    """The exit code of ``model test``, where nnU-Net is installed, and what it prints."""
    packages = subprocess.run(
        [PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    command = [sys.executable, "-c", _MODEL_TEST, packages, str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_model_test_compares_with_nnunet_itself(tmp_path):
    made.make_folder(
        tmp_path / "model", made=plans("ResidualEncoderUNet"), mirror_axes=(0, 1, 2), folds=(0, 1)
    )
    done = model_test(tmp_path / "model", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    values = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert values["difference"] <= 2e-3
    assert values["passed"]
