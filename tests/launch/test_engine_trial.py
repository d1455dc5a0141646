"""Trials of engines: what they advise."""

import pytest
from fakes.late_device import LateDevice, late
from helpers import job_values, toy

from beam_inference.config.job_file import parse_job
from beam_inference.errors import ModelContractError
from beam_inference.job.state import State
from beam_inference.launch import engine_trial
from beam_inference.launch.prepare import prepare


@pytest.mark.parametrize(
    ("is_gpu", "batch_size", "is_advised"), [(True, 1, True), (True, 2, False), (False, 1, False)]
)
def test_a_job_that_gives_a_gpu_one_patch_a_call_is_advised_once(
    volume_in, tmp_path, monkeypatch, caplog, is_gpu, batch_size, is_advised
):
    load = engine_trial.load_predictor
    if is_gpu:
        monkeypatch.setattr(
            engine_trial,
            "load_predictor",
            lambda *args, **keys: late(load(*args, **keys), LateDevice(), 0.0),
        )
    values = job_values(
        volume_in,
        tmp_path / "out",
        model=toy("conv", output_channels=2),
        inference={"batch_size": batch_size},
    )
    for is_first in (True, False):
        caplog.clear()
        prepare(parse_job(values, tmp_path))
        assert ("inference.batch_size is 1" in caplog.text) == (is_first and is_advised)


def make(volume_in, tmp_path, network, batch_size):
    values = job_values(
        volume_in,
        tmp_path / "out",
        model=toy(network),
        inference={"batch_size": batch_size, "patch_shape": [15, 31, 31]},
    )
    return parse_job(values, tmp_path)


def test_a_network_that_mixes_the_patches_of_a_batch_is_refused(volume_in, tmp_path):
    message = r"in batches of 4 the network's answer to a patch depends on the others, by .* Write "
    with pytest.raises(ModelContractError, match=message + r"inference\.batch_size: 1\."):
        prepare(make(volume_in, tmp_path, "less_its_mean", 4))
    assert prepare(make(volume_in, tmp_path, "less_its_mean", 1))


def test_a_network_that_remembers_is_refused(volume_in, tmp_path):
    with pytest.raises(ModelContractError, match="keeps something from one batch to the next"):
        prepare(make(volume_in, tmp_path, "remembering", 1))


@pytest.mark.parametrize("network", ["less_its_mean", "last_bits_by_place"])
def test_auto_takes_one_patch_where_its_batch_counts(
    volume_in, tmp_path, monkeypatch, caplog, network
):
    monkeypatch.setattr(engine_trial, "fastest_batch_size", lambda *_: 4)
    caplog.set_level("INFO")
    prepare(make(volume_in, tmp_path, network, "auto"))
    job = State(f"file://{tmp_path}/out/_beam_inference").load_job()
    assert job.config.inference.batch_size == 1
    assert "inference.batch_size: auto is 1: in batches of 4" in caplog.text


def test_other_last_bits_are_told(volume_in, tmp_path, caplog):
    prepare(make(volume_in, tmp_path, "last_bits_by_place", 4))
    assert "the last bits of the network's answer to a patch depend on its batch" in caplog.text
    assert "With inference.batch_size: 1 it has the same" in caplog.text
