"""Print figures on how the code reads: symptoms to look at, not limits to obey.

    python tools/style_figures.py [CHECKOUT ...]

prints one column for each checkout (this one by default). What each figure counts is said by its
function's docstring. Code lines are the lines of ``beam_inference`` that are neither blank, nor a
comment, nor part of a docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST_LINE = 100
# Participles that do not end in -ed, and words in -ed that are none.
IRREGULAR_PARTICIPLES = {
    *(
        "told",
        "found",
        "known",
        "given",
        "made",
        "drawn",
        "shown",
        "taken",
        "written",
        "cut",
        "kept",
    ),
    *(
        "held",
        "sent",
        "left",
        "done",
        "gone",
        "meant",
        "built",
        "put",
        "foretold",
        "begun",
        "read",
        "said",
    ),
}
# also imperatives, and counted as such where they come first
IRREGULAR_VERBS = {"cut", "put", "read"}
NO_PARTICIPLES = {
    "need",
    "seed",
    "feed",
    "embed",
    "speed",
    "indeed",
    "exceed",
    "proceed",
    "red",
    "shed",
}
QUESTIONS = {"is", "are", "has", "have", "was", "were", "needs", "may", "can", "must"}
FRAGMENTS = ("Of ", "Those ", "The same", "By ")

Tree = tuple[Path, str, ast.Module]


@dataclass(frozen=True)
class Checkout:
    """The Python files of one checkout: those of the package, and those of its tests."""

    root: Path
    package: list[Tree]
    tests: list[Tree]


def trees_under(folder: Path) -> list[Tree]:
    """Every Python file under a folder, with its text and its syntax tree."""
    if not folder.is_dir():
        return []
    texts = [(path, path.read_text()) for path in sorted(folder.rglob("*.py"))]
    return [(path, text, ast.parse(text)) for path, text in texts]


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines that strings standing alone take: docstrings, also of constants."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def count_code_lines(trees: list[Tree]) -> int:
    """Lines with a token other than comments and docstrings."""
    count = 0
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for _, text, tree in trees:
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in empty and token.type != tokenize.ENDMARKER:
                lines.update(range(token.start[0], token.end[0] + 1))
        count += len(lines - docstring_lines(tree))
    return count


def functions_of(trees: list[Tree]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods, inner ones included."""
    for _, _, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def loose_modules(code: Checkout) -> str:
    """Modules that lie in the package's top folder."""
    top = code.root / "beam_inference"
    return f"{sum(path.parent == top for path, _, _ in code.package)} of {len(code.package)}"


def packed_assignments(code: Checkout) -> str:
    """`a, b = x, y` per 1000 code lines; swaps, whose values name a target, are not counted."""
    count = 0
    for _, _, tree in code.package:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
                continue
            for target in node.targets:
                if isinstance(target, ast.Tuple):
                    targets = {ast.unparse(each) for each in target.elts}
                    values = {
                        ast.unparse(each)
                        for each in ast.walk(node.value)
                        if isinstance(each, ast.expr)
                    }
                    count += not targets & values
    return f"{1000 * count / count_code_lines(code.package):.1f} ({count})"


def uses_of_any(code: Checkout) -> str:
    """The type `Any` per 1000 code lines; imports of it are not counted."""
    count = sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for _, _, tree in code.package
        for node in ast.walk(tree)
    )
    return f"{1000 * count / count_code_lines(code.package):.1f} ({count})"


def long_lines(code: Checkout) -> str:
    """Lines of the package over 100 columns."""
    lines = [line for _, text, _ in code.package for line in text.splitlines()]
    count = sum(len(line) > LONGEST_LINE for line in lines)
    return f"{count / len(lines):.1%} ({count})"


def is_participle(word: str) -> bool:
    """Whether a word of a name is a past participle."""
    if word in NO_PARTICIPLES:
        return False
    return word in IRREGULAR_PARTICIPLES or (word.endswith("ed") and len(word) > 3)


def is_named_by_participle(name: str) -> bool:
    """Whether a name begins or ends with a participle, and is no predicate such as `is_found`."""
    words = [word for word in name.strip("_").split("_") if word]
    if not words or words[0] in QUESTIONS or (name.startswith("__") and name.endswith("__")):
        return False
    first = is_participle(words[0]) and words[0] not in IRREGULAR_VERBS
    return first or (len(words) > 1 and is_participle(words[-1]))


