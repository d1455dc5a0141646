"""A job on a Dask cluster of real processes: the same bytes, also when one of them is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import dask
import numpy as np
import pytest
import yaml
from distributed import LocalCluster
from helpers import read_volume, truncated, wait_for_text, write_job
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
    long_job, dask_cluster, tmp_path, capsys
):
    path, expected = long_job  # of a quick one the first worker leaves the second nothing
    assert main(["run", path, *dask_cluster]) == 0
    assert "18 of 18 chunks done" in capsys.readouterr().out
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    assert main(["verify", path, "--deep"]) == 0
    workers = {receipt.worker for receipt in receipts_of(tmp_path / "out")}
    assert len(workers) == 2
    assert not any(worker.endswith(f":{os.getpid()}") for worker in workers)


@pytest.mark.timeout(400)
def test_a_job_file_that_leaves_all_open_gives_the_bytes_of_a_local_run(
    open_job, dask_cluster, tmp_path, capsys
):
    path = open_job(batch_size="auto")
    assert main(["run", path, *dask_cluster]) == 0
    assert "the network is tried on a worker" in capsys.readouterr().err
    decided = State(f"file://{tmp_path}/out/_beam_inference").load_job()
    inference = decided.config.inference
    assert (inference.device, inference.threads) == ("cpu", 1)
    assert decided.prediction_bound is not None
    assert not list((tmp_path / "out/_beam_inference/launches").glob("*.answer"))
    keys = {"threads": 1, "batch_size": inference.batch_size, "engine": inference.engine}
    assert main(["run", open_job(output="here", **keys)]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), read_volume(tmp_path / "here"))
    receipt = receipts_of(tmp_path / "out")[0]
    State(f"file://{tmp_path}/out/_beam_inference").of(decided).forget_chunks([receipt.chunk])
    capsys.readouterr()
    assert main(["run", path, *dask_cluster]) == 0
    assert "the network is tried on a worker" not in capsys.readouterr().err
    assert {each.chunk for each in receipts_of(tmp_path / "out")} >= {receipt.chunk}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_wrong_network_ends_a_launch_there_as_it_does_here(
    open_job, dask_cluster, tmp_path, capsys
):
    path = open_job("expanded")
    assert main(["run", path]) == 2
    here = capsys.readouterr().err
    assert main(["run", path, *dask_cluster]) == 2
    there = capsys.readouterr().err
    assert here.startswith("error: ")
    assert there.endswith(here)
    assert "output_channels" in here
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ctrl_c_ends_a_launch_whose_network_is_being_tried(open_job, dask_cluster, tmp_path):
    network = (
        "import pathlib, time, torch\n"
        "class Network(torch.nn.Module):\n"
        "    def forward(self, batch):\n"
        f"        pathlib.Path({str(tmp_path / 'called')!r}).write_text('x')\n"
        "        time.sleep(3)\n"
        "        return torch.cat([batch, batch], 1)\n"
    )
    (tmp_path / "network.py").write_text(network)
    changes = [f"--set=model.path={tmp_path}/network.py:Network", "--set=inference.engine=torch"]
    command = [sys.executable, "-m", "beam_inference", "run", open_job(), *dask_cluster, *changes]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            wait_for_text(tmp_path / "called")
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=90)
        finally:
            run.kill()
    assert run.returncode == 130, out + err
    assert "a worker that is trying the network comes to its end" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_of_several_volumes_one_is_asked_about(open_job, volume_in, dask_cluster, tmp_path, capsys):
    values = yaml.safe_load(Path(open_job()).read_text())
    del values["input"], values["output"]["path"]
    values["job"] = {"state_path": str(tmp_path / "state")}
    values["volumes"] = [
        {"name": name, "input": str(volume_in), "output": str(tmp_path / name)} for name in "ab"
    ]
    path = str(write_job(tmp_path / "volumes.yaml", values))
    assert main(["run", path, *dask_cluster]) == 0
    assert capsys.readouterr().err.count("the network is tried on a worker") == 1
    np.testing.assert_array_equal(read_volume(tmp_path / "a"), read_volume(tmp_path / "b"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_shards_follow_what_a_worker_told_when_the_job_was_prepared(
    open_job, dask_cluster, tmp_path, capsys
):
    path = open_job()
    assert main(["prepare", path, "--shards=2", *dask_cluster]) == 0
    assert capsys.readouterr().err.count("the network is tried on a worker") == 1
    for shard in ("0/2", "1/2"):
        assert main(["run", path, f"--shard={shard}", *dask_cluster]) == 0
    assert main(["finish", path, *dask_cluster]) == 0
    assert "the network is tried on a worker" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_step_that_is_a_job_asks_once(open_job, dask_cluster, tmp_path, capsys):
    values = yaml.safe_load(Path(open_job()).read_text())
    first = values | {"output": {"path": str(tmp_path / "first"), "dtype": "float32"}}
    second = first | {
        "input": {"path": str(tmp_path / "first"), "channel": 1},
        "output": {"path": str(tmp_path / "second"), "dtype": "float32"},
    }
    path = str(write_job(tmp_path / "steps.yaml", {"steps": {"one": first, "two": second}}))
    assert main(["run", path, *dask_cluster]) == 0
    assert capsys.readouterr().err.count("the network is tried on a worker") == 2


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
