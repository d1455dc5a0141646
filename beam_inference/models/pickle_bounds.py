"""Pickles of strangers, followed without making anything of them.

PyTorch makes the containers that a pickle describes before anybody can look at them. Those that lie
inside each other on many levels end a process as they are let go. A tuple that holds another one
twice, on sixty levels, is hashed in a time that never ends, and a mapping of integers that have one
hash takes hours.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

DEEPEST = 100
"""Most levels of values inside values; checkpoints have some ten."""

MOST_VALUES = 1 << 24
"""Most values of a pickle, each as often as another one refers to it."""

_OWN_HASH = 1 << 60
"""Integers below it are their own hashes."""


class PickleOutOfBounds(Exception):
    """A pickle describes what nobody saves; the message says what."""


class NotFollowed(PickleOutOfBounds):
    """What should be a pickle is none, or of a kind that PyTorch does not write."""


@dataclass(eq=False, slots=True)
class Value:
    """A value that a pickle describes: what it holds, or is made of.

    Attributes:
        parts: the values in it.
        values: how many it holds with all that is in them, itself included; 0 until it is known.
        levels: of values inside values, itself included.
        is_open: whether its parts are being counted.
        name: ``module name`` of the class or function that it is; with ``()``, of what made it.
    """

    parts: list[Value] = field(default_factory=list)
    values: int = 0
    levels: int = 0
    is_open: bool = False
    name: str = ""


class Call(NamedTuple):
    """A call of a class or function that a pickle names.

    Attributes:
        name: ``module name`` of what is called; empty if it is a value of another kind.
        arguments: a tuple.
    """

    name: str
    arguments: Value


@dataclass(frozen=True, slots=True)
class Followed:
    """What a pickle does beside holding plain values.

    Attributes:
        names: the classes and functions that it names, as ``module name``.
        calls: what it calls.
        filled: into what it puts attributes: its name (:attr:`Value.name`), and the mapping.
    """

    names: list[str]
    calls: list[Call]
    filled: list[tuple[str, Value]]


_MARK = Value()
_SCALAR = Value(values=1, levels=1)
"""Stands for all values that can hold no others, but those below."""

_KEY = Value(values=1, levels=1)
"""Stands for texts, None, booleans, and integers that are their own hashes."""

LATIN1 = Value(values=1, levels=1)
"""Stands for the text "latin1"."""

METADATA = Value(values=1, levels=1)
"""Stands for the text "_metadata"."""

_KEYS = frozenset({_KEY, LATIN1, METADATA})

_REMEMBER = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_RECALL = frozenset({"GET", "BINGET", "LONG_BINGET"})
_ADD_TO_MARK = frozenset({"APPENDS", "SETITEMS", "ADDITEMS"})
_CALLS = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX", "INST", "OBJ"})
_MAKE_KEYS = {"SETITEM": 2, "SETITEMS": 2, "DICT": 2, "ADDITEMS": 1, "FROZENSET": 1}
"""Instructions that make keys, and how many values come with each of them."""

_NAMED = frozenset({"NONE", "NEWTRUE", "NEWFALSE"})
_TEXTS = frozenset({"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE"})
_CONTAINERS = frozenset({"EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "GLOBAL", "INST"})
_ADD = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}


def check_pickle(content: bytes | IO[bytes]) -> Followed:
    """Follow one pickle, and check that what it describes is neither deep nor endless.

    What it calls is not judged.

    Args:
        content: the pickle; of a file, it is read to the end of the pickle.

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
    return follower.followed


def check_keys(values: Iterable[Value]) -> None:
    """Check that values of a pickle can be keys: texts, None, booleans or ordinary integers.

    Raises:
        PickleOutOfBounds: one is another.
    """
    if not all(each in _KEYS for each in values):
        raise PickleOutOfBounds(
            "it has keys other than texts, None, booleans and integers below 2^60"
        )


