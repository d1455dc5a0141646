"""Test the stand-in for Cloud Storage with google-cloud-storage, TensorStore and Beam."""

import gzip
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from statistics import median

import apache_beam as beam
import numpy as np
import pytest
import requests
from apache_beam.io.filesystems import FileSystems
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from fakes.gcs import GcsStandIn

QUICK_RETRY = DEFAULT_RETRY.with_delay(initial=0.005, maximum=0.05)
MEBIBYTE = 1 << 20


def noise(size):
    return np.random.default_rng(size).bytes(size)


@pytest.fixture
def gcs():
    with GcsStandIn(["bucket", "other"]) as served:
        yield served


def connect(gcs):
    return storage.Client("p", AnonymousCredentials(), client_options={"api_endpoint": gcs.url})


@pytest.fixture
def client(gcs):
    connected = connect(gcs)
    yield connected
    connected.close()


@pytest.fixture
def bucket(client):
    return client.bucket("bucket")


@pytest.fixture
def http():
    with requests.Session() as session:
        yield session


class TestGoogleCloudStorage:
    def test_an_object_and_its_metadata(self, gcs, bucket):
        data = b"--line\r\n\r\n\n\x00\xff\r\n"  # what a careless multipart parser would cut
        blob = bucket.blob("folder/ü +%2F?.bin")
        blob.metadata = {"key": "value"}
        blob.upload_from_string(data, content_type="text/x")
        assert gcs.get("bucket", "folder/ü +%2F?.bin") == data
        found = bucket.get_blob("folder/ü +%2F?.bin")
        assert (found.size, found.content_type, found.metadata) == (
            len(data),
            "text/x",
            {"key": "value"},
        )
        assert (found.generation, found.crc32c, found.md5_hash) == (
            blob.generation,
            blob.crc32c,
            blob.md5_hash,
        )
        assert found.download_as_bytes(checksum="md5") == data
        found.metadata = {"key": "other"}
        found.patch(if_metageneration_match=1)
        assert (found.generation, found.metageneration) == (blob.generation, 2)
        with pytest.raises(exceptions.PreconditionFailed):
            found.patch(if_metageneration_match=1)
        assert bucket.blob("absent").exists() is False

    @pytest.mark.parametrize("size", [0, 1, MEBIBYTE, 3 * MEBIBYTE + 5])
    def test_resumable_upload_in_chunks(self, gcs, bucket, size):
        data = noise(size)
        blob = bucket.blob("large", chunk_size=MEBIBYTE // 2)
        with blob.open("wb") as file:
            file.write(data)
        assert gcs.get("bucket", "large") == data
        assert bucket.blob("large", chunk_size=MEBIBYTE).download_as_bytes() == data
        assert gcs.requests["PUT upload"] == size // (MEBIBYTE // 2) + 1  # the last may be empty

    def test_large_upload_at_once(self, gcs, bucket):
        # from 8 MiB on the client uses an upload session
        bucket.blob("large").upload_from_string(noise(9 * MEBIBYTE))
        assert gcs.get("bucket", "large") == noise(9 * MEBIBYTE)
        assert gcs.requests["PUT upload"] == 1

    @pytest.mark.parametrize(
        ("start", "end"), [(0, 0), (3, 6), (5, None), (8, 100), (-4, None), (-100, None)]
    )
    def test_ranges(self, gcs, bucket, start, end):
        gcs.put("bucket", "a", b"0123456789")
        expected = b"0123456789"[start : None if end is None else end + 1]
        assert bucket.blob("a").download_as_bytes(start=start, end=end) == expected

        with pytest.raises(exceptions.RequestRangeNotSatisfiable):
            bucket.blob("a").download_as_bytes(start=10)

    def test_compressed_objects_arrive_decompressed(self, gcs, bucket):
        gcs.put("bucket", "a", gzip.compress(b"text"), contentEncoding="gzip")
        assert bucket.blob("a").download_as_bytes() == b"text"
        assert gzip.decompress(bucket.blob("a").download_as_bytes(raw_download=True)) == b"text"

    def test_preconditions(self, gcs, bucket):
        first = gcs.put("bucket", "a", b"first")
        second = gcs.put("bucket", "a", b"second")
        assert second > first
        blob = bucket.blob("a")
        for generation in (0, first):
            with pytest.raises(exceptions.PreconditionFailed):
                blob.upload_from_string(b"third", if_generation_match=generation)
            with pytest.raises(exceptions.PreconditionFailed):
                blob.delete(if_generation_match=generation)
        with pytest.raises(exceptions.NotModified):
            blob.reload(if_generation_not_match=second)
        with pytest.raises(exceptions.NotFound):
            bucket.blob("a", generation=first).download_as_bytes()
        assert gcs.get("bucket", "a") == b"second"
        blob.upload_from_string(b"third", if_generation_match=second)
        bucket.blob("new").upload_from_string(b"new", if_generation_match=0)
        blob.delete(if_generation_match=blob.generation)
        assert gcs.names("bucket") == ["new"]

    @pytest.mark.parametrize("page_size", [1, 2, 3, 1000])
    def test_listing(self, gcs, client, page_size):
        names = sorted(["a", "b", "b/", "b/c", "b/c/d", "b/e", "b0", "é/x", "z/y/z"])
        for name in names:
            gcs.put("bucket", name, b"")

        def listed(**options):
            pages = client.list_blobs("bucket", page_size=page_size, **options)
            return [blob.name for blob in pages], sorted(pages.prefixes)

        assert listed() == (names, [])
        assert listed(prefix="b") == (["b", "b/", "b/c", "b/c/d", "b/e", "b0"], [])
        assert listed(delimiter="/") == (["a", "b", "b0"], ["b/", "z/", "é/"])
        assert listed(prefix="b/", delimiter="/") == (["b/", "b/c", "b/e"], ["b/c/"])
        assert listed(start_offset="b/c", end_offset="b0") == (["b/c", "b/c/d", "b/e"], [])
        assert listed(prefix="nothing") == ([], [])
        assert gcs.requests["GET list"] >= len(names) / page_size

    def test_buckets(self, client):
        client.create_bucket("third")
        assert [bucket.name for bucket in client.list_buckets()] == ["bucket", "other", "third"]
        assert client.lookup_bucket("third").soft_delete_policy.retention_duration_seconds == 0
        assert client.lookup_bucket("absent") is None
        with pytest.raises(exceptions.Conflict):
            client.create_bucket("bucket")
        with pytest.raises(exceptions.NotFound):
            client.bucket("absent").blob("a").upload_from_string(b"")

    def test_batch(self, gcs, client, bucket):
        for name in "abc":
            gcs.put("bucket", name, name.encode())
        with pytest.raises(exceptions.NotFound), client.batch():
            bucket.delete_blobs(["a", "absent", "b"])
        assert gcs.names("bucket") == ["c"]
        with client.batch():
            bucket.copy_blob(bucket.blob("c"), client.bucket("other"), "d/e")
            patched = bucket.blob("c")
            patched.content_type = "text/y"
            patched.patch()
        assert gcs.get("other", "d/e") == b"c"
        assert patched.content_type == "text/y"
        assert (gcs.requests["POST batch"], gcs.requests["DELETE object"]) == (2, 3)

    def test_copies_and_compositions(self, gcs, client, bucket):
        generation = gcs.put("bucket", "a/b", b"data", contentType="text/x")
        source = bucket.blob("a/b")
        other = client.bucket("other")
        copied = bucket.copy_blob(source, other, "c/d")
        rewritten = other.blob("e/f")
        assert rewritten.rewrite(source, if_source_generation_match=generation) == (None, 4, 4)
        assert gcs.get("other", "c/d") == gcs.get("other", "e/f") == b"data"
        assert copied.content_type == rewritten.content_type == "text/x"
        assert generation < copied.generation < rewritten.generation
        for options in ({"if_source_generation_match": 1}, {"if_generation_match": 0}):
            with pytest.raises(exceptions.PreconditionFailed):
                rewritten.rewrite(source, **options)
        other.blob("g").compose([copied, rewritten])
        assert gcs.get("other", "g") == b"datadata"


class TestUploadSessions:
    def start(self, gcs, http, **query):
        query = {"uploadType": "resumable", "name": "a", **query}
        return http.post(f"{gcs.url}/upload/storage/v1/b/bucket/o", params=query)

    def test_a_chunk_sent_twice_counts_once(self, gcs, http):
        location = self.start(gcs, http).headers["Location"]

        def send(span, data=b""):
            answer = http.put(location, data=data, headers={"Content-Range": f"bytes {span}"})
            return answer.status_code, answer.headers.get("Range")

        assert send("*/*") == (308, None)
        assert send("0-3/*", b"0123") == (308, "bytes=0-3")
        assert send("0-3/*", b"0123") == (308, "bytes=0-3")
        assert send("2-5/*", b"2345") == (308, "bytes=0-5")
        assert send("*/10") == (308, "bytes=0-5")
        assert send("8-9/10", b"89") == (400, None)
        assert gcs.names("bucket") == []
        assert send("6-9/10", b"6789")[0] == 200
        generation = gcs.buckets["bucket"]["a"].generation
        # the client did not see the first answer
        assert send("6-9/10", b"6789")[0] == send("*/10")[0] == 200
        assert gcs.get("bucket", "a") == b"0123456789"
        assert gcs.buckets["bucket"]["a"].generation == generation

    def test_preconditions_hold_when_it_begins_and_when_it_ends(self, gcs, http):
        location = self.start(gcs, http, ifGenerationMatch="0").headers["Location"]
        gcs.put("bucket", "a", b"of another writer")
        assert self.start(gcs, http, ifGenerationMatch="0").status_code == 412
        assert http.put(location, data=b"late").status_code == 412
        assert gcs.get("bucket", "a") == b"of another writer"
        assert http.delete(location).status_code == 499
        assert http.put(location, data=b"cancelled").status_code == 404


class TestServer:
    def test_checksum_chunked_transfer_and_head(self, gcs, http):
        upload = f"{gcs.url}/upload/storage/v1/b/bucket/o?uploadType=media&name=a"
        assert (
            http.post(upload, data=b"data", headers={"X-Goog-Hash": "crc32c=AAAAAA=="}).status_code
            == 400
        )
        assert gcs.names("bucket") == []
        assert http.post(upload, data=iter([b"da", b"ta"])).json()["size"] == "4"
        answer = http.head(f"{gcs.url}/storage/v1/b/bucket/o/a?alt=media")
        assert (
            answer.headers["Content-Length"],
            answer.headers["X-Goog-Stored-Content-Length"],
        ) == ("4", "4")

    def test_small_requests_are_quick(self, gcs, http):
        gcs.put("bucket", "a", b"data")
        url = f"{gcs.url}/storage/v1/b/bucket/o/a?alt=media"
        seconds = [http.get(url).elapsed.total_seconds() for _ in range(100)]
        assert median(seconds) < 0.02  # about 1 ms; an acknowledgement waited for would be 40 ms

    @pytest.mark.parametrize(
        ("header", "status"), [(None, 401), ("Bearer wrong", 401), ("Bearer secret", 200)]
    )
    def test_token_and_latency(self, http, header, status):
        with GcsStandIn("bucket", required_token="secret", latency=0.05) as gcs:
            answer = http.get(f"{gcs.url}/storage/v1/b/bucket", headers={"Authorization": header})
            assert answer.status_code == status
            assert answer.elapsed.total_seconds() >= 0.05

    def test_what_has_ended_answers_no_more_and_comes_back_as_it_was(self, http):
        stand_in = GcsStandIn("bucket")
        with stand_in:
            url = f"{stand_in.url}/storage/v1/b/bucket/o/a"
            stand_in.put("bucket", "a", b"data")
            assert http.get(url).status_code == 200  # the session keeps its connection
        with pytest.raises(requests.ConnectionError):
            http.get(url)
        with stand_in:
            assert http.get(url).status_code == 200

    def test_what_it_cannot_do_fails_the_test(self, http):
        with (
            pytest.raises(AssertionError, match="GET /storage/v1/b/bucket/acl"),
            GcsStandIn("bucket") as gcs,
        ):
            assert http.get(f"{gcs.url}/storage/v1/b/bucket/acl").status_code == 501

    def test_as_a_program(self, http):
        command = [
            sys.executable,
            "-m",
            "fakes.gcs",
            "bucket",
            "--fail-rate",
            "0.3",
            "--latency",
            "0.001",
        ]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            url = process.stdout.readline().strip()
            statuses = [http.get(f"{url}/storage/v1/b/bucket").status_code for _ in range(40)]
            counts = http.get(f"{url}/_counts").json()
            process.terminate()
        assert set(statuses) == {200, 429, 503}
        assert counts["requests"] == {"GET bucket": 40}
        assert sum(counts["failures"].values()) == 40 - statuses.count(200)


class TestInjectedFailures:
    def upload(self, seed):
        with GcsStandIn("bucket", fail_rate=0.5, seed=seed) as gcs, requests.Session() as http:
            url = f"{gcs.url}/upload/storage/v1/b/bucket/o?uploadType=media&name="
            return [http.post(f"{url}{number}").status_code for number in range(60)], gcs

    def test_some_are_carried_out_all_the_same(self):
        statuses, gcs = self.upload(seed=1)
        after = gcs.failures["POST upload 503 after"]
        before = gcs.failures["POST upload 503 before"] + gcs.failures["POST upload 429 before"]
        assert min(after, before) > 3
        assert statuses.count(200) == 60 - before - after
        assert len(gcs.names("bucket")) == 60 - before
        assert statuses == self.upload(seed=1)[0] != self.upload(seed=2)[0]

    def test_google_cloud_storage_rides_them_out(self):
        with GcsStandIn("bucket", fail_rate=0.2) as gcs:
            client = connect(gcs)
            for number in range(20):
                blob = client.bucket("bucket").blob(f"small/{number}")
                blob.upload_from_string(noise(number), retry=QUICK_RETRY)
                assert blob.download_as_bytes(retry=QUICK_RETRY) == noise(number)
            large = client.bucket("bucket").blob("large", chunk_size=MEBIBYTE // 4)
            large.upload_from_string(noise(9 * MEBIBYTE), retry=QUICK_RETRY)
            assert len(list(client.list_blobs("bucket", page_size=2, retry=QUICK_RETRY))) == 21
            client.close()
            assert gcs.get("bucket", "large") == noise(9 * MEBIBYTE)
            assert any(kind.startswith("PUT upload 503 after") for kind in gcs.failures)


def in_tensorstore(gcs, code):
    """What a fresh process prints as JSON: TensorStore reads the endpoint once."""
    prelude = """
        import json, numpy as np, tensorstore as ts
        retries = {"initial_delay": "5ms", "max_delay": "50ms"}
        kvstore = {"driver": "gcs", "bucket": "bucket", "path": "volume/"}
        kvstore["gcs_request_retries"] = retries
    """
    environment = {**os.environ, "TENSORSTORE_GCS_HTTP_URL": gcs.url}
    command = [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TestTensorStore:
    def test_keys_and_values(self, gcs):
        gcs.put("bucket", "outside", b"")
        states, some, left = in_tensorstore(
            gcs,
            """
            store = ts.KvStore.open(kvstore).result()
            missing = store.read("a b/ü").result()
            first = store.write("a b/ü", b"first").result().generation
            second = store.write("a b/ü", b"second", if_equal=first).result().generation
            states = [missing.state, store.read("a b/ü", if_not_equal=second).result().state]
            for stale in (missing.stamp.generation, first):
                late = store.write("a b/ü", b"late", if_equal=stale).result()
                states.append(len(late.generation))
            for number in range(10):
                store.write(f"n/{number}", b"", if_equal=missing.stamp.generation).result()
            some = [key.decode() for key in store.list(ts.KvStore.KeyRange("n/3", "n/6")).result()]
            store.delete_range(ts.KvStore.KeyRange("n/1", "n/9")).result()
            left = sorted(key.decode() for key in store.list().result())
            print(json.dumps([states, some, left]))
            """,
        )
        # a conditional write that lost has no generation
        assert states == ["missing", "unspecified", 0, 0]
        assert (some, left) == (["n/3", "n/4", "n/5"], ["a b/ü", "n/0", "n/9"])
        assert gcs.names("bucket") == ["outside", "volume/a b/ü", "volume/n/0", "volume/n/9"]
        assert gcs.get("bucket", "volume/a b/ü") == b"second"

    @pytest.mark.parametrize("sharded", [False, True])
    def test_two_writers_of_the_same_blocks_through_failures(self, sharded):
        grid = {"name": "regular", "configuration": {"chunk_shape": [16, 32, 32]}}
        metadata = {"shape": [64] * 3, "data_type": "uint16", "chunk_grid": grid}
        if sharded:
            metadata["codecs"] = [
                {"name": "sharding_indexed", "configuration": {"chunk_shape": [8, 8, 8]}}
            ]
        with GcsStandIn("bucket", fail_rate=0.2) as gcs:
            same = in_tensorstore(
                gcs,
                f"""
                spec = {{"driver": "zarr3", "kvstore": kvstore, "metadata": {metadata}}}
                opened = [
                    ts.open(spec, open=True, create=True, context=ts.Context()).result()
                    for _ in range(2)
                ]
                voxels = np.random.default_rng(0).integers(1, 1 << 16, (64,) * 3, dtype=np.uint16)
                # two to a block, of one writer each
                slabs = [slice(at, at + 8) for at in range(0, 64, 8)]
                writes = [
                    opened[i % 2][z, y].write(voxels[z, y])
                    for i, z in enumerate(slabs)
                    for y in slabs
                ]
                for write in writes:
                    write.result()
                again = ts.open({{"driver": "zarr3", "kvstore": kvstore}}).result()
                part = again[3:9, 5:40, 1:2].read().result()  # of a shard, byte ranges
                whole = again.read().result()
                same = [(part == voxels[3:9, 5:40, 1:2]).all(), (whole == voxels).all()]
                print(json.dumps([bool(it) for it in same]))
                """,
            )
        assert same == [True, True]
        assert len(gcs.names("bucket", "volume/c/")) == 16
        assert sum(gcs.failures.values()) > 5


class TestBeam:
    @pytest.fixture(autouse=True)
    def emulated(self, gcs, monkeypatch):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)

    def test_files(self, gcs):
        data = noise(2 * MEBIBYTE)
        for name in ("a", "b"):
            with FileSystems.create(f"gs://bucket/in/{name}.bin") as file:
                file.write(data)
        assert gcs.get("bucket", "in/a.bin") == data
        with FileSystems.open("gs://bucket/in/a.bin") as file:
            file.seek(MEBIBYTE)
            assert file.read(100) == data[MEBIBYTE : MEBIBYTE + 100]
        matched = FileSystems.match(["gs://bucket/in/*.bin"])[0].metadata_list
        assert [(file.path, file.size_in_bytes) for file in matched] == [
            (f"gs://bucket/in/{name}.bin", len(data)) for name in "ab"
        ]
        FileSystems.rename(
            ["gs://bucket/in/a.bin", "gs://bucket/in/b.bin"], ["gs://other/c", "gs://bucket/d"]
        )
        FileSystems.copy(["gs://other/c"], ["gs://bucket/e"])
        assert (gcs.names("bucket"), gcs.names("other")) == (["d", "e"], ["c"])
        assert gcs.get("bucket", "e") == data
        assert FileSystems.exists("gs://bucket/e")
        FileSystems.delete(["gs://bucket/*", "gs://other/c"])
        assert (gcs.names("bucket"), gcs.names("other")) == ([], [])

    def test_files_written_by_a_pipeline(self, gcs):
        with beam.Pipeline("FnApiRunner") as pipeline:
            lines = pipeline | beam.Create([f"line {number}" for number in range(10)])
            _ = lines | beam.io.WriteToText("gs://bucket/lines", num_shards=2)
        assert gcs.names("bucket") == ["lines-00000-of-00002", "lines-00001-of-00002"]
        text = b"".join(gcs.get("bucket", name) for name in gcs.names("bucket"))
        assert sorted(text.decode().split("\n")[:-1]) == [f"line {number}" for number in range(10)]
