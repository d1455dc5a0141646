"""Time that passes as a test says."""

from __future__ import annotations


class Clock:
    """Seconds, as :func:`time.monotonic` would give them."""

    now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now
