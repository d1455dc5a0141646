"""A network on its device: all that patch inference is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from beam_inference.engines.protocol import Device, Forward


@dataclass
class Predictor:
    """A loaded network, and the device that its arrays live on.

    Attributes:
        device: where the network's input and output are.
        predict: the network's forward pass on the device's arrays.
        description: what determines the output's bits: engine, engine_version, device, precision,
            and threads on a CPU.
    """

    device: Device
    predict: Forward
    description: Mapping[str, str] = field(default_factory=dict)
