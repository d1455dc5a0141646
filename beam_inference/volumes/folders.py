"""What lies in a folder of a store, which is listed or deleted.

TensorStore lists all stores but Google Cloud Storage. There its driver takes a page that is refused
for the last one (``ListTask::OnResponseImpl`` in its ``gcs_key_value_store.cc``, up to 0.1.86 at
least): without the right to list, a folder would seem empty, and after a refusal midway the rest of
it would be missing without an error. Google's own client raises what each page answers.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from itertools import takewhile
from operator import methodcaller
from typing import Any, Protocol

import tensorstore as ts

from beam_inference.config.storage import Storage
from beam_inference.errors import WorkerFault
from beam_inference.volumes.kvstores import (
    PATIENCE_SECONDS,
    TRANSFER_SECONDS,
    KvStore,
    leads_elsewhere,
    local_folder,
    open_kvstore,
    refuse_link,
    retry_request,
)

logger = logging.getLogger(__name__)

ALL_KEYS = ts.KvStore.KeyRange()
"""Of the folder that a store was opened at."""

_DELETED_AT_ONCE = 1000
"""Names that an object store is asked to delete at a time."""

_GOOGLE = "https://storage.googleapis.com"
_READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"
_RETRY_SECONDS = 10
"""How long Google's client asks for a page again; whoever lists does so some times, too."""

_turns = threading.BoundedSemaphore(8)
"""Of listings by Google's client, which keeps some connections for later requests."""

_STATUS_OF_CODE = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    412: "FAILED_PRECONDITION",
    416: "OUT_OF_RANGE",
    429: "RESOURCE_EXHAUSTED",
}


class Listing(Protocol):
    """A listing that is under way."""

    def result(self, timeout: float | None = None) -> list[bytes]:
        """Wait for the names, relative to the store's folder.

        Raises:
            ValueError, OSError: as TensorStore does, with the status first; also where a page is
                refused, or there is no answer in time.
        """


def list_keys(
    store: KvStore,
    storage: Storage,
    keys: ts.KvStore.KeyRange = ALL_KEYS,
    *,
    timeout: float = PATIENCE_SECONDS,
) -> list[bytes]:
    """List the names of a range in a store, in no order.

    Args:
        store: the open store.
        storage: the settings that it was opened with.
        keys: the range.
        timeout: seconds to wait.

    Raises:
        ValueError, OSError: as :meth:`Listing.result`.
        NotImplementedError: the store cannot list, as a web server.
    """
    return begin_listing(store, storage, keys).result(timeout)


def begin_listing(
    store: KvStore, storage: Storage, keys: ts.KvStore.KeyRange = ALL_KEYS
) -> Listing:
    """Begin to list the names of a range; the arguments are those of :func:`list_keys`."""
    place = store.spec().to_json()
    if place["driver"] != "gcs":
        listing: Listing = store.list(keys)
        return listing
    # TensorStore knows an endpoint from this variable, too.
    endpoint = storage.gcs.endpoint or os.environ.get("TENSORSTORE_GCS_HTTP_URL") or _GOOGLE
    return _BucketListing(
        endpoint.rstrip("/"),
        place["bucket"],
        storage.gcs.user_project,
        place.get("path", ""),
        keys,
    )


class _BucketListing:
    """A listing by Google's client, in a thread of its own.

    Threads of a pool are waited for when a process ends, and a store may never answer.

    Args:
        endpoint: URL of the server.
        bucket: the bucket's name.
        user_project: who is billed.
        folder: beginning of the names, which is taken off.
        keys: the range, of what is left of them.
    """

    def __init__(
        self,
        endpoint: str,
        bucket: str,
        user_project: str | None,
        folder: str,
        keys: ts.KvStore.KeyRange,
    ) -> None:
        self._names: Future[list[bytes]] = Future()
        self._is_over = False

        def list_names() -> None:
            try:
                client = _client(endpoint)
                with _turns:
                    pages = _begin_pages(client.bucket(bucket, user_project), folder, keys)
                    names = _read_names(takewhile(lambda _: not self._is_over, pages))
                within = filter(methodcaller("startswith", folder), names)
                self._names.set_result([name.removeprefix(folder).encode() for name in within])
            except Exception as error:  # which is raised where the names are waited for
                self._names.set_exception(error)

        threading.Thread(target=list_names, name="list-bucket", daemon=True).start()

    def result(self, timeout: float | None = None) -> list[bytes]:
        """As :meth:`Listing.result`; a listing that took too long is given up."""
        try:
            return self._names.result(timeout)
        except TimeoutError:
            self._is_over = True
            raise


