"""Arrays that stages write for one another come back as they were."""

import numpy as np
import pytest

from beam_inference.errors import StateError
from beam_inference.segmentation.records import RECORD
from beam_inference.segmentation.scratch import Scratch
from beam_inference.volumes.kvstores import LOCAL, open_kvstore


def arrays():
    random = np.random.default_rng(0)
    records = np.zeros(3, RECORD)
    records["start"] = random.integers(0, 99, (3, 3))
    records["sums"] = random.random((3, 3))
    return {
        "labels": random.integers(0, 9, (4, 5, 6)).astype(np.uint32),
        "turned": random.random((3, 4)).T,
        "nothing": np.zeros((0, 2), np.int64),
        "one": np.array(7),
        "joined": random.random((1, 5, 6)) < 0.5,
        "records": records,
    }


def test_arrays_come_back_with_their_dtypes_and_shapes():
    scratch = Scratch("memory://scratch-arrays", LOCAL)
    written = arrays()
    scratch.write("kind", 12, **written)
    read = scratch.read("kind", 12)
    assert list(read) == list(written)
    for name, array in written.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read[name], array)


def test_every_byte_that_is_changed_or_cut_off_is_noticed():
    url = "memory://scratch-damaged"
    scratch = Scratch(url, LOCAL)
    scratch.write("kind", 0, **arrays())
    store = open_kvstore(url, LOCAL)
    key = "kind/000000000/000000000000"
    whole = store.read(key).result().value
    harmless = 4  # the first bytes: a flag of the frame's that is reserved, for one
    for place in range(harmless, len(whole)):
        changed = bytes([whole[place] ^ 0xFF])
        for content in (whole[:place], whole[:place] + changed + whole[place + 1 :]):
            store.write(key, content).result()
            with pytest.raises(StateError, match="is damaged"):
                scratch.read("kind", 0)
