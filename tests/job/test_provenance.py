"""What an output's metadata tell of the job or command that made it."""

import getpass
import json
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from helpers import POSITION, TOYS, job_values, toy, write_job, write_levels, write_volume
from pydantic import BaseModel

from beam_inference.cli.main import main
from beam_inference.config.fields import Url, WritableUrl
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ModelContractError, StateError
from beam_inference.job import provenance
from beam_inference.job.provenance import record_job
from beam_inference.launch.prepare import prepare
from beam_inference.models.hashes import hash_files
from beam_inference.models.local_files import file_sha256
from beam_inference.operators.own import Own
from beam_inference.volumes.conditional_writes import change_json
from beam_inference.volumes.kvstores import LOCAL, open_kvstore
from beam_inference.volumes.provenance import change_provenance, read_provenance

FORMATS = ("precomputed", "zarr2", "zarr3", "n5", "ome_zarr", "ome_zarr_0.4")
OPERATORS = """
def halved(values):
    return values / 2
"""


@pytest.fixture
def volume_at_zero(tmp_path):
    """A volume that begins at 0, as those of every format may."""
    write_volume(tmp_path / "in", np.ones((16, 32, 32), np.uint8))
    return tmp_path / "in"


def launch(tmp_path, volume_in, *, overwrite=False, postprocess=(), **sections):
    values = job_values(volume_in, tmp_path / "out", **sections)
    values["postprocess"] = list(postprocess)
    return prepare(parse_job(values, tmp_path), overwrite=overwrite)


def entries(tmp_path, name="out"):
    return read_provenance(f"file://{tmp_path}/{name}")


@pytest.mark.parametrize("format", FORMATS)
def test_an_output_tells_of_its_job_before_the_first_chunk(format, volume_at_zero, tmp_path):
    job = launch(tmp_path, volume_at_zero, output={"format": format}).read_job()
    (entry,) = entries(tmp_path)
    assert entry["made_by"] == "beam-inference run"
    assert entry["fingerprint"] == job.fingerprint
    assert entry["job"]["versions"] == job.versions
    assert entry["job"]["config"]["inference"]["blend"] == "bump"
    assert entry["job"]["config"]["inference"]["augment"] == "none"
    assert entry["job"]["config"]["output"]["path"] == "."


@pytest.mark.parametrize("is_put_back", [False, True])
def test_files_of_the_network_that_are_exchanged_meanwhile_are_not_recorded(
    volume_in, tmp_path, monkeypatch, is_put_back
):
    weights = tmp_path / "weights.pt"
    network = torch.nn.Conv3d(1, 2, 3, padding=1)

    def write(value):
        draft = tmp_path / "draft"
        torch.save(
            {key: torch.full_like(v, value) for key, v in network.state_dict().items()}, draft
        )
        draft.replace(weights)

    def hash_others(model):
        write(2)
        files = hash_files(model)
        if is_put_back:
            write(1)
        return files

    write(1)
    sha256 = file_sha256(weights)
    model = toy("conv", weights=str(weights), output_channels=2)
    with monkeypatch.context() as patched:
        patched.setattr(provenance, "hash_files", hash_others)
        with pytest.raises(
            ModelContractError, match="files were written or replaced since they were"
        ):
            launch(tmp_path, volume_in, model=model)
    write(1)
    launch(tmp_path, volume_in, model=model)
    (entry,) = entries(tmp_path)
    assert [each["sha256"] for each in entry["needs"] if each["key"] == "model.weights"] == [sha256]


OTHERWISE = {
    "inference.augment": {"mirror": ["z", "x"]},
    "inference.blend": {"gaussian": 0.125, "floor": "nnunet"},
    "inference.lattice": "spread",
    "inference.patch_overlap": [4, 8, 8],
    "model.activation": "sigmoid",
    "model.normalize": [{"standard": {"mean": 3.0, "std": 2.0}}],
    "input.fill": "edge",
}


