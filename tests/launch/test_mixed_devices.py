"""Launches with different engines do one job, and agree to 1e-5; without the key they do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import job_values, read_volume, write_job, write_volume
from toy_networks import batch_norm

from beam_inference.cli.main import main
from beam_inference.errors import ConfigError, StateError
from beam_inference.job.place import THIS_PROCESS, Place
from beam_inference.launch.job_files import load_job
from beam_inference.launch.prepare import prepare

_NETWORK = """
import os
import torch

class Shifted(torch.nn.Module):
    def forward(self, batch):
        return batch + float(os.environ.get("SHIFT", "0"))

def shifted():
    return Shifted()
"""

TORCH = {"engine": "torch", "threads": 1}
OPENVINO = {"engine": "openvino", "threads": 2, "batch_size": 4}

MakeJob = Callable[..., str]


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """A function that writes a job file; ``inference`` are further keys of that section."""
    array = np.random.default_rng(0).integers(0, 256, (32, 64, 64), dtype=np.uint8)
    write_volume(tmp_path / "in", array)
    (tmp_path / "net.py").write_text(_NETWORK)
    with warnings.catch_warnings():  # it is deprecated; many people's files are made by it
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(batch_norm().eval()).save(str(tmp_path / "net.pt"))

    def make(
        inference: dict[str, Any], output: str = "out", network: str = "net.pt", **keys: Any
    ) -> str:
        channels = 2 if network == "net.pt" else 1
        model = {"path": f"{tmp_path}/{network}", "activation": "sigmoid"}
        values = job_values(
            tmp_path / "in",
            tmp_path / output,
            model={**model, "normalize": "unit", "output_channels": channels},
            output=keys,
            inference={"mixed_devices": True, **inference},
        )
        return str(write_job(tmp_path / "job.yaml", values))

    return make


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [("recompute", "float32"), pytest.param("exchange", "uint8", marks=pytest.mark.slow)],
)
def test_two_engines_do_one_job(
    make_job: MakeJob,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    strategy: str,
    dtype: str,
) -> None:
    pytest.importorskip("openvino")
    how = {"strategy": strategy}
    for name, engine in {"torch": TORCH, "openvino": OPENVINO}.items():
        assert main(["run", make_job(engine | how, name, dtype=dtype)]) == 0
    assert main(["run", make_job(TORCH | how, dtype=dtype), "--sample", "0.4"]) == 0
    second = make_job(OPENVINO | how, dtype=dtype)
    assert main(["run", second]) == 0
    assert main(["status", second]) == 0
    found = read_volume(tmp_path / "out").astype(np.float64)
    alone = [read_volume(tmp_path / name).astype(np.float64) for name in ("torch", "openvino")]
    limit = 1e-5 if dtype == "float32" else 1
    for expected in alone:
        assert np.abs(found - expected).max() <= limit
    if dtype == "float32":
        assert not np.array_equal(*alone), "the engines are to differ"
        assert all(not np.array_equal(found, expected) for expected in alone)
    capsys.readouterr()
    assert main(["verify", second, "--deep", "--recompute", "1"]) == 0
    assert "by another engine" in capsys.readouterr().out or dtype == "uint8"


def test_without_the_key_another_engine_is_refused(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", make_job(TORCH | {"mixed_devices": False}), "--sample", "0.3"]) == 0
    capsys.readouterr()
    assert main(["run", make_job(TORCH | {"mixed_devices": False, "threads": 2})]) == 2
    assert "engine.threads: 2 here, 1 there" in capsys.readouterr().err
    assert main(["run", make_job(TORCH)]) == 2, "nor does a job become one for several"
    assert "belongs to another job" in capsys.readouterr().err


def test_an_engine_that_does_not_agree_is_refused(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", make_job(TORCH, network="net.py:shifted"), "--sample", "0.3"]) == 0
    other = make_job(TORCH | {"threads": 2}, network="net.py:shifted")
    monkeypatch.setenv("SHIFT", "0.01")
    capsys.readouterr()
    assert main(["run", other]) == 2
    assert "torch on cpu does not agree with it to 1e-05" in capsys.readouterr().err
    monkeypatch.setenv("SHIFT", "0.000001")
    assert main(["run", other]) == 0
    assert main(["verify", other, "--deep"]) == 0


def test_as_long_as_no_chunk_is_done_another_engine_waits(make_job: MakeJob) -> None:
    def begin(keys: dict[str, Any], place: Place = THIS_PROCESS) -> None:
        prepare(load_job(make_job(keys)), place)

    begin(TORCH)
    begin(TORCH)
    with pytest.raises(StateError, match="no chunk is done that shows whether the two agree"):
        begin(TORCH | {"threads": 2})
    elsewhere = Place(is_this_machine=False)
    begin(TORCH, elsewhere)
    with pytest.raises(ConfigError, match="on the machine that computes"):
        begin(TORCH | {"threads": 2}, elsewhere)


def test_other_precisions_are_refused(make_job: MakeJob) -> None:
    with pytest.raises(ConfigError, match="mixed_devices takes precision: float32"):
        load_job(make_job({"precision": "bfloat16"}))
