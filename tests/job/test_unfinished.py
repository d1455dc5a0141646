"""Commands that read what a job writes say so where it is not done."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import zarr
from helpers import job_values, read_volume, write_job

from beam_inference.cli.main import main
from beam_inference.config.storage import Storage
from beam_inference.conversion.convert import convert
from beam_inference.errors import StateError, WorkerFault
from beam_inference.evaluation.evaluate import plan_evaluation
from beam_inference.evaluation.stages import evaluation_stages
from beam_inference.job.unfinished import warn_if_unfinished
from beam_inference.operators.level_stages import plan_level_stages
from beam_inference.segmentation.component_job import plan_components
from beam_inference.segmentation.component_stages import component_stages
from beam_inference.segmentation.layout import Layout
from beam_inference.segmentation.make_labels import components


def test_chunks_that_are_missing_are_told(volume_in, tmp_path, caplog):
    job = write_job(tmp_path / "job.yaml", job_values(volume_in, tmp_path / "out"))
    url = (tmp_path / "out").as_uri()
    assert main(["run", str(job), "--chunks", "0"]) == 0
    warn_if_unfinished(url, Storage())
    assert "17 of the 18 chunks of its job are not done, and read as zeros" in caplog.text
    caplog.clear()
    assert main(["thumbnail", url, "--to", str(tmp_path / "planes.png")]) == 0
    assert "17 of the 18 chunks of its job are not done" in caplog.text
    caplog.clear()
    assert main(["run", str(job)]) == 0
    warn_if_unfinished(url, Storage())
    assert not caplog.records
    (tmp_path / "out" / "_beam_inference" / "job.json").write_text("{")
    warn_if_unfinished(url, Storage())
    assert "whether all of" in caplog.text
    caplog.clear()
    shutil.rmtree(tmp_path / "out" / "_beam_inference")
    warn_if_unfinished(url, Storage())
    warn_if_unfinished("https://example.invalid/out", Storage())
    assert not caplog.records


def begin(volume_in, tmp_path, chunks):
    """Do some chunks of a job; its file, and its output."""
    output = {"dtype": "uint8", "value_range": [0, 255]}
    values = job_values(volume_in, tmp_path / "out", output=output)
    job = write_job(tmp_path / "job.yaml", values)
    assert main(["run", str(job), "--chunks", chunks]) == 0
    return str(job), str(tmp_path / "out")


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "{out}", "{tmp_path}/copy"],
        ["components", "{out}", "{tmp_path}/copy", "--threshold", "100"],
        ["levels", "{out}", "--to", "{tmp_path}/levels.json"],
        ["pyramid", "{out}"],
    ],
    ids=lambda command: command[0],
)
def test_commands_tell_it(command, volume_in, tmp_path, caplog):
    _, out = begin(volume_in, tmp_path, "0")
    assert main([word.format(out=out, tmp_path=tmp_path) for word in command]) == 0
    assert "17 of the 18 chunks of its job are not done" in caplog.text


@pytest.mark.parametrize("kind", ["convert", "components"])
def test_chunks_that_a_command_has_not_done_are_told(kind, volume_in, tmp_path, caplog):
    made = tmp_path / "made"
    make = {"convert": convert_part_by_part, "components": find_components}[kind]
    assert make(str(volume_in), str(made))
    warn_if_unfinished(made.as_uri(), Storage())
    assert not caplog.records
    records = list((made / "_beam_inference" / kind).rglob("done/*/*.json"))
    records[-1].unlink()  # as if it had been killed before
    assert warn_if_unfinished(made.as_uri(), Storage()).missing_chunks == 1
    assert f"1 of the {len(records)} chunks of {kind}, which makes it, are not done" in caplog.text
    caplog.clear()
    record = made / "_beam_inference" / kind / "stages.json"
    content = json.loads(record.read_text())
    for stages in ({"../..": 3}, {"copy": 10**30}, {"copy": -1}, {"copy": 10**12}, 5):
        caplog.clear()
        record.write_text(json.dumps(content | {"stages": stages}))
        assert warn_if_unfinished(made.as_uri(), Storage()).missing_chunks == 0
        assert "whether all of" in caplog.text


def test_a_job_tells_of_an_input_that_is_not_done(volume_in, tmp_path, caplog):
    _, out = begin(volume_in, tmp_path, "0")
    second = write_job(tmp_path / "second.yaml", job_values(out, tmp_path / "second"))
    told = f"{out}: 17 of the 18 chunks of its job are not done"
    assert main(["plan", str(second)]) == 0
    assert caplog.text.count(told) == 1
    caplog.clear()
    assert main(["run", str(second), "--chunks", "0"]) == 0
    assert caplog.text.count(told) == 1
    caplog.clear()
    assert main(["status", str(second)]) == 0
    assert told not in caplog.text, "its launch has told it"


def test_a_volume_named_with_its_driver_is_read_all_the_same(tmp_path, caplog):
    array = np.random.default_rng(0).integers(0, 255, (16, 32, 32), dtype=np.uint8)
    zarr.create_array(tmp_path / "em", data=array, chunks=(8, 16, 16))
    inference = {"chunk_shape": [16, 16, 16], "patch_shape": [8, 16, 16], "patch_overlap": [0] * 3}
    values = job_values(f"{(tmp_path / 'em').as_uri()}|zarr3:", tmp_path / "out")
    job = write_job(tmp_path / "job.yaml", values | {"inference": values["inference"] | inference})
    assert main(["plan", str(job)]) == 0
    assert "cannot be told" not in caplog.text


def convert_part_by_part(source, target, **keys):
    """Convert so that its witnesses, the first window of some chunks, are small."""
    return convert(source, target, window_bytes=2**14, **keys).outcome.is_complete


def find_components(source, target, **keys):
    """Label the components of a volume."""
    return components(source, target, threshold=100, **keys).outcome.is_complete


@pytest.mark.parametrize("make", [convert_part_by_part, find_components])
def test_what_was_made_of_less_is_not_called_complete(make, volume_in, tmp_path):
    job, out = begin(volume_in, tmp_path, "0-8,10-17")
    made = str(tmp_path / "made")
    assert make(out, made)
    assert main(["run", job]) == 0
    with pytest.raises(StateError, match="another job|did not begin"):
        make(out, made)
    assert make(out, made, overwrite=True)
    assert make(out, str(tmp_path / "anew"))
    np.testing.assert_array_equal(read_volume(made), read_volume(tmp_path / "anew"))


def stages_of_components(url, folder):
    """The stages of components of a volume."""
    plan = plan_components(url, f"{folder}/out", threshold=200, layout=Layout(), storage=Storage())
    return component_stages(plan)


def stages_of_levels(url, folder):
    """The stages of the levels of a volume."""
    to = f"{folder.as_uri()}/levels.json"
    return [*plan_level_stages(url, to, scale=0, channel=None, storage=Storage())]


def stages_of_evaluation(url, folder):
    """The stages of a map's evaluation, by itself."""
    plan = plan_evaluation(
        url,
        url,
        kind="map",
        scale=0,
        labels_scale=0,
        channel=None,
        ignore=(),
        positive=(),
        thresholds=(),
        value_range=(0.0, 1.0),
        cell_shape=(8, 8, 8),
        chunk_shape=None,
        worst=1,
        storage=Storage(),
    )
    return evaluation_stages(replace(plan, scratch_url=f"{folder.as_uri()}/a/b"))


@pytest.mark.parametrize(
    "stages_of", [stages_of_components, stages_of_levels, stages_of_evaluation]
)
def test_an_input_that_holds_other_values_since_the_plan_is_refused(stages_of, volume_in, tmp_path):
    first, *_ = stages_of(volume_in.as_uri(), tmp_path)
    info = json.loads((volume_in / "info").read_text())
    (volume_in / "info").write_text(json.dumps(info | {"data_type": "int8"}))
    with pytest.raises(WorkerFault, match="holds int8, and held uint8"):
        first.make_worker()
