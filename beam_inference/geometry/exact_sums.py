"""Sums that are the same in whatever order, and in whatever groups, their terms are added.

Float addition rounds, and so depends on the order of its terms. Here every term is rounded first,
to a multiple of one step of the job. Float32 holds all multiples up to 2^24 steps, so adding them
rounds nothing, as long as no sum goes beyond. The step is 2^-23 of the job's *prediction bound*, a
power of two. The weights of a voxel sum to one, so sums are no larger than the largest prediction,
which may be almost twice the bound: so much margin is left to what a trial has not seen.
"""

from __future__ import annotations

import math

STEPS_PER_BOUND = 2.0**23
"""Steps in the prediction bound: half of the whole numbers that float32 holds without a gap."""

LARGEST_BOUND = 2.0**60
"""Bounds lie between this and its inverse, far from where float32 overflows or loses digits."""

_EXACT_SHARE = 2 - 2.0**-9
"""Predictions up to this share of the bound have exact sums, also after rounding 16,000 terms."""


def step_of(bound: float) -> float:
    """Return the step to whose multiples weighted predictions are rounded.

    Args:
        bound: the prediction bound, a power of two.
    """
    return bound / STEPS_PER_BOUND


def bound_above(magnitude: float) -> float:
    """Return the least power of two that is no less than a magnitude.

    Raises:
        ValueError: it is not a positive number between the inverse of :data:`LARGEST_BOUND` and
            that.
    """
    if not 1 / LARGEST_BOUND <= magnitude <= LARGEST_BOUND:
        raise ValueError(
            f"expected a magnitude from {1 / LARGEST_BOUND:.3g} to {LARGEST_BOUND:.3g}; found "
            f"{magnitude:g}"
        )
    mantissa, exponent = math.frexp(magnitude)  # mantissa · 2^exponent, from 1/2 and below 1
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def bound_after_trial(largest: float) -> float:
    """Choose the prediction bound by the largest magnitude of a trial's predictions."""
    return bound_above(min(LARGEST_BOUND, max(1 / LARGEST_BOUND, largest)))


def largest_exact(bound: float) -> float:
    """Return the largest magnitude of predictions whose sums are surely exact.

    Args:
        bound: the prediction bound, a power of two.
    """
    return _EXACT_SHARE * bound


def largest_rounding(bound: float, terms: int) -> float:
    """Bound what the rounding of terms adds to a voxel's error.

    Args:
        bound: the prediction bound.
        terms: number of patches that cover the voxel.
    """
    return terms * step_of(bound) / 2
