"""Meshes of threads: real process groups of gloo, whose members share this process."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch import distributed

from beam_inference.engines.partition.mesh import Mesh
from beam_inference.engines.partition.share import name_layers, own_part, run_divided
from beam_inference.geometry.shares import slices_in

TIMEOUT = timedelta(seconds=60)


class Members:
    """The members of a mesh, each a thread with a process group of its own."""

    def __init__(self, shape):
        size = math.prod(shape)
        self._threads = ThreadPoolExecutor(size)
        store = distributed.HashStore()

        def join(rank):
            return Mesh(shape, rank, distributed.ProcessGroupGloo(store, rank, size, TIMEOUT))

        self.meshes = list(self._threads.map(join, range(size)))

    def run(self, function):
        """What ``function(mesh)`` gives for each member; all are run at the same time."""
        futures = [self._threads.submit(function, mesh) for mesh in self.meshes]
        results = []
        errors = []
        for future in futures:
            try:
                results.append(future.result())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def close(self):
        self._threads.shutdown()


def join_parts(parts):
    """The whole array of all members' parts."""
    whole = parts[0].values.new_empty(parts[0].shape)
    frame = tuple((0, n) for n in parts[0].division.shape)
    for part in parts:
        whole[slices_in(part.box, frame)] = part.values
    return whole


def infer(members, network, batch):
    """The answer of a network that the members run together."""

    def run(mesh):
        own = copy.deepcopy(network)
        name_layers(own, mesh)
        with torch.inference_mode():
            return run_divided(own, own_part(batch, mesh), batch.shape[2:], mesh)

    return join_parts(members.run(run))


def train(members, network, batch, weights):
    """Gradients of the sum of weighted answers: of the batch, and of the parameters by name."""

    def run(mesh):
        own = copy.deepcopy(network)
        share = own_part(batch, mesh).clone().requires_grad_()
        part = run_divided(own, share, batch.shape[2:], mesh)
        frame = tuple((0, n) for n in part.division.shape)
        (part.values * weights[slices_in(part.box, frame)]).sum().backward()
        return share.grad, {name: p.grad for name, p in own.named_parameters()}

    results = members.run(run)
    parameters = {
        name: sum(each[1][name] for each in results if each[1][name] is not None)
        for name in results[0][1]
    }
    return [each[0] for each in results], parameters
