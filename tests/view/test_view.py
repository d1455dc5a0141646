"""State of Neuroglancer that `view` makes of jobs and volumes, and its error messages."""

import json
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from itertools import product
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import yaml
from browser import served
from fakes.gcs import GcsStandIn
from helpers import job_values, plan_of, toy, truncated, write_job, write_volume
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.cli.main import main
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.launch.job_files import load_job
from beam_inference.view.boxes import around, chunk_boxes, patch_boxes
from beam_inference.view.layers import view_of

shapes = st.tuples(*[st.integers(1, 12)] * 3)


@given(shapes, st.data(), st.integers(1, 200))
def test_a_window_of_a_grid_holds_its_middle_and_no_more_than_asked(shape, data, most):
    center = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    found = around(shape, center, most)
    everything = set(product(*map(range, shape)))
    assert len(set(found)) == len(found) <= most
    assert center in found
    assert set(found) <= everything
    if len(everything) <= most:
        assert set(found) == everything


def test_the_boxes_of_a_job_of_a_billion_chunks_are_few_and_in_the_middle():
    roi = BoundingBox((0, 0, 0), (64_000, 64_000, 64_000))
    plan = plan_of(roi, (8, 16, 16), (2, 8, 8), (64, 64, 64))
    for boxes in (chunk_boxes(plan, 1000), patch_boxes(plan, 1000)):
        assert len(boxes.boxes) == 1000
        assert any(
            box.contains(BoundingBox((32_000,) * 3, (32_001,) * 3)) for _, box in boxes.boxes
        )
    assert chunk_boxes(plan, 1000).name == "chunks (1,000 of 1,000,000,000)"


def test_all_boxes_are_there_where_they_are_few():
    plan = plan_of(BoundingBox((3, -5, 2), (43, 65, 52)), (8, 16, 16), (2, 8, 8), (16, 32, 32))
    chunks = chunk_boxes(plan, 1000)
    assert dict(chunks.boxes) == {
        f"chunk {i}": plan.chunks.core_box(i) for i in range(plan.chunks.count)
    }
    assert chunks.name == "chunks"
    assert len(patch_boxes(plan, 10_000).boxes) == plan.lattice.count


def state_of(*arguments, capsys):
    """What the command prints of local volumes."""
    assert main(["view", *map(str, arguments), "--link"]) == 0
    return json.loads(capsys.readouterr().out)


def layers_of(state):
    return {layer["name"]: layer for layer in state["layers"]}


@pytest.fixture
def job_with_a_hole(volume_in, tmp_path):
    """A job that was run, of which one chunk is quarantined: its file, and what was printed."""
    model = toy(
        "conv", weights=str(tmp_path / "weights.pt"), output_channels=2, activation="sigmoid"
    )
    import torch
    import toy_networks

    torch.save(toy_networks.conv().state_dict(), tmp_path / "weights.pt")
    job = write_job(tmp_path / "job.yaml", job_values(volume_in, tmp_path / "out", model=model))
    with truncated(next((tmp_path / "in").rglob("34-52_59-65_35-43"))):
        assert main(["run", str(job)]) == 3
    return str(job)


def test_a_job_shows_its_input_its_output_its_grids_and_what_is_quarantined(
    job_with_a_hole, tmp_path, capsys
):
    capsys.readouterr()
    state = state_of(job_with_a_hole, "--patches", capsys=capsys)
    layers = layers_of(state)
    assert list(layers) == ["input", "output", "chunks", "patches (64 of 336)", "quarantined"]
    assert layers["input"]["source"]["url"] == f"precomputed://file://{tmp_path}/in"
    assert layers["output"]["source"]["url"] == f"precomputed://file://{tmp_path}/out"
    assert state["dimensions"] == {axis: [pytest.approx(1e-8), "m"] for axis in "xyz"}
    assert state["position"] == [27.5, 30.5, 23.5]  # of 2…52, -5…65, 3…43
    assert len(layers["chunks"]["annotations"]) == 18
    red = layers["quarantined"]
    assert red["annotationColor"] == "#ff0000"
    assert red["annotations"]
    for box in red["annotations"]:
        assert box["description"].startswith("chunk ")
        assert "cannot read" in box["description"]
        assert all(
            b - a <= n for a, b, n in zip(box["pointA"], box["pointB"], (32, 32, 16), strict=True)
        )

    view = view_of(load_job(job_with_a_hole), [], patches=False)
    assert "quarantined" in layers_of(view.state("http://h/data", 10))
    assert main(["run", job_with_a_hole]) == 0
    # as the page is when opened again
    assert "quarantined" not in layers_of(view.state("http://h/data", 10))


