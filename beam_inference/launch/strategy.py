"""The strategy of ``seams: exact``, where a job file leaves the choice: the one that costs less."""

from __future__ import annotations

from beam_inference.config.devices import DeviceKind
from beam_inference.geometry.plan import InferencePlan, Strategy
from beam_inference.geometry.seam_sums import seam_bytes

NOMINAL_VOXELS_PER_SECOND: dict[DeviceKind, float] = {
    "cpu": 1e6,
    "cuda": 3e7,
    "mps": 3e6,
    "xpu": 1e7,
}
"""Patch voxels per second of a U-Net, where the job's own network was not timed."""

SEAM_BYTES_PER_SECOND = 1e8
"""Rate at which a worker writes, and reads again, what chunks exchange."""

SECOND_STAGE_SECONDS = 2.0
"""What a second stage takes however little it has to do: it begins when the first has ended."""


def nominal_seconds(plan: InferencePlan, device: DeviceKind) -> float:
    """Guess the seconds that a network takes for a patch."""
    z, y, x = plan.lattice.patch_shape
    return z * y * x / NOMINAL_VOXELS_PER_SECOND[device]


def cheaper_strategy(
    exchange: InferencePlan, recompute: InferencePlan, channels: int, seconds_per_patch: float
) -> Strategy:
    """Choose the strategy that takes less time, all workers together.

    Args:
        exchange: the job's plan by this strategy.
        recompute: its plan by this one.
        channels: output channels of the network.
        seconds_per_patch: that the network takes.
    """
    saved = recompute.totals.patch_count - exchange.totals.patch_count
    moved = 2 * seam_bytes(exchange.totals, channels) / SEAM_BYTES_PER_SECOND
    is_cheaper = saved * seconds_per_patch > moved + SECOND_STAGE_SECONDS
    return "exchange" if is_cheaper else "recompute"
