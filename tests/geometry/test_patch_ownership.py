"""Ownership on one axis, against counting voxel by voxel."""

from hypothesis import given
from hypothesis import strategies as st

from beam_inference.geometry.grids import LatticeAxis
from beam_inference.geometry.patch_ownership import OwnershipAxis


@st.composite
def axes(draw):
    patch = draw(st.integers(1, 9))
    stride = draw(st.integers(1, patch))
    start = draw(st.integers(-5, 5))
    stop = start + draw(st.integers(patch, 40))
    volume_start = draw(st.integers(start, stop - 1))
    volume_stop = draw(st.integers(volume_start + 1, stop))
    roi_start = draw(st.integers(volume_start, volume_stop - 1))
    roi_stop = draw(st.integers(roi_start + 1, volume_stop))
    block = draw(st.integers(1, 5))
    chunk = block * draw(st.integers(1, 4))
    lattice = LatticeAxis(start, stop, patch, stride, draw(st.booleans()))
    volume = (volume_start, volume_stop)
    return OwnershipAxis(lattice, volume, roi_start, roi_stop, chunk, block)


def cover(axis, k):
    start = axis.lattice.patch_start(k)
    return set(range(max(start, axis.start), min(start + axis.lattice.patch, axis.stop)))


@given(axes())
def test_against_counting(axis):
    patches = [k for k in range(axis.lattice.count) if cover(axis, k)]
    owner = {
        k: (
            (min(max(axis.lattice.patch_start(k), axis.start), axis.stop - 1) - axis.start)
            // axis.chunk
        )
        for k in patches
    }
    assert list(axis.patches) == patches
    for position in range(axis.positions):
        mine = [k for k in patches if owner[k] == position]
        assert list(axis.owned_patches(position)) == mine
        reach = set().union(*(cover(axis, k) for k in mine))
        start, stop = axis.reach(position)
        assert set(range(start, stop)) == reach, "patches overlap or touch, so there are no gaps"
        core = set(range(*axis.interval(position)))
        touching = {owner[k] for k in patches if cover(axis, k) & core}
        assert axis.contributors(position) == sorted(touching)
        assert list(axis.receivers(position)) == [
            p for p in range(axis.positions) if reach & set(range(*axis.interval(p)))
        ]
        foreign = set().union(*(cover(axis, k) for k in patches if owner[k] != position)) & core
        private = axis.private_start(position)
        first, last = axis.interval(position)
        assert (private - first) % axis.block == 0 or private == last
        assert first <= private <= last
        assert all(v < private for v in foreign), "nobody else touches what is private"
        if private > first:
            block = first + (private - 1 - first) // axis.block * axis.block
            assert foreign & set(range(block, private)), "and no block is shared that need not be"


@given(axes(), st.integers(-10, 60))
def test_the_first_patch_from_a_voxel(axis, voxel):
    starts = [axis.lattice.patch_start(k) for k in range(axis.lattice.count)]
    expected = next((k for k, start in enumerate(starts) if start >= voxel), len(starts))
    assert axis.lattice.first_from(voxel) == expected