def test_before_its_first_run_a_job_shows_its_input_and_its_chunks(job, capsys):
    assert list(layers_of(state_of(job(), capsys=capsys))) == ["input", "chunks"]


def test_masks_are_layers_of_their_own(job, tmp_path, capsys):
    write_volume(tmp_path / "mask", np.ones((20, 30, 40), np.uint64), voxel_size_nm=(20, 20, 40))
    inverse = f"--set=input.mask={{path: {tmp_path}/mask, inverse: true}}"
    layers = layers_of(state_of(job(), f"--set=mask.path={tmp_path}/mask", inverse, capsys=capsys))
    assert list(layers) == ["input", "input.mask", "mask", "chunks"]
    assert "!(getDataValue().value != uvec2(0u, 0u))" in layers["input.mask"]["shader"]
    assert "(getDataValue().value != uvec2(0u, 0u))" in layers["mask"]["shader"]


@pytest.mark.parametrize(
    ("dtype", "mask", "condition"),
    [
        ("uint8", "equals: [1, 3]", "toRaw(getDataValue()) == 1u || toRaw(getDataValue()) == 3u"),
        ("int16", "equals: -2", "toRaw(getDataValue()) == -2"),
        ("uint64", "equals: 4294967301", "getDataValue().value == uvec2(5u, 1u)"),
        ("float32", "above: 0.25", "float(getDataValue()) > 0.25"),
        (
            "uint16",
            "above: 2, below: 7",
            "float(toRaw(getDataValue())) > 2.0 && float(toRaw(getDataValue())) < 7.0",
        ),
        ("uint64", "below: 7", "float(getDataValue().value.x)) < 7.0"),
    ],
)
def test_a_mask_is_shown_where_it_has_the_values_asked_for(
    job, tmp_path, capsys, dtype, mask, condition
):
    write_volume(tmp_path / "mask", np.ones((20, 30, 40), dtype), voxel_size_nm=(20, 20, 40))
    flag = f"--set=mask={{path: {tmp_path}/mask, {mask}}}"
    layers = layers_of(state_of(job(), flag, capsys=capsys))
    assert condition in layers["mask"]["shader"]


def test_a_run_says_how_to_look_at_it(job, capsys):
    assert main(["run", job(), "--roi=3x-5x2:19x27x34"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "to look at it: " in line)
    words = line.partition("to look at it: beam-inference ")[2]
    import shlex

    assert shlex.split(words)[0] == "view"
    assert main([*shlex.split(words), "--link"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert [len(layers_of(state)["chunks"]["annotations"]), state["position"]] == [
        1,
        [18.5, 11.5, 11.5],
    ]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"output_channels": 1, "activation": "sigmoid"}, "invlerp probability"),
        ({"output_channels": 1}, "emitGrayscale"),
        ({"output_channels": 3, "activation": "sigmoid"}, "emitRGB(vec3("),
        (
            {"output_channels": 4, "channels": [{"affinity": [-n, 0, 0]} for n in (1, 2, 3, 4)]},
            "emitRGB(vec3(",
        ),
        ({"output_channels": 3, "activation": "softmax"}, "color2"),
        ({"output_channels": 9, "activation": "softmax"}, "color8"),
        ({"output_channels": 2, "activation": "sigmoid"}, "color0"),
    ],
)
def test_the_shader_fits_what_the_channels_say(job, model, words, capsys):
    from beam_inference.launch.planned_job import plan_job
    from beam_inference.view.layers import output_shader
    from beam_inference.volumes.outputs import create_output

    path = toy("conv")["path"]
    planned = plan_job(load_job(job(model={"path": path, **model})))
    shader = output_shader(create_output(planned.output), planned.config.model, planned.roi)
    assert words in shader
    # the first of classes that exclude each other is background
    assert ("color0" in shader) == (words == "color0")


