"""Test what is listed in a store and deleted from it, where a bucket refuses, fails, or errs."""

import json
import time
from urllib.parse import quote

import pytest
import tensorstore as ts
from fakes.gcs import GcsStandIn, error_response
from fakes.http_stand_in import Response
from fakes.s3 import KEYS, S3StandIn
from google.auth.credentials import AnonymousCredentials
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError, WorkerFault
from beam_inference.job.chunk_records import ChunkEntries
from beam_inference.volumes import folders
from beam_inference.volumes.folders import delete_folder, list_keys
from beam_inference.volumes.kvstores import open_kvstore
from beam_inference.volumes.remote_names import list_remote_files


@pytest.fixture(scope="module")
def bucket():
    with GcsStandIn(["data"]) as gcs:
        yield gcs, Storage.model_validate({"gcs": {"endpoint": gcs.url}})


FOREIGN = "other/of-another-volume-with-a-name-that-is-longer-than-the-folder-of-ours"


class AddsForeignNames(GcsStandIn):
    """A store whose listings name an object outside of the folder that was asked for."""

    def _receive(self, request):
        response = super()._receive(request)
        if request.method == "GET" and request.path.endswith("/o") and response.status == 200:
            listed = json.loads(response.body)
            if listed.get("items"):
                listed["items"].append({**listed["items"][0], "name": FOREIGN})
            return Response.of_json(listed)
        return response


def test_what_a_store_lists_beyond_a_folder_is_not_deleted_with_it():
    with AddsForeignNames(["data"]) as gcs:
        for name in ("ours/state/a", "ours/state/b/c", "ours/statement", FOREIGN):
            gcs.put("data", name, b"content")
        storage = Storage.model_validate({"gcs": {"endpoint": gcs.url}})
        url = "gs://data/ours"
        delete_folder(url, storage, "state/")
        assert gcs.names("data") == sorted(["ours/statement", FOREIGN])
        delete_folder(url, storage)
        assert gcs.names("data") == [FOREIGN]


class RefusesAPage(GcsStandIn):
    """A store that answers a page of each listing, counted from zero, with an error."""

    def __init__(self, page, status):
        super().__init__(["data"])
        self.page = page
        self.status = status

    def _receive(self, request):
        is_listing = request.method == "GET" and request.path.endswith("/o")
        if is_listing and ("pageToken" in request.query) == bool(self.page):
            return error_response(self.status, "refused", "Not with this account.")
        return super()._receive(request)


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (404, "NOT_FOUND"),
        (412, "FAILED_PRECONDITION"),
    ],
)
def test_a_page_that_a_bucket_refuses_is_not_its_last(page, code, expected):
    with RefusesAPage(page, code) as gcs:
        for number in range(1300):
            gcs.put("data", f"s/z{number:04d}.png", b"")
            gcs.put("data", f"s/receipts/000000000/{number:012d}.json", b"")
        storage = Storage.model_validate({"gcs": {"endpoint": gcs.url}})
        store = open_kvstore("gs://data/s/", storage)
        reason = "Anonymous.*gcloud auth" if code == 401 else "Not with this account"
        with pytest.raises(ValueError, match=rf"^{expected}: .*{reason}"):
            list_keys(store, storage)
        with pytest.raises(VolumeError, match=rf"^cannot list gs://data/s/: {expected}"):
            list_remote_files("gs://data/s/*.png", storage)
        with pytest.raises(WorkerFault, match=rf"cannot list gs://data/s/receipts: {expected}"):
            ChunkEntries(store, "gs://data/s", storage, "receipts").count(0, 2000)
        with pytest.raises(WorkerFault, match=rf"cannot delete gs://data/s/: {expected}"):
            delete_folder("gs://data/s", storage)
        assert len(gcs.names("data")) == 2600


@pytest.mark.parametrize(
    "page", ["[]", '{"items": 3}', '{"items": [{}]}', '{"items": [{"name": 3}]}', "x"]
)
def test_an_answer_that_is_no_page_is_an_error(page):
    class Broken(GcsStandIn):
        def _receive(self, request):
            return Response(200, page.encode(), {"Content-Type": "application/json"})

    with Broken(["data"]) as gcs:
        storage = Storage.model_validate({"gcs": {"endpoint": gcs.url}})
        with pytest.raises(ValueError, match=r"^(INTERNAL|UNAVAILABLE): "):
            list_keys(open_kvstore("gs://data/s/", storage), storage)