@pytest.mark.parametrize("key", OTHERWISE)
def test_what_changes_a_result_is_told(key, volume_in, tmp_path):
    section, name = key.split(".")
    keys = {"model": {"channels": [{}]}}
    keys[section] = keys.get(section, {}) | {name: OTHERWISE[key]}
    launch(tmp_path, volume_in, **keys)
    told = entries(tmp_path)[0]["job"]["config"][section][name]
    assert told == OTHERWISE[key] or told == [{"channels": None, **OTHERWISE[key][0]}]


def test_it_tells_of_every_file_with_its_hash(volume_in, tmp_path):
    write_volume(tmp_path / "mask", np.ones((40, 70, 50), np.uint8))
    (tmp_path / "own.py").write_text(OPERATORS)
    launch(
        tmp_path,
        volume_in,
        model=POSITION,
        mask={"path": "mask"},
        input={"path": str(volume_in), "mask": {"path": "mask"}},
        postprocess=[
            {"operator": "smooth", "sigma": [0.5, 1, 1]},
            {"operator": "own", "function": "own.py:halved", "output_channels": 2},
        ],
    )
    (entry,) = entries(tmp_path)
    needs = {needed["key"]: (needed["name"], needed["sha256"]) for needed in entry["needs"]}
    source = Path(str(volume_in).removeprefix("file://"))
    assert needs == {
        "input.path": (source.name, None),
        "input.mask.path": ("mask", None),
        "mask.path": ("mask", None),
        "model.path": (TOYS.name, file_sha256(TOYS)),
        "postprocess.1": ("own.py", file_sha256(tmp_path / "own.py")),
    }
    config = entry["job"]["config"]
    assert config["mask"]["path"] == "../mask"
    assert config["postprocess"][1]["function"] == "../own.py:halved"
    assert entry["sources"] == [config["input"]["path"]]


def test_it_names_neither_people_nor_credentials_nor_folders_above(volume_in, tmp_path):
    home = tmp_path / "home" / "alice"
    write_volume(home / "em", np.zeros((40, 70, 50), np.uint8))
    values = job_values(
        home / "em",
        tmp_path / "out",
        job={"state_path": str(tmp_path / "home/bob/state")},
        storage={
            "s3": {"profile": "carol", "credentials": "profile", "endpoint": "http://dave:1"},
            "gcs": {"user_project": "erin"},
        },
    )
    prepare(parse_job(values, tmp_path))
    text = (tmp_path / "out/provenance").read_text()
    for word in ("alice", "bob", "carol", "dave", "erin", str(tmp_path), str(tmp_path.name)):
        assert word not in text
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)
    (entry,) = entries(tmp_path)
    assert entry["job"]["config"]["input"]["path"] == "…/em"


def test_a_volume_that_is_called_as_its_user_is_not_named(tmp_path):
    home = tmp_path / "home" / "alice"
    write_volume(home, np.zeros((16, 16, 16), np.uint8))
    prepare(parse_job(job_values(home, tmp_path / "out"), tmp_path))
    assert "alice" not in (tmp_path / "out/provenance").read_text()
    assert entries(tmp_path)[0]["needs"][0]["name"] == "unknown"


def url_fields(model, seen):
    """The keys of a section of the job file, and of those inside it, that hold a path or URL."""
    for name, field in model.model_fields.items():
        if any(mark in field.metadata for mark in (*Url.__metadata__, *WritableUrl.__metadata__)):
            seen.add(f"{model.__name__}.{name}")
        for inner in classes_in(field.annotation):
            url_fields(inner, seen)
        if any(_is_url(part) for part in get_args(field.annotation)):
            seen.add(f"{model.__name__}.{name}")
    return seen


def _is_url(annotation):
    return annotation in (Url, WritableUrl)


def classes_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for part in get_args(annotation) for each in classes_in(part)]


