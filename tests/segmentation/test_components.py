"""The stages that make components: the output, the table, and what is refused."""

import csv
import io
from dataclasses import replace
from functools import partial
from itertools import count

import cc3d
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.label_volumes import read_table, rows_by_brute_force, run_stages, with_layout, write

from beam_inference.errors import AlignmentError, ConfigError, StateError, VolumeError
from beam_inference.geometry.zyx import ceil_div
from beam_inference.segmentation import table
from beam_inference.segmentation.component_job import plan_components
from beam_inference.segmentation.component_stages import component_stages
from beam_inference.volumes.kvstores import open_kvstore
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output

_numbers = count()


def make(url, stages=component_stages, **options):
    """Run all stages, without Beam: the plan, and the output's voxels."""
    options = with_layout({"threshold": 1} | options)
    return run_stages(plan_components(url, f"memory://out{next(_numbers)}", **options), stages)


def without_small(labels, min_size):
    """Labels of components that are large enough, renumbered in the same order."""
    sizes = np.bincount(labels.ravel())
    stays = sizes >= min_size
    stays[0] = False
    return np.where(stays, np.cumsum(stays), 0)[labels]


@settings(deadline=None, max_examples=8)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20)),
    chunk_shapes=st.lists(
        st.tuples(*[st.sampled_from([4, 8, 12, 24])] * 3), min_size=2, max_size=2
    ),
    connectivity=st.sampled_from([6, 18, 26]),
    min_size=st.sampled_from([1, 2, 5, 40]),
    density=st.sampled_from([0.1, 0.25, 0.5]),
    multilabel=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_output_is_the_whole_volumes_whatever_the_chunks(
    shape, chunk_shapes, connectivity, min_size, density, multilabel, seed
):
    random = np.random.default_rng(seed)
    values = (random.integers(1, 4, shape) * (random.random(shape) < density)).astype(np.uint16)
    url = write(values)
    expected = without_small(
        cc3d.connected_components(
            values if multilabel else (values >= 2).astype(np.uint8), connectivity=connectivity
        ),
        min_size,
    )
    tables = []
    for chunk_shape in chunk_shapes:
        plan, output = make(
            url,
            threshold=None if multilabel else 2,
            connectivity=connectivity,
            min_size=min_size,
            chunk_shape=chunk_shape,
            block_shape=(4, 4, 4),
        )
        np.testing.assert_array_equal(output, expected)  # equal, and not only up to names
        tables += read_table(plan)
        assert table.count_of(plan) == expected.max()
        assert open_kvstore(plan.scratch_url).list().result() == []
    assert tables[0] == tables[1]
    rows = [[float(cell) for cell in row] for row in list(csv.reader(io.StringIO(tables[0])))[1:]]
    brute = list(rows_by_brute_force(expected, (3, -5, 2), (40.0, 8.0, 4.0)))
    np.testing.assert_allclose(np.reshape(rows, (-1, 11)), np.reshape(brute, (-1, 11)), atol=6e-4)


def test_a_long_table_comes_in_parts():
    values = (np.random.default_rng(1).random((20, 17, 23)) < 0.1).astype(np.uint8)
    url = write(values)
    whole, _ = make(url, chunk_shape=(24, 24, 24))
    (text,) = read_table(whole)
    header, *lines = text.splitlines(keepends=True)
    stages = partial(component_stages, lines_per_part=100)
    for chunk_shape in ((8, 8, 8), (24, 8, 24)):
        plan, _ = make(url, stages, chunk_shape=chunk_shape)
        parts = read_table(plan, ceil_div(len(lines), 100))
        assert parts == [
            header + "".join(lines[start : start + 100]) for start in range(0, len(lines), 100)
        ]


def test_a_volume_of_nothing_has_an_empty_table():
    plan, output = make(write(np.zeros((9, 5, 9), np.uint8)), chunk_shape=(8, 8, 8))
    assert not output.any()
    assert read_table(plan)[0].count("\n") == 1
    assert table.count_of(plan) == 0


@pytest.mark.parametrize("format", ["zarr2", "zarr3", "n5", "ome_zarr"])
def test_other_formats_of_the_output(format):
    values = (np.random.default_rng(2).random((11, 20, 18)) < 0.2).astype(np.float32)
    start = (8, 0, 16) if format == "ome_zarr" else (0, 0, 0)
    plan, output = make(
        write(values, start), format=format, chunk_shape=(8, 16, 8), block_shape=(8, 8, 8)
    )
    expected = cc3d.connected_components(values > 0, connectivity=6)
    np.testing.assert_array_equal(output, expected)
    assert open_volume(plan.output.url).bounds.start == start
    assert "8," in read_table(plan)[0]


def test_shards():
    values = (np.random.default_rng(2).random((20, 20, 40)) < 0.2).astype(np.uint8)
    url = write(values)
    plan, output = make(
        url, shard_shape=(16, 16, 16), block_shape=(8, 8, 8), chunk_shape=(16, 16, 32)
    )
    np.testing.assert_array_equal(output, cc3d.connected_components(values, connectivity=6))
    assert plan.output.write_shape == (16, 16, 16)
    with pytest.raises(AlignmentError, match="Nearest above: 32x16x16"):
        make(url, shard_shape=(16, 16, 16), block_shape=(8, 8, 8), chunk_shape=(24, 16, 16))


