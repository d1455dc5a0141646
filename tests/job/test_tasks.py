import json
from typing import get_args

import numpy as np
import pytest
from helpers import job_values, launch_of, write_job

from beam_inference.cli.main import main
from beam_inference.cli.tasks import STATES
from beam_inference.job.records import QuarantineRecord
from beam_inference.job.tasks import TaskState, list_tasks
from beam_inference.worker.worker import Worker


def test_the_command_knows_every_state():
    assert get_args(TaskState) == STATES


@pytest.mark.parametrize("seams", [pytest.param("recompute", marks=pytest.mark.slow), "exchange"])
def test_each_chunk_has_its_box_and_its_state(volume_in, tmp_path, seams):
    launch = launch_of(volume_in, tmp_path / "out", seams)
    job = launch.read_job()
    state = launch.state()
    worker = Worker(launch)
    count = job.plan.chunks.count
    assert {task.state for task in list_tasks(job, state)} == {"missing"}
    list(worker.infer_chunks([0, 3]))
    state.write_quarantine(
        QuarantineRecord(
            chunk=1,
            box=job.plan.chunks.core_box(1),
            input_box=job.plan.work(1).input_box,
            stage="read",
            cause="torn",
            attempts=3,
            launch=launch.id,
            fingerprint=job.fingerprint,
        )
    )
    expected = {0: "done", 1: "quarantined", 3: "done"}
    if seams == "exchange":
        summed = {record.chunk: "summed" for record in worker.sum_chunks(range(count))}
        assert summed.keys() - expected.keys()
        expected = summed | expected
    tasks = list(list_tasks(job, state))
    assert [task.chunk for task in tasks] == list(range(count))
    assert {task.chunk: task.state for task in tasks if task.state != "missing"} == expected
    assert all(task.box == job.plan.chunks.core_box(task.chunk) for task in tasks)


def test_the_list_as_text_json_and_csv(volume_in, tmp_path, capsys):
    values = job_values(volume_in, tmp_path / "out")
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["tasks", job]) == 2
    assert "nothing to list" in capsys.readouterr().err
    assert main(["prepare", job, "--shards", "1"]) == 0
    capsys.readouterr()
    assert main(["tasks", job]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0] == "0 3:19,-5:27,2:34 missing"
    assert main(["tasks", job, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0] == {"chunk": 0, "start": [3, -5, 2], "stop": [19, 27, 34], "state": "missing"}
    assert main(["tasks", job, "--csv"]) == 0
    header, first, *rest = capsys.readouterr().out.splitlines()
    assert header == "chunk,z0,z1,y0,y1,x0,x1,state"
    assert first == "0,3,19,-5,27,2,34,missing"
    assert len(text) == len(listed) == len(rest) + 1 == 18
    covered = sum(np.prod(np.subtract(each["stop"], each["start"])) for each in listed)
    assert covered == 40 * 70 * 50
    assert main(["tasks", job, "--state", "done", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["tasks", job, "--state", "done"]) == 0
    assert capsys.readouterr().out == ""
