"""Measures how fast a network is, and how many patches a call should have."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from beam_inference.arrays import AnyArray
from beam_inference.engines.predictor import Predictor

logger = logging.getLogger(__name__)

LARGEST_BATCH = 32
WORTH_IT = 0.95
"""A doubled batch is worth its memory if a patch takes at most this share of the time."""


def fastest_batch_size(
    predictor: Predictor,
    patch: AnyArray,
    normalize: Callable[[Any], Any],
    fits: Callable[[int], bool],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Find the batch size, of 1, 2, 4 …, beyond which a patch takes hardly less time.

    A size that the device has too little memory for, or that the network refuses, ends the search.

    Args:
        predictor: the network on its device.
        patch: (channels, Z, Y, X), stored values, the crop margin included.
        normalize: maps a float32 batch of stored values to the network's input.
        fits: whether a batch size fits the memory; what does not is not tried.
        clock: counts seconds.
    """
    best = 1
    best_seconds = seconds_per_patch(predictor, patch, normalize, 1, clock)
    while 2 * best <= LARGEST_BATCH and fits(2 * best):
        try:
            seconds = seconds_per_patch(predictor, patch, normalize, 2 * best, clock)
        except Exception as error:  # of the device, or of the network's own code
            logger.info("inference.batch_size: auto does not go beyond %d: %s", best, error)
            break
        if seconds > WORTH_IT * best_seconds:
            break
        best = 2 * best
        best_seconds = seconds
    logger.info("inference.batch_size: auto is %d here: %.3g s a patch", best, best_seconds)
    return best


def seconds_per_patch(
    predictor: Predictor,
    patch: AnyArray,
    normalize: Callable[[Any], Any],
    size: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Measure the seconds for one patch in batches of some size.

    It is the shortest of three calls, after a first one in which engines convert and choose.
    """
    with predictor.device.session():
        batch = predictor.device.empty((size, *patch.shape))
        batch[:] = predictor.device.upload(patch)
        batch = normalize(batch)
        times = []
        for _ in range(4):
            start = clock()
            answer = predictor.device.copy(predictor.predict(batch)[:1, :1, :1, :1, :1])
            predictor.device.download(answer)()  # a GPU is done only when its answer is here
            times.append(clock() - start)
    return min(times[1:]) / size