def test_channels_thresholds_and_nan():
    values = np.zeros((2, 8, 8, 8), np.float32)
    values[1, :2] = 0.7
    values[1, 4:6] = 0.3
    values[1, 7] = np.nan
    url = write(values)
    with pytest.raises(ConfigError, match="say which with --channel"):
        make(url)
    assert make(url, channel=1, threshold=0.7)[1].max() == 1
    assert make(url, channel=1, threshold=0.3)[1].max() == 2
    assert make(url, channel=0, threshold=0.3)[1].max() == 0
    integers = np.full((4, 4, 4), 2**53 + 1, np.uint64)
    assert make(write(integers), threshold=2.0**53 + 2)[1].max() == 0
    assert make(write(integers), threshold=1.5)[1].max() == 1
    signed = np.array([[[-2, -2, 0, -3, 3]]], np.int32)
    assert make(write(signed, format="zarr3", start=(0, 0, 0)), threshold=None)[1].tolist() == [
        [[1, 1, 0, 2, 3]]
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"channel": 1}, ConfigError, "has the channels 0 … 0"),
        ({"threshold": float("nan")}, ConfigError, "is no number"),
        ({"chunk_shape": (12, 8, 8)}, AlignmentError, "Nearest above: 16x8x8"),
        ({"chunk_shape": (2**11, 2**10, 2**10)}, ConfigError, "fewer than 2\\^31"),
        ({"format": "zarr3"}, ConfigError, "do not start at 0"),
        (
            {"format": "n5", "shard_shape": (16, 16, 16)},
            ConfigError,
            "n5 holds a file for each block",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        make(write(np.zeros((9, 9, 9), np.uint8)), **options)


def test_more_that_is_refused():
    with pytest.raises(ConfigError, match="takes a segmentation, of integers"):
        make(write(np.zeros((9, 9, 9), np.float32)), threshold=None)
    with pytest.raises(ConfigError, match=r"\[0, 0, 0 to 17, 13, 9\) is written, of which these"):
        make(write(np.zeros((9, 9, 9), np.uint8), (8, 4, 0)), format="zarr3")
    url = write(np.zeros((9, 9, 9), np.uint8))
    with pytest.raises(ConfigError, match="the same place"):
        plan_components(url, url, **with_layout({"threshold": 1}))
    with pytest.raises(VolumeError, match="no volume at"):
        make("memory://nowhere")
    target = f"memory://out{next(_numbers)}"
    create_output(plan_components(url, target, **with_layout({"threshold": 1})).output)
    with pytest.raises(VolumeError, match="block_shape is"):
        plan_components(url, target, **with_layout({"threshold": 1, "block_shape": (4, 4, 4)}))


def test_scratch_files_that_are_gone_or_damaged_are_told_of():
    url = write((np.random.default_rng(0).random((9, 9, 9)) < 0.3).astype(np.uint8))
    target = "memory://damaged"
    plan = replace(
        plan_components(url, target, **with_layout({"threshold": 1, "chunk_shape": (8, 8, 8)})),
        scratch_url=f"{target}/s",
    )
    label, match, *_ = component_stages(plan)
    for index in range(label.count):
        label.make_worker()(index)
    store = open_kvstore(plan.scratch_url)
    key = "faces/000000000/000000000003"
    whole = store.read(key).result().value
    store.write(key, whole[:-30]).result()
    with pytest.raises(StateError, match=f"{key} is damaged.*--overwrite"):
        match.make_worker()(2)
    store.write(key, whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]).result()
    with pytest.raises(StateError, match=f"{key} is damaged"):
        match.make_worker()(2)
    store.write(key, None).result()
    with pytest.raises(StateError, match=f"{key} is absent"):
        match.make_worker()(2)


def test_the_description_holds_all_that_the_caller_decides():
    url = write(np.zeros((20, 9, 9), np.uint16))
    descriptions = [
        plan_components(
            url, "memory://other", **with_layout({"threshold": 1} | options)
        ).description
        for options in (
            {},
            {"threshold": 2},
            {"threshold": None},
            {"connectivity": 26},
            {"min_size": 2},
            {"chunk_shape": (8, 16, 16)},
            {"block_shape": (8, 8, 4)},
            {"channel": 0, "block_shape": (4, 8, 8)},
            {"shard_shape": (8, 16, 16), "chunk_shape": (8, 16, 16)},
        )
    ]
    assert len({str(each) for each in descriptions}) == len(descriptions)
    assert (
        0
        < plan_components(url, "memory://other", **with_layout({"threshold": 1})).chunk_memory_bytes
        < 100_000
    )


@pytest.mark.parametrize(
    "labels",
    [
        np.full((8, 8, 8), 2_000_000_000, np.uint32),
        np.full((8, 8, 8), 500, np.uint32),
        np.zeros((1, 1, 1), np.uint32),
        np.zeros((8, 8, 8), np.float32),
    ],
    ids=["far", "near", "small", "floats"],
)
def test_labels_that_the_loop_would_read_beyond_its_arrays_are_refused(labels):
    def stages(plan):
        for stage in component_stages(plan):
            if stage.name == "relabel":
                plan.scratch().write("labels", 0, labels=labels)
            yield stage

    image = np.random.default_rng(0).integers(0, 2, (8, 16, 16)).astype(np.uint8)
    with pytest.raises(StateError, match="are not those that an earlier stage wrote"):
        make(write(image), stages, chunk_shape=(8, 8, 8))
