"""Files are never torn by what a killed write left behind, and of several creators one wins."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import tensorstore as ts
from fakes.gcs import GcsStandIn

from beam_inference.config.formats import OutputSpec
from beam_inference.config.storage import Storage
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.conditional_writes import change_json, create_key, replace_value
from beam_inference.volumes.kvstores import open_kvstore
from beam_inference.volumes.outputs import create_output

REMAINS = b"x" * 5000


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store"


def leave_lock(path):
    """What SIGKILL leaves in the midst of a write with TensorStore's own locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.__lock").write_bytes(REMAINS)


class TestTornFiles:
    def test_tensorstore_with_its_locks_tears(self, tmp_path):
        """The defect in its smallest form: once this fails, our own ways can go."""
        leave_lock(tmp_path / "a.json")
        store = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
        store.write("a.json", "{}").result()
        assert (tmp_path / "a.json").read_bytes() == b"{}" + REMAINS[2:]

    def test_a_longer_lock_file_does_not_end_up_in_a_key(self, tmp_path, url):
        leave_lock(tmp_path / "store/a.json")
        store = open_kvstore(url)
        store.write("a.json", "{}").result()
        assert (tmp_path / "store/a.json").read_bytes() == b"{}"

    def test_nor_in_a_key_that_is_created_or_changed(self, tmp_path, url):
        leave_lock(tmp_path / "store/a.json")
        store = open_kvstore(url)
        assert create_key(store, "a.json", url, "{}")
        assert (tmp_path / "store/a.json").read_bytes() == b"{}"
        change_json(store, "a.json", url, lambda values: {**values, "b": 1})
        assert json.loads((tmp_path / "store/a.json").read_bytes()) == {"b": 1}

    @pytest.mark.parametrize("format", ["precomputed", "zarr3", "zarr2", "n5", "ome_zarr"])
    def test_nor_in_metadata_or_blocks(self, format, tmp_path, url):
        spec = OutputSpec(
            url=url,
            format=format,
            dtype="uint8",
            channels=1,
            labels=False,
            bounds=BoundingBox((0, 0, 0), (8, 8, 8)),
            block_shape=(8, 8, 8),
            voxel_size_nm=(1.0, 1.0, 1.0),
            storage=Storage(),
        )
        values = np.random.default_rng(0).integers(0, 256, (1, 8, 8, 8), dtype=np.uint8)
        create_output(spec).write(spec.bounds, values)
        files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
        written = {path: path.read_bytes() for path in files}
        for path in files:
            path.unlink()
            leave_lock(path)
        create_output(spec).write(spec.bounds, values)
        assert {path: path.read_bytes() for path in files} == written


def create(arguments):
    url, name = arguments
    return name if create_key(open_kvstore(url), "job.json", url, name * 1000) else None


class TestCreation:
    def test_of_several_processes_one_creates(self, tmp_path, url):
        names = [chr(ord("a") + number) for number in range(12)]
        with ProcessPoolExecutor(4, get_context("spawn")) as pool:
            (winner,) = filter(None, pool.map(create, [(url, name) for name in names]))
        assert (tmp_path / "store/job.json").read_text() == winner * 1000
        assert os.listdir(tmp_path / "store") == ["job.json"]

    def test_what_is_there_stays(self, tmp_path, url):
        store = open_kvstore(url)
        assert create_key(store, "deep/job.json", url, "one")
        assert not create_key(store, "deep/job.json", url, "another")
        assert (tmp_path / "store/deep/job.json").read_text() == "one"

    def test_in_an_object_store(self):
        with GcsStandIn(["bucket"]) as gcs:
            storage = Storage.model_validate({"gcs": {"endpoint": gcs.url}})
            store = open_kvstore("gs://bucket/store", storage)
            assert create_key(store, "job.json", "gs://bucket/store", "one")
            assert not create_key(store, "job.json", "gs://bucket/store", "another")
            assert gcs.get("bucket", "store/job.json") == b"one"


class TestReplacement:
    def test_a_value_that_changed_meanwhile_is_kept(self, tmp_path, url):
        store = open_kvstore(url)
        store.write("a", "1").result()
        before = store.read("a").result().stamp.generation
        store.write("a", "22").result()
        assert not replace_value(store, "a", url, "3", before)
        assert (tmp_path / "store/a").read_text() == "22"
        assert replace_value(store, "a", url, "3", store.read("a").result().stamp.generation)
        assert (tmp_path / "store/a").read_text() == "3"
        assert os.listdir(tmp_path / "store") == ["a"]

    def test_changes_of_several_processes_add_up(self, tmp_path, url):
        open_kvstore(url).write("a.json", "{}").result()
        with ProcessPoolExecutor(4, get_context("spawn")) as pool:
            list(pool.map(add_member, [(url, str(number)) for number in range(12)]))
        values = json.loads((tmp_path / "store/a.json").read_bytes())
        assert sorted(values, key=int) == [str(number) for number in range(12)]

    def test_a_killed_holder_of_the_lock_holds_nobody_up(self, tmp_path, url):
        store = open_kvstore(url)
        store.write("a", "1").result()
        script = (
            "import fcntl, os, sys, time\n"
            "file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
            "fcntl.flock(file, fcntl.LOCK_EX)\n"
            "print('held', flush=True)\n"
            "time.sleep(600)\n"
        )
        guard = tmp_path / "store/a.guard"
        command = [sys.executable, "-c", script, str(guard)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "held\n"
            process.send_signal(signal.SIGKILL)
        generation = store.read("a").result().stamp.generation
        start = time.monotonic()
        assert replace_value(store, "a", url, "2", generation)
        assert time.monotonic() - start < 10
        assert os.listdir(tmp_path / "store") == ["a"]


def test_who_is_interrupted_while_waiting_does_not_take_the_lock_away(tmp_path, monkeypatch):
    """Its file would have a new name then, and two would hold the lock."""
    url = f"file://{tmp_path}"
    store = open_kvstore(url)
    store.write("a", "1").result()
    generation = store.read("a").result().stamp.generation
    guard = tmp_path / "a.guard"
    guard.touch()  # as its holder has it

    def interrupt(descriptor, operation):
        raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_value(store, "a", url, "2", generation)
    assert guard.exists()
    assert (tmp_path / "a").read_text() == "1"


def add_member(arguments):
    url, name = arguments
    change_json(open_kvstore(url), "a.json", url, lambda values: {**values, name: name})
