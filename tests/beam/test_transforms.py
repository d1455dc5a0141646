"""The transforms on real runners: faults that escape, replayed bundles, and foreign pipelines."""

import ast
from collections import Counter
from pathlib import Path

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from helpers import OF_RANGE, job_values, read_volume, write_volume

from beam_inference.beam.transforms import GenerateRuns, InferVolume, RecordCoder
from beam_inference.config.job_file import parse_job
from beam_inference.engines.trial import SETTLING_CALLS
from beam_inference.errors import WorkerFault
from beam_inference.geometry.zyx import ceil_div
from beam_inference.job.messages import Launch, Record
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.job.verification import verify
from beam_inference.launch import pipeline as job_pipeline
from beam_inference.launch.prepare import prepare
from beam_inference.worker.worker import Worker

TOYS = Path(__file__).parents[1] / "toy_networks.py"


def make_launch(source, target, folder, /, chunks=(), **sections) -> Launch:
    return prepare(parse_job(job_values(source, target, **sections), folder), chunks=chunks)


def run(launch, *flags, runner="FnApiRunner"):
    with beam.Pipeline(runner, options=PipelineOptions(list(flags))) as pipeline:
        job_pipeline.build(pipeline, launch)


def check_complete(launch):
    job = ResolvedJob.model_validate_json(launch.job)
    report = verify(job, State(launch.state_url))
    assert report.complete
    assert report.receipts == job.plan.chunks.count
    return report


@pytest.fixture
def position(volume_in, tmp_path):
    """A launch of a network that notices any error of geometry, and what it gives undisturbed."""
    model = {"path": f"{TOYS}:position", "output_channels": 2, "normalize": "unit"}
    clean = make_launch(volume_in, tmp_path / "clean", tmp_path, model=model)
    worker = Worker(clean)
    list(worker.infer_chunks(range(worker.job.plan.chunks.count)))
    return lambda **other: make_launch(volume_in, tmp_path / "out", tmp_path, model=model, **other)


def assert_identical_to_clean(tmp_path):
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), read_volume(tmp_path / "clean"))


