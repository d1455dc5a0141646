"""The chunks that a user names."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from helpers import launch_of

from beam_inference.cli.main import main
from beam_inference.errors import ConfigError
from beam_inference.job.chunk_choice import choose_chunks
from beam_inference.job.resolved_job import ResolvedJob


@pytest.fixture
def resolved(volume_in, tmp_path) -> ResolvedJob:
    """A job of several chunks on each axis; its ROI begins at other places than 0."""
    return launch_of(volume_in, tmp_path / "out").read_job()


def touching(job: ResolvedJob, start, stop) -> list[int]:
    """Brute force: the chunks of which a voxel lies in a box."""
    chunks = job.plan.chunks
    cores = map(chunks.core_box, range(chunks.count))
    return [
        index
        for index, core in enumerate(cores)
        if all(
            max(a, c) < min(b, d)
            for a, b, c, d in zip(start, stop, core.start, core.stop, strict=True)
        )
    ]


def test_indices_and_ranges(resolved):
    assert choose_chunks(["3"], resolved) == [3]
    assert choose_chunks(["7,3,10-12", "11", "0"], resolved) == [0, 3, 7, 10, 11, 12]


def test_boxes_mean_every_chunk_that_they_touch(resolved):
    roi = resolved.plan.chunks.roi
    random = np.random.default_rng(0)
    tried = 0
    while tried < 60:
        corners = random.integers(np.array(roi.start) - 9, np.array(roi.stop) + 9, (2, 3))
        start, stop = corners.min(0).tolist(), (corners.max(0) + 1).tolist()
        expected = touching(resolved, start, stop)
        if not expected:
            continue
        tried += 1
        text = ",".join(f"{a}:{b}" for a, b in zip(start, stop, strict=True))
        assert choose_chunks([text], resolved) == expected


def test_files_of_lines_and_records(resolved, tmp_path):
    path = tmp_path / "some"
    record = json.dumps({"chunk": 4, "fingerprint": resolved.fingerprint})
    box = resolved.plan.chunks.core_box(7)
    line = ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
    path.write_text(f"5\n3\n\n5\n{record}\n{line}\n")
    assert choose_chunks([str(path)], resolved) == [3, 4, 5, 7]
    assert choose_chunks([path.as_uri(), "0"], resolved) == [0, 3, 4, 5, 7]


def test_csv_by_index_or_by_box(resolved, tmp_path, capsys):
    path = tmp_path / "some.csv"
    path.write_text("note, chunk\nbad,3\n\nworse , 5\n")
    assert choose_chunks([str(path)], resolved) == [3, 5]
    start, stop = resolved.plan.chunks.roi.start, (9, 0, 40)
    values = [each for pair in zip(start, stop, strict=True) for each in pair]
    header = "chunk,z0,z1,y0,y1,x0,x1,state"  # of another job, whose chunk 17 is this box
    path.write_text("\n".join([header, ",".join(map(str, [17, *values, "missing"]))]))
    assert choose_chunks([str(path)], resolved) == touching(resolved, start, stop)


@pytest.mark.slow
def test_the_list_of_tasks_is_a_choice(job, tmp_path, capsys):
    path = job()
    assert main(["run", path, "--chunks", "0-3,9"]) == 0
    capsys.readouterr()
    assert main(["tasks", path, "--csv", "--state", "missing"]) == 0
    (tmp_path / "missing.csv").write_text(capsys.readouterr().out)
    assert main(["run", path, "--chunks", str(tmp_path / "missing.csv")]) == 0
    assert main(["verify", path]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("999\n", "line 1 of the chunks file .* there is no chunk 999, only 0 … "),
        ("-1\n", "there is no chunk -1"),
        ("three\n", "line 1 .* neither a chunk index nor a quarantine record, nor a box"),
        ("1\ntrue\n", "line 2 .* neither"),
        ('{"box": 3}\n', "line 1 .* neither"),
        ('{"chunk": 3, "fingerprint": "other"}\n', "belongs to another job"),
        ("\n", "names no chunk"),
        ("1\n5:4,0:1,0:1\n", "is empty"),
        ("900:901,0:1,0:1\n", "line 1 .* touches no chunk; the job is over"),
        ("chunk\nx\n", "line 2 .* is no chunk index: x"),
        ("a,chunk\n1\n", "line 2 .* has 1 of 2 columns"),
        ("z0,z1,y0\n1,2,3\n", "without the columns y1 x0 x1"),
        ("chunk,chunk\n1,2\n", "two columns chunk"),
        ("z0,z1,y0,y1,x0,x1,z0\n0,1,0,1,0,1,5\n", "two columns z0"),
        ("z0,z1,y0,y1,x0,x1\n1,2,3,4,5,6.5\n", "is no box of whole voxels"),
        ("chunk\n", "names no chunk"),
        ("x" * 200_000, "is damaged: field larger than field limit"),
        ("chunk\n" + "x" * 200_000, "is damaged: field larger than field limit"),
    ],
)
def test_what_names_no_chunk_of_the_job(resolved, tmp_path, text, message):
    path = tmp_path / "some"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        choose_chunks([str(path)], resolved)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("999", "there is no chunk 999"),
        ("5-999", "there is no chunk 999"),
        ("9-3", "9-3 names no chunk: write the smaller number first, 3-9"),
        ("0:0,0:1,0:1", "is empty"),
        ("/nowhere/chunks", "does not exist.*indices as 3,5,10-20, or a box"),
    ],
)
def test_what_is_no_choice(resolved, name, message):
    with pytest.raises(ConfigError, match=message):
        choose_chunks([name], resolved)


def state_of(layers, dimensions=None) -> str:
    space = {axis: [1e-8, "m"] for axis in "xyz"}
    return json.dumps({"dimensions": dimensions or space, "layers": layers})


def layer(name, annotations, **transform) -> dict:
    source = {"url": "local://annotations"} | ({"transform": transform} if transform else {})
    return {"type": "annotation", "name": name, "source": source, "annotations": annotations}


def drawn(box, unit=1.0) -> dict:
    corners = [[value * unit for value in corner[::-1]] for corner in (box.start, box.stop)]
    return {
        "type": "axis_aligned_bounding_box",
        "pointA": corners[1],
        "pointB": corners[0],
        "id": "1",
    }


def test_boxes_and_points_of_neuroglancer(resolved, tmp_path):
    chunks = resolved.plan.chunks
    path = tmp_path / "state.json"
    boxes = [drawn(chunks.core_box(index)) for index in (2, 9)]
    point = {"type": "point", "point": [x + 0.5 for x in chunks.core_box(13).start[::-1]]}
    path.write_text(state_of([{"type": "image", "name": "em"}, layer("look", [*boxes, point])]))
    assert choose_chunks([str(path)], resolved) == [2, 9, 13]
    # in other units and another order of axes, through metres
    space = {"z": [2.5, "nm"], "x": [2.5e-9, "m"], "y": [2.5e-3, "um"], "c^": [1, ""]}
    corners = chunks.core_box(9)
    turned = [[4 * z, 4 * x, 4 * y, 0] for z, y, x in (corners.start, corners.stop)]
    box = {"type": "axis_aligned_bounding_box", "pointA": turned[0], "pointB": turned[1]}
    path.write_text(state_of([layer("look", [box], outputDimensions=space)]))
    assert choose_chunks([str(path)], resolved) == [9]


def test_one_of_several_layers_is_named(resolved, tmp_path):
    chunks = resolved.plan.chunks
    path = tmp_path / "state.json"
    layers = [layer(f"my {i}", [drawn(chunks.core_box(i))]) for i in (1, 2)]
    path.write_text(state_of([*layers, layer("empty", [])]))
    with pytest.raises(ConfigError, match=r"several layers .*FILE#LAYER.*my 1, my 2"):
        choose_chunks([str(path)], resolved)
    assert choose_chunks([f"{path}#my 2"], resolved) == [2]
    with pytest.raises(ConfigError, match="no annotations in a layer his, only in my 1, my 2"):
        choose_chunks([f"{path}#his"], resolved)


@pytest.mark.parametrize(
    ("annotations", "transform", "message"),
    [
        ([], {}, "has no layer with annotations"),
        ([{"type": "line", "pointA": [0, 0, 0], "pointB": [1, 1, 1]}], {}, "neither a box nor"),
        ([{"type": "point"}], {}, "cannot be taken"),
        ([{"type": "point", "point": [0, 0]}], {}, "cannot be taken"),
        ([{"type": "point", "point": [float("nan"), 0, 0]}], {}, "is no number"),
        ([{"type": "point", "point": [0, float("inf"), 0], "id": "a"}], {}, "of 'a' is no number"),
        ([{"type": "ellipsoid", "center": [0, 0, 0]}], {}, "'ellipsoid' is neither a box nor"),
        ([{"type": "point", "point": "000"}], {}, "cannot be taken"),
        ([7], {}, "cannot be taken"),
        ([{"type": "point", "point": [0, 0, 0]}], {"matrix": [[1]]}, "by a matrix"),
        (
            [{"type": "point", "point": [0, 0, 0]}],
            {"outputDimensions": {axis: [1, "s"] for axis in "xyz"}},
            "is 's', and not m",
        ),
        *(
            (
                [{"type": "point", "point": [0, 0, 0]}],
                {"outputDimensions": {axis: [scale, "m"] for axis in "xyz"}},
                "and no length",
            )
            for scale in (0, -1e-9, float("nan"), float("inf"))
        ),
        (
            [{"type": "point", "point": [0, 0, 0]}],
            {"outputDimensions": {"t": [1, "s"]}},
            "no dimensions z, y and x",
        ),
    ],
)
def test_what_cannot_be_taken_as_boxes(resolved, tmp_path, annotations, transform, message):
    path = tmp_path / "state.json"
    path.write_text(state_of([layer("look", annotations, **transform)]))
    with pytest.raises(ConfigError, match=message):
        choose_chunks([str(path)], resolved)


def test_chunks_that_the_viewer_shows_are_a_choice(resolved, tmp_path):
    """The state that ``view`` makes of boxes is understood."""
    from beam_inference.view.viewer_state import Boxes, view_state

    chunks = resolved.plan.chunks
    boxes = Boxes("quarantine", "#ff0000", [("", chunks.core_box(index)) for index in (3, 8)])
    state = view_state("", [], [boxes], chunks.roi, resolved.voxel_size_nm)
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    assert choose_chunks([f"{path}#quarantine"], resolved) == [3, 8]
    assert all(a < b for a, b in pairwise(choose_chunks([str(path)], resolved)))