def participles(code: Checkout) -> str:
    """Functions named by a participle."""
    functions = list(functions_of(code.package))
    count = sum(is_named_by_participle(each.name) for each in functions)
    return f"{count / len(functions):.1%} ({count} of {len(functions)})"


def fragments(code: Checkout) -> str:
    """Docstrings that begin with Of, Those, The same or By: no sentences of their own."""
    count = 0
    for _, _, tree in code.package:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef | ast.Module):
                count += (ast.get_docstring(node) or "").startswith(FRAGMENTS)
    return str(count)


def private_names(trees: list[Tree]) -> set[str]:
    """Names with one leading underscore that some modules define or assign."""
    names: set[str] = set()
    for _, _, tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - {"_"}


def count_uses(node: ast.AST, names: set[str]) -> int:
    """How many times a node itself uses one of some names as a member of a module or object."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return 0
        case ast.Attribute(attr=name):
            return int(name in names)
        case ast.ImportFrom(module=str(module), names=aliases):
            is_ours = module.startswith("beam_inference")
            return sum(alias.name in names for alias in aliases) if is_ours else 0
        case ast.Constant(value=str(text)):
            name = text.rsplit(".", 1)[-1] if text.startswith("beam_inference.") else text
            return int(name in names)
    return 0


def private_members_in_tests(code: Checkout) -> str:
    """Uses in tests of names with a leading underscore that a module of the package defines.

    Counted are attributes of anything but ``self`` and ``cls``, imports, and names within dotted
    strings.
    """
    names = private_names(code.package)
    return str(sum(count_uses(node, names) for _, _, tree in code.tests for node in ast.walk(tree)))


def dotted_patches(code: Checkout) -> str:
    """Calls of `monkeypatch.setattr` in tests whose target is a dotted string."""
    count = 0
    for _, _, tree in code.tests:
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("monkeypatch.setattr")
                and node.args
            ):
                first = node.args[0]
                count += isinstance(first, ast.Constant) and isinstance(first.value, str)
    return str(count)


def documented_functions(code: Checkout) -> str:
    """Functions with a docstring."""
    functions = list(functions_of(code.package))
    return f"{sum(ast.get_docstring(each) is not None for each in functions) / len(functions):.0%}"


def assertions_in_tests(code: Checkout) -> str:
    """`assert` statements, `pytest.raises` and `assert_*` calls in tests."""
    count = 0
    for _, _, tree in code.tests:
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                count += 1
            elif isinstance(node, ast.Call):
                name = ast.unparse(node.func).rsplit(".", 1)[-1]
                count += name == "raises" or name.startswith("assert_")
    return str(count)


def test_functions(code: Checkout) -> str:
    """Functions of tests, before they are parametrised."""
    return str(sum(each.name.startswith("test_") for each in functions_of(code.tests)))


FIGURES: dict[str, Callable[[Checkout], str]] = {
    "modules in the top folder": loose_modules,
    "`a, b = x, y` per 1000 code lines": packed_assignments,
    "`Any` per 1000 code lines": uses_of_any,
    "lines over 100 columns": long_lines,
    "functions named by a participle": participles,
    "docstrings beginning with Of/Those/The same/By": fragments,
    "functions with a docstring": documented_functions,
    "private members of the package used in tests": private_members_in_tests,
    "patches by dotted string in tests": dotted_patches,
    "test functions": test_functions,
    "assertions in tests": assertions_in_tests,
}


def main() -> None:
    """Print the figures of some checkouts as a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT")
    roots = parser.parse_args().checkouts or [Path(__file__).resolve().parents[1]]
    for root in roots:
        if not (root / "beam_inference").is_dir():
            parser.error(f"{root} has no folder beam_inference: name a checkout of this project")
    checkouts = [
        Checkout(root, trees_under(root / "beam_inference"), trees_under(root / "tests"))
        for root in roots
    ]
    print("| figure |", " | ".join(str(root) for root in roots), "|")
    print("|---|" + "---|" * len(roots))
    print(
        "| code lines |",
        " | ".join(str(count_code_lines(code.package)) for code in checkouts),
        "|",
    )
    for name, figure in FIGURES.items():
        print(f"| {name} |", " | ".join(figure(code) for code in checkouts), "|")


if __name__ == "__main__":
    main()
