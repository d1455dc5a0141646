"""Test pyramids as last stages of jobs: equal to the command's, and made of whole outputs."""

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from helpers import job_values, toy, truncated, write_job, write_volume
from oracles.downsampling import level_above

from beam_inference.cli.main import main
from beam_inference.errors import ConfigError
from beam_inference.job.place import THIS_PROCESS
from beam_inference.job.stage_records import StageRecords
from beam_inference.launch.job_files import load_job
from beam_inference.launch.output_pyramid import (
    begin_scales,
    check_scales,
    output_pyramid,
    plan_output_pyramid,
    pyramid_status,
)
from beam_inference.launch.pipeline import build
from beam_inference.launch.planned_job import plan_job
from beam_inference.launch.prepare import prepare, resolve
from beam_inference.pyramid.multiscale import multiscale_volume
from beam_inference.pyramid.pyramid import plan_pyramid
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.opening import open_volume
from beam_inference.worker.worker import Worker

TWO = {"levels": 2}


def scales(folder):
    """What a reader sees: start and voxels of every scale."""
    url = f"file://{folder}"
    volumes = [open_volume(url, scale=k) for k in range(len(volume_at(url).scales))]
    return [(volume.bounds.start, volume.read(volume.bounds)) for volume in volumes]


def assert_levels_are_of_the_base(folder, count, method="mean", factor=(2, 2, 2)):
    found = scales(folder)
    assert len(found) == count + 1
    for (start, below), (_, above) in pairwise(found):
        np.testing.assert_array_equal(above, level_above(below, start, factor, method))


def without_beam(path, *overrides, chunks=None, overwrite=False):
    """What ``run`` does, up to the end of its chunks; the pyramid, begun."""
    config = load_job(path, overrides)
    check_scales(config, overwrite=overwrite)
    launch = prepare(config, overwrite=overwrite)
    pyramid = begin_scales(launch, overwrite=overwrite)
    worker = Worker(launch)
    list(worker.infer_chunks(range(worker.job.plan.chunks.count) if chunks is None else chunks))
    return launch, pyramid


def made(pyramid):
    """Its levels, with records, without Beam."""
    job = pyramid.job()
    StageRecords(job).begin()
    for stage in pyramid.stages:
        do = stage.make_worker()
        for index in range(stage.count):
            do(index)
            job.done_entries(stage).write(index, json.dumps(job.names_of(stage) | {"chunk": index}))
    pyramid.volume.list_scales(pyramid.scales)


def test_a_job_ends_with_its_pyramid_and_the_command_finds_it_done(job, tmp_path, capsys):
    path = job(output={"pyramid": TWO, "dtype": "uint8", "value_range": [0, 255]})
    assert main(["run", path]) == 0
    out = capsys.readouterr().out
    assert "18 of 18 chunks done" in out
    assert "pyramid: complete, 2 scales by mean\ncomplete: file://" in out
    assert_levels_are_of_the_base(tmp_path / "out", 2)
    assert main(["status", path]) == main(["verify", path, "--deep"]) == 0
    assert capsys.readouterr().out.count("pyramid: complete, 2 scales by mean") == 2
    by_command = plan_pyramid(multiscale_volume(f"file://{tmp_path}/out", LOCAL), num_scales=2)
    assert pyramid_status(by_command).complete
    assert by_command.job().fingerprint == output_pyramid(load_job(path)).job().fingerprint


