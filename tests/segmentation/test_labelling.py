"""Components of chunks and their seams, against the whole volume labelled at once."""

import cc3d
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.segmentation.labelling import CODE_BITS, POSITIONS, equivalences, label_chunk
from beam_inference.segmentation.union import number_components, unite

CONNECTIVITIES = {6: 1, 18: 2, 26: 3}


def by_chunks(values, chunk_shape, connectivity):
    """Labels of the whole volume by those of its chunks, the labelled chunks, and their boxes."""
    grid = ChunkGrid(BoundingBox((0, 0, 0), values.shape), chunk_shape)
    boxes = [grid.core_box(index) for index in range(grid.count)]
    labelled = [
        label_chunk(
            values[box.slices_in(grid.roi)].copy(), box, grid, index, connectivity, min_size=1
        )
        for index, box in enumerate(boxes)
    ]
    chunks, faces = zip(*labelled, strict=True)
    begins = np.cumsum([0, *(len(chunk.records) for chunk in chunks)])
    parent = np.arange(begins[-1])
    for index, box in enumerate(boxes):
        position = np.array(grid.position(index))
        there = {
            step: position + step for step in POSITIONS if (position + step < grid.shape).all()
        }
        pairs = equivalences(
            {step: faces[grid.index(at)] for step, at in there.items()}, box.shape, connectivity
        )
        numbers = np.array(
            [begins[grid.index(there[step])] if step in there else -1 for step in POSITIONS]
        )
        unite(parent, *(numbers[code >> CODE_BITS] + (code & 0xFFFFFFFF) - 1 for code in pairs.T))
    number_components(parent)
    whole = np.zeros(values.shape, np.int64)
    for chunk, box, begin in zip(chunks, boxes, begins, strict=False):
        whole[box.slices_in(grid.roi)] = np.append(
            0, parent[begin : begin + len(chunk.records)] + 1
        )[chunk.labels]
    return whole, chunks, boxes


def in_raster_order(labels):
    """Labels renamed by where each comes first."""
    names, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    ranks = np.zeros(len(names), int)
    inner = np.flatnonzero(names)
    ranks[inner[np.argsort(first[inner])]] = np.arange(1, len(inner) + 1)
    return ranks[inverse].reshape(labels.shape)


def oracle(values, connectivity):
    """Components of each value by itself, labelled by scipy."""
    structure = ndimage.generate_binary_structure(3, CONNECTIVITIES[connectivity])
    labels = np.zeros(values.shape, int)
    count = 0
    for value in np.unique(values[values != 0]):
        found, n = ndimage.label(values == value, structure)
        labels[found > 0] = found[found > 0] + count
        count += n
    return in_raster_order(labels)


shapes = st.tuples(*[st.integers(1, 9)] * 3)


