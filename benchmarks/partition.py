"""A network on one patch that a mesh of processes shares: memory, and the price of exchanges.

``python -m benchmarks.partition`` runs the residual U-Net of the project, undivided and by meshes
of two and of four processes, on patches of several shapes, and writes
``benchmarks/results/partition.json``. Memory is what a process has taken at its peak beyond what it
had before it was given its part of the patch. Times are those of one patch, of a process of two
threads and of two processes of one thread, in turn. Of training, it is memory alone: a step's
forward and backward pass, without the optimiser.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from beam_inference.engines.onednn import run_by_onednn
from beam_inference.engines.partition.member import compute_part, join_mesh
from beam_inference.engines.partition.mesh import Addressed, Mesh
from beam_inference.engines.partition.share import name_layers, run_divided
from beam_inference.geometry.shares import box_shape, divide
from beam_inference.residual_unet import ResidualUNet
from benchmarks.measure import machine, peak_bytes, ratio_of_pairs, take_no_arguments

ZYX = tuple[int, int, int]

PATCHES: tuple[ZYX, ...] = ((16, 96, 96), (32, 128, 128), (64, 256, 256))
TRAINED_PATCHES: tuple[ZYX, ...] = ((32, 128, 128), (48, 192, 192))
MESHES: tuple[ZYX, ...] = ((1, 1, 2), (1, 2, 2))
TIMED_MESH: ZYX = (1, 1, 2)
REPEATS = 3
RESULTS = Path(__file__).parent / "results" / "partition.json"

Value = TypeVar("Value")

Seconds = dict[str, float]
"""Seconds by the class of a layer."""


@dataclass
class TimedMesh(Mesh):
    """A mesh that adds up how long each kind of layer waits for other members."""

    waited: Seconds = field(default_factory=lambda: defaultdict(float))

    def exchange(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed]
    ) -> Callable[[], None]:
        """Begin an exchange; both its begin and its wait are counted."""
        wait = self._timed(lambda: super(TimedMesh, self).exchange(sends, receives))
        return lambda: self._timed(wait)

    def add_up(self, values: Tensor) -> Tensor:
        """Add up over all members; all of it is counted."""
        return self._timed(lambda: super(TimedMesh, self).add_up(values))

    def _timed(self, action: Callable[[], Value]) -> Value:
        start = time.perf_counter()
        result = action()
        # layers are named "path (class)"
        kind = self.layers[-1].rpartition("(")[2].rstrip(")") if self.layers else "whole"
        self.waited[kind] += time.perf_counter() - start
        return result


def _time_layers(network: nn.Module) -> Seconds:
    """Add up, from now on, the seconds of each kind of layer, waits included."""
    seconds: Seconds = defaultdict(float)
    starts: list[float] = []  # layers without others in them do not run within one another

    def enter(_module: nn.Module, _inputs: Any) -> None:
        starts.append(time.perf_counter())

    def leave(module: nn.Module, _inputs: Any, _output: Any) -> None:
        seconds[type(module).__name__] += time.perf_counter() - starts.pop()

    for module in network.modules():
        if next(module.children(), None) is None:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
    return seconds


def _serve(patch: ZYX, shape: ZYX, rank: int, threads: int, store: str, pipe: Connection) -> None:
    """Be a member, or the whole where that is the mesh: first its peak, then a time per order."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    network = ResidualUNet(output_channels=3).eval()
    seconds = _time_layers(network)
    boxes = divide(patch, shape).boxes
    mesh = TimedMesh(shape, rank, join_mesh(shape, rank, len(boxes), store).group)
    name_layers(network, mesh)
    undivided = run_by_onednn(network)

    def compute() -> float:
        values = torch.randn(1, 1, *box_shape(boxes[rank]))
        start = time.perf_counter()
        if mesh.size == 1:
            undivided(values)
        else:
            compute_part(network, values, (1, 1, *patch), mesh, "float32")
        return time.perf_counter() - start

    with torch.inference_mode():
        pipe.send(peak_bytes(compute))
        seconds.clear()
        mesh.waited.clear()
        while pipe.recv():
            pipe.send(compute())
    pipe.send((dict(seconds), dict(mesh.waited)))


