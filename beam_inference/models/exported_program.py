"""The program in a file of ``torch.export``, checked before PyTorch makes Python code of it.

The program is JSON, but PyTorch evaluates parts of it, imports what it names, and writes its names
into source code that it runs. So every text in it must be one of the few kinds that a network
needs; anything else is refused, also what later versions of PyTorch may add.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from beam_inference.config.fields import Json
from beam_inference.config.json_text import parse_json
from beam_inference.models.expressions import NoArithmetic, check_guard, check_symbols
from beam_inference.models.tensors import tensor_fault


class UnsafeProgram(Exception):
    """A program could run code that is not the network's arithmetic; the message says where."""


_DEEPEST = 200

_NAME = re.compile(r"(?:[^\W\d]\w*)?", re.ASCII)
_DOTTED_NAME = re.compile(r"[\w.@$:+<>, /-]*", re.ASCII)
_OPERATOR = re.compile(r"torch\.ops\.(aten|prims)\.(\w+)\.(\w+)", re.ASCII)
_SYMBOLIC_OPERATOR = re.compile(
    r"_operator\.(add|and_|eq|floordiv|ge|getitem|gt|le|lt|mod|mul|ne|neg|not_|or_|pos|pow|sub"
    r"|truediv)|math\.(ceil|floor|trunc)"
    r"|torch\.(sym_(float|int|ite|max|min|not)|_sym_sqrt)"
)
_CONTROL_FLOW = re.compile(
    r"torch\.ops\.higher_order\.(associative_scan|cond|map_impl|scan|while_loop"
    r"|wrap_with_autocast|wrap_with_set_grad_enabled)"
)
_NOTES = frozenset(
    {"custom", "from_node", "nn_module_stack", "source_fn_stack", "stack_trace", "torch_fn"}
)
_MAPPINGS = frozenset(
    {"as_string_to_argument", "opset_version", "range_constraints", "treespec_namedtuple_fields"}
)
"""Keys whose values map names to something; those that end in ``_values`` do as well."""

_OBJECTS = frozenset({"as_custom_obj", "custom_obj", "custom_obj_values"})
_NO_ARITHMETIC = frozenset({"from_file", "save", "warn"})
_UNCHECKED = re.compile(
    # operators that believe their arguments: indices, sizes or memory are not held against bounds
    # (those that networks need are guarded: see exported_calls)
    r"set(_.*)?|resize.*|.*(sparse|nested|jagged|storage|to_dense|coalesce|backward).*"
    r"|(.*_)?(bsc|bsr|ccol|coo|crow|csc|csr)(_.*)?|((col|row)_)?indices(_copy)?|values(_copy)?"
    r"|unsafe_(?!chunk|split).*|segment_reduce|ctc_loss|empty_quantized|q_.*|quantized_.*"
    r"|.*(mkldnn|fbgemm|cudnn|miopen).*|native_batch_norm|batch_norm_.*|embedding_bag|lstm"
    r"|fused_moving_avg_.*|slow_conv.*|thnn_conv.*"
)
_PRIVATE = re.compile(
    # those that torch.export makes of networks, also when it decomposes them
    r"__(and|or|xor|lshift|rshift)__|_adaptive_avg_pool[23]d|_addmm_activation"
    r"|_(functional_)?assert_(async|scalar)|_assert_tensor_metadata|_batch_norm_impl_index"
    r"|_batch_norm_(no|with)_update(_functional)?|_cast_[A-Z][a-z]+|_cdist_forward"
    r"|_conj(_copy|_physical)?|_convolution(_mode)?|_conv_depthwise2d|_euclidean_dist"
    r"|_fft_(c2c|c2r|r2c)|_functional_sym_constrain_range(_for_size)?|_fused_rms_norm"
    r"|_is_(all|any)_true|_linalg_(det|slogdet|svd)|_local_scalar_dense|_log_softmax"
    r"|_logcumsumexp|_masked_softmax|_native_batch_norm_legit(_functional|_no_training)?"
    r"|_native_multi_head_attention|_pad_(circular|enum)|_prelu_kernel|_reshape_copy"
    r"|_safe_softmax|_scaled_dot_product_(attention_math|(cudnn|efficient|flash)_attention"
    r"|flash_attention_for_cpu|fused_attention_overrideable)|_shape_as_tensor|_softmax|_stack"
    r"|_to_copy|_to_cpu|_transformer_encoder_layer_fwd|_trilinear|_unsafe_(index|view)"
    r"|_upsample_(bicubic2d|bilinear2d|lanczos2d)_aa|_upsample_nearest_exact[123]d"
    r"|_weight_norm(_interface)?"
)
_STRIDED = 7
"""The number that torch.export writes for the layout of dense tensors."""

