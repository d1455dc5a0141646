"""The types of errors, and the exit codes.

The type of an error decides what happens: a :class:`UserError` stops the launch before the first
chunk (exit code 2), a :class:`ChunkFault` quarantines one chunk and the job goes on, a
:class:`WorkerFault` is raised to the runner, which retries the work elsewhere. Messages say what
was expected, what was found, where, and what to do.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from beam_inference.foreign_text import clean_text, shorten_message

Stage: TypeAlias = Literal["read", "infer", "postprocess", "merge", "seams", "write"]
"""What a worker does to a chunk, in order; "seams" stands for what other chunks owe it."""

COMPLETE = 0
FAILED = 1
BAD_INPUT = 2
COMPLETE_BUT_QUARANTINED = 3
TRY_AGAIN = 75
INTERRUPTED = 130
"""Exit codes of the command line."""


class AskedToStop(KeyboardInterrupt):
    """A scheduler or a service asks this process to end, by SIGTERM or SIGUSR1."""


class BeamInferenceError(Exception):
    """Base of all errors raised on purpose by this package.

    Messages name paths, values and other errors, which may hold anything, of any length. They are
    made clean and short enough to read here, once for all places that a message goes to.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten_message(clean_text(message)))


class UserError(BeamInferenceError):
    """Something that the user can mend: reported as one message, exit code 2."""


class ConfigError(UserError):
    """The job file, an override or a flag is wrong."""


class AlignmentError(UserError):
    """Chunks, ROI and storage blocks do not fit each other."""


class VolumeError(UserError):
    """A volume is absent, unreadable, or not what the job says it is."""


class ModelContractError(UserError):
    """The network cannot be loaded or does not answer as the job says it does."""


class PickledCode(ModelContractError):
    """A file of weights holds more than tensors, and loading it could run any code."""


class EngineError(ModelContractError):
    """An engine or a precision cannot run the network, or its values differ from PyTorch's."""


class StateError(UserError):
    """The state folder belongs to another job, or is damaged."""


class RunnerError(BeamInferenceError):
    """A runner has ended a pipeline without what it was started for."""


class ChunkFault(BeamInferenceError):
    """A chunk cannot be done, by a fault of its own such as a NaN: it is quarantined.

    Attributes:
        stage: what failed.
        attempts: how often it was tried.
    """

    def __init__(self, message: str, stage: Stage, attempts: int) -> None:
        super().__init__(message)
        self.stage = stage
        self.attempts = attempts


class WorkerFault(BeamInferenceError):
    """This process cannot go on, and the runner must retry elsewhere.

    Examples are a lost device and a destination that cannot be written.
    """


class TransientReadError(BeamInferenceError):
    """A read failed in a way that may pass: worth another attempt."""


class PermanentReadError(BeamInferenceError):
    """A read failed in a way that will not pass, such as a corrupt block."""


class StalledReadError(PermanentReadError):
    """A read took longer than it may; its thread may hang for ever."""


class NonFiniteError(BeamInferenceError):
    """The network's result has NaN or infinite voxels."""


class DeviceOutOfMemory(BeamInferenceError):
    """The device has too little memory for what was asked of it."""
