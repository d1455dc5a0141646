"""Jobs that init writes for results folders, against nnU-Net's own predictor on these folders."""

import json
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
REGIONS = {"background": 0, "whole": [1, 2], "core": 2}


def plans(name="PlainConvUNet", scheme="CTNormalization", spacing=SPACING, **properties):
    """Plans with another network, normalisation or voxel size."""
    return made.plans(
        configurations={
            "3d_fullres": made.configuration(
                architecture=made.architecture(name),
                normalization_schemes=[scheme],
                spacing=list(spacing),
            )
        },
        foreground_intensity_properties_per_channel={"0": made.CT_PROPERTIES | properties},
    )


def noise(shape=(40, 60, 50)):
    """An image without zeros, so that nnU-Net crops nothing."""
    return np.random.default_rng(0).integers(1, 256, shape, dtype=np.uint8)


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
        {"made": plans(scheme="ZScoreNormalization", spacing=(1, 1, 1)), "mirror_axes": None},
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
    "example ct",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder for each case, with what nnU-Net gives."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real test data are not there: {SHARED_DATA}")
    top = tmp_path_factory.mktemp("folders")
    for name, image, spacing, keys in cases():
        folder = top / name
        made.make_folder(folder / "model", **keys)
        np.savez(
            folder / "image.npz", image=image[None].astype(np.float32), spacing=np.array(spacing)
        )
        write_volume(folder / "image", image, voxel_size_nm=tuple(1e6 * size for size in spacing))
    return results_of("nnunet_folder.py", top)


def read(path):
    """The whole of a volume."""
    volume = open_source(VolumeSource(path.as_uri()))
    return volume.read(volume.bounds)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_gives_what_nnunet_gives(results, name, monkeypatch):
    folder = results / name
    monkeypatch.chdir(folder)
    assert main(["init", "--model", "model", "--input", "image", "--output", "labels"]) == 0
    if "levels.json" in (folder / "job.yaml").read_text():
        assert main(["levels", "image", "--to", "levels.json"]) == 0
    torch = ["--set=inference.engine=torch", "--set=inference.device=cpu"]
    assert main(["run", "job.yaml", *torch]) == 0
    logits_too = ["--set=postprocess=[]", "--set=output.dtype=float32", "--output=logits"]
    assert main(["run", "job.yaml", *torch, *logits_too]) == 0
    labels, logits = read(folder / "labels")[0], read(folder / "logits")
    with np.load(folder / "result.npz") as file:
        own = dict(file)
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
    assert differ_half.mean() <= 1e-3
    assert (differ_half <= (own_half | differ)).all()
    if "regions" in name:
        undecided = np.abs(own["float_logits"]).min(axis=0)
    else:
        first, second = np.sort(own["float_logits"], axis=0)[-2:][::-1]
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


def test_model_test_compares_with_nnunet_itself(results):
    done = model_test(results / NAMES[1] / "model", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    values = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert values["mean_difference"] <= 2e-3
    assert values["passed"]
