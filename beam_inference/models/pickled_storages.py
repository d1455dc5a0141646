"""Storages of tensors that a pickle names, and how many bytes it says they have.

PyTorch's reader of TorchScript believes that number: of a tensor that is longer than what lies in
the archive, it would read the memory behind it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from functools import cache
from typing import Any

from beam_inference.models.pickle_bounds import PickleOutOfBounds

_ITEM_BYTES = {
    **dict.fromkeys(("BoolStorage", "ByteStorage", "CharStorage"), 1),
    **dict.fromkeys(("BFloat16Storage", "HalfStorage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
    **dict.fromkeys(("ComplexFloatStorage", "DoubleStorage", "LongStorage"), 8),
    "ComplexDoubleStorage": 16,
}
"""Bytes of a value in each of PyTorch's storages of plain numbers."""


class _Inert:
    """Stands for whatever a pickle names, and does nothing.

    Attributes:
        named: the name, of a class or a function.
    """

    named = ""

    def __init__(self, *_: object) -> None:
        """Take what the pickle gives it."""

    def __setstate__(self, _: object) -> None:
        """Leave what the pickle would set."""

    def __setitem__(self, _: object, __: object) -> None:
        """Leave what the pickle would put in."""

    def extend(self, _: object) -> None:
        """Leave what the pickle would append."""

    append = extend


@cache
def _inert(module: str, name: str) -> type[_Inert]:
    return type("_Named", (_Inert,), {"named": name if module == "torch" else ""})


class _Reader(pickle.Unpickler):
    """Reads a pickle, of which it makes nothing but plain containers."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.storages: list[object] = []

    def find_class(self, module: str, name: str) -> Any:
        return _inert(module, name)

    def persistent_load(self, pid: Any) -> None:
        self.storages.append(pid)


def read_storages(content: bytes) -> list[object]:
    """Read which storages of tensors a pickle refers to.

    Args:
        content: the pickle, which was followed before (:func:`.pickle_bounds.check_pickle`).

    Returns:
        A tuple for each: "storage", a class, its key, a device and the number of its values, where
        the pickle is one of PyTorch's.

    Raises:
        PickleOutOfBounds: it cannot be read.
    """
    reader = _Reader(content)
    _read(reader)
    return reader.storages


def read_names(content: bytes) -> set[str]:
    """Read a pickle that is a list of texts, and was followed before. Raises PickleOutOfBounds."""
    names = _read(_Reader(content))
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _read(reader: _Reader) -> object:
    try:
        return reader.load()
    except Exception as error:  # of whatever the pickle describes
        raise PickleOutOfBounds(f"it cannot be read: {type(error).__name__}") from None


def check_storages(content: bytes, members: Mapping[str, int], folder: str) -> None:
    """Check that the tensors of a pickle have the bytes that lie in the archive.

    Args:
        content: the pickle, which was followed before (:func:`.pickle_bounds.check_pickle`).
        members: bytes of each member of the archive, by its name in small letters.
        folder: the members' folder, with its slash, in small letters.

    Raises:
        PickleOutOfBounds: one has others, or none.
    """
    for storage in read_storages(content):
        match storage:
            case ("storage", type() as kind, str(key), str(), int(length), *_):
                said = length * _item_bytes(kind)
                found = members.get(f"{folder}{key}".lower(), 0)
                if said != found:
                    raise PickleOutOfBounds(
                        f"a tensor has {said:,} bytes by what it says, and {found:,} in the archive"
                    )
            case _:
                raise PickleOutOfBounds("it refers to what is no storage of a tensor")


def _item_bytes(kind: type) -> int:
    """Bytes of a value in a storage of PyTorch's that a pickle names. Raises PickleOutOfBounds."""
    size = _ITEM_BYTES.get(kind.named) if issubclass(kind, _Inert) else None
    if size is None:
        raise PickleOutOfBounds("a tensor has values of an unknown type")
    return size
