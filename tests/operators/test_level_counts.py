"""Counting against NumPy on the whole volume, however it is cut."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from helpers import vary_each, write_levels, write_volume
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from beam_inference.beam.stage_runner import run_stages
from beam_inference.cli.main import main
from beam_inference.config.formats import OutputSpec
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.stage_records import StageRecords
from beam_inference.launch.count_levels import plan_levels
from beam_inference.operators import level_counts
from beam_inference.operators.distributions import QUANTILES
from beam_inference.operators.integer_counts import count_values, mean_and_std, values_at
from beam_inference.operators.level_counts import (
    box_of_nonzero,
    chunks_to_count,
    hash_of_some_blocks,
)
from beam_inference.operators.level_stages import plan_level_stages
from beam_inference.operators.levels import Levels
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output, open_output

INPUT = (np.random.default_rng(3).gamma(2, 20, (40, 48, 50)).clip(0, 255)).astype(np.uint8)
INPUT += np.arange(40, dtype=np.uint8)[:, None, None]
INPUT[7] = 90  # a blank section
START = (3, -5, 2)
ARRAYS = st.sampled_from(["uint8", "int8", "uint16", "int16"]).flatmap(
    lambda dtype: hnp.arrays(dtype, st.tuples(st.integers(1, 2), *[st.integers(1, 4)] * 3))
)


@given(ARRAYS)
def test_quantiles_means_and_deviations_are_numpys(array):
    for section, counts in zip(array.swapaxes(0, 1), count_values(array)[0], strict=True):
        expected = np.quantile(section, QUANTILES, method="inverted_cdf")
        assert values_at(QUANTILES, counts, array.dtype) == expected.tolist()
        expected = (section.mean(dtype=np.float64), section.std(dtype=np.float64))
        assert mean_and_std(counts, array.dtype) == pytest.approx(expected, rel=1e-12, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(1, 2**52)), min_size=1, max_size=40))
def test_sums_beyond_64_bits_are_exact(pairs):
    counts = np.zeros(65536, np.int64)
    for value, count in pairs:
        counts[value] = count
    there = [(value, count) for value, count in enumerate(counts.tolist()) if count]
    number = sum(count for _, count in there)
    mean = Fraction(sum(value * count for value, count in there), number)
    variance = sum(count * (value - mean) ** 2 for value, count in there) / number
    assert mean_and_std(counts, np.dtype(np.uint16)) == (float(mean), math.sqrt(variance))


def test_quantiles_of_many_voxels_are_exact():
    # of which 0.999 are 0.001 more than a whole number, which float64 does not tell
    number = 10**15 - 1
    for quantile in QUANTILES[1:-1]:
        rank = math.ceil(Fraction(str(quantile)) * number)
        for below, expected in ((rank, 0), (rank - 1, 1)):
            counts = np.array([below, number - below])
            assert values_at((quantile,), counts, np.dtype(np.uint8)) == [expected], quantile


def test_of_more_voxels_than_there_are_every_value_is_counted():
    counts = np.full(65536, 2**46, np.int64)  # 2^62 in all
    assert mean_and_std(counts, np.dtype(np.int16)) == (
        -0.5,
        math.sqrt((Fraction(65536) ** 2 - 1) / 12),
    )


def test_the_levels_are_the_same_however_a_volume_is_cut(tmp_path, monkeypatch):
    array = np.random.default_rng(1).normal(40_000, 9_000, (8, 30, 30)).astype(np.uint16)
    array[5] = 65_535
    url = write_volume(tmp_path / "in", array, START, block_shape=(4, 16, 16))
    text = write_levels(url, tmp_path / "whole").read_text()
    monkeypatch.setattr(level_counts, "CHUNK_VOXELS", 1)
    assert chunks_to_count(open_volume(url)).shape == (2, 2, 2)
    assert write_levels(url, tmp_path / "cut").read_text() == text
    told = json.loads(text)
    assert (told["mean"], told["std"]) == pytest.approx((array.mean(), array.std()), rel=1e-12)
    expected = np.stack([array.mean(axis=(1, 2)), array.std(axis=(1, 2))], axis=1)
    np.testing.assert_allclose(told["section_moments"], expected, rtol=1e-12)
    assert told["section_moments"][5] == [65_535, 0]


def test_the_levels_of_a_volume(tmp_path, monkeypatch):
    url = write_volume(tmp_path / "in", INPUT, START, block_shape=(16, 16, 16))
    to = tmp_path / "levels.json"
    monkeypatch.setattr(level_counts, "CHUNK_VOXELS", 20_000)  # several chunks on every axis
    assert main(["levels", url, "--to", str(to), "--direct_num_workers=2"]) == 0
    told = json.loads(to.read_text())
    assert (told["dtype"], told["start"], told["quantiles"]) == ("uint8", 3, list(QUANTILES))
    assert told["volume"] == np.quantile(INPUT, QUANTILES, method="inverted_cdf").tolist()
    assert told["sections"] == [
        np.quantile(z, QUANTILES, method="inverted_cdf").tolist() for z in INPUT
    ]
    assert (told["mean"], told["std"]) == (pytest.approx(INPUT.mean()), pytest.approx(INPUT.std()))
    expected = np.stack([INPUT.mean(axis=(1, 2)), INPUT.std(axis=(1, 2))], axis=1)
    np.testing.assert_allclose(told["section_moments"], expected, rtol=1e-12)
    assert not list(tmp_path.glob("levels.json.parts/counts/*"))
    before = to.read_text()
    assert main(["levels", url, "--to", str(to)]) == 0  # nothing is left to do
    for _ in range(2):  # what is done twice is the same
        assert write_levels(url, tmp_path / "here").read_text() == before == to.read_text()


def test_doubles_cannot_be_counted(tmp_path, capsys):
    write_volume(tmp_path / "in", INPUT.astype(np.int32), format="zarr3")
    assert main(["levels", str(tmp_path / "in"), "--to", str(tmp_path / "levels.json")]) == 2
    assert "holds int32" in capsys.readouterr().err
    assert not (tmp_path / "levels.json.parts").exists()


def test_what_is_no_number_has_no_levels(tmp_path, capsys):
    array = INPUT.astype(np.float32)
    array[3, 4, 5] = np.nan
    write_volume(tmp_path / "in", array)
    assert main(["levels", str(tmp_path / "in"), "--to", str(tmp_path / "levels.json")]) == 1
    assert "holds NaN or infinite values, with which no" in capsys.readouterr().out
    assert not (tmp_path / "levels.json").exists()


def masked_volume(tmp_path, dtype):
    """Two channels, and a mask at half their resolution that has nothing in some sections."""
    random = np.random.default_rng(4)
    array = (random.gamma(2, 20, (2, 24, 30, 40)) - 30).astype(dtype)
    mask = random.integers(0, 4, (12, 15, 20)).astype(np.uint8)
    mask[3:5] = 0
    write_volume(tmp_path / "in", array, block_shape=(8, 16, 16))
    write_volume(tmp_path / "mask", mask, voxel_size_nm=(20.0, 20.0, 20.0), block_shape=(4, 8, 8))
    return array, mask.repeat(2, 0).repeat(2, 1).repeat(2, 2)


@vary_each(
    dtype=["int8", "uint16", "float32"],
    flags_and_kept=[
        ([], lambda mask: mask != 0),
        (["--mask-above", "1", "--mask_below=2.5"], lambda mask: mask == 2),
        (["--mask-equals=1", "--mask-equals=3"], lambda mask: (mask == 1) | (mask == 3)),
        (["--mask-equals=2", "--mask-inverse"], lambda mask: mask != 2),
    ],
)
def test_levels_within_a_mask(tmp_path, monkeypatch, dtype, flags_and_kept):
    flags, holds = flags_and_kept
    monkeypatch.setattr(level_counts, "CHUNK_VOXELS", 4000)
    array, mask = masked_volume(tmp_path, dtype)
    kept = holds(mask)
    to = tmp_path / "levels.json"
    command = ["levels", str(tmp_path / "in"), "--mask", str(tmp_path / "mask"), *flags]
    assert main([*command, "--to", str(to)]) == 0
    told = json.loads(to.read_text())
    whole = array[:, kept].astype(np.float64)
    assert told["volume"] == np.quantile(whole, QUANTILES, method="inverted_cdf").tolist()
    assert (told["mean"], told["std"]) == pytest.approx((whole.mean(), whole.std()), rel=1e-12)
    for z, (mean, std) in enumerate(told["section_moments"]):
        part = array[:, z][:, kept[z]].astype(np.float64) if kept[z].any() else whole
        assert (mean, std) == pytest.approx((part.mean(), part.std()), rel=1e-12)
        if told["sections"] is not None:
            expected = np.quantile(part, QUANTILES, method="inverted_cdf")
            assert told["sections"][z] == expected.tolist()
    for channel, part, own in zip(array, told["channels"], told["without_zeros"], strict=True):
        for there, found in ((kept, part), (kept & (channel != 0), own)):
            values = channel[there].astype(np.float64)
            expected = np.quantile(values, QUANTILES, method="inverted_cdf")
            assert found["values"] == expected.tolist()
            assert (found["mean"], found["std"]) == pytest.approx((values.mean(), values.std()))
    assert told["nonzero"] is told["object"] is None
    assert told["mask"] == f"file://{tmp_path}/mask"


@pytest.mark.parametrize(
    ("flag", "holds"),
    [
        ("--mask-above=0", lambda mask: mask > 0),
        ("--mask-below=0", lambda mask: mask < 0),
        ("--mask-equals=0", lambda mask: mask == 0),
    ],
)
def test_zero_is_a_value_of_a_mask(tmp_path, flag, holds):
    random = np.random.default_rng(5)
    array = random.integers(0, 256, (8, 20, 20), dtype=np.uint8)
    mask = random.integers(-3, 3, array.shape).astype(np.int8)
    paths = [write_volume(tmp_path / "in", array), write_volume(tmp_path / "mask", mask)]
    to = tmp_path / "levels.json"
    assert main(["levels", paths[0], "--mask", paths[1], flag, "--to", str(to)]) == 0
    assert json.loads(to.read_text())["mean"] == pytest.approx(array[holds(mask)].mean())


def test_what_is_no_number_may_lie_beside_the_mask(tmp_path):
    array, mask = masked_volume(tmp_path, "float32")
    shutil.rmtree(tmp_path / "in")
    array[:, mask == 0] = np.nan
    write_volume(tmp_path / "in", array)
    to = tmp_path / "levels.json"
    command = ["levels", str(tmp_path / "in"), "--mask", str(tmp_path / "mask")]
    assert main([*command, "--to", str(to)]) == 0
    assert json.loads(to.read_text())["mean"] == pytest.approx(np.nanmean(array, dtype=np.float64))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mask-above", "1"], "--mask-above is of a mask: give --mask, too"),
        (["--mask", "MASK", "--object"], "--object finds where .* --mask says so: give one"),
        (["--mask", "MASK", "--mask-above=3", "--mask-below=2"], "no value is above 3"),
        (["--mask", "MASK", "--mask-equals=9.5"], "9.5 is not a value of"),
        (["--mask", "MASK", "--mask-above=x"], "x is not a number"),
        (["--mask", "absent"], "--mask: no volume at .*absent"),
        (["--mask", "FAR"], "--mask .*far, which is .* lies wholly beside .*in"),
        (["--mask", "MASK", "--mask-above=200"], "--mask keeps no voxel of .*in: there is nothing"),
    ],
)
def test_masks_that_cannot_be_are_refused(tmp_path, capsys, flags, message):
    masked_volume(tmp_path, "uint8")
    write_volume(tmp_path / "far", np.ones((4, 4, 4), np.uint8), (0, 0, 99))
    names = {"MASK": str(tmp_path / "mask"), "FAR": str(tmp_path / "far")}
    words = [names.get(word, word) for word in flags]
    to = tmp_path / "levels.json"
    try:
        code = main(["levels", str(tmp_path / "in"), "--to", str(to), *words])
    except SystemExit as end:
        code = end.code
    assert code == (1 if "=200" in flags[-1] else 2)
    told = capsys.readouterr()
    assert re.search(message, told.out + told.err)
    assert not to.exists()


def test_another_mask_is_another_count(tmp_path, capsys):
    _, mask = masked_volume(tmp_path, "uint8")
    command = ["levels", str(tmp_path / "in"), "--to", str(tmp_path / "levels.json")]
    command += ["--mask", str(tmp_path / "mask")]
    assert main(command) == 0
    for words in ([*command, "--mask-equals=2"], command[:-2]):
        assert main(words) == 2
        assert "holds records of another job (what differs: " in capsys.readouterr().err
    shutil.rmtree(tmp_path / "mask")
    write_volume(tmp_path / "mask", 3 - mask[::2, ::2, ::2], voxel_size_nm=(20.0, 20.0, 20.0))
    assert main(command) == 2
    assert "(what differs: mask_values)" in capsys.readouterr().err


def test_a_part_that_a_mask_does_not_tell_of_is_refused(tmp_path):
    masked_volume(tmp_path, "uint8")
    to = tmp_path / "levels.json"
    command = ["levels", str(tmp_path / "in"), "--mask", str(tmp_path / "mask"), "--to", str(to)]
    assert main(command) == 0
    levels = Levels.model_validate_json(to.read_text())
    assert len(levels.channels_of("volume")) == len(levels.channels_of("nonzero")) == 2
    with pytest.raises(LookupError, match="counted within a mask, .* knows no nonzero_box: write"):
        levels.channels_of("nonzero_box")


def with_background(dtype):
    """Two channels of values around zero in one corner of a volume of zeros."""
    array = np.zeros((2, 12, 40, 40), dtype)
    noise = np.random.default_rng(1).normal(3, 40, (2, 5, 20, 17))
    array[:, 3:8, 11:31, 20:37] = noise.astype(dtype)
    array[0, 3, 11:], array[:, 4, 12, 30] = 0, 0
    return array


@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_levels_of_channels_and_of_what_is_not_zero(tmp_path, monkeypatch, dtype):
    array = with_background(dtype)
    url = write_volume(tmp_path / "in", array, START, block_shape=(8, 32, 32))
    text = write_levels(url, tmp_path / "whole").read_text()
    monkeypatch.setattr(level_counts, "CHUNK_VOXELS", 1)
    assert write_levels(url, tmp_path / "cut").read_text() == text
    told = Levels.model_validate_json(text)
    assert Levels.model_validate_json(told.model_dump_json()) == told
    there = np.argwhere((array != 0).any(axis=0))
    start = there.min(axis=0) + START
    stop = there.max(axis=0) + START + 1
    assert (told.nonzero.start, told.nonzero.stop) == (tuple(start), tuple(stop))
    inside = array[(slice(None), *told.nonzero.box.translate((-3, 5, -2)).slices_in(WHOLE))]
    assert told.volume == quantiles_of(array)
    assert (told.mean, told.std) == pytest.approx(moments_of(array), rel=1e-12)
    assert (told.sections is None) == (dtype == "float32")
    expected = [moments_of(array[:, z]) for z in range(12)]
    np.testing.assert_allclose(told.section_moments, expected, rtol=1e-12, atol=1e-12)
    without_zeros = [channel[channel != 0] for channel in array]
    for of, levels in (
        (array, told.channels),
        (inside, told.nonzero.channels),
        (without_zeros, told.without_zeros),
    ):
        for channel, found in zip(of, levels, strict=True):
            assert found.values == quantiles_of(channel)
            assert (found.mean, found.std) == pytest.approx(moments_of(channel), rel=1e-12)
            for low, high in ((1, 15), (0, 16), (8, 13)):
                expected = moments_of(channel.clip(found.values[low], found.values[high]))
                assert found.clipped_moments(low, high) == pytest.approx(
                    expected, rel=1e-12, abs=1e-12
                )


WHOLE = BoundingBox((0, 0, 0), (12, 40, 40))


def quantiles_of(array):
    return np.quantile(array, QUANTILES, method="inverted_cdf").tolist()


def moments_of(array):
    return array.mean(dtype=np.float64), array.std(dtype=np.float64)


def test_a_volume_of_zeros_has_no_box(tmp_path):
    url = write_volume(tmp_path / "in", np.zeros((4, 8, 8), np.float32))
    told = Levels.model_validate_json(write_levels(url, tmp_path).read_text())
    assert (told.nonzero, told.mean, told.std) == (None, 0, 0)


@given(
    hnp.arrays("u1", st.tuples(st.integers(1, 2), *[st.integers(1, 5)] * 3), elements=st.just(0)),
    st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=3),
)
def test_the_box_of_what_is_not_zero(array, places):
    for z, y, x in places:
        array[-1, z % array.shape[1], y % array.shape[2], x % array.shape[3]] = 1
    box = BoundingBox((3, -5, 2), tuple(np.add((3, -5, 2), array.shape[1:]).tolist()))
    there = np.argwhere(array.any(axis=0))
    found = box_of_nonzero(array, box)
    if not places:
        assert found.shape == (0, 3)
    else:
        assert found.tolist() == [
            (there.min(axis=0) + START).tolist(),
            (there.max(axis=0) + START + 1).tolist(),
        ]


def test_what_is_gone_is_counted_again_and_so_is_what_was_changed(tmp_path, capsys):
    url = write_volume(tmp_path / "in", INPUT[:3], block_shape=(16, 16, 16))
    to = tmp_path / "levels.json"
    assert main(["levels", url, "--to", str(to)]) == 0
    first = to.read_text()
    to.unlink()
    assert main(["levels", url, "--to", str(to)]) == 0
    assert to.read_text() == first
    open_output(spec_at(url)).write(
        BoundingBox((0, 0, 0), (3, 48, 50)), np.full((1, 3, 48, 50), 9, np.uint8)
    )
    assert main(["levels", url, "--to", str(to)]) == 2
    assert "holds records of another job (what differs: input_values)" in capsys.readouterr().err
    assert main(["levels", url, "--to", str(to), "--overwrite"]) == 0
    assert json.loads(to.read_text())["volume"] == [9] * len(QUANTILES)


@pytest.mark.parametrize("finds_object", [False, True])
def test_a_count_that_was_interrupted_goes_on(tmp_path, finds_object):
    url = write_volume(tmp_path / "in", INPUT[:3], block_shape=(16, 16, 16))
    to = tmp_path / "levels.json"
    plan = plan_levels(
        url,
        str(to),
        scale=0,
        channel=None,
        storage=Storage(),
        beside=(),
        finds_object=finds_object,
    )
    StageRecords(plan.job).begin()
    assert run_stages(replace(plan.job, stages=plan.job.stages[:1]), [], 1).is_complete
    first = {
        path: path.stat().st_mtime_ns for path in to.parent.glob("*.parts/**/values/**/*.json")
    }
    assert first
    assert main(["levels", url, "--to", str(to), *(["--object"] if finds_object else [])]) == 0
    assert first == {path: path.stat().st_mtime_ns for path in first}
    assert json.loads(to.read_text())["start"] == 0


def test_a_file_has_the_name_that_was_given(tmp_path):
    url = write_volume(tmp_path / "in", INPUT, block_shape=(16, 16, 16))
    to = tmp_path / "50 % ä.json"
    assert main(["levels", url, "--to", str(to)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"in", to.name, f"{to.name}.parts"}
    assert main(["levels", url, "--to", str(to)]) == 0


@pytest.mark.parametrize("damage", ["exchanged", "torn", "gone"])
def test_counts_that_are_not_those_of_their_chunk_are_not_believed(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(level_counts, "CHUNK_VOXELS", 1)
    url = write_volume(tmp_path / "in", INPUT, block_shape=(16, 16, 16))
    count, write = plan_level_stages(
        url, f"file://{tmp_path}/levels.json", scale=0, channel=None, storage=Storage()
    )
    for index in range(count.count):
        count.make_worker()(index)
    one, *_, other = sorted((tmp_path / "levels.json.parts" / "counts").iterdir())
    content = one.read_bytes()
    if damage == "exchanged":
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif damage == "torn":
        one.write_bytes(content[:-9])
    else:
        one.unlink()
    with pytest.raises(StateError, match=f"{one.name} cannot be used: .* --overwrite"):
        write.make_worker()(0)
    assert not (tmp_path / "levels.json").exists()


def test_a_copy_of_a_volume_holds_the_same_and_a_changed_block_is_noticed(tmp_path):
    url = write_volume(tmp_path / "in", INPUT, START, block_shape=(16, 16, 16))
    before = hash_of_some_blocks(open_volume(url))
    shutil.copytree(tmp_path / "in", tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*"):
        os.utime(path, (0, 0))
    assert hash_of_some_blocks(open_volume(f"file://{tmp_path}/copy")) == before
    write_volume(tmp_path / "brighter", INPUT + (INPUT == 90), START, block_shape=(16, 16, 16))
    assert hash_of_some_blocks(open_volume(f"file://{tmp_path}/brighter")) != before
    blocks = sorted((tmp_path / "copy/10_10_10").iterdir())
    noticed = 0
    for block in blocks:
        content = block.read_bytes()
        block.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        noticed += hash_of_some_blocks(open_volume(f"file://{tmp_path}/copy")) != before
        block.write_bytes(content)
    assert noticed == level_counts.SOME_BLOCKS < len(blocks)
    # of blocks that are large, fewer are looked at
    assert hash_of_some_blocks(open_volume(url), most_voxels=1) != before
    for block in blocks:
        block.write_bytes(block.read_bytes()[:9])
    with pytest.raises(VolumeError, match="cannot read"):
        hash_of_some_blocks(open_volume(f"file://{tmp_path}/copy"))
    assert main(["levels", str(tmp_path / "copy"), "--to", str(tmp_path / "levels.json")]) == 2


def spec_at(url):
    return OutputSpec(
        url,
        "precomputed",
        "uint8",
        1,
        BoundingBox((0, 0, 0), (3, 48, 50)),
        (16, 16, 16),
        (10.0,) * 3,
    )


def test_of_shards_blocks_are_counted(tmp_path):
    box = BoundingBox((0, 0, 0), (64, 64, 64))
    spec = OutputSpec(
        f"file://{tmp_path}/v",
        "zarr3",
        "uint8",
        1,
        box,
        (16, 16, 16),
        (10.0,) * 3,
        shard_shape=(64,) * 3,
    )
    create_output(spec).write(box, np.ones((1, 64, 64, 64), np.uint8))
    assert chunks_to_count(open_volume(spec.url)).chunk_shape[0] == 16
