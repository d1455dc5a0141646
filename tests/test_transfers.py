"""Between host and GPU, where there is none: a stand-in makes every copy as late as CUDA may, when it is waited for."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.predictors.transfers import Downloads, Uploads

CPU = torch.device("cpu")


class LateStream:
    """A stream whose copies wait until an event after them is waited for."""

    current = None

    def __init__(self, device=None):
        self.copies = []

    def record_event(self):
        return LateEvent(self, len(self.copies))

    def wait_event(self, event):
        event.synchronize()

    def wait_stream(self, other):
        other.record_event().synchronize()


class LateEvent:
    def __init__(self, stream, count):
        self.stream, self.count = stream, count

    def synchronize(self):
        for k in range(self.count):
            self.stream.copies[k]()
            self.stream.copies[k] = lambda: None


@pytest.fixture(autouse=True, scope="module")
def late_copies():
    copy = torch.Tensor.copy_
    computing = LateStream()

    def late_copy(self, source, non_blocking=False):
        if not non_blocking:
            return copy(self, source)
        LateStream.current.copies.append(lambda: copy(self, source))
        return self

    @contextmanager
    def within(stream):
        LateStream.current = stream
        yield
        LateStream.current = None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", late_copy)
        patched.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
        patched.setattr(torch.cuda, "Stream", LateStream)
        patched.setattr(torch.cuda, "stream", within)
        patched.setattr(torch.cuda, "current_stream", lambda device: computing)
        yield


ARRAYS = st.lists(
    st.tuples(st.sampled_from(["uint8", "uint16", "int16", "float32"]), st.integers(1, 6), st.integers(1, 6)),
    min_size=1,
    max_size=5,
)


@given(kinds=ARRAYS, order=st.randoms(use_true_random=False))
def test_uploads_arrive_whole_whenever_they_are_asked_for(kinds, order):
    uploads = Uploads(CPU)
    arrays = [np.full((2, z, x), 1 + k, dtype) for k, (dtype, z, x) in enumerate(kinds)]
    arrived = [uploads.begin(array.copy()) for array in arrays]
    sequence = list(range(len(arrays)))
    order.shuffle(sequence)
    for k in sequence:
        np.testing.assert_array_equal(arrived[k]().numpy(), arrays[k])
        assert arrived[k]().numpy().dtype == arrays[k].dtype


def test_an_upload_is_not_awaited_before_it_is_asked_for():
    uploads = Uploads(CPU)
    arrived = uploads.begin(np.ones((1, 2, 3, 4), np.uint8))
    assert len(uploads._stream.copies) == 1
    late = uploads._stream.copies[0]
    arrived()
    assert uploads._stream.copies[0] is not late


@given(kinds=ARRAYS)
def test_a_download_is_good_until_the_next_begins(kinds):
    downloads = Downloads(CPU)
    for k, (dtype, z, x) in enumerate(kinds):
        array = np.full((2, z, x), 1 + k, dtype)
        arrived = downloads.begin(torch.from_numpy(array), 100)
        np.testing.assert_array_equal(arrived(), array)


def test_memory_is_taken_once_for_the_largest():
    downloads = Downloads(CPU)
    first = downloads.begin(torch.ones(5), 40)()
    second = downloads.begin(torch.zeros(40), 40)()
    assert first.ctypes.data == second.ctypes.data