@pytest.mark.parametrize(
    "flags",
    [
        ("--direct_running_mode=in_memory",),
        ("--direct_running_mode=multi_threading", "--direct_num_workers=2"),
        pytest.param(
            ("--direct_running_mode=multi_processing", "--direct_num_workers=2"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_mode_of_the_local_runner_gives_the_same_bits(position, tmp_path, flags):
    launch = position()
    run(launch, *flags)
    check_complete(launch)
    assert_identical_to_clean(tmp_path)
    summary = State(launch.state_url).read_summary(launch.id)
    assert (summary.done, summary.skipped, summary.quarantined) == (
        ResolvedJob.model_validate_json(launch.job).plan.chunks.count,
        0,
        0,
    )


def test_three_faults_that_escape_are_retried_by_the_runner(position, tmp_path, monkeypatch):
    """BundleBasedDirectRunner tries a bundle four times, as Dataflow does; all runs are in one."""
    launch = position()
    write_receipt = State.write_receipt
    faults = []
    written = Counter()

    def faulty(self, receipt):
        if receipt.chunk in (1, 4, 7) and receipt.chunk not in faults:
            faults.append(receipt.chunk)
            raise WorkerFault("the device is lost")
        written[receipt.chunk] += 1
        return write_receipt(self, receipt)

    monkeypatch.setattr(State, "write_receipt", faulty)
    run(launch, runner="BundleBasedDirectRunner")
    assert faults == [1, 4, 7]
    check_complete(launch)
    assert_identical_to_clean(tmp_path)
    assert set(written.values()) == {1}, "a retried bundle must not compute again what is durable"
    summary = State(launch.state_url).read_summary(launch.id)
    assert summary.done == len(written)


def test_a_fourth_fault_fails_the_job_but_loses_nothing(position, tmp_path, monkeypatch):
    launch = position()

    def sick(self, receipt):
        raise WorkerFault("destination not writable")

    monkeypatch.setattr(State, "write_receipt", sick)
    with pytest.raises(Exception, match="destination not writable"):
        run(launch, runner="BundleBasedDirectRunner")
    monkeypatch.undo()
    run(launch)
    check_complete(launch)
    assert_identical_to_clean(tmp_path)


@pytest.mark.parametrize("resume", [True, False])
def test_replayed_bundles_compute_nothing_twice_unless_receipts_are_ignored(
    volume_in, tmp_path, monkeypatch, resume
):
    """--direct_runner_bundle_repeat=2 runs each bundle twice for nothing, and then in earnest."""
    log = tmp_path / "calls"
    monkeypatch.setenv("TOY_NETWORK_LOG", str(log))
    launch = make_launch(
        volume_in,
        tmp_path / "out",
        tmp_path,
        model={"path": f"{TOYS}:counted", "prediction_bound": 256},
        job={"resume": resume},
    )
    log.unlink()  # the call of the contract check
    plan = ResolvedJob.model_validate_json(launch.job).plan
    per_pass = sum(ceil_div(plan.work(index).patch_count, 2) for index in range(plan.chunks.count))
    repeats = 2
    run(launch, f"--direct_runner_bundle_repeat={repeats}", "--direct_running_mode=in_memory")
    calls = len(log.read_text().splitlines())
    passes = 1 if resume else repeats + 1
    assert calls == SETTLING_CALLS + passes * per_pass
    check_complete(launch)
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(volume_in), rtol=0, atol=OF_RANGE
    )


def test_the_transforms_compose_into_a_foreign_pipeline(position, tmp_path):
    """A foreign pipeline has a branch of its own beside ours, and its own sink for our records."""
    launch = position()
    seen = tmp_path / "seen"
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | "Theirs" >> beam.Create(["unrelated"]) | beam.Map(str.upper)
        records = pipeline | "Ours" >> InferVolume(launch)
        _ = (
            records
            | beam.Filter(lambda record: record.outcome == "done")
            | beam.Map(lambda record: record.chunk)
            | beam.combiners.ToList()
            | beam.Map(lambda chunks: seen.write_text(str(sorted(chunks))))
        )
    count = ResolvedJob.model_validate_json(launch.job).plan.chunks.count
    assert seen.read_text() == str(list(range(count)))
    assert_identical_to_clean(tmp_path)


def test_two_jobs_in_one_pipeline_do_not_mix(volume_in, tmp_path):
    launches = [
        make_launch(
            volume_in, tmp_path / f"out{k}", tmp_path, model={"normalize": {"scale": float(k)}}
        )
        for k in (1, 2)
    ]
    with beam.Pipeline("FnApiRunner") as pipeline:
        for k, launch in enumerate(launches):
            _ = pipeline | f"Job{k}" >> InferVolume(launch)
    one, two = (read_volume(tmp_path / f"out{k}") for k in (1, 2))
    np.testing.assert_allclose(two, 2 * one, rtol=0, atol=4 * OF_RANGE)


REPEATED = ("--direct_runner_bundle_repeat=2",)
WAYS = [
    pytest.param("recompute", (), marks=pytest.mark.slow),
    pytest.param("recompute", REPEATED, marks=pytest.mark.slow),
    pytest.param("exchange", (), marks=pytest.mark.slow),
    ("exchange", REPEATED),
]


@pytest.mark.parametrize(("seams", "flags"), WAYS)
def test_a_job_waits_for_the_records_of_another(tmp_path, flags, seams):
    """The second job reads what the first one writes: a voxel read too early would be 0."""
    array = np.random.default_rng(3).random((40, 50, 40), np.float32)
    source = write_volume(tmp_path / "in", array)
    inference = {"seams": seams}
    doubled = make_launch(
        source,
        tmp_path / "doubled",
        tmp_path,
        output={"format": "ome_zarr"},  # a folder of precomputed blocks may not be empty
        model={"normalize": {"scale": 2.0}},
        inference=inference,
    )
    tripled = make_launch(
        tmp_path / "doubled",
        tmp_path / "tripled",
        tmp_path,
        model={"normalize": {"scale": 3.0}},
        inference=inference,
    )
    with beam.Pipeline("FnApiRunner", options=PipelineOptions(list(flags))) as pipeline:
        _ = (
            pipeline
            | "Doubled" >> InferVolume(doubled, workers=2)
            | "Tripled" >> InferVolume(tripled, workers=2)
        )
    check_complete(doubled)
    check_complete(tripled)
    np.testing.assert_allclose(
        read_volume(tmp_path / "tripled")[0], 6 * array, rtol=0, atol=OF_RANGE
    )


def test_a_job_begins_after_a_signal_without_elements(volume_in, tmp_path):
    launch = make_launch(volume_in, tmp_path / "out", tmp_path)
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create([]) | InferVolume(launch)
    check_complete(launch)


@pytest.mark.parametrize(("seams", "flags"), WAYS)
def test_chunk_indices_can_come_from_a_pcollection(position, tmp_path, flags, seams):
    """In any order, repeated or not; the rest of the job stays undone."""
    launch = position(inference={"seams": seams})
    seen = tmp_path / "seen"
    with beam.Pipeline("FnApiRunner", options=PipelineOptions(list(flags))) as pipeline:
        _ = (
            pipeline
            | beam.Create([5, 2, 5, 6])
            | InferVolume(launch, input_kind="chunks")
            | beam.Map(lambda record: (record.chunk, record.outcome))
            | beam.combiners.ToList()
            | beam.Map(lambda records: seen.write_text(str(sorted(records))))
        )
    assert ast.literal_eval(seen.read_text()) == [(2, "done"), (5, "done"), (6, "done")]
    assert list(launch.state().receipt_indices(0, 1000)) == [2, 5, 6]
    run(launch)
    check_complete(launch)
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(tmp_path / "clean"), rtol=1e-5, atol=1e-5
    )


def test_an_index_beyond_the_last_chunk_ends_the_pipeline(position):
    launch = position()
    with (
        pytest.raises(Exception, match="there is no chunk 1000, only 0"),
        beam.Pipeline("FnApiRunner") as pipeline,
    ):
        _ = pipeline | beam.Create([1000]) | InferVolume(launch, input_kind="chunks")


def test_chunk_indices_need_a_pcollection(position):
    launch = position()
    with pytest.raises(TypeError, match="needs a PCollection"):
        beam.Pipeline("FnApiRunner") | InferVolume(launch, input_kind="chunks")


def test_records_have_a_coder_and_a_type(position):
    record = Record(7, "done", 10, 20, {"read": 0.5, "write": 1.25}, 3)
    coder = beam.coders.registry.get_coder(Record)
    assert isinstance(coder, RecordCoder)
    assert coder.is_deterministic()
    assert coder.decode(coder.encode(record)) == record
    records = beam.Pipeline("FnApiRunner") | InferVolume(position())
    assert records.element_type is Record


def test_a_process_parses_a_job_once(position):
    launch = position()
    assert launch.read_job() is launch.read_job()
    assert launch.read_job() == ResolvedJob.model_validate_json(launch.job)


def test_a_missing_receipt_is_all_that_is_done_again(position, tmp_path):
    run(position())
    next((tmp_path / "out/_beam_inference/receipts").rglob("000000000004.json")).unlink()
    again = position()
    run(again)
    summary = State(again.state_url).read_summary(again.id)
    assert (summary.done, summary.skipped, summary.quarantined) == (1, 0, 0)


def test_the_list_of_chunks_is_read_on_the_workers(position, tmp_path):
    (tmp_path / "chunks").write_text("5\n")
    launch = position(chunks=["2", str(tmp_path / "chunks")])
    (tmp_path / "chunks").unlink()
    run(launch)
    job = ResolvedJob.model_validate_json(launch.job)
    assert list(State(launch.state_url).of(job).receipt_indices(0, 1000)) == [2, 5]


def test_the_graph_of_a_billion_chunks_is_under_a_megabyte(volume_in, tmp_path):
    launch = make_launch(volume_in, tmp_path / "out", tmp_path)
    job = ResolvedJob.model_validate_json(launch.job)
    box = {"start": (0, 0, 0), "stop": (16_000, 32_000, 32_000)}
    huge = job.model_dump() | {"roi": box, "input_bounds": box, "output_bounds": box}
    config = huge["config"]
    config["inference"]["chunk_shape"] = (16, 32, 32)
    billion = ResolvedJob.model_validate(huge)
    assert billion.plan.chunks.count == 10**9
    fields = {name: getattr(launch, name) for name in launch.__dataclass_fields__}
    pipeline = beam.Pipeline("FnApiRunner")
    job_pipeline.build(pipeline, Launch(**fields | {"job": billion.model_dump_json()}))
    assert len(pipeline.to_runner_api().SerializeToString()) < 1_000_000


def test_runs_are_consecutive_chunks(volume_in, tmp_path):
    launch = make_launch(volume_in, tmp_path / "out", tmp_path, job={"run_length": 3})
    found = tmp_path / "runs"
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = (
            pipeline
            | GenerateRuns(launch)
            | beam.combiners.ToList()
            | beam.Map(lambda runs: found.write_text(str(sorted(runs))))
        )
    count = ResolvedJob.model_validate_json(launch.job).plan.chunks.count
    runs = ast.literal_eval(found.read_text())
    assert [index for run in runs for index in run] == list(range(count))
    assert all(len(run) <= 3 for run in runs)
