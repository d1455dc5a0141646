"""Chunks of stages that are done bear witness that what they wrote is there, and of this source.

Records say which chunks are done. Where blocks were removed since, or the source was changed, they
tell of another volume. So before a job of stages goes on, a few of its chunks are made again, in
memory, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from beam_inference.errors import BeamInferenceError, PermanentReadError, StateError
from beam_inference.foreign_text import describe_error
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER
from beam_inference.job.stage_job import ChunkStage, StageJob

Testimony = Callable[[int], bool]
"""Whether a chunk holds, where it was looked at, what the stage makes of its source."""


class WitnessStage(ChunkStage, Protocol):
    """A stage whose chunks can be made again for a comparison."""

    def hear_witnesses(self) -> Testimony:
        """Open source and target, and return the function that compares a part of a chunk."""


def check_witnesses(job: StageJob, stages: Sequence[WitnessStage], target: str) -> None:
    """Compare the first, a middle and the last of the chunks that are done of each stage.

    Args:
        job: the job; its records say what is done.
        stages: those of its stages that can be compared.
        target: what is made, for the message.

    Raises:
        StateError: the target does not hold what its source gives.
    """
    for stage in stages:
        witnesses = _find_witnesses(job, stage)
        if not witnesses:
            continue
        holds = stage.hear_witnesses()
        for index in witnesses:
            try:
                is_so = holds(index)
            except PermanentReadError as error:
                raise StateError(f"{_changed(target, stage, index)} ({error})") from None
            except BeamInferenceError:
                raise
            except Exception as error:  # of what files between stages hold, if others wrote them
                raise StateError(
                    f"{_changed(target, stage, index)} ({describe_error(error)})"
                ) from None
            if not is_so:
                raise StateError(_changed(target, stage, index))


def _find_witnesses(job: StageJob, stage: ChunkStage) -> list[int]:
    """Some chunks that are done, from both ends and the middle; three listings at most."""
    entries = job.done_entries(stage)
    last = (stage.count - 1) // CHUNKS_PER_FOLDER
    found: list[int] = []
    for folder in sorted({0, (last + 1) // 2, last}):
        start = folder * CHUNKS_PER_FOLDER
        done = entries.few_indices(start, min(stage.count, start + CHUNKS_PER_FOLDER))
        found += [done[0], done[len(done) // 2], done[-1]] if done else []
    return sorted({found[0], found[len(found) // 2], found[-1]}) if found else []


def _changed(target: str, stage: ChunkStage, index: int) -> str:
    return (
        f"{target}: chunk {index} of {stage.name} is recorded as done, but does not hold what its "
        "source gives: the source was changed, or what was written. Choose another target, or pass "
        "--overwrite to make everything again"
    )


def is_same(found: NDArray[Any], wanted: NDArray[Any]) -> bool:
    """Whether two arrays hold the same values; NaN is equal to NaN."""
    return bool(np.array_equal(found, wanted, equal_nan=wanted.dtype.kind in "fc"))
