"""All GPUs of a machine are used by one launch, each by a process of its own."""

import os
import subprocess
import sys

import pytest
from helpers import job_values, read_volume, toy

from beam_inference import run_job
from beam_inference.beam.flags import beam_options, place_of
from beam_inference.config.job_file import parse_job
from beam_inference.job.state import State
from beam_inference.launch import several_devices
from beam_inference.launch.several_devices import with_process_per_device

NAMES = {"cpu": 1, "cuda": 4, "cuda:1": 1}


@pytest.fixture
def four_devices(monkeypatch):
    monkeypatch.setattr(several_devices, "count_devices", NAMES.__getitem__)


def job(tmp_path, device):
    values = job_values(tmp_path / "in", tmp_path / "out", inference={"device": device})
    return parse_job(values, tmp_path)


def test_a_launch_that_says_nothing_has_a_process_for_each_device(four_devices, tmp_path):
    for flags in ([], ["--runner=DirectRunner"], ["--runner=FnApiRunner"]):
        place = place_of(beam_options(with_process_per_device(job(tmp_path, "cuda"), flags)))
        assert (place.processes_per_host, place.threads_per_process) == (4, 1)


@pytest.mark.parametrize(
    ("device", "flags"),
    [
        ("cpu", []),
        ("cuda:1", []),
        ("cuda", ["--direct_num_workers=2"]),
        ("cuda", ["--direct_running_mode=multi_threading"]),
        ("cuda", ["--runner=DaskRunner"]),
        ("cuda", ["--runner=DataflowRunner"]),
    ],
)
def test_what_a_launch_says_is_kept(four_devices, tmp_path, device, flags):
    assert with_process_per_device(job(tmp_path, device), flags) == flags


@pytest.mark.slow
def test_two_processes_for_two_devices_do_the_job_to_the_same_bits(
    volume_in, tmp_path, monkeypatch
):
    one, two = (
        parse_job(
            job_values(
                volume_in,
                tmp_path / name,
                model=toy("slow"),  # so that the first process leaves something for the second
                inference={"device": "cpu"},
            ),
            tmp_path,
        )
        for name in ("one", "two")
    )
    assert run_job(one).exit_code == 0
    monkeypatch.setattr(several_devices, "count_devices", lambda device: 2)
    assert run_job(two).exit_code == 0
    assert (read_volume(tmp_path / "one") == read_volume(tmp_path / "two")).all()
    state = State(f"file://{tmp_path}/two/_beam_inference")
    receipts = state.of(state.load_job()).read_receipts(range(18))
    workers = {receipt.worker for receipt in receipts}
    assert len(workers) == 2
    assert not any(worker.endswith(f":{os.getpid()}") for worker in workers)


def test_processes_take_devices_in_turn_and_leave_them_as_they_end(tmp_path):
    code = (
        "import sys; from beam_inference.engines.devices import claim_device; "
        "print(claim_device(2), flush=True); sys.stdin.read()"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    processes = []
    claimed = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        processes.append(process)
        claimed.append(int(process.stdout.readline()))

    for _ in range(3):
        start()
    processes[1].communicate("")
    start()
    for process in (processes[0], *processes[2:]):
        process.communicate("")
    assert claimed == [0, 1, 0, 1]
