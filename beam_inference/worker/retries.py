"""Retries inside a worker of what may pass, and what becomes of what does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import tenacity

from beam_inference.errors import (
    BeamInferenceError,
    ChunkFault,
    DeviceOutOfMemory,
    Stage,
    StateError,
    WorkerFault,
)
from beam_inference.foreign_text import describe_error
from beam_inference.volumes.backoff import retry_with_backoff

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Success(Generic[Value]):
    """The value of an action that succeeded, and the number of attempts that this took."""

    value: Value
    attempts: int


def attempt(
    action: Callable[[], Value],
    attempts: int,
    stage: Stage,
    is_transient: Callable[[BaseException], bool],
    log: Callable[[int, str], None],
) -> Success[Value]:
    """Run an action; repeat it after transient errors, with backoff and jitter.

    Args:
        action: may be run several times.
        attempts: how often it is run at most.
        stage: what a fault is put down to.
        is_transient: whether an error may pass.
        log: called with the number and the cause of each attempt that is followed by another.

    Raises:
        ChunkFault: the action failed for good.
        WorkerFault, DeviceOutOfMemory, StateError: as raised by the action; they are not the
            chunk's fault.
    """
    retrying = retry_with_backoff(
        is_transient,
        attempts=attempts,
        before_wait=lambda state: log(state.attempt_number, _cause(state.outcome)),
    )
    try:
        value = retrying(action)
    except (WorkerFault, DeviceOutOfMemory, StateError, KeyboardInterrupt):
        raise
    except MemoryError as error:
        raise WorkerFault(
            f"this process is out of memory: {error}. Make inference.chunk_shape smaller, or run "
            "fewer processes."
        ) from error
    except BaseException as error:  # sys.exit() in a network or an operator ends its chunk only
        cause = str(error) if isinstance(error, BeamInferenceError) else describe_error(error)
        raise ChunkFault(cause, stage, _attempts(retrying)) from error
    return Success(value, _attempts(retrying))


def _attempts(retrying: tenacity.Retrying) -> int:
    return int(retrying.statistics["attempt_number"])


def _cause(outcome: tenacity.Future | None) -> str:
    error = outcome.exception() if outcome else None
    return "no result" if error is None else describe_error(error, with_type=False)
