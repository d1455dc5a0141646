import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.errors import AlignmentError
from beam_inference.geometry.alignment import check_alignment
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid


def cube(start, stop):
    return BoundingBox((start,) * 3, (stop,) * 3)


def test_nearest_starts_are_offered_only_inside_the_input():
    chunks = ChunkGrid(cube(3, 40), (16, 16, 16))
    with pytest.raises(AlignmentError, match="Nearest starts on z: 16. Set roi.start"):
        check_alignment(chunks, (16, 16, 16), cube(0, 40), volume=cube(3, 40))
    chunks = ChunkGrid(cube(16, 40), (16, 16, 16))
    with pytest.raises(AlignmentError, match="Nearest stops on z: 32"):
        check_alignment(chunks, (16, 16, 16), cube(0, 64), volume=cube(3, 45))


@pytest.mark.parametrize(
    ("roi", "chunk", "bounds", "message"),
    [
        (cube(0, 64), 24, cube(0, 64), "Nearest on z: 16 or 32"),
        (cube(0, 64), 8, cube(0, 64), "Nearest on z: 16"),
        (cube(5, 64), 32, cube(0, 64), "Nearest starts on z: 0 or 16"),
        (cube(16, 60), 32, cube(0, 64), "Nearest stops on z: 48 or 64"),
        (cube(0, 80), 32, cube(0, 64), "not inside the output's bounds"),
    ],
)
def test_misaligned_jobs_are_refused_naming_what_fits(roi, chunk, bounds, message):
    with pytest.raises(AlignmentError, match=message):
        check_alignment(ChunkGrid(roi, (chunk,) * 3), (16, 16, 16), bounds, volume=cube(-100, 100))


@given(
    st.tuples(*[st.integers(1, 4)] * 3),
    st.tuples(*[st.integers(1, 9)] * 3),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(10, 25),
)
def test_what_passes_writes_every_block_whole_and_once(block, chunk, start, length, extent):
    bounds = cube(0, extent)
    roi = cube(start, min(extent, start + length))
    grid = ChunkGrid(roi, chunk)
    try:
        check_alignment(grid, block, bounds, volume=bounds)
    except AlignmentError:
        return
    for axis in range(3):
        writers: dict[int, set[int]] = {}
        voxels: dict[int, int] = {}
        for position in range(grid.shape[axis]):
            for voxel in range(*grid.axis_interval(axis, position)):
                writers.setdefault(voxel // block[axis], set()).add(position)
                voxels[voxel // block[axis]] = voxels.get(voxel // block[axis], 0) + 1
        for number, count in voxels.items():
            assert len(writers[number]) == 1
            assert count == min((number + 1) * block[axis], extent) - number * block[axis]
