"""The stages of a segmentation, against the whole volume segmented at once, edge by edge."""

import csv
import io
import itertools

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles.label_volumes import read_table, rows_by_brute_force, run_stages, with_layout, write

from beam_inference.errors import ConfigError
from beam_inference.segmentation import table
from beam_inference.segmentation.segment_job import plan_segmentation
from beam_inference.segmentation.segment_stages import segment_stages
from beam_inference.volumes.kvstores import open_kvstore

_numbers = itertools.count()


def edges_of(affinities, to_next):
    """Every edge of a volume: (affinity, axis, first voxel, second voxel), voxels in C order."""
    shape = affinities.shape[1:]
    places = np.arange(np.prod(shape)).reshape(shape)
    for axis in range(3):
        for voxel in np.ndindex(*shape):
            other = tuple(v + (a == axis) for a, v in enumerate(voxel))
            if other[axis] < shape[axis]:
                value = affinities[(axis, *(voxel if to_next else other))]
                if not np.isnan(value):
                    yield float(value), axis, int(places[voxel]), int(places[other])


def root(parent, place):
    while parent[place] != place:
        place = parent[place]
    return place


def join(parent, one, other):
    one, other = sorted((root(parent, one), root(parent, other)))
    parent[other] = one


def fragments_by_brute_force(affinities, low, high, to_next):
    """The least voxel of each voxel's fragment; -1 for background."""
    size = affinities[0].size
    best = {}
    parent = list(range(size))
    edges = [edge for edge in edges_of(affinities, to_next) if edge[0] >= low]
    for edge in edges:
        for voxel in edge[2:]:
            # of equal ones: the axis, then the place
            best[voxel] = max(best.get(voxel, edge), edge)
    for edge in [*best.values(), *(edge for edge in edges if edge[0] >= high)]:
        join(parent, *edge[2:])
    return np.array([root(parent, voxel) if voxel in best else -1 for voxel in range(size)])


def segments_by_brute_force(affinities, fragments, threshold, to_next):
    """The least voxel of each voxel's segment, by joining the best pair of all again and again."""
    part = fragments.copy()
    edges = [
        edge for edge in edges_of(affinities, to_next) if min(part[edge[2]], part[edge[3]]) >= 0
    ]
    while True:
        pairs = {}
        for value, _, one, other in edges:
            if part[one] != part[other]:
                pair = (min(part[one], part[other]), max(part[one], part[other]))
                pairs.setdefault(pair, []).append(value)
        best = max(((np.mean(values), *pair) for pair, values in pairs.items()), default=(-np.inf,))
        if best[0] < threshold:
            return part
        part[part == best[2]] = best[1]


def as_ids(segments, fragments, shape, min_size):
    """Ids as the stages give them: the rank of a segment's first fragment among all fragments."""
    ranks = {name: rank for rank, name in enumerate(np.unique(fragments[fragments >= 0]), 1)}
    names, counts = np.unique(segments, return_counts=True)
    kept = {
        name for name, count in zip(names, counts, strict=True) if count >= min_size and name >= 0
    }
    return np.array([ranks[name] if name in kept else 0 for name in segments]).reshape(shape)


def make(url, **options):
    """Run all stages, without Beam: the plan, and the output's voxels."""
    target = f"memory://segmented{next(_numbers)}"
    return run_stages(plan_segmentation(url, target, **with_layout(options)), segment_stages)


