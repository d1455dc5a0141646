"""Files that commands write beside their output: none of anybody else's is replaced."""

from __future__ import annotations

from pathlib import Path

from beam_inference.config.json_text import parse_json
from beam_inference.errors import ConfigError

_MARK = b'<meta name="generator" content="beam-inference">'
_HEAD_BYTES = 4096
_MOST_BYTES = 1 << 28


def check_page(flag: str, path: str) -> None:
    """Check that a page can be written to a file, which is absent or a page of ours.

    Args:
        flag: that names the file.
        path: of the file.

    Raises:
        ConfigError: its name or its folder is wrong, or another file lies there.
    """
    if Path(path).suffix not in (".html", ".htm"):
        raise ConfigError(f"{flag} {path}: write a name that ends with .html")
    check_folder(flag, path)
    _refuse_foreign(flag, path, is_ours=_MARK in _read(path, _HEAD_BYTES))


def check_result(flag: str, path: str, key: str) -> None:
    """Check that a JSON file can be written, which is absent or one of ours.

    Args:
        flag: that names the file.
        path: of the file.
        key: that those of ours have.

    Raises:
        ConfigError: its folder is wrong, or another file lies there.
    """
    check_folder(flag, path)
    try:
        values = parse_json(_read(path, _MOST_BYTES))
    except ValueError:
        values = None
    _refuse_foreign(flag, path, is_ours=isinstance(values, dict) and key in values)


def check_folder(flag: str, path: str) -> None:
    """Check that the folder of a file is there. Raises ConfigError."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}")


def _read(path: str, most: int) -> bytes:
    if not Path(path).is_file():
        return b""
    try:
        with Path(path).open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _refuse_foreign(flag: str, path: str, *, is_ours: bool) -> None:
    if not is_ours and Path(path).exists():
        raise ConfigError(
            f"{flag} {path}: another file lies there, which this command did not write. Remove it, "
            "or write another name"
        )
