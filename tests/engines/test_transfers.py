"""Copies between host and GPU, without a GPU: a stand-in makes each as late as a GPU may."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.engines.torch_device import TorchDevice
from beam_inference.engines.transfers import Downloads, Uploads

CPU = torch.device("cpu")


def done():
    """In the place of a copy that was made."""


class LateStream:
    """A stream whose copies wait until an event after them is waited for."""

    current = None

    def __init__(self, device=None):
        self.copies = []
        self.lock = threading.Lock()

    def __enter__(self):
        LateStream.current = self

    def __exit__(self, *_):
        LateStream.current = None

    def record_event(self):
        return LateEvent(self, len(self.copies))

    def wait_event(self, event):
        event.synchronize()

    def wait_stream(self, other):
        other.record_event().synchronize()


class LateEvent:
    def __init__(self, stream, count):
        self.stream = stream
        self.count = count

    def synchronize(self):
        with self.stream.lock:
            for k in range(self.count):
                self.stream.copies[k]()
                self.stream.copies[k] = done


@pytest.fixture(autouse=True, scope="module")
def streams():
    """The stream that computes, and which tensors were recorded for which streams."""
    copy = torch.Tensor.copy_
    computing = LateStream()
    recorded = []

    def late_copy(self, source, non_blocking=False):
        if not non_blocking:
            return copy(self, source)
        LateStream.current.copies.append(lambda: copy(self, source))
        return self

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", late_copy)
        patched.setattr(
            torch.Tensor,
            "record_stream",
            lambda self, stream: recorded.append((self.data_ptr(), stream)),
        )
        patched.setattr(torch, "Stream", LateStream)
        patched.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
        patched.setattr(torch.accelerator, "current_stream", lambda device: computing)
        yield SimpleNamespace(computing=computing, recorded=recorded)


KINDS = st.tuples(
    st.sampled_from(["uint8", "uint16", "int16", "float32"]), st.integers(1, 6), st.integers(1, 6)
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "take", "take", "forget"]), st.integers(0, 9), KINDS
    )
)


def filled(value, kind):
    dtype, z, x = kind
    return np.full((2, z, x), value, dtype)


@given(steps=STEPS)
def test_uploads_arrive_whole_once_whenever_they_are_taken(streams, steps):
    """Or are not sent, where another one waits."""
    uploads = Uploads(CPU)
    held = {}
    waiting = None
    for number, (step, which, kind) in enumerate(steps):
        if step == "begin":
            array = filled(1 + number, kind)
            waiting = number if waiting is None else waiting
            held[number] = uploads.begin(array.copy()), array
        elif held:
            chosen = sorted(held)[which % len(held)]
            take, array = held[chosen]
            is_sent = waiting == chosen
            waiting = None if is_sent else waiting
            if step == "forget":
                del held[chosen], take
                continue
            before = len(streams.recorded)
            tensor = take()
            assert (tensor is not None) == is_sent
            if tensor is not None:
                np.testing.assert_array_equal(tensor.numpy(), array)
                assert tensor.numpy().dtype == array.dtype
                assert streams.recorded[before:] == [(tensor.data_ptr(), streams.computing)]


def test_what_is_dropped_was_not_sent_and_nothing_is_any_more():
    stream = LateStream()
    uploads = Uploads(CPU, stream)
    array = np.ones((1, 2, 3, 4), np.uint8)
    assert not uploads.give_up()
    assert uploads.begin(array)() is not None
    assert not uploads.give_up()
    take = uploads.begin(array)
    assert uploads.give_up()
    assert take() is None
    assert uploads.begin(array)() is None
    assert not uploads.give_up()
    assert len(stream.copies) == 2


def test_an_upload_is_not_awaited_before_it_is_taken():
    stream = LateStream()
    take = Uploads(CPU, stream).begin(np.ones((1, 2, 3, 4), np.uint8))
    assert stream.copies != [done]
    take()
    assert stream.copies == [done]


def test_where_there_is_no_room_an_array_is_brought_in_its_turn(monkeypatch):
    empty = torch.empty
    array = np.ones((1, 2, 3, 4), np.uint8)
    stream = LateStream()
    device = TorchDevice(CPU, uploads=Uploads(CPU, stream))

    def no_room(*size, **options):
        if "device" in options:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*size, **options)

    with monkeypatch.context() as full:
        full.setattr(torch, "empty", no_room)
        arrived = device.begin_upload(array)
    np.testing.assert_array_equal(arrived(), array)
    np.testing.assert_array_equal(device.begin_upload(array)(), array)
    assert stream.copies == [], "and it is not tried again"


def test_threads_do_not_write_into_what_another_one_sends():
    uploads = Uploads(CPU)

    def sent(value):
        array = np.full((1, 50, 60, 70), value, np.uint8)
        tensor = uploads.begin(array)()
        return tensor is None or bool((tensor == value).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(sent, range(200)))


@given(kinds=st.lists(KINDS, min_size=1, max_size=5))
def test_a_download_waits_for_what_is_computed_and_is_good_until_the_next_begins(streams, kinds):
    stream = LateStream()
    downloads = Downloads(CPU, stream)
    for k, kind in enumerate(kinds):
        array = filled(1 + k, kind)
        tensor = torch.zeros(array.shape, dtype=getattr(torch, array.dtype.name))
        with streams.computing:
            # as a kernel that has yet to run
            tensor.copy_(torch.from_numpy(array), non_blocking=True)
        arrived = downloads.begin(tensor, 100)
        assert streams.recorded[-1] == (tensor.data_ptr(), stream)
        np.testing.assert_array_equal(arrived(), array)


def test_memory_is_taken_once_for_the_largest():
    downloads = Downloads(CPU)
    first = downloads.begin(torch.ones(5), 40)()
    second = downloads.begin(torch.zeros(40), 40)()
    assert first.ctypes.data == second.ctypes.data
