"""The inside of an object, piece by piece, against SciPy and NumPy on whole arrays."""

import hashlib
import json

import numpy as np
import pytest
from helpers import write_levels, write_volume
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from beam_inference.cli.main import main
from beam_inference.config.storage import Storage
from beam_inference.errors import PermanentReadError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.operators import level_counts
from beam_inference.operators.background import Joints, find_background, find_holes
from beam_inference.operators.distributions import QUANTILES
from beam_inference.operators.object_counts import LayerOfFaces
from beam_inference.volumes.holes import (
    HolesIndex,
    box_of_holes,
    compress_bits,
    open_holes,
    pack_bits,
)

START = (3, -5, 2)


def filled(inside):
    """What is inside, holes filled, as nnU-Net finds it."""
    return ndimage.binary_fill_holes(inside)


@st.composite
def cut_volumes(draw):
    """What is not zero of a volume, mostly with thin walls, and the shape of its pieces."""
    shape = draw(st.tuples(*[st.integers(1, 7)] * 3))
    share = draw(st.sampled_from([0.3, 0.6, 0.8, 0.95]))
    seed = draw(st.integers(0, 2**32 - 1))
    inside = np.random.default_rng(seed).random(shape) < share
    return inside, draw(st.tuples(*[st.integers(1, 4)] * 3))


@given(cut_volumes())
def test_holes_are_those_of_the_whole_however_it_is_cut(cut):
    inside, piece_shape = cut
    box = BoundingBox(START, tuple(np.add(START, inside.shape).tolist()))
    grid = ChunkGrid(box, piece_shape)
    pieces = [grid.core_box(index).slices_in(box) for index in range(grid.count)]
    joints = Joints()
    faces = LayerOfFaces(grid, joints)
    found = [find_background(inside[piece]) for piece in pieces]
    for index, each in enumerate(found):
        faces.add(index, joints.add_piece(each))
    outside = joints.are_outside()
    expected = filled(inside)
    made = inside.copy()
    start = 0
    for piece, each in zip(pieces, found, strict=True):
        stop = start + len(each.sizes)
        holes = find_holes(inside[piece], outside[start:stop])
        assert not (made[piece] & holes).any()
        made[piece] |= holes
        assert each.inner + each.sizes.sum() == (~inside[piece]).sum()
        assert holes.sum() == each.inner + each.sizes[~outside[start:stop]].sum()
        start = stop
    np.testing.assert_array_equal(made, expected)


def test_another_number_of_parts_is_noticed():
    inside = np.ones((3, 3, 3), bool)
    inside[0] = False
    with pytest.raises(ValueError, match="1 parts of background, expected 2"):
        find_holes(inside, np.array([True, False]))


def brain(dtype="int16", seed=0):
    """Two channels with zeros around an object, and in it: a hole of many pieces, and others."""
    generator = np.random.default_rng(seed)
    z, y, x = np.ogrid[:30, :40, :44]
    distance = ((z - 15) / 13) ** 2 + ((y - 20) / 17) ** 2 + ((x - 22) / 19) ** 2
    array = generator.integers(1, 300, (2, 30, 40, 44)).astype(dtype)
    array[:, distance > 1] = 0
    array[:, 8:23, 12:28, 12:32] = 0  # a large hole
    array[:, 0:10, 19, 22] = 0  # which this would open ...
    array[1, 4, 19, 22] = 7  # ... if it were not closed in one channel
    array[:, 15, 5, 22] = 0  # a small one
    array[:, 15, 20, 34:44] = 0  # and a dent
    array[0, 9, 9] = 0  # zeros of one channel alone are none
    return array


@pytest.fixture(params=["int16", "float32"])
def made(request, tmp_path, monkeypatch):
    """A volume in many pieces: its array, where it lies, and its levels."""
    monkeypatch.setattr(level_counts, "CHUNK_VOXELS", 1)
    array = brain(request.param)
    url = write_volume(tmp_path / "in", array, START, block_shape=(16, 24, 16))
    return array, tmp_path, json.loads(write_levels(url, tmp_path, finds_object=True).read_text())


def test_the_levels_of_the_inside_alone(made):
    array, folder, told = made
    mask = filled(array.any(axis=0))
    assert mask.sum() > array.any(axis=0).sum() + 4000
    for channel, levels in zip(array, told["object"]["channels"], strict=True):
        values = channel[mask].astype(np.float64)
        assert levels["number"] == mask.sum()
        assert levels["values"] == np.quantile(values, QUANTILES, method="inverted_cdf").tolist()
        assert levels["mean"] == pytest.approx(values.mean(), rel=1e-12)
        assert levels["std"] == pytest.approx(values.std(), rel=1e-12)
    plain = write_levels(f"file://{folder}/in", folder / "plain").read_text()
    assert json.loads(plain) == told | {"object": None}


