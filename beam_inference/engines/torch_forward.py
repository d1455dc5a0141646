"""Forward passes of PyTorch's networks: precision, layout of arrays, activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from beam_inference.config.heads import Head, channel_ranges
from beam_inference.engines.device_errors import device_errors
from beam_inference.engines.planes import sections_as_channels
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.torch_device import TorchDevice
from beam_inference.errors import ModelContractError

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_forward(
    network: Callable[[Tensor], Any],
    device_type: str,
    *,
    precision: str = "float32",
    activation: str = "none",
    heads: Sequence[Head] = (),
    dims: int = 3,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Callable[[Tensor], Tensor]:
    """The forward pass of a network on tensors of PyTorch.

    Args:
        network: maps a float32 tensor (N, C, Z, Y, X), or (N, C, Y, X) if ``dims`` is 2, to one of
            as many axes.
        device_type: as PyTorch names it, such as "cuda".
        precision: ``inference.precision``; in half precision the network is run by autocast.
        activation: "none", "sigmoid" or "softmax" (over channels), applied in float32.
        heads: what the channels are, if each part of them has an activation of its own.
        dims: 2 or 3. Of 2, the sections of a batch become channels: all of the first channel, then
            all of the second.
        memory_format: of the network's input.

    Returns:
        A function of float32 tensors (N, C, Z, Y, X) to the same. It raises DeviceOutOfMemory or
        WorkerFault where the device fails, ModelContractError where the network's answer is not one
        real tensor, or where it draws random numbers.
    """
    dtype = _AUTOCAST.get(precision)

    def forward(batch: Tensor) -> Tensor:
        with device_errors(), _refuse_random_numbers(device_type):
            batch = sections_as_channels(batch) if dims == 2 else batch
            with nullcontext() if dtype is None else torch.autocast(device_type, dtype):
                result = network(batch.contiguous(memory_format=memory_format))
            if not isinstance(result, Tensor) or result.is_complex():
                found = str(result.dtype) if isinstance(result, Tensor) else type(result).__name__
                raise ModelContractError(
                    f"the network returns a {found}; expected one real tensor (batch, channels, z, "
                    "y, x). Wrap it in a module that returns the one to write."
                )
            if dims == 2 and result.ndim == 4:
                result = result[:, :, None]
            # A network may return its input, which the next batch overwrites: never more than one
            # batch is alive.
            return _activate_heads(result.float(), activation, heads)

    return forward


@contextmanager
def _refuse_random_numbers(device_type: str) -> Iterator[None]:
    """Notice that PyTorch's common generators were used, whatever the values at hand.

    Raises:
        ModelContractError: one was.
    """
    before = _generator_states(device_type)
    yield
    after = _generator_states(device_type)
    if not all(map(torch.equal, before, after)):
        raise ModelContractError(
            "the network draws random numbers, such as a dropout that was exported while training: "
            "its output would be another one each time. Save it in evaluation mode, and without "
            "random numbers. Layers that are made when it is called for the first time draw their "
            "weights, too: let its factory make them."
        )


def _generator_states(device_type: str) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device_type != "cpu":
        states.append(torch.get_device_module(device_type).get_rng_state())
    return states


def torch_predictor(
    network: Callable[[Tensor], Any],
    device: torch.device,
    *,
    precision: str = "float32",
    activation: str = "none",
    heads: Sequence[Head] = (),
    dims: int = 3,
    threads: int = 1,
    memory_format: torch.memory_format = torch.contiguous_format,
    description: Mapping[str, str] | None = None,
) -> Predictor:
    """A network of PyTorch's on its device.

    ``device`` and ``threads`` are as for :class:`beam_inference.engines.torch_device.TorchDevice`,
    ``description`` is what determines the output's bits; the others are as for
    :func:`torch_forward`.
    """
    forward = torch_forward(
        network,
        device.type,
        precision=precision,
        activation=activation,
        heads=heads,
        dims=dims,
        memory_format=memory_format,
    )
    return Predictor(
        TorchDevice(device, precision, threads),
        forward,
        {"device": device.type, **(description or {})},
    )


def _activate_heads(values: Tensor, activation: str, heads: Sequence[Head]) -> Tensor:
    if all(head.activation == "none" for head in heads):
        return _activate(values, activation)
    parts = [
        _activate(values[:, channels.start : channels.stop], head.activation)
        for head, channels in zip(heads, channel_ranges(heads), strict=True)
    ]
    return torch.cat(parts, 1)


def _activate(values: Tensor, activation: str) -> Tensor:
    if activation == "none":
        return values
    if not values.is_cpu:
        return values.sigmoid() if activation == "sigmoid" else values.softmax(dim=1)
    # CPUs compute the last values of an array in another way than those that fill their vectors:
    # one patch after the other, so that its place in the batch changes no bit
    result = torch.empty_like(values)
    for patch, into in zip(values, result, strict=True):
        if activation == "sigmoid":
            torch.sigmoid(patch, out=into)
        else:
            torch.softmax(patch, 0, out=into)
    return result
