"""The batch that fits: how many samples a step can take in the memory of its device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

import torch

from beam_inference.arrays import give_back
from beam_inference.environment import available_memory, peak_memory, start_peak_memory
from beam_inference.errors import ConfigError, DeviceOutOfMemory
from beam_inference.training.config import TrainingConfig
from beam_inference.training.trainer import Trial, try_steps

_SHARE = 0.8
"""Share of a machine's memory that is available which a step may take."""
_MOST = 2**12
_CLEAR_GROWTH = 2**26
"""Bytes, more than what an allocator keeps or gives back, by which one step exceeds another."""
_CLEAR_SHARE = 0.4
"""Share of a step's memory by which it must exceed that of half as many samples."""


@dataclass(frozen=True, slots=True)
class BatchFit:
    """The largest power of two of samples that fit into a step of one rank.

    Attributes:
        samples: their number; 0 if not even one fits.
        step_bytes: memory of such a step beside what the process had before; measured on a GPU,
            on a CPU projected from small batches.
        available_bytes: memory that it may take.
    """

    samples: int
    step_bytes: int
    available_bytes: int


def fit_batch(config: TrainingConfig, available_bytes: int | None = None) -> BatchFit:
    """Find the largest power of two of samples that fit, by steps of random voxels.

    On a GPU, steps grow until one does not fit. On a CPU, they grow until memory clearly grows with
    them, and the rest is projected: each sample takes the same.

    Args:
        config: the training; its batch size does not matter.
        available_bytes: memory that a step on a CPU may take; None for most of what is there.

    Raises:
        UserError: a volume, the network or a key is wrong; or memory cannot be measured here.
    """
    with try_steps(config) as trial:
        if trial.device.type == "cuda":
            return _fit_on_gpu(trial)
        available = available_memory()
        if available_bytes is None and available is not None:
            available_bytes = int(_SHARE * available)
        if available_bytes is None:
            raise ConfigError("--fit-batch measures memory on Linux only: this is another system")
        return _fit_on_cpu(trial, available_bytes)


def _fit_on_gpu(trial: Trial) -> BatchFit:
    free, _ = torch.cuda.mem_get_info(trial.device)
    best = BatchFit(0, 0, free)
    for samples in _powers_of_two():
        torch.cuda.reset_peak_memory_stats(trial.device)
        try:
            trial.take_step(samples)
        except (DeviceOutOfMemory, torch.OutOfMemoryError):
            break
        best = BatchFit(samples, torch.cuda.max_memory_allocated(trial.device), free)
    return best


def _fit_on_cpu(trial: Trial, available_bytes: int) -> BatchFit:
    give_back()
    before = held_memory()
    trial.take_step(1)  # the optimiser keeps moments of all weights from now on
    measured = 1
    peak = measure_peak(trial, 1) - before
    each = float(peak)
    while peak <= available_bytes and measured < _MOST:
        lower = peak
        measured *= 2
        peak = measure_peak(trial, measured) - before
        each = (peak - lower) / (measured / 2)
        if peak - lower >= max(_CLEAR_GROWTH, _CLEAR_SHARE * peak):
            break

    def project(samples: int) -> int:
        return peak + round(each * (samples - measured))

    fitting = list(takewhile(lambda n: project(n) <= available_bytes, _powers_of_two()))
    samples = fitting[-1] if fitting else 0
    return BatchFit(samples, project(samples) if samples else 0, available_bytes)


def _powers_of_two() -> Iterator[int]:
    samples = 1
    while samples <= _MOST:
        yield samples
        samples *= 2


def measure_peak(trial: Trial, samples: int) -> int:
    """The most bytes that this process holds during a step. Raises as :func:`held_memory`."""
    give_back()  # what steps before have left would hide what this one takes
    held_memory()
    trial.take_step(samples)
    return peak_memory()


def held_memory() -> int:
    """Bytes that this process holds; their peak is counted from now on.

    Raises:
        ConfigError: the system does not count it.
    """
    held = start_peak_memory()
    if held is None:
        raise ConfigError(
            "--fit-batch measures memory by /proc/self/clear_refs, which cannot be written here: "
            "this is another system than Linux, or a sandbox. Write batch_size"
        )
    return held
