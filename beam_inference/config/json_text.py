"""JSON as it is read here: whatever cannot be parsed raises one class of error."""

from __future__ import annotations

import json
import re
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The values that a JSON text holds.

    Raises:
        ValueError: it is no JSON, or holds values inside values on more levels than Python parses,
            or halves of characters, which nobody can write or name a file by.
    """
    try:
        values = json.loads(text)
        if _HALVES.search(text if isinstance(text, bytes) else text.encode(errors="replace")):
            json.dumps(values, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("its JSON holds halves of characters (surrogates)") from None
    return values


_HALVES = re.compile(rb"\\u[dD][89a-fA-F]")
"""How JSON writes halves of characters; two of them together may be one character."""