def test_volumes_are_images_or_labels_and_have_names_of_their_own(tmp_path, capsys):
    array = np.random.default_rng(0).integers(100, 3000, (20, 30, 40))
    write_volume(tmp_path / "a" / "em", array.astype(np.uint16), voxel_size_nm=(40, 8, 8))
    write_volume(tmp_path / "b" / "em", array.astype(np.uint32), format="zarr3")
    state = state_of(tmp_path / "a" / "em", tmp_path / "b" / "em", capsys=capsys)
    layers = layers_of(state)
    assert {name: layer["type"] for name, layer in layers.items()} == {
        "em": "image",
        "em 2": "segmentation",
    }
    low, high = json.loads(layers["em"]["shader"].partition("range=")[2].partition(")")[0])
    assert 100 <= low < 200  # by what is there, not by what uint16 could hold
    assert 2900 < high <= 3000
    assert state["dimensions"]["z"] == [pytest.approx(4e-8), "m"]


@pytest.mark.parametrize("format", ["ome_zarr", "ome_zarr_0.4"])
def test_a_group_is_shown_whole_and_lies_where_its_array_lies(tmp_path, format, capsys):
    write_volume(
        tmp_path / "em", np.zeros((20, 30, 40), np.uint8), format=format, voxel_size_nm=(40, 8, 4)
    )
    state = state_of(tmp_path / "em", capsys=capsys)
    source = state["layers"][0]["source"]
    assert source["url"] == f"{'zarr3' if format == 'ome_zarr' else 'zarr2'}://file://{tmp_path}/em"
    # Neuroglancer has voxel 0's centre at 0; all that is to be done is to move that by half of one.
    matrix = np.array(source["transform"]["matrix"])
    np.testing.assert_allclose(matrix, np.hstack([np.eye(3), np.full((3, 1), 0.5)]), rtol=1e-12)

    file = tmp_path / "em" / ("zarr.json" if format == "ome_zarr" else ".zattrs")
    text = file.read_text()
    for before, after in (('"nanometer"', '"nm"'), ('"version": "0.', '"version": "9.')):
        file.write_text(text.replace(before, after))
        assert file.read_text() != text
        (layer,) = state_of(tmp_path / "em", capsys=capsys)["layers"]
        # what Neuroglancer refuses is shown by its array
        assert layer["source"]["url"].endswith("/em/0")
    file.write_text(text)
    moved = text.replace('"scale": [40.0, 8.0, 4.0]', '"scale": [0.04, 0.008, 0.004]')
    file.write_text(moved.replace('"nanometer"', '"micrometer"'))
    again = state_of(tmp_path / "em", capsys=capsys)["layers"][0]["source"]["transform"]
    np.testing.assert_allclose(np.array(again["matrix"]), matrix, rtol=1e-12)


@pytest.mark.parametrize("format", ["ome_zarr", "ome_zarr_0.4"])
def test_a_translated_group_is_shown_where_its_precomputed_copy_is(tmp_path, format, capsys):
    """Neuroglancer puts a voxel's centre at the translation; precomputed states the corner."""
    size = (40.0, 8.0, 4.0)
    start = (10, -20, 30)
    array = np.zeros((20, 30, 40), np.uint8)
    write_volume(tmp_path / "em", array, start, format=format, voxel_size_nm=size)
    write_volume(tmp_path / "precomputed", array, start, voxel_size_nm=size)
    state = state_of(tmp_path / "em", tmp_path / "precomputed", capsys=capsys)
    other = state_of(tmp_path / "precomputed", tmp_path / "em", capsys=capsys)
    assert state["position"] == other["position"] == [50.5, -4.5, 20.5]
    source = state["layers"][0]["source"]
    file = tmp_path / "em" / ("zarr.json" if format == "ome_zarr" else ".zattrs")
    group = json.loads(file.read_text())
    (image,) = group.get("attributes", {}).get("ome", group)["multiscales"]
    scale, translation = (
        each[each["type"]] for each in image["datasets"][0]["coordinateTransformations"]
    )
    # Neuroglancer's place of the first corner: half a voxel before the centre
    corner = np.array(translation) / scale - 0.5
    matrix = np.array(source["transform"]["matrix"])
    np.testing.assert_allclose(matrix[:, :3] @ corner + matrix[:, 3], start, atol=1e-9)
    # An array that is shown alone, where Neuroglancer refuses the group, does not know its place.
    file.write_text(json.dumps(group).replace('"nanometer"', '"nm"'))
    source = state_of(tmp_path / "em", capsys=capsys)["layers"][0]["source"]
    assert source["url"].endswith("/em/0")
    np.testing.assert_array_equal(np.array(source["transform"]["matrix"])[:, 3], start)


