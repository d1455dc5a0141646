"""The engine ``numpy``: networks that are functions of NumPy arrays, of whatever library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.engines import Engine, LoadRequest


def load(request: LoadRequest) -> Callable[[Any], Any]:
    """Return a function, called by one thread at a time unless it says that it is thread-safe."""
    function: Callable[[Any], Any] = request.network
    if getattr(function, "thread_safe", False):
        return function
    lock = threading.Lock()

    def call_alone(batch: NDArray[np.float32]) -> Any:
        with lock:
            return function(batch)

    return call_alone


ENGINE = Engine(
    name="numpy",
    package="numpy",
    load=load,
    install="pip install numpy",
    arrays="numpy",
    networks="functions",
    has_fixed_shape=False,
)
