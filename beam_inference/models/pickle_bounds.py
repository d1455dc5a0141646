"""Pickles of strangers, followed without making anything of them.

PyTorch makes the containers that a pickle describes before anybody can look at them. Those that lie
inside each other on many levels end a process as they are let go, and a tuple that holds another
one twice, on sixty levels, is hashed in a time that never ends.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

DEEPEST = 100
"""Most levels of values inside values; checkpoints have some ten."""

MOST_VALUES = 1 << 24
"""Most values of a pickle, each as often as another one refers to it."""


_PICKLES_OF_FORMER_FORM = 5
"""Pickles before the tensors' bytes in PyTorch's former form."""


class PickleOutOfBounds(Exception):
    """A pickle describes what nobody saves; the message says what."""


class NotFollowed(PickleOutOfBounds):
    """What should be a pickle is none, or of a kind that PyTorch does not write."""


@dataclass(eq=False, slots=True)
class _Value:
    """A value that a pickle describes: what it holds, or is made of.

    Attributes:
        parts: the values in it.
        values: how many it holds with all that is in them, itself included; 0 until it is known.
        levels: of values inside values, itself included.
        is_open: whether its parts are being counted.
    """

    parts: list[_Value] = field(default_factory=list)
    values: int = 0
    levels: int = 0
    is_open: bool = False


_MARK = _Value()
_SCALAR = _Value(values=1, levels=1)
"""Stands for all values that can hold no others."""

_REMEMBER = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_RECALL = frozenset({"GET", "BINGET", "LONG_BINGET"})
_ADD_TO_MARK = frozenset({"APPENDS", "SETITEMS", "ADDITEMS"})
_CONTAINERS = frozenset({"EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "GLOBAL", "INST"})
_ADD = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}


def check_pickle(content: bytes | IO[bytes]) -> list[str]:
    """Follow one pickle, and check that what it describes is neither deep nor endless.

    Args:
        content: the pickle; of a file, it is read to the end of the pickle.

    Returns:
        The classes and functions that it names, as ``module name``.

    Raises:
        PickleOutOfBounds: it is, or is no pickle (NotFollowed).
    """
    stream = io.BytesIO(content) if isinstance(content, bytes) else content
    follower = _Follower()
    try:
        for code, argument, _ in pickletools.genops(stream):
            follower.follow(code, argument)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise NotFollowed(f"it is no pickle that can be followed: {error}") from None
    _measure(follower.everything)
    return follower.names


def check_saved(file: IO[bytes]) -> None:
    """Follow the pickles that :func:`torch.load` would read.

    Args:
        file: what :func:`torch.save` has written: an archive, which was checked as a whole, or
            PyTorch's former form, which begins with pickles.

    Raises:
        PickleOutOfBounds: one is out of bounds, or no pickle.
    """
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        file.seek(0)
        for _ in range(_PICKLES_OF_FORMER_FORM):
            check_pickle(file)
        return
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.lower().endswith(".pkl"):  # PyTorch finds it whatever the case of its name
                check_pickle(archive.read(name))


class _Follower:
    """The state of a machine that reads pickles, with bare values in place of objects."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._stack: list[_Value] = []
        self._memo: dict[int, _Value] = {}
        self._made: list[_Value] = []
        self._followed = 0

    @property
    def everything(self) -> Sequence[_Value]:
        """All values that hold others, whether they are used at the end or not."""
        return self._made

    def follow(self, code: pickletools.OpcodeInfo, argument: Any) -> None:
        """Follow one instruction."""
        name = code.name
        self._followed += 1
        if name in _REMEMBER:
            number = len(self._memo) if argument is None else argument
            if number > self._followed:  # a list of that length would be made
                raise ValueError(f"it has {self._followed:,} values, and numbers one {number:,}")
            self._memo[number] = self._top()
        elif name in _RECALL:
            self._stack.append(self._memo[argument])
        elif name in _ADD_TO_MARK:
            self._add(self._pop_to_mark())
        elif name in _ADD:
            self._add(self._pop(_ADD[name]))
        elif name == "MARK":
            self._stack.append(_MARK)
        elif name == "DUP":
            self._stack.append(self._top())
        else:
            self._replace(code, argument)

    def _replace(self, code: pickletools.OpcodeInfo, argument: Any) -> None:
        """Follow an instruction that takes values, and makes one of them."""
        if code.name in ("GLOBAL", "INST"):
            self.names.append(str(argument))
        elif code.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            raise ValueError("it names classes otherwise than PyTorch does")
        takes_mark = pickletools.markobject in code.stack_before
        if takes_mark:
            parts = self._pop_to_mark()
            parts += self._pop(code.stack_before.index(pickletools.markobject))
        else:
            parts = self._pop(len(code.stack_before))
        for _ in code.stack_after:
            if parts or code.name in _CONTAINERS:
                made = _Value(parts)
                self._made.append(made)
                self._stack.append(made)
            else:
                self._stack.append(_SCALAR)

    def _add(self, parts: list[_Value]) -> None:
        """Put values into the container on top."""
        container = self._top()
        if container is _SCALAR:
            raise ValueError("it puts values into one that holds none")
        container.parts += parts

    def _top(self) -> _Value:
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("it refers to a value that is not there")
        return self._stack[-1]

    def _pop(self, count: int) -> list[_Value]:
        parts = []
        for _ in range(count):
            parts.append(self._top())
            self._stack.pop()
        return parts

    def _pop_to_mark(self) -> list[_Value]:
        parts: list[_Value] = []
        while (value := self._stack.pop()) is not _MARK:
            parts.append(value)
        return parts


def _measure(values: Sequence[_Value]) -> None:
    """Count what values hold, from the inside to the outside.

    Raises:
        PickleOutOfBounds: one holds too much, on too many levels, or itself.
    """
    for value in values:
        waiting = [value]
        while waiting:
            current = waiting[-1]
            unknown = [] if current.values else [each for each in current.parts if not each.values]
            if unknown and not current.is_open:
                current.is_open = True
                waiting += unknown
                if any(each.is_open for each in unknown):
                    raise PickleOutOfBounds("a value in it holds itself")
                continue
            waiting.pop()
            if not current.values:
                _count(current)


def _count(value: _Value) -> None:
    value.values = 1 + sum(each.values for each in value.parts)
    value.levels = 1 + max((each.levels for each in value.parts), default=0)
    if value.values > MOST_VALUES:
        raise PickleOutOfBounds(
            f"it holds more than {MOST_VALUES:,} values, each as often as it is referred to"
        )
    if value.levels > DEEPEST:
        raise PickleOutOfBounds(f"it holds values inside values on more than {DEEPEST} levels")