def test_every_key_with_a_path_is_known_to_be_recorded_without_people():
    """A new one belongs into config.job_file.rename_paths, into needs, and then here."""
    assert url_fields(JobConfig, url_fields(Own, set())) == {
        *("Input.path", "Mask.path", "Output.path", "Job.state_path", "LevelsBox.levels"),
        *("Network.path", "Network.weights", "Own.function", "Gcs.endpoint", "S3.endpoint"),
        *("Contrast.levels", "Standard.levels", "Quantiles.levels", "QuantileRange.levels"),
        *("MomentsFromLevels.levels", "Statistics.levels", "FurtherOutput.path"),
        *("FurtherInput.path", "Member.path", "Member.weights", "Preview.path", "Holes.path"),
    }


def test_levels_are_told_as_values_and_their_file_relatively(volume_in, tmp_path):
    write_levels(str(volume_in), tmp_path)
    normalize = {"levels": "levels.json", "low": 0.1, "high": 0.9}
    launch(tmp_path, volume_in, model={"normalize": normalize})
    (entry,) = entries(tmp_path)
    assert entry["job"]["requested_normalize"]["levels"] == "../levels.json"
    assert entry["job"]["config"]["model"]["normalize"]["scale"] > 0


@pytest.mark.parametrize("format", FORMATS)
def test_a_later_launch_leaves_it_as_it_is(format, volume_at_zero, tmp_path):
    launch(tmp_path, volume_at_zero, output={"format": format})
    before = entries(tmp_path)
    inference = {"strategy": "exchange"}
    launch(tmp_path, volume_at_zero, output={"format": format}, inference=inference)
    assert entries(tmp_path) == before


def test_an_output_without_a_record_gets_that_of_its_first_launch(volume_in, tmp_path):
    first = launch(tmp_path, volume_in).read_job()
    (tmp_path / "out/provenance").unlink()
    path = tmp_path / "out/_beam_inference"
    launch(tmp_path, volume_in)
    (entry,) = entries(tmp_path)
    assert entry["fingerprint"] == first.fingerprint
    assert (path / "job.json").exists()


def test_versions_are_those_of_the_first_launch(volume_in, tmp_path):
    job = launch(tmp_path, volume_in).read_job()
    (tmp_path / "out/provenance").unlink()
    old = {**job.versions, "numpy": "1.0"}
    record_job(job.model_copy(update={"versions": old}))
    launch(tmp_path, volume_in)
    assert entries(tmp_path)[0]["job"]["versions"]["numpy"] == "1.0"


def test_overwriting_tells_of_the_new_job_alone(volume_in, tmp_path):
    launch(tmp_path, volume_in)
    first = entries(tmp_path)
    job = launch(tmp_path, volume_in, inference={"blend": "constant"}, overwrite=True).read_job()
    assert [entry["fingerprint"] for entry in entries(tmp_path)] == [job.fingerprint]
    assert first[0]["fingerprint"] != job.fingerprint
    launch(tmp_path, volume_in, inference={"blend": "constant"}, overwrite=True)
    assert len(entries(tmp_path)) == 1


def test_jobs_that_share_an_output_have_a_record_each(tmp_path):
    write_volume(tmp_path / "in", np.zeros((32, 64, 64), np.uint8))
    bounds = {"start": [0, 0, 0], "stop": [32, 64, 64]}
    boxes = [{"start": [z, 0, 0], "stop": [z + 16, 64, 64]} for z in (0, 16)]
    for number, roi in enumerate(boxes):
        launch(
            tmp_path,
            tmp_path / "in",
            roi=roi,
            output={"bounds": bounds},
            job={"state_path": str(tmp_path / f"state{number}")},
        )
    assert [entry["box"] for entry in entries(tmp_path)] == boxes
    launch(
        tmp_path,
        tmp_path / "in",
        overwrite=True,
        roi=boxes[1],
        output={"bounds": bounds},
        inference={"blend": "constant"},
        job={"state_path": str(tmp_path / "state1")},
    )
    told = entries(tmp_path)
    assert [entry["box"] for entry in told] == boxes
    assert [entry["job"]["config"]["inference"]["blend"] for entry in told] == ["bump", "constant"]