_INFINITE = re.compile(r"-?Infinity|NaN")
_LARGEST = 64 << 20
_MOST_GUARDS = 1000
_MOST_EXPRESSIONS = 4 << 20
_CONTAINERS = frozenset({"builtins.tuple", "builtins.list", "builtins.dict"}) | {
    "collections.OrderedDict"
}


def check_program(content: bytes) -> None:
    """Check that a program is a graph of PyTorch's own operators, and holds nothing else.

    Args:
        content: the JSON of a ``torch.export.ExportedProgram``.

    Raises:
        UnsafeProgram: it is not, or does.
        ValueError: it is no JSON.
    """
    program = parse_object(content)
    guards = program.get("guards_code")
    if isinstance(guards, list) and len(guards) > _MOST_GUARDS:
        raise UnsafeProgram(f"it has {len(guards):,} conditions; at most {_MOST_GUARDS:,} are read")
    _check_value(program, key="", where="", in_node=False)
    length = _count_expressions(program)
    if length > _MOST_EXPRESSIONS:
        raise UnsafeProgram(
            f"its expressions have {length:,} characters; at most {_MOST_EXPRESSIONS:,} are read"
        )


def parse_object(content: bytes) -> Json:
    """Parse a JSON object.

    Raises:
        ValueError: it is none.
    """
    if len(content) > _LARGEST:
        raise ValueError(f"its JSON has {len(content):,} bytes; at most {_LARGEST:,} are read")
    value = parse_json(content.decode())
    if not isinstance(value, dict):
        raise ValueError("its JSON is no object")
    return value


