"""Jobs that init writes for networks of planes, against bioimageio.core on each section."""

import shutil

import bioimageio_packages as made
import numpy as np
import pytest
from helpers import SHARED_DATA, write_volume
from interop_tools import BIOIMAGEIO_PYTHON, results_of

from beam_inference.cli.main import main
from beam_inference.config.volumes import VolumeSource
from beam_inference.volumes.opening import open_source

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        BIOIMAGEIO_PYTHON is None,
        reason="BIOIMAGEIO_PYTHON names no Python with bioimageio.core: make interop-test",
    ),
]

STANDARDISE = {"id": "zero_mean_unit_variance", "kwargs": {"axes": ["y", "x"]}}
ABSOLUTE = 1e-3
RELATIVE = 1e-3
"""The tolerance that bioimage.io packages have where they state none."""


def differences(folder, monkeypatch):
    """Predict a stack as a job and by bioimageio.core.

    Returns:
        The largest difference, and the share of the voxels beyond the tolerance.
    """
    monkeypatch.chdir(folder)
    image = np.load(folder / "image.npy", mmap_mode="r")
    write_volume(folder / "em", np.asarray(image), voxel_size_nm=(40, 4, 4))
    engine = ["--set=inference.engine=torch", "--set=inference.device=cpu"]
    assert main(["init", "--model", "model", "--input", "em"]) == 0
    assert main(["levels", "em", "--to", "levels.json"]) == 0
    assert main(["run", "job.yaml", *engine]) == 0
    results_of("bioimageio_sections.py", folder, BIOIMAGEIO_PYTHON)
    expected = np.load(folder / "result.npy", mmap_mode="r")
    output = open_source(VolumeSource((folder / "prediction").as_uri()))
    largest = 0.0
    beyond = 0
    for z, section in enumerate(expected):
        box = type(output.bounds)((z, 0, 0), (z + 1, *image.shape[1:]))
        difference = np.abs(output.read(box)[0, 0] - section)
        largest = max(largest, float(difference.max()))
        beyond += int((difference > ABSOLUTE + RELATIVE * np.abs(section)).sum())
    print(f"largest difference {largest:.2e}, {beyond / expected.size:.2e} beyond the tolerance")
    return largest, beyond / expected.size


def test_where_the_halo_covers_all_that_the_network_sees_results_are_equal(tmp_path, monkeypatch):
    """A stack of 200 MB, in which contrast changes from section to section."""
    content = made.described(2, [STANDARDISE], [{"id": "sigmoid"}], classes=1)
    for axis in content["inputs"][0]["axes"][2:]:
        axis["size"] = 512
    made.make_package(tmp_path / "model", content, outputs=1)
    random = np.random.default_rng(0)
    image = random.integers(0, 100, (100, 1420, 1420), dtype=np.uint8)
    image += np.arange(100, dtype=np.uint8)[:, None, None]
    np.save(tmp_path / "image.npy", image)
    assert image.nbytes > 200e6
    largest, beyond = differences(tmp_path, monkeypatch)
    assert largest < 1e-5
    assert beyond == 0


def test_where_it_does_not_they_differ_at_borders_of_blocks(tmp_path, monkeypatch):
    """The halo of the published network is 32, and it sees farther."""
    source = SHARED_DATA / "bioimageio" / "unet2d_nuclei_broad"
    if not source.exists():
        pytest.skip(f"{source} is absent")
    shutil.copytree(source, tmp_path / "model", copy_function=shutil.copyfile)
    (tmp_path / "model").chmod(0o755)
    image = np.load(SHARED_DATA / "fib25_medulla_train2_image.npy")[:3]
    np.save(tmp_path / "image.npy", np.tile(image, (1, 3, 3))[:, :600, :700])
    largest, beyond = differences(tmp_path, monkeypatch)
    assert 1e-3 < largest < 0.1
    assert beyond < 0.05
