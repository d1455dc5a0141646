"""Several launches of one job share its chunks; each is done once, and none is forgotten."""

import threading
from collections import Counter

import numpy as np
import pytest
from helpers import job_values, read_volume

from beam_inference.beam.transforms import launch_ranges, run_length, runs_of_range
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ChunkFault
from beam_inference.job.crew_records import CrewRecords
from beam_inference.job.runs import missing_runs
from beam_inference.job.shards import Shard
from beam_inference.job.verification import verify
from beam_inference.launch.prepare import prepare
from beam_inference.volumes.opening import open_volume
from beam_inference.worker.device_turns import DeviceTurns
from beam_inference.worker.journal import Journal
from beam_inference.worker.worker import Worker

SOON = {"timeouts": {"claim": 0.6}, "run_length": 4}


@pytest.fixture
def launch(volume_in, tmp_path):
    def make(strategy="recompute", **sections):
        values = job_values(volume_in, tmp_path / "out", **{"job": SOON, **sections})
        values["inference"]["strategy"] = strategy
        return prepare(parse_job(values, tmp_path), claims=True)

    return make


def runs_of(launch):
    length = run_length(launch, 1)
    return [run for each in launch_ranges(launch, 1) for run in runs_of_range(each, launch, length)]


def do_all(launch, outcomes):
    worker = Worker(launch)
    if worker.job.plan.exchange is not None:
        for run in runs_of(launch):
            list(worker.sum_chunks(run))
    stage = worker.infer_chunks if worker.job.plan.exchange is None else worker.merge_seams
    for run in runs_of(launch):
        outcomes.update((record.outcome, launch.id) for record in stage(run))


@pytest.mark.parametrize("strategy", ["recompute", "exchange"])
def test_launches_share_the_chunks(launch, volume_in, tmp_path, strategy):
    launches = [launch(strategy) for _ in range(3)]
    outcomes = Counter()
    threads = [threading.Thread(target=do_all, args=(each, outcomes)) for each in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    job = launches[0].read_job()
    state = launches[0].state()
    assert verify(job, state, {"output": open_volume(f"file://{tmp_path}/out")}).complete
    done = sum(count for (outcome, _), count in outcomes.items() if outcome == "done")
    assert done == job.plan.chunks.count
    assert not [*(tmp_path / "out/_beam_inference/claims").rglob("0*.json")]
    alone = prepare(parse_job(job_values(volume_in, tmp_path / "alone"), tmp_path))
    list(Worker(alone).infer_chunks(range(alone.read_job().plan.chunks.count)))
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), read_volume(tmp_path / "alone"))


