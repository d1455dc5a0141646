"""Weights of modules that convert those of their earlier versions, against PyTorch's loading."""

import json
from collections import OrderedDict

import pytest
import safetensors.torch
import torch

from beam_inference.config.factories import load_object
from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.models.loading import load_network
from beam_inference.models.module_versions import KEY, read_versions, versions_of, write_versions

NETWORKS = """
import torch


class Scale(torch.nn.Module):
    '''Its first version kept the logarithms of its factors.'''

    _version = 2

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        if metadata.get("version", 1) < 2:
            state[prefix + "factor"] = state[prefix + "factor"].exp()
        super()._load_from_state_dict(state, prefix, metadata, *others)

    def forward(self, batch):
        return batch * self.factor[:, None, None, None]


class Strict(Scale):
    def _load_from_state_dict(self, state, prefix, metadata, *others):
        if metadata.get("version") != 2:
            raise ValueError(f"version {metadata.get('version')} is not known")
        super()._load_from_state_dict(state, prefix, metadata, *others)


def scale():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3, padding=1), Scale())


def strict():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3, padding=1), Strict())


def spectral():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.utils.spectral_norm(torch.nn.Conv3d(1, 2, 3, padding=1)))
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "networks.py"
    path.write_text(NETWORKS)
    return path


def train(network):
    """Change all that a network saves."""
    with torch.no_grad():
        for number, tensor in enumerate(network.state_dict().values()):
            tensor.add_(0.1 * (1 + number))
    return network


def loaded(source, factory, weights):
    """The state of a network as a job loads it."""
    model = Network(path=f"{source}:{factory}", weights=str(weights), output_channels=2)
    return load_network(model).network.state_dict()


def check_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def hold(network, name):
    """A module that has a network as an attribute."""
    holder = torch.nn.Module()
    setattr(holder, name, network)
    return holder


@pytest.mark.parametrize("holders", [[], ["module"], ["_orig_mod"], ["net", "core"]])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("factory", ["scale", "strict", "spectral"])
def test_weights_are_of_the_version_that_they_say(source, factory, is_nested, holders):
    network = train(load_object(f"{source}:{factory}")())
    held = network
    for name in holders:
        held = hold(held, name)
    state = held.state_dict()
    torch.save({"state_dict": state} if is_nested else state, source.with_name("w.pt"))
    check_same(loaded(source, factory, source.with_name("w.pt")), network.state_dict())


def test_weights_of_an_earlier_version_are_converted(source):
    network = load_object(f"{source}:scale")()
    state = network.state_dict()
    state._metadata["1"]["version"] = 1
    torch.save(state, source.with_name("w.pt"))
    found = loaded(source, "scale", source.with_name("w.pt"))
    assert torch.equal(found["1.factor"], torch.ones(2).exp())


@pytest.mark.parametrize("factory", ["scale", "spectral"])
def test_safetensors_of_others_say_no_version(source, factory):
    network = train(load_object(f"{source}:{factory}")())
    safetensors.torch.save_file(network.state_dict(), source.with_name("w.safetensors"))
    expected = load_object(f"{source}:{factory}")()
    expected.load_state_dict(safetensors.torch.load_file(source.with_name("w.safetensors")))
    found = loaded(source, factory, source.with_name("w.safetensors"))
    check_same(found, expected.state_dict())


def test_safetensors_with_versions(source):
    network = train(load_object(f"{source}:strict")())
    state = network.state_dict()
    file = source.with_name("w.safetensors")
    safetensors.torch.save_file(state, file, {KEY: write_versions(state)})
    check_same(loaded(source, "strict", file), state)
    safetensors.torch.save_file(state, file)
    with pytest.raises(ModelContractError, match="do not fit .* ValueError: version None is not"):
        loaded(source, "strict", file)


@pytest.mark.parametrize(
    "stated",
    [
        "of none",
        ["1"],
        {"1": 2},
        {1: {"version": 2}},
        {"1": {"version": "2"}},
        {"1": {"version": True}},
        {"1": {"version": 1.5}},
        {"1": {"assign_to_params_buffers": True}},
        {"1": {"spectral_norm": {"version": []}}},
    ],
)
def test_what_else_a_file_says_of_modules_is_left_out(source, stated):
    network = load_object(f"{source}:scale")()
    state = network.state_dict()
    state._metadata = stated
    torch.save(state, source.with_name("w.pt"))
    found = loaded(source, "scale", source.with_name("w.pt"))
    assert torch.equal(found["1.factor"], torch.ones(2).exp())  # as without a version
    assert read_versions(write_versions(state)) == versions_of(state)


@pytest.mark.parametrize("text", ["", "1.2", "[" * 10000, '{"a": 1}', '{"a": {"b": [1]}}'])
def test_metadata_of_others_are_no_versions(text):
    assert read_versions(text) == {}


def test_versions_are_written_and_read():
    state = OrderedDict()
    state._metadata = {"": {"version": 1}, "a": {"version": 2, "spectral_norm": {"w.version": 1}}}
    assert (
        read_versions(write_versions(state)) == state._metadata == json.loads(write_versions(state))
    )
