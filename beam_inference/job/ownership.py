"""Whose an output is: a small file in it names the jobs that write there, and where.

Jobs whose states lie in different folders would otherwise not know of each other, and could write
different blocks into one place. Jobs whose regions of interest are disjoint share an output.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import tensorstore as ts
from pydantic import ValidationError

from beam_inference.config.fields import Frozen, SafeLine, describe_fault
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.stage_job import KINDS_OF_VOLUMES, StageJob, record_of
from beam_inference.job.stage_records import StageRecords
from beam_inference.job.state import STATE_FOLDER, State, state_folder_of
from beam_inference.volumes.conditional_writes import create_key, replace_value
from beam_inference.volumes.kvstores import PATIENCE_SECONDS, open_kvstore, retry_request

_KEY = "owners.json"
_CLAIM_SECONDS = 60.0
"""How long a claim is repeated while others claim, too."""


class Owner(Frozen):
    """A job that writes into an output.

    Attributes:
        fingerprint: fingerprint of the job.
        roi: the voxels that it writes.
        state_url: its state folder; None if that lies in the output, where it may be moved.
        state_id: see :meth:`beam_inference.job.state.State.read_id`. The same job may have several
            states, and only some of them speak of what lies in the output now.
    """

    fingerprint: SafeLine
    roi: BoundingBox
    state_url: str | None
    state_id: SafeLine | None = None

    def excludes(self, other: Owner) -> bool:
        """Whether this job and another one cannot both write into an output."""
        is_other = self.fingerprint != other.fingerprint
        return is_other and self.roi.intersection(other.roi).size > 0

    def is_recorded_as(self, recorded: Owner) -> bool:
        """Whether an owner that an output names is this one; older versions recorded no state."""
        return self.fingerprint == recorded.fingerprint and recorded.state_id in (
            None,
            self.state_id,
        )

    def replaces(self, recorded: Owner) -> bool:
        """Whether an owner that an output names is this one, or had its state folder before."""
        is_same = self.fingerprint == recorded.fingerprint
        is_there = is_same and self.state_url == recorded.state_url
        return is_there or self.is_recorded_as(recorded)


class _Owners(Frozen):
    owners: list[Owner]


def owner_of(job: ResolvedJob, state: State) -> Owner:
    """Return a job as an owner of its output.

    Args:
        job: the job.
        state: its state folder.

    Raises:
        WorkerFault: the state folder cannot be read.
    """
    is_inside = state.url == state_folder_of(job.config.output.path)
    return Owner(
        fingerprint=job.fingerprint,
        roi=job.plan.chunks.roi,
        state_url=None if is_inside else state.url,
        state_id=state.read_id(),
    )


def check_owner(output_url: str, owner: Owner, storage: Storage) -> None:
    """Refuse to write where another job writes.

    Args:
        output_url: URL of the output.
        owner: the job that is to write there.
        storage: settings of the object stores.

    Raises:
        StateError: another job writes some of the same voxels, or made the volume; or the owners
            cannot be read.
        WorkerFault: the output cannot be read.
    """
    file = _OwnersFile(output_url, storage)
    earlier = file.read()
    _refuse_conflict(earlier, owner, output_url)
    if not earlier:
        file.refuse_stages()


def claim_output(output_url: str, owner: Owner, storage: Storage, *, replace: bool) -> None:
    """Record in an output that a job writes there.

    Args:
        output_url: URL of the output.
        owner: the job that is to write there.
        storage: settings of the object stores.
        replace: whether to take over what belongs to other jobs.

    Raises:
        StateError: another job writes some of the same voxels, or a command does.
        WorkerFault: the output cannot be written.
    """
    file = _OwnersFile(output_url, storage)
    deadline = time.monotonic() + _CLAIM_SECONDS
    while time.monotonic() < deadline:
        earlier = _read_others_kept(file, owner) if replace else file.read()
        _refuse_conflict(earlier, owner, output_url)
        if not (earlier or replace):  # a command may have begun there since the launch looked
            file.refuse_stages()
        others = [each for each in earlier if not owner.replaces(each)]
        if file.write([*others, owner]):
            return
    raise WorkerFault(f"others write {file.url} all the time: try again")


def refuse_owned(output_url: str, storage: Storage) -> None:
    """Refuse to make a volume where a job is about to write its output.

    Args:
        output_url: URL of the volume, which is not there yet.
        storage: settings of the object stores.

    Raises:
        StateError: a job is, or nobody knows whether one is.
        WorkerFault: its folder cannot be read.
    """
    for owner in _OwnersFile(output_url, storage).read():
        raise StateError(
            f"{output_url} belongs to a job (fingerprint {owner.fingerprint[:12]}), whose state is "
            f"in {owner.state_url or state_folder_of(output_url)}, and which has begun there. Use "
            "another target, or pass --overwrite to replace what that job writes."
        )


_TAKEN_OVER = (
    "another launch or a command has taken the place over (--overwrite) while this one was at "
    "work, or records were removed"
)


def check_records(job: StageJob) -> None:
    """Refuse to write what a command makes where its records are another's by now.

    Raises:
        WorkerFault: they are, or cannot be read.
    """
    try:
        is_own = StageRecords(job).has_begun()
        if job.kind in KINDS_OF_VOLUMES:  # which no job writes into before they are complete
            output_url = job.state_url.removesuffix(f"/{STATE_FOLDER}")
            is_own = is_own and not _OwnersFile(output_url, job.storage).read()
    except StateError as error:
        raise WorkerFault(str(error)) from None
    if not is_own:
        raise WorkerFault(
            f"this launch writes nothing more: {job.state_url}/{job.record} is not of this command "
            f"any more, because {_TAKEN_OVER}"
        )


def check_claims(
    job: ResolvedJob, state: State, output_urls: Iterable[str], storage: Storage
) -> None:
    """Check that a job's outputs still name it, so that its receipts speak of what lies there.

    Args:
        job: the job, of which chunks are done.
        state: its state folder.
        output_urls: paths or URLs of its outputs.
        storage: settings of the object stores.

    Raises:
        StateError: one is gone, or belongs to others.
        WorkerFault: one cannot be read.
    """
    owner = owner_of(job, state)
    for output_url in output_urls:
        file = _OwnersFile(output_url, storage)
        if not _names(file, owner, output_url):
            raise StateError(
                f"{file.url} does not name this job with its state {state.url} any more: the "
                f"output {output_url} was removed, or taken over by a command or another job "
                "(--overwrite), or made anew with another state, so the receipts of this one say "
                "nothing of what lies there now. Put the output back, name the state that it was "
                "made with (job.state_path), or run with --overwrite to compute every chunk again."
            )


class Claim:
    """A job's claim on one of its outputs, which workers look up before they write.

    Another job may have taken the output over since the launch, with ``--overwrite``, while this
    one still runs.

    Args:
        job: the job, whose launch has claimed the output.
        state: its state folder.
        output_url: URL of the output.
    """

    def __init__(self, job: ResolvedJob, state: State, output_url: str) -> None:
        self._owner = owner_of(job, state)
        self._output_url = output_url
        self._file = _OwnersFile(self._output_url, job.config.storage)

    def check(self) -> None:
        """Refuse to write where another job writes by now, or a command has made the volume anew.

        Raises:
            WorkerFault: another does, or nobody knows which jobs do.
        """
        try:
            is_named = _names(self._file, self._owner, self._output_url)
        except StateError as error:
            raise WorkerFault(f"this launch writes nothing more: {error}") from None
        if not is_named:
            raise WorkerFault(
                f"this launch writes nothing more: {self._file.url} does not name its job any "
                f"more, because {_TAKEN_OVER}"
            )


class _OwnersFile:
    """The file of the owners in an output.

    Args:
        output_url: URL of the output.
        storage: settings of the object stores.

    Attributes:
        url: URL of the file.
    """

    def __init__(self, output_url: str, storage: Storage) -> None:
        self._folder = state_folder_of(output_url)
        self._storage = storage
        self._store = open_kvstore(self._folder, storage)
        self._generation: bytes | None = None
        self.url = f"{self._folder}/{_KEY}"

    def read(self) -> list[Owner]:
        """Read the owners; the next :meth:`write` replaces these alone.

        Raises:
            StateError: the file is damaged.
        """
        text = self._read()
        if text is None:
            return self._owners_of_former_versions()
        try:
            return _Owners.model_validate_json(text).owners
        except ValidationError as error:
            raise StateError(
                f"{self.url} cannot be understood ({describe_fault(error)}): it is damaged, so "
                "that nobody knows which jobs write this output. Remove that file if no other job "
                "does."
            ) from None

    def write(self, owners: Sequence[Owner]) -> bool:
        """Write the owners, unless somebody else has written since they were read."""
        text = _Owners(owners=list(owners)).model_dump_json(indent=1)
        generation = self._generation

        def write() -> bool:
            if generation is None:
                return create_key(self._store, _KEY, self._folder, text)
            return replace_value(self._store, _KEY, self._folder, text, generation)

        return bool(retry_request("write", self.url, write))

    def refuse_stages(self) -> None:
        """Refuse an output that has no owners, and was made by a command. Raises StateError."""
        for kind in KINDS_OF_VOLUMES:
            if self._request(record_of(kind)).state == "value":
                raise StateError(
                    f"{self._folder}/{kind} holds records of {kind}, which has made the voxels of "
                    "this output: they would be overwritten. Use another output.path, or pass "
                    "--overwrite to take the output over."
                )

    def _request(self, key: str) -> ts.KvStore.ReadResult:
        return retry_request(
            "read",
            f"{self._folder}/{key}",
            lambda: self._store.read(key).result(timeout=PATIENCE_SECONDS),
        )

    def _read(self) -> bytes | None:
        result = self._request(_KEY)
        is_there = result.state == "value"
        self._generation = result.stamp.generation if is_there else None
        return bytes(result.value) if is_there else None

    def _owners_of_former_versions(self) -> list[Owner]:
        """The job whose state lies in the output: versions before named no owners."""
        job = State(self._folder, self._storage).load_job()
        return [] if job is None else [owner_of(job, State(self._folder, self._storage))]


def _names(file: _OwnersFile, owner: Owner, output_url: str) -> bool:
    """Whether an output names an owner. Raises StateError if another job writes there."""
    owners = file.read()
    _refuse_conflict(owners, owner, output_url)
    return any(map(owner.is_recorded_as, owners))


def _read_others_kept(file: _OwnersFile, owner: Owner) -> list[Owner]:
    """Read the owners that a job leaves in place when it takes over the output."""
    try:
        earlier = file.read()
    except StateError:
        return []
    return [each for each in earlier if not owner.excludes(each)]


def _refuse_conflict(earlier: Sequence[Owner], owner: Owner, output_url: str) -> None:
    for other in earlier:
        if owner.excludes(other):
            raise StateError(
                f"{other.roi} of the output {output_url} belongs to another job (fingerprint "
                f"{other.fingerprint[:12]}, this one {owner.fingerprint[:12]}), whose state is in "
                f"{other.state_url or state_folder_of(output_url)}; this one would overwrite "
                "blocks that its receipts list. Use another output.path or roi, or pass "
                "--overwrite to take the output over and compute every chunk again."
            )