def leads_astray(name: bytes) -> bool:
    """Whether a listed name has ``.`` or ``..`` between its slashes.

    S3 takes any name, and TensorStore's request for one like that is for another object: what sends
    it takes ``a/../b`` for ``b``.
    """
    return not {b".", b".."}.isdisjoint(name.split(b"/"))


def delete_folder(url: str, storage: Storage, folder: str = "") -> None:
    """Delete everything in a folder of a store, such as ``receipts/``; by default all of the store.

    A store that is deleted is a folder of ours in a folder of ours: neither may be a link.

    Args:
        url: of the store.
        storage: how it is reached.
        folder: with a slash at its end.

    Raises:
        WorkerFault: it cannot be done, or a link leads out of the store.
    """
    if not folder:
        refuse_link(url)
    elif leads_elsewhere(url, folder.rstrip("/")):
        raise WorkerFault(
            f"{url}/{folder} may lie outside of {url}, by a link: it is not removed. Remove the "
            "link yourself, or choose another place."
        )
    store = open_kvstore(url, storage)
    keys = ts.KvStore.KeyRange(folder, folder[:-1] + "0" if folder else "")  # "0" comes after "/"

    def delete() -> None:
        if local_folder(url) is not None:
            store.delete_range(keys).result(timeout=TRANSFER_SECONDS)
            return
        # Name by name: of an object store, delete_range takes what is listed, wherever it lies.
        listed = list_keys(store, storage, keys, timeout=TRANSFER_SECONDS)
        names = [name for name in listed if name.startswith(folder.encode())]
        elsewhere = list(filter(leads_astray, names))
        if elsewhere:
            logger.warning(
                "%s holds objects such as %r, which are left there: by their names they "
                "may lie elsewhere, and are not ours",
                url,
                elsewhere[0][:300],
            )
        names = [name for name in names if not leads_astray(name)]
        for first in range(0, len(names), _DELETED_AT_ONCE):
            some = names[first : first + _DELETED_AT_ONCE]
            for deleted in [store.write(name, None) for name in some]:
                deleted.result(timeout=PATIENCE_SECONDS)

    retry_request("delete", f"{url}/{folder}", delete)


def _begin_pages(bucket: Any, folder: str, keys: ts.KvStore.KeyRange) -> Iterable[Any]:
    """The pages of a listing of a folder of a bucket, all of them objects of Google's client."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    listing = bucket.list_blobs(
        prefix=folder or None,
        start_offset=folder + keys.inclusive_min.decode(),
        end_offset=folder + keys.exclusive_max.decode() if keys.exclusive_max else None,
        fields="items(name),nextPageToken",
        retry=DEFAULT_RETRY.with_delay(0.1, 8.0, 2.0).with_timeout(_RETRY_SECONDS),
    )
    pages: Iterable[Any] = listing.pages
    return pages


def _read_names(pages: Iterable[Any]) -> list[str]:
    """Read the names of objects, from pages of them; errors are as TensorStore's.

    Raises:
        ValueError: a page is refused, or is none, or there is none after some attempts.
    """
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError
    from requests import RequestException

    try:
        return [blob.name for page in pages for blob in page]
    except GoogleAPICallError as error:
        status = _STATUS_OF_CODE.get(error.code or 0, "UNAVAILABLE")
        raise ValueError(f"{status}: {error}") from error
    except (RetryError, RequestException) as error:
        raise ValueError(f"UNAVAILABLE: {error}") from error
    except GoogleAuthError as error:
        raise ValueError(
            f"UNAUTHENTICATED: {error} Google's application default credentials are needed: see "
            "`gcloud auth application-default login`"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"INTERNAL: the answer is no page of a listing: {error}") from error


@functools.cache
def _client(endpoint: str) -> Any:
    """Google's client for an endpoint, with the application default credentials, if there are any.

    Nobody's token goes over a connection that is not encrypted.
    """
    # Imported here: they take a third of a second, and only jobs on Google Cloud need them.
    import google.auth
    from google.api_core.client_options import ClientOptions
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud.storage import Client

    credentials: Any = AnonymousCredentials()  # type: ignore[no-untyped-call]
    if not endpoint.startswith("http://"):
        with suppress(DefaultCredentialsError):  # public buckets need none, and others say so
            credentials, _ = google.auth.default(scopes=[_READ_ONLY])
    return Client(
        project="none-is-needed-to-list",
        credentials=credentials,
        client_options=ClientOptions(api_endpoint=endpoint),
    )
