"""Test that chunks of HDF5 datasets are found where HDF5's library finds them."""

import io
from itertools import product

import h5py
import numpy as np
import pytest

from beam_inference.conversion.hdf5_chunks import ChunkIndex, StoredChunk, chunk_parts


@pytest.fixture(params=["earliest", "latest"])
def file(request):
    """A file with a dataset of 4 x 3 x 4 chunks, of which some are absent or not packed."""
    with h5py.File(io.BytesIO(), "w", libver=request.param) as file:
        dataset = file.create_dataset(
            "x", (7, 11, 13), "u2", chunks=(2, 4, 4), compression="gzip", shuffle=True
        )
        dataset[:4, 4:, :9] = np.arange(4 * 7 * 9).reshape(4, 7, 9)
        dataset.id.write_direct_chunk((6, 8, 12), bytes(64), filter_mask=3)
        yield file


def test_chunks_are_found_as_the_library_finds_them(file):
    dataset = file["x"]
    index = ChunkIndex(dataset)
    found = 0
    for place in product(range(0, 7, 2), range(0, 11, 4), range(0, 13, 4)):
        expected = dataset.id.get_chunk_info_by_coord(place)
        if expected.byte_offset is None:
            assert index.find(place) is None
        else:
            found += 1
            assert index.find(place) == StoredChunk(
                expected.byte_offset, expected.size, expected.filter_mask
            )
    assert found == 2 * 2 * 3 + 1


def test_a_dataset_without_chunks_in_the_file():
    with h5py.File(io.BytesIO(), "w") as file:
        dataset = file.create_dataset("x", (7, 11, 13), "u2", chunks=(2, 4, 4))
        assert ChunkIndex(dataset).find((0, 0, 0)) is None


def test_the_parts_of_a_window_are_those_of_its_chunks(file):
    dataset = file["x"]
    index = ChunkIndex(dataset)
    window = (slice(1, 3), slice(5, 8), slice(0, 20))
    places = product((0, 2), (4,), (0, 4, 8, 12))
    expected = [index.find(place) for place in places]
    assert chunk_parts(dataset, index, window) == [
        (chunk.start, chunk.start + chunk.size) for chunk in expected if chunk is not None
    ]
