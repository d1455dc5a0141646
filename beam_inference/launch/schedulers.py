"""The shard that a scheduler means by the variables that it sets for a task of an array."""

from __future__ import annotations

from collections.abc import Mapping

from beam_inference.errors import ConfigError
from beam_inference.job.shards import Shard

_SLURM = "SLURM_ARRAY_TASK_ID"
_AWS = "AWS_BATCH_JOB_ARRAY_INDEX"
_GOOGLE = "BATCH_TASK_INDEX"
_KUBERNETES = "JOB_COMPLETION_INDEX"
_NAMES = (_SLURM, _AWS, _GOOGLE, _KUBERNETES)


def shard_of_scheduler(environment: Mapping[str, str]) -> Shard:
    """Return the shard that ``--shard auto`` stands for: of Slurm, AWS Batch or Google Batch.

    Args:
        environment: the variables of the process.

    Raises:
        ConfigError: no scheduler has set its variables, or several have, or they do not tell.
    """
    found = [name for name in _NAMES if environment.get(name)]
    if not found:
        raise ConfigError(
            f"--shard auto: none of {', '.join(_NAMES)} is set, so this is no task of an array "
            "that is known. Write the shard: --shard I/N, with I from 0 to N - 1."
        )
    if len(found) > 1:
        raise ConfigError(
            f"--shard auto: {' and '.join(found)} are both set. Write the shard: --shard I/N, with "
            "I from 0 to N - 1."
        )
    if found == [_KUBERNETES]:
        raise ConfigError(
            f"--shard auto: Kubernetes tells a pod its index ({_KUBERNETES}), and not how many "
            f"there are. Write --shard=$({_KUBERNETES})/N in the pod's args, N being completions."
        )
    if found == [_SLURM]:
        return _shard_of_slurm(environment)
    size = "AWS_BATCH_JOB_ARRAY_SIZE" if found == [_AWS] else "BATCH_TASK_COUNT"
    return _checked(
        _number(environment, found[0]), _number(environment, size), f"{found[0]} and {size}"
    )


def _shard_of_slurm(environment: Mapping[str, str]) -> Shard:
    """The shard of a task of a Slurm array, whose numbers may begin anywhere, and have a step."""
    number = _number(environment, _SLURM)
    first = _number(environment, "SLURM_ARRAY_TASK_MIN")
    last = _number(environment, "SLURM_ARRAY_TASK_MAX")
    step = _number(environment, "SLURM_ARRAY_TASK_STEP")
    count = _number(environment, "SLURM_ARRAY_TASK_COUNT")
    if step < 1 or last - first != (count - 1) * step or (number - first) % step:
        raise ConfigError(
            f"--shard auto: the {count} tasks of the array, from {first} to {last}, do not lie "
            f"{step} apart, so that their numbers do not tell which shards they are. Submit "
            "--array=0-N, or write the shard: --shard I/N."
        )
    return _checked((number - first) // step, count, _SLURM)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(
            f"--shard auto: {name} is {text!r}, and a number is needed. Write the shard: --shard "
            "I/N, with I from 0 to N - 1."
        )
    return int(text)


def _checked(index: int, count: int, names: str) -> Shard:
    if not 0 <= index < count:
        raise ConfigError(
            f"--shard auto: {names} say shard {index} of {count}, which there is not. Write the "
            "shard: --shard I/N, with I from 0 to N - 1."
        )
    return Shard(index, count)
