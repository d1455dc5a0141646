"""How nnU-Net and MONAI slide a window over an image, by their formulas, summed in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Array = NDArray[np.floating]
Network = Callable[[NDArray[np.float32]], NDArray[np.float32]]
Shape = tuple[int, int, int]


def slide_as_nnunet(image: NDArray[np.float32], patch: Shape, network: Network) -> Array:
    """What nnU-Net 2.8.1 would predict with steps of half a patch, were its arrays in float64.

    Not even its weights are then in half precision.
    """
    missing = [max(0, p - n) for p, n in zip(patch, image.shape, strict=True)]
    padded = np.pad(image, [(each // 2, each // 2 + each % 2) for each in missing])
    starts = []
    for n, p in zip(padded.shape, patch, strict=True):
        count = int(np.ceil((n - p) / (p * 0.5))) + 1
        step = (n - p) / (count - 1) if count > 1 else 0
        starts.append([int(np.round(step * i)) for i in range(count)])
    impulse = np.zeros(patch)
    impulse[tuple(p // 2 for p in patch)] = 1
    weights = ndimage.gaussian_filter(impulse, [p / 8 for p in patch], mode="constant")
    weights[weights == 0] = weights[weights > 0].min()
    return _slide(padded, starts, weights, network)[_inside(missing, image.shape)]


def slide_as_monai(
    image: NDArray[np.float32],
    patch: Shape,
    overlap: float,
    mode: str,
    padding: Literal["constant", "edge", "reflect", "symmetric"],
    network: Network,
) -> Array:
    """What MONAI 1.6.1's SlidingWindowInferer would predict, were its sums in float64.

    Args:
        image: shape (Z, Y, X).
        patch: its ``roi_size``.
        overlap: as a share of the patch.
        mode: "gaussian" or "constant".
        padding: how images smaller than the patch are padded, in NumPy's words.
        network: maps a batch (1, 1, Z, Y, X) to predictions.
    """
    missing = [max(0, p - n) for p, n in zip(patch, image.shape, strict=True)]
    padded = np.pad(image, [(each // 2, each - each // 2) for each in missing], mode=padding)
    starts = []
    for n, p in zip(padded.shape, patch, strict=True):
        interval = p if n == p else max(1, int(p * (1 - overlap)))
        count = next(i for i in range(n) if i * interval + p >= n) + 1
        starts.append([min(i * interval, n - p) for i in range(count)])
    weights = np.ones(patch)
    if mode == "gaussian":
        z, y, x = (
            np.exp(-((np.arange(p) - (p - 1) / 2) ** 2) / (2 * (0.125 * p) ** 2)) for p in patch
        )
        weights = z[:, None, None] * y[:, None] * x
        weights = np.maximum(weights, max(weights.min(), 1e-3))
    return _slide(padded, starts, weights, network)[_inside(missing, image.shape)]


def _slide(
    image: NDArray[np.float32], starts: Iterable[list[int]], weights: Array, network: Network
) -> Array:
    sums: list[Array] = []
    total = np.zeros(image.shape)
    for start in product(*starts):
        where = tuple(slice(a, a + p) for a, p in zip(start, weights.shape, strict=True))
        prediction = network(image[where][None, None])[0].astype(np.float64)
        sums = sums or [np.zeros(image.shape) for _ in prediction]
        for each, channel in zip(sums, prediction, strict=True):
            each[where] += channel * weights
        total[where] += weights
    return np.stack(sums) / total


def _inside(missing: list[int], shape: tuple[int, ...]) -> tuple[slice, ...]:
    z, y, x = (slice(each // 2, each // 2 + n) for each, n in zip(missing, shape, strict=True))
    return (slice(None), z, y, x)
