"""Expressions that a file of ``torch.export`` holds as text, and that PyTorch evaluates as Python.

A network that takes batches of any size says so in expressions of symbols, such as
``Mul(Integer(2), Symbol('s77', integer=True))``, and in conditions on its input's shape, such as
``L['x'].size()[0] <= 64``. PyTorch evaluates both. So each must be arithmetic, and nothing else.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import TypeAlias

from beam_inference.config.syntax import parse_expression

_LONGEST = 5000
_MOST_SYMBOLS = 10
_MOST_TERMS = 100
_DEEPEST = 60
_LARGEST = 1 << 64
_HIGHEST_POWER = 8
_MOST_PRECISION = 200

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr)

_SYMBOL = re.compile(r"(s|u|i|ps|zf|zuf)\d{1,6}|oo|int_oo|true|false")
_FLOAT = re.compile(r"-?\d{0,25}\.?\d{0,25}(e[+-]?\d{1,3})?")
_SYMBOL_FUNCTIONS = re.compile(
    # those of sympy and of torch.utils._sympy whose cost does not grow with their values
    r"Abs|Add|And|CeilDiv|CeilToInt|CleanDiv|Eq|Equality|FloatTrueDiv|FloorDiv|FloorToInt|Ge"
    r"|GreaterThan|Gt|Identity|IntTrueDiv|Integer|Le|LessThan|Lt|Max|Min|Mod|ModularIndexing"
    r"|Mul|Ne|Not|Or|PythonMod|Rational|RoundToInt|StrictGreaterThan|StrictLessThan|ToFloat"
    r"|TruncToFloat|TruncToInt|Unequality|Where|ceiling|floor"
)

_LONG_EXPONENT = re.compile(r"[\d.]e[+-]?[\d_]{4}", re.ASCII | re.IGNORECASE)

_GUARD_CHARACTERS = re.compile(r"[\w \[\]().,'+\-*/%<>=!&|~]*", re.ASCII)
_GUARD_FUNCTIONS = frozenset({"abs", "float", "int", "max", "min", "round"})
_GUARD_METHODS = frozenset({"ndimension", "size", "storage_offset", "stride"})
_GUARD_PROPERTIES = frozenset({"ndim", "shape"})
_MODULES = {
    "math": frozenset({"ceil", "floor", "isnan", "sqrt", "trunc"}),
    "torch": frozenset(
        {"_sym_sqrt", "sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not"}
    ),
}

_Parts: TypeAlias = "list[ast.expr] | None"
"""What a node that is arithmetic consists of; None where it is something else."""


class NoArithmetic(Exception):
    """A text is not plain arithmetic; the message says what is in it."""


def check_symbols(text: str) -> None:
    """Check that a text is arithmetic of the symbols that stand for sizes.

    Raises:
        NoArithmetic: it is not.
    """
    expression = _parse(text)
    _check(expression, _parts_of_symbols)
    symbols = {name for name in map(_symbol_name, ast.walk(expression)) if name}
    if len(symbols) > _MOST_SYMBOLS:
        raise NoArithmetic(f"it has {len(symbols)} symbols; at most {_MOST_SYMBOLS} are expected")
    _count_terms(expression)


def check_guard(text: str) -> None:
    """Check that a text is a condition on the shapes of the network's inputs.

    Raises:
        NoArithmetic: it is not.
    """
    if not _GUARD_CHARACTERS.fullmatch(text):
        raise NoArithmetic("it has characters of which no condition consists")
    _check(_parse(text), _parts_of_guard)


def _parse(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise NoArithmetic(f"it has {len(text):,} characters")
    if _LONG_EXPONENT.search(text):  # Python reads it as 0 or infinity, sympy digit by digit
        raise NoArithmetic("it has a number with an exponent of more than three digits")
    try:
        return parse_expression(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoArithmetic("it is not an expression") from None


def _check(node: ast.expr, parts_of: Callable[[ast.expr], _Parts], depth: int = 0) -> None:
    """Check that a node, and what it consists of, are arithmetic."""
    if depth > _DEEPEST:
        raise NoArithmetic("it is nested too deeply")
    parts = parts_of(node)
    if parts is None:
        parts = _parts_of_operation(node)
    if parts is None:
        raise NoArithmetic(f"it has {ast.unparse(node)[:60]!a}")
    for part in parts:
        _check(part, parts_of, depth + 1)


def _parts_of_operation(node: ast.expr) -> _Parts:  # noqa: PLR0911  # one for each kind of node
    match node:
        case ast.Constant(value=int() | float() as value) if abs(value) <= _LARGEST:
            return []
        case ast.BinOp(op=ast.Pow(), left=left, right=right) if _is_small_power(left, right):
            return [left]
        case ast.BinOp(op=operator, left=left, right=right) if isinstance(operator, _OPERATORS):
            return [left, right]
        case ast.UnaryOp(operand=operand):
            return [operand]
        case ast.BoolOp(values=values):
            return values
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
    return None


def _parts_of_symbols(node: ast.expr) -> _Parts:
    match node:
        case ast.Call(
            func=ast.Name(id="Pow"),
            args=[base, ast.Call(func=ast.Name(id="Integer"), args=[power])],
            keywords=[],
        ) if _is_small_power(base, power):
            return [base]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if (
            _SYMBOL_FUNCTIONS.fullmatch(name)
        ):
            return args
    return [] if _is_symbol(node) else None


def _is_symbol(node: ast.expr) -> bool:
    """Whether a node is a symbol, or a number in sympy's words."""
    match node:
        case ast.Name(id=name):
            return _SYMBOL.fullmatch(name) is not None
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))]):
            are_flags = all(isinstance(word.value, ast.Constant) for word in node.keywords)
            return are_flags and _SYMBOL.fullmatch(name) is not None
        case ast.Call(
            func=ast.Name(id="Float"),
            args=[ast.Constant(value=str(number))],
            keywords=[ast.keyword(arg="precision", value=ast.Constant(value=int(precision)))],
        ):
            return _FLOAT.fullmatch(number) is not None and precision <= _MOST_PRECISION
    return False


