"""Means and normalisations of networks in OpenVINO's form, from files or TorchScript.

They are computed as in :mod:`beam_inference.engines.stable_norms`, which says why and states the
formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from openvino import Model, Type, opset13

from beam_inference.engines.openvino_operations import find_constant

_SHORT = 1024
"""Most voxels of an axis that are summed in one step; longer axes take two."""


def replace_long_sums(network: Model) -> Model:
    """Replace means of many voxels, and normalisations, in float32.

    Args:
        network: is changed in place. An operation on an array of unknown shape stays as it is.

    Returns:
        The network.
    """
    for node in network.get_ordered_ops():
        kind = node.get_type_name()
        if kind not in _WRITTEN or node.input_value(0).get_partial_shape().is_dynamic:
            continue
        if node.input_value(0).get_element_type() != Type.f32:
            continue
        old, new = _WRITTEN[kind](node, node.input_value(0)) or (node, node)
        if new is not node:
            new.set_friendly_name(old.get_friendly_name())
            old.output(0).replace(new.output(0))
    network.validate_nodes_and_infer_types()
    return network


def _mvn(node: Any, array: Any) -> tuple[Any, Any] | None:
    """Replace MVN, (array - mean) / standard deviation, and the product with weights after it."""
    axes = _axes(node)
    attributes = node.get_attributes()
    array, pieces = _in_pieces(array, axes)
    if len(pieces) < 2 or "eps_mode" not in attributes:
        return None
    product, weight = _product_with_weight(node, axes) if pieces == axes else (node, None)
    if attributes["normalize_variance"]:
        inside = attributes["eps_mode"].upper() == "INSIDE_SQRT"
        new = _normal(array, pieces, attributes["eps"], inside, weight)
    else:
        product = node
        new = opset13.subtract(array, _mean(array, pieces))
    return product, new if pieces == axes else _reshape(new, node.output(0).get_shape())


def _product_with_weight(node: Any, axes: Sequence[int]) -> tuple[Any, Any]:
    """The product of a node with a constant, and the constant, if it is uniform along the axes.

    Multiplying the few numbers of a scale by the constant saves one operation on the whole array.
    Where there is no such product, the node and None.
    """
    consumers = [each.get_node() for each in node.output(0).get_target_inputs()]
    shape = node.output(0).get_shape()
    for product in consumers if len(consumers) == 1 else ():
        if product.get_type_name() == "Multiply" and product.output(0).get_shape() == shape:
            for weight in product.input_values():
                lengths = [1] * (len(shape) - len(weight.get_shape())) + list(weight.get_shape())
                if weight.get_node().get_type_name() == "Constant" and all(
                    lengths[axis] == 1 for axis in axes
                ):
                    return product, weight
    return node, None


def _group_normalization(node: Any, array: Any) -> tuple[Any, Any]:
    """Replace GroupNormalization (Wu and He, arXiv:1803.08494)."""
    attributes = node.get_attributes()
    shape = list(array.get_shape())
    pieces, axes = _in_pieces(array, range(2, len(shape)))
    weight = _reshape(node.input_value(1), [-1, *[1] * len(axes)])
    bias = _reshape(node.input_value(2), [-1, *[1] * (len(shape) - 2)])
    normal = _normal(pieces, axes, attributes["epsilon"], True, weight, attributes["num_groups"])
    return node, opset13.add(_reshape(normal, shape), bias)


def _reduce_mean(node: Any, array: Any) -> tuple[Any, Any] | None:
    array, pieces = _in_pieces(array, _axes(node))
    return (
        None
        if len(pieces) < 2
        else (node, _reshape(_mean(array, pieces), node.output(0).get_shape()))
    )


_WRITTEN = {"MVN": _mvn, "GroupNormalization": _group_normalization, "ReduceMean": _reduce_mean}


def _normal(
    array: Any,
    axes: Sequence[int],
    epsilon: float,
    inside: bool,
    weight: Any = None,
    groups: int | None = None,
) -> Any:
    """Normalise an array over some axes.

    Args:
        array: (N, C, …).
        axes: over which mean μ and variance σ² are taken.
        epsilon: ε, which keeps the divisor from zero.
        inside: whether ε is inside the root: 1 / √(σ² + ε) instead of 1 / (σ + ε).
        weight: multiplies the result.
        groups: number of groups of channels that share a mean and a variance; None if each channel
            has its own.
    """
    difference = opset13.subtract(array, _group_means(_mean(array, axes), groups))
    norm = opset13.reduce_l2(difference, [axes[0]], True)
    squares = opset13.multiply(
        opset13.multiply(norm, norm), opset13.constant(1 / array.get_shape()[axes[0]], Type.f32)
    )
    variance = _group_means(_mean(squares.output(0), axes[1:], 1), groups)
    least = opset13.constant(epsilon, Type.f32)
    root = opset13.sqrt(opset13.add(variance, least) if inside else variance)
    # OpenVINO 2026.4.1 computes wrong values where a constant of several numbers is divided.
    scale = opset13.divide(
        opset13.constant(1, Type.f32), root if inside else opset13.add(root, least)
    )
    scale = scale if weight is None else opset13.multiply(scale, weight)
    return opset13.multiply(difference, scale)


def _group_means(means: Any, groups: int | None) -> Any:
    """Replace the means of channels by the mean of their group; the shape stays."""
    if groups is None:
        return means
    shape = list(means.output(0).get_shape())
    grouped = _reshape(means, [shape[0], groups, -1])
    of_group = opset13.reduce_mean(grouped, [2], True)
    return _reshape(opset13.broadcast(of_group, list(grouped.output(0).get_shape())), shape)


def _mean(array: Any, axes: Sequence[int], begun: int = 0) -> Any:
    """The mean over some axes, one after the other.

    Means and sums take turns: OpenVINO would merge several of a kind into one long sum. ``begun``
    axes have been summed before.
    """
    shape = array.get_shape()
    for position, axis in enumerate(axes, begun):
        if position % 2:
            array = opset13.reduce_sum(array, [axis], True)
            array = opset13.multiply(array, opset13.constant(1 / shape[axis], Type.f32))
        else:
            array = opset13.reduce_mean(array, [axis], True)
    return array


def _in_pieces(array: Any, axes: Sequence[int]) -> tuple[Any, list[int]]:
    """Split the long ones of some axes in two, where they have factors; the axes' new numbers."""
    shape = list[int]()
    pieces = list[int]()
    for axis, length in enumerate(array.get_shape()):
        parts = [length]
        if axis in axes and length > _SHORT:
            parts = next(
                ([n, length // n] for n in range(math.isqrt(length), 1, -1) if length % n == 0),
                parts,
            )
        pieces += [len(shape) + each for each in range(len(parts)) if axis in axes]
        shape += parts
    return (array if pieces == list(axes) else _reshape(array, shape).output(0)), pieces


def _reshape(array: Any, shape: Sequence[int]) -> Any:
    return opset13.reshape(array, np.array(shape, np.int64), False)


def _axes(node: Any) -> list[int]:
    """The axes that a node sums over, if they are constant, or computed from constants."""
    if node.get_input_size() < 2:
        return []
    constant = find_constant(node.input_value(1))
    if constant is None:
        return []
    rank = len(node.input_value(0).get_shape())
    axes = [int(axis) for axis in np.atleast_1d(constant)]
    if any(not -rank <= axis < rank for axis in axes):
        return []  # they are refused
    return sorted({axis % rank for axis in axes})
