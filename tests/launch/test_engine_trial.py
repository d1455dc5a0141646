"""Trials of engines: what they advise."""

import pytest
from fakes.late_device import LateDevice, late
from helpers import job_values, toy

from beam_inference.config.job_file import parse_job
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
