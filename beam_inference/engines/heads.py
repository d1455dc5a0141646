"""Networks that return several arrays: the ones that a job names, joined as channels.

The loop over patches, sums and receipts know one array. Each output of the job takes its channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from beam_inference.config.heads import Head
from beam_inference.errors import EngineError, ModelContractError

_MOST_NAMES = 20
"""Names of arrays that a message lists."""


def pick_heads(answer: Any, heads: Sequence[Head]) -> list[Any]:
    """Take the arrays that a job names out of what a network returned, and compare their shapes.

    Args:
        answer: a tuple, a list or a dict of arrays (N, C, …).
        heads: what the job says of them.

    Raises:
        ModelContractError: one is not there, or has other channels or another size than the job, or
            the first head, says.
    """
    picked = [_pick(answer, head) for head in heads]
    sizes = tuple(picked[0].shape[2:])
    for array, head in zip(picked, heads, strict=True):
        if array.ndim < 3 or array.shape[1] != head.channels:
            raise ModelContractError(
                f"the head {head.key} of the network has the shape {list(array.shape)} (batch, "
                f"channels, …); model.heads says that it has {head.channels} channels. Write the "
                "key of another head, or its number of channels."
            )
        if tuple(array.shape[2:]) != sizes:
            raise ModelContractError(
                f"the head {head.key} of the network has {list(array.shape[2:])} voxels, and the "
                f"head {heads[0].key} has {list(sizes)}: heads of several sizes cannot be written "
                "in one job. Name those of one size in model.heads, and run another job for others."
            )
    return picked


def _pick(answer: Any, head: Head) -> Any:
    key = head.key
    if isinstance(answer, Mapping):
        found = answer.get(key)
        known = "the names " + ", ".join(map(str, list(answer)[:_MOST_NAMES]))
    elif isinstance(answer, tuple | list):
        names = getattr(answer, "_fields", ())
        place: int | str = names.index(key) if key in names else key
        found = answer[place] if isinstance(place, int) and place < len(answer) else None
        known = f"a {type(answer).__name__} of {len(answer)} arrays, which have the places 0 … "
        known += f"{len(answer) - 1}" + (f" and the names {', '.join(names)}" if names else "")
    else:
        raise ModelContractError(
            f"model.heads names {key}, and the network returns one {type(answer).__name__}, no "
            "tuple, list or dict: remove model.heads"
        )
    if found is None:
        raise ModelContractError(
            f"the network returns no {key!r}, which model.heads names; it returns {known}"
        )
    if not hasattr(found, "shape") or not hasattr(found, "ndim"):
        raise ModelContractError(
            f"the head {key} of the network is a {type(found).__name__}; expected one array"
        )
    return found


def place_of(head: Head, names: Sequence[Sequence[str]], path: str) -> int:
    """The place of a head among the outputs of a file.

    Args:
        head: what the job says of it.
        names: the names of each output.
        path: of the file, for messages.

    Raises:
        EngineError: there is no such output.
    """
    key = head.key
    for place, of_output in enumerate(names):
        if key in (place, *of_output):
            return place
    listed = ", ".join(f"{place} {' '.join(of_output)}" for place, of_output in enumerate(names))
    raise EngineError(f"{path} has no output {key!r}, which model.heads names; it has {listed}")
