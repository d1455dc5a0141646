"""Storages of tensors that a pickle names, and how many bytes it says they have.

PyTorch's reader of TorchScript believes that number: of a tensor that is longer than what lies in
the archive, it would read the memory behind it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from beam_inference.models.pickle_bounds import PickleOutOfBounds

_ITEM_BYTES = {
    **dict.fromkeys(("BoolStorage", "ByteStorage", "CharStorage"), 1),
    **dict.fromkeys(("BFloat16Storage", "HalfStorage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
    **dict.fromkeys(("ComplexFloatStorage", "DoubleStorage", "LongStorage"), 8),
    "ComplexDoubleStorage": 16,
    "UntypedStorage": 1,
}
"""Bytes of a value in each of PyTorch's storages of plain numbers, or of anything."""


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
    is_torch = module in ("torch", "torch.storage")
    return type("_Named", (_Inert,), {"named": name if is_torch else ""})


@dataclass(frozen=True, slots=True)
class _Storage:
    """Stands for a storage: what the pickle says of it."""

    said: Any


class _Tensor(NamedTuple):
    """What PyTorch is told to make a tensor of; strangers may have written anything."""

    storage: object
    offset: object
    size: object
    stride: object
    dtype: object = None


class _Reader(pickle.Unpickler):
    """Reads a pickle, of which it makes nothing but plain containers."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.storages: list[object] = []
        self.tensors: list[_Tensor] = []

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            return self._note_tensor
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return self._note_tensor_of_dtype
        return tuple if (module, name) == ("torch", "Size") else _inert(module, name)

    def persistent_load(self, pid: Any) -> _Storage:
        self.storages.append(pid)
        return _Storage(pid)

    def _note_tensor(
        self, storage: object, offset: object, size: object, stride: object, *_: object
    ) -> _Inert:
        self.tensors.append(_Tensor(storage, offset, size, stride))
        return _Inert()

    def _note_tensor_of_dtype(self, *arguments: object) -> _Inert:
        """Note what ``torch._utils._rebuild_tensor_v3`` is given: a dtype, too."""
        storage, offset, size, stride, _, _, dtype, *_ = arguments
        self.tensors.append(_Tensor(storage, offset, size, stride, dtype))
        return _Inert()


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


def check_tensors_fit(content: bytes, listed: Container[str]) -> None:
    """Check that the tensors of a pickle lie within storages of a file in PyTorch's former form.

    A storage that is too small for a tensor PyTorch makes larger, and leaves in it what lay in the
    process's memory; views of it keep memory that is no longer theirs.

    Args:
        content: the pickle, which was followed before (:func:`.pickle_bounds.check_pickle`).
        listed: keys of the storages whose values are in the file.

    Raises:
        PickleOutOfBounds: one does not.
    """
    reader = _Reader(content)
    _read(reader)
    known: dict[str, tuple[object, int]] = {}
    for storage in reader.storages:
        match storage:
            case ("storage", type() as kind, str(key), str(), int(length), None) if key in listed:
                if known.setdefault(key, (kind, length)) != (kind, length):
                    raise PickleOutOfBounds("it says two things of one storage")
            case ("storage", _, _, _, _, None):
                raise PickleOutOfBounds("a tensor's values are not in the file")
            case _:
                raise PickleOutOfBounds("it refers to what is no storage of a tensor")
    for tensor in reader.tensors:
        match tensor.storage:
            case _Storage(said) if _bytes_needed(tensor, said[1]) <= said[4] * _item_bytes(said[1]):
                pass
            case _:
                raise PickleOutOfBounds("a tensor has more values than are in the file")


def _bytes_needed(tensor: _Tensor, kind: type) -> int:
    """How many bytes of its storage a tensor reaches over. Raises PickleOutOfBounds."""
    match tensor:
        case _Tensor(_, int(offset), tuple(size), tuple(stride)) if len(size) == len(stride):
            numbers = (offset, *size, *stride)
            if all(isinstance(n, int) and n >= 0 for n in numbers):
                last = offset + sum((n - 1) * m for n, m in zip(size, stride, strict=True))
                return 0 if 0 in size else (1 + last) * _tensor_item_bytes(tensor, kind)
    raise PickleOutOfBounds("a tensor has a shape that is none")


def _tensor_item_bytes(tensor: _Tensor, kind: type) -> int:
    """Bytes of a value of a tensor. Raises PickleOutOfBounds."""
    if tensor.dtype is None:
        return _item_bytes(kind)
    import torch

    named = getattr(tensor.dtype, "named", "")
    dtype = getattr(torch, named, None) if isinstance(named, str) else None
    if not isinstance(dtype, torch.dtype):
        raise PickleOutOfBounds("a tensor has values of an unknown type")
    return dtype.itemsize


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
