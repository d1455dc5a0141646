"""Test ``strategy: exchange`` through workers and runners: the bits of ``recompute``."""

import json
import random
import shutil
from collections import Counter
from datetime import UTC, datetime, timedelta

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from helpers import (
    POSITION,
    job_values,
    launch_of,
    read_volume,
    toy,
    truncated,
    write_job,
    write_volume,
)

from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.engines.protocol import AS_COMPUTED
from beam_inference.engines.trial import SETTLING_CALLS
from beam_inference.errors import NonFiniteError, WorkerFault
from beam_inference.job.runs import missing_runs
from beam_inference.job.state import State
from beam_inference.job.status import job_status
from beam_inference.job.verification import verify
from beam_inference.launch import pipeline as job_pipeline
from beam_inference.launch.prepare import prepare
from beam_inference.worker.chunk_inference import ChunkInference
from beam_inference.worker.worker import Worker


def run(launch, *flags, runner="FnApiRunner"):
    with beam.Pipeline(runner, options=PipelineOptions(list(flags))) as pipeline:
        job_pipeline.build(pipeline, launch)


def state_of(output):
    state = State(f"file://{output}/_beam_inference")
    job = state.load_job()
    return state.of(job), job


def check_complete(output):
    state, job = state_of(output)
    from beam_inference.job.parts import output_spec
    from beam_inference.volumes.outputs import open_output

    assert verify(job, state, {"output": open_output(output_spec(job))}).complete
    assert not [
        path for path in (output / "_beam_inference").rglob("seams/*/*/*/*") if path.is_file()
    ], "all are read"


@pytest.fixture
def undisturbed(volume_in, tmp_path):
    """What the two stages give, done by one worker in order."""
    launch = launch_of(volume_in, tmp_path / "undisturbed")
    worker = Worker(launch)
    chunks = range(launch.read_job().plan.chunks.count)
    assert {record.outcome for record in worker.sum_chunks(chunks)} == {"summed"}
    assert {record.outcome for record in worker.merge_seams(chunks)} == {"done"}
    check_complete(tmp_path / "undisturbed")
    return read_volume(tmp_path / "undisturbed")


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
def test_every_mode_of_the_local_runner_gives_the_bits_of_a_single_worker(
    undisturbed, volume_in, tmp_path, flags
):
    launch = launch_of(volume_in, tmp_path / "out")
    run(launch, *flags)
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)
    summary = launch.state().read_summary(launch.id)
    assert (summary.done, summary.skipped, summary.quarantined) == (
        launch.read_job().plan.chunks.count,
        0,
        0,
    )
    if "in_memory" in flags[0]:
        run(launch_of(volume_in, tmp_path / "recomputed", seams="recompute"), *flags)
        np.testing.assert_array_equal(undisturbed, read_volume(tmp_path / "recomputed"))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 10))]
)
def test_random_jobs_through_beam(seed, tmp_path):
    """Chunks smaller than a patch or without patches, blocks beyond an overlap, odd offsets."""
    chance = random.Random(seed)

    def three(low, high):
        return [chance.randint(low, high) for _ in range(3)]

    shape = three(9, 26)
    start = three(-9, 9)
    write_volume(
        tmp_path / "in", np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), start
    )
    block = three(2, 6)
    patch = three(3, 12)
    low = [a + chance.randint(0, n - 6) for a, n in zip(start, shape, strict=True)]
    high = [chance.randint(b + 3, a + n) for a, b, n in zip(start, low, shape, strict=True)]
    results = {}
    for seams in ("exchange", "recompute"):
        sections = {
            "model": POSITION if seed % 2 else toy("same", normalize="unit"),
            "roi": {"start": low, "stop": high, "context": three(0, 3) if seed % 3 else [0, 0, 0]},
            "output": {"block_shape": block, "dtype": "float32"},
            "inference": {
                "patch_shape": patch,
                "patch_overlap": [chance.randint(0, p - 1) for p in patch],
                "chunk_shape": [b * chance.randint(1, 3) for b in block],
                "batch_size": 1 + seed % 2,
            },
        }
        if results:
            sections = results["sections"]
        results["sections"] = sections
        sections = {key: dict(values) for key, values in sections.items()}
        run(launch_of(tmp_path / "in", tmp_path / seams, seams=seams, **sections))
        results[seams] = read_volume(tmp_path / seams)
    check_complete(tmp_path / "exchange")
    assert results["exchange"].tobytes() == results["recompute"].tobytes()


