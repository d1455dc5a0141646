"""Source is parsed whatever other threads do."""

import ast

import pytest

from beam_inference.config.syntax import parse_expression, parse_python


def test_a_tree_that_another_thread_has_disturbed_is_made_again(monkeypatch):
    parse = ast.parse
    failures = []

    def disturbed(source, **keys):
        if failures:
            raise failures.pop()
        return parse(source, **keys)

    monkeypatch.setattr(ast, "parse", disturbed)
    failures += [SystemError("AST constructor recursion depth mismatch")] * 3
    assert isinstance(parse_python(b"import a").body[0], ast.Import)
    failures += [SystemError("AST constructor recursion depth mismatch")] * 3
    assert isinstance(parse_expression("a + 1"), ast.BinOp)
    with pytest.raises(SyntaxError):
        parse_python("import")


def test_an_error_that_stays_is_raised(monkeypatch):
    def fails(_):
        raise SystemError("of another kind")

    monkeypatch.setattr(ast, "parse", fails)
    with pytest.raises(SystemError, match="of another kind"):
        parse_python("a = 1")