def test_the_plan_counts_it_and_creates_nothing(job, tmp_path, capsys):
    path = job(output={"pyramid": True}, model={"path": "identity"})
    pyramid = plan_output_pyramid(plan_job(load_job(path)))
    assert not (tmp_path / "out").exists()
    without_beam(path)
    there = plan_pyramid(multiscale_volume(f"file://{tmp_path}/out", LOCAL))
    for a, b in zip(pyramid.stages, there.stages, strict=True):
        assert (a.scale, a.chunks, a.part_shape, a.method) == (
            b.scale,
            b.chunks,
            b.part_shape,
            b.method,
        )
    assert pyramid.description == there.description
    assert pyramid.blocks == there.blocks == (12, 2, 1)
    assert main(["plan", path]) == 0
    assert (
        "pyramid  3 scales by mean, the coarsest 6×10×7 voxels; once every chunk"
        in capsys.readouterr().out
    )
    values = {}
    for key in ("true", "false"):
        assert main(["plan", path, "--json", "--set", f"output.pyramid={key}"]) == 0
        values[key] = json.loads(capsys.readouterr().out)
    assert values["false"]["pyramid"] is None
    assert [level["blocks"] for level in values["true"]["pyramid"]["levels"]] == [12, 2, 1]
    assert values["true"]["objects"] == values["false"]["objects"] + 15 + 3
    voxels = 21 * 36 * 25 + 11 * 19 * 13 + 6 * 10 * 7
    assert values["true"]["stored_bytes"] == values["false"]["stored_bytes"] + 4 * voxels
    assert (
        main(
            [
                "plan",
                path,
                "--set",
                "output.block_shape=80x80x80",
                "--set",
                "inference.chunk_shape=80x80x80",
            ]
        )
        == 2
    )
    other = ["--output", str(tmp_path / "one"), "--set", "inference.chunk_shape=80x80x80"]
    assert main(["plan", path, *other, "--set", "output.block_shape=80x80x80"]) == 0
    assert "no scale: one block holds the output" in capsys.readouterr().out


def test_the_key_is_not_in_the_fingerprint(job):
    path = job()
    fingerprints = {
        resolve(plan_job(load_job(path, [f"output.pyramid={each}"])), THIS_PROCESS).fingerprint
        for each in ("true", "false", "{levels: 1, method: mode}")
    }
    assert len(fingerprints) == 1


@pytest.mark.parametrize(("operator", "method"), [("threshold", "mode"), ("smooth", "mean")])
@pytest.mark.parametrize("format", ["precomputed", "ome_zarr"])
def test_labels_are_not_averaged_and_the_command_agrees(tmp_path, operator, method, format):
    write_volume(
        tmp_path / "in", np.random.default_rng(0).integers(0, 256, (20, 40, 40), dtype=np.uint8)
    )
    values = job_values(
        tmp_path / "in",
        tmp_path / "out",
        output={"format": format, "pyramid": True, "dtype": "uint8"},
    )
    values["postprocess"] = [
        {"operator": operator} | ({"at": 100} if operator == "threshold" else {"sigma": [1, 1, 1]})
    ]
    if operator == "smooth":
        values["output"]["value_range"] = [0, 255]
    path = write_job(tmp_path / "job.yaml", values)
    _, pyramid = without_beam(path)
    by_command = plan_pyramid(multiscale_volume(f"file://{tmp_path}/out", LOCAL))
    assert pyramid.method == by_command.method == method
    assert pyramid.job().fingerprint == by_command.job().fingerprint


def test_levels_made_of_holes_are_made_anew(job, tmp_path, caplog):
    path = job(output={"pyramid": TWO})
    without_beam(path, chunks=range(9))
    # a quick look, by the command
    made(plan_pyramid(multiscale_volume(f"file://{tmp_path}/out", LOCAL), num_scales=3))
    assert pyramid_status(output_pyramid(load_job(path))).complete
    _, pyramid = without_beam(path)
    assert "made before all chunks of this job are done: they are removed" in caplog.text
    assert len(volume_at(f"file://{tmp_path}/out").scales) == 1, (
        "also the third, which the job does not ask for"
    )
    assert pyramid_status(pyramid).done == 0
    made(pyramid)
    caplog.clear()
    without_beam(path)
    assert pyramid_status(pyramid).complete, "a complete one is left alone"
    without_beam(path, overwrite=True)
    assert pyramid_status(pyramid).done == 0
    assert "removed" in caplog.text
    made(pyramid)
    other = without_beam(path, "output.pyramid={factor: 1x2x2}", overwrite=True)[1]
    assert [level.factor for level in other.scales][:2] == [(1, 2, 2)] * 2
    assert len(volume_at(f"file://{tmp_path}/out").scales) == 1, "also those of another factor"