def _take_step(
    patch: ZYX, shape: ZYX, rank: int, threads: int, store: str, pipe: Connection
) -> None:
    """Be a member, or the whole, in a step of training, and tell its peak."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    network = ResidualUNet(output_channels=3)
    boxes = divide(patch, shape).boxes
    mesh = join_mesh(shape, rank, len(boxes), store)

    def step() -> None:
        values = torch.randn(1, 1, *box_shape(boxes[rank]))
        if mesh.size == 1:
            logits = network(values)
        else:
            logits = run_divided(network, values, patch, mesh).values
        logits.square().sum().backward()

    pipe.send(peak_bytes(step))


class _Processes:
    """The processes of a mesh, on one patch; each sends its peak first."""

    def __init__(
        self, serve: Callable[..., None], patch: ZYX, shape: ZYX, threads: int, folder: str
    ) -> None:
        context = get_context("spawn")
        store = str(Path(folder, f"{serve.__name__}-{patch}-{shape}-{threads}"))
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(math.prod(shape)):
            ours, theirs = context.Pipe()
            arguments = (patch, shape, rank, threads, store, theirs)
            process = context.Process(target=serve, args=arguments)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self.peak: int = max(pipe.recv() for pipe in self._pipes)

    def run(self) -> float:
        """Seconds that the slowest takes for a patch."""
        for pipe in self._pipes:
            pipe.send(True)
        return float(max(pipe.recv() for pipe in self._pipes))

    def end(self) -> tuple[Seconds, Seconds]:
        """End them; the first one's seconds by layer, and of those its waits."""
        for pipe in self._pipes:
            pipe.send(False)
        figures: list[tuple[Seconds, Seconds]] = [pipe.recv() for pipe in self._pipes]
        for process in self._processes:
            process.join()
        return figures[0]


def measure_patch(patch: ZYX, repeats: int) -> dict[str, Any]:
    """Memory and times of a patch of a shape."""
    with tempfile.TemporaryDirectory() as folder:
        whole = _Processes(_serve, patch, (1, 1, 1), 2, folder)
        peaks = {}
        for shape in MESHES:
            mesh = _Processes(_serve, patch, shape, 1, folder)
            peaks[math.prod(shape)] = mesh.peak
            if shape != TIMED_MESH:
                mesh.end()
                continue
            pairs = [(mesh.run(), whole.run()) for _ in range(repeats)]
            divided, waited = mesh.end()
        undivided, _ = whole.end()
    return {
        "patch": patch,
        "undivided_peak_bytes": whole.peak,
        "peak_over_undivided": {
            str(members): round(peak / whole.peak, 3) for members, peak in peaks.items()
        },
        "two_processes_over_two_threads": ratio_of_pairs(pairs),
        "layers": {
            kind: {
                "undivided_seconds": round(undivided[kind] / repeats, 4),
                "divided_seconds": round(divided[kind] / repeats, 4),
                "waited_seconds": round(waited.get(kind, 0.0) / repeats, 4),
            }
            for kind in sorted(undivided, key=lambda kind: -undivided[kind])
        },
    }


def measure_step(patch: ZYX) -> dict[str, Any]:
    """Memory of a step of training with a patch of a shape."""
    with tempfile.TemporaryDirectory() as folder:
        whole, *peaks = (
            _Processes(_take_step, patch, shape, 1, folder).peak for shape in ((1, 1, 1), *MESHES)
        )
    return {
        "patch": patch,
        "undivided_peak_bytes": whole,
        "peak_over_undivided": {
            str(math.prod(shape)): round(peak / whole, 3)
            for shape, peak in zip(MESHES, peaks, strict=True)
        },
    }


def measure() -> dict[str, Any]:
    """All figures."""
    load = os.getloadavg()[0]
    return {
        "machine": machine("torch"),
        "load_before": round(load, 1),
        "mesh_in_time": TIMED_MESH,
        "patches": [measure_patch(patch, REPEATS) for patch in PATCHES],
        "training": [measure_step(patch) for patch in TRAINED_PATCHES],
    }


if __name__ == "__main__":
    take_no_arguments(__doc__)
    found = measure()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
