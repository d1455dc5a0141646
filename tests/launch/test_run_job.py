import shutil

import pytest
from helpers import job_values

from beam_inference import run_job
from beam_inference.beam.flags import beam_options, place_of, workers_of
from beam_inference.config.job_file import parse_job
from beam_inference.errors import StateError
from beam_inference.job.place import THIS_PROCESS
from beam_inference.job.state import State
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


def test_the_local_runner_is_what_is_assumed_without_flags():
    options = beam_options(())
    assert place_of(options) == THIS_PROCESS
    assert workers_of(options) == THIS_PROCESS.processes_per_host * THIS_PROCESS.threads_per_process


@pytest.fixture
def finished(volume_in, tmp_path):
    """A job of a factory that leaves a file when it is called; it is complete."""
    network = tmp_path / "network.py"
    network.write_text(
        f"def make():\n    open({str(tmp_path / 'called')!r}, 'w').close()\n    return abs\n"
    )
    values = job_values(
        volume_in,
        tmp_path / "out",
        model={"path": f"{network}:make", "prediction_bound": 256},
        inference={"engine": "numpy"},
        output={"pyramid": {}},
    )
    config = parse_job(values, tmp_path)
    assert run_job(config).exit_code == 0
    (tmp_path / "called").unlink()
    return config


@pytest.mark.parametrize("flags", [[], ["--direct_num_workers=1"]])
@pytest.mark.parametrize("sample", [None, (0.5, 0)])
def test_a_complete_job_is_told_so_without_its_network(finished, tmp_path, flags, sample):
    outcome = run_job(finished, flags, sample=sample)
    assert (outcome.exit_code, outcome.missing_of_job, outcome.error) == (0, 0, None)
    assert outcome.done == outcome.chunks == (18 if sample is None else outcome.summary.skipped)
    assert (outcome.summary.done, outcome.pyramid.complete) == (0, True)
    assert not (tmp_path / "called").exists()
    notes = State(f"file://{tmp_path}/out/_beam_inference").read_launches()
    assert [note.summary.done for note in notes] == [18, 0]


def test_a_complete_job_of_another_network_is_refused(finished, tmp_path):
    with (tmp_path / "network.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(StateError, match="belongs to another job"):
        run_job(finished)


def test_a_pyramid_that_is_not_complete_is_something_left_to_do(finished, tmp_path):
    folder = tmp_path / "out" / "_beam_inference" / "pyramid"
    for done in list(folder.rglob("done")):
        shutil.rmtree(done)
    outcome = run_job(finished)
    assert (outcome.exit_code, outcome.pyramid.complete) == (0, True)


def test_a_receipt_that_cannot_be_believed_is_something_left_to_do(finished, tmp_path):
    receipt = next((tmp_path / "out" / "_beam_inference" / "receipts").rglob("*.json"))
    receipt.write_text(receipt.read_text()[:-20])
    outcome = run_job(finished)
    assert (outcome.exit_code, outcome.summary.done) == (0, 1)
    assert (tmp_path / "called").exists()


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
