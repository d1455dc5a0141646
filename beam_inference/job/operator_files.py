"""The files that operators need, such as functions of the user's: fetched, and known by hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from beam_inference.config.job import OUTPUT
from beam_inference.config.operators import Operator
from beam_inference.config.storage import Storage
from beam_inference.models.local_files import code_sha256, existing_file
from beam_inference.volumes.fetch import fetch_file
from beam_inference.volumes.kvstores import LOCAL


def local_operators(
    operators: Sequence[Operator],
    storage: Storage = LOCAL,
    sha256: Mapping[str, str] | None = None,
    *,
    output: str = OUTPUT,
) -> list[Operator]:
    """Operators with their files on this machine: those in object stores are fetched, and kept.

    Args:
        operators: of the job file.
        storage: how stores are reached.
        sha256: what :func:`operator_sha256` gave at launch; copies that agree with it are used
            again, by every worker process of this machine.
        output: the key of the output whose values they change.

    Raises:
        ModelContractError: a file is absent, cannot be fetched, or a fetched one is not the one
            that the job was launched with.
    """
    return [
        _local_operator(operator, key, storage, (sha256 or {}).get(key))
        for key, operator in _by_key(operators, output)
    ]


def operator_sha256(operators: Sequence[Operator], output: str = OUTPUT) -> dict[str, str]:
    """Hashes of the files that operators need, which are on this machine.

    Args:
        operators: of an output.
        output: its key.

    Returns:
        By ``postprocess.NUMBER``, or ``outputs.NAME.postprocess.NUMBER``, for the operators that
        have files: the hash of its file, or those of its files with a "+" between them.

    Raises:
        ModelContractError: a file is absent.
    """
    return {
        key: "+".join(code_sha256(existing_file(path, key)) for path in operator.needed_files)
        for key, operator in _by_key(operators, output)
        if operator.needed_files
    }


def _local_operator(operator: Operator, key: str, storage: Storage, sha256: str | None) -> Operator:
    paths = list(operator.needed_files)
    hashes = sha256.split("+") if sha256 is not None else [None] * len(paths)
    local = {
        path: str(existing_file(fetch_file(path, key, storage, digest), key))
        for path, digest in zip(paths, hashes, strict=True)
    }
    return operator.with_absolute_paths(lambda path: local.get(path, path))


def _by_key(operators: Sequence[Operator], output: str) -> list[tuple[str, Operator]]:
    return [(operator_key(number, output), each) for number, each in enumerate(operators)]


def operator_key(number: int, output: str = OUTPUT) -> str:
    """The key of an operator in the job file.

    Args:
        number: its place among those of its output.
        output: the key of the output.
    """
    prefix = "" if output == OUTPUT else f"{output}."
    return f"{prefix}postprocess.{number}"
