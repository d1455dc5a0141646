"""Text and values of others, made fit for messages: short, without credentials, on one terminal.

What a user, a store, a file or code that a job names brings into a message comes through here. A
message may go to a terminal, a log, a report or a record beside the output, where others read it.
So no control character reaches it, no credential, and no value of any length.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import unquote

_LONGEST_MESSAGE = 6000
"""Characters of a message: the error of another library in it may go on for pages."""

_LONGEST_VALUE = 200
"""Most characters of a value in a message."""

_LONGEST_STRING = 100
"""Most characters of one string in such a value."""

_LONGEST_ERROR = 500
"""Most characters of somebody else's error in a message."""

_LONGEST_TEXT = 2**16
"""Most characters of any text that is made clean."""

_LONGEST_INTEGER = 2**128
"""Integers below this are written out."""

_DECODINGS = 8
"""How often a URL is percent-decoded at most in search of credentials."""

_HIDDEN = "…"

# A secret may hold a slash or an @, so it ends at the last @ of its word, not at the first. A
# number after the colon is a port, and no password. Lengths are bounded, so that no text takes
# long.
_USER = re.compile(r"(?<=://)(?:[^/]{0,2000}:(?!\d+(?:/|$)).{0,4000}@|[^/]{0,4000}@)", re.DOTALL)
_PARAMETER = re.compile(
    r"([?&#;][^=&]{0,200}"
    r"(?:signature|token|credential|secret|password|passwd|pwd|key|sig|auth|jwt|code)"
    r"[^=&]{0,200}=)[^&#]*",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(
    r"((?:passw(?:or)?d|secret|token|credential|(?:api|access)_?key)\w*=).+",
    re.IGNORECASE | re.DOTALL,
)
_AUTHORIZATION = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_SECRET_NAME = re.compile("headers|secret|token|passw|access_key", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_REASON = re.compile(r"^[\w.]+: ", re.MULTILINE)
"""What a traceback ends in: the error's class, before what it says."""

# All but tab and newline: of terminals, of the direction of writing, other ends of lines, and
# halves of characters, which cannot be printed at all.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def holds_credentials(url: str) -> bool:
    """Whether a URL carries a password, a signature or a token, however often it is encoded."""
    return any(_hide_in_url(each) != each for each in _decodings(url))


def is_secret_name(name: str) -> bool:
    """Whether the value of a key of this name is likely to be secret."""
    return _SECRET_NAME.search(name) is not None


def remove_credentials(text: str) -> str:
    """The text with an ellipsis in place of each credential, those in its URLs above all."""
    if "@" in text or "=" in text or "%" in text:
        text = re.sub(r"\S+", lambda match: _clean_word(match[0]), text)
    # last, because a word that was percent-decoded may name a scheme
    return _AUTHORIZATION.sub(rf"\1 {_HIDDEN}", text)


def escape_controls(text: str) -> str:
    r"""The text with control characters written out, such as ``\x1b``; lines and tabs stay."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def remove_colours(text: str) -> str:
    """The text without the colours that a library gives its own words."""
    return _COLOUR.sub("", text)


def clean_text(text: str) -> str:
    """The text without credentials and control characters; a clean text stays as it is."""
    if len(text) > _LONGEST_TEXT:
        # without its last word: half of a URL does not show that it holds a password
        text = text[:_LONGEST_TEXT].rpartition(" ")[0] + f" {_HIDDEN}"
    # before, because some end a word, and a secret with them; after, because some were encoded
    return escape_controls(remove_credentials(escape_controls(text)))


def clean_line(text: str) -> str:
    """The text as :func:`clean_text` has it, on one line."""
    return " ".join(clean_text(text).split())


def describe_error(error: BaseException, *, with_type: bool = True) -> str:
    """One clean, short line about an error that others raised, such as code that a job names.

    Args:
        error: the error.
        with_type: whether the line begins with the error's type.
    """
    name = type(error).__name__
    try:
        text = " ".join(_without_trace(str(error)).split())
    except Exception:  # an error of somebody else's class may fail at this, too
        text = ""
    if not text:
        return name
    text = _cut(clean_text(text), _LONGEST_ERROR)
    return f"{name}: {text}" if with_type else text


def _without_trace(text: str) -> str:
    """What TorchScript says of an error, without its two tracebacks, which come first."""
    _, header, rest = text.rpartition("Traceback of TorchScript")
    reason = _REASON.search(rest) if header else None
    return text if reason is None else rest[reason.end() :]


def shorten_value(value: object) -> str:
    """A value for a message: clean, short, and soon at hand, whatever its size and depth."""
    return _cut(_shortener.repr(value), _LONGEST_VALUE)


def shorten_message(text: str) -> str:
    """A message without its middle, if it is longer than anybody reads: its end says what to do."""
    if len(text) <= _LONGEST_MESSAGE:
        return text
    half = _LONGEST_MESSAGE // 2
    return f"{text[:half]} … {text[-half:]}"


def shorten_text(text: str) -> str:
    """A text such as a path or a key for a message: clean, and no longer than a message bears."""
    return _cut(clean_text(text), _LONGEST_VALUE)


class _Shortener(reprlib.Repr):
    """Shows the first few elements on the first few levels of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 8
        self.maxother = _LONGEST_VALUE

    def repr_str(self, x: str, level: int) -> str:  # noqa: ARG002
        return repr(_cut(clean_text(x), _LONGEST_STRING))

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002
        # the decimal digits of a huge integer take long, and Python refuses to make them
        if abs(x) < _LONGEST_INTEGER:
            return repr(x)
        return f"an integer of {round(x.bit_length() * 0.30103):,} digits"

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        if level <= 0 and x:
            return f"{{{_HIDDEN}}}"
        items = (
            f"{self.repr1(key, level - 1)}: "
            + (_HIDDEN if _is_secret_key(key) else self.repr1(value, level - 1))
            for key, value in islice(x.items(), self.maxdict)
        )
        more = [_HIDDEN] if len(x) > self.maxdict else []
        return "{" + ", ".join([*items, *more]) + "}"

    def repr_instance(self, x: object, level: int) -> str:
        return clean_text(super().repr_instance(x, level))


_shortener = _Shortener()


def _is_secret_key(key: object) -> bool:
    return isinstance(key, str) and is_secret_name(key)


def _decodings(text: str) -> Iterator[str]:
    """The text, and what percent-decoding makes of it again and again."""
    yield text
    for _ in range(_DECODINGS):
        decoded = unquote(text)
        if decoded == text:
            return
        text = decoded
        yield text


def _clean_word(word: str) -> str:
    """A word without credentials; percent-decoded if there are some in it that are encoded."""
    hidden = _hide(word)
    *_, decoded = _decodings(hidden)
    return hidden if _hide(decoded) == decoded else _hide(decoded)


def _hide(word: str) -> str:
    return _ASSIGNMENT.sub(rf"\1{_HIDDEN}", _hide_in_url(word))


def _hide_in_url(word: str) -> str:
    return _PARAMETER.sub(rf"\1{_HIDDEN}", _USER.sub(f"{_HIDDEN}@", word))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + _HIDDEN
