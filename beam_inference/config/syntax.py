"""Python's source as a tree, whatever other threads do meanwhile."""

from __future__ import annotations

import ast

_ATTEMPTS = 5


def parse_python(source: str | bytes) -> ast.Module:
    """Parse Python's source.

    CPython 3.11 counts how deep a tree is for all threads together. Where one parses as another
    does, as finalizers of garbage may let it, one of them ends with a SystemError: it is parsed
    again.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as :func:`ast.parse` does.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
