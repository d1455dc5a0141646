"""Whether a device adds as exact sums need it, found out by trying."""

from __future__ import annotations

import numpy as np

from beam_inference.engines.protocol import Device
from beam_inference.errors import EngineError
from beam_inference.geometry.exact_sums import STEPS_PER_BOUND, step_of


def check_exact_sums(device: Device, name: str) -> None:
    """Refuse a device whose arithmetic is not that of IEEE 754 where sums depend on it.

    Terms are rounded to whole numbers, halves to even, and multiples of a step are added without
    rounding. A device may have other modes (of rounding, of fused or flushed numbers) in which the
    bits of a job depend on its chunks: then it is better told than believed.

    Args:
        device: to be tried.
        name: of the device, for the message.

    Raises:
        EngineError: it gives other bits than IEEE 754 does.
    """
    random = np.random.default_rng(0)
    halves = np.arange(-64, 64, dtype=np.float32) + np.float32(0.5)
    terms = random.uniform(-STEPS_PER_BOUND / 2, STEPS_PER_BOUND / 2, 4096).astype(np.float32)
    terms[: len(halves)] = halves
    for bound in (2.0**-20, 1.0, 2.0**20):
        step = np.float32(step_of(bound))
        first = np.rint(random.permutation(terms)) * step
        expected = first + np.rint(terms) * step
        with device.session():
            sums = device.empty(first.shape)
            sums[:] = device.upload(first)
            device.add_rounded(sums, device.upload(terms.copy()), float(step))
            result = device.download(sums)().copy()
        wrong = int(np.count_nonzero(result != expected))
        if wrong:
            raise EngineError(
                f"{name} does not round and add as IEEE 754 says: expected the exact sums of "
                f"{len(terms):,} multiples of {step:g}; {wrong:,} of them differ. The bits of a "
                "job would depend on how it is cut. Write device: cpu."
            )
