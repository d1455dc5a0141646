"""What a chunk has cost so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from beam_inference.errors import Stage
from beam_inference.job.records import Receipt


@dataclass(frozen=True, slots=True)
class Effort:
    """The cost of a chunk, as its receipt tells it.

    Attributes:
        batch_size: patches per network call.
        uniform_patches: patches of one value throughout, whose prediction was known.
        patches_beyond_bound: patches whose predictions went beyond the prediction bound.
        seconds: time per stage.
        attempts: attempts per stage.
    """

    batch_size: int
    uniform_patches: int = 0
    patches_beyond_bound: int = 0
    seconds: Mapping[Stage, float] = field(default_factory=dict)
    attempts: Mapping[Stage, int] = field(default_factory=dict)

    @classmethod
    def of(cls, receipt: Receipt) -> Effort:
        """The effort that a receipt tells."""
        return cls(
            receipt.batch_size,
            receipt.uniform_patches,
            receipt.patches_beyond_bound,
            receipt.seconds,
            receipt.attempts,
        )

    def with_seconds(self, stage: Stage, seconds: float) -> Effort:
        """Return a copy with more time spent on a stage."""
        total = self.seconds.get(stage, 0.0) + seconds
        return replace(self, seconds={**self.seconds, stage: total})

    def with_attempts(self, stage: Stage, attempts: int) -> Effort:
        """Return a copy with the number of attempts that a stage took."""
        return replace(self, attempts={**self.attempts, stage: attempts})
