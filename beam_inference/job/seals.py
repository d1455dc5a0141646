"""Seals: a checksum of its text stands at the end of each record of a chunk, and of ``job.json``.

A record whose text was torn, or changed by anything but this package, does not fit its seal and is
not believed. Records of versions that wrote no seals have none, and are read as they are.
"""

from __future__ import annotations

import hashlib
import re

from beam_inference.errors import StateError

_SEAL = re.compile(rb',"seal":"([0-9a-f]{16})"}\s*\Z')


def seal_record(text: str) -> str:
    """Return the text of a JSON object with its seal as the last member.

    Args:
        text: a JSON object with at least one member.
    """
    return f'{text.removesuffix("}")},"seal":"{_checksum(text.encode())}"}}'


def open_record(text: bytes) -> bytes:
    """Return the JSON object that was sealed; a text without a seal is returned as it is.

    Raises:
        StateError: the text is not the one that was sealed. The message is the end of a sentence.
    """
    match = _SEAL.search(text)
    if match is None:
        return text
    content = text[: match.start()] + b"}"
    if _checksum(content) != match[1].decode():
        raise StateError("its content does not fit its seal: it was changed after it was written")
    return content


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