def test_what_was_there_before_the_job_stays(volume_at_zero, tmp_path):
    job = launch(tmp_path, volume_at_zero, output={"format": "zarr3"}).read_job()
    url = job.config.output.path
    made = {"made_by": "beam-inference convert", "fingerprint": "f", "sources": []}
    part = {**made, "box": {"start": [0, 0, 0], "stop": [1000, 1000, 1000]}}

    def change(content):
        attributes = {**content["attributes"], "other": 1, "beam_inference": [part]}
        return {**content, "attributes": attributes}

    change_json(open_kvstore(url), "zarr.json", url, change)
    launch(tmp_path, volume_at_zero, output={"format": "zarr3"}, overwrite=True)
    assert [entry["made_by"] for entry in entries(tmp_path)] == [
        "beam-inference convert",
        "beam-inference run",
    ]
    assert json.loads((tmp_path / "out/zarr.json").read_text())["attributes"]["other"] == 1


def test_damaged_metadata_are_told_before_anything_is_written(volume_in, tmp_path, capsys):
    launch(tmp_path, volume_in)
    (tmp_path / "out/provenance").write_text('{"processing": 7}')
    job = write_job(tmp_path / "job.yaml", job_values(volume_in, tmp_path / "out"))
    before = sorted(tmp_path.rglob("*"))
    assert main(["run", str(job)]) == 2
    assert "provenance cannot be understood: its processing is no list" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "format",
    [pytest.param(each, marks=() if each == "ome_zarr" else pytest.mark.slow) for each in FORMATS],
)
def test_commands_on_volumes_tell_what_made_theirs(format, tmp_path, capsys):
    write_volume(tmp_path / "in", np.ones((8, 16, 16), np.uint8))
    source = str(tmp_path / "in")
    words = ["--format", format]
    commands = {
        "convert": [source, f"{tmp_path}/convert", *words],
        "resample": [source, f"{tmp_path}/resample", "--voxel_size", "20,20,20", *words],
        "components": [source, f"{tmp_path}/components", "--threshold", "1", *words],
    }
    for command, arguments in commands.items():
        assert main([command, *arguments]) == 0
        assert main([command, *arguments]) == 0  # goes on, and adds nothing
        (entry,) = entries(tmp_path, command)
        assert entry["made_by"] == f"beam-inference {command}"
        assert entry["sources"] == ["../in"]
        assert str(tmp_path) not in json.dumps(entry)
        capsys.readouterr()
        assert main(["show", f"{tmp_path}/{command}"]) == 0
        assert f"beam-inference {command} " in capsys.readouterr().out
    assert entries(tmp_path, "resample")[0]["how"]["orders"] == [1, 1, 1]
    assert entries(tmp_path, "components")[0]["how"]["threshold"] == 1


def test_a_pyramid_leaves_its_volumes_record(tmp_path):
    for format in ("precomputed", "ome_zarr", "ome_zarr_0.4"):
        url = write_volume(tmp_path / format, np.ones((16, 32, 32), np.uint8), format=format)
        change_provenance(url, LOCAL, lambda _: [{"fingerprint": "f"}])
        before = entries(tmp_path, format)
        assert main(["pyramid", str(tmp_path / format), "--levels", "1"]) == 0
        assert entries(tmp_path, format) == before != []


def test_a_conflict_tells_nothing(volume_in, tmp_path):
    launch(tmp_path, volume_in)
    before = entries(tmp_path)
    with pytest.raises(StateError):
        launch(tmp_path, volume_in, inference={"blend": "constant"})
    assert entries(tmp_path) == before
