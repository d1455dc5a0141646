"""A process that computes one part of each patch, led by a worker process.

It reads its orders from its standard input: first what it is, then a line for every batch. It ends
when that ends, so it outlives nobody.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore

from beam_inference.config.inference import Inference
from beam_inference.config.network import Network
from beam_inference.engines.device_errors import device_errors
from beam_inference.engines.partition.mesh import Mesh
from beam_inference.engines.partition.part import Part
from beam_inference.engines.partition.share import name_layers, run_divided
from beam_inference.engines.torch_device import TorchDevice
from beam_inference.engines.torch_heads import JoinedHeads
from beam_inference.engines.torch_network import prepare_network
from beam_inference.errors import EngineError, ModelContractError
from beam_inference.geometry.shares import box_shape, divide
from beam_inference.models.loading import load_network
from beam_inference.models.trust import Trust

TIMEOUT = timedelta(hours=1)
"""What one message between members may take: the computation of a large patch's layer."""

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Orders:
    """What a member is, and which network it runs.

    Attributes:
        rank: its number; 0 is the worker process.
        store: the file by which members find each other.
        model: the job's section, its files local.
        inference: the job's section.
        trust: which code that the network's files carry may run.
        network: a file with the network itself, if it is not ``model.path``.
    """

    rank: int
    store: str
    model: Network
    inference: Inference
    trust: Trust
    network: str | None = None


ORDERS = TypeAdapter(Orders)


@dataclass(frozen=True)
class Batch:
    """A batch to come: its shape, (N, C, Z, Y, X), the whole patch's."""

    shape: tuple[int, ...]


BATCH = TypeAdapter(Batch)


def join_mesh(shape: tuple[int, int, int], rank: int, size: int, store: str) -> Mesh:
    """Join the members that name the same store, on this machine. All must call it."""
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = TIMEOUT
    # members are on one machine, and nobody else's business
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    files = FileStore(store, size)
    group = distributed.ProcessGroupGloo(files, rank, size, options)
    return Mesh(shape, rank, group)


def load_own_network(orders: Orders) -> torch.nn.Module:
    """Load a member's copy of the network."""
    if orders.network is not None:
        network: torch.nn.Module = torch.load(orders.network, weights_only=False)
        return network
    loaded = load_network(orders.model, trust=orders.trust)
    prepared = prepare_network(loaded, orders.model, orders.inference, "cpu")
    heads = orders.model.heads
    joined: torch.nn.Module = prepared if heads is None else JoinedHeads(prepared, heads)
    return joined


def compute_part(
    network: torch.nn.Module, values: Tensor, shape: tuple[int, ...], mesh: Mesh, precision: str
) -> Part:
    """Compute a member's part of the answer to a batch of a shape; all members must call it."""
    dtype = HALF.get(precision)
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        part = run_divided(network, values, shape[2:], mesh)
    return part.with_values(part.values.float().contiguous())


def main() -> int:
    """Serve until the standard input ends."""
    orders = ORDERS.validate_json(sys.stdin.readline())
    inference = orders.inference
    shape = inference.partition
    network = load_own_network(orders)
    Path(f"{orders.store}.{orders.rank}").touch()  # the leader waits for it, or for this one's end
    mesh = join_mesh(shape, orders.rank, inference.members, orders.store)
    name_layers(network, mesh)
    device = TorchDevice(torch.device("cpu"), inference.precision, inference.threads or 1)
    with device.session(), device_errors():
        for line in sys.stdin:
            whole = BATCH.validate_json(line).shape
            own = divide(whole[2:], shape).boxes[orders.rank]
            values = torch.empty((*whole[:2], *box_shape(own)))
            mesh.exchange([], [(0, values)])()
            try:
                part = compute_part(network, values, whole, mesh, inference.precision)
            except ModelContractError:
                return 2  # all members refuse together, and the leader says why
            del values
            mesh.exchange([(0, part.values)], [])()
    return 0


def check_dividable(network: Any, kind: str, model: Network) -> None:
    """Refuse networks whose functions PyTorch cannot be asked about.

    Raises:
        EngineError: it is no module of PyTorch that runs as Python, or one of planes.
    """
    if kind != "module" or isinstance(network, torch.jit.ScriptModule):
        what = {"function": "a function of NumPy arrays", "export": "a torch.export program"}
        raise EngineError(
            f"inference.partition: {model.path} is {what.get(kind, 'TorchScript')}, which cannot "
            "be divided: give a factory of the network, and its weights, or remove partition"
        )
    if model.dims != 3 or model.axes != "zyx":
        raise EngineError(
            "inference.partition divides networks of (batch, channels, z, y, x) only: remove it "
            "for model.dims: 2, or model.axes: xyz"
        )


if __name__ == "__main__":
    sys.exit(main())