def test_the_network_is_called_once_for_each_patch(volume_in, tmp_path, monkeypatch):
    log = tmp_path / "calls"
    monkeypatch.setenv("TOY_NETWORK_LOG", str(log))
    launch = launch_of(
        volume_in, tmp_path / "out", model=toy("counted"), inference={"batch_size": 1}
    )
    log.unlink()  # the call of the contract check
    run(launch)
    plan = launch.read_job().plan
    calls = len(log.read_text().splitlines()) - SETTLING_CALLS  # before the first chunk, of zeros
    assert calls == plan.totals.patch_count == plan.lattice.count
    check_complete(tmp_path / "out")


def test_integers_are_the_same(volume_in, tmp_path):
    keys = {"output": {"dtype": "uint8", "value_range": [-1, 5]}}
    for seams in ("exchange", "recompute"):
        run(
            launch_of(
                volume_in, tmp_path / seams, seams=seams, **{k: dict(v) for k, v in keys.items()}
            )
        )
    mine, theirs = (read_volume(tmp_path / seams) for seams in ("exchange", "recompute"))
    np.testing.assert_array_equal(mine, theirs)
    check_complete(tmp_path / "exchange")


@pytest.mark.parametrize("method", ["write_sums", "write_receipt"])
def test_faults_that_escape_are_retried_by_the_runner(
    undisturbed, volume_in, tmp_path, monkeypatch, method
):
    launch = launch_of(volume_in, tmp_path / "out")
    original = getattr(State, method)
    faults = []
    done = Counter()

    def faulty(self, receipt):
        if receipt.chunk in (1, 3, 7) and receipt.chunk not in faults:
            faults.append(receipt.chunk)
            raise WorkerFault("the device is lost")
        done[receipt.chunk] += 1
        return original(self, receipt)

    monkeypatch.setattr(State, method, faulty)
    run(launch, runner="BundleBasedDirectRunner")
    assert sorted(faults) == [1, 3, 7], "in the order in which the runner takes them"
    assert set(done.values()) == {1}, "a retried bundle must not compute again what is durable"
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)


@pytest.mark.parametrize("resume", [True, False])
def test_replayed_bundles(undisturbed, volume_in, tmp_path, resume):
    """Each bundle is run twice for nothing, then in earnest, without seam files that are gone."""
    launch = launch_of(volume_in, tmp_path / "out", job={"resume": resume})
    run(launch, "--direct_runner_bundle_repeat=2", "--direct_running_mode=in_memory")
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)


@pytest.mark.parametrize("damage", ["lost", "truncated", "flipped"])
def test_a_chunk_whose_seam_files_are_gone_is_computed_without_its_neighbours(
    undisturbed, volume_in, tmp_path, caplog, damage
):
    launch = launch_of(volume_in, tmp_path / "out")
    worker = Worker(launch)
    chunks = range(launch.read_job().plan.chunks.count)
    list(worker.sum_chunks(chunks))
    file = next(
        path for path in (tmp_path / "out").rglob("seams/*/*/000000000008/*") if path.is_file()
    )
    content = file.read_bytes()
    if damage == "lost":
        file.unlink()
    else:
        file.write_bytes(
            content[:-9] if damage == "truncated" else content[:40] + b"\x7f" + content[41:]
        )
    assert {record.outcome for record in worker.merge_seams(chunks)} == {"done"}
    assert "chunk 8: some of the sums that it is made of do not exist" in caplog.text
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)


