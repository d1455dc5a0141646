"""Whose an output is: a small file in it names the one job that may write there.

Two jobs whose states lie in different folders would otherwise not know of each other, and write
their blocks into one volume.
"""

from __future__ import annotations

from pydantic import ValidationError

from beam_inference.config.fields import Frozen
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError
from beam_inference.job.state import STATE_FOLDER, State
from beam_inference.volumes.conditional_writes import create_key
from beam_inference.volumes.kvstores import PATIENCE_SECONDS, open_kvstore, retry_request

_KEY = "owner.json"


class Owner(Frozen):
    """The job that an output belongs to.

    Attributes:
        fingerprint: fingerprint of the job.
        state_url: its state folder; None if that lies in the output, where it may be moved.
    """

    fingerprint: str
    state_url: str | None


def owner_of(output_url: str, state_url: str, fingerprint: str) -> Owner:
    """Return the owner of an output that a job writes.

    Args:
        output_url: URL of the output.
        state_url: URL of the job's state folder.
        fingerprint: fingerprint of the job.
    """
    is_inside = state_url == _folder(output_url)
    return Owner(fingerprint=fingerprint, state_url=None if is_inside else state_url)


def check_owner(output_url: str, owner: Owner, storage: Storage) -> None:
    """Refuse to write into an output of another job.

    Args:
        output_url: URL of the output.
        owner: the job that is to write there.
        storage: settings of the object stores.

    Raises:
        StateError: the output belongs to another job.
        WorkerFault: the output cannot be read.
    """
    earlier = _read_owner(output_url, storage)
    if earlier is None and owner.state_url is not None:  # versions before wrote no owner
        job = State(_folder(output_url), storage).load_job()
        earlier = None if job is None else Owner(fingerprint=job.fingerprint, state_url=None)
    if earlier is not None and earlier.fingerprint != owner.fingerprint:
        raise StateError(
            f"the output {output_url} belongs to another job (fingerprint "
            f"{earlier.fingerprint[:12]}, this one {owner.fingerprint[:12]}), whose state is in "
            f"{earlier.state_url or _folder(output_url)}; this one would overwrite blocks that its "
            "receipts list. Use another output.path, or pass --overwrite to take the output over "
            "and compute every chunk again."
        )


def claim_output(output_url: str, owner: Owner, storage: Storage, *, replace: bool) -> None:
    """Record in an output that it belongs to a job.

    Args:
        output_url: URL of the output.
        owner: the job that is to write there.
        storage: settings of the object stores.
        replace: whether to take the output over, if it belongs to another job.

    Raises:
        StateError: another job was faster.
        WorkerFault: the output cannot be written.
    """
    folder = _folder(output_url)
    store = open_kvstore(folder, storage)
    text = owner.model_dump_json()
    url = f"{folder}/{_KEY}"
    if replace:
        retry_request(
            "write", url, lambda: store.write(_KEY, text).result(timeout=PATIENCE_SECONDS)
        )
    elif not retry_request("write", url, lambda: create_key(store, _KEY, folder, text)):
        check_owner(output_url, owner, storage)


def _read_owner(output_url: str, storage: Storage) -> Owner | None:
    folder = _folder(output_url)
    store = open_kvstore(folder, storage)
    url = f"{folder}/{_KEY}"
    result = retry_request("read", url, lambda: store.read(_KEY).result(timeout=PATIENCE_SECONDS))
    if result.state != "value":
        return None
    try:
        return Owner.model_validate_json(bytes(result.value))
    except ValidationError as error:
        raise StateError(
            f"{url} cannot be understood ({error.errors()[0]['msg']}): it is damaged, so that "
            "nobody knows which job this output belongs to. Remove that file if no other job "
            "writes there."
        ) from None


def _folder(output_url: str) -> str:
    return f"{output_url.rstrip('/')}/{STATE_FOLDER}"
