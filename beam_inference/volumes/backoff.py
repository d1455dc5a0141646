"""Repeating what failed in a way that may pass: exponential backoff with jitter."""

from __future__ import annotations

from collections.abc import Callable

import tenacity


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
        longest_wait: seconds between two calls, at most.
        before_wait: called after each attempt that is followed by another.
    """
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_exponential_jitter(initial=0.1, max=longest_wait, jitter=0.2),
        retry=tenacity.retry_if_exception(is_transient),
        before_sleep=before_wait,
        reraise=True,
    )
