"""The result of computing some chunks of a job again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Some chunks of a job, computed again and compared with the output.

    Attributes:
        share: the share of the chunks that was asked for.
        seed: seed of the draw; the same seed draws the same chunks.
        chunks: numbers of the chunks that were drawn, of those that are done.
        different: chunks whose bits are not the output's, or that cannot be computed again, one
            line each.
        undecided: chunks that differ by as little as rounding does, and were made with smaller
            batches on a device that was out of memory, or by one of several engines; one line each.
    """

    share: float
    seed: int
    chunks: Sequence[int]
    different: Sequence[str]
    undecided: Sequence[str]
