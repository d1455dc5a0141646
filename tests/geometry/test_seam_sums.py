"""``seams: exchange`` by its plain functions: every patch once, the values of the oracle."""

import numpy as np
from fakes.networks import NumpyNetwork, position_dependent
from helpers import oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chunks import cut_out, infer_all, infer_once, random_volume, small_plan

from beam_inference.geometry.seam_sums import add_sums, merge_sums, split_sums
from beam_inference.operators.quantize import quantize

UINT8 = np.dtype("uint8")


def sums_of(array, plan, work, network, batch_size=1):
    return infer_once(cut_out(array, plan, work.input_box), work, network, 2, batch_size).core


def exchanged(array, plan, network, batch_size=1, order=None):
    """All chunks, by two stages: in any order, with the parts of sums kept in between."""
    roi = plan.chunks.roi
    result = np.full((2, *roi.shape), np.nan, np.float32)
    parts = {}

    def write(box, values):
        assert np.isnan(result[(slice(None), *box.slices_in(roi))]).all(), (
            "every voxel is written once"
        )
        result[(slice(None), *box.slices_in(roi))] = values

    for index in order or range(plan.chunks.count):
        work = plan.exchange.owned_work(index)
        if work is None:
            assert not plan.exchange.receivers(index)
            continue
        sums = sums_of(array, plan, work, network, batch_size)
        private = plan.exchange.private_box(index)
        if private is not None:
            write(private, sums[(slice(None), *private.slices_in(work.core_box))])
        for receiver, arrays in split_sums(plan.exchange, index, sums):
            parts[receiver, index] = [part.copy() for part in arrays]
    for index in range(plan.chunks.count):
        mine = [(c, parts.pop((index, c), [])) for c in plan.exchange.contributors(index)]
        for box, values in merge_sums(plan.exchange, index, mine, 2):
            write(box, values)
    assert not parts, "every part has a reader"
    return result


def isolated(array, plan, index, network, batch_size=1):
    """One chunk without its neighbours."""
    works = plan.exchange.contributions(index)
    sums = (sums_of(array, plan, work, network, batch_size) for work in works)
    return add_sums(plan.chunks.core_box(index), works, sums, 2)


@st.composite
def geometries(draw):
    shape = draw(st.tuples(*[st.integers(1, 14)] * 3))
    patch = draw(st.tuples(*[st.integers(1, 7)] * 3))
    block = draw(st.tuples(*[st.integers(1, 4)] * 3))
    start = (3, -2, 7)
    low = tuple(a + draw(st.integers(0, n - 1)) for a, n in zip(start, shape, strict=True))
    high = tuple(draw(st.integers(b + 1, a + n)) for a, b, n in zip(start, low, shape, strict=True))
    from beam_inference.geometry.bounding_box import BoundingBox

    return small_plan(
        shape=shape,
        patch=patch,
        overlap=tuple(draw(st.integers(0, p - 1)) for p in patch),
        chunk=tuple(b * draw(st.integers(1, 4)) for b in block),
        roi=BoundingBox(low, high),
        context=draw(st.tuples(*[st.integers(0, 5)] * 3)),
        crop_margin=draw(st.tuples(*[st.integers(0, 2)] * 3)),
        seams="exchange",
        block_shape=block,
    )


@settings(deadline=None, max_examples=200)
@given(geometries(), st.integers(1, 3), st.randoms())
def test_the_values_of_recompute_and_of_the_oracle_from_every_patch_once(plan, batch_size, random):
    array = random_volume(plan.volume.shape)
    network = NumpyNetwork(position_dependent)
    order = list(range(plan.chunks.count))
    random.shuffle(order)
    result = exchanged(array, plan, network, batch_size, order)
    roi = plan.chunks.roi
    expected, _ = oracle(
        plan.lattice,
        lambda box: _cropped(plan, position_dependent(_input(array, plan, box)[None])[0]),
        2,
    )
    expected = expected[(slice(None), *roi.slices_in(plan.lattice.domain))]
    assert np.abs(result - expected).max() <= 1e-5 * max(1e-6, np.ptp(expected))
    recomputed = infer_all(array, plan, NumpyNetwork(position_dependent), 2, batch_size)
    assert np.abs(result - recomputed).max() <= 1e-5 * max(1e-6, np.ptp(expected))
    levels = [quantize(each.copy(), UINT8, (0, 2)).astype(int) for each in (result, recomputed)]
    assert np.abs(levels[0] - levels[1]).max() <= 1
    for index in range(plan.chunks.count):
        box = plan.chunks.core_box(index)
        alone = isolated(array, plan, index, NumpyNetwork(position_dependent), batch_size)
        np.testing.assert_array_equal(alone, result[(slice(None), *box.slices_in(roi))])
    assert plan.totals.patch_count == np.prod([len(r) for r in plan.lattice.touching(roi)])
    if batch_size == 1:
        assert len(network.batches) == plan.totals.patch_count, (
            "every patch of the lattice that touches the ROI, once"
        )


def _input(array, plan, box):
    return cut_out(array, plan, box.grow(plan.crop_margin)).astype(np.float32)


def _cropped(plan, prediction):
    z, y, x = (
        slice(m, m + p) for m, p in zip(plan.crop_margin, plan.lattice.patch_shape, strict=True)
    )
    return prediction[:, z, y, x]


def test_chunks_that_own_no_patch_are_made_of_their_neighbours():
    plan = small_plan(patch=(12, 12, 12), overlap=(2, 2, 2), chunk=(3, 3, 3), seams="exchange")
    owners = [index for index in range(plan.chunks.count) if plan.exchange.owned_work(index)]
    assert 0 < len(owners) < plan.chunks.count / 8
    array = random_volume(plan.volume.shape)
    result = exchanged(array, plan, NumpyNetwork(position_dependent))
    np.testing.assert_allclose(
        result, infer_all(array, plan, NumpyNetwork(position_dependent), 2), rtol=0, atol=2e-5
    )


def test_integer_levels_differ_on_fewer_than_one_voxel_in_ten_thousand():
    plan = small_plan(
        shape=(40, 60, 60),
        patch=(10, 16, 16),
        overlap=(4, 6, 6),
        chunk=(16, 20, 20),
        seams="exchange",
        block_shape=(4, 4, 4),
    )
    array = random_volume(plan.volume.shape)
    low = -1.0
    high = 6.0
    mine = quantize(
        exchanged(array, plan, NumpyNetwork(position_dependent)), UINT8, (low, high)
    ).astype(int)
    theirs = quantize(
        infer_all(array, plan, NumpyNetwork(position_dependent), 2), UINT8, (low, high)
    ).astype(int)
    assert np.abs(mine - theirs).max() <= 1
    assert (mine != theirs).mean() < 1e-4
