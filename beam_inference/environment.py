"""Environment variables, for libraries that can be told a thing in no other way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """An environment variable has a value for a while, and then what it had before; one thread at a time."""
    with _lock:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
