"""Leads a mesh of processes on this machine: gives out parts of batches, and joins the answers."""

from __future__ import annotations

import logging
import os
import pickle
import pickletools
import subprocess
import sys
import time
import weakref
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from beam_inference.engines.partition.member import (
    BATCH,
    ORDERS,
    Batch,
    Orders,
    compute_part,
    join_mesh,
)
from beam_inference.engines.partition.mesh import Mesh
from beam_inference.engines.partition.share import name_layers, own_part
from beam_inference.errors import EngineError, WorkerFault
from beam_inference.geometry.shares import box_shape, divide, slices_in

logger = logging.getLogger(__name__)

START_SECONDS = 600.0
"""What members may take to import PyTorch and to load the network."""

END_SECONDS = 5.0
"""How long the end of a member may come after what it did to the others."""


def lead_mesh(
    network: torch.nn.Module, orders: Orders, *, by_value: bool
) -> Callable[[Tensor], Tensor]:
    """The forward pass of a network that a mesh of processes runs, this one among them.

    The mesh is started by the first batch. Where a member is lost, it is started again, once for a
    batch, which is then computed anew.

    Args:
        network: this process's own, in evaluation mode on the CPU.
        orders: as for the members; rank and store are the mesh's own.
        by_value: whether members are sent the network itself, and not where it lies.

    Returns:
        A function of (N, C, Z, Y, X). It raises WorkerFault where a member was lost,
        ModelContractError where a layer cannot be divided.
    """
    teams: list[_Team] = []

    def run(batch: Tensor) -> Tensor:
        if not teams:
            teams.append(_Team(network, orders, by_value=by_value))
        try:
            return teams[0].run(batch)
        except BaseException:
            # messages may still be on their way: nobody could tell them from the next batch's
            teams.pop().end()
            raise

    def forward(batch: Tensor) -> Tensor:
        try:
            return run(batch)
        except _LostMember as error:
            # as text: what is logged may be kept, and an error knows the batch
            logger.warning("%s: the mesh is started again", str(error))
        return run(batch)

    return forward


class _LostMember(WorkerFault):
    """A member of the mesh has ended."""


class _Team:
    """The members of a mesh that is led by this process."""

    def __init__(self, network: torch.nn.Module, orders: Orders, *, by_value: bool) -> None:
        self._network = network
        self._orders = orders
        self._shape = orders.inference.partition
        self._folder = TemporaryDirectory(prefix="beam-inference-mesh-")
        store = str(Path(self._folder.name, "store"))
        orders = replace(orders, store=store)
        if by_value:
            file = Path(self._folder.name, "network")
            try:
                _save(network, file)
            except EngineError:
                self._folder.cleanup()
                raise
            orders = replace(orders, network=str(file))
        size = orders.inference.members
        self._members: list[subprocess.Popen[str]] = []
        # also where nobody ends it: when the predictor is no more used, and with the process
        self._end_members = weakref.finalize(self, _end_members, self._members, self._folder)
        self._members += [_start_member(replace(orders, rank=rank)) for rank in range(1, size)]
        try:
            self._wait_until_loaded(store)
            self._mesh: Mesh = join_mesh(self._shape, 0, size, store)
        except BaseException:
            self._end_members()
            raise
        self._hooks = name_layers(network, self._mesh)

    def end(self) -> None:
        """End the members, and leave the network as it was."""
        for hook in self._hooks:
            hook.remove()
        self._end_members()

    def _wait_until_loaded(self, store: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        for rank, member in enumerate(self._members, start=1):
            while not Path(f"{store}.{rank}").exists():
                if member.poll() is not None or time.monotonic() > deadline:
                    raise _LostMember(
                        f"inference.partition: member {rank} of {len(self._members) + 1} did not "
                        f"start (exit code {member.poll()}); its log says why"
                    )
                time.sleep(0.05)

    def run(self, batch: Tensor) -> Tensor:
        """The network's answer to a batch."""
        try:
            return self._run(batch)
        except (RuntimeError, OSError) as error:
            lost = self._lost()
            if lost is None:
                raise
            raise _LostMember(
                f"inference.partition: member {lost} of {len(self._members) + 1} was lost "
                f"(exit code {self._members[lost - 1].poll()}): {str(error).splitlines()[0]}"
            ) from error

    def _run(self, batch: Tensor) -> Tensor:
        line = BATCH.dump_json(Batch(tuple(batch.shape))).decode()
        for member in self._members:
            assert member.stdin is not None
            member.stdin.write(f"{line}\n")
            member.stdin.flush()
        whole = tuple((0, n) for n in batch.shape[2:])
        boxes = divide(batch.shape[2:], self._shape).boxes
        parts = [(rank, batch[slices_in(box, whole)]) for rank, box in enumerate(boxes)]
        wait = self._mesh.exchange(parts[1:], [])
        own = own_part(batch, self._mesh).clone()  # networks may change it: the batch must stay
        precision = self._orders.inference.precision
        part = compute_part(self._network, own, tuple(batch.shape), self._mesh, precision)
        wait()
        answer = part.values.new_empty(part.shape)
        frame = tuple((0, n) for n in part.division.shape)
        answer[slices_in(part.box, frame)] = part.values
        for rank, box in enumerate(part.division.boxes[1:], start=1):
            values = part.values.new_empty((*part.shape[:2], *box_shape(box)))
            self._mesh.exchange([], [(rank, values)])()
            answer[slices_in(box, frame)] = values
        return answer

    def _lost(self) -> int | None:
        """The number of a member that has ended; None if there is none."""
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            for rank, member in enumerate(self._members, start=1):
                if member.poll() is not None:
                    return rank
            time.sleep(0.05)
        return None


def _end_members(members: list[subprocess.Popen[str]], folder: TemporaryDirectory[str]) -> None:
    for member in members:
        member.kill()
    for member in members:
        if member.stdin is not None:
            with suppress(OSError):  # of orders that nobody has read
                member.stdin.close()
        member.wait()
    folder.cleanup()


def _start_member(orders: Orders) -> subprocess.Popen[str]:
    # what this process can import, members can, too
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    member = subprocess.Popen(
        [sys.executable, "-m", "beam_inference.engines.partition.member"],
        stdin=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert member.stdin is not None
    member.stdin.write(f"{ORDERS.dump_json(orders).decode()}\n")
    member.stdin.flush()
    return member


def _save(network: torch.nn.Module, file: Path) -> None:
    """Write a network for the members, in which ``__main__`` is another program.

    Raises:
        EngineError: they could not load it.
    """
    try:
        torch.save(network, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _cannot_be_sent(str(error).splitlines()[0]) from None
    with zipfile.ZipFile(file) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        for _, argument, _ in pickletools.genops(archive.read(record)):
            if isinstance(argument, str) and argument.startswith("__main__ "):  # of GLOBAL
                raise _cannot_be_sent(f"{argument.split()[1]} is of the script that runs")


def _cannot_be_sent(reason: str) -> EngineError:
    return EngineError(
        f"partition: the network cannot be sent to other processes ({reason}): define its classes "
        "in a module that can be imported, or name a factory instead"
    )
