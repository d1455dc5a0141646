"""Scores of a map of probabilities, from histograms of its values: pure functions.

Integers have a bin for each value, and their scores are exact. Floats have :data:`FLOAT_BINS` bins
of equal width over a range; what lies beyond is in the first or last bin. Voxels in one bin count
as equal, and the bounds say by how much that can matter at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma

from beam_inference.arrays import AnyArray, AnyDtype

FLOAT_BINS = 65_536
"""Bins of values that are floats."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A score, and the least and the greatest that it could be if no values were put into bins.

    ``value`` is None where a score has no meaning: no voxel is positive, or none is negative.
    """

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class ThresholdScore:
    """What a map is worth once it is cut at a threshold.

    Attributes:
        threshold: voxels of this value or more are positive.
        dice: the coefficient; None where nothing is positive in either volume.
        precision: None where nothing is found; recall: None where nothing is to be found.
        true_positives, false_positives, false_negatives: in voxels.
    """

    threshold: float
    dice: float | None
    precision: float | None
    recall: float | None
    true_positives: int
    false_positives: int
    false_negatives: int


@dataclass(frozen=True, slots=True)
class MapScores:
    """Agreement of a map with labels.

    Attributes:
        positives, negatives: voxels that are judged.
        average_precision: mean precision over the recall, as scikit-learn computes it.
        roc_auc: area under the receiver operating characteristic.
        roc: some points of that curve: shares of false positives and of true positives.
        thresholds: scores at the thresholds that were asked for, exact.
        best: the score with the greatest Dice coefficient at the lower edge of any bin.
    """

    positives: int
    negatives: int
    average_precision: Bounded
    roc_auc: Bounded
    roc: Sequence[tuple[float, float]]
    thresholds: Sequence[ThresholdScore]
    best: ThresholdScore


@dataclass(frozen=True, slots=True)
class Bins:
    """How values of a dtype are put into bins.

    Attributes:
        dtype: name of the dtype: uint8, uint16 or a float.
        low, high: the range of floats.
    """

    dtype: str
    low: float
    high: float

    @property
    def is_exact(self) -> bool:
        """Whether every value has a bin of its own."""
        return np.dtype(self.dtype).kind == "u"

    @property
    def count(self) -> int:
        """The number of bins."""
        dtype: AnyDtype = np.dtype(self.dtype)
        return 2 ** (8 * dtype.itemsize) if self.is_exact else FLOAT_BINS

    def find(self, values: AnyArray) -> AnyArray:
        """The bin of each value."""
        if self.is_exact:
            return values
        places = (values.astype(np.float64) - self.low) * (self.count / (self.high - self.low))
        return np.clip(np.floor(places), 0, self.count - 1).astype(np.int64)

    def edges(self) -> NDArray[np.float64]:
        """The lower edge of each bin."""
        places = np.arange(self.count, dtype=np.float64)
        if self.is_exact:
            return places
        return self.low + places * ((self.high - self.low) / self.count)


def count_values(
    values: AnyArray, is_positive: AnyArray, is_judged: AnyArray, bins: Bins
) -> Counts:
    """Count the values of negative and positive voxels.

    Args:
        values: the map's, (z, y, x).
        is_positive: whether a voxel is to be found.
        is_judged: whether a voxel is judged.
        bins: how values are put into bins.

    Returns:
        (2, bins): of negative and of positive voxels.

    Raises:
        ValueError: a value that is judged is no number.
    """
    judged = values[is_judged]
    if judged.dtype.kind == "f" and np.isnan(judged).any():
        raise ValueError("the map has values that are no numbers (NaN), which have no rank")
    places = bins.find(judged).astype(np.int64)
    places += np.where(is_positive[is_judged], bins.count, 0)
    return np.bincount(places, minlength=2 * bins.count).reshape(2, bins.count)


def count_at(
    values: AnyArray, is_positive: AnyArray, is_judged: AnyArray, thresholds: Sequence[float]
) -> Counts:
    """Count true positives, false positives and false negatives: (thresholds, 3)."""
    counts = np.zeros((len(thresholds), 3), np.int64)
    for row, threshold in zip(counts, thresholds, strict=True):
        is_found = values >= threshold
        row[0] = np.count_nonzero(is_found & is_positive & is_judged)
        row[1] = np.count_nonzero(is_found & ~is_positive & is_judged)
        row[2] = np.count_nonzero(~is_found & is_positive & is_judged)
    return counts


def score_map(histograms: Counts, at: Counts, thresholds: Sequence[float], bins: Bins) -> MapScores:
    """Score a map.

    Args:
        histograms: of the whole volume, of :func:`count_values`.
        at: of the whole volume, of :func:`count_at`.
        thresholds: those of ``at``.
        bins: those of ``histograms``.
    """
    negative, positive = (side[::-1].astype(np.float64) for side in histograms)
    found = np.cumsum(positive)
    false = np.cumsum(negative)
    return MapScores(
        positives=int(found[-1]),
        negatives=int(false[-1]),
        average_precision=_average_precision(positive, negative, exact=bins.is_exact),
        roc_auc=_area(positive, negative, exact=bins.is_exact),
        roc=_curve(found, false),
        thresholds=[_at(t, *map(int, row)) for t, row in zip(thresholds, at, strict=True)],
        best=_best(found, false, bins),
    )


def _average_precision(
    positive: NDArray[np.float64], negative: NDArray[np.float64], *, exact: bool
) -> Bounded:
    """From the number of positives and negatives in each bin, the greatest values first."""
    found = np.cumsum(positive)
    false = np.cumsum(negative)
    total = found[-1]
    if not total:
        return Bounded(None, None, None)
    some = positive > 0
    p = positive[some]
    after = found[some]
    beyond = false[some]
    before = beyond - negative[some]
    value = math.fsum(p * after / (after + beyond)) / total
    if exact:
        return Bounded(value, value, value)
    # The k-th positive of a bin has a precision of at least k of the bin's and of those before it,
    # among these and all negatives of the bin; and of at most all of them, among no negative of it.
    sums = digamma(after + beyond + 1) - digamma(after - p + beyond + 1)
    low = math.fsum(p - beyond * sums) / total
    high = math.fsum(p * after / (after + before)) / total
    return Bounded(value, max(0.0, min(low, value)), max(high, value))


def _area(positive: NDArray[np.float64], negative: NDArray[np.float64], *, exact: bool) -> Bounded:
    pairs = positive.sum() * negative.sum()
    if not pairs:
        return Bounded(None, None, None)
    before = np.cumsum(positive) - positive
    value = math.fsum(negative * (before + positive / 2)) / pairs
    # Pairs of one bin count half; in truth each counts from nothing to one.
    half = 0.0 if exact else math.fsum(negative * positive) / 2 / pairs
    return Bounded(value, max(0.0, value - half), min(1.0, value + half))


_POINTS = 200


def _curve(found: NDArray[np.float64], false: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Points of the curve, from (0, 0) to (1, 1); none where it has no meaning."""
    if not (found[-1] and false[-1]):
        return []
    x = np.concatenate([[0], false / false[-1]])
    y = np.concatenate([[0], found / found[-1]])
    # Points at equal distances along the curve: both shares grow.
    wanted = np.linspace(0, 2, _POINTS)
    places = np.unique(np.searchsorted(x + y, wanted).clip(max=len(x) - 1))
    return [(float(a), float(b)) for a, b in zip(x[places], y[places], strict=True)]


def _best(found: NDArray[np.float64], false: NDArray[np.float64], bins: Bins) -> ThresholdScore:
    dice = 2 * found / np.maximum(found + false + found[-1], 1)
    place = int(np.argmax(dice))
    threshold = float(bins.edges()[::-1][place])
    return _at(threshold, int(found[place]), int(false[place]), int(found[-1] - found[place]))


def _at(threshold: float, true: int, false: int, missed: int) -> ThresholdScore:
    return ThresholdScore(
        threshold=threshold,
        dice=_ratio(2 * true, 2 * true + false + missed),
        precision=_ratio(true, true + false),
        recall=_ratio(true, true + missed),
        true_positives=true,
        false_positives=false,
        false_negatives=missed,
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
