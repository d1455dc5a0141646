"""YAML as it is read here: safe, of bounded size and depth, each key given once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from beam_inference.errors import ConfigError
from beam_inference.foreign_text import describe_error, shorten_value

MOST_CHARACTERS = 2**20
"""Longest text that is parsed."""

MOST_VALUES = 200_000
"""Most values in a text, each as often as an alias repeats it."""

LONGEST_NUMBER = 1000
"""Most characters of a number: those to the base of 60, such as 1:30:00, take long to compute."""

_LARGEST_KEY = 2**60
"""Integers below it are their own hashes: many larger ones of one hash would take long to keep."""

DEEPEST = 64
"""Most levels of values inside values."""


def parse_yaml(text: str) -> Any:
    """The values that a YAML text holds.

    Raises:
        ConfigError: it is no YAML, gives a key twice, or holds more than :data:`MOST_VALUES`
            values; the message says where.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"it has {len(text):,} characters, more than the {MOST_CHARACTERS:,} that are read"
        )
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {describe_error(error, with_type=False)}") from None


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


@dataclass(frozen=True, slots=True)
class _Size:
    """Number of values in a node, itself included, and of levels."""

    values: int
    levels: int


class _Loader(yaml.SafeLoader):
    """Safe YAML within bounds.

    An alias costs nothing to load, but whoever goes through the values meets them as often as they
    are repeated. So nodes are counted as they are composed, which is after those inside them.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.Node, _Size] = {}
        self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._level += 1
        self._check_levels(self._level)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        # a list or mapping has no end as long as it is not composed
        if node is not None and node.end_mark is None:
            raise ConfigError(f"line {_line(node)}: a value holds itself, by an alias")
        if node is not None and node not in self._sizes:
            size = self._measure(node)
            self._check_levels(size.levels)
            if size.values > MOST_VALUES:
                raise ConfigError(
                    f"line {_line(node)}: it holds more than {MOST_VALUES:,} values, aliases "
                    "counted as often as they are used"
                )
            self._sizes[node] = size
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_number = node.tag in _NUMBERS and isinstance(node, yaml.ScalarNode)
        if is_number and len(node.value) > LONGEST_NUMBER:
            raise ConfigError(
                f"line {_line(node)}: a number of {len(node.value):,} characters; at most "
                f"{LONGEST_NUMBER:,} are read"
            )
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, ConfigError):
            raise
        # PyYAML's own constructors raise anything for a number or a date that is none
        except Exception as error:
            kind = node.tag.rpartition(":")[2]
            raise ConfigError(
                f"line {_line(node)}: {shorten_value(node.value)} cannot be read as {kind} "
                f"({describe_error(error, with_type=False)})"
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, int) and abs(key) >= _LARGEST_KEY:
                raise ConfigError(f"line {_line(key_node)}: {shorten_value(key)} is no key")
            name = key if isinstance(key, str) else shorten_value(key)
            if name in seen:
                raise ConfigError(f"the key '{name}' is given twice (line {_line(key_node)})")
            seen.add(name)
        return super().construct_mapping(node, deep)

    def _measure(self, node: yaml.Node) -> _Size:
        if isinstance(node, yaml.MappingNode):
            inside = [self._sizes[each] for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            inside = [self._sizes[each] for each in node.value]
        else:
            inside = []
        values = 1 + sum(each.values for each in inside)
        return _Size(values, 1 + max((each.levels for each in inside), default=0))

    def _check_levels(self, levels: int) -> None:
        if levels > DEEPEST:
            raise ConfigError(
                f"values lie inside values on more than {DEEPEST} levels. Is a bracket missing?"
            )


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
