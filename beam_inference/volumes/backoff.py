"""Repeating what failed in a way that may pass: exponential backoff with jitter."""

from __future__ import annotations

from collections.abc import Callable

import tenacity

_JITTER = 0.2
"""Seconds, at most, so that processes that failed together do not call together."""


def retry_with_backoff(
    is_transient: Callable[[BaseException], bool],
    *,
    attempts: int,
    longest_wait: float = 20,
    before_wait: Callable[[tenacity.RetryCallState], None] | None = None,
) -> tenacity.Retrying:
    """A caller of functions: ``retry_with_backoff(…)(function)`` returns the function's result.

    Args:
        is_transient: whether an error may pass; any other is raised at once.
        attempts: how often a function is called at most; then its last error is raised.
        longest_wait: seconds between two calls, at most, but for the jitter.
        before_wait: called after each attempt that is followed by another.
    """
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_exponential(0.1, longest_wait) + tenacity.wait_random(0, _JITTER),
        retry=tenacity.retry_if_exception(is_transient),
        before_sleep=before_wait,
        reraise=True,
    )