def test_a_claimed_stretch_is_done_last_and_after_its_worker_fell_silent(launch, caplog):
    own = launch()
    crew = own.state().crew()
    run = runs_of(own)[0]
    assert crew.claim("infer", 4, run[0] // 4, "killed-1")
    worker = Worker(own)
    records = list(worker.infer_chunks(run))
    assert {record.chunk: record.outcome for record in records} == dict.fromkeys(run, "done")
    count = worker.job.plan.chunks.count
    assert own.state().count_receipts(0, count) == count  # meanwhile it did all others
    assert "killed-1 has given no sign of life" in caplog.text
    assert crew.claimed_numbers("infer", 4, 0, count) == set()


def test_what_another_worker_has_done_meanwhile_is_not_done_again(launch):
    first = launch()
    second = launch()
    runs = runs_of(second)
    do_all(first, Counter())
    worker = Worker(second)
    assert second.state().crew().claim("infer", 4, runs[0][0] // 4, f"{first.id}-1")
    outcomes = {record.outcome for record in worker.infer_chunks(runs[0])}
    assert outcomes == {"skipped"}


def test_a_stretch_that_another_worker_has_given_up_wholly(launch):
    """As where an engine repeats a task of which all chunks are in quarantine."""
    own = launch()
    run, given_up, *_ = runs_of(own)
    job = own.read_job()
    journal = Journal(own, job, own.state())
    for index in given_up:
        journal.quarantine(index, ChunkFault("it is damaged", "read", 1))
    assert own.state().crew().claim("infer", 4, run[0] // 4, "killed-1")
    worker = Worker(own)
    list(worker.infer_chunks(run))  # meets another worker, and does the rest meanwhile
    outcomes = {record.chunk: record.outcome for record in worker.infer_chunks(given_up)}
    assert outcomes == dict.fromkeys(given_up, "quarantined")
    count = job.plan.chunks.count
    assert own.state().count_receipts(0, count) == count - len(given_up)


def test_a_worker_that_waits_stops_when_it_is_told_to(launch):
    own = launch(job={"timeouts": {"claim": 3600}, "run_length": 10_000})
    assert own.state().crew().claim("infer", 10_000, 0, "other-1")
    worker = Worker(own)
    threading.Timer(0.3, lambda: own.state().request_stop(own.id)).start()
    assert list(worker.infer_chunks(runs_of(own)[0])) == []
    assert own.state().count_receipts(0, worker.job.plan.chunks.count) == 0


def test_who_works_is_told_until_the_launch_ends(launch):
    own = launch()
    list(Worker(own).infer_chunks(runs_of(own)[0]))
    (sign,) = own.state().crew().read_signs().values()
    assert (sign.launch, sign.device) == (own.id, "cpu")


def test_a_launch_of_some_chunks_claims_nothing(launch, volume_in, tmp_path):
    assert launch().claim_length == 4
    values = job_values(volume_in, tmp_path / "out", job=SOON)
    config = parse_job(values, tmp_path)
    assert prepare(config, claims=True, sample=(0.5, 0)).claim_length is None
    assert prepare(config).claim_length is None
    launch().state().write_shard_count(2, replace=False)
    assert prepare(config, claims=True, shard=Shard(0, 2)).claim_length is None


def test_short_stretches_are_begun_before_their_turn_and_done_once(launch, monkeypatch):
    own = launch(job={"run_length": 1})
    computed = Counter()
    infer = DeviceTurns.infer

    def count(self, index, *arguments):
        computed[index] += 1
        return infer(self, index, *arguments)

    monkeypatch.setattr(DeviceTurns, "infer", count)
    worker = Worker(own)
    runs = runs_of(own)
    assert len(runs) == worker.job.plan.chunks.count > 4
    records = [record for run in runs for record in worker.infer_chunks(run)]
    assert [(record.chunk, record.outcome) for record in records] == [
        (index, "done") for (index,) in runs
    ]
    assert computed == Counter(index for (index,) in runs)
    assert own.state().crew().claimed_numbers("infer", 1, 0, len(runs)) == set()
    other = Worker(launch(job={"run_length": 1}))
    list(other.infer_chunks(runs[0]))
    assert set(computed.values()) == {1}


def test_what_a_launch_did_before_it_listed_it_is_listed_and_counted(launch):
    """Runners may list a range of chunks after stretches of another range are done."""
    own = launch()
    run = runs_of(own)[0]
    list(Worker(own).infer_chunks(run))
    other = launch()
    state = own.state()
    ahead = [*missing_runs((0, 8), state, 4, claiming_launch=own.id)]
    assert ahead == [(0, 1, 2, 3), (4, 5, 6, 7)]
    done = [*missing_runs((0, 8), other.state(), 4, claiming_launch=other.id)]
    assert run not in done
    assert {record.outcome for record in Worker(own).infer_chunks(ahead[0])} == {"done"}


def test_a_stretch_that_was_listed_as_free_before_its_turn_is_not_claimed_again(
    launch, monkeypatch
):
    own = launch(job={"run_length": 1})
    has_listed = threading.Event()
    may_go_on = threading.Event()
    claimed = Counter()
    claimed_numbers = CrewRecords.claimed_numbers
    claim = CrewRecords.claim

    def list_slowly(self, *arguments):
        numbers = claimed_numbers(self, *arguments)
        has_listed.set()
        assert may_go_on.wait(10)
        return numbers

    def claim_after_the_list(self, stage, length, number, worker):
        assert has_listed.wait(10)
        claimed[number] += 1
        return claim(self, stage, length, number, worker)

    monkeypatch.setattr(CrewRecords, "claimed_numbers", list_slowly)
    monkeypatch.setattr(CrewRecords, "claim", claim_after_the_list)
    worker = Worker(own)
    runs = runs_of(own)
    assert {record.outcome for record in worker.infer_chunks(runs[0])} == {"done"}
    may_go_on.set()
    for run in runs[1:]:
        assert {record.outcome for record in worker.infer_chunks(run)} == {"done"}
    assert set(claimed.values()) == {1}
