"""Hashes by which a job says which network it means."""

import hashlib
import re

import pytest
from pydantic import ValidationError

from beam_inference.config import siblings
from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.models.hashes import model_sha256, network_file_states


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


def test_modules_beside_a_factory_are_hashed_with_it(tmp_path):
    """Two launches would otherwise write chunks of two networks into one volume."""
    sources = {
        "network.py": "import numpy\nfrom blocks import act\n",
        "blocks.py": "def act():\n    from deeper.inner import value\n",
        "deeper/__init__.py": "",
        "deeper/inner.py": "value = 1\n",
        "other.py": "value = 1\n",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    own = hashlib.sha256(sources["network.py"].encode()).hexdigest()
    keys = {"path": f"{tmp_path}/network.py:network", "input_channels": 1, "output_channels": 1}
    network = Network(**keys, sha256=own)
    first = model_sha256(network)
    assert first != own
    assert model_sha256(Network(**keys, sha256=first)) == first
    states = network_file_states(network)
    for name in ("blocks.py", "deeper/inner.py", "other.py"):
        (tmp_path / name).write_text("value = 2\n")
        assert (model_sha256(network) == first) == (name == "other.py")
        assert (network_file_states(network) == states) == (name == "other.py")
        (tmp_path / name).write_text(sources[name])
        assert model_sha256(network) == first
        states = network_file_states(network)
    (tmp_path / "network.py").write_text("import numpy\n")
    assert model_sha256(Network(**keys)) == hashlib.sha256(b"import numpy\n").hexdigest()


@pytest.mark.parametrize("kind", ["a package behind a link", "a link to the factory", "a loop"])
def test_modules_behind_links_are_hashed(kind, tmp_path):
    inner = tmp_path / "lib" / "inner"
    real = tmp_path / "real"
    for folder in (inner.parent, real):
        folder.mkdir()
    (inner.parent / "__init__.py").touch()
    inner.symlink_to(inner.parent if kind == "a loop" else real)
    (real / "values.py").write_text("value = 1\n")
    factory = tmp_path / "network.py"
    changed = real / "values.py"
    if kind == "a link to the factory":
        (real / "network.py").write_text("import layers\n")
        factory.symlink_to(real / "network.py")
        changed = tmp_path / "layers.py"
        changed.write_text("value = 1\n")
    else:
        factory.write_text("import lib.inner.values\n")
    if kind == "a loop":
        changed = inner.parent / "__init__.py"
    network = Network(path=f"{factory}:network", input_channels=1, output_channels=1)
    first = model_sha256(network)
    changed.write_text("value = 2\n")
    assert model_sha256(network) != first


def test_a_package_of_very_many_files_beside_a_factory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(siblings, "_MOST_ENTRIES", 5)
    (tmp_path / "network.py").write_text("import lib\n")
    (tmp_path / "lib").mkdir()
    for name in ("__init__.py", *"abcd"):
        (tmp_path / "lib" / name).touch()
    network = Network(path=f"{tmp_path}/network.py:n", input_channels=1, output_channels=1)
    with pytest.raises(
        ModelContractError, match=r"lib, which .*network\.py imports, holds 5 files"
    ):
        model_sha256(network)
