"""The engine ``torch``: networks run by PyTorch, as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beam_inference.config.engines import Engine, LoadRequest


def load(request: LoadRequest) -> Callable[[Any], Any]:
    """Load a network with its BatchNorms folded, and its convolutions on a CPU run by oneDNN.

    Raises:
        DeviceOutOfMemory: there is no memory to try the folded network.
    """
    import torch

    from beam_inference.engines.batch_norm_folding import fold_batch_norm
    from beam_inference.engines.device_errors import device_errors
    from beam_inference.engines.onednn import run_by_onednn
    from beam_inference.engines.torch_network import lay_out

    network = request.network
    device = torch.device(request.device)
    if request.kind == "module" and request.model.batch_norm == "running":
        with device_errors():
            network = fold_batch_norm(network, (1, *request.batch_shape[1:]), device)
    lay_out(network, request)
    if device.type == "cpu" and request.kind != "torchscript":
        return run_by_onednn(network)
    forward: Callable[[Any], Any] = network
    return forward


ENGINE = Engine(
    name="torch",
    package="torch",
    load=load,
    install="pip install torch",
    devices=("cpu", "cuda", "mps", "xpu"),
    precisions=("float32", "tf32", "bfloat16", "float16"),
    memory_formats=("contiguous", "channels_last"),
    has_fixed_shape=False,
    auto_rank=100,
)
