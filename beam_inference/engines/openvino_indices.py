"""Indices of networks in OpenVINO's form that would lead out of their arrays.

Three of its operations (2026.4.1) do not look at them. They would read or write what else lies in
memory, or end the process: MVN along an axis of more than 32 bits, GatherND, and
ScatterElementsUpdate. Those of Gather, GatherElements, ScatterUpdate and ScatterNDUpdate it checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openvino import Model, opset13
from openvino.passes import ConstantFolding, Manager

from beam_inference.errors import EngineError


def find_constant(value: Any) -> NDArray[Any] | None:
    """The numbers of a value of a network, if they are constant, or computed from constants.

    Args:
        value: output of a node. What it is computed from may become a constant by that.

    Returns:
        An array; None if the numbers depend on the network's input.
    """
    if value.get_node().get_type_name() != "Constant":
        consumer = next(iter(value.get_target_inputs()))
        _write_shapes(value)
        value = consumer.get_source_output()
        folding = Manager()
        folding.register_pass(ConstantFolding())
        with suppress(RuntimeError):  # they depend on the network's input
            folding.run_passes(Model([value], []))
        value = consumer.get_source_output()
    node = value.get_node()
    return np.asarray(node.get_data()) if node.get_type_name() == "Constant" else None


def _write_shapes(value: Any) -> None:
    """Replace shapes that a value is computed from by constants, where they are known."""
    waiting = [value.get_node()]
    seen: set[str] = set()
    while waiting:
        node = waiting.pop()
        if node.get_name() in seen:
            continue
        seen.add(node.get_name())
        if node.get_type_name() != "ShapeOf":
            waiting += [each.get_node() for each in node.input_values()]
        elif node.input_value(0).get_partial_shape().is_static:
            shape = np.array(node.input_value(0).get_shape(), np.int64)
            dtype = node.output(0).get_element_type()
            node.output(0).replace(opset13.constant(shape, dtype).output(0))


def check_indices(network: Model, name: Path | str) -> None:
    """Refuse a network with indices that lead out of their array, or may do so.

    Args:
        network: of known shapes; constants may be folded in it.
        name: what messages call it.

    Raises:
        EngineError: an index leads out, depends on the input, or is of an array of unknown shape.
    """
    for node in _all_nodes(network):
        kind = node.get_type_name()
        if kind in _FINDERS and not _FINDERS[kind](node):
            raise EngineError(
                f"{name} has an operation {kind} with indices that are outside of its array, or "
                "depend on the input: OpenVINO does not check them, and would take what lies in "
                "memory there for values. Export it as ONNX or PyTorch's, and write engine: "
                "onnxruntime or torch."
            )


def _all_nodes(network: Model) -> Iterator[Any]:
    """All nodes, of branches and loops as well."""
    for node in network.get_ordered_ops():
        yield node
        if node.get_type_name() == "If":
            yield from _all_nodes(node.get_then_body())
            yield from _all_nodes(node.get_else_body())
        elif hasattr(node, "get_function"):
            yield from _all_nodes(node.get_function())


def _has_axes_inside(node: Any) -> bool:
    """Whether the axes of MVN are those of its array."""
    if node.get_input_size() < 2:  # of the first set of operations, it has none
        return True
    axes = find_constant(node.input_value(1))
    rank = node.input_value(0).get_partial_shape().rank
    if axes is None or rank.is_dynamic:
        return False
    return _are_between(axes, -rank.get_length(), rank.get_length())


def _gathers_inside(node: Any) -> bool:
    """Whether GatherND takes what is there; it counts nothing from the end."""
    indices = find_constant(node.input_value(1))
    shape = node.input_value(0).get_partial_shape()
    if indices is None or shape.is_dynamic:
        return False
    ahead = int(node.get_attributes().get("batch_dims", 0))
    lengths = list(shape.to_shape())[ahead : ahead + indices.shape[-1]]
    return _are_between(indices, 0, np.array(lengths))


def _scatters_inside(node: Any) -> bool:
    """Whether ScatterElementsUpdate writes to what is there."""
    indices = find_constant(node.input_value(1))
    axes = find_constant(node.input_value(3))
    shape = node.input_value(0).get_partial_shape()
    if indices is None or axes is None or shape.is_dynamic:
        return False
    lengths = list(shape.to_shape())
    axis = int(axes.reshape(-1)[0])
    if not -len(lengths) <= axis < len(lengths):
        return False
    return _are_between(indices, -lengths[axis], lengths[axis])


def _are_between(indices: NDArray[Any], least: int, behind: int | NDArray[Any]) -> bool:
    return bool(((indices >= least) & (indices < behind)).all())


_FINDERS = {
    "GatherND": _gathers_inside,
    "MVN": _has_axes_inside,
    "ScatterElementsUpdate": _scatters_inside,
}
"""By the type of an operation: whether all its indices are inside of its array."""
