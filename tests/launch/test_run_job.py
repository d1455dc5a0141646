import os
import subprocess
import sys

import pytest
from helpers import job_values

from beam_inference import run_job
from beam_inference.config.job_file import parse_job
from beam_inference.launch.prepare import prepare
from beam_inference.launch.run_job import ChunksToDo, list_phases
from beam_inference.worker.worker import Worker


def test_a_job_from_python(volume_in, tmp_path):
    outcome = run_job(parse_job(job_values(volume_in, tmp_path / "out"), tmp_path))
    assert (outcome.exit_code, outcome.done, outcome.missing, outcome.quarantined) == (
        0,
        18,
        0,
        [],
    )
    assert outcome.summary.done == 18


@pytest.mark.slow
def test_processes_of_one_machine_take_devices_in_turn(tmp_path, monkeypatch):
    code = """
import sys, time
from beam_inference.engines.devices import claim_cuda_device
print(claim_cuda_device(2), flush=True)
sys.stdin.read()
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    processes = []
    claimed = []
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        processes.append(process)
        claimed.append(int(process.stdout.readline()))
    for process in processes:
        process.communicate("")
    assert claimed == [0, 1, 0]


def test_progress_counts_the_stages_of_the_exchange_each_by_itself(volume_in, tmp_path):
    values = job_values(volume_in, tmp_path / "out", inference={"seams": "exchange"})
    launch = prepare(parse_job(values, tmp_path))
    job = launch.read_job()
    state = launch.state()
    worker = Worker(launch)
    first, second = list_phases(ChunksToDo(launch, job, state, None))
    assert (first.total, second.total) == (job.plan.totals.owners, job.plan.chunks.count)
    assert (
        first.total * first.voxels_per_thing
        == second.total * second.voxels_per_thing
        == job.plan.chunks.roi.size
    )
    summed = list(worker.sum_chunks(range(10)))
    assert 0 < first.count_done() == len(summed) < first.total
    done = list(worker.merge_seams(range(18)))  # as where the rest is quarantined
    assert (first.count_done(), second.count_done()) == (first.total, len(done))
    (chosen,) = list_phases(ChunksToDo(launch, job, state, [1, 2, 3]))
    assert (chosen.total, chosen.count_done()) == (
        3,
        len({record.chunk for record in done} & {1, 2, 3}),
    )
    list(worker.sum_chunks(range(18)))
    list(worker.merge_seams(range(18)))
    assert [phase.things for phase in list_phases(ChunksToDo(launch, job, state, None))] == [
        "chunks"
    ]