def test_records_of_holes_do_not_outlive_a_run_without_the_key(job, tmp_path, caplog):
    path = job()
    without_beam(path, chunks=range(9))
    url = f"file://{tmp_path}/out"
    made(plan_pyramid(multiscale_volume(url, LOCAL), num_scales=1))
    without_beam(path)
    assert f"beam-inference pyramid {url} --overwrite" in caplog.text
    assert not pyramid_status(plan_pyramid(multiscale_volume(url, LOCAL), num_scales=1)).complete
    with pytest.raises(
        ConfigError,
        match=r"Make them as this job says with: beam-inference pyramid .* --overwrite",
    ):
        check_scales(load_job(path, ["output.pyramid=true"]), overwrite=False)


def test_levels_made_in_another_way_are_refused_before_anything(job, tmp_path):
    path = job(output={"pyramid": {"levels": 2, "factor": [1, 2, 2]}})
    _, pyramid = without_beam(path)
    # nothing was made: another may begin
    begin_scales(without_beam(path, "output.pyramid=true")[0], overwrite=False)
    _, pyramid = without_beam(path)
    made(pyramid)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        ConfigError, match=r"--method=mean --levels=2 --overwrite; or remove the key"
    ):
        without_beam(path, "output.pyramid={levels: 2}")
    assert sorted(tmp_path.rglob("*")) == before
    without_beam(path)


def test_a_part_of_an_output_has_no_pyramid(job, tmp_path):
    bounds = {"start": [3, -5, 2], "stop": [43, 65, 52]}
    roi = {"start": [3, -5, 2], "stop": [19, 27, 52]}
    path = job(roi=roi, output={"bounds": bounds})
    prepare(load_job(path))
    other = ["output.pyramid=true", "output.bounds=null"]
    with pytest.raises(
        ConfigError,
        match=r"and this job fills .* beam-inference pyramid once all of it is there",
    ):
        prepare(load_job(path, other))


def block_of(folder):
    return next(folder.glob("*/34-52_27-59_*"), None) or next(folder.glob("*/*_*-*_*"))


@pytest.mark.slow
@pytest.mark.parametrize("seams", [pytest.param("recompute", marks=pytest.mark.slow), "exchange"])
def test_with_a_quarantined_chunk_there_is_none_and_resuming_makes_it(job, tmp_path, capsys, seams):
    path = job(output={"pyramid": TWO}, inference={"seams": seams})
    with truncated(block_of(tmp_path / "in")):
        assert main(["run", path]) == 3
        out = capsys.readouterr().out
        assert (
            "pyramid: not made yet, because not all chunks of the job are done; once they are, run "
            "makes it" in out
        )
        assert main(["verify", path]) == 1
        assert main(["status", path, "--watch"]) == 0
        assert "pyramid: not made yet" in capsys.readouterr().out
        assert len(volume_at(f"file://{tmp_path}/out").scales) == 1
        assert not list((tmp_path / "out" / "_beam_inference" / "pyramid").rglob("done"))
    file = tmp_path / "out" / "_beam_inference" / "quarantine.jsonl"
    assert main(["run", path, "--chunks", str(file)]) == 0
    assert "pyramid: complete, 2 scales by mean" in capsys.readouterr().out
    assert_levels_are_of_the_base(tmp_path / "out", 2)


