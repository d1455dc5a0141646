"""Test that a launch makes one network of integers, which every worker and later launch runs."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fib25_job import NETWORKS
from helpers import job_values, read_volume, write_job, write_volume
from safetensors.torch import load_file, save_file

from beam_inference.cli.main import main
from beam_inference.job.place import Place
from beam_inference.job.state import State
from beam_inference.launch import engine_trial
from beam_inference.launch.job_files import load_job
from beam_inference.launch.planned_job import plan_job
from beam_inference.launch.prepare import prepare
from beam_inference.worker.open_job import open_job
from beam_inference.worker.trial import boxes_to_calibrate, boxes_to_try

FIB25 = {
    "path": f"{NETWORKS / 'fib25.py'}:fib25_network",
    "weights": str(NETWORKS / "fib25.safetensors"),
    "output_channels": 3,
    "activation": "sigmoid",
    "normalize": "unit",
}


@pytest.fixture
def smooth_volume(tmp_path):
    """A volume of blurred noise, which the network knows what to make of."""
    coarse = np.random.default_rng(0).integers(0, 256, (9, 17, 17)).astype(np.float64)
    array = coarse.repeat(4, 0).repeat(4, 1).repeat(4, 2)
    for axis in range(3):
        array = sum(np.roll(array, shift, axis) for shift in range(4)) / 4
    write_volume(tmp_path / "in", array.astype(np.uint8))
    return tmp_path / "in"


@pytest.fixture
def make_job(smooth_volume, tmp_path):
    """A function that makes the job file of a network in integers."""

    def make(output="out", **inference):
        keys = {"engine": "openvino", "precision": "int8", "threads": 1, **inference}
        values = job_values(smooth_volume, tmp_path / output, model=FIB25, inference=keys)
        return str(write_job(tmp_path / f"{output}.yaml", values))

    return make


@pytest.fixture
def nncf():
    pytest.importorskip("openvino")
    return pytest.importorskip("nncf")


def without_nncf(monkeypatch):
    monkeypatch.setitem(sys.modules, "nncf", None)


def network_of(folder):
    (path,) = (folder / "_beam_inference" / "quantized").iterdir()
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("nncf")
def test_bits_depend_neither_on_chunks_nor_on_the_strategy(make_job, tmp_path):
    ways = {
        "a": {"chunk_shape": [16, 32, 32], "strategy": "recompute"},
        "b": {"chunk_shape": [16, 32, 32], "strategy": "exchange"},
        "c": {"chunk_shape": [32, 64, 48], "strategy": "recompute"},
    }
    for name, keys in ways.items():
        assert main(["run", make_job(name, **keys)]) == 0
    first, *others = (read_volume(tmp_path / name) for name in ways)
    for other in others:
        np.testing.assert_array_equal(other, first)
    names = {network_of(tmp_path / name).name for name in ways}
    assert len(names) == 1
    assert main(["run", make_job("plain", precision="float32")]) == 0
    difference = read_volume(tmp_path / "plain") - first
    assert 0 < np.sqrt(np.mean(difference**2)) < 1e-2


@pytest.mark.slow
@pytest.mark.usefixtures("nncf")
def test_workers_take_the_batch_size_that_the_trial_finds(make_job, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_trial, "fastest_batch_size", lambda *_: 2)
    for name, size in (("auto", "auto"), ("two", 2), ("one", 1)):
        assert main(["run", make_job(name, batch_size=size)]) == 0
    expected = read_volume(tmp_path / "one")
    for name in ("auto", "two"):
        np.testing.assert_array_equal(read_volume(tmp_path / name), expected)
    job = State(f"file://{tmp_path}/auto/_beam_inference").load_job()
    assert job.config.inference.batch_size == 2


@pytest.mark.slow
@pytest.mark.usefixtures("nncf")
def test_later_launches_take_the_network_of_the_first(make_job, tmp_path, monkeypatch):
    path = make_job()
    assert main(["run", path, "--sample", "0.3"]) == 0
    job = State(f"file://{tmp_path}/out/_beam_inference").load_job()
    assert job.quantized_sha256 == network_of(tmp_path / "out").name
    error = job.quantization_error
    assert 0 < error.root_mean_square <= error.allowed == 1e-2
    assert error.root_mean_square < error.largest
    without_nncf(monkeypatch)
    assert main(["run", path]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("nncf")
def test_chunks_are_computed_again_by_a_network_that_is_made_again(
    make_job, tmp_path, monkeypatch, capsys
):
    path = make_job()
    assert main(["run", path]) == 0
    network_of(tmp_path / "out").unlink()
    words = ["reproduce", str(tmp_path / "out"), "--trust_code"]
    for command in (["verify", path, "--recompute", "1"], [*words, "--sample", "1"]):
        assert main(command) == 0
        assert "0 of them with other bits" in capsys.readouterr().out
    without_nncf(monkeypatch)
    assert main(["verify", path, "--recompute", "1"]) == 2
    assert "needs NNCF" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("nncf")
def test_a_foreign_network_of_integers_confirms_nothing(make_job, tmp_path, capsys):
    path = make_job()
    assert main(["run", path]) == 0
    network = network_of(tmp_path / "out")
    foreign = network.read_bytes()[:-4] + b"\0\0\x80\x3f"
    sha256 = hashlib.sha256(foreign).hexdigest()
    (network.parent / sha256).write_bytes(foreign)
    metadata = tmp_path / "out" / "provenance"
    text = metadata.read_text()
    metadata.write_text(text.replace(network.name, sha256))
    words = ["reproduce", str(tmp_path / "out"), "--trust_code", "--sample", "1"]
    capsys.readouterr()
    assert main(words) == 2
    assert "NNCF makes another network of integers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("nncf")
@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_network_that_is_not_that_of_the_first_launch_is_refused(
    make_job, tmp_path, damage, capsys
):
    path = make_job()
    assert main(["run", path, "--sample", "0.3"]) == 0
    network = network_of(tmp_path / "out")
    if damage == "gone":
        network.unlink()
    else:
        network.write_bytes(network.read_bytes()[:-1] + b"x")
    assert main(["run", path]) == 2
    message = capsys.readouterr().err
    assert f"precision int8 that the first launch made, is {damage}" in " ".join(message.split())
    assert main(["run", path, "--overwrite"]) == 0
    assert network.is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("nncf")
def test_another_network_is_named_before_it_is_compared(smooth_volume, tmp_path, capsys):
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(Path(FIB25["weights"]).read_bytes())
    inference = {"engine": "openvino", "precision": "int8", "threads": 1}
    model = FIB25 | {"weights": str(weights)}
    values = job_values(smooth_volume, tmp_path / "out", model=model, inference=inference)
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", path, "--sample", "0.3"]) == 0
    others = {key: -value for key, value in load_file(weights).items()}
    save_file(others, weights)
    assert main(["run", path]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "model.sha256: " in message
    assert "differs from PyTorch" not in message


@pytest.mark.slow
@pytest.mark.usefixtures("nncf")
def test_workers_elsewhere_get_the_network_and_compare_it_too(
    make_job, tmp_path, monkeypatch, caplog
):
    path = make_job(batch_size=1)
    launch = prepare(load_job(path), Place(is_this_machine=False, shares_files=True))
    assert not launch.contract_checked
    without_nncf(monkeypatch)
    with caplog.at_level("INFO", "beam_inference"):
        opened = open_job(launch)
    assert opened.predictor.description["quantized"] == network_of(tmp_path / "out").name
    assert "openvino in int8 differs from PyTorch in float32 by" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("nncf")
def test_an_exported_network_of_several_patches_is_refused_with_the_reason(
    smooth_volume, tmp_path, capsys
):
    layers = [torch.nn.Conv3d(a, b, 3, padding=1) for a, b in ((1, 4), (4, 4), (4, 1))]
    program = torch.export.export(
        torch.nn.Sequential(*layers).eval(), (torch.zeros(2, 1, 8, 16, 16),)
    )
    torch.export.save(program, tmp_path / "net.pt2")
    inference = {"engine": "openvino", "precision": "int8", "batch_size": 2}
    inference |= {"patch_shape": [8, 16, 16], "patch_overlap": [4, 8, 8]}
    model = {"path": "net.pt2", "output_channels": 1, "normalize": "unit"}
    values = job_values(smooth_volume, tmp_path / "out", model=model, inference=inference)
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    told = capsys.readouterr().err
    assert "is calibrated on one patch at a time" in told
    assert "inference.batch_size: 1" in told


@pytest.mark.slow
@pytest.mark.usefixtures("nncf")
def test_beyond_the_bound_it_is_refused_with_the_figure(make_job, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(
        sys.modules["beam_inference.engines.trial"].TOLERANCES, "int8", 1e-6
    )  # no network is near enough
    assert main(["run", make_job()]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "openvino in int8 differs from PyTorch in float32 by" in message
    assert "more than the 1.0e-06 that are allowed. Write precision: float32." in message
    assert not (tmp_path / "out").exists()


def test_without_nncf_a_job_is_refused_before_anything_is_made(
    make_job, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("openvino")
    without_nncf(monkeypatch)
    assert main(["run", make_job()]) == 2
    assert "pip install 'beam-inference[int8]'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_patches_of_calibration_depend_on_the_domain_alone(make_job):
    plans = [plan_job(load_job(make_job(chunk_shape=c))).plan for c in ([16] * 3, [32, 16, 48])]
    boxes = [boxes_to_calibrate(plan) for plan in plans]
    assert boxes[0] == boxes[1]
    assert len(boxes[0]) == len({box.start for box in boxes[0]}) == 8
    assert not set(boxes[0]) & set(boxes_to_try(plans[0]))


def test_a_blank_input_cannot_be_calibrated_on(make_job, smooth_volume, capsys, tmp_path):
    pytest.importorskip("openvino")
    write_volume(tmp_path / "blank", np.zeros((36, 68, 68), np.uint8))
    path = make_job()
    assert main(["run", path, "--input", f"file://{tmp_path}/blank"]) == 2
    assert "each of them has one value throughout" in " ".join(capsys.readouterr().err.split())


def test_plan_says_what_it_is_calibrated_on(make_job, capsys):
    path = make_job()
    assert main(["plan", path]) == 0
    assert "calibrated by the first launch on 8 patch(es)" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["plan", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
