"""What a report says in numbers, against brute force; no jobs are run here."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from fakes.receipts import GRID, receipt
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.report import chunk_map as maps
from beam_inference.report.chunk_map import ChunkMap
from beam_inference.report.measures import (
    channel_statistics,
    retries,
    stage_times,
    start_seconds,
    timeline,
    worker_hours,
)
from beam_inference.report.overlay import (
    OPACITY,
    PALETTE,
    brightness_range,
    channels_to_colour,
    draw_overlay,
    grey,
)
from beam_inference.report.slices import Plane, histograms, missing_share

grids = st.builds(
    lambda shape, chunk: ChunkGrid(
        BoundingBox((1, -2, 3), (1 + shape[0], shape[1] - 2, 3 + shape[2])), chunk
    ),
    st.tuples(*[st.integers(1, 30)] * 3),
    st.tuples(*[st.integers(1, 7)] * 3),
)


@settings(deadline=None, max_examples=30)
@given(grids, st.data(), st.integers(1, 6))
def test_cells_of_the_map(grid, data, cells_at_most):
    chosen = data.draw(st.lists(st.integers(0, grid.count - 1), unique=True, min_size=1))
    values = [float(data.draw(st.integers(0, 9))) for _ in chosen]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "CELLS", cells_at_most)
        chunk_map = ChunkMap(grid)
        assert max(chunk_map.shape) <= cells_at_most
        seen = {}
        every = np.zeros(chunk_map.shape, int)
        for chunk in range(grid.count):
            position = [grid.position(chunk)[axis] for axis in chunk_map.plane]
            cell = tuple(
                place // n for place, n in zip(position, chunk_map.chunks_per_cell, strict=True)
            )
            every[cell] += 1
            if chunk in chosen:
                seen.setdefault(cell, []).append(values[chosen.index(chunk)])
        np.testing.assert_array_equal(chunk_map.totals(), every)
        counts, means, most = (np.full(chunk_map.shape, empty) for empty in (0, np.nan, np.nan))
        for cell, there in seen.items():
            counts[cell] = len(there)
            means[cell] = np.mean(there)
            most[cell] = max(there)
        np.testing.assert_array_equal(chunk_map.counts(chosen), counts)
        np.testing.assert_allclose(chunk_map.means(chosen, values), means)
        np.testing.assert_array_equal(chunk_map.maxima(chosen, values), most)
        assert chunk_map.axis == 0 or grid.shape[chunk_map.axis] == 1


def test_statistics_of_channels():
    array = np.random.default_rng(0).integers(-2, 5, (2, *GRID.roi.shape)).astype(np.float32)
    whole = [
        receipt(chunk, array[(slice(None), *GRID.core_box(chunk).slices_in(GRID.roi))])
        for chunk in range(GRID.count)
    ]
    for channel, found in zip(array, channel_statistics(whole), strict=True):
        assert (found.min, found.max) == (channel.min(), channel.max())
        assert found.mean == pytest.approx(channel.mean(dtype=np.float64))
        assert (found.zeros, found.nans) == ((channel == 0).sum(), 0)
    assert channel_statistics([]) == []


def test_stages_and_retries():
    random = np.random.default_rng(1)
    seconds = [{"read": random.random(), "write": random.random()} for _ in range(50)]
    seconds[7]["merge"] = 3.0
    some = [
        receipt(0, seconds=each, attempts={"read": 1 + n % 3, "write": 1})
        for n, each in enumerate(seconds)
    ]
    read, merge, write = stage_times(some)
    assert [read.stage, merge.stage, write.stage] == ["read", "merge", "write"]
    values = sorted(each["read"] for each in seconds)
    assert read.total == pytest.approx(sum(values))
    assert read.median == pytest.approx((values[24] + values[25]) / 2)
    assert values[1] < read.low < values[4]
    assert values[45] < read.high < values[48]
    assert (read.most, merge.total, merge.most) == (values[-1], 3.0, 3.0)
    assert sum(map(retries, some)) == sum(n % 3 for n in range(50))
    assert start_seconds(some[7]) == some[7].finished_at.timestamp() - 3, (
        "its own patches were computed long before"
    )


def test_worker_hours_are_from_first_begin_to_last_end():
    some = [
        receipt(0, at=10, worker="a:1"),  # from 6
        receipt(1, at=30, worker="a:1"),
        receipt(2, at=12, worker="b:1", seconds={"infer": 12.0}),
        receipt(3, at=99_000, worker="a:1", launch="two"),
    ]
    assert worker_hours(some, 4) * 3600 == pytest.approx(24 + 12 + 4)
    assert worker_hours([], 0) == 0


def test_worker_hours_of_a_sample_are_those_of_all():
    random = np.random.default_rng(2)
    everything = [
        receipt(0, at=float(at), worker=f"w:{worker}", seconds={"infer": 0.1})
        for worker in range(20)
        for at in random.uniform(0, 3600, 150)
    ]
    whole = worker_hours(everything, len(everything))
    assert whole == pytest.approx(20, rel=0.02)
    guesses = []
    for _ in range(10):
        # ten of each worker: a fifth of the span is missed
        chosen = random.choice(len(everything), 200, replace=False)
        guesses.append(worker_hours([everything[k] for k in chosen], len(everything)))
    assert np.mean(guesses) == pytest.approx(whole, rel=0.03)


def test_speed_over_time_leaves_pauses_out_and_no_voxel():
    day = 86400.0
    first = [receipt(k, at=4.0 + 2 * k) for k in range(9)]
    second = [receipt(9 + k, at=day + 4.0 + k, launch="two") for k in range(9)]
    found = timeline({"finished": ([*first, *second], 18)}, GRID)
    assert len(found.pauses) == 1
    assert found.pauses[0].at == pytest.approx(20)
    assert found.pauses[0].seconds == pytest.approx(day - 20)
    assert found.edges[-1] == pytest.approx(20 + 12)
    widths = np.diff(found.edges)
    assert (found.rates["finished"] * widths).sum() == pytest.approx(GRID.roi.size)
    ends = [4.0 + 2 * k for k in range(9)] + [20 + 4.0 + k for k in range(9)]
    for left, right, rate in zip(
        found.edges[:-1], found.edges[1:], found.rates["finished"], strict=True
    ):
        last = right == found.edges[-1]
        there = [k for k, end in enumerate(ends) if left <= end < right or (last and end == right)]
        assert rate == pytest.approx(sum(GRID.core_box(k).size for k in there) / (right - left))
    assert timeline({}, GRID) is None


def test_speed_of_a_sample_is_scaled_and_its_gaps_are_no_pauses():
    chunks = ChunkGrid(BoundingBox((0, 0, 0), (100, 100, 100)), (1, 10, 10))
    # one in 500, by a single worker
    some = [receipt(k, at=4.0 * k, grid=chunks) for k in range(0, 10_000, 500)]
    found = timeline({"finished": (some, 10_000)}, chunks)
    assert found.pauses == []
    assert (found.rates["finished"] * np.diff(found.edges)).sum() == pytest.approx(10_000 * 100)


def plane(source, output):
    box = BoundingBox((0, 0, 0), (1, *source.shape))
    return Plane(0, box, (1, 1), source.astype(np.float32), output.astype(np.float32))


@pytest.mark.parametrize("kind", ["levels", "few levels", "numbers", "one value"])
def test_histograms(kind):
    random = np.random.default_rng(3)
    values = {
        "levels": random.integers(0, 256, (2, 30, 40)),
        "few levels": random.integers(3, 6, (2, 30, 40)),
        "numbers": random.normal(size=(2, 30, 40)),
        "one value": np.full((2, 30, 40), 7.5),
    }[kind].astype(np.float32)
    values[:, :5] = np.nan
    for channel, (edges, shares) in zip(
        values, histograms([plane(values[0], values)]), strict=True
    ):
        there = channel[5:].reshape(-1).astype(float)
        expected = [((there >= a) & (there < b)).sum() for a, b in itertools.pairwise(edges)]
        expected[-1] += (there == edges[-1]).sum()
        np.testing.assert_allclose(shares, np.array(expected) / there.size)
        assert shares.sum() == pytest.approx(1)
        assert len(shares) <= 64
        if "levels" in kind:
            held = [len(np.arange(np.ceil(a), b)) for a, b in itertools.pairwise(edges)]
            assert len(set(held)) == 1, "as many whole numbers in each bin"
    missing = np.full((2, 3, 3), np.nan)
    assert histograms([plane(missing[0], missing)]) == []
    assert missing_share([plane(values[0], values)], "output") == pytest.approx(5 / 30)


def test_overlay():
    source = np.array([[0.0, 10.0, 5.0, np.nan, 10.0]])
    output = np.array([[[0.0, 0.0, 1.0, 1.0, np.nan]], [[0.0, 0.0, 0.0, 1.0, np.nan]]])
    picture = draw_overlay(
        source.astype(np.float32), output.astype(np.float32), (0, 10), [(0, 1), (0, 1)]
    )
    one, two = (np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) for colour in PALETTE[:2])
    np.testing.assert_array_equal(picture[0, 0], [0, 0, 0, 255])
    np.testing.assert_array_equal(picture[0, 1], [217, 217, 217, 255])
    np.testing.assert_allclose(
        picture[0, 2, :3], 0.85 * 127.5 * (1 - OPACITY) + OPACITY * one, atol=1
    )
    np.testing.assert_allclose(picture[0, 3, :3], OPACITY * (one + two) / 2, atol=1)
    assert picture[0, 4, 3] == 0, "missing"
    np.testing.assert_array_equal(
        grey(source.astype(np.float32), 0, 10)[0, :, 3], [255, 255, 255, 0, 255]
    )
    assert brightness_range([np.full((2, 2), np.nan, np.float32)]) == (0.0, 1.0)
    assert brightness_range([np.full((2, 2), 3, np.float32)]) == (3.0, 4.0)


def test_the_commonest_class_of_a_softmax_has_no_colour():
    means = [SimpleNamespace(mean=mean) for mean in (0.1, 0.7, 0.2)]
    config = SimpleNamespace(model=SimpleNamespace(activation="softmax"))
    assert channels_to_colour(config, means, 3) == [0, 2]
    config.model.activation = "sigmoid"
    assert channels_to_colour(config, means, 3) == [0, 1, 2]
    assert len(channels_to_colour(config, means * 5, 12)) == len(PALETTE)
