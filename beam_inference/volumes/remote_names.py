"""Names of several files in an object store or on a web server: globs, ranges of numbers, lists.

Object stores list their files, so that a glob finds them. Web servers do not: there the names
are known by their numbers, ``z{000..499}.tif``, or stand in a text file beside the files.
"""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase
from urllib.parse import quote, unquote

from beam_inference.config.storage import Storage
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.volumes.folders import leads_astray, list_keys
from beam_inference.volumes.kvstores import KvStore, one_line, open_kvstore
from beam_inference.volumes.remote_files import find_remote_file

HOW_TO_NAME = (
    "Web servers do not list their files. Name them by their numbers, in quotes, such as "
    "'https://host/em/z{000..499}.tif'; or put a text file beside them with a name in each line, "
    "and give its URL, such as https://host/em/names.txt. Otherwise copy them here first, such as "
    "with: wget -r -np -nd URL"
)
"""What to do about files of a web server whose names are not known."""

_MOST_FILES = 10**6
_MOST_BYTES_OF_NAMES = 2**26
_LONGEST_NAME = 1024
"""Letters of a name that stores allow."""

_UP_TO_WILDCARD = re.compile(
    r"(https?://[^/]+/[^*]*(?=\*)|(?!https?:)\w+://[^/]+/[^*?\[]*(?=[*?\[]))"
)
"""A URL up to its first wildcard, which does not stand in the name of a host or bucket.

What follows ``?`` in a URL of the web is no path.
"""
_RANGE = re.compile(r"(\w+://[^/]+/[^{]*)\{([0-9]{1,18})\.\.([0-9]{1,18})\}(.*)", re.DOTALL)
"""A URL with numbers for which others stand, as in shells."""
_LIST = re.compile(r"\w+://[^/]+/.+\.txt", re.IGNORECASE)


def names_files(url: str) -> bool:
    """Whether a URL stands for several files: it is a glob, has a range, or is that of a list."""
    return is_glob(url) or is_range(url) or _LIST.fullmatch(url) is not None


def is_glob(url: str) -> bool:
    """Whether a URL has wildcards."""
    return _UP_TO_WILDCARD.match(url) is not None


def is_range(url: str) -> bool:
    """Whether a URL has a range of numbers.

    >>> is_range("https://host/z{000..499}.tif"), is_range("https://host/z000.tif")
    (True, False)
    """
    return _RANGE.fullmatch(url) is not None


def folder_of_files(url: str) -> str:
    """The URL of the folder that the files of a name begin in, with a slash at its end.

    >>> folder_of_files("gs://bucket/em/s*/a.png"), folder_of_files("gs://bucket/em/names.txt")
    ('gs://bucket/em/', 'gs://bucket/em/')
    """
    found = _UP_TO_WILDCARD.match(url) or _RANGE.fullmatch(url)
    return (url if found is None else found[1]).rpartition("/")[0] + "/"


def list_remote_files(url: str, storage: Storage) -> list[str]:
    """The URLs of the files that a glob, a range or a list names.

    Args:
        url: a URL for which :func:`names_files` holds. Its wildcards stand for no slash.
        storage: how object stores are reached.

    Raises:
        VolumeError: the store cannot be listed, such as a web server; or the range or the list is
            none.
    """
    if is_range(url):
        return _expand_range(url)
    if is_glob(url):
        return _expand_glob(url, storage)
    return _read_list(url, storage)


def _expand_range(url: str) -> list[str]:
    """The URLs that a range stands for, with leading zeros where one of its ends has them."""
    match = _RANGE.fullmatch(url)
    assert match is not None, "is_range says so"
    before, first, last, behind = match.groups()
    if is_glob(url) or is_range(before + behind):
        raise VolumeError(f"{url}: expected one range of numbers, and no wildcards beside it")
    count = int(last) - int(first) + 1
    if not 1 <= count <= _MOST_FILES:
        raise VolumeError(
            f"{url}: expected a range that counts up, of {_MOST_FILES:,} files at most"
        )
    has_zeros = any(len(end) > 1 and end.startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if has_zeros else 0
    return [f"{before}{n:0{width}d}{behind}" for n in range(int(first), int(last) + 1)]


def _expand_glob(pattern: str, storage: Storage) -> list[str]:
    if re.match("https?://", pattern):
        raise VolumeError(f"{pattern} has a wildcard. {HOW_TO_NAME}")
    folder = folder_of_files(pattern)
    names = _decode(pattern.removeprefix(folder))
    start = re.split(r"[*?\[]", names, maxsplit=1)[0]
    keys = KvStore.KeyRange(start, start[:-1] + chr(ord(start[-1]) + 1) if start else "")
    try:
        listed = list_keys(open_kvstore(folder, storage), storage, keys)
    except (ValueError, OSError) as error:
        raise VolumeError(f"cannot list {folder}: {one_line(error)}") from None
    decoded = (key.decode(errors="replace") for key in listed)
    # as many slashes as in the pattern: then its wildcards stand for none
    found = [
        key
        for key in sorted(decoded)
        if key[-1:] not in ("", "/")  # which stand for folders, in some tools
        and key.count("/") == names.count("/")
        and fnmatchcase(key, names)
    ]
    astray = next((key for key in found if leads_astray(key.encode())), None)
    if astray is not None:
        raise VolumeError(
            f"{folder} holds {astray[:300]!r}, which {pattern} stands for, too: by its name it may "
            "lie elsewhere, and another file would be read in its place. Rename it, or choose "
            "another pattern."
        )
    return [folder + quote(key) for key in found]


def _decode(pattern: str) -> str:
    """Replace what is percent-encoded in a pattern by itself, where it is no wildcard."""

    def decode(encoded: re.Match[str]) -> str:
        return re.sub(r"[*?\[]", r"[\g<0>]", unquote(encoded[0]))

    return re.sub("(%[0-9A-Fa-f]{2})+", decode, pattern)


def _read_list(url: str, storage: Storage) -> list[str]:
    """The URLs of the files that a text file names, each in a line, in its folder or below it."""
    try:
        text = find_remote_file(url, storage).read_whole(_MOST_BYTES_OF_NAMES).decode("utf-8-sig")
    except PermanentReadError as error:
        raise VolumeError(f"{error}: it is no list of files") from None
    except UnicodeDecodeError:
        raise VolumeError(f"{url} is no list of files: it is no text in UTF-8") from None
    names = [line.strip() for line in text.split("\n")]
    names = [name.removeprefix("./") for name in names if name]
    if len(names) > _MOST_FILES:
        raise VolumeError(f"{url} lists {len(names):,} files, and {_MOST_FILES:,} are the most")
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise VolumeError(f"{url} lists {twice[:300]!r} twice. Take one out.")
    folder = folder_of_files(url)
    for number, name in enumerate(names, start=1):
        if len(name) > _LONGEST_NAME or {"", ".", ".."}.intersection(name.split("/")):
            raise VolumeError(
                f"{url} lists {name[:300]!r} (number {number}), which is no name of a file in its "
                f"folder {folder}, or below it: files from elsewhere are not read in its place"
            )
    return [folder + quote(name) for name in names]
