"""Arrays that stages write for one another come back as they were."""

import numpy as np
import pytest

from beam_inference.errors import StateError, WorkerFault
from beam_inference.segmentation.records import RECORD
from beam_inference.segmentation.scratch import RecordsPart, Scratch
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


def test_the_file_of_another_chunk_kind_or_job_is_refused():
    url = "memory://scratch-exchanged/0123"
    scratch = Scratch(url, LOCAL)
    scratch.write("kind", 0, **arrays())
    scratch.write("other", 1, **arrays())
    content = open_kvstore(url, LOCAL).read("kind/000000000/000000000000").result().value
    for store, key in (
        (url, "kind/000000000/000000000001"),
        (url, "other/000000000/000000000000"),
        ("memory://scratch-exchanged/4567", "kind/000000000/000000000000"),
    ):
        open_kvstore(store, LOCAL).write(key, content).result()
        kind, _, name = key.split("/")
        with pytest.raises(StateError, match="its content is not that of"):
            Scratch(store, LOCAL).read(kind, int(name))


def test_an_array_that_a_file_lacks_is_told():
    scratch = Scratch("memory://scratch-lacking", LOCAL)
    scratch.write("kind", 0, one=np.zeros(3))
    with pytest.raises(StateError, match="kind/000000000/000000000000 lacks an array"):
        scratch.read("kind", 0)["other"]


def test_a_file_that_unpacks_to_more_than_is_free_is_refused(monkeypatch):
    url = "memory://scratch-large"
    scratch = Scratch(url, LOCAL)
    scratch.write("kind", 0, labels=np.zeros((512, 512, 512), np.uint8))
    assert len(open_kvstore(url, LOCAL).read("kind/000000000/000000000000").result().value) < 1e5
    monkeypatch.setattr("beam_inference.volumes.packed_arrays.available_memory", lambda: 2**27)
    with pytest.raises(StateError, match=r"it unpacks to 134,.* bytes, and 134,217,728 are free"):
        scratch.read("kind", 0)


@pytest.mark.parametrize("damage", ["a bit", "exchanged"])
def test_parts_of_records_that_were_changed_are_noticed(tmp_path, damage):
    scratch = Scratch(tmp_path.as_uri(), LOCAL)
    records = np.zeros(5, RECORD)
    records["first"] = np.arange(5)
    for index in range(2):
        scratch.write_records("kind", index, records[index:], [0, 2, 2, len(records) - index])
    parts = [RecordsPart(0, 1, 0, 2), RecordsPart(1, 3, 2, 4), RecordsPart(1, 2, 2, 2)]
    found = list(scratch.read_records("kind", parts, RECORD))
    assert [each["first"].tolist() for each in found] == [[0, 1], [3, 4], []]
    one, other = sorted(path for path in (tmp_path / "kind").rglob("*") if path.is_file())
    content = bytearray(one.read_bytes())
    if damage == "a bit":
        content[3] ^= 64
    else:
        content[: other.stat().st_size] = other.read_bytes()
    one.write_bytes(content)
    with pytest.raises(StateError, match="0 is damaged, or another one"):
        list(scratch.read_records("kind", parts[:1], RECORD))
    assert len(list(scratch.read_records("kind", parts[1:], RECORD))) == 2


@pytest.mark.parametrize("place", ["kind", "kind/000000000"])
def test_no_link_is_written_through(tmp_path, place):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = tmp_path / "scratch" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    scratch = Scratch((tmp_path / "scratch").as_uri(), LOCAL)
    with pytest.raises(WorkerFault, match=f"{link} is a link"):
        scratch.write("kind", 0, one=np.zeros(3))
    with pytest.raises(WorkerFault, match=f"{link} is a link"):
        scratch.write_records("kind", 0, np.zeros(1, RECORD), [1])
    assert not [*outside.iterdir()]