def _symbol_name(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Constant(value=str(name)) if _SYMBOL.fullmatch(name):
            return name
    return None


def _count_terms(node: ast.expr) -> int:
    """How many terms an expression has when it is multiplied out, as sympy does to divide it.

    Raises:
        NoArithmetic: they are many, in all of it or in a part; sympy could take for ever.
    """
    counts = [_count_terms(part) for part in _operands(node)]
    count: int
    match node:
        case (
            ast.BinOp(op=ast.Pow(), right=power)
            | ast.Call(func=ast.Name(id="Pow"), args=[_, ast.Call(args=[power])])
        ):
            count = counts[0] ** max(1, abs(ast.literal_eval(power)))
        case ast.BinOp(op=ast.Mult()) | ast.Call(func=ast.Name(id="Mul")):
            count = math.prod(counts)
        case ast.BinOp(op=ast.Add() | ast.Sub()) | ast.Call(func=ast.Name(id="Add")):
            count = sum(counts)
        case ast.UnaryOp():
            count = counts[0]
        case _:
            count = 1
    if count > _MOST_TERMS:
        raise NoArithmetic(f"it has {count:,} terms when multiplied out")
    return count


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.Call):
        return node.args
    return [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]


def _is_small_power(base: ast.expr, power: ast.expr) -> bool:
    """Whether a power costs little: a small one, not of powers."""
    if isinstance(power, ast.UnaryOp) and isinstance(power.op, ast.USub):
        power = power.operand
    if not isinstance(power, ast.Constant) or power.value not in range(_HIGHEST_POWER + 1):
        return False
    return not any(
        isinstance(part, ast.Pow) or (isinstance(part, ast.Name) and part.id == "Pow")
        for part in ast.walk(base)
    )


def _parts_of_guard(node: ast.expr) -> _Parts:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _GUARD_FUNCTIONS:
            return args
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=module), attr=name), args=args, keywords=[]
        ) if name in _MODULES.get(module, ()):
            return args
        case ast.Subscript(value=value, slice=index) if not _is_input(node) and _is_index(index):
            return [value]
    return [] if _is_of_input(node) else None


def _is_of_input(node: ast.expr) -> bool:
    """Whether a node is an input, its shape, or infinity."""
    match node:
        case ast.Name(id="inf") | ast.Attribute(value=ast.Name(id="math"), attr="inf"):
            return True
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]):
            return name in _GUARD_METHODS and _is_input(value)
        case ast.Attribute(value=value, attr=name):
            return name in _GUARD_PROPERTIES and _is_input(value)
    return _is_input(node)


def _is_input(node: ast.expr) -> bool:
    """Whether a node is an input of the network, such as ``L['x']`` or ``L['x'][0]``."""
    while isinstance(node, ast.Subscript) and _is_index(node.slice):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "L"


def _is_index(node: ast.expr) -> bool:
    if not isinstance(node, ast.Constant):
        return False
    value = node.value
    return type(value) is int or (isinstance(value, str) and value.isidentifier())