@pytest.mark.slow
def test_a_finished_job_that_is_given_one_makes_only_that(job, tmp_path, capsys):
    path = job()
    assert main(["run", path]) == 0
    assert "pyramid" not in capsys.readouterr().out
    receipts = {
        each: each.read_bytes()
        for each in (tmp_path / "out/_beam_inference/receipts").rglob("*.json")
    }
    for launch in range(2):
        assert main(["run", path, "--set", "output.pyramid=true"]) == 0
        assert "(0 by this launch)\npyramid: complete, 3 scales by mean" in capsys.readouterr().out
        if launch == 0:
            stored = {each: each.stat().st_mtime_ns for each in (tmp_path / "out").glob("[0-9]*/*")}
    assert all(each.read_bytes() == text for each, text in receipts.items())
    assert stored == {
        each: each.stat().st_mtime_ns for each in (tmp_path / "out").glob("[0-9]*/*")
    }, "done, then left"
    assert main(["run", path, "--set", "output.pyramid={levels: 4}"]) == 0, (
        "more go on where fewer have ended"
    )
    assert_levels_are_of_the_base(tmp_path / "out", 4)
    assert (
        main(
            [
                "run",
                path,
                "--overwrite",
                "--set",
                "output.pyramid={levels: 1}",
                "--set",
                "model.activation=none",
            ]
        )
        == 0
    )
    assert_levels_are_of_the_base(tmp_path / "out", 1)


