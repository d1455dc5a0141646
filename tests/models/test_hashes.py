"""Hashes by which a job says which network it means."""

import hashlib
import re

import pytest
from pydantic import ValidationError

from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.models.hashes import model_sha256


@pytest.fixture
def factory(tmp_path):
    """The keys of a network with a factory's file and weights; and the hash of each."""
    hashes = []
    for name in ("network.py", "weights.safetensors"):
        (tmp_path / name).write_text(name)
        hashes.append(hashlib.sha256(name.encode()).hexdigest())
    keys = {
        "path": f"{tmp_path / 'network.py'}:network",
        "weights": str(tmp_path / "weights.safetensors"),
    }
    return {**keys, "input_channels": 1, "output_channels": 1}, hashes


def test_a_job_may_say_the_hash_of_the_weights_or_of_both_files(factory, tmp_path):
    keys, hashes = factory
    both = "+".join(hashes)
    for sha256 in (None, hashes[1], both):
        assert model_sha256(Network(**keys, sha256=sha256)) == both
    (tmp_path / "network.py").write_text("other")
    assert model_sha256(Network(**keys, sha256=hashes[1])) != both
    message = (
        rf"network\.py and .*weights\.safetensors have .* says model\.sha256: {re.escape(both)}"
    )
    with pytest.raises(ModelContractError, match=message):
        model_sha256(Network(**keys, sha256=both))
    with pytest.raises(ModelContractError, match=r"weights\.safetensors has the sha256"):
        model_sha256(Network(**keys, sha256=hashes[0]))


def test_two_hashes_are_not_those_of_one_file(factory):
    keys, hashes = factory
    with pytest.raises(ModelContractError, match="have the sha256|has the sha256"):
        model_sha256(Network(**keys | {"weights": None}, sha256="+".join(hashes)))


@pytest.mark.parametrize("sha256", ["0" * 63, "+" + "0" * 64, "0" * 64 + "+", "0" * 64 + "\n"])
def test_what_is_no_hash_is_refused(sha256):
    with pytest.raises(ValidationError, match="64 lower-case hexadecimal digits"):
        Network(path="a:b", sha256=sha256, input_channels=1, output_channels=1)