@settings(deadline=None, max_examples=12, phases=[Phase.generate])
@given(
    shape=st.tuples(*[st.integers(1, 9)] * 3),
    chunk_shapes=st.lists(st.tuples(*[st.sampled_from([2, 4, 6, 10])] * 3), min_size=2, max_size=2),
    dtype=st.sampled_from(["uint8", "float32"]),
    values=st.sampled_from([3, 16, 1000]),
    low=st.sampled_from([0.0, 0.2, 0.5]),
    high=st.sampled_from([0.7, 0.95, 2]),
    threshold=st.sampled_from([0.2, 0.45, 0.6, 0.8]),
    min_size=st.sampled_from([1, 4]),
    to_next=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_output_is_the_whole_volumes_whatever_the_chunks(
    shape, chunk_shapes, dtype, values, low, high, threshold, min_size, to_next, seed
):
    random = np.random.default_rng(seed)
    affinities = random.integers(0, values, (3, *shape)) / (values - 1)  # few values: many ties
    scale = 255 if dtype == "uint8" else 1
    affinities = (
        np.rint(affinities * 255)
        if dtype == "uint8"
        else np.ldexp(np.rint(np.ldexp(affinities, 10)), -10)
    )
    low = low * scale
    high = min(high * scale, 256) if dtype == "uint8" else high
    threshold = threshold * scale
    if dtype == "float32":
        affinities[random.random(affinities.shape) < 0.05] = np.nan
    fragments = fragments_by_brute_force(affinities, low, high, to_next)
    segments = segments_by_brute_force(affinities, fragments, threshold, to_next)
    expected = as_ids(segments, fragments, shape, min_size)
    url = write(affinities.astype(dtype))
    tables = []
    for chunk_shape in chunk_shapes:
        plan, output = make(
            url,
            threshold=threshold,
            low=low,
            high=high,
            to_next=to_next,
            min_size=min_size,
            chunk_shape=chunk_shape,
            block_shape=(2, 2, 2),
        )
        np.testing.assert_array_equal(output, expected)
        tables += read_table(plan)
        assert table.count_of(plan) == len(np.unique(expected[expected > 0]))
        assert open_kvstore(plan.scratch_url).list().result() == []
    assert tables[0] == tables[1]
    rows = [[float(cell) for cell in row] for row in list(csv.reader(io.StringIO(tables[0])))[1:]]
    brute = list(rows_by_brute_force(expected, (3, -5, 2), (40.0, 8.0, 4.0)))
    np.testing.assert_allclose(np.reshape(rows, (-1, 11)), np.reshape(brute, (-1, 11)), atol=6e-4)


def test_channels_shards_formats_and_background():
    random = np.random.default_rng(1)
    affinities = random.integers(0, 256, (4, 11, 12, 13)).astype(np.uint8)
    options = {
        "threshold": 150,
        "low": 60,
        "high": 250,
        "chunk_shape": (8, 8, 8),
        "block_shape": (4, 4, 4),
    }
    _, expected = make(write(affinities[[2, 3, 0]]), **options)
    url = write(affinities, start=(0, 0, 0))
    _, output = make(url, channels=(2, 3, 0), **options, format="zarr3", shard_shape=(8, 8, 8))
    np.testing.assert_array_equal(output, expected)
    darker = write(np.minimum(affinities, 254))
    assert make(darker, **options | {"low": 255, "high": 256})[1].max() == 0
    assert make(url, **options | {"low": 0, "high": 0, "threshold": 256})[1].max() == 1, (
        "all of it is one fragment"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": (0, 1, 3)}, "has the channels 0 … 2"),
        ({"channels": (0, 1, 1)}, "three different ones"),
        ({"threshold": float("nan")}, "--threshold nan is no number"),
        ({"high": float("inf")}, "--high inf is no number"),
        ({"low": 3}, "--low 3 is more than --high 2"),
        (
            {"threshold": 2000, "dtype": np.float32},
            "--threshold 2000: affinities that are not integers",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(options, message):
    url = write(np.zeros((3, 4, 4, 4), options.get("dtype", np.uint8)))
    limits = {"threshold": 1, "low": 1, "high": 2} | {
        name: options[name] for name in options if name != "dtype"
    }
    with pytest.raises(ConfigError, match=message):
        make(url, **limits)


def test_integers_that_are_no_affinities_are_refused():
    with pytest.raises(ConfigError, match="holds int16: affinities are uint8"):
        make(
            write(np.zeros((3, 4, 4, 4), np.int16), format="zarr3", start=(0, 0, 0)),
            threshold=1,
            low=1,
            high=2,
        )


def test_the_description_holds_all_that_the_caller_decides():
    url = write(np.zeros((4, 20, 9, 9), np.uint16))
    basis = {"threshold": 3, "low": 1, "high": 5}
    descriptions = [
        plan_segmentation(url, "memory://other", **with_layout(basis | options)).description
        for options in (
            {},
            {"threshold": 2},
            {"low": 2},
            {"high": 6},
            {"channels": (1, 0, 2)},
            {"to_next": True},
            {"min_size": 2},
            {"chunk_shape": (8, 16, 16)},
        )
    ]
    assert len({str(each) for each in descriptions}) == len(descriptions)