def values_of(volume_in, tmp_path):
    return job_values(volume_in, tmp_path / "out", model=POSITION, inference={"seams": "exchange"})


def test_some_chunks_first_and_the_rest_later(undisturbed, volume_in, tmp_path, capsys):
    job = str(write_job(tmp_path / "job.yaml", values_of(volume_in, tmp_path)))
    (tmp_path / "some").write_text("3\n8\n17\n")
    assert main(["run", job, "--chunks", str(tmp_path / "some")]) == 0
    state = state_of(tmp_path / "out")[0]
    plan = state_of(tmp_path / "out")[1].plan
    assert list(state.receipt_indices(0, plan.chunks.count)) == [3, 8, 17]
    roi = plan.chunks.roi
    found = read_volume(tmp_path / "out")
    for chunk in (3, 8, 17):
        at = (slice(None), *plan.chunks.core_box(chunk).slices_in(roi))
        np.testing.assert_array_equal(found[at], undisturbed[at])
    assert main(["run", job]) == 0
    assert "18 of 18 chunks done" in (said := capsys.readouterr().out)
    assert "(15 by this launch)" in said
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)
    assert main(["run", job]) == 0
    assert "(0 by this launch)" in capsys.readouterr().out


def test_a_corrupt_block_quarantines_the_same_chunks_by_both_strategies(
    undisturbed, volume_in, tmp_path
):
    quarantined = {}
    for strategy in ("recompute", "exchange"):
        values = values_of(volume_in, tmp_path)
        values["output"] = values["output"] | {"path": str(tmp_path / strategy)}
        values["inference"] = values["inference"] | {"seams": "exact", "strategy": strategy}
        job = str(write_job(tmp_path / f"{strategy}.yaml", values))
        with truncated(sorted(volume_in.glob("*/*_*-*_*"))[0]):
            assert main(["run", job]) == 3
        state, resolved = state_of(tmp_path / strategy)
        records = list(state.read_quarantined(0, resolved.plan.chunks.count))
        assert {record.stage for record in records} == {"read"}
        quarantined[strategy] = {record.chunk for record in records}
        lines = (tmp_path / strategy / "_beam_inference/quarantine.jsonl").read_text().splitlines()
        assert [json.loads(line)["chunk"] for line in lines] == sorted(quarantined[strategy])
    assert 0 < len(quarantined["recompute"]) < resolved.plan.chunks.count
    assert quarantined["recompute"] == quarantined["exchange"]
    assert main(["run", job]) == 0
    check_complete(tmp_path / "exchange")
    np.testing.assert_array_equal(read_volume(tmp_path / "exchange"), undisturbed)


def test_quarantined_chunks_can_be_done_alone(undisturbed, volume_in, tmp_path):
    job = str(write_job(tmp_path / "job.yaml", values_of(volume_in, tmp_path)))
    with truncated(sorted(volume_in.glob("*/*_*-*_*"))[0]):
        assert main(["run", job]) == 3
    assert (
        main(["run", job, "--chunks", str(tmp_path / "out/_beam_inference/quarantine.jsonl")]) == 0
    )
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)


@pytest.mark.slow
def test_a_receipt_that_is_deleted_has_its_chunk_done_again(undisturbed, volume_in, tmp_path):
    job = str(write_job(tmp_path / "job.yaml", values_of(volume_in, tmp_path)))
    assert main(["run", job]) == 0
    for number in (2, 9):
        next((tmp_path / "out").rglob(f"receipts/*/*/{number:012d}.json")).unlink()
        core = state_of(tmp_path / "out")[1].plan.chunks.core_box(number)
        assert core.size
    assert main(["run", job]) == 0
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)


