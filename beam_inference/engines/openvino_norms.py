"""Means and normalisations of networks as OpenVINO reads them, from files or TorchScript: as in :mod:`~.short_sums`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from openvino import Model, Type, opset13
from openvino.passes import ConstantFolding, Manager

_SHORT = 1024
"""Along an axis of more voxels they are summed up in two steps."""


def replace_long_sums(network: Model) -> Model:
    """The network, changed in place wherever it takes a mean of many voxels, or normalises by one, in float32.

    Its shapes must be known; where one is not, what it is of stays as it is.
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
    """MVN: array minus its mean, over its standard deviation; with the weights that it is multiplied with."""
    axes = _axes(node)
    attributes = node.get_attributes()
    array, pieces = _in_pieces(array, axes)
    if len(pieces) < 2 or "eps_mode" not in attributes:
        return None
    product, weight = _weighted(node, axes) if pieces == axes else (node, None)
    if attributes["normalize_variance"]:
        inside = attributes["eps_mode"].upper() == "INSIDE_SQRT"
        new = _normal(array, pieces, attributes["eps"], inside, weight)
    else:
        product = node
        new = opset13.subtract(array, _mean(array, pieces))
    return product, new if pieces == axes else _reshaped(new, node.output(0).get_shape())


def _weighted(node: Any, axes: Sequence[int]) -> tuple[Any, Any]:
    """What multiplies a node with a constant that is the same along these axes, and the constant; else only the node.

    To multiply a few numbers before they meet the array is one operation less on all of it.
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
    """GroupNormalization (Wu and He, arXiv:1803.08494): groups of channels are normalised as one."""
    attributes = node.get_attributes()
    shape = list(array.get_shape())
    pieces, axes = _in_pieces(array, range(2, len(shape)))
    weight = _reshaped(node.input_value(1), [-1, *[1] * len(axes)])
    bias = _reshaped(node.input_value(2), [-1, *[1] * (len(shape) - 2)])
    normal = _normal(pieces, axes, attributes["epsilon"], True, weight, attributes["num_groups"])
    return node, opset13.add(_reshaped(normal, shape), bias)


def _reduce_mean(node: Any, array: Any) -> tuple[Any, Any] | None:
    array, pieces = _in_pieces(array, _axes(node))
    return (
        None
        if len(pieces) < 2
        else (node, _reshaped(_mean(array, pieces), node.output(0).get_shape()))
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
    """The array minus its mean over some axes, times weight / √(σ² + ε), or weight / (σ + ε) if not ``inside``.

    With ``groups``, mean and variance are those of groups of channels.
    """
    difference = opset13.subtract(array, _shared(_mean(array, axes), groups))
    norm = opset13.reduce_l2(difference, [axes[0]], True)
    squares = opset13.multiply(
        opset13.multiply(norm, norm), opset13.constant(1 / array.get_shape()[axes[0]], Type.f32)
    )
    variance = _shared(_mean(squares.output(0), axes[1:], 1), groups)
    least = opset13.constant(epsilon, Type.f32)
    root = opset13.sqrt(opset13.add(variance, least) if inside else variance)
    # OpenVINO 2026.4.1 computes wrong values where a constant of several numbers is divided.
    scale = opset13.divide(
        opset13.constant(1, Type.f32), root if inside else opset13.add(root, least)
    )
    scale = scale if weight is None else opset13.multiply(scale, weight)
    return opset13.multiply(difference, scale)


def _shared(means: Any, groups: int | None) -> Any:
    """Of the channels of a group, their mean: the array keeps its shape, as it is only these few that are regrouped."""
    if groups is None:
        return means
    shape = list(means.output(0).get_shape())
    grouped = _reshaped(means, [shape[0], groups, -1])
    of_group = opset13.reduce_mean(grouped, [2], True)
    return _reshaped(opset13.broadcast(of_group, list(grouped.output(0).get_shape())), shape)


def _mean(array: Any, axes: Sequence[int], begun: int = 0) -> Any:
    """Over one axis after the other; means and sums take turns, or OpenVINO would make one long sum of them.

    ``begun``: how many axes have been summed over before.
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
    """The array with its long ones of some axes as two each, if they can be; and these axes there."""
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
    return (array if pieces == list(axes) else _reshaped(array, shape).output(0)), pieces


def _reshaped(array: Any, shape: Sequence[int]) -> Any:
    return opset13.reshape(array, list(shape), False)


def _axes(node: Any) -> list[int]:
    """Those that a node sums over, if they are constant, or computed of constants."""
    if node.get_input_size() < 2:
        return []
    if node.input_value(1).get_node().get_type_name() != "Constant":
        folding = Manager()
        folding.register_pass(ConstantFolding())
        with suppress(RuntimeError):  # they depend on the network's input
            folding.run_passes(Model([node.input_value(1)], []))
    given = node.input_value(1).get_node()
    if given.get_type_name() != "Constant":
        return []
    return sorted(
        {
            int(axis) % len(node.input_value(0).get_shape())
            for axis in np.atleast_1d(given.get_data())
        }
    )
