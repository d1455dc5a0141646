import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid, LatticeAxis, PatchLattice, largest_block_cover
from beam_inference.geometry.zyx import ceil_div


def lattice_axes(longest=40):
    return st.integers(1, 12).flatmap(
        lambda patch: st.builds(
            lambda start, extra, stride, is_spread: LatticeAxis(
                start, start + patch + extra, patch, stride, is_spread
            ),
            st.integers(-20, 20),
            st.integers(0, longest),
            st.integers(1, patch),
            st.booleans(),
        )
    )


def brute_force_starts(axis):
    """Starts one by one: stride after stride, the last one moved back; or those of nnU-Net.

    nnU-Net (Isensee et al., Nature Methods 2021): ``ceil((length - patch) / step) + 1`` positions,
    the first and the last at the ends, the others evenly between them, by ``numpy.round``.
    """
    if axis.is_spread:
        room = axis.stop - axis.start - axis.patch
        count = int(np.ceil(room / axis.stride)) + 1
        distance = room / (count - 1) if count > 1 else 0
        return [axis.start + int(np.round(distance * k)) for k in range(count)]
    starts = []
    start = axis.start
    while start + axis.patch < axis.stop:
        starts.append(start)
        start += axis.stride
    return [*starts, axis.stop - axis.patch]


@given(lattice_axes())
@example(LatticeAxis(0, 33, 11, 3, is_spread=True))  # starts from 5.5 to 16.5 are 10 apart
def test_lattice_starts(axis):
    starts = brute_force_starts(axis)
    assert [axis.patch_start(k) for k in range(axis.count)] == starts
    assert len(set(starts)) == len(starts)
    covered = {i for start in starts for i in range(start, start + axis.patch)}
    assert covered == set(range(axis.start, axis.stop))
    for start in range(axis.start - 1, axis.stop + 2):
        assert axis.first_from(start) == sum(each < start for each in starts)
    shared = [
        sum(start <= v < start + axis.patch for start in starts)
        for v in range(axis.start, axis.stop)
    ]
    if axis.is_spread:
        assert max(shared) <= axis.most_patches <= max(shared) + 1
    else:
        assert axis.most_patches == max(shared)


def test_spread_starts_are_those_that_nnunet_took():
    """Noted from a run of nnU-Net 2.8.1."""
    box = BoundingBox((0, 0, 0), (100, 120, 110))
    lattice = PatchLattice(box, (48, 64, 64), (24, 32, 32), "spread")
    starts = [[axis.patch_start(k) for k in range(axis.count)] for axis in lattice.axes]
    assert starts == [[0, 17, 35, 52], [0, 28, 56], [0, 23, 46]]


@given(st.integers(1, 12), st.integers(0, 60), st.data())
def test_a_patch_that_hangs_over_ends_behind_the_box(patch, extra, data):
    overlap = data.draw(st.integers(0, patch - 1))
    box = BoundingBox((5, 5, 5), (6, 6, 5 + patch + extra))
    lattice = PatchLattice(box, (1, 1, patch), (0, 0, overlap), "pad").over(box)
    axis = lattice.axes[2]
    starts = [axis.patch_start(k) for k in range(axis.count)]
    assert starts == [5 + k * (patch - overlap) for k in range(len(starts))]
    assert lattice.domain.stop[2] == starts[-1] + patch
    assert starts[-1] + patch >= box.stop[2] > (starts[-2] + patch if len(starts) > 1 else 5)


@given(lattice_axes(), st.data())
def test_touching_patches(axis, data):
    start = data.draw(st.integers(axis.start, axis.stop - 1))
    stop = data.draw(st.integers(start + 1, axis.stop))
    starts = brute_force_starts(axis)
    assert list(axis.touching(start, stop)) == [
        k for k, first in enumerate(starts) if first < stop and first + axis.patch > start
    ]


@given(
    st.tuples(*[st.integers(-9, 9)] * 3),
    st.tuples(*[st.integers(1, 9)] * 3),
    st.tuples(*[st.integers(1, 5)] * 3),
)
def test_chunks_tile_the_roi_exactly_once(start, shape, chunk_shape):
    roi = BoundingBox(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    grid = ChunkGrid(roi, chunk_shape)
    seen = {}
    for index in range(grid.count):
        box = grid.core_box(index)
        z0, y0, x0 = box.start
        z1, y1, x1 = box.stop
        for voxel in (
            (z, y, x) for z in range(z0, z1) for y in range(y0, y1) for x in range(x0, x1)
        ):
            assert voxel not in seen
            seen[voxel] = index
    assert len(seen) == roi.size
    assert grid.core_box(0).start == roi.start


def test_chunks_are_numbered_with_x_fastest():
    grid = ChunkGrid(BoundingBox((0, 0, 0), (4, 4, 4)), (2, 2, 2))
    assert grid.core_box(1).start == (0, 0, 2)
    assert grid.core_box(2).start == (0, 2, 0)
    assert grid.core_box(4).start == (2, 0, 0)


@pytest.mark.parametrize("index", [-1, 8])
def test_there_is_no_other_chunk(index):
    with pytest.raises(IndexError, match="not one of the 8 chunks"):
        ChunkGrid(BoundingBox((0, 0, 0), (4, 4, 4)), (2, 2, 2)).core_box(index)


def test_a_patch_that_does_not_fit_the_domain_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        LatticeAxis(0, 5, 6, 3)
    with pytest.raises(ValueError, match="stride"):
        LatticeAxis(0, 9, 6, 7)


def test_a_lattice_of_a_petavoxel_answers_at_once():
    lattice = PatchLattice(
        BoundingBox((0, 0, 0), (100_000, 100_000, 100_000)), (20, 256, 256), (4, 64, 64)
    )
    far = BoundingBox((99_985, 50_000, 3), (100_000, 50_001, 99_000))
    z, y, x = lattice.touching(far)
    assert len(z) == 2
    assert len(y) in (1, 2)
    assert x[0] == 0
    assert lattice.patch_box((z[-1], y[0], x[0])).stop[0] == 100_000


@pytest.mark.parametrize(
    ("n", "b"), [(1, 1), (1, 8), (2, 8), (8, 8), (9, 8), (10, 8), (64, 8), (65, 8)]
)
def test_blocks_touched_is_the_most_over_all_places(n, b):
    most = max((start + n - 1) // b - start // b + 1 for start in range(b)) * b
    assert largest_block_cover((n, n, 1), (b, b, 1), (1000, 1000, 1000)) == (most, most, 1)
    assert largest_block_cover((n, n, n), (b, b, b), (n, 1000, 1)) == (ceil_div(n, b) * b, most, b)
