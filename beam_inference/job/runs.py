"""Which chunks are to be done, as runs: those of an index range without a receipt, or those that a file names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry.partition import in_runs
from beam_inference.job.chunk_records import absent
from beam_inference.job.state import State
from beam_inference.volumes.kvstores import LOCAL, read_file


def missing_runs(
    index_range: tuple[int, int],
    state: State | None,
    length: int,
    receivers: Callable[[int], Iterable[int]] | None = None,
) -> Iterator[tuple[int, ...]]:
    """Runs of at most ``length`` chunks of a half-open index range; with ``state``, of those without a receipt.

    With ``receivers``, which tells the chunks that a chunk's patches touch, also of those whose
    patches are not computed while one of these has no receipt, and so may need them.
    """
    yield from in_runs(_missing(index_range, state, receivers), length)


def runs_of_file(
    url: str, fingerprint: str, count: int, length: int, storage: Storage = LOCAL
) -> Iterator[tuple[int, ...]]:
    """Runs of the chunks that a file names; see :func:`chunks_of_file`."""
    yield from in_runs(chunks_of_file(url, fingerprint, count, storage), length)


def chunks_of_file(url: str, fingerprint: str, count: int, storage: Storage = LOCAL) -> list[int]:
    """The chunks that a file names, in order, each once: a quarantine file, or chunk indices, one a line.

    Raises:
        ConfigError: the file is absent, belongs to a job with another fingerprint, or names a chunk
            that is not one of the ``count`` chunks of the job.
    """
    try:
        text = read_file(url, storage)
    except VolumeError as error:
        raise ConfigError(f"cannot read the chunks file: {error}") from None
    chunks = set()
    for number, line in enumerate(text.decode(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            index = entry["chunk"] if isinstance(entry, dict) else entry
        except (ValueError, KeyError):
            index = None
        if type(index) is not int:
            raise ConfigError(
                f"line {number} of the chunks file {url} is neither a chunk index nor a quarantine "
                f"record: {line[:80]}"
            )
        if isinstance(entry, dict) and entry.get("fingerprint") != fingerprint:
            raise ConfigError(
                f"the chunks file {url} belongs to another job (fingerprint "
                f"{str(entry.get('fingerprint'))[:12]}, this one is {fingerprint[:12]}): its "
                "chunks are other boxes"
            )
        if not 0 <= index < count:
            raise ConfigError(
                f"line {number} of the chunks file {url}: there is no chunk {index}, only 0 … "
                f"{count - 1}"
            )
        chunks.add(index)
    if not chunks:
        raise ConfigError(f"the chunks file {url} names no chunk")
    return sorted(chunks)


def _missing(
    index_range: tuple[int, int],
    state: State | None,
    receivers: Callable[[int], Iterable[int]] | None,
) -> Iterator[int]:
    if state is None:
        yield from range(*index_range)
        return

    def done(start: int, stop: int) -> Iterable[int]:
        receipts = set(state.receipt_indices(start, stop))
        if receivers is None:
            return receipts
        waiting = {
            index: {*receivers(index)}
            for index in receipts.difference(state.sums_indices(start, stop))
        }
        elsewhere = {
            other for others in waiting.values() for other in others if not start <= other < stop
        }
        there = receipts.union(receipt.chunk for receipt in state.read_receipts(sorted(elsewhere)))
        return (index for index in receipts if waiting.get(index, set()) <= there)

    yield from absent(*index_range, done)
