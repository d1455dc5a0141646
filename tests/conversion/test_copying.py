"""Chunk shapes of sources: whole blocks, bounded memory, and each grain decoded once."""

import math
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference.conversion.blocks import default_block_shape
from beam_inference.conversion.copying import WINDOW_BYTES, ChunkShapes, choose_chunk_shapes, copy
from beam_inference.conversion.protocol import SourceInfo
from beam_inference.errors import WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid

EDGES = st.tuples(*[st.integers(1, 100_000)] * 3)
BLOCKS = st.tuples(*[st.sampled_from([1, 16, 64, 100])] * 3)


def facts(shape, grain=(1, 1, 1), dtype="uint8", channels=1):
    return SourceInfo(BoundingBox((0, 0, 0), shape), channels, dtype, None, grain)


@given(EDGES, BLOCKS, st.tuples(*[st.integers(1, 2000)] * 3), st.sampled_from(["uint8", "float64"]))
def test_chunks_and_windows_are_whole_blocks_of_bounded_size(shape, block, grain, dtype):
    grain = tuple(min(g, n) for g, n in zip(grain, shape, strict=True))
    source = facts(shape, grain, dtype)
    shapes = choose_chunk_shapes(source, block)
    for each in (shapes.chunk, shapes.window):
        assert all(n % b == 0 and n < s + b for n, b, s in zip(each, block, shape, strict=True))
    assert all(w <= c for w, c in zip(shapes.window, shapes.chunk, strict=True))
    assert math.prod(shapes.window) * source.itemsize <= WINDOW_BYTES or shapes.window == tuple(
        block
    )
    # a slice, or strip or tile of one, belongs to one chunk
    if grain[0] == 1 or shapes.scratch_bytes(source):
        assert all(c >= min(g, s) for c, g, s in zip(shapes.chunk, grain, shape, strict=True))


def test_some_sources():
    assert choose_chunk_shapes(
        facts((1024, 2048, 2048), (1, 2048, 2048)), (64, 64, 64)
    ) == ChunkShapes((64, 2048, 2048), (64, 512, 2048))
    assert choose_chunk_shapes(
        facts((1024, 2048, 2048), (1, 2048, 2048)), (16, 128, 128)
    ) == ChunkShapes((16, 2048, 2048), (16, 2048, 2048))
    assert choose_chunk_shapes(facts((1024, 2048, 2048)), (64, 64, 64)) == ChunkShapes(
        (64, 512, 2048), (64, 512, 2048)
    )
    assert choose_chunk_shapes(
        facts((1024, 2048, 2048), (512, 512, 512)), (64, 64, 64)
    ) == ChunkShapes((512, 256, 512), (512, 256, 512))


@given(st.tuples(*[st.integers(1, 40)] * 3), BLOCKS, st.integers(1, 4000), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_voxel_is_copied_once_and_every_slice_read_once(shape, block, window_bytes, sliced):
    array = np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)
    source = facts(shape, (1, *shape[1:]) if sliced else (1, 1, 1), channels=2)
    out = np.zeros_like(array)
    put = np.zeros(shape, int)
    slices = np.zeros(shape[0], int)

    def read(box):
        slices[box.start[0] : box.stop[0]] += 1
        assert (
            not sliced
            or box.shape[0] == 1
            or math.prod(box.shape) * 2 <= max(window_bytes, 2 * math.prod(block))
        )
        return array[(slice(None), *box.slices_in(source.bounds))]

    def write(box, values):
        assert box.start == tuple(a // b * b for a, b in zip(box.start, block, strict=True)), (
            "on a block"
        )
        where = box.slices_in(source.bounds)
        out[(slice(None), *where)] = values
        put[where] += 1

    shapes = choose_chunk_shapes(source, block, window_bytes)
    chunks = ChunkGrid(source.bounds, shapes.chunk)
    for index in range(chunks.count):
        copy(read, write, chunks.core_box(index), shapes, source, window_bytes)
    np.testing.assert_array_equal(out, array)
    assert (put == 1).all()
    assert not sliced or (slices == 1).all()


def test_a_slab_that_does_not_fit_onto_the_disk(monkeypatch):
    shape = (64, 10**7, 10**7)
    source = facts(shape, (1, *shape[1:]))
    shapes = choose_chunk_shapes(source, (64, 64, 64))
    assert shapes.scratch_bytes(source) == math.prod(shape)
    with pytest.raises(WorkerFault, match=f"{tempfile.gettempdir()} has .* left; .* Set TMPDIR"):
        copy(None, None, source.bounds, shapes, source)


def test_default_blocks():
    assert default_block_shape((1000, 1000, 1000), (8, 8, 8)) == (64, 64, 64)
    assert default_block_shape((1000, 1000, 1000), (40, 4, 4)) == (16, 128, 128)
    assert default_block_shape((18, 1000, 1000), (8, 8, 8)) == (32, 64, 64)
    assert default_block_shape((1, 1000, 1000), (8, 8, 8)) == (1, 128, 128)
