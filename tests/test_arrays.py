import gc
import threading
import zlib

import numpy as np
import pytest

from beam_inference import arrays
from beam_inference.job.records import crc32

LARGE = (3, 100, 1000)  # of float32: above what is mapped


@pytest.fixture(autouse=True, scope="module")
def own_garbage_only():
    """Keep what other tests left out of the searches for garbage before each test here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_idle():
    gc.collect()
    arrays.give_back()


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("shape", [(), (0, 5), (2, 3, 4), LARGE])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.uint64])
def test_arrays_are_of_the_shape_and_dtype_and_can_be_written(shape, dtype):
    for made in (arrays.zeros(shape, dtype), arrays.empty(shape, dtype)):
        assert made.shape == shape
        assert made.dtype == dtype
        assert made.flags.c_contiguous
        made[...] = 1
        assert (made == 1).all()
    assert not arrays.zeros(shape, dtype).any()


def test_memory_is_kept_for_the_next_array_of_its_size_which_is_zero_again():
    first = arrays.zeros(LARGE, np.float32)
    first[:] = 7
    at = address(first)
    view = first[1:]
    del first
    assert address(arrays.empty(LARGE, np.float32)) != at  # a view is left
    arrays.give_back()
    del view
    again = arrays.zeros(LARGE, np.float32)
    assert address(again) == at
    assert not again.any()


def kept():
    """How much memory is kept, in pieces."""
    return len(arrays.pool.kept_sizes)


def test_memory_of_another_size_is_given_back_rather_than_kept_beside():
    array = arrays.empty(LARGE, np.float32)
    assert kept() == 0
    del array
    assert kept() == 1
    half = arrays.empty((3, 100, 500), np.float64)  # as many bytes: the same memory
    assert kept() == 0
    del half
    assert kept() == 1
    larger = arrays.empty((6, 100, 1000), np.float32)
    assert kept() == 0
    del larger
    smaller = arrays.empty(LARGE, np.float32)
    assert kept() == 0
    del smaller
    arrays.give_back()
    assert kept() == 0
    assert not arrays.pool.lent_sizes


def test_what_the_system_has_no_room_for_is_a_memory_error():
    with pytest.raises(MemoryError, match="no memory for an array of"):
        arrays.empty((2**50,), np.uint8)


def test_threads_never_share_memory():
    failures = []

    def work(value):
        for _ in range(200):
            array = arrays.empty((300, 1000), np.float32)
            array[:] = value
            if not (array == value).all():
                failures.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("dtype", ["uint8", "<f4", ">f4", ">u8"])
def test_the_crc_is_of_the_bytes_in_c_order_however_they_lie(dtype):
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).astype(dtype)
    expected = zlib.crc32(array.astype(array.dtype.newbyteorder("<")).tobytes())
    for same in (array, np.asfortranarray(array), np.flip(np.flip(array, 1).copy(), 1)):
        assert crc32(same) == expected
