"""Test the watch over network calls."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from helpers import TOYS, job_values

from beam_inference.cli.main import main
from beam_inference.config.definite import EngineSettings, make_definite
from beam_inference.config.job_file import parse_job
from beam_inference.engines.identity import identity_predictor
from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.predictor import Predictor
from beam_inference.job.place import THIS_PROCESS
from beam_inference.launch.planned_job import plan_job
from beam_inference.worker import network_watch
from beam_inference.worker.network_watch import NetworkWatch
from beam_inference.worker.trial import try_network


def network(predict):
    return Predictor(NumpyDevice(), predict)


@pytest.fixture
def messages():
    return []


def test_a_call_that_does_not_return_is_given_up(messages):
    given_up = threading.Event()

    def give_up(message):
        messages.append(message)
        given_up.set()

    watch = NetworkWatch(0.05, give_up, look_seconds=0.01)
    predict = watch.wrap(network(lambda batch: given_up.wait(10)))
    with watch.watch("chunk 7"):
        assert predict(None)
    assert len(messages) == 1
    assert "chunk 7: the network has not answered" in messages[0]
    assert "job.timeouts.network" in messages[0]


def test_each_call_has_a_term_of_its_own_and_pauses_between_chunks_none(messages):
    watch = NetworkWatch(0.5, messages.append, look_seconds=0.01)
    predict = watch.wrap(network(lambda batch: time.sleep(0.2)))
    with watch.watch("chunk 0"):
        for _ in range(4):
            predict(None)
    time.sleep(0.7)
    with watch.watch("chunk 1"):
        predict(None)
    assert messages == []


def test_without_a_number_the_first_call_sets_it(messages, monkeypatch):
    monkeypatch.setattr(network_watch, "LEAST_SECONDS", 0.1)
    given_up = threading.Event()
    watch = NetworkWatch(None, lambda message: given_up.set(), look_seconds=0.01)
    pauses = iter([0.2, 3.0])  # the first one is longer than the least, and is waited for
    predict = watch.wrap(network(lambda batch: time.sleep(next(pauses))))
    with watch.watch("chunk 0"):
        predict(None)
        assert not given_up.is_set()
        assert not given_up.wait(1)  # 20 times the first call are 4 s
        predict(None)
    assert not given_up.is_set()


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_network_that_hangs_in_the_trial_is_given_up(calls, volume_in, tmp_path, monkeypatch):
    messages = []

    def give_up(message):
        messages.append(message)
        given_up.set()

    given_up = threading.Event()
    monkeypatch.setattr(network_watch, "end_process", give_up)
    pauses = iter([given_up.wait if number == calls else int for number in range(9)])

    def predict(batch):
        next(pauses)()
        return batch

    values = job_values(volume_in, tmp_path / "out", job={"timeouts": {"network": 0.2}})
    planned = plan_job(parse_job(values, tmp_path), THIS_PROCESS, 1, None)
    engine = EngineSettings("torch", "contiguous", 1)
    config = make_definite(planned.config, planned.settings, engine)
    predictor = Predictor(NumpyDevice(), predict, identity_predictor().description)
    try_network(predictor, config, planned.input, planned.plan, identity_predictor())
    what = "the comparison with PyTorch" if calls == 3 else "the trial of the network"
    assert messages[0].startswith(f"{what}: the network has not answered for 0 s")


@pytest.mark.slow
def test_a_launch_whose_network_hangs_ends_and_goes_on_later(job, tmp_path, capfd):
    path = job(
        model={"path": f"{TOYS}:hangs", "output_channels": 1},
        job={"timeouts": {"network": 3}},
    )
    command = [sys.executable, "-m", "beam_inference", "run", path]
    (tmp_path / "hang").touch()
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode == 1
    assert "the network has not answered for 3 s" in result.stderr
    assert "Traceback" not in result.stderr
    (tmp_path / "hang").unlink()
    assert subprocess.run(command, timeout=120, cwd=tmp_path).returncode == 0
    assert main(["verify", path, "--deep"]) == 0
