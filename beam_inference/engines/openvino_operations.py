"""Operations of networks in OpenVINO's form, judged before OpenVINO runs them.

OpenVINO (2026.4.1) does not look at all that an operation is told. Some numbers let it read or
write what else lies in memory, or end the process: axes of MVN of more than 32 bits, indices of
GatherND and ScatterElementsUpdate, strides of 0 or beyond 32 bits, and much of what detectors and
Fourier transforms are made of. So only operations are run that were tried with such numbers, and
that networks for volumes need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openvino import Model, Type, opset13
from openvino.passes import ConstantFolding, Manager

from beam_inference.errors import EngineError
from beam_inference.foreign_text import shorten_text


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


def check_operations(network: Model, name: Path | str) -> None:
    """Refuse a network that OpenVINO might not survive, or for which it might read other memory.

    Args:
        network: of known shapes; constants may be folded in it.
        name: what messages call it.

    Raises:
        EngineError: an operation is none of those that were tried, or is told numbers that make no
            sense; or an index leads out of its array, depends on the input, or is of an array of
            unknown shape; or the network computes in integers, or in half precision.
    """
    tried = frozenset(_TRIED.split())
    for node in _all_nodes(network):
        kind = node.get_type_name()
        if kind not in tried:
            raise EngineError(
                f"{name} has an operation {shorten_text(kind)}, which OpenVINO does not run here: "
                f"it may not check what it is told. {_ADVICE}"
            )
        if not _has_sound_steps(node):
            raise EngineError(
                f"{name} has an operation {kind} with strides, dilations or a kernel below 1, or "
                f"beyond 32 bits: it is damaged, and OpenVINO might not check that. {_ADVICE}"
            )
        if kind == "AvgPool" and not _averages_inside(node):
            raise EngineError(
                f"{name} has an average pooling whose last window reaches beyond the padding "
                "(ceil_mode), which OpenVINO divides by another number than PyTorch and ONNX "
                f"Runtime do. {_ADVICE}"
            )
        if not _are_known(node) or (kind in _FINDERS and not _FINDERS[kind](node)):
            raise EngineError(
                f"{name} has an operation {kind} with axes, extents or indices that are outside of "
                "its array, or depend on the input: OpenVINO does not check them, and would take "
                f"what lies in memory there for values. {_ADVICE}"
            )
    _check_integers(network, name)


def _check_integers(network: Model, name: Path | str) -> None:
    """Refuse a network that computes in integers, or looks up what may not be there.

    Of integers OpenVINO keeps the nearest that there is where PyTorch and ONNX Runtime go on from
    the other end; it divides towards zero, and of 64 bits keeps 32. Beyond a table it finds 0,
    where they stop. A trial shows that only where its values reach so far. What is left are numbers
    of places (TopK, pooling), and truths as 0 and 1; nothing is computed with these, either.

    Args:
        network: one of which all operations were tried.
        name: what messages call it.

    Raises:
        EngineError: it does.
    """
    ends: dict[str, int] = {}  # of nodes that depend on the input: what their integers are below
    for node in _all_nodes(network):
        kind = node.get_type_name()
        inputs = [ends.get(value.get_node().get_name()) for value in node.input_values()]
        known = [end for end in inputs if end is not None]
        if kind == "ShapeOf" or not (known or kind == "Parameter"):
            continue
        dtypes = [output.get_element_type() for output in node.outputs()]
        integers = [dtype for dtype in dtypes if dtype.is_integral_number()]
        end = _end_of_integers(node, known) if integers else 0
        if end is None:
            raise EngineError(
                f"{name} has an operation {kind} that computes in {integers[0].get_type_name()}, "
                "which OpenVINO divides or cuts off otherwise than PyTorch and ONNX Runtime do. "
                f"{_ADVICE}"
            )
        asked = inputs[_TABLES[kind]] if kind in _TABLES else None
        if asked is not None and asked > _length_of_table(node):
            raise EngineError(
                f"{name} has an operation {kind} that may look for more than its table has, by the "
                "values of the input: OpenVINO finds 0 there, where PyTorch and ONNX Runtime stop. "
                f"{_ADVICE}"
            )
        ends[node.get_name()] = end


def _end_of_integers(node: Any, ends: Sequence[int]) -> int | None:
    """What the integers of a node's answers are below; None if it computes in integers.

    Args:
        node: it depends on the network's input.
        ends: the same of those of its inputs that do; 0 of other numbers.
    """
    kind = node.get_type_name()
    if kind in _CONVERTERS:
        return _end_of_converted(node, ends)
    if kind == "TopK":
        return int(node.input_value(0).get_shape()[node.get_attributes()["axis"]])
    if kind in ("MaxPool", "AdaptiveMaxPool"):
        return int(math.prod(node.input_value(0).get_shape()))
    if kind in _MOVERS.split():
        return max(ends)
    return _BEYOND_TABLES if kind in _CHOOSERS.split() else None


def _end_of_converted(node: Any, ends: Sequence[int]) -> int | None:
    """As :func:`_end_of_integers`; truths, wider integers and levels are converted exactly."""
    array = node.input_value(0)
    if array.get_element_type() == Type.boolean:
        return 2
    if array.get_element_type().is_integral():
        return ends[0] if node.output(0).get_element_type() in (Type.i32, Type.i64) else None
    return _BEYOND_TABLES if array.get_node().get_type_name() == "FakeQuantize" else None


def _length_of_table(node: Any) -> int:
    """Of how many entries an operation chooses."""
    if node.get_type_name() == "OneHot":
        return int(_told(node, 1)[0])
    shape = node.input_value(0).get_shape()
    if node.get_type_name() == "Gather":
        return int(shape[int(_told(node, 2)[0])])
    return int(shape[node.get_attributes()["axis"]])


def _all_nodes(network: Model) -> Iterator[Any]:
    """All nodes, of branches as well; loops are not run."""
    for node in network.get_ordered_ops():
        yield node
        if node.get_type_name() == "If":
            yield from _all_nodes(node.get_then_body())
            yield from _all_nodes(node.get_else_body())


def _has_sound_steps(node: Any) -> bool:
    attributes = node.get_attributes()
    numbers = [number for key in _STEPS for number in attributes.get(key, ())]
    return all(0 < number < _BEYOND for number in numbers)


def _averages_inside(node: Any) -> bool:
    """Whether no window of an average pooling that counts the padding reaches beyond it."""
    told = node.get_attributes()
    if told["exclude-pad"] or "ceil" not in str(told["rounding_type"]).lower():
        return True
    begin, end, kernel, strides = (
        np.array(told[key]) for key in ("pads_begin", "pads_end", "kernel", "strides")
    )
    lengths = np.array(node.input_value(0).get_shape()[2:]) + begin + end
    dilations = np.array(told.get("dilations", np.ones_like(kernel)))
    rest = (lengths - dilations * (kernel - 1) - 1) % strides
    return not (rest.any() and (begin.any() or end.any()))


def _are_known(node: Any) -> bool:
    """Whether the extents of a node's answers are known, and what it is told is constant."""
    if any(each.get_partial_shape().is_dynamic for each in node.outputs()):
        return False
    told = node.input_values()[_TOLD.get(node.get_type_name(), node.get_input_size()) :]
    return all(find_constant(value) is not None for value in told)