def test_a_launch_that_is_stopped_between_the_stages_goes_on_with_the_second(
    undisturbed, volume_in, tmp_path
):
    launch = launch_of(volume_in, tmp_path / "out")
    worker = Worker(launch)
    chunks = range(launch.read_job().plan.chunks.count)
    list(worker.sum_chunks(range(10)))
    launch.state().request_stop(launch.id)
    assert not list(Worker(launch).merge_seams(chunks)), "nothing is begun, without a word"
    sums = list((tmp_path / "out").rglob("sums/*/*/*.json"))
    before = {path: path.read_bytes() for path in sums}
    run(launch_of(volume_in, tmp_path / "out"))
    assert all(path.read_bytes() == content for path, content in before.items())
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)


@pytest.mark.slow
def test_overwrite_forgets_the_sums_too(undisturbed, volume_in, tmp_path):
    job = str(write_job(tmp_path / "job.yaml", values_of(volume_in, tmp_path)))
    assert main(["run", job]) == 0
    shutil.rmtree(tmp_path / "out" / "_beam_inference" / "receipts")
    assert main(["run", job, "--overwrite"]) == 0
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)


def test_clean_removes_what_a_late_worker_left_and_only_once_the_job_is_complete(
    volume_in, tmp_path, capsys
):
    job = str(write_job(tmp_path / "job.yaml", values_of(volume_in, tmp_path)))
    assert main(["clean", job]) == 2
    launch = launch_of(volume_in, tmp_path / "out")
    list(Worker(launch).sum_chunks(range(18)))
    left = [path for path in (tmp_path / "out").rglob("seams/*/*/*/*") if path.is_file()]
    kept = {path: path.read_bytes() for path in left}
    assert main(["clean", job]) == 2
    assert "18 of 18 chunks have no receipt" in capsys.readouterr().err
    assert main(["run", job]) == 0
    for path in left[:3]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kept[path])
    assert main(["clean", job]) == 0
    assert "3 seam files removed" in capsys.readouterr().out
    check_complete(tmp_path / "out")


def test_plan_and_status_speak_of_both_stages(volume_in, tmp_path, capsys):
    job = str(write_job(tmp_path / "job.yaml", values_of(volume_in, tmp_path)))
    assert main(["plan", job]) == 0
    said = capsys.readouterr().out
    assert "exchange (this job)" in said
    assert "fewest patches: exchange" in said
    launch = launch_of(volume_in, tmp_path / "out")
    list(Worker(launch).sum_chunks(range(10)))
    assert main(["status", job]) in (0, 1)
    said = capsys.readouterr().out
    assert "0 of 18 chunks done" in said
    assert "first stage: the patches of 8 of 12 chunks are computed" in said
    assert "left of the first stage at this rate" in said


def test_an_output_that_was_emptied_between_the_stages_is_refused(volume_in, tmp_path, capsys):
    """Private blocks were written in the first: going on would leave them zero."""
    values = values_of(volume_in, tmp_path) | {"job": {"state_path": str(tmp_path / "state")}}
    job = str(write_job(tmp_path / "job.yaml", values))
    launch = prepare(parse_job(values, tmp_path))
    list(Worker(launch).sum_chunks(range(18)))
    shutil.rmtree(tmp_path / "out")
    assert main(["run", job]) == 2
    assert "there is no output" in capsys.readouterr().err
    prepare(parse_job(values | {"job": {"state_path": str(tmp_path / "other")}}, tmp_path))
    assert main(["run", job]) == 2
    assert "The output was changed" in capsys.readouterr().err


def test_a_damaged_first_receipt_has_its_patches_computed_again(undisturbed, volume_in, tmp_path):
    launch = launch_of(volume_in, tmp_path / "out")
    list(Worker(launch).sum_chunks(range(18)))
    next((tmp_path / "out").rglob("sums/*/*/000000000007.json")).write_text("{")
    run(launch_of(volume_in, tmp_path / "out"))
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)


