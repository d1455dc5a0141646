"""``batch_size: auto``: what is tried, what is chosen, and that it is kept."""

import json
import time

import numpy as np
import pytest
import torch
from helpers import job_values, toy, write_job

from beam_inference import launch
from beam_inference.cli import main
from beam_inference.errors import ConfigError
from beam_inference.job_file import parse_job
from beam_inference.predictors.probe import LARGEST_BATCH, fastest_batch_size
from beam_inference.predictors.torch_predictor import TorchPredictor
from beam_inference.survey import Place, survey

PATCH = np.zeros((1, 2, 4, 4), np.uint8)


def batch_size(per_call, per_patch=0.0, fits=lambda _: True, most=None):
    """What is chosen for a network that takes so many seconds; and the batches that it saw."""
    seen = []

    def forward(batch):
        seen.append(len(batch))
        if most is not None and len(batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        time.sleep(per_call + per_patch * len(batch))
        return batch

    predictor = TorchPredictor(forward, torch.device("cpu"))
    return fastest_batch_size(predictor, PATCH, lambda batch: batch, fits), sorted(set(seen))


def test_what_costs_by_the_call_is_given_many_patches_and_what_costs_by_the_patch_one():
    assert batch_size(per_call=0.02) == (LARGEST_BATCH, [1, 2, 4, 8, 16, 32])
    assert batch_size(per_call=0.0, per_patch=0.02) == (1, [1, 2])


def test_what_does_not_fit_is_not_tried():
    assert batch_size(0.02, fits=lambda size: size <= 4) == (4, [1, 2, 4])


def test_a_device_without_memory_ends_the_search():
    assert batch_size(0.02, most=4) == (4, [1, 2, 4, 8])


def test_a_network_that_takes_no_other_batch_is_given_one_patch():
    predictor = TorchPredictor(lambda batch: batch.reshape(1, 1, 2, 4, 4), torch.device("cpu"))
    assert fastest_batch_size(predictor, PATCH, lambda batch: batch, lambda _: True) == 1


def test_a_job_keeps_what_was_found_at_its_first_launch(volume_in, tmp_path, monkeypatch):
    values = job_values(volume_in, tmp_path / "out", model=toy("same"), inference={"batch_size": "auto"})
    (tmp_path / "some").write_text("0\n")
    job = str(write_job(tmp_path / "job.yaml", values))
    with monkeypatch.context() as fast:
        fast.setattr(launch, "fastest_batch_size", lambda *_: 4)
        assert main(["run", job, "--chunks", str(tmp_path / "some")]) == 0
    assert main(["run", job]) == 0
    recorded = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    assert recorded["config"]["inference"]["batch_size"] == 4
    assert main(["verify", job, "--deep"]) == 0


def test_a_job_on_this_machine_is_tried(volume_in, tmp_path):
    values = job_values(volume_in, tmp_path / "out", model=toy("same"), inference={"batch_size": "auto"})
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    recorded = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    assert recorded["config"]["inference"]["batch_size"] in (1, 2, 4, 8, 16, 32)


def test_on_a_remote_runner_it_is_refused(tmp_path):
    inference = {"batch_size": "auto", "device": "cpu", "engine": "torch"}
    values = job_values("gs://bucket/in", "gs://bucket/out", inference=inference)
    with pytest.raises(ConfigError, match="inference.batch_size: auto .* found by trying"):
        survey(parse_job(values, tmp_path), Place(is_this_machine=False))


@pytest.mark.parametrize("value", ["many", 0])
def test_nothing_else_is_a_batch_size(volume_in, tmp_path, capsys, value):
    values = job_values(volume_in, tmp_path / "out", inference={"batch_size": value})
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    assert "inference.batch_size" in capsys.readouterr().err