def _has_axes_inside(node: Any) -> bool:
    """Whether the axes of MVN are those of its array."""
    if node.get_input_size() < 2:  # of the first set of operations, it has none
        return True
    rank = len(node.input_value(0).get_shape())
    return _are_between(_told(node, 1), -rank, rank)


def _gathers_inside(node: Any) -> bool:
    """Whether GatherND takes what is there; it counts nothing from the end."""
    indices = _told(node, 1)
    ahead = int(node.get_attributes().get("batch_dims", 0))
    lengths = list(node.input_value(0).get_shape())[ahead : ahead + indices.shape[-1]]
    return _are_between(indices, 0, np.array(lengths))


def _scatters_inside(node: Any) -> bool:
    """Whether ScatterElementsUpdate writes to what is there."""
    indices = find_constant(node.input_value(1))
    lengths = list(node.input_value(0).get_shape())
    axis = int(_told(node, 3)[0])
    if indices is None or not -len(lengths) <= axis < len(lengths):
        return False
    return _are_between(indices, -lengths[axis], lengths[axis])


def _rolls_inside(node: Any) -> bool:
    """Whether Roll goes along axes of its array."""
    rank = len(node.output(0).get_shape())
    return _are_between(_told(node, 2), -rank, rank)


def _broadcasts_inside(node: Any) -> bool:
    """Whether Broadcast puts its array's axes among those of the answer."""
    if node.get_input_size() < 3:
        return True
    return _are_between(_told(node, 2), 0, len(node.output(0).get_shape()))


def _splits_inside(node: Any) -> bool:
    """Whether the parts of VariadicSplit, of which one may be what is left, are in its array."""
    lengths = _told(node, 2)
    stated = lengths[lengths != -1]
    length = node.input_value(0).get_shape()[int(_told(node, 1)[0])]
    return bool((stated >= 0).all()) and stated.sum() <= length


def _pads_inside(node: Any) -> bool:
    """Whether Pad cuts off, or repeats, no more than there is."""
    lengths = np.array(node.input_value(0).get_shape())
    begin, end = (_told(node, number) for number in (1, 2))
    mode = str(node.get_attributes().get("pad_mode", "")).lower()
    if min(begin.min(initial=0), end.min(initial=0)) < 0:
        left = lengths + np.minimum(begin, 0) + np.minimum(end, 0)
        return mode == "constant" and bool((left > 0).all())
    most = {"reflect": lengths - 1, "symmetric": lengths}.get(mode, np.inf)
    return bool((np.maximum(begin, end) <= most).all())


def _told(node: Any, number: int) -> NDArray[Any]:
    """What a node is told by an input that :func:`_are_known` has found to be constant.

    Extents of its other inputs are known by then, as those of all answers before it are.
    """
    return np.atleast_1d(np.asarray(node.input_value(number).get_node().get_data()))