def test_where_neighbours_were_recomputed_nothing_is_exchanged(undisturbed, volume_in, tmp_path):
    """Chunks that are done already are not computed again for the sake of their neighbours."""
    launch = launch_of(volume_in, tmp_path / "out")
    plan = launch.read_job().plan
    state = launch.state()
    worker = Worker(launch)

    def listed():
        ranges = [missing_runs((start, start + 6), state, 4) for start in (0, 6, 12)]
        return [chunk for runs in ranges for run in runs for chunk in run]

    assert listed() == list(range(18))
    assert plan.totals.owners < 18
    list(worker.infer_chunks([chunk for chunk in range(18) if chunk != 9]))
    assert listed() == [9]
    assert not list(worker.sum_chunks([9]))
    assert worker.waiting_chunks([9]) == [9]
    assert [record.outcome for record in worker.merge_seams([9])] == ["done"]
    assert not listed()
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)


@pytest.mark.parametrize("seed", range(3))
def test_launches_of_mixed_strategy_give_one_result(undisturbed, volume_in, tmp_path, seed):
    """Chunks in any order, by either strategy, with workers that end in the midst of a stage."""
    random = np.random.default_rng(seed)
    count = 18

    def some():
        return random.permutation(count)[: random.integers(1, count)].tolist()

    for _ in range(4):
        strategy = str(random.choice(["exchange", "recompute"]))
        worker = Worker(launch_of(volume_in, tmp_path / "out", seams=strategy))
        if strategy == "recompute":
            list(worker.infer_chunks(some()[: count // 4]))
            continue
        list(worker.sum_chunks(some()))
        if random.random() < 0.5:
            list(worker.merge_seams(some()[: count // 4]))
    values = values_of(volume_in, tmp_path)
    values["inference"]["seams"] = str(random.choice(["exchange", "recompute"]))
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)


def test_what_fails_in_the_first_stage_is_tried_alone_in_the_second(
    undisturbed, volume_in, tmp_path, caplog
):
    """A patch may fail where only a neighbour needs it."""
    launch = launch_of(volume_in, tmp_path / "out")

    class Failing(ChunkInference):
        def infer(self, cutout, work, encoding=AS_COMPUTED, waiting=tuple):
            if work == launch.read_job().plan.exchange.owned_work(0):
                raise NonFiniteError("as if beyond the chunk")
            return super().infer(cutout, work, encoding, waiting)

    def make_inference(opened):
        bound = opened.job.prediction_bound
        channels = opened.job.config.model.output_channels
        return Failing(opened.predictor, opened.normalize, channels, opened.batch_size, bound)

    worker = Worker(launch, make_inference=make_inference)
    outcomes = {record.chunk: record.outcome for record in worker.sum_chunks(range(18))}
    assert outcomes.pop(0) == "left"
    assert set(outcomes.values()) == {"summed"}
    assert {record.outcome for record in worker.merge_seams(range(18))} == {"done"}
    assert "chunk 0: sums cannot be exchanged" in caplog.text
    check_complete(tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)


def test_status_follows_the_stage_that_goes_on(volume_in, tmp_path):
    launch = launch_of(volume_in, tmp_path / "out")
    worker = Worker(launch)
    job = launch.read_job()
    list(worker.sum_chunks(range(9)))
    status = job_status(job, State(launch.state_url), datetime.now(UTC))
    assert (status.done, status.in_first_stage) == (0, True)
    assert status.left == job.plan.totals.owners - status.summed > 0
    assert status.voxels_per_chunk * job.plan.totals.owners == job.plan.chunks.roi.size
    list(worker.sum_chunks(range(9, 18)))
    status = job_status(job, State(launch.state_url), datetime.now(UTC))
    assert (status.in_first_stage, status.left, status.rate) == (False, 18, None)
    state = launch.state()
    for receipt in state.read_sums(range(18)):
        early = receipt.finished_at - timedelta(minutes=10)
        state.write_sums(receipt.model_copy(update={"finished_at": early}))
    done = [record.chunk for record in worker.merge_seams(range(6))]
    status = job_status(job, State(launch.state_url), datetime.now(UTC))
    assert (status.done, status.summed, status.in_first_stage) == (
        len(done),
        job.plan.totals.owners,
        False,
    )
    assert status.rate is not None
    assert status.left == 18 - len(done)
