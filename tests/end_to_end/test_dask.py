"""A job on a Dask cluster of real processes: the same bytes, also when one of them is killed."""

import os
import signal
import subprocess
import sys
import time

import dask
import numpy as np
import pytest
from distributed import LocalCluster
from helpers import read_volume, truncated, wait_for_text
from oracles.downsampling import level_above

from beam_inference.beam.flags import beam_options, workers_of
from beam_inference.cli.main import main
from beam_inference.job.state import State
from beam_inference.volumes.opening import open_volume


def receipts_of(output, folder="receipts"):
    state = State(f"file://{output}/_beam_inference")
    job = state.load_job()
    state = state.of(job)
    chunks = range(job.plan.chunks.count)
    return state.read_sums(chunks) if folder == "sums" else state.read_receipts(chunks)


@pytest.mark.slow
def test_every_worker_process_computes_and_the_bytes_are_the_same(
    conv_job, dask_cluster, tmp_path, capsys
):
    path, expected = conv_job
    assert main(["run", path, *dask_cluster]) == 0
    assert "18 of 18 chunks done" in capsys.readouterr().out
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    assert main(["verify", path, "--deep"]) == 0
    workers = {receipt.worker for receipt in receipts_of(tmp_path / "out")}
    assert len(workers) == 2
    assert not any(worker.endswith(f":{os.getpid()}") for worker in workers)


@pytest.mark.slow
def test_the_pyramid_follows_there_too(conv_job, dask_cluster, tmp_path, capsys):
    path, _ = conv_job
    assert main(["run", path, *dask_cluster, "--set", "output.pyramid={levels: 2}"]) == 0
    assert "pyramid: complete, 2 scales by mean" in capsys.readouterr().out
    for scale in (1, 2):
        below, level = (
            open_volume((tmp_path / "out").as_uri(), scale=k) for k in (scale - 1, scale)
        )
        above = level_above(below.read(below.bounds), below.bounds.start, (2, 2, 2), "mean")
        np.testing.assert_array_equal(level.read(level.bounds), above)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "folder"),
    [("slow_job", "receipts"), ("slow_exchange_job", "sums"), ("slow_merge_job", "receipts")],
)
def test_a_worker_process_is_killed(request, fixture, folder, dask_cluster, tmp_path):
    path, expected = request.getfixturevalue(fixture)
    command = [sys.executable, "-m", "beam_inference", "run", path, *dask_cluster]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            wait_for_text(tmp_path / "out" / "_beam_inference" / "job.json")
            while len(done := receipts_of(tmp_path / "out", folder)) < 3 and run.poll() is None:
                time.sleep(0.05)
            sums = receipts_of(tmp_path / "out", "sums")
            os.kill(int(done[0].worker.rpartition(":")[2]), signal.SIGKILL)
            out, err = run.communicate(timeout=90)
        finally:
            run.kill()
    assert run.returncode == 0, err
    assert len(done) < 18
    assert "18 of 18 chunks done" in out
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    after = receipts_of(tmp_path / "out", folder)
    first = {receipt.chunk: receipt for receipt in done}
    assert all(first[receipt.chunk] == receipt for receipt in after if receipt.chunk in first), (
        "done once, kept"
    )
    if fixture == "slow_merge_job":
        owners = State(f"file://{tmp_path}/out/_beam_inference").load_job().plan.totals.owners
        assert len(sums) == owners, "in the second stage"
        assert receipts_of(tmp_path / "out", "sums") == sums, "no patch is computed twice"


@pytest.mark.slow
def test_quarantine_and_resume(conv_job, volume_in, dask_cluster, tmp_path, capsys):
    path, expected = conv_job
    block = next(volume_in.glob("*/*_*-*_*"))
    with truncated(block):
        assert main(["run", path, *dask_cluster]) == 3
    assert (
        main(
            [
                "run",
                path,
                *dask_cluster,
                "--chunks",
                str(tmp_path / "out/_beam_inference/quarantine.jsonl"),
            ]
        )
        == 0
    )
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)


def test_a_cluster_that_is_not_there(job, capsys, tmp_path, monkeypatch):
    path = job(inference={"threads": 1})
    assert (
        main(
            [
                "run",
                path,
                "--runner=DaskRunner",
                "--dask_client_address=tcp://localhost:1",
                "--dask_connection_timeout=2",
            ]
        )
        == 2
    )
    assert "does not answer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def interrupted(command, group, receipts, output):
    """Run a command, send SIGINT once there are some receipts; its exit code and what it said."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        try:
            wait_for_text(output / "_beam_inference" / "job.json")
            while len(receipts_of(output)) < receipts and run.poll() is None:
                time.sleep(0.05)
            group(run.pid)
            out, err = run.communicate(timeout=60)
        finally:
            run.kill()
    return run.returncode, out, err


@pytest.mark.slow
def test_ctrl_c_ends_a_launch_whose_own_cluster_it_reaches(slow_job, tmp_path):
    path, _ = slow_job
    command = [sys.executable, "-m", "beam_inference", "run", path, "--runner=DaskRunner"]
    code, out, err = interrupted(
        command, lambda pid: os.killpg(pid, signal.SIGINT), 3, tmp_path / "out"
    )
    assert code == 130, out + err
    assert "to do what is missing" in out


@pytest.mark.slow
def test_a_scheduler_that_dies_is_told_of(slow_job, dask_cluster, tmp_path):
    path, _ = slow_job
    command = [sys.executable, "-m", "beam_inference", "run", path, *dask_cluster]
    file = dask_cluster[-1].partition("=")[2]
    found = subprocess.run(
        ["pgrep", "-f", f"dask scheduler.*{file}"], capture_output=True, text=True, check=True
    )
    schedulers = [int(pid) for pid in found.stdout.split()]

    def kill(_):
        for pid in schedulers:
            os.kill(pid, signal.SIGKILL)

    code, out, err = interrupted(command, kill, 3, tmp_path / "out")
    assert code == 1, out + err
    assert "the launch ended early" in out
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ttl", "told"), [("5 minutes", None), ("1 hour", "after 3600 s only"), (None, "never")]
)
def test_a_cluster_that_notices_no_hung_worker_is_told_of(ttl, told, caplog):
    with (
        dask.config.set({"distributed.scheduler.worker-ttl": ttl}),
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
    ):
        flags = ["--runner=DaskRunner", f"--dask_client_address={cluster.scheduler_address}"]
        assert workers_of(beam_options(flags)) >= 1
    warnings = [line for line in caplog.messages if "a worker process hangs" in line]
    assert [told in line for line in warnings] == ([] if told is None else [True])
