"""JSON as it is read here: whatever cannot be parsed raises one class of error."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The values that a JSON text holds.

    Raises:
        ValueError: it is no JSON, or holds values inside values on more levels than Python parses.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