@settings(max_examples=60, deadline=None)
@given(
    names=st.sets(st.text("ab/é\x01\U0001f600", min_size=1, max_size=5), max_size=12),
    folder=st.sampled_from(["", "a/", "a/b/", "é/"]),
    first=st.text("ab/é", max_size=3),
    last=st.text("ab/é", max_size=3),
)
def test_google_s_client_lists_what_tensorstore_would(bucket, names, folder, first, last):
    gcs, storage = bucket
    gcs.buckets["data"].clear()
    for name in names:
        gcs.put("data", name, b"")
    store = open_kvstore(f"gs://data/{quote(folder)}", storage)
    keys = ts.KvStore.KeyRange(first, last)
    listed = list_keys(store, storage, keys)
    assert sorted(listed) == sorted(store.list(keys).result())
    within = [name.removeprefix(folder) for name in names if name.startswith(folder)]
    assert sorted(listed) == sorted(
        name.encode() for name in within if name >= first and (not last or name < last)
    )


def test_a_busy_bucket_is_asked_again():
    with GcsStandIn(["data"], fail_rate=0.3, seed=2) as gcs:
        for number in range(2100):
            gcs.put("data", f"s/{number}", b"")
        storage = Storage.model_validate({"gcs": {"endpoint": gcs.url}})
        store = open_kvstore("gs://data/s/", storage)
        for _ in range(5):
            assert set(list_keys(store, storage)) == {str(n).encode() for n in range(2100)}
        assert sum(gcs.failures.values())


def test_nobody_s_token_goes_over_an_open_connection(tmp_path, monkeypatch):
    account = {
        "type": "authorized_user",
        "client_id": "a",
        "client_secret": "b",
        "refresh_token": "c",
    }
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    plain = folders._client("http://localhost:1/of-this-test")
    assert isinstance(plain._credentials, AnonymousCredentials)
    encrypted = folders._client("https://localhost:1/of-this-test")
    assert encrypted._credentials.refresh_token == "c"


@pytest.mark.parametrize("items", [[{"name": "s/a"}], []])
def test_a_listing_that_does_not_end_is_given_up(items):
    class Endless(GcsStandIn):
        def _receive(self, request):
            self.requests["page"] += 1
            return Response.of_json({"items": items, "nextPageToken": str(self.requests["page"])})

    with Endless(["data"]) as gcs:
        storage = Storage.model_validate({"gcs": {"endpoint": gcs.url}})
        with pytest.raises(TimeoutError):
            list_keys(open_kvstore("gs://data/s/", storage), storage, timeout=0.5)
        time.sleep(0.2)
        pages = gcs.requests["page"]
        time.sleep(0.2)
        assert gcs.requests["page"] == pages > 1


def test_names_that_lead_elsewhere_are_neither_deleted_nor_read(monkeypatch, caplog):
    """What sends TensorStore's requests to S3 takes ``a/../b`` for ``b``."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with S3StandIn(["dotted", "beside"]) as s3:
        client = s3.client()
        inside = ["out/state/a", "out/state/b/c"]
        odd = ["out/state/../../x/info", "out/state/../../../beside/info", "out/state/./a"]
        for name in (*inside, *odd, "x/info", "out/a"):
            client.put_object(Bucket="dotted", Key=name, Body=b"content")
        client.put_object(Bucket="beside", Key="info", Body=b"content")
        storage = Storage.model_validate({"s3": {"endpoint": s3.url, "region": "us-east-1"}})
        with pytest.raises(VolumeError, match=r"'\.\./\.\./x/info'.*may lie elsewhere"):
            list_remote_files("s3://dotted/out/state/*/*/*/*", storage)
        delete_folder("s3://dotted/out", storage, "state/")
        assert sorted(s3.names("dotted")) == sorted([*odd, "out/a", "x/info"])
        assert s3.names("beside") == ["info"]
        assert "which are left there" in caplog.text