class _Follower:
    """The state of a machine that reads pickles, with bare values in place of objects."""

    def __init__(self) -> None:
        self.followed = Followed([], [], [])
        self._stack: list[Value] = []
        self._memo: dict[int, Value] = {}
        self._made: list[Value] = []
        self._followed = 0

    @property
    def everything(self) -> Sequence[Value]:
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
            self._add(name, self._pop_to_mark())
        elif name in _ADD:
            self._add(name, self._pop(_ADD[name]))
        elif name == "MARK":
            self._stack.append(_MARK)
        elif name == "DUP":
            self._stack.append(self._top())
        else:
            self._replace(code, argument)

    def _replace(self, code: pickletools.OpcodeInfo, argument: Any) -> None:
        """Follow an instruction that takes values, and makes one of them."""
        if code.name in ("GLOBAL", "INST"):
            self.followed.names.append(str(argument))
        elif code.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            raise ValueError("it names classes otherwise than PyTorch does")
        takes_mark = pickletools.markobject in code.stack_before
        if takes_mark:
            rest = self._pop_to_mark()
            parts = self._pop(code.stack_before.index(pickletools.markobject)) + rest
        else:
            parts = self._pop(len(code.stack_before))
        _check_made_keys(code.name, parts)
        for _ in code.stack_after:
            if parts or code.name in _CONTAINERS:
                made = Value(parts, name=self._name_made(code.name, argument, parts))
                self._made.append(made)
                self._stack.append(made)
            else:
                self._stack.append(_stand_for(code.name, argument))

    def _name_made(self, code: str, argument: Any, parts: list[Value]) -> str:
        """Name what an instruction makes, and note what it calls for that."""
        if code == "GLOBAL":
            return str(argument)
        if code not in _CALLS:
            return ""
        called = str(argument) if code == "INST" else parts[0].name
        arguments = parts[-1] if code == "REDUCE" else Value(parts)
        self.followed.calls.append(Call(called if code == "REDUCE" else f"new {called}", arguments))
        return f"{called}()"

    def _add(self, code: str, parts: list[Value]) -> None:
        """Put values into the container on top."""
        container = self._top()
        if container.values == 1:
            raise ValueError("it puts values into one that holds none")
        if code == "BUILD":
            self.followed.filled.append((container.name, parts[0]))
        _check_made_keys(code, parts)
        container.parts += parts

    def _top(self) -> Value:
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("it refers to a value that is not there")
        return self._stack[-1]

    def _pop(self, count: int) -> list[Value]:
        parts = []
        for _ in range(count):
            parts.append(self._top())
            self._stack.pop()
        return parts[::-1]

    def _pop_to_mark(self) -> list[Value]:
        parts: list[Value] = []
        while (value := self._stack.pop()) is not _MARK:
            parts.append(value)
        return parts[::-1]


def _check_made_keys(code: str, parts: Sequence[Value]) -> None:
    """Check the keys that an instruction makes of values. Raises PickleOutOfBounds."""
    if code in _MAKE_KEYS:
        check_keys(parts[:: _MAKE_KEYS[code]])


def _stand_for(code: str, argument: Any) -> Value:
    """What stands for a value that can hold no others."""
    if code in _TEXTS:
        return {"latin1": LATIN1, "_metadata": METADATA}.get(argument, _KEY)
    is_own_hash = isinstance(argument, int) and abs(argument) < _OWN_HASH
    return _KEY if is_own_hash or code in _NAMED else _SCALAR


def _measure(values: Sequence[Value]) -> None:
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


def _count(value: Value) -> None:
    value.values = 1 + sum(each.values for each in value.parts)
    value.levels = 1 + max((each.levels for each in value.parts), default=0)
    if value.values > MOST_VALUES:
        raise PickleOutOfBounds(
            f"it holds more than {MOST_VALUES:,} values, each as often as it is referred to"
        )
    if value.levels > DEEPEST:
        raise PickleOutOfBounds(f"it holds values inside values on more than {DEEPEST} levels")
