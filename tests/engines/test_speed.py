"""``batch_size: auto`` and ``engine: fastest``: what is tried, chosen, and kept."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import job_values, read_volume, toy, write_job

from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.engines.choice import engines_to_measure
from beam_inference.engines.speed import LARGEST_BATCH, fastest_batch_size, seconds_per_patch
from beam_inference.engines.torch_forward import torch_predictor
from beam_inference.errors import ConfigError, DeviceOutOfMemory, EngineError, ModelContractError
from beam_inference.launch import engine_trial as launch
from beam_inference.worker.trial import try_network

PATCH = np.zeros((1, 2, 4, 4), np.uint8)


def batch_size(per_call, per_patch=0.0, fits=lambda _: True, most=None):
    """The batch size for a network that takes some seconds, by a fake clock; the sizes tried."""
    seen = []
    now = 0.0

    def forward(batch):
        nonlocal now
        seen.append(len(batch))
        if most is not None and len(batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        now += per_call + per_patch * len(batch)
        return batch

    predictor = torch_predictor(forward, torch.device("cpu"))
    found = fastest_batch_size(predictor, PATCH, lambda batch: batch, fits, clock=lambda: now)
    return found, sorted(set(seen))


def test_what_costs_by_the_call_is_given_many_patches_and_what_costs_by_the_patch_one():
    assert batch_size(per_call=0.02) == (LARGEST_BATCH, [1, 2, 4, 8, 16, 32])
    assert batch_size(per_call=0.0, per_patch=0.02) == (1, [1, 2])


def test_what_does_not_fit_is_not_tried():
    assert batch_size(0.02, fits=lambda size: size <= 4) == (4, [1, 2, 4])


def test_a_device_without_memory_ends_the_search():
    assert batch_size(0.02, most=4) == (4, [1, 2, 4, 8])


def test_a_network_that_takes_no_other_batch_is_given_one_patch():
    predictor = torch_predictor(lambda batch: batch.reshape(1, 1, 2, 4, 4), torch.device("cpu"))
    assert fastest_batch_size(predictor, PATCH, lambda batch: batch, lambda _: True) == 1


def test_a_job_keeps_what_was_found_at_its_first_launch(volume_in, tmp_path, monkeypatch):
    values = job_values(
        volume_in, tmp_path / "out", model=toy("same"), inference={"batch_size": "auto"}
    )
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
    values = job_values(
        volume_in, tmp_path / "out", model=toy("same"), inference={"batch_size": "auto"}
    )
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    recorded = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    assert recorded["config"]["inference"]["batch_size"] in (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("value", ["many", 0])
def test_nothing_else_is_a_batch_size(volume_in, tmp_path, capsys, value):
    values = job_values(volume_in, tmp_path / "out", inference={"batch_size": value})
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    assert "inference.batch_size" in capsys.readouterr().err


CANDIDATES = [
    {"engine": "torch", "memory_format": "contiguous"},
    {"engine": "torch", "memory_format": "channels_last"},
    {"engine": "openvino"},
]


@pytest.mark.parametrize(
    "best", [*(pytest.param(place, marks=pytest.mark.slow) for place in (0, 1)), 2]
)
def test_the_fastest_engine_is_found_at_the_first_launch_and_kept(
    best, volume_in, tmp_path, monkeypatch
):
    if not find_spec("openvino"):
        pytest.skip("openvino is not installed")
    values = job_values(
        volume_in,
        tmp_path / "out",
        model=toy("batch_norm") | {"output_channels": 2},
        inference={"engine": "fastest"},
    )
    (tmp_path / "some").write_text("0\n")
    job = str(write_job(tmp_path / "job.yaml", values))
    timed = []

    def seconds(predictor, *_):
        timed.append(predictor.description)
        return 0.1 if len(timed) - 1 == best else 0.2

    with monkeypatch.context() as quick:
        quick.setattr(launch, "engines_to_measure", lambda *_: CANDIDATES)
        quick.setattr(launch, "seconds_per_patch", seconds)
        assert main(["run", job, "--chunks", str(tmp_path / "some")]) == 0
    assert [each["engine"] for each in timed] == ["torch", "torch", "openvino"]
    assert [each.get("memory_format") for each in timed] == [None, "channels_last", None]
    assert main(["run", job]) == 0, "and nothing is timed again"
    recorded = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    assert CANDIDATES[best].items() <= recorded["config"]["inference"].items()
    assert main(["verify", job, "--deep"]) == 0
    kept = CANDIDATES[best]["engine"]
    other = {"engine": kept, "memory_format": "channels_last" if best == 0 else "contiguous"}
    if kept == "torch":  # another layout is another job
        path = write_job(
            tmp_path / "other.yaml", {**values, "inference": {**values["inference"], **other}}
        )
        assert main(["run", str(path)]) == 2


def test_engines_that_answer_otherwise_are_not_chosen_however_fast(
    volume_in, tmp_path, monkeypatch
):
    values = job_values(
        volume_in,
        tmp_path / "out",
        model=toy("batch_norm") | {"output_channels": 2},
        inference={"engine": "fastest"},
    )
    job = str(write_job(tmp_path / "job.yaml", values))

    def refuse(predictor, config, *others):
        if config.inference.memory_format == "channels_last":
            raise EngineError("it differs")
        return try_network(predictor, config, *others)

    monkeypatch.setattr(launch, "engines_to_measure", lambda *_: CANDIDATES[:2])
    monkeypatch.setattr(launch, "try_network", refuse)
    assert main(["run", job]) == 0
    recorded = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    assert recorded["config"]["inference"]["memory_format"] == "contiguous"
    monkeypatch.setattr(launch, "engines_to_measure", lambda *_: CANDIDATES[1:2])
    assert main(["run", job, "--overwrite"]) == 2


@pytest.mark.parametrize(
    "error", [ModelContractError("it fails on this layout"), DeviceOutOfMemory("no room")]
)
def test_one_that_fails_is_left_out(error, volume_in, tmp_path, monkeypatch):
    values = job_values(
        volume_in,
        tmp_path / "out",
        model=toy("batch_norm") | {"output_channels": 2},
        inference={"engine": "fastest"},
    )
    job = str(write_job(tmp_path / "job.yaml", values))

    def fail(predictor, *others):
        if predictor.description.get("memory_format"):
            raise error
        return seconds_per_patch(predictor, *others)

    monkeypatch.setattr(launch, "engines_to_measure", lambda *_: CANDIDATES[:2])
    monkeypatch.setattr(launch, "seconds_per_patch", fail)
    assert main(["run", job]) == 0
    recorded = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    assert recorded["config"]["inference"]["memory_format"] == "contiguous"


def test_what_the_fastest_may_be_follows_from_device_and_file():
    def measured(path, **inference):
        values = job_values("in", "out", model={"path": path}, inference=inference)
        job = parse_job(values, Path("/"))
        return engines_to_measure(job.model, job.inference)

    of_torch = [
        {"engine": e, "memory_format": f}
        for e in ("torch", "compile")
        for f in ("contiguous", "channels_last")
    ]
    assert measured("a.pt", device="cuda", engine="fastest") == of_torch
    found = measured("a.pt", device="cpu", engine="fastest")
    assert found[-4:] == of_torch
    assert {each["engine"] for each in found[:-4]} <= {"openvino", "onnxruntime"}
    assert measured("identity", device="cpu", engine="fastest") == [{"engine": "torch"}]
    of_files = [name for name in ("openvino", "onnxruntime") if find_spec(name)]
    assert measured("a.onnx", device="cpu", engine="fastest") == [
        {"engine": name} for name in of_files
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)  # torch.compile takes minutes on a busy machine
def test_all_engines_of_this_machine_are_tried(volume_in, tmp_path):
    values = job_values(
        volume_in,
        tmp_path / "out",
        model=toy("batch_norm") | {"output_channels": 2},
        inference={"engine": "fastest"},
    )
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    assert main(["verify", str(tmp_path / "job.yaml"), "--deep"]) == 0


@pytest.mark.parametrize("engine", ["auto", "fastest", "openvino"])
def test_a_layout_without_pytorch_is_refused(tmp_path, engine):
    values = job_values(
        "in",
        "out",
        inference={"device": "cpu", "engine": engine, "memory_format": "channels_last"},
    )
    with pytest.raises(ConfigError, match="memory_format: channels_last is PyTorch's"):
        parse_job(values, tmp_path)


@pytest.mark.slow
def test_the_bits_of_channels_last_do_not_depend_on_the_chunk_shape(volume_in, tmp_path):
    found = []
    for chunk in ([16, 32, 32], [32, 64, 64]):
        values = job_values(
            volume_in,
            tmp_path / f"out{chunk[0]}",
            model=toy("batch_norm") | {"output_channels": 2},
            inference={"memory_format": "channels_last", "chunk_shape": chunk},
        )
        assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
        found.append(read_volume(tmp_path / f"out{chunk[0]}"))
    np.testing.assert_array_equal(*found)