def check_example_inputs(value: object) -> None:
    """Check the example inputs of a loaded program, whose keys PyTorch writes into source code.

    Raises:
        UnsafeProgram: they are more than tensors and numbers in plain containers.
    """
    if isinstance(value, tuple | list):
        for item in value:
            check_example_inputs(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_name(key, "the example inputs")
            check_example_inputs(item)
    elif not isinstance(value, int | float | None):
        fault = tensor_fault(value)
        if fault:
            raise UnsafeProgram(f"the example inputs hold {fault}")


def _count_expressions(value: Any, key: str = "") -> int:
    """How many characters all expressions have together that PyTorch would evaluate."""
    if isinstance(value, dict):
        return sum(_count_expressions(item, name) for name, item in value.items())
    if isinstance(value, list):
        return sum(_count_expressions(item, key) for item in value)
    return len(value) if key == "expr_str" and isinstance(value, str) else 0


def _check_value(value: Any, *, key: str, where: str, in_node: bool, depth: int = 0) -> None:
    """Check a value under a key, and all that is in it.

    Args:
        value: of the JSON.
        key: the nearest key above it.
        where: the keys above it, for messages.
        in_node: whether it is part of a node's inputs, whose texts PyTorch quotes.
        depth: how many containers it is in.
    """
    if depth > _DEEPEST:
        raise UnsafeProgram(f"{where} is nested too deeply")
    if key in ("layout", "as_layout") and value not in (None, _STRIDED):
        raise UnsafeProgram(f"{where} is a tensor that is not dense")
    if isinstance(value, str):
        _check_text(value, key, where, in_node)
    elif isinstance(value, list):
        for item in value:
            _check_value(item, key=key, where=where, in_node=in_node, depth=depth + 1)
    elif isinstance(value, dict):
        is_mapping = key in _MAPPINGS or key.endswith("_values")
        for name, item in value.items():
            _check_key(name, key, where)
            inner = "" if is_mapping else name
            path = f"{where}.{name}"[-120:]
            if not _is_notes(item, inner, path):
                within = in_node or key == "nodes"
                _check_value(item, key=inner, where=path, in_node=within, depth=depth + 1)


def _is_notes(value: object, key: str, where: str) -> bool:
    """Whether a value notes where a node comes from: PyTorch looks names up in itself, no more.

    Raises:
        UnsafeProgram: the value must not stand under its key.
    """
    if key in _OBJECTS and value:
        raise UnsafeProgram(f"{where} names an object of a class of its own")
    if key in _CHECKS and isinstance(value, dict):
        raise UnsafeProgram(f"{where} is no text")
    if key != "metadata":
        return False
    if (
        not isinstance(value, dict)
        or not value.keys() <= _NOTES
        or not all(isinstance(text, str) for text in value.values())
    ):
        raise UnsafeProgram(f"{where} is more than notes")
    return True


def _check_key(inner: str, key: str, where: str) -> None:
    if key == "range_constraints":
        _check_text(inner, "expr_str", where, in_node=False)
    elif not _DOTTED_NAME.fullmatch(inner):
        raise UnsafeProgram(f"{where} has the key {inner!a:.60}")


def _check_text(text: str, key: str, where: str, in_node: bool) -> None:
    if in_node and key in ("as_string", "as_strings"):
        return  # an operator's argument: PyTorch quotes it where it writes it into source code
    check = _CHECKS.get(key, _check_name)
    try:
        check(text, where)
    except NoArithmetic as error:
        raise UnsafeProgram(f"{where} is to be evaluated and is not arithmetic: {error}") from None


def _check_name(text: object, where: str) -> None:
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise UnsafeProgram(f"{where} has the name {text!a:.60}")


def _check_dotted_name(text: str, where: str) -> None:
    if not _DOTTED_NAME.fullmatch(text):
        raise UnsafeProgram(f"{where} has the name {text!a:.60}")


def _check_infinite(text: str, where: str) -> None:
    if not _INFINITE.fullmatch(text):
        raise UnsafeProgram(f"{where} has the number {text!a:.60}")


def _check_operator(target: str, where: str) -> None:
    match = _OPERATOR.fullmatch(target)
    if match:
        library, name, overload = match.groups()
        full_name = f"{library}::{name}" + ("" if overload == "default" else f".{overload}")
        if is_arithmetic(name) and _is_registered(full_name):
            return
        if _UNCHECKED.fullmatch(name):
            raise UnsafeProgram(
                f"{where} is {target!a:.100}, which PyTorch runs without comparing what it is given"
            )
    elif _SYMBOLIC_OPERATOR.fullmatch(target) or _CONTROL_FLOW.fullmatch(target):
        return
    raise UnsafeProgram(f"{where} is {target!a:.100}, which is not an operator of a network")


def is_arithmetic(operator: str) -> bool:
    """Whether an operator computes tensors from tensors, within their bounds."""
    if operator.startswith("_"):
        return _PRIVATE.fullmatch(operator) is not None
    return operator not in _NO_ARITHMETIC and not _UNCHECKED.fullmatch(operator)


def _is_registered(operator: str) -> bool:
    """Whether PyTorch has an operator for networks, rather than one for scripts."""
    try:
        return torch._C._dispatch_has_kernel(operator)
    except RuntimeError:  # such names are not allowed
        return False


def _check_tree(text: str, where: str) -> None:
    """Check the description of the containers in which inputs or outputs come."""
    try:
        protocol, tree = parse_json(text)
    except (ValueError, TypeError):
        raise UnsafeProgram(f"{where} describes no containers") from None
    if protocol != 1:
        raise UnsafeProgram(f"{where} is of the unknown protocol {protocol!a:.40}")
    _check_container(tree, where)


def _check_container(tree: Any, where: str, depth: int = 0) -> None:
    if not isinstance(tree, dict) or not isinstance(tree.get("children_spec"), list):
        raise UnsafeProgram(f"{where} describes no containers")
    kind = tree.get("type")
    if kind is not None and str(kind) not in _CONTAINERS:
        raise UnsafeProgram(f"{where} asks for a container of the type {kind!a:.60}")
    # the keys of a dictionary; PyTorch would import what else the context names
    context = tree.get("context")
    keys = parse_json(context) if isinstance(context, str) else context
    if not isinstance(keys, list | None) or depth > _DEEPEST:
        raise UnsafeProgram(f"{where} describes no containers")
    for key in keys or ():
        _check_name(key, where)
    for child in tree["children_spec"]:
        _check_container(child, where, depth + 1)


_CHECKS: dict[str, Callable[[str, str], None]] = {
    "target": _check_operator,
    "as_operator": _check_operator,
    "as_float": _check_infinite,
    "expr_str": lambda text, _: check_symbols(text),
    "guards_code": lambda text, _: check_guard(text),
    "in_spec": _check_tree,
    "out_spec": _check_tree,
    "fqn": _check_dotted_name,
    "parameter_name": _check_dotted_name,
    "buffer_name": _check_dotted_name,
    "tensor_constant_name": _check_dotted_name,
    "torch_version": _check_dotted_name,
}
