"""Local files and folders that a job names, and their hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import unquote, urlsplit

from beam_inference.config.siblings import files_beside
from beam_inference.errors import ModelContractError


def local_path(path: str) -> Path | None:
    """The local path that a path or a ``file://`` URL means; None for another URL."""
    if path.startswith("file://"):
        path = unquote(urlsplit(path).path)
    return None if "://" in path else Path(path)


def existing_file(path: str, key: str, *, is_folder: bool = False) -> Path:
    """A local file, or folder, that a job names under a key.

    Raises:
        ModelContractError: there is none.
    """
    if path.startswith("file://"):
        if "?" in path or "#" in path:
            raise ModelContractError(
                f"{key}: expected the path of a file after file://, found {path}, whose part from "
                "? or # on names none. Remove that; in a file's own name write %3F for ? and %23 "
                "for #."
            )
        path = unquote(urlsplit(path).path)
    if "://" in path:
        raise ModelContractError(
            f"{key}: {path} cannot be read from there; copy it to a local file, and name that"
        )
    file = Path(path)
    if is_folder and not file.is_dir():
        raise ModelContractError(f"{key}: there is no folder {file}")
    if not is_folder and file.is_dir():
        hint = f". A package must not be named {file.suffix}: rename it" if file.suffix else ""
        raise ModelContractError(f"{key}: {file} is a folder, and a file is expected{hint}")
    if not is_folder and not file.is_file():
        raise ModelContractError(f"{key}: there is no file {file}")
    return file


def code_sha256(path: Path) -> str:
    """The hash of a file; of Python code, with that of each module beside it that it imports.

    Raises:
        ModelContractError: as :func:`file_sha256`.
    """
    own = file_sha256(path)
    beside = files_beside(path) if path.suffix == ".py" else []
    if not beside:
        return own
    lines = [f"{own}\n", *(f"{name} {file_sha256(file)}\n" for name, file in beside)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """The hash, in hexadecimal, of a local file's content, or of a folder's files and names.

    Raises:
        ModelContractError: the folder holds a link to a folder, or a name of more than one line, of
            which the hash could not tell what is loaded.
    """
    if path.is_dir():
        digest = hashlib.sha256()
        for inner in sorted(path.rglob("*")):
            name = inner.relative_to(path).as_posix()
            if not name.isprintable() or (inner.is_symlink() and inner.is_dir()):
                raise ModelContractError(
                    f"{path} holds {name!a:.100}: expected files and folders with printable names, "
                    "no links to folders, so that all of it is part of the job's identity. Copy it "
                    "without links (cp -rL)."
                )
            if inner.is_file():
                digest.update(f"{name} {file_sha256(inner)}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
