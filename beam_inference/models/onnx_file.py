"""ONNX files, read as far as it takes to know that all of a network is in its file.

An ONNX file is a message of Protocol Buffers, in which tensors may say that their values are in
other files. The package ``onnx`` parses it only after these checks, and only for OpenVINO.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, TypeAlias

from beam_inference.errors import EngineError, ModelContractError
from beam_inference.foreign_text import shorten_text
from beam_inference.models.stand_ins import check_no_stand_in


class _Malformed(Exception):
    """The bytes are no message of Protocol Buffers; the message says why."""


class _Unfolding(Exception):
    """Functions unfold to more than an engine can load; the message says how."""


class _ExternalData(Exception):
    """A tensor says that its values are in another file."""


class _Random(Exception):
    """A node draws random numbers; the message names its operator."""


class _Trains(Exception):
    """A node is in its training mode; the message names its operator."""


@dataclass(frozen=True, slots=True)
class _Message:
    """What of a message of the ONNX standard may lead to a tensor.

    Attributes:
        parts: the messages in it, by the number of their field.
        external: numbers of the fields by which a tensor says that its values are elsewhere.
        kinds: kinds of other fields; that of a part is always :data:`_LENGTH`.
    """

    parts: dict[int, _Message] = field(default_factory=dict)
    external: frozenset[int] = frozenset()
    kinds: dict[int, int] = field(default_factory=dict)


_VARINT = 0
_EIGHT_BYTES = 1
_LENGTH = 2
_FOUR_BYTES = 5

_TENSOR = _Message(external=frozenset({13, 14}))  # external_data, data_location
_SPARSE_TENSOR = _Message({1: _TENSOR, 2: _TENSOR})  # values, indices
_ATTRIBUTE = _Message({5: _TENSOR, 10: _TENSOR, 22: _SPARSE_TENSOR, 23: _SPARSE_TENSOR})
_NODE = _Message({5: _ATTRIBUTE})
_GRAPH = _Message({1: _NODE, 5: _TENSOR, 15: _SPARSE_TENSOR})  # node and initializers
_ATTRIBUTE.parts.update({6: _GRAPH, 11: _GRAPH})  # what branches and loops run
_FUNCTION = _Message({7: _NODE, 11: _ATTRIBUTE})
_TRAINING = _Message({1: _GRAPH, 2: _GRAPH})
_GRAPH_NUMBER = 7
_FUNCTION_NUMBER = 25
_MODEL = _Message(
    {_GRAPH_NUMBER: _GRAPH, 20: _TRAINING, _FUNCTION_NUMBER: _FUNCTION},
    # so that no text is taken for a model: OpenVINO would take it for what it is
    kinds={1: _VARINT, 2: _LENGTH, 3: _LENGTH, 4: _LENGTH, 5: _VARINT, 6: _LENGTH, 8: _LENGTH},
)

_DEEPEST = 40
"""Graphs in branches of graphs, 13 deep: OpenVINO takes twice as long for each more."""
_MOST_OF_CALLS = 10_000
"""Nodes that calls of functions stand for; ONNX Runtime takes a minute to put them into place."""

_Name: TypeAlias = tuple[bytes, ...]
"""Domain, name and overload of a function."""
_NAME_IN_NODE = (7, 4, 8)
_NAME_IN_FUNCTION = (10, 1, 13)
"""Numbers of the fields that hold them."""


_RANDOM = frozenset(
    (
        b"Bernoulli",
        b"Multinomial",
        b"RandomNormal",
        b"RandomNormalLike",
        b"RandomUniform",
        b"RandomUniformLike",
        b"Sampling",
    )
)
_OPERATOR_DOMAINS = frozenset((b"", b"ai.onnx", b"com.microsoft"))
_INITIALIZER = 5
_INTEGER = 3
_REFERENCE = 21
"""Numbers of the fields of an attribute that hold a whole number, or the name of another one."""
_VALUES = frozenset((4, 5, 6, 7, 9, 10, 11))
"""Numbers of the fields that hold values of a tensor."""
_TRAINING_MODE = 2
"""The input of Dropout that says whether it draws; without it, it does not."""


def check_self_contained(path: Path) -> None:
    """Check that an ONNX file is a network by itself, and one that computes.

    Weights in another file would be neither hashed nor fetched with it. It unfolds to a network of
    bounded size, draws no random numbers, which it might do for a few inputs only, and normalises
    by what it has been trained on.

    Raises:
        ModelContractError: it does not, or is not an ONNX file.
    """
    check_no_stand_in(path)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        try:
            _check(content, 0, len(content), _MODEL, depth=0)
            if all(number != _GRAPH_NUMBER for number, *_ in _fields(content, 0, len(content))):
                raise _Malformed("it has no graph")
            _check_calls(content)
            _check_modes(content)
        except _Malformed as error:
            raise ModelContractError(
                f"{path} is not an ONNX file, or damaged: {error}. Save or copy it again."
            ) from None
        except _Unfolding as error:
            raise ModelContractError(
                f"{path} has functions that {error}: engines would take hours, or all memory, to "
                "load it. Save it without functions, such as by onnx.inliner."
            ) from None
        except _Random as error:
            raise ModelContractError(
                f"{path} draws random numbers (by {error}), so its output would be another one "
                "each time. Export it in evaluation mode, and without random numbers."
            ) from None
        except _Trains as error:
            raise ModelContractError(
                f"{path} has a {error} in training mode, which takes the statistics of the patch "
                "at hand in place of those that it was trained to. Export it in evaluation mode "
                "(network.eval()); if it is meant so, run it as a factory with model.batch_norm: "
                "batch."
            ) from None
        except _ExternalData:
            raise ModelContractError(
                f"{path} keeps its weights in another file, which would not be part of the job's "
                "identity. Save it as one file: torch.onnx.export(…, external_data=False), or "
                "onnx.save_model(onnx.load(…), …)."
            ) from None


def check_operators(path: Path) -> None:
    """Check that nodes of an ONNX file have the inputs, outputs and attributes of their operators.

    OpenVINO (2026.4) ends the process where an input is missing, and goes by an attribute's default
    where it does not know its name; ONNX Runtime refuses such a file by itself.

    Raises:
        ImportError: the package ``onnx`` is not installed.
        EngineError: they have others.
    """
    import onnx

    try:
        model = onnx.load_model(path, load_external_data=False)
        for body in (model.graph, *model.functions):
            imports = model.opset_import if body is model.graph else body.opset_import
            context = onnx.checker.C.CheckerContext()
            context.ir_version = model.ir_version
            versions = {each.domain: each.version for each in imports}
            context.opset_imports = versions
            for node in _nodes(body):
                if onnx.defs.has(node.op_type, node.domain):
                    onnx.checker.check_node(_without_graphs(node), context)
                    _check_inputs(node, versions[node.domain])
    except Exception as error:  # of the checker, and what texts that are none lead to
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise EngineError(
            f"{path} is not as the ONNX standard has it, or damaged: {shorten_text(reason)}. Save "
            "or copy it again."
        ) from None
    _check_values(path, model)


def _check_values(path: Path, model: Any) -> None:
    """Refuse operators that OpenVINO computes otherwise for a few values, which no trial shows.

    Raises:
        EngineError: there is one.
    """
    import onnx

    advice = "Use engine: onnxruntime."
    known = {
        each.name: each
        for each in model.graph.initializer
        if each.data_location != onnx.TensorProto.EXTERNAL
    }
    for body in (model.graph, *model.functions):
        for node in _nodes(body):
            if node.op_type == "LpNormalization":
                raise EngineError(
                    f"{path} has an operation LpNormalization, to whose sums OpenVINO adds a "
                    f"number that small values are lost beside. {advice}"
                )
            if node.op_type == "QuantizeLinear" and len(node.input) > 2:
                point = known.get(node.input[2])
                # Halves are the same before and after an even number is added.
                if point is None or (onnx.numpy_helper.to_array(point).astype(int) % 2).any():
                    raise EngineError(
                        f"{path} has an operation QuantizeLinear whose zero point is odd, or not "
                        f"known: halves are rounded otherwise by OpenVINO. {advice}"
                    )


def _check_inputs(node: Any, version: int) -> None:
    """Refuse a node of ``onnx`` that leaves out an input which its operator needs.

    Raises:
        ValueError: it does.
    """
    from onnx.defs import OpSchema, get_schema

    needed = get_schema(node.op_type, version, node.domain).inputs
    optional = OpSchema.FormalParameterOption.Optional
    for number, name in enumerate(node.input):
        if not name and needed[min(number, len(needed) - 1)].option != optional:
            raise ValueError(f"input {number} of a node {node.op_type} has no name")


def _nodes(body: Any) -> Iterator[Any]:
    """The nodes of a graph or a function of ``onnx``, and of the graphs in their attributes."""
    for node in body.node:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph)


def _without_graphs(node: Any) -> Any:
    """A node of ``onnx`` whose graphs are empty: they use names of what is around them."""
    import onnx

    if not any(each.HasField("g") or each.graphs for each in node.attribute):
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for attribute in copy.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            graph.Clear()
            graph.name = "empty"
    return copy


def _check(content: mmap.mmap, start: int, stop: int, message: _Message, depth: int) -> None:
    if depth > _DEEPEST:
        raise _Malformed("its messages are nested too deeply")
    for number, kind, begin, end in _fields(content, start, stop):
        if number in message.external and (kind != _VARINT or content[begin:end].strip(b"\0\x80")):
            raise _ExternalData
        part = message.parts.get(number)
        if kind != (message.kinds.get(number, kind) if part is None else _LENGTH):
            raise _Malformed(f"field {number} at byte {begin} is of the wrong kind")
        if part is not None:
            _check(content, begin, end, part, depth + 1)


def _check_calls(content: mmap.mmap) -> None:
    """Refuse functions whose calls unfold without end, which an engine would try to load."""
    calls: dict[_Name, list[_Name]] = {}
    top: list[_Name] = []
    for number, _, begin, end in _fields(content, 0, len(content)):
        part = _MODEL.parts.get(number)
        if number == _FUNCTION_NUMBER:
            name = _name(content, begin, end, _NAME_IN_FUNCTION)
            calls.setdefault(name, []).extend(_called(content, begin, end, _FUNCTION))
        elif part is not None:
            top.extend(_called(content, begin, end, part))
    if not calls:
        return
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError:
        raise _Unfolding("call themselves") from None
    sizes: dict[_Name, int] = {}
    for name in order:
        size = sum(1 + sizes.get(each, 0) for each in calls.get(name, ()))
        sizes[name] = min(size, _MOST_OF_CALLS + 1)
    if sum(sizes.get(name, 0) for name in top) > _MOST_OF_CALLS:
        raise _Unfolding(f"stand for more than {_MOST_OF_CALLS:,} nodes where they are called")


def _check_modes(content: mmap.mmap) -> None:
    """Refuse nodes that draw random numbers, or train. Raises _Random or _Trains."""
    modes = set()
    for part, _, _, begin, end in _parts(content, 0, len(content), _MODEL):
        if part is not _NODE:
            continue
        domain, operator, _ = _name(content, begin, end, _NAME_IN_NODE)
        if domain not in _OPERATOR_DOMAINS:
            continue
        if operator in _RANDOM:
            raise _Random(operator.decode())
        if operator == b"BatchNormalization" and _integer(content, begin, end, b"training_mode"):
            raise _Trains(operator.decode())
        inputs = _texts(content, begin, end, 1)
        if operator == b"Dropout" and len(inputs) > _TRAINING_MODE and inputs[_TRAINING_MODE]:
            modes.add(inputs[_TRAINING_MODE])
    if modes and not modes <= _falsehoods(content):
        raise _Random("a Dropout in training mode")


def _integer(content: mmap.mmap, start: int, stop: int, name: bytes) -> int:
    """An attribute of a node that is a whole number; 0 where it has none of the name.

    One that a function is given where it is called counts as 1. Of fields that are there several
    times, readers take one or another: whatever is not 0 counts.
    """
    for part, parent, _, begin, end in _parts(content, start, stop, _NODE):
        if part is _ATTRIBUTE and parent is _NODE and name in _texts(content, begin, end, 1):
            for number, kind, first, last in _fields(content, begin, end):
                if number == _REFERENCE:
                    return 1
                if number == _INTEGER and kind == _VARINT:
                    value = _varint(content, first, last)[0]
                    if value:
                        return value
    return 0


def _falsehoods(content: mmap.mmap) -> set[bytes]:
    """Names that stand for constants which are false, wherever the file defines them."""
    false: set[bytes] = set()
    other: set[bytes] = set()
    for part, parent, number, begin, end in _parts(content, 0, len(content), _MODEL):
        if part is _TENSOR and parent is _GRAPH and number == _INITIALIZER:
            names = _texts(content, begin, end, 8)
            (false if _is_false(content, begin, end) else other).update(names)
        elif part is _FUNCTION:
            other.update(_texts(content, begin, end, 4))  # its inputs
        elif part is _NODE:
            is_false = _is_false_constant(content, begin, end)
            (false if is_false else other).update(_texts(content, begin, end, 2))
    return false - other


def _is_false_constant(content: mmap.mmap, start: int, stop: int) -> bool:
    """Whether a node is a constant that is a tensor of zeros."""
    parts = _parts(content, start, stop, _NODE)
    tensors = [(begin, end) for part, _, _, begin, end in parts if part is _TENSOR]
    is_constant = _name(content, start, stop, _NAME_IN_NODE)[1] == b"Constant"
    return is_constant and len(tensors) == 1 and _is_false(content, *tensors[0])


def _is_false(content: mmap.mmap, start: int, stop: int) -> bool:
    """Whether all values of a tensor are zero."""
    fields = _fields(content, start, stop)
    return not any(
        content[begin:end].strip(b"\0") for number, _, begin, end in fields if number in _VALUES
    )


def _texts(content: mmap.mmap, start: int, stop: int, wanted: int) -> list[bytes]:
    """The texts in a message under a number."""
    fields = _fields(content, start, stop)
    return [content[begin:end] for number, _, begin, end in fields if number == wanted]


def _parts(
    content: mmap.mmap, start: int, stop: int, message: _Message
) -> Iterator[tuple[_Message, _Message, int, int, int]]:
    """All messages in a message: what each is, in which one, its number there, and its place."""
    for number, _, begin, end in _fields(content, start, stop):
        part = message.parts.get(number)
        if part is not None:
            yield part, message, number, begin, end
            yield from _parts(content, begin, end, part)


def _called(content: mmap.mmap, start: int, stop: int, message: _Message) -> Iterator[_Name]:
    """What the nodes in a message call: operators, or functions of the file."""
    for part, _, _, begin, end in _parts(content, start, stop, message):
        if part is _NODE:
            yield _name(content, begin, end, _NAME_IN_NODE)


def _name(content: mmap.mmap, start: int, stop: int, numbers: tuple[int, ...]) -> _Name:
    found = {
        number: content[begin:end]
        for number, kind, begin, end in _fields(content, start, stop)
        if number in numbers and kind == _LENGTH
    }
    return tuple(found.get(number, b"") for number in numbers)


def _fields(content: mmap.mmap, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, kind, and where the value begins and ends."""
    while start < stop:
        tag, start = _varint(content, start, stop)
        number = tag >> 3
        kind = tag & 7
        if not 0 < number < 1 << 29:
            raise _Malformed(f"the field before byte {start} has the number {number}")
        begin = start
        if kind == _VARINT:
            _, start = _varint(content, start, stop)
        elif kind == _LENGTH:
            length, begin = _varint(content, start, stop)
            start = begin + length
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            start += 8 if kind == _EIGHT_BYTES else 4
        else:
            raise _Malformed(f"the field before byte {start} is of the unknown kind {kind}")
        if start > stop:
            raise _Malformed(
                f"the value at byte {begin} ends behind the {stop} bytes of its message"
            )
        yield number, kind, begin, start


def _varint(content: mmap.mmap, start: int, stop: int) -> tuple[int, int]:
    """A number of variable length, and where the next value begins."""
    value = 0
    for place, position in enumerate(range(start, min(stop, start + 10))):
        byte = content[position]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, position + 1
    raise _Malformed(f"the number at byte {start} has no end")
