"""``--overwrite`` replaces the volume that lies there, and nothing else."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from helpers import read_volume, write_volume

from beam_inference.cli.main import main
from beam_inference.config.formats import OutputSpec
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.replacement import plan_replacement
from beam_inference.volumes.kvstores import LOCAL, open_kvstore
from beam_inference.volumes.outputs import create_output

BLOCK_FORMATS = ["precomputed", "zarr2", "zarr3", "n5", "ome_zarr", "ome_zarr_0.4"]
SMALL = np.random.default_rng(0).integers(1, 256, (40, 40, 40), np.uint8)
LARGE = np.full((90, 90, 90), 7, np.uint8)


@pytest.fixture
def source(tmp_path: Path) -> str:
    np.save(tmp_path / "small.npy", SMALL)
    return f"{tmp_path}/small.npy"


def convert(source, target, *words):
    return main(["convert", str(source), str(target), "--voxel-size=8,8,8", *words])


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "format",
    [
        pytest.param(format, marks=[] if format == "ome_zarr_0.4" else pytest.mark.slow)
        for format in BLOCK_FORMATS
    ],
)
def test_nothing_of_a_larger_volume_is_left(format, source, tmp_path):
    write_volume(tmp_path / "v", LARGE, format=format)
    assert convert(source, tmp_path / "new", f"--format={format}") == 0
    assert convert(source, tmp_path / "v", f"--format={format}") == 2
    assert convert(source, tmp_path / "v", f"--format={format}", "--overwrite") == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "v")[0], SMALL)
    without_records = [
        {name for name in files(tmp_path / each) if not name.startswith("_beam_inference/convert")}
        for each in ("v", "new")
    ]
    assert without_records[0] == without_records[1]


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_any_format_is_replaced_by_any_other(format, tmp_path):
    """Without Beam: what is removed of a volume is all of it."""
    write_volume(tmp_path / "v", LARGE[:50, :20, :20], format=format)
    (tmp_path / "v" / "_beam_inference" / "convert").mkdir(parents=True)
    (tmp_path / "v" / "_beam_inference" / "convert" / "job.json").write_text("{}")
    plan_replacement(f"file://{tmp_path}/v", LOCAL).remove()
    assert not list((tmp_path / "v").iterdir())


def test_other_bounds_and_scales(source, tmp_path):
    write_volume(tmp_path / "v", LARGE, start=(5, -70, 1000))
    assert main(["pyramid", f"{tmp_path}/v", "--num-scales=2"]) == 0
    assert convert(source, tmp_path / "v", "--overwrite", "--block_shape=32,32,32") == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "v")[0], SMALL)
    info = json.loads((tmp_path / "v" / "info").read_text())
    assert len(info["scales"]) == 1
    assert {path.name for path in (tmp_path / "v").iterdir()} == {
        "info",
        "provenance",
        "8_8_8",
        "_beam_inference",
    }


FOREIGN = ["notes.txt", "mesh/1:0", "labels/zarr.json", "2020_12_24", "cc/0", "1x/0", "link"]


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("format", ["precomputed", "zarr3", "zarr2", "n5", "ome_zarr"])
def test_a_folder_that_holds_anything_else_is_refused(format, name, source, tmp_path, capsys):
    write_volume(tmp_path / "v", SMALL[:8], format=format)
    path = tmp_path / "v" / name
    path.parent.mkdir(exist_ok=True)
    if name == "link":
        path.symlink_to(tmp_path)
    else:
        path.write_text("mine")
    before = files(tmp_path / "v")
    assert convert(source, tmp_path / "v", f"--format={format}", "--overwrite") == 2
    message = capsys.readouterr().err
    assert f"holds {name.split('/')[0]}" in message
    assert "nothing was removed" in message
    assert files(tmp_path / "v") == before


LIKE_BLOCKS = {
    "precomputed": ["8_8_8/abc.shard", "8_8_8/2023-2024_01-02_03-04", "8_8_8/0-17_0-16_0-8"],
    "zarr3": ["2024.11.26", "000001", "2024/01/05", "c/2024/01/05", "c/0/0/00"],
    "zarr2": ["2023/01/05", "2024.11.26", "000001", "0/00"],
    "n5": ["2023/01/05", "000001/000002", "0/0/00"],
    "ome_zarr": ["0/2024/01/05", "0/c/0/00", "0/0/00"],
}
"""Paths that look like blocks of the format, and are none of the volume."""


@pytest.mark.parametrize(
    ("format", "path"), [(format, path) for format, paths in LIKE_BLOCKS.items() for path in paths]
)
def test_files_that_look_like_blocks_are_not_the_volume_s(format, path, source, tmp_path, capsys):
    write_volume(tmp_path / "v", SMALL[:8], format=format, voxel_size_nm=(8.0, 8.0, 8.0))
    file = tmp_path / "v" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    before = files(tmp_path / "v")
    assert convert(source, tmp_path / "v", f"--format={format}", "--overwrite") == 2
    assert f"holds {path}" in capsys.readouterr().err
    assert files(tmp_path / "v") == before


def test_a_volume_in_a_folder_above_a_listed_scale(source, tmp_path, capsys):
    write_volume(tmp_path / "v", SMALL[:8])
    write_volume(tmp_path / "v" / "labels", SMALL[:8])
    info = json.loads((tmp_path / "v" / "info").read_text())
    scale = info["scales"][0]
    info["scales"].append({**scale, "key": f"labels/{scale['key']}"})
    (tmp_path / "v" / "info").write_text(json.dumps(info))
    before = files(tmp_path / "v")
    assert convert(source, tmp_path / "v", "--overwrite") == 2
    assert "holds labels/info" in capsys.readouterr().err
    assert files(tmp_path / "v") == before


@pytest.mark.parametrize("attributes", [{}, {"ome": {"multiscales": []}}])
def test_groups_between_a_volume_and_its_arrays(attributes, source, tmp_path, capsys):
    write_volume(tmp_path / "v", SMALL[:8], format="ome_zarr")
    (tmp_path / "v" / "scale0").mkdir()
    (tmp_path / "v" / "0").rename(tmp_path / "v" / "scale0" / "image")
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    (tmp_path / "v" / "scale0" / "zarr.json").write_text(json.dumps(group))
    file = tmp_path / "v" / "zarr.json"
    root = json.loads(file.read_text())
    root["attributes"]["ome"]["multiscales"][0]["datasets"][0]["path"] = "scale0/image"
    file.write_text(json.dumps(root))
    expected = 2 if attributes else 0
    assert convert(source, tmp_path / "v", "--format=ome_zarr", "--overwrite") == expected
    assert ("holds scale0/zarr.json" in capsys.readouterr().err) == bool(attributes)


@pytest.mark.parametrize("name", ["notes.txt", "0/zarr.json", "zz/1"])
def test_keys_in_a_bucket(name):
    url = f"memory://bucket/{name[0]}"
    store = open_kvstore(url, LOCAL)
    bounds = BoundingBox((0, 0, 0), SMALL.shape)
    create_output(
        OutputSpec(url, "precomputed", "uint8", 1, bounds, (8, 16, 16), (8.0, 8.0, 8.0))
    ).write(bounds, SMALL[None])
    store.write("_beam_inference/convert/job.json", "{}").result()
    store.write(name, "mine").result()
    with pytest.raises(StateError, match=f"holds {name.split('/')[0]}"):
        plan_replacement(url, Storage())
    store.write(name, None).result()
    plan_replacement(url, Storage()).remove()
    assert store.list().result() == []


def test_chunks_of_zarr_in_a_bucket():
    store = open_kvstore("memory://zarr", LOCAL)
    for key in (".zarray", "0.0.0", "0.0.1", "10.0.0"):
        store.write(key, '{"zarr_format": 2, "shape": [11, 1, 2], "chunks": [1, 1, 1]}').result()
    plan_replacement("memory://zarr", Storage()).remove()
    assert store.list().result() == []


def test_a_folder_without_a_volume(source, tmp_path, capsys):
    (tmp_path / "v" / "mine").mkdir(parents=True)
    assert convert(source, tmp_path / "v", "--overwrite") == 2
    assert "holds mine/" in capsys.readouterr().err
    (tmp_path / "v" / "mine").rmdir()
    assert convert(source, tmp_path / "v", "--overwrite") == 0


def test_a_scale_outside_of_its_volume(source, tmp_path, capsys):
    write_volume(tmp_path / "v", SMALL)
    write_volume(tmp_path / "w", SMALL)
    info = (tmp_path / "v" / "info").read_text()
    (tmp_path / "v" / "info").write_text(info.replace('"10_10_10"', '"../w/10_10_10"'))
    before = files(tmp_path / "w")
    assert convert(source, tmp_path / "v", "--overwrite") == 2
    assert "may lie outside of it" in capsys.readouterr().err
    assert files(tmp_path / "w") == before


def test_a_source_inside_of_its_target(tmp_path, capsys):
    write_volume(tmp_path / "v", SMALL, format="ome_zarr")
    before = files(tmp_path / "v")
    assert convert(tmp_path / "v" / "0", tmp_path / "v", "--overwrite") == 2
    assert "holds the source" in capsys.readouterr().err
    assert main(["components", f"{tmp_path}/v/0", f"{tmp_path}/v", "--threshold=9"]) == 2
    assert "holds the input" in capsys.readouterr().err
    assert files(tmp_path / "v") == before


def test_a_removal_that_was_killed_is_given_again(source, tmp_path):
    write_volume(tmp_path / "v", LARGE)
    (tmp_path / "v" / "10_10_10" / "0-32_0-32_0-32").unlink()
    assert convert(source, tmp_path / "v", "--overwrite") == 0
    write_volume(tmp_path / "z", LARGE[:40], format="ome_zarr")
    assert convert(source, tmp_path / "z", "--format=ome_zarr", "--overwrite") == 0
    (tmp_path / "z" / "zarr.json").unlink()  # as after a kill before the group's own metadata
    assert convert(source, tmp_path / "z", "--format=ome_zarr", "--overwrite") == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "z")[0], SMALL)


@pytest.mark.parametrize("format", ["precomputed", "zarr3"])
def test_drafts_of_a_killed_writer_are_not_foreign(format, source, tmp_path):
    write_volume(tmp_path / "v", LARGE, format=format)
    metadata = "info" if format == "precomputed" else "zarr.json"
    drafts = {
        f"{metadata}.__lock",
        f"{metadata}_{'0a' * 8}.__lock",
        f"{metadata}.{'0a' * 16}.draft",
    }
    for name in drafts:
        (tmp_path / "v" / name).write_text("{")
    assert convert(source, tmp_path / "v", f"--format={format}", "--overwrite") == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "v")[0], SMALL)


def test_drafts_of_other_files_are_foreign(source, tmp_path, capsys):
    write_volume(tmp_path / "v", LARGE)
    (tmp_path / "v" / f"notes.txt_{'0a' * 8}.__lock").write_text("{")
    assert convert(source, tmp_path / "v", "--overwrite") == 2
    assert "notes.txt" in capsys.readouterr().err


@pytest.mark.slow
def test_components_replace_a_larger_volume(tmp_path, capsys):
    write_volume(tmp_path / "small", SMALL)
    write_volume(tmp_path / "v", LARGE)
    words = ["components", f"{tmp_path}/small", f"{tmp_path}/v", "--threshold=250"]
    assert main(words) == 2
    capsys.readouterr()
    assert main([*words, "--overwrite", "--pyramid"]) == 0
    labels = read_volume(tmp_path / "v")
    assert labels.shape == (1, 40, 40, 40)
    np.testing.assert_array_equal(labels[0] > 0, SMALL >= 250)
    (tmp_path / "v" / "mine").write_text("mine")
    assert main([*words, "--overwrite"]) == 2
    assert "holds mine" in capsys.readouterr().err


@pytest.mark.slow
def test_components_do_not_write_into_labels_of_others(tmp_path, capsys):
    write_volume(tmp_path / "small", SMALL)
    words = ["components", f"{tmp_path}/small", f"{tmp_path}/v", "--threshold=250"]
    assert main(words) == 0
    labels = read_volume(tmp_path / "v")
    for record in (tmp_path / "v" / "_beam_inference").rglob("job.json"):
        record.unlink()
    capsys.readouterr()
    assert main([*words[:-1], "--threshold=100"]) == 2
    assert "that no components has begun" in capsys.readouterr().err
    np.testing.assert_array_equal(read_volume(tmp_path / "v"), labels)


def test_files_of_hdf5_that_hold_other_datasets(source, tmp_path, capsys):
    target = tmp_path / "a.h5"
    with h5py.File(target, "w") as file:
        file["raw"] = LARGE[:3]
        file["mine"] = [1]
    assert convert(source, f"{target}:raw", "--overwrite") == 2
    assert "holds mine beside raw" in capsys.readouterr().err
    with h5py.File(target, "a") as file:
        del file["mine"]
    assert convert(source, f"{target}:raw", "--overwrite") == 0
    with h5py.File(target) as file:
        np.testing.assert_array_equal(file["raw"], SMALL)


def test_folders_of_slices_that_hold_more(source, tmp_path, capsys):
    (tmp_path / "s" / "folder.png").mkdir(parents=True)
    words = ["convert", source, f"{tmp_path}/s", "--format=png", "--overwrite"]
    assert main(words) == 2
    assert "is a folder that holds folder.png" in capsys.readouterr().err


def test_the_volume_that_a_resampled_one_is_like_is_not_replaced(tmp_path, capsys):
    write_volume(tmp_path / "coarse", SMALL[::2], voxel_size_nm=(20.0, 10.0, 10.0))
    write_volume(tmp_path / "in", SMALL)
    words = ["resample", f"{tmp_path}/coarse", f"{tmp_path}/in", "--like", f"{tmp_path}/in"]
    assert main([*words, "--overwrite"]) == 2
    assert "is to stay" in capsys.readouterr().err
    np.testing.assert_array_equal(read_volume(tmp_path / "in")[0], SMALL)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_notes_in_the_folder_of_a_scale_are_kept(format, source, tmp_path, capsys):
    write_volume(tmp_path / "v", LARGE, format=format)
    folders = {path.parent for path in (tmp_path / "v").rglob("*") if path.is_file()}
    (max(folders, key=lambda folder: len(folder.parts)) / "notes.txt").write_text("keep")
    before = files(tmp_path / "v")
    assert convert(source, tmp_path / "v", f"--format={format}", "--overwrite") != 0
    assert "notes.txt" in capsys.readouterr().err
    assert files(tmp_path / "v") == before


@pytest.mark.parametrize(
    "names", [[f"{number}.txt" for number in range(9)], ["000001"], ["2024-11-26"], ["zarr.json"]]
)
def test_a_folder_that_metadata_call_a_scale_is_looked_at(names, source, tmp_path, capsys):
    write_volume(tmp_path / "v", LARGE)
    info = json.loads((tmp_path / "v" / "info").read_text())
    info["scales"].append(info["scales"][0] | {"key": "notes/of/mine"})
    (tmp_path / "v" / "info").write_text(json.dumps(info))
    (tmp_path / "v" / "notes" / "of" / "mine").mkdir(parents=True)
    for name in names:
        (tmp_path / "v" / "notes" / "of" / "mine" / name).write_text("keep")
    assert convert(source, tmp_path / "v", "--overwrite") != 0
    assert "notes/of/mine/" in capsys.readouterr().err
    assert len(list((tmp_path / "v" / "notes" / "of" / "mine").iterdir())) == len(names)
