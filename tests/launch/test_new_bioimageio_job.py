"""Job files that init writes for bioimage.io packages run, and give what the network gives."""

import bioimageio_packages as made
import numpy as np
import pytest
import torch
from helpers import read_volume, write_volume

from beam_inference.cli.main import main
from beam_inference.errors import ConfigError
from beam_inference.launch.job_files import load_job
from beam_inference.launch.new_job import describe_package, make_job

SHAPE = (3, 40, 50)
STANDARDISE = {"id": "zero_mean_unit_variance", "kwargs": {"axes": ["y", "x"]}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A place with a volume."""
    array = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)
    write_volume(tmp_path / "em", array, voxel_size_nm=(40, 4, 4))
    np.save(tmp_path / "em.npy", array)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fixed(content, size):
    """A description of a network that takes one size."""
    for axis in content["inputs"][0]["axes"][2:]:
        axis["size"] = size
    return content


def test_sections_are_standardised_one_by_one(folder, capsys):
    content = fixed(made.described(2, [STANDARDISE], [{"id": "sigmoid"}]), 24)
    made.make_package(folder / "model", content)
    assert main(["init", "--model", "model", "--input", "em"]) == 0
    commands = capsys.readouterr().out.partition("next:\n")[2].splitlines()
    assert [line.split()[1] for line in commands] == ["levels", "plan", "run"]
    for line in commands:
        assert main(line.split()[1:]) == 0
    assert load_job("job.yaml").model.voxel_size_nm is None
    sections = np.load("em.npy").astype(np.float64)
    mean, std = (f((1, 2), keepdims=True) for f in (sections.mean, sections.std))
    image = ((sections - mean) / (std + 1e-6)).astype(np.float32)
    padded = np.pad(image, ((0, 0), (4, 4), (4, 4)), mode="symmetric")
    with torch.no_grad():
        answer = torch.sigmoid(made.make_network()(torch.from_numpy(padded[:, None]))).numpy()
    expected = answer[:, :, 4:-4, 4:-4].swapaxes(0, 1)
    assert np.abs(read_volume(folder / "prediction") - expected).max() < 2e-6


def test_source_runs_in_a_job_only_if_it_is_trusted(folder, capsys):
    """Neither init nor a plan nor a launch that trusts pickles alone runs it."""
    made.make_source_package(folder / "model", planted=folder / "planted")
    assert main(["init", "--model", "model", "--input", "em"]) == 0
    assert main(["plan", "job.yaml"]) == 0
    for flags in ([], ["--allow_pickle"]):
        assert main(["run", "job.yaml", *flags]) == 2
        assert "made by code, network.py" in capsys.readouterr().err
    assert not (folder / "planted").exists()
    assert main(["run", "job.yaml", "--trust_model"]) == 0
    assert main(["verify", "job.yaml", "--recompute", "1", "--trust_model"]) == 0
    assert (folder / "planted").exists()


def test_labels_of_a_threshold(folder):
    operations = [{"id": "sigmoid"}, {"id": "binarize", "kwargs": {"threshold": 0.5}}]
    content = fixed(made.described(3, (), operations), 24)
    for axis in (content["inputs"][0]["axes"][2], content["outputs"][0]["axes"][2]):
        axis.update(size=16, halo=0)
    made.make_package(folder / "model", content, dims=3)
    assert main(["init", "--model", "model", "--input", "em"]) == 0
    assert load_job("job.yaml").output.dtype == "uint8"
    assert main(["run", "job.yaml"]) == 0
    assert set(np.unique(read_volume(folder / "prediction"))) <= {0, 1}


def test_what_a_job_cannot_run_is_told(folder):
    content = made.described()
    content["outputs"][0]["axes"][3]["scale"] = 2.0
    made.make_package(folder / "model", content)
    with pytest.raises(ConfigError, match="a job cannot run it: its output has 1/2 of"):
        make_job(describe_package("model", None), "em", "out", folder)


def test_onnx_weights_are_named_in_place_of_the_package(folder):
    content = made.described(weights={"onnx": {"source": "net.onnx"}})
    made.make_package(folder / "model", content)
    (folder / "model" / "net.onnx").write_bytes(b"\x08\x08\x3a\x00")
    package = describe_package("model", None)
    assert package.network_path == "model/net.onnx"
    assert package.sha256 == made.sha256(folder / "model" / "net.onnx")


def test_voxels_in_nanometres_choose_the_scale(folder):
    content = made.described(3)
    for tensor in (content["inputs"][0], content["outputs"][0]):
        for axis, size in zip(tensor["axes"][2:], (40, 8, 8), strict=True):
            axis.update(unit="nanometer", scale=size)
    made.make_package(folder / "model", content, dims=3)
    assert main(["pyramid", "em", "--factor=1x2x2", "--levels=1"]) == 0
    new = make_job(describe_package("model", None), "em", "out", folder)
    assert new.scale == 1
    assert new.config.model.voxel_size_nm == (40, 8, 8)