@settings(deadline=None, max_examples=120)
@given(
    shape=shapes,
    chunk_shape=st.tuples(*[st.integers(1, 6)] * 3),
    connectivity=st.sampled_from([6, 18, 26]),
    kinds=st.sampled_from([1, 1, 2, 40]),
    density=st.sampled_from([0.05, 0.2, 0.4, 0.7, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_chunks_give_what_the_whole_volume_gives(
    shape, chunk_shape, connectivity, kinds, density, seed
):
    random = np.random.default_rng(seed)
    values = random.integers(1, kinds + 1, shape) * (random.random(shape) < density)
    values = values > 0 if kinds == 1 else values.astype(np.uint16)
    whole, _, _ = by_chunks(values, chunk_shape, connectivity)
    expected = oracle(values, connectivity)
    np.testing.assert_array_equal(in_raster_order(whole), expected)
    np.testing.assert_array_equal(
        expected,
        in_raster_order(
            cc3d.connected_components(values.astype(np.uint16), connectivity=connectivity)
        ),
    )


@pytest.mark.parametrize("shape", [(1, 1, 3), (65, 7, 1), (5, 1, 5), (7, 7, 7)])
@pytest.mark.parametrize("chunk_shape", [(65, 8, 8), (4, 2, 2)])
def test_as_many_components_as_there_can_be(shape, chunk_shape):
    values = np.zeros(shape, bool)
    values[::2, ::2, ::2] = True  # cc3d 4.1.1 fails on some of these, where they are booleans
    for connectivity in CONNECTIVITIES:
        assert by_chunks(values, chunk_shape, connectivity)[0].max() == values.sum()


def serpentine(shape):
    """A line one voxel thick that fills the volume in turns, and touches itself nowhere."""
    line = np.zeros(shape, bool)
    line[::2, ::2] = True
    for z in range(0, shape[0], 2):
        for turn, y in enumerate(range(1, shape[1] - 1, 2)):
            line[z, y, -1 if turn % 2 == 0 else 0] = True
    ends = [(0, 0), (shape[1] - 1, -1 if (shape[1] - 1) // 2 % 2 else 0)]
    for layer, z in enumerate(range(1, shape[0] - 1, 2)):
        y, x = (
            (shape[1] - 1, -1 if ((shape[1] - 1) // 2) % 2 == 0 else 0)
            if layer % 2 == 0
            else ends[0]
        )
        line[z, y, x] = True
    return line


@pytest.mark.parametrize("chunk_shape", [(3, 3, 3), (2, 5, 4), (1, 1, 9), (9, 2, 2)])
def test_a_line_that_winds_through_all_chunks_is_one(chunk_shape):
    line = serpentine((9, 9, 9))
    assert ndimage.label(line)[1] == 1
    assert by_chunks(line, chunk_shape, 6)[0].max() == 1
    line[4, 4, 4] = False  # in the middle of its length
    np.testing.assert_array_equal(
        in_raster_order(by_chunks(line, chunk_shape, 6)[0]), oracle(line, 6)
    )
    assert ndimage.label(line)[1] == 2


@pytest.mark.parametrize(
    ("one", "other", "touching_from"),
    [
        ((3, 3, 3), (4, 4, 4), 26),
        ((3, 3, 4), (4, 4, 3), 26),
        ((3, 4, 3), (4, 3, 4), 26),
        ((4, 3, 3), (3, 4, 4), 26),
        ((3, 3, 1), (4, 4, 1), 18),
        ((3, 4, 1), (4, 3, 1), 18),
        ((1, 3, 4), (1, 4, 3), 18),
        ((3, 1, 4), (4, 1, 3), 18),
        ((3, 3, 1), (4, 4, 2), 26),
        ((3, 4, 2), (4, 3, 1), 26),
        ((3, 1, 1), (4, 1, 1), 6),
        ((1, 3, 2), (1, 4, 1), 18),
    ],
)
def test_voxels_that_touch_across_chunks_at_corners_edges_and_faces(one, other, touching_from):
    values = np.zeros((8, 8, 8), bool)
    values[one] = values[other] = True
    for connectivity in CONNECTIVITIES:
        whole, _, _ = by_chunks(values, (4, 4, 4), connectivity)
        assert (whole[one] == whole[other]) == (connectivity >= touching_from)


def test_touching_labels_of_other_values_stay_apart():
    values = np.zeros((4, 4, 8), np.uint8)
    values[:, :, :4] = 3
    values[:, :, 4:] = 5
    assert by_chunks(values, (4, 4, 4), 26)[0].max() == 2
    values[2:, :, 4:] = 3
    np.testing.assert_array_equal(
        in_raster_order(by_chunks(values, (4, 4, 4), 26)[0]), oracle(values, 26)
    )


def test_the_records_of_a_chunk_say_what_its_labels_are():
    random = np.random.default_rng(3)
    values = random.random((12, 10, 9)) < 0.35
    _, chunks, boxes = by_chunks(values, (6, 10, 5), 6)
    for chunk, box in zip(chunks, boxes, strict=True):
        assert len(chunk.records) == chunk.labels.max()
        for label, record in enumerate(chunk.records, 1):
            places = np.argwhere(chunk.labels == label) + box.start
            assert record["voxels"] == len(places)
            assert record["first"] == np.ravel_multi_index(places[0], values.shape)
            assert record["start"].tolist() == places.min(0).tolist()
            assert record["stop"].tolist() == (places.max(0) + 1).tolist()
            assert record["sums"].tolist() == places.sum(0).tolist()
        on_seam = np.unique(chunk.labels[-1 if box.start[0] == 0 else 0])
        other = np.unique(chunk.labels[:, :, -1 if box.start[2] == 0 else 0])
        assert set(np.union1d(on_seam, other)) - {0} == set(range(1, chunk.touching + 1))


def test_small_components_stay_where_a_neighbour_may_have_more_of_them():
    values = np.zeros((2, 2, 8), bool)
    values[0, 0, 3] = values[0, 0, 1] = values[1, 1, 5:8] = True
    grid = ChunkGrid(BoundingBox((0, 0, 0), (2, 2, 8)), (2, 2, 4))
    box = grid.core_box(0)
    chunk, _ = label_chunk(values[:, :, :4], box, grid, 0, 6, min_size=2)
    assert (chunk.touching, len(chunk.records), chunk.labels[0, 0].tolist()) == (
        1,
        1,
        [0, 0, 0, 1],
    )
