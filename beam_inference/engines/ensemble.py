"""Several networks as one, which answers the mean of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beam_inference.engines.predictor import Predictor
from beam_inference.errors import ModelContractError


def average_members(
    members: Sequence[Predictor], shares: Sequence[float], keys: Sequence[str]
) -> Predictor:
    """A predictor whose answers are means over networks, called one after the other.

    Args:
        members: the networks, on one device, run by one engine.
        shares: what each counts; they add up to 1.
        keys: the key of each in the job file, for messages.

    Returns:
        On the device of the first. Its description is that of the first, with all hashes of
        parameters.
    """
    first = members[0]
    device = first.device

    def predict(batch: Any) -> Any:
        total: Any = None
        for member, share, key in zip(members, shares, keys, strict=True):
            # a copy, for a network may change what it is given
            answer = member.predict(device.copy(batch))
            if total is None:
                total = device.copy(answer)
                total *= share
                continue
            if answer.shape != total.shape:
                raise ModelContractError(
                    f"{key}.path: the network returns {list(answer.shape)} for a batch of "
                    f"{list(batch.shape)} (batch, channels, z, y, x), and that of model.path "
                    f"{list(total.shape)}: answers of another shape cannot be averaged. All of an "
                    "ensemble share patch_shape, crop_margin and output_channels: name this one "
                    "in a job of its own."
                )
            total += answer * share
        return total

    description = dict(first.description)
    parameters = [member.description.get("parameters", "") for member in members]
    if any(parameters):
        description["parameters"] = ",".join(parameters)
    return Predictor(device, predict, description)
