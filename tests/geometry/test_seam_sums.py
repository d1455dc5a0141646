"""``strategy: exchange`` by its plain functions: every patch once, the bits of ``recompute``."""

import numpy as np
from fakes.networks import NumpyNetwork, position_dependent
from helpers import oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chunks import cut_out, infer_all, infer_once, random_volume, small_plan

from beam_inference.geometry.blending import BUMP, BlendWindow
from beam_inference.geometry.exact_sums import largest_rounding
from beam_inference.geometry.seam_sums import merge_sums, split_sums

BOUND = 64.0
"""Of the predictions of ``position_dependent`` for values from 0 to 1."""


def sums_of(array, plan, work, network, batch_size=1, window=BUMP):
    cutout = cut_out(array, plan, work.input_box)
    return infer_once(cutout, work, network, 2, batch_size, bound=BOUND, window=window).core


def exchanged(array, plan, network, batch_size=1, random=None, window=BUMP):
    """All chunks, by two stages: in random order, with the parts of sums kept in between."""
    shuffle = list if random is None else lambda some: random.sample(list(some), len(some))
    roi = plan.chunks.roi
    result = np.full((2, *roi.shape), np.nan, np.float32)
    halos = {}
    parts = {}

    def write(box, values):
        assert np.isnan(result[(slice(None), *box.slices_in(roi))]).all(), (
            "every voxel is written once"
        )
        result[(slice(None), *box.slices_in(roi))] = values

    for index in shuffle(range(plan.chunks.count)):
        work = plan.exchange.owned_work(index)
        if work is None:
            assert not plan.exchange.receivers(index)
            continue
        sums = sums_of(array, plan, work, network, batch_size, window)
        private = plan.exchange.private_box(index)
        if private is not None:
            write(private, sums[(slice(None), *private.slices_in(work.core_box))])
        for receiver, arrays in split_sums(plan.exchange, index, sums):
            parts[receiver, index] = [part.copy() for part in arrays]
    for index in range(plan.chunks.count):
        contributors = shuffle(plan.exchange.contributors(index))
        mine = [(c, parts.pop((index, c), [])) for c in contributors]
        for box, values in merge_sums(plan.exchange, index, mine, 2):
            halos[index] = box, values
            core = box.intersection(plan.chunks.core_box(index))
            write(core, values[(slice(None), *core.slices_in(box))])
    assert not parts, "every part has a reader"
    return result, halos


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
        strategy="exchange",
        block_shape=block,
        halo=draw(st.just((0, 0, 0)) | st.tuples(*[st.integers(0, 6)] * 3)),
        lattice=draw(st.sampled_from(["stride", "spread", "pad"])),
    )


WINDOWS = [
    BUMP,
    BlendWindow("constant"),
    BlendWindow("gaussian", 0.125),
    BlendWindow("gaussian", 0.3),
    BlendWindow("gaussian", 0.125, is_on_voxel=True, floor=2.0**-24 / 10),
    BlendWindow("gaussian", 0.125, floor=1e-3),
]


@settings(deadline=None, max_examples=200)
@given(geometries(), st.integers(1, 3), st.sampled_from(WINDOWS), st.randoms())
def test_the_bits_of_recompute_and_the_values_of_the_oracle(plan, batch_size, window, random):
    array = random_volume(plan.volume.shape)
    network = NumpyNetwork(position_dependent)
    result, halos = exchanged(array, plan, network, batch_size, random, window)
    roi = plan.chunks.roi
    expected, _ = oracle(
        plan.lattice,
        lambda box: _cropped(plan, position_dependent(_input(array, plan, box)[None])[0]),
        2,
        window,
    )
    expected = expected[(slice(None), *roi.slices_in(plan.lattice.domain))]
    products = 4e-7 * np.abs(expected).max()  # of float32 weights and predictions
    assert (
        np.abs(result - expected).max()
        <= largest_rounding(BOUND, plan.lattice.most_patches) + products
    )
    for index in range(plan.chunks.count):
        work = plan.work(index)
        core = plan.chunks.core_box(index)
        alone = sums_of(array, plan, work, NumpyNetwork(position_dependent), batch_size, window)
        same = alone[(slice(None), *core.slices_in(work.core_box))]
        assert same.tobytes() == result[(slice(None), *core.slices_in(roi))].tobytes()
        if any(plan.halo):
            box, values = halos[index]
            assert box == work.core_box
            assert values.tobytes() == alone.tobytes()
    needed = roi.grow(plan.halo).intersection(plan.lattice.domain).intersection(plan.volume)
    assert plan.totals.patch_count == np.prod([len(r) for r in plan.lattice.touching(needed)])
    if batch_size == 1:
        assert len(network.batches) == plan.totals.patch_count, (
            "every patch of the lattice that touches the ROI or its halo, once"
        )


def _input(array, plan, box):
    return cut_out(array, plan, box.grow(plan.crop_margin)).astype(np.float32)


def _cropped(plan, prediction):
    z, y, x = (
        slice(m, m + p) for m, p in zip(plan.crop_margin, plan.lattice.patch_shape, strict=True)
    )
    return prediction[:, z, y, x]


def test_chunks_that_own_no_patch_are_made_of_their_neighbours():
    plan = small_plan(patch=(12, 12, 12), overlap=(2, 2, 2), chunk=(3, 3, 3), strategy="exchange")
    owners = [index for index in range(plan.chunks.count) if plan.exchange.owned_work(index)]
    assert 0 < len(owners) < plan.chunks.count / 8
    array = random_volume(plan.volume.shape)
    result, _ = exchanged(array, plan, NumpyNetwork(position_dependent))
    recomputed = infer_all(array, plan, NumpyNetwork(position_dependent), 2, bound=BOUND)
    assert result.tobytes() == recomputed.tobytes()
