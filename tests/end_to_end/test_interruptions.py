"""Test jobs on real data that are killed, asked to stop, or given a corrupt input block."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fib25_job import affinity_job
from helpers import read_volume, truncated, write_job

from beam_inference.cli.main import main

ROI = {"start": [0, 0, 0], "stop": [64, 128, 128]}
CHUNK_SHAPE = (16, 32, 64)  # 32 chunks
CHUNKS = 32


def start(path, *flags):
    return subprocess.Popen(
        [sys.executable, "-m", "beam_inference", "run", str(path), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def receipts(output: Path) -> dict[int, dict]:
    files = (output / "_beam_inference" / "receipts").rglob("*.json")
    return {
        receipt["chunk"]: receipt for receipt in (json.loads(file.read_text()) for file in files)
    }


def wait_for_receipts(output, count, process, folder="receipts"):
    deadline = time.monotonic() + 90
    while len(list((output / "_beam_inference" / folder).rglob("*.json"))) < count:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(fib25, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    values = affinity_job(fib25, folder / "out", CHUNK_SHAPE, roi=ROI, block_shape=(16, 32, 32))
    assert main(["run", str(write_job(folder / "job.yaml", values))]) == 0
    return read_volume(folder / "out")


@pytest.fixture
def job(fib25, tmp_path):
    values = affinity_job(fib25, tmp_path / "out", CHUNK_SHAPE, roi=ROI, block_shape=(16, 32, 32))
    values["inference"]["strategy"] = "recompute"  # chunks are finished from the start
    return write_job(tmp_path / "job.yaml", values)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_twice_at_random_moments_then_finished(job, undisturbed, tmp_path):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    output = tmp_path / "out"
    for _ in range(2):
        process = start(job)
        wait_for_receipts(output, len(receipts(output)) + chance.randint(1, 8), process)
        time.sleep(chance.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    before = receipts(output)
    assert 2 <= len(before) < CHUNKS
    finished = subprocess.run(
        [sys.executable, "-m", "beam_inference", "run", str(job)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"({CHUNKS - len(before)} by this launch)" in finished.stdout, (
        "only what is missing is done"
    )
    after = receipts(output)
    assert len(after) == CHUNKS
    assert all(after[chunk] == receipt for chunk, receipt in before.items())
    assert main(["verify", str(job), "--deep"]) == 0
    np.testing.assert_array_equal(read_volume(output), undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_in_either_stage_of_the_exchange_and_then_finished(fib25, tmp_path):
    """The kills come while patches are computed and while chunks are put together."""
    values = affinity_job(fib25, tmp_path / "out", CHUNK_SHAPE, roi=ROI, block_shape=(16, 32, 32))
    values["inference"]["seams"] = "exchange"
    job = write_job(tmp_path / "job.yaml", values)
    output = tmp_path / "out"
    kept = {}
    for folder, count in (("sums", 9), ("receipts", 3)):
        process = start(job)
        wait_for_receipts(output, count, process, folder)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for each in ("sums", "receipts"):
            kept |= {
                path: path.read_bytes()
                for path in (output / "_beam_inference" / each).rglob("*.json")
            }
    assert 0 < len(receipts(output)) < CHUNKS
    assert main(["run", str(job)]) == 0
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert main(["verify", str(job), "--deep"]) == 0
    values["output"]["path"] = str(tmp_path / "undisturbed")
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    np.testing.assert_array_equal(read_volume(output), read_volume(tmp_path / "undisturbed"))


PROCESSES = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "flags"),
    [
        pytest.param(signal.SIGTERM, (), marks=pytest.mark.slow),
        (signal.SIGINT, ()),
        pytest.param(signal.SIGTERM, PROCESSES, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, PROCESSES, marks=pytest.mark.slow),
    ],
    ids=["SIGTERM", "Ctrl-C", "SIGTERM with worker processes", "Ctrl-C with worker processes"],
)
def test_asked_to_stop_it_finishes_what_it_began_and_says_how_to_resume(
    job, undisturbed, tmp_path, number, flags
):
    output = tmp_path / "out"
    process = start(job, *flags)
    wait_for_receipts(output, 3, process)
    if number == signal.SIGINT:  # as a terminal does: to the launcher and to all its workers
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping: no further chunk is started" in err
    # on Ctrl-C, Beam's worker processes die with a stack trace each
    if number == signal.SIGTERM or not flags:
        assert "Traceback" not in err
    again = shlex.join(["beam-inference", "run", str(job), *flags])
    assert f"to do what is missing: {again}\n" in out
    before = receipts(output)
    assert 3 <= len(before) < CHUNKS
    assert main(["verify", str(job), "--deep"]) == 1, "what is there is right, but it is not all"
    assert main(["run", str(job)]) == 0
    assert main(["verify", str(job), "--deep"]) == 0
    np.testing.assert_array_equal(read_volume(output), undisturbed)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_killed_worker_process_ends_the_launch_with_a_message_and_loses_nothing(
    job, undisturbed, tmp_path
):
    """Beam's local runner does not start another worker; Dataflow does."""
    output = tmp_path / "out"
    process = start(job, *PROCESSES)
    wait_for_receipts(output, 2, process)
    workers = subprocess.run(
        ["pgrep", "-g", str(process.pid), "-f", "sdk_worker_main"], capture_output=True, text=True
    )
    os.kill(int(workers.stdout.split()[-1]), signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "a worker process died" in out
    assert "Traceback" not in out + err
    assert main(["run", str(job)]) == 0
    assert main(["verify", str(job), "--deep"]) == 0
    np.testing.assert_array_equal(read_volume(output), undisturbed)


@pytest.mark.slow
def test_a_truncated_block_then_restored(fib25, undisturbed, tmp_path):
    copy = tmp_path / "fib25"
    shutil.copytree(fib25, copy)
    output = tmp_path / "out"
    job = write_job(
        tmp_path / "job.yaml",
        affinity_job(copy, output, CHUNK_SHAPE, roi=ROI, block_shape=(16, 32, 32)),
    )
    block = next(copy.rglob("64-128_64-128_0-64"))
    with truncated(block):
        assert main(["run", str(job)]) == 3

        from beam_inference.job.state import State

        plan = State(f"file://{output}/_beam_inference").load_job().plan
        boxes = {index: plan.work(index).input_box for index in range(CHUNKS)}
        readers = {
            i
            for i, box in boxes.items()
            if box.start[0] < 64 and box.stop[1] > 64 and box.stop[2] > 64
        }
        assert 0 < len(readers) < CHUNKS
        quarantine = output / "_beam_inference" / "quarantine.jsonl"
        assert {
            json.loads(line)["chunk"] for line in quarantine.read_text().splitlines()
        } == readers
        assert set(receipts(output)) == set(range(CHUNKS)) - readers
    assert main(["run", str(job), "--chunks", str(quarantine)]) == 0
    assert main(["verify", str(job), "--deep"]) == 0
    np.testing.assert_array_equal(read_volume(output), undisturbed)


@pytest.mark.slow
def test_the_number_of_threads_is_decided_once_and_kept_because_it_changes_the_last_bits(
    fib25, tmp_path
):
    """Worker processes share the cores: with two of them, each gets half of the threads."""
    values = affinity_job(
        fib25,
        tmp_path / "out",
        CHUNK_SHAPE,
        roi={"start": [0, 0, 0], "stop": [32, 64, 128]},
        block_shape=(16, 32, 32),
    )
    del values["inference"]["threads"]
    job = write_job(tmp_path / "job.yaml", values)
    process = start(job, *PROCESSES)
    wait_for_receipts(tmp_path / "out", 1, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert main(["run", str(job)]) == 0, "another runner goes on with the same number"

    one_thread = len(os.sched_getaffinity(0)) // 2
    values["inference"]["threads"] = max(1, one_thread)
    values["output"]["path"] = str(tmp_path / "told")
    assert main(["run", str(write_job(tmp_path / "told.yaml", values))]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), read_volume(tmp_path / "told"))
