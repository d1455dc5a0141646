"""Networks run by OpenVINO, on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beam_inference.engines.conversion import converting, export_network
from beam_inference.engines.per_shape import Forward
from beam_inference.errors import EngineError


def openvino_forward(
    source: Any, shape: tuple[int, ...], threads: int, weights: Path | None = None
) -> Forward:
    """By OpenVINO, in float32; ``weights`` are those of a file.

    Its own choice would be to bind threads to cores, the same ones in every process, which then
    wait for each other.

    Raises:
        EngineError: OpenVINO is absent, or cannot convert the network.
    """
    with converting("openvino"):
        # Its telemetry forks this process and calls home at every conversion; without the package
        # it goes without.
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        import openvino

        from beam_inference.engines.openvino_norms import with_short_sums

        core = openvino.Core()
        if isinstance(source, Path):
            network = core.read_model(source, *([] if weights is None else [weights]))
            network.reshape(list(shape))
        else:
            graph = (
                source
                if isinstance(source, torch.jit.ScriptModule)
                else export_network(source, shape)
            )
            network = openvino.convert_model(graph, example_input=torch.zeros(shape))
            network.reshape(list(shape))
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        compiled = core.compile_model(with_short_sums(network), "CPU", settings)
        if len(compiled.outputs) != 1:
            raise EngineError(f"the network has {len(compiled.outputs)} outputs; expected one")
        request = compiled.create_infer_request()

    def forward(batch: Tensor) -> Tensor:
        results = request.infer([batch.contiguous().numpy()], share_inputs=True, share_outputs=True)
        return torch.from_numpy(results[0])

    return forward
