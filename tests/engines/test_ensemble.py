"""Several networks whose answers are averaged, in whole jobs."""

import json
import sys
import warnings

import numpy as np
import pytest
import torch
import toy_networks
from helpers import do_and_read, job_values, read_volume, toy, write_job, write_volume

from beam_inference import prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.engines.ensemble import average_members
from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.predictor import Predictor
from beam_inference.errors import ConfigError, ModelContractError, StateError
from beam_inference.launch.job_files import load_job
from beam_inference.launch.planned_job import plan_job
from beam_inference.volumes.provenance import read_provenance

IMAGE = np.random.default_rng(1).integers(0, 256, (20, 40, 44), dtype=np.uint8)
KEYS = {"output_channels": 2, "normalize": "unit", "prediction_bound": 8}
OTHER = {"path": toy("conv_with_the_same_bias")["path"]}


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return write_volume(tmp_path_factory.mktemp("image") / "in", IMAGE, block_shape=(8, 16, 16))


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """The file of a third network, of TorchScript."""
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("scripted") / "third.ts"
    script(torch.nn.Conv3d(1, 2, 3, padding=1), path)
    return path


def script(network, path):
    """Save a network as TorchScript, which PyTorch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(network).save(str(path))


def values_of(image, out, **model):
    return job_values(
        image,
        out,
        model=toy("conv", **KEYS) | model,
        inference={"threads": 1, "strategy": "recompute"},
    )


@pytest.mark.parametrize("activation", ["none", "softmax"])
def test_the_answers_are_the_weighted_mean(image, scripted, tmp_path, activation):
    keys = {"activation": activation}
    third = {"path": str(scripted)}
    alone = [
        do_and_read(values_of(image, tmp_path / f"alone{number}", **keys, **path), tmp_path)
        for number, path in enumerate([{}, OTHER, third])
    ]
    ensemble = [OTHER | {"share": 0.5}, third | {"share": 2.5}]
    found = do_and_read(values_of(image, tmp_path / "out", **keys, ensemble=ensemble), tmp_path)
    expected = np.einsum("n...,n->...", np.float64(alone), [0.25, 0.125, 0.625])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert np.abs(found - alone[0]).max() > 0.01


def test_the_bits_do_not_depend_on_chunks_and_strategy(image, tmp_path):
    found = []
    for number, (chunk, strategy) in enumerate(
        [([16, 32, 32], "recompute"), ([16, 16, 48], "exchange")]
    ):
        values = values_of(image, tmp_path / f"out{number}", ensemble=[OTHER])
        values["inference"] |= {
            "chunk_shape": chunk,
            "strategy": strategy,
            "augment": {"mirror": ["z", "x"]},
        }
        values["model"]["channels"] = [{}, {}]
        found.append(do_and_read(values, tmp_path))
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.slow
def test_each_file_is_hashed_and_what_each_counts_is_part_of_the_job(image, scripted, tmp_path):
    def resolved(*ensemble):
        values = values_of(image, tmp_path / "out", ensemble=list(ensemble))
        return prepare(parse_job(values, tmp_path), overwrite=True).read_job()

    one, two = resolved(OTHER), resolved(OTHER, {"path": str(scripted)})
    assert len(two.model_sha256.split(",")) == 3
    assert two.model_sha256.startswith(f"{one.model_sha256},")
    other_share = resolved(OTHER | {"share": 2.0})
    assert other_share.model_sha256 == one.model_sha256
    assert len({each.fingerprint for each in (one, two, other_share)}) == 3
    plain = values_of(image, tmp_path / "plain")
    said = values_of(image, tmp_path / "said", ensemble=[])
    jobs = [prepare(parse_job(each, tmp_path)).read_job() for each in (plain, said)]
    assert jobs[0].fingerprint == jobs[1].fingerprint
    assert "ensemble" not in jobs[0].identity["model"]


def test_a_member_that_was_changed_is_refused(image, scripted, tmp_path):
    copied = tmp_path / "member.ts"
    copied.write_bytes(scripted.read_bytes())
    path = write_job(
        tmp_path / "job.yaml",
        values_of(image, tmp_path / "out", ensemble=[{"path": "member.ts", "sha256": "0" * 64}]),
    )
    with pytest.raises(ModelContractError, match=r"member.ts has the sha256"):
        prepare(load_job(str(path)))
    values = values_of(image, tmp_path / "out", ensemble=[{"path": "member.ts"}])
    write_job(path, values)
    prepare(load_job(str(path)))
    script(toy_networks.conv(), copied)
    with pytest.raises(StateError, match="model.sha256"):
        prepare(load_job(str(path)))


def test_networks_of_another_shape_are_refused_by_name(image, tmp_path):
    values = values_of(image, tmp_path / "out", ensemble=[OTHER, {"path": toy("same")["path"]}])
    with pytest.raises(ModelContractError, match=r"model.ensemble.1.path: the network returns"):
        prepare(parse_job(values, tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_network_may_change_what_it_is_given():
    def changing(batch):
        batch *= 2
        return batch

    device = NumpyDevice()
    members = [Predictor(device, each) for each in (changing, lambda batch: batch)]
    batch = np.ones((1, 1, 2, 2, 2), np.float32)
    predictor = average_members(members, [0.5, 0.5], ["model", "model.ensemble.0"])
    np.testing.assert_array_equal(predictor.predict(batch), np.full_like(batch, 1.5))


@pytest.mark.parametrize(
    ("model", "inference", "message"),
    [
        ({"path": "identity"}, {}, "identity is no network to be averaged"),
        ({"ensemble": [{"path": "identity"}]}, {}, "identity is no network to be averaged"),
        ({"ensemble": [OTHER | {"share": 0}]}, {}, "model.ensemble.0.share"),
        ({"ensemble": [OTHER | {"crop_margin": 2}]}, {}, "crop_margin: unknown key"),
        ({}, {"precision": "int8", "engine": "openvino"}, "int8 is for one network"),
        ({"ensemble": [{"path": "absent.ts"}]}, {}, "absent.ts"),
    ],
)
def test_what_cannot_be_is_refused(image, tmp_path, model, inference, message):
    values = values_of(image, tmp_path / "out", **({"ensemble": [OTHER]} | model))
    values["inference"] |= inference
    if model.get("path") == "identity":
        values["model"]["output_channels"] = 1
    with pytest.raises((ConfigError, ModelContractError), match=message):
        prepare(parse_job(values, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_such_a_job_is_run_verified_and_made_again(image, scripted, tmp_path, capsys):
    (tmp_path / "member.ts").write_bytes(scripted.read_bytes())
    values = values_of(image, tmp_path / "out", ensemble=[OTHER, {"path": "member.ts"}])
    values["inference"]["strategy"] = "auto"
    path = str(write_job(tmp_path / "job.yaml", values))
    assert plan_job(load_job(path)).config.model.ensemble[1].path == str(tmp_path / "member.ts")
    assert main(["run", path]) == 0
    assert main(["verify", path, "--deep", "--recompute=1"]) == 0
    [record] = read_provenance(f"file://{tmp_path}/out", load_job(path).storage)
    needs = {each["key"]: each["name"] for each in record["needs"]}
    assert needs["model.ensemble.1.path"] == "member.ts"
    assert needs["model.ensemble.0.path"] == "toy_networks.py"
    assert "member.ts" in json.dumps(record["job"])
    assert main(["reproduce", str(tmp_path / "out")]) == 2
    assert "model.ensemble.0.path" in capsys.readouterr().err
    assert main(["reproduce", str(tmp_path / "out"), "--trust_code"]) == 0
    (tmp_path / "member.ts").rename(tmp_path / "elsewhere.ts")
    named = ["--file", f"model.ensemble.1.path={tmp_path}/elsewhere.ts"]
    assert main(["reproduce", str(tmp_path / "out"), "--trust_code", *named]) == 0


SHARED = """
import functools, torch

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale

@functools.cache
def cached():
    return Scale()

def within():
    return torch.nn.Sequential(cached())

def assigned():
    network = Scale()
    network.load_state_dict(cached().state_dict(), assign=True)
    return network

def new():
    return Scale()

CONSTANT = torch.zeros(1)

def constant():
    network = Scale()
    network.register_buffer("constant", CONSTANT, persistent=False)
    return network
"""


def job_of_two(tmp_path, image, factory, weights, prefix=""):
    """A job file with two networks of one factory, and a file of weights for each."""
    files = [tmp_path / f"{number}.pt" for number in range(len(weights))]
    for file, weight in zip(files, weights, strict=True):
        torch.save({f"{prefix}scale": torch.tensor([weight])}, file)
    first, second = ({"path": factory, "weights": str(file)} for file in files)
    model = {**first, "ensemble": [second], "output_channels": 1, "normalize": "unit"}
    values = job_values(image, tmp_path / "out", model=model)
    return str(write_job(tmp_path / "job.yaml", values))


@pytest.mark.parametrize(
    ("factory", "prefix"), [("cached", ""), ("within", "0."), ("assigned", "")]
)
def test_members_that_are_one_object_are_refused(
    image, tmp_path, capfd, monkeypatch, factory, prefix
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shared_by_members.py").write_text(SHARED)
    monkeypatch.delitem(sys.modules, "shared_by_members", raising=False)
    job = job_of_two(tmp_path, image, f"shared_by_members:{factory}", [0.1, 0.5], prefix=prefix)
    assert main(["run", job]) == 2
    assert "shares parameters with an earlier one" in capfd.readouterr().err


@pytest.mark.parametrize("factory", ["new", "constant"])
def test_members_of_one_factory_have_their_own_weights(image, tmp_path, factory):
    (tmp_path / "network.py").write_text(SHARED)
    job = job_of_two(tmp_path, image, f"{tmp_path}/network.py:{factory}", [0.1, 0.5])
    assert main(["run", job]) == 0
    found = read_volume(tmp_path / "out")[0]
    np.testing.assert_allclose(found, IMAGE / 255 * 0.3, atol=1e-5)


def test_members_whose_files_import_modules_of_one_name_are_refused(
    image, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "helper_of_members", raising=False)
    for folder, factor in [("a", 1), ("b", 3)]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "network.py").write_text(
            "import sys, torch\nfrom pathlib import Path\n"
            "sys.path.insert(0, str(Path(__file__).parent))\n"
            "import helper_of_members as helper\n"
            "def network():\n    return torch.nn.Identity()\n"
        )
        (tmp_path / folder / "helper_of_members.py").write_text(f"FACTOR = {factor}\n")
    path = f"{tmp_path}/{{}}/network.py:network"
    model = {"path": path.format("a"), "ensemble": [{"path": path.format("b")}]}
    values = job_values(image, tmp_path / "out", model={**model, "output_channels": 1})
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    assert "Python keeps one module of the name" in capfd.readouterr().err
