"""Test that a trial is repeated if, and only if, something changed on which it depends."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from helpers import job_values, read_volume, truncated, write_job, write_volume

from beam_inference import run_job
from beam_inference.config.job_file import parse_job
from beam_inference.engines.cache import Cache, cache_place
from beam_inference.launch import kept_trial
from beam_inference.launch.engine_trial import try_network_here
from beam_inference.launch.job_files import load_job
from beam_inference.launch.prepare import prepare
from beam_inference.models.trust import Trust

TOLD = "the network was tried before"


def save_network(path, seed):
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch means to give TorchScript up
        torch.jit.script(torch.nn.Conv3d(1, 2, 3, padding=1)).save(str(path))


@pytest.fixture
def make_job(volume_in, tmp_path):
    """A function that makes the job file of a TorchScript network."""
    save_network(tmp_path / "network.pt", 0)

    def make(**sections):
        sections["model"] = {
            "path": str(tmp_path / "network.pt"),
            "output_channels": 2,
            "normalize": "unit",
        } | sections.get("model", {})
        values = job_values(volume_in, tmp_path / "out", **sections)
        return str(write_job(tmp_path / "job.yaml", values))

    return make


@pytest.fixture
def is_tried(caplog, tmp_path):
    """A function that prepares a job, and says whether its network was tried for that."""

    def prepare_job(path, **keys):
        caplog.clear()
        with caplog.at_level(logging.INFO, "beam_inference"):
            launch = prepare(load_job(path), **keys)
        prepare_job.job = launch.read_job()
        return not any(TOLD in record.getMessage() for record in caplog.records)

    return prepare_job


def entries():
    return sorted(path for path in cache_place().iterdir() if path.name.startswith("trial-"))


@pytest.mark.parametrize("engine", ["torch", "auto", "fastest"])
@pytest.mark.parametrize("batch_size", [2, "auto"])
def test_a_launch_that_goes_on_and_one_from_the_start_try_it_no_more(
    make_job, is_tried, engine, batch_size
):
    path = make_job(inference={"engine": engine, "batch_size": batch_size})
    assert is_tried(path)
    first = is_tried.job
    assert not is_tried(path)
    assert is_tried.job == first.model_copy(update={"patch_seconds": is_tried.job.patch_seconds})
    assert not is_tried(path, overwrite=True)
    assert is_tried.job == first


def test_what_another_thread_warns_of_is_not_the_trials(make_job, is_tried, monkeypatch):
    """A worker of an earlier launch may still say that it leaves a sign of life behind."""
    logger = logging.getLogger("beam_inference.worker.crew")

    def try_network(*arguments, **keys):
        thread = threading.Thread(target=logger.warning, args=("a sign of life is left behind",))
        thread.start()
        thread.join()
        return try_network_here(*arguments, **keys)

    monkeypatch.setattr(kept_trial, "try_network_here", try_network)
    path = make_job(inference={"engine": "auto", "batch_size": "auto"})
    assert is_tried(path)
    assert not is_tried(path)


@pytest.mark.slow
def test_a_trial_that_is_known_needs_no_pytorch(make_job):
    code = (
        "import sys; from beam_inference.launch.prepare import prepare\n"
        "from beam_inference.launch.job_files import load_job\n"
        "prepare(load_job(sys.argv[1]), overwrite=True); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, make_job()]
    found = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
        for _ in range(2)
    ]
    assert found == ["True", "False"]


def other_network(path):
    save_network(path.parent / "network.pt", 1)


def other_voxels(path):
    folder = path.parent / "in"
    shutil.rmtree(folder)
    array = np.random.default_rng(1).integers(0, 256, (40, 70, 50), dtype=np.uint8)
    write_volume(folder, array, (3, -5, 2))


def other_variable(path):
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.mark.parametrize("change", [other_network, other_voxels, other_variable])
def test_it_is_tried_again_after_a_change(make_job, is_tried, change, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    path = make_job()
    assert is_tried(path)
    assert not is_tried(path, overwrite=True)
    change(tmp_path / "job.yaml")
    assert is_tried(path, overwrite=True)


@pytest.mark.parametrize(
    "sections",
    [
        {"inference": {"batch_size": 3}},
        {"inference": {"precision": "bfloat16"}},
        {"inference": {"threads": 2}},
        {"inference": {"patch_shape": [8, 16, 24]}},
        {"inference": {"augment": "xy"}, "model": {"channels": [{}, {}]}},
        {"inference": {"memory_format": "channels_last"}},
        {"inference": {"engine": "openvino"}},
        {"model": {"normalize": "none"}},
        {"model": {"activation": "sigmoid"}},
        {"roi": {"start": [3, -5, 2], "stop": [19, 27, 34]}},
    ],
    ids=str,
)
def test_it_is_tried_anew_for_other_settings(make_job, is_tried, sections):
    assert is_tried(make_job(inference={"threads": 1}))
    sections = sections | {"inference": {"threads": 1} | sections.get("inference", {})}
    path = make_job(**sections)
    assert is_tried(path, overwrite=True)
    assert not is_tried(path, overwrite=True)


def test_other_chunks_and_another_output_need_no_other_trial(make_job, is_tried, tmp_path):
    assert is_tried(make_job())
    other = {"inference": {"chunk_shape": [32, 32, 32]}, "output": {"path": str(tmp_path / "b")}}
    assert not is_tried(make_job(**other))


def test_files_that_may_run_code_are_tried_each_time(make_job, is_tried, tmp_path):
    path = make_job()
    assert is_tried(path)
    for _ in range(2):
        assert is_tried(path, overwrite=True, trust=Trust.PICKLES)
    (tmp_path / "network.py").write_text("def make():\n    return abs\n")
    for _ in range(2):
        path = make_job(
            model={"path": f"{tmp_path}/network.py:make", "output_channels": 1},
            inference={"engine": "numpy"},
            output={"path": str(tmp_path / "other")},
        )
        assert is_tried(path, overwrite=True)


@pytest.mark.parametrize(
    ("change", "is_believed"),
    [
        ({}, True),
        ({"engine": "none"}, False),
        ({"engine": "openvino"}, False),
        ({"batch_size": 4, "fitting_batch_size": 4}, False),
        ({"fitting_batch_size": 3}, False),
        ({"fitting_batch_size": 0}, False),
        ({"working_set_bytes": -1}, False),
        ({"working_set_bytes": 2**60}, False),
        ({"seconds": 0}, False),
        ({"seconds": float("nan")}, False),
        ({"low": 2, "high": 1}, False),
        ({"high": float("inf")}, False),
        ({"prediction_bounds": None}, False),
        ({"prediction_bounds": [-1]}, False),
        ({"memory_format": "none"}, False),
        ({"warnings": ["x"] * 21}, False),
        ({"warnings": ["x" * 2001]}, False),
        ({"more": 1}, False),
        ("[" * 100_000, False),
        ("", False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_trial_cannot_have_found_is_ignored(make_job, is_tried, change, is_believed):
    # The strategy is named: "auto" would choose it by a time that is measured at each trial.
    path = make_job(inference={"threads": 1, "strategy": "recompute"})
    assert is_tried(path)
    expected = is_tried.job
    for entry in entries():
        key = json.loads(entry.read_bytes().split(b"\n")[0])["key"]
        kept = Cache(cache_place())
        findings = json.loads(kept.read("trial", key))
        text = json.dumps(findings | change) if isinstance(change, dict) else change
        kept.write("trial", key, text.encode())
    assert is_tried(path, overwrite=True) is not is_believed
    changing = {"patch_seconds", "working_set_bytes"}  # measured
    assert is_tried.job.model_dump(exclude=changing) == expected.model_dump(exclude=changing)


def test_what_it_warned_of_is_told_again(make_job, is_tried, caplog, volume_in):
    # of values in [0, 1), none is near 100
    path = make_job(output={"dtype": "uint8", "value_range": [100, 200]})

    def told():
        own = threading.get_ident()  # threads of other tests may still end what they began
        return [
            record.getMessage()
            for record in caplog.records
            if record.levelname == "WARNING" and record.thread == own
        ]

    assert is_tried(path)
    before = told()
    assert any("are clipped" in text for text in before)
    assert not is_tried(path, overwrite=True)
    assert told() == before
    with ExitStack() as stack:
        for block in (volume_in / "10_10_10").iterdir():
            stack.enter_context(truncated(block))
        for _ in range(2):  # zeros are tried in place of what cannot be read
            assert is_tried(path, overwrite=True)
            assert any("zeros" in text for text in told())


@pytest.mark.slow
def test_a_conversion_that_was_kept_gives_the_same_bits(make_job, tmp_path):
    pytest.importorskip("openvino")
    for name in ("first", "second", "third"):
        path = make_job(inference={"engine": "openvino"}, output={"path": str(tmp_path / name)})
        assert run_job(load_job(path)).exit_code == 0
        kept = [path for path in cache_place().iterdir() if path.name.startswith("conversion-")]
        assert len(kept) == 1
        if name == "second":
            kept[0].write_bytes(kept[0].read_bytes()[:-1])
    first = read_volume(tmp_path / "first")
    assert first.std() > 0
    np.testing.assert_array_equal(read_volume(tmp_path / "second"), first)
    np.testing.assert_array_equal(read_volume(tmp_path / "third"), first)


def test_nothing_needs_the_cache(volume_in, make_job, monkeypatch, tmp_path, is_tried):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    path = make_job()
    for _ in range(2):
        assert is_tried(path, overwrite=True)
    assert parse_job(job_values(volume_in, tmp_path / "out"), tmp_path)
