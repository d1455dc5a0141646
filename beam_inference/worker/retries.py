"""Trying again what may pass, inside a worker, and what becomes of what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tenacity

from beam_inference.errors import (
    BeamInferenceError,
    ChunkFault,
    DeviceOutOfMemory,
    StateError,
    WorkerFault,
)

Value = TypeVar("Value")


def attempt(
    action: Callable[[], Value],
    attempts: int,
    stage: str,
    is_transient: Callable[[BaseException], bool],
    tell: Callable[[int, str], None],
) -> tuple[Value, int]:
    """The action's value, and the number of attempts; transient trouble is tried again, with backoff and jitter.

    ``tell`` is told the number and the cause of each attempt that is followed by another.

    Raises:
        ChunkFault: of ``stage``: it failed for good.
        WorkerFault, DeviceOutOfMemory, StateError: as the action raises them; not the chunk's
            fault.
    """
    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_exponential_jitter(initial=0.1, max=20, jitter=0.2),
        retry=tenacity.retry_if_exception(is_transient),
        before_sleep=lambda state: tell(
            state.attempt_number, _first_line(state.outcome.exception() if state.outcome else None)
        ),
        reraise=True,
    )
    try:
        value = retrying(action)
    except (WorkerFault, DeviceOutOfMemory, StateError):
        raise
    except MemoryError as error:
        raise WorkerFault(
            f"this process is out of memory: {error}. Make inference.chunk_shape smaller, or run "
            "fewer processes."
        ) from error
    except Exception as error:
        expected = isinstance(error, BeamInferenceError)
        cause = str(error) if expected else f"{type(error).__name__}: {_first_line(error)}"
        raise ChunkFault(cause, stage, int(retrying.statistics["attempt_number"])) from error
    return value, int(retrying.statistics["attempt_number"])


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]
