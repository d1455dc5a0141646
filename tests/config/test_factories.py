"""Python files that a job names are run as they are, not as they were compiled earlier."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from beam_inference.config.factories import load_file, load_object, run_file
from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.models.loading import load_network


@pytest.fixture(autouse=True)
def _bytecode(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


def write(file: Path, value: int) -> None:
    """Write a file of one size and time, as copies and archives with kept times have them."""
    file.write_text(f"def value():\n    return lambda batch: batch * {value}\n")
    os.utime(file, (1_700_000_000, 1_700_000_000))


@pytest.mark.parametrize("run", [load_file, run_file])
def test_a_file_of_the_same_size_and_time_is_run_anew(run, tmp_path):
    write(tmp_path / "net.py", 2)
    assert run(tmp_path / "net.py").value()(1) == 2
    write(tmp_path / "net.py", 3)
    assert run(tmp_path / "net.py").value()(1) == 3
    assert load_object(f"{tmp_path}/net.py:value")()(1) == 3


def test_what_is_compiled_beside_a_file_is_not_run(tmp_path):
    write(tmp_path / "net.py", 2)
    spec = importlib.util.spec_from_file_location("anything", tmp_path / "net.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert list(tmp_path.glob("__pycache__/net*.pyc"))
    write(tmp_path / "net.py", 3)
    assert run_file(tmp_path / "net.py").value()(1) == 3


def test_a_module_keeps_its_file_s_name(tmp_path):
    write(tmp_path / "net.py", 2)
    module = run_file(tmp_path / "net.py")
    assert module.__file__ == str(tmp_path / "net.py")
    assert sys.modules[module.__name__] is module


def test_a_module_that_was_compiled_of_another_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "net_of_other_source.py"
    model = Network(path="net_of_other_source:value", output_channels=1)
    write(file, 2)
    assert load_network(model).network(1) == 2
    del sys.modules["net_of_other_source"]
    write(file, 3)
    with pytest.raises(ModelContractError, match="another source.*Remove the folder"):
        load_network(model)
    del sys.modules["net_of_other_source"]
