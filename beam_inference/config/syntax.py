"""Python's source as a tree, whatever other threads do meanwhile.

CPython 3.11 counts how deep a tree is for all threads together. Where one parses as another does,
as finalizers of garbage may let it, one of them ends with a SystemError: it is parsed again.
"""

from __future__ import annotations

import ast

from tenacity import retry, retry_if_exception_type, stop_after_attempt

_again = retry(retry=retry_if_exception_type(SystemError), stop=stop_after_attempt(5), reraise=True)


@_again
def parse_python(source: str | bytes) -> ast.Module:
    """Parse Python's source.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as :func:`ast.parse` does.
    """
    return ast.parse(source)


@_again
def parse_expression(text: str) -> ast.expr:
    """Parse an expression of Python.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as :func:`ast.parse` does.
    """
    return ast.parse(text, mode="eval").body
