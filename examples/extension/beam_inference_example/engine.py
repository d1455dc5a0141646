"""An engine: PyTorch in double precision, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beam_inference.config.engines import Engine, LoadRequest


def load(request: LoadRequest) -> Callable[[Any], Any]:
    """The forward pass of a network of PyTorch, which is given in evaluation mode."""
    network = request.network.double()

    def forward(batch: Any) -> Any:
        return network(batch.double()).float()

    return forward


ENGINE = Engine(
    name="double",
    package="torch",
    load=load,
    install="pip install torch",
    has_fixed_shape=False,
)