def _are_between(indices: NDArray[Any], least: int, behind: int | NDArray[Any]) -> bool:
    return bool(((indices >= least) & (indices < behind)).all())


_TRIED = """
Abs Acos Acosh AdaptiveAvgPool AdaptiveMaxPool Add Asin Asinh Atan Atanh AvgPool
BatchNormInference BatchToSpace BitwiseAnd BitwiseLeftShift BitwiseNot BitwiseOr BitwiseRightShift
BitwiseXor Broadcast Bucketize Ceiling Clamp Concat Constant Convert ConvertLike
ConvertPromoteTypes Convolution ConvolutionBackpropData Cos Cosh CumSum DepthToSpace Divide Einsum
Elu Equal Erf ErfInv Exp Eye FakeQuantize Floor FloorMod GRN Gather GatherElements GatherND Gelu
Greater GreaterEqual GridSample GroupConvolution GroupConvolutionBackpropData GroupNormalization
HSigmoid HSwish HardSigmoid Identity If Interpolate IsFinite IsInf IsNaN LRN Less LessEqual Log
LogSoftmax LogicalAnd LogicalNot LogicalOr LogicalXor MVN MatMul MaxPool Maximum Minimum Mish
Mod Multiply Negative NormalizeL2 NotEqual OneHot PRelu Pad Parameter Power Range ReduceL1
ReduceL2 ReduceLogicalAnd ReduceLogicalOr ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Relu
Reshape Result Reverse Roll Round ScaledDotProductAttention ScatterElementsUpdate ScatterNDUpdate
ScatterUpdate Select Selu ShapeOf ShuffleChannels Sigmoid Sign Sin Sinh Slice SliceScatter
SoftPlus SoftSign Softmax SpaceToBatch SpaceToDepth Split Sqrt SquaredDifference Squeeze
StridedSlice Subtract Swish Tan Tanh Tile TopK Transpose Unsqueeze VariadicSplit
Xor
"""
"""Types of operations that were tried with numbers that make no sense, by their names."""

_MOVERS = """
Identity ReduceMax ReduceMin Reshape Result Reverse Roll Slice Split Squeeze StridedSlice Tile
Transpose Unsqueeze VariadicSplit
"""
"""Types of operations that move or choose integers, all of one input."""

_CHOOSERS = """
BatchToSpace Broadcast Concat DepthToSpace Gather GatherElements GatherND If Maximum Minimum OneHot
Pad Parameter ScatterElementsUpdate ScatterNDUpdate ScatterUpdate Select ShuffleChannels
SliceScatter SpaceToBatch SpaceToDepth
"""
"""Types of operations that move or choose integers, also of constants."""

_CONVERTERS = ("Convert", "ConvertLike", "ConvertPromoteTypes")

_BEYOND_TABLES = 2**63
"""What integers are below of which no more is known."""

_TABLES = {"Gather": 1, "GatherElements": 1, "OneHot": 0}
"""By the type of an operation that looks something up: its input of indices."""

_STEPS = ("strides", "dilations", "kernel")
"""Attributes of what goes over an array in steps; each number is 1 or more."""

_BEYOND = 2**31

_ADVICE = "Use an engine that does: onnxruntime for ONNX, torch for networks of PyTorch."

_TOLD = {
    "AdaptiveAvgPool": 1,
    "AdaptiveMaxPool": 1,
    "BatchToSpace": 1,
    "Broadcast": 1,
    "CumSum": 1,
    "Eye": 0,
    "Gather": 2,
    "GatherND": 1,
    "Interpolate": 1,
    "LRN": 1,
    "MVN": 1,
    "NormalizeL2": 1,
    "OneHot": 1,
    "Pad": 1,
    "Range": 0,
    "ReduceL1": 1,
    "ReduceL2": 1,
    "ReduceLogicalAnd": 1,
    "ReduceLogicalOr": 1,
    "ReduceMax": 1,
    "ReduceMean": 1,
    "ReduceMin": 1,
    "ReduceProd": 1,
    "ReduceSum": 1,
    "Reshape": 1,
    "Reverse": 1,
    "Roll": 1,
    "ScatterElementsUpdate": 3,
    "ScatterUpdate": 3,
    "Slice": 1,
    "SliceScatter": 2,
    "SpaceToBatch": 1,
    "Split": 1,
    "Squeeze": 1,
    "StridedSlice": 1,
    "Tile": 1,
    "TopK": 1,
    "Transpose": 1,
    "Unsqueeze": 1,
    "VariadicSplit": 1,
}
"""By the type of an operation: its first input that tells axes, extents or the like; all after."""

_FINDERS = {
    "Broadcast": _broadcasts_inside,
    "GatherND": _gathers_inside,
    "MVN": _has_axes_inside,
    "Pad": _pads_inside,
    "Roll": _rolls_inside,
    "ScatterElementsUpdate": _scatters_inside,
    "VariadicSplit": _splits_inside,
}
"""By the type of an operation: whether all that it is told is inside of its array."""