@pytest.mark.slow
def test_a_sample_makes_none_and_the_rest_does(job, tmp_path, capsys):
    path = job(output={"pyramid": TWO}, job={"state_path": "elsewhere"})
    assert main(["run", path, "--sample", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "pyramid: not made yet" in out
    assert "the chosen chunks are done" in out
    assert (
        main(["run", path, "--direct_running_mode=multi_processing", "--direct_num_workers=2"]) == 0
    )
    assert "pyramid: complete" in capsys.readouterr().out
    assert_levels_are_of_the_base(tmp_path / "out", 2)


@pytest.mark.slow
def test_levels_made_by_the_command_while_chunks_go_on_are_made_anew(job, tmp_path):
    launch = prepare(load_job(job(output={"pyramid": TWO})))
    pyramid = begin_scales(launch, overwrite=False)
    list(Worker(launch).infer_chunks(range(9)))
    made(pyramid)
    with beam.Pipeline("FnApiRunner") as pipeline:
        build(pipeline, launch, 2, [pyramid.job()])
    assert pyramid_status(pyramid).complete
    assert_levels_are_of_the_base(tmp_path / "out", 2)


@pytest.mark.slow
def test_a_level_that_cannot_be_made_fails_the_run_and_is_named(job, tmp_path, capsys):
    path = job(output={"pyramid": TWO})
    assert main(["run", path, "--set", "output.pyramid=false"]) == 0
    # not of the chunk that a launch reads back
    damaged = sorted((tmp_path / "out" / "10_10_10").iterdir())[-1]
    with truncated(damaged):
        assert main(["run", path]) == 1
        out = capsys.readouterr().out
        assert "pyramid: 0 of 2 chunks done\nfailed: level-1, chunk 0: " in out
        assert f"to do what is missing of it: beam-inference run {path}\n" in out
        assert "complete:" not in out.partition("pyramid: 0 of 2")[2]
        assert main(["verify", path]) == 1
    assert main(["run", path]) == 0
    assert_levels_are_of_the_base(tmp_path / "out", 2)


@pytest.mark.slow
def test_labels_in_shards_of_ome_zarr_as_zarr_python_reads_them(tmp_path, capsys):
    zarr = pytest.importorskip("zarr")
    write_volume(
        tmp_path / "in", np.random.default_rng(0).integers(0, 256, (40, 70, 50), dtype=np.uint8)
    )
    output = {
        "format": "ome_zarr",
        "shard_shape": [16, 32, 32],
        "dtype": "uint64",
        "pyramid": {"levels": 3},
    }
    values = job_values(
        tmp_path / "in", tmp_path / "out", output=output, model=toy("conv", output_channels=2)
    )
    values["postprocess"] = [{"operator": "argmax"}]
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", path]) == 0
    assert "pyramid: complete, 3 scales by mode" in capsys.readouterr().out
    group = zarr.open_group(str(tmp_path / "out"), mode="r")
    level = group["0"][:][None]
    assert 0.01 < level.mean() < 0.99
    for number in range(1, 4):
        level = level_above(level, (0, 0, 0), (2, 2, 2), "mode")
        np.testing.assert_array_equal(group[str(number)][:], level[0])
        assert group[str(number)].shards == (16, 32, 32)
    assert main(["pyramid", str(tmp_path / "out"), "--levels=3"]) == 0, (
        "the group says that it holds labels"
    )


@pytest.mark.slow
def test_bundles_that_are_tried_again_repeat_nothing(job, tmp_path):
    launch = prepare(load_job(job(output={"pyramid": TWO})))
    pyramid = begin_scales(launch, overwrite=False)
    for _ in range(2):
        with beam.Pipeline(runner=BundleBasedDirectRunner(), options=PipelineOptions()) as pipeline:
            build(pipeline, launch, 2, [pyramid.job()])
        assert pyramid_status(pyramid).complete
    assert_levels_are_of_the_base(tmp_path / "out", 2)


@pytest.mark.slow
def test_the_graph_does_not_grow_with_the_chunks(job):
    blocks = {
        "output": {"pyramid": TWO, "block_shape": [4, 4, 4]},
        "inference": {"chunk_shape": [4, 4, 4]},
    }
    sizes = []
    for number, stop in enumerate(([11, 3, 10], [43, 65, 52])):
        path = job(roi={"start": [3, -5, 2], "stop": stop}, **blocks)
        launch = prepare(load_job(path, [f"output.path=out{number}"]))
        pipeline = beam.Pipeline(runner=BundleBasedDirectRunner(), options=PipelineOptions())
        build(pipeline, launch, 2, [begin_scales(launch, overwrite=False).job()])
        sizes.append(len(pipeline.to_runner_api().SerializeToString()))
    assert launch.read_job().plan.chunks.count == 2340
    assert sizes[1] < sizes[0] + 20_000 < 200_000


IN_SMALL_CHUNKS = """
import sys
from functools import partial
from beam_inference.launch import output_pyramid
output_pyramid.plan_pyramid = partial(output_pyramid.plan_pyramid, chunk_bytes=1)
from beam_inference.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_and_interrupted_in_its_levels_then_finished(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (88, 88, 88), dtype=np.uint8)
    write_volume(tmp_path / "in", array, (1, 2, 3))
    output = {"pyramid": True, "block_shape": [8, 8, 8], "dtype": "uint8", "value_range": [0, 255]}
    values = job_values(
        tmp_path / "in", tmp_path / "out", output=output, inference={"chunk_shape": [88, 88, 88]}
    )
    values["inference"] |= {
        "patch_shape": [88, 88, 88],
        "patch_overlap": [0, 0, 0],
        "batch_size": 1,
    }
    command = [
        sys.executable,
        "-c",
        IN_SMALL_CHUNKS,
        "run",
        str(write_job(tmp_path / "job.yaml", values)),
    ]
    records = tmp_path / "out" / "_beam_inference" / "pyramid"
    # of 216, 27, 8 …
    for count, number in ((40, signal.SIGKILL), (100, signal.SIGTERM), (225, signal.SIGKILL)):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            deadline = time.monotonic() + 100
            while len(list(records.rglob("done/*/*.json"))) < count:
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            process.send_signal(number)
            out, _ = process.communicate()
        if number == signal.SIGTERM:
            assert process.returncode == 130
            assert "1 of 1 chunks done" in out
            assert "to do what is missing of it: " in out
        if count == 40:
            assert len(volume_at(f"file://{tmp_path}/out").scales) == 1, (
                "a level is listed once it is complete"
            )
    before = {path: path.stat().st_mtime_ns for path in records.rglob("done/*/*.json")}
    finished = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "(0 by this launch)" in finished
    assert "pyramid: complete" in finished
    assert all(path.stat().st_mtime_ns == at for path, at in before.items()), (
        "what was done is not done again"
    )
    found = scales(tmp_path / "out")
    np.testing.assert_array_equal(found[0][1][0], array)
    assert_levels_are_of_the_base(tmp_path / "out", len(found) - 1)
    assert len(found) >= 4
