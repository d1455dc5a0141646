"""What TorchScript changes in place of its own tensors, lists and dictionaries, by whatever name.

An attribute may be changed through a view of it, an item of a list, a branch, or a function that
is given it. The values that may be an attribute's, or share its memory, are followed through a
program whose calls have been inlined; operators say of themselves what they return views of, and
what they write to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Names: TypeAlias = frozenset[str]
"""Names of attributes."""

_NONE: Names = frozenset()
_CONSTANT = "a constant"
_PLAIN = frozenset(
    {
        "BoolType",
        "DeviceObjType",
        "FloatType",
        "IntType",
        "NoneType",
        "NumberType",
        "StringType",
        "SymIntType",
    }
)
"""Kinds of values that nothing changes in place."""


def list_changed(graph: torch._C.Graph) -> set[str]:
    """List the attributes of objects that a program changes in place; "a constant" is one, too.

    Args:
        graph: of a function, whose calls need not be inlined.
    """
    import torch

    inlined = graph.copy()
    torch._C._jit_pass_inline(inlined)
    flow = _Flow()
    flow.follow(inlined)
    return flow.changed


class _Flow:
    """Follows attributes through the values of a graph.

    Attributes:
        changed: names of those that are changed.
    """

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self._names: dict[str, Names] = {}

    def follow(self, block: torch._C.Graph | torch._C.Block) -> None:
        """Follow values through the nodes of a block, in order."""
        for node in block.nodes():
            self._follow_node(node)

    def _follow_node(self, node: torch._C.Node) -> None:
        kind = node.kind()
        inputs = list(node.inputs())
        outputs = list(node.outputs())
        if kind == "prim::GetAttr":
            is_object = outputs[0].type().kind() == "ClassType"
            self._add(outputs, _NONE if is_object else frozenset({node.s("name")}))
        elif kind == "prim::Constant":
            is_tensor = bool(outputs) and outputs[0].type().kind() == "TensorType"
            self._add(outputs, frozenset({_CONSTANT}) if is_tensor else _NONE)
        elif kind == "prim::If":
            for block in node.blocks():
                self.follow(block)
                self._add_each(outputs, block.outputs())
        elif kind == "prim::Loop":
            self._follow_loop(node, inputs[2:], outputs)
        elif node.hasAttribute("Subgraph"):
            self._follow_subgraph(node, inputs, outputs)
        else:
            self._follow_operator(node, inputs, outputs)

    def _follow_loop(
        self,
        node: torch._C.Node,
        carried: Sequence[torch._C.Value],
        outputs: Sequence[torch._C.Value],
    ) -> None:
        (block,) = node.blocks()
        inside = list(block.inputs())[1:]
        self._add_each(inside, carried)
        before: list[Names] = []
        # what one round leaves is what the next one begins with; there are finitely many names
        while (now := [self._of(each) for each in inside]) != before:
            before = now
            self.follow(block)
            self._add_each(inside, list(block.outputs())[1:])
        self._add_each(outputs, carried)
        self._add_each(outputs, list(block.outputs())[1:])

    def _follow_subgraph(
        self,
        node: torch._C.Node,
        inputs: Sequence[torch._C.Value],
        outputs: Sequence[torch._C.Value],
    ) -> None:
        inner = _Flow()
        graph = node.g("Subgraph")
        for value, given in zip(graph.inputs(), inputs, strict=False):
            inner._add([value], self._of(given))
        inner.follow(graph)
        self.changed |= inner.changed
        every = [*map(self._of, inputs), *map(inner._of, graph.outputs())]
        self._add(outputs, frozenset().union(*every))

    def _follow_operator(
        self,
        node: torch._C.Node,
        inputs: Sequence[torch._C.Value],
        outputs: Sequence[torch._C.Value],
    ) -> None:
        shared, written = _sharing_of(node.schema(), len(inputs))
        given = frozenset().union(*(self._of(inputs[number]) for number in shared))
        for number in written:
            self.changed |= self._of(inputs[number])
            self._add([inputs[number]], given)  # a list, say, that an attribute is put into
        self._add(outputs, given)

    def _of(self, value: torch._C.Value) -> Names:
        return self._names.get(value.debugName(), _NONE)

    def _add(self, values: Iterable[torch._C.Value], names: Names) -> None:
        for value in values:
            if value.type().kind() not in _PLAIN:
                self._names[value.debugName()] = self._of(value) | names

    def _add_each(self, values: Iterable[torch._C.Value], others: Iterable[torch._C.Value]) -> None:
        for value, other in zip(values, others, strict=False):
            self._add([value], self._of(other))


@cache
def _sharing_of(schema: str, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Numbers of the inputs whose memory an operator's results may share, and it may write to.

    Args:
        schema: as PyTorch prints it; of what builds and takes apart lists it has none.
        count: of the inputs.
    """
    import torch

    try:
        arguments: list[Any] = torch._C.parse_schema(schema).arguments
    except RuntimeError:
        return range(count), ()
    aliases = {number: each.alias_info for number, each in enumerate(arguments[:count])}
    shared = [number for number, alias in aliases.items() if alias is not None]
    return shared, [number for number in shared if aliases[number].is_write]
