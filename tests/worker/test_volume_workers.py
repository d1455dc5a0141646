"""The workers of a process for several volumes: one network, few open, faulty ones put aside."""

import shutil

import numpy as np
import pytest
from helpers import job_values, write_volume

from beam_inference.config.cohort import parse_cohort
from beam_inference.errors import WorkerFault
from beam_inference.job.cohort import CohortLaunch
from beam_inference.launch.cohort import prepare_volumes
from beam_inference.launch.run_job import settle
from beam_inference.worker.volume_workers import VolumeWorkers


@pytest.fixture
def launch(tmp_path):
    for number, name in enumerate("abc"):
        write_volume(tmp_path / "in" / name, np.full((8, 16, 16), number, np.uint8))
    values = job_values("unused", tmp_path / "out" / "{name}", job={"state_path": "state"})
    rows = [{"name": name, "input": f"in/{name}"} for name in "abc"]
    cohort = parse_cohort(values, rows, tmp_path, "job.yaml")
    first = cohort.volumes["a"]
    made = CohortLaunch(cohort.state_url, "launch", first.storage, threads_per_process=2)
    assert not prepare_volumes(cohort, made, settle(first, ())).faults
    return made


def test_volumes_share_a_network_and_few_are_open(launch):
    workers = VolumeWorkers(launch)
    a = workers.find_worker("a")
    b = workers.find_worker("b")
    assert workers.find_worker("a") is a
    workers.find_worker("c")  # closes b, which was not used for longest
    assert workers.find_worker("a") is a
    assert workers.find_worker("b") is not b
    assert [record.outcome for record in a.infer_chunks([0])] == ["done"]


def test_a_volume_whose_output_is_gone_is_put_aside(launch, tmp_path):
    workers = VolumeWorkers(launch)
    shutil.rmtree(tmp_path / "out" / "b")
    assert workers.find_worker("a") is not None
    assert workers.find_worker("b") is None
    assert "out/b" in launch.volume_state("b").read_fault()
    assert workers.find_worker("b") is None
    assert workers.find_worker("c") is not None


def test_a_process_that_can_open_nothing_is_at_fault_itself(launch, tmp_path):
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(WorkerFault, match="out/a"):
        VolumeWorkers(launch).find_worker("a")


def test_a_launch_whose_record_is_gone_is_a_fault(launch, tmp_path):
    (tmp_path / "state/volumes/a/launches/launch.launch").unlink()
    with pytest.raises(WorkerFault, match="run the job again"):
        VolumeWorkers(launch).find_worker("a")
