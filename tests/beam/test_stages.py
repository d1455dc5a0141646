"""Stages of work on volumes: what any job made of them promises."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner

from beam_inference.beam.stage_runner import run_stages
from beam_inference.beam.stages import DoStages, StageWorker
from beam_inference.errors import PermanentReadError, StateError, TransientReadError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.ownership import Owner, claim_output
from beam_inference.job.stage_records import StageRecords, stage_job
from beam_inference.volumes.kvstores import LOCAL


@dataclass(frozen=True)
class Append:
    """Writes a file per chunk that counts earlier files; other files make chunks fail."""

    name: str
    folder: str
    count: int = 20

    def make_worker(self):
        folder = Path(self.folder)
        (folder / f"opened-{self.name}").touch()

        def do(index):
            with (folder / f"calls-{self.name}").open("a") as calls:
                calls.write(f"{index}\n")
            fault = folder / f"fault-{self.name}-{index}"
            if fault.exists():
                kind, times = fault.read_text().split()
                if int(times):
                    fault.write_text(f"{kind} {int(times) - 1}")
                    raise {
                        "transient": TransientReadError,
                        "permanent": PermanentReadError,
                        "sick": WorkerFault,
                    }[kind](f"chunk {index} is broken")
            before = len(list(folder.glob("first-*"))) if self.name == "second" else 0
            (folder / f"{self.name}-{index}").write_text(f"{before}")

        return do

    def calls(self):
        file = Path(self.folder) / f"calls-{self.name}"
        return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.fixture
def stages(tmp_path):
    return [Append("first", str(tmp_path)), Append("second", str(tmp_path), 5)]


def a_job(tmp_path, stages, **description):
    job = stage_job(
        "numbers", {"of": "a test", **description}, (tmp_path / "target").as_uri(), LOCAL, stages
    )
    StageRecords(job).begin()
    return job


def test_a_stage_begins_when_the_one_before_is_complete(tmp_path, stages):
    outcome = run_stages(a_job(tmp_path, stages), ["--direct_num_workers=2"], 1.0)
    assert (outcome.exit_code, outcome.chunks, outcome.done, outcome.failures) == (0, 25, 25, [])
    assert [(tmp_path / f"second-{k}").read_text() for k in range(5)] == ["20"] * 5
    assert sorted(stages[0].calls()) == list(range(20))


def test_a_record_of_another_stage_or_job_does_not_count(tmp_path, stages, caplog):
    job = a_job(tmp_path, stages)
    other = stage_job("numbers", {"of": "another"}, job.state_url, LOCAL, stages)
    entries = job.done_entries(stages[1])
    for index, said in enumerate(
        (job.names_of(stages[1]), job.names_of(stages[0]), other.names_of(stages[1]), {})
    ):
        entries.write(index, json.dumps(said | {"chunk": index}))
    assert job.done_chunks(stages[1], range(5)) == {0}
    assert caplog.text.count("of something else, and does not count") == 3
    assert list(entries.indices(0, 5)) == [0]


def test_a_second_launch_does_what_is_missing(tmp_path, stages):
    (tmp_path / "fault-first-7").write_text("permanent 1")
    outcome = run_stages(a_job(tmp_path, stages), [], 1.0)
    assert (outcome.exit_code, outcome.done) == (1, 19)
    assert outcome.failures == ["first, chunk 7: chunk 7 is broken"]
    assert stages[1].calls() == []  # it would have read what is not there
    outcome = run_stages(a_job(tmp_path, stages), [], 1.0)
    assert (outcome.exit_code, outcome.done, outcome.failures) == (0, 25, [])
    assert sorted(stages[0].calls()) == sorted([*range(20), 7])


def test_no_later_stage_begins_after_an_unfinished_one(tmp_path, stages):
    (tmp_path / "fault-first-7").write_text("permanent 1")
    third = Append("third", str(tmp_path), 3)
    assert run_stages(a_job(tmp_path, [*stages, third]), [], 1.0).done == 19
    assert stages[1].calls() == third.calls() == []


def test_trouble_that_passes_is_tried_again_at_once(tmp_path, stages):
    (tmp_path / "fault-first-3").write_text("transient 2")
    assert run_stages(a_job(tmp_path, stages), [], 1.0).exit_code == 0
    assert stages[0].calls().count(3) == 3


def test_a_sick_worker_ends_the_launch_and_fails_no_chunk(tmp_path, stages):
    (tmp_path / "fault-first-3").write_text("sick 1")
    job = a_job(tmp_path, stages)
    outcome = run_stages(job, [], 1.0)
    assert (outcome.exit_code, outcome.failures, outcome.error) == (1, [], "chunk 3 is broken")
    assert run_stages(a_job(tmp_path, stages), [], 1.0).exit_code == 0


def test_bundles_that_are_tried_again_repeat_nothing(tmp_path, stages):
    (tmp_path / "fault-first-11").write_text("sick 2")
    job = a_job(tmp_path, stages)
    with beam.Pipeline(runner=BundleBasedDirectRunner(), options=PipelineOptions()) as pipeline:
        _ = pipeline | DoStages(job)
    assert list(job.done_entries(stages[1]).indices(0, 5)) == list(range(5))
    calls = stages[0].calls()
    assert calls.count(11) == 3
    assert len(calls) == 22


@pytest.mark.parametrize("unfinished", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_stages_may_follow_other_transforms(tmp_path, stages, unfinished):
    job = a_job(tmp_path, stages)
    with beam.Pipeline(runner=BundleBasedDirectRunner(), options=PipelineOptions()) as pipeline:
        left = pipeline | beam.Create([unfinished]) | DoStages(job)
        _ = left | beam.Map(lambda count: (tmp_path / "left").write_text(str(count)))
    assert (tmp_path / "left").read_text() == str(unfinished)
    assert len(stages[0].calls()) == (0 if unfinished else 20)
    assert (tmp_path / "opened-first").exists() == (not unfinished), (
        "a stage that has nothing to do opens nothing"
    )


def test_what_was_asked_to_stop_begins_no_chunk(tmp_path, stages):
    job = a_job(tmp_path, stages)
    job.state().request_stop(job.launch)
    assert StageWorker(job, stages[0]).do([0, 1]) == 2
    assert stages[0].calls() == []


def test_a_target_of_something_else_is_refused(tmp_path, stages):
    a_job(tmp_path, stages)
    with pytest.raises(StateError, match="records of another job"):
        a_job(tmp_path, stages, with_="other settings")
    other = stage_job("numbers", {}, (tmp_path / "target").as_uri(), LOCAL, stages)
    StageRecords(other).begin(overwrite=True)
    a_kind_of_its_own = stage_job("letters", {}, (tmp_path / "target").as_uri(), LOCAL, stages)
    StageRecords(a_kind_of_its_own).begin()


def test_overwrite_does_everything_anew(tmp_path, stages):
    run_stages(a_job(tmp_path, stages), [], 1.0)
    job = stage_job("numbers", {"of": "a test"}, (tmp_path / "target").as_uri(), LOCAL, stages)
    StageRecords(job).begin(overwrite=True)
    assert run_stages(job, [], 1.0).exit_code == 0
    assert sorted(stages[0].calls()) == sorted([*range(20)] * 2)


def test_a_target_that_cannot_be_written_is_told_of(tmp_path, stages):
    (tmp_path / "target").write_text("a file")
    with pytest.raises(StateError, match="cannot be used|is a file|cannot open"):
        a_job(tmp_path, stages)


def remove_records(job):
    shutil.rmtree(Path(job.state_url.removeprefix("file://")) / job.kind)


def take_over(job):
    remove_records(job)
    StageRecords(stage_job(job.kind, {"of": "another"}, target_of(job), LOCAL, ())).begin()


def claim_for_a_job(job):
    owner = Owner(fingerprint="f" * 64, roi=BoundingBox((0,) * 3, (1,) * 3), state_url=None)
    claim_output(target_of(job), owner, LOCAL, replace=True)


def target_of(job):
    return job.state_url.removesuffix("/_beam_inference")


@pytest.mark.parametrize("change", [remove_records, take_over, claim_for_a_job])
def test_nothing_is_written_where_another_has_taken_over(tmp_path, stages, change):
    job = stage_job("convert", {"of": "a test"}, (tmp_path / "target").as_uri(), LOCAL, stages)
    StageRecords(job).begin()
    worker = StageWorker(job, stages[0])
    assert worker.do([0, 1]) == 0
    change(job)
    with pytest.raises(WorkerFault, match=r"this launch writes nothing more: .*convert"):
        worker.do([2])
    assert stages[0].calls() == [0, 1]