def read_holes(folder, told):
    url = f"file://{folder}/levels.json.holes"
    return open_holes(url, told["object"]["holes_sha256"], Storage())


def test_the_holes_of_any_box_are_read(made):
    array, folder, told = made
    inside = array.any(axis=0)
    expected = filled(inside)
    holes = read_holes(folder, told)
    assert holes.bounds == BoundingBox(START, (33, 35, 46))
    generator = np.random.default_rng(2)
    for _ in range(60):
        ends = [np.sort(generator.choice(n + 1, 2, replace=False)) for n in inside.shape]
        part = tuple(slice(*end) for end in ends)
        box = BoundingBox.of_intervals(ends).translate(START)
        found = inside[part].copy()
        holes.fill(found, box, 10.0)
        np.testing.assert_array_equal(found, expected[part])


def test_a_volume_without_holes_has_no_folder(tmp_path, capsys):
    array = np.pad(np.ones((6, 6, 6), np.uint8), 2)
    write_volume(tmp_path / "in", array)
    to = str(tmp_path / "levels.json")
    assert main(["levels", str(tmp_path / "in"), "--object", "--to", to]) == 0
    told = json.loads((tmp_path / "levels.json").read_text())
    assert told["object"]["holes_sha256"] is None
    assert told["object"]["channels"][0]["number"] == 216
    assert not (tmp_path / "levels.json.holes").exists()
    assert main(["levels", str(tmp_path / "in"), "--to", to]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["levels", str(tmp_path / "in"), "--to", to, "--overwrite"]) == 0
    assert json.loads((tmp_path / "levels.json").read_text())["object"] is None


def test_the_command_makes_the_same_as_its_stages(made):
    _, folder, told = made
    to = folder / "other.json"
    assert main(["levels", f"{folder}/in", "--object", "--to", str(to)]) == 0
    assert json.loads(to.read_text()) == told
    names = sorted(path.name for path in (folder / "other.json.holes").iterdir())
    assert names == sorted(path.name for path in (folder / "levels.json.holes").iterdir())
    assert not list((folder / "other.json.parts").glob("counts/*"))
    command = ["levels", f"{folder}/in", "--to", str(to), "--overwrite"]
    assert main(command) == 0
    assert json.loads(to.read_text()) == told | {"object": None}
    assert not list((folder / "other.json.holes").glob("*"))


def test_zeros_throughout(tmp_path):
    url = write_volume(tmp_path / "in", np.zeros((5, 6, 7), np.uint8))
    told = json.loads(write_levels(url, tmp_path, finds_object=True).read_text())
    assert (told["nonzero"], told["object"]) == (None, None)


def one_piece(holes, box):
    """An index of one piece, and what its file holds."""
    there = box_of_holes(holes, box)
    bits = pack_bits(holes[there.slices_in(box)])
    piece = {"start": there.start, "stop": there.stop, "sha256": hashlib.sha256(bits).hexdigest()}
    return {
        "start": box.start,
        "stop": box.stop,
        "piece_shape": box.shape,
        "pieces": {0: piece},
    }, compress_bits(bits)


@pytest.mark.parametrize("content", [None, b"", b"\0", "torn", "longer"])
def test_damaged_holes_are_refused_where_they_are_needed(content, tmp_path):
    holes = np.zeros((6, 7, 9), bool)
    holes[2:4, 3, 1:8] = True
    box = BoundingBox(START, (9, 2, 11))
    index, whole = one_piece(holes, box)
    text = HolesIndex.model_validate(index).model_dump_json()
    (tmp_path / "index.json").write_text(text)
    content = {"torn": whole[:-3], "longer": compress_bits(b"\0" * 40)}.get(content, content)
    if content is not None:
        (tmp_path / "000000000000.bits").write_bytes(content)
    found = open_holes(tmp_path.as_uri(), hashlib.sha256(text.encode()).hexdigest(), Storage())
    elsewhere = BoundingBox(START, (4, 2, 11))
    found.fill(np.zeros(elsewhere.shape, bool), elsewhere, 10.0)
    with pytest.raises(PermanentReadError, match="Copy the folder again, or make it again"):
        found.fill(np.zeros(box.shape, bool), box, 10.0)
    (tmp_path / "000000000000.bits").write_bytes(whole)
    inside = np.zeros(box.shape, bool)
    found.fill(inside, box, 10.0)
    np.testing.assert_array_equal(inside, holes)
    with pytest.raises(PermanentReadError, match="of another volume, or the volume was changed"):
        found.fill(np.ones(box.shape, bool), box, 10.0)