def test_volumes_elsewhere_are_not_served_but_linked_to(tmp_path, capsys):
    write_volume(tmp_path / "em", np.zeros((20, 30, 40), np.uint8))
    with served({"0": tmp_path / "em"}, dict) as url:
        assert main(["view", f"{url}data/0"]) == 0
        told = capsys.readouterr()
    viewer, _, text = told.out.strip().partition("/#!")
    assert viewer == "https://neuroglancer-demo.appspot.com"
    (layer,) = json.loads(unquote(text))["layers"]
    assert layer["source"]["url"] == f"precomputed://{url}data/0"
    assert "http://" in told.err


def upload(folder, put):
    for path in folder.rglob("*"):
        if path.is_file():
            put(f"{folder.name}/{path.relative_to(folder)}", path.read_bytes())


def test_a_job_in_a_bucket_is_linked_to(job, tmp_path, monkeypatch, capsys):
    values = yaml.safe_load(Path(job()).read_text())
    values["input"]["path"] = "gs://data/in"
    values["output"]["path"] = "gs://data/out"
    remote = write_job(tmp_path / "remote.yaml", values)
    with GcsStandIn(["data"]) as gcs:
        upload(tmp_path / "in", partial(gcs.put, "data"))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        assert main(["run", str(remote), "--roi=3x-5x2:19x27x34"]) == 0
        capsys.readouterr()
        assert main(["view", str(remote), "--roi=3x-5x2:19x27x34"]) == 0
    state = json.loads(unquote(capsys.readouterr().out.partition("/#!")[2]))
    sources = {name: layer["source"]["url"] for name, layer in layers_of(state).items()}
    assert sources == {
        "input": "precomputed://gs://data/in",
        "output": "precomputed://gs://data/out",
        "chunks": "local://annotations",
    }


def test_a_volume_in_a_store_like_s3_is_read_from_where_that_is(volume_in, monkeypatch, capsys):
    from fakes.s3 import KEYS, S3StandIn

    with S3StandIn(["data"]) as s3:
        client = s3.client()
        upload(
            volume_in, lambda key, content: client.put_object(Bucket="data", Key=key, Body=content)
        )
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3.url}.items():
            monkeypatch.setenv(name, value)
        assert main(["view", "s3://data/in"]) == 0
    (layer,) = json.loads(unquote(capsys.readouterr().out.partition("/#!")[2]))["layers"]
    assert layer["source"]["url"] == f"precomputed://{s3.url}/data/in"


@pytest.mark.parametrize(
    ("things", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["no.yaml"], "cannot read the job file"),
        (["job.yaml", "job.yaml"], "one job at a time"),
        (["in", "--roi=0x0x0:1x1x1"], "none is given"),
        (["https://user:secret@host/em"], "holds credentials"),
        (["float64"], "holds float64, which Neuroglancer does not show"),
    ],
)
def test_what_cannot_be_shown_is_told_in_one_message(
    job, tmp_path, monkeypatch, capsys, things, message
):
    job()
    monkeypatch.chdir(tmp_path)
    import zarr

    zarr.create_array(str(tmp_path / "float64"), shape=(4, 4, 4), chunks=(4, 4, 4), dtype="float64")
    assert main(["view", *things]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert "secret" not in error


def test_without_its_extra_the_command_says_what_to_install(job, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "neuroglancer", None)
    assert main(["view", job()]) == 2
    assert "pip install 'beam-inference[view]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "end", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_the_server_ends_quietly_when_it_is_interrupted(volume_in, end):
    command = [sys.executable, "-m", "beam_inference", "view", str(volume_in), "--no-open"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().split()[0]
        token = url.rstrip("/")
        with (
            urllib.request.urlopen(f"{token}/data/0/info") as answer,
            urllib.request.urlopen(f"{token}/events/_"),
        ):
            assert json.load(answer)["scales"]
            process.send_signal(end)
            out, err = process.communicate(timeout=90)
    assert (process.returncode, out, err) == (0, "", f"in: file://{volume_in}\n")
