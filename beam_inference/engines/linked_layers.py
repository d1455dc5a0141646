"""Layers that rely on one another: each knows whether it follows the one before it.

Where layers were changed together, such as a convolution that does the next one's work, the answer
of the first means nothing to other code. torch.fx tells which layers follow each other, but does
not notice code that depends on what it is given by ways such as ``isinstance``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class ReadElsewhere(BaseException):
    """Something else than the next layer reads a linked one: none of a network's own errors."""


class _Run(threading.local):
    """What this thread runs.

    Attributes:
        is_going_on: whether that is a network with links.
        is_read: whether something else than the next layer has read one of its links.
    """

    is_going_on = False
    is_read = False


_run = _Run()


def _refuse() -> NoReturn:
    """Raise ReadElsewhere, and keep that it was: the network may catch whatever is raised."""
    _run.is_read = True
    raise ReadElsewhere


class _HandedOn(torch.Tensor):
    """The answer of a layer, which the next one alone may read.

    Attributes:
        answer: the same as a common tensor.
        reader: the next layer.
    """

    answer: torch.Tensor
    reader: Link

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Refuse whatever is done with it. Raises ReadElsewhere."""
        _refuse()


class Link(nn.Module):
    """A layer in a chain of layers, each of which reads the one before it.

    While the network runs, its code can call a link, and nothing else: what it would see of it, or
    change, is not the layer's that it was written for.

    Args:
        layer: the layer, as it is in the changed network.
        before: the link that it reads; None for the first.
    """

    def __init__(self, layer: nn.Module, before: Link | None) -> None:
        super().__init__()
        self.layer = layer
        self._is_first = before is None
        self._readers: tuple[Link, ...] = ()  # a module of its own would become part of this one
        if before is not None:
            before._readers = (self,)

    def __getattribute__(self, name: str) -> Any:
        """Refuse what a call of the layer does not need, as ``isinstance`` and ``modules()`` do."""
        is_needed = name in ("forward", "layer") or (name[:1] == "_" and name != "__class__")
        if _run.is_going_on and not is_needed:
            _refuse()
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to be changed by the network's code."""
        if _run.is_going_on:
            _refuse()
        super().__setattr__(name, value)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Run the layer. Raises ReadElsewhere where it does not follow that before it."""
        if not self._is_first:
            if not isinstance(batch, _HandedOn) or batch.reader is not self:
                _refuse()
            batch = batch.answer
        answer: torch.Tensor = self.layer(batch)
        if not self._readers:
            return answer
        handed_on = answer.as_subclass(_HandedOn)
        handed_on.answer = answer
        handed_on.reader = self._readers[0]
        return handed_on


def run_linked(network: Callable[[torch.Tensor], Any], batch: torch.Tensor) -> Any:
    """Run a network with links.

    Raises:
        ReadElsewhere: something else than the next layer has read a link, or would read the answer.
        Exception: the network's own.
    """
    _run.is_going_on = True
    _run.is_read = False
    try:
        result = network(batch)
    except Exception:
        if _run.is_read:
            raise ReadElsewhere from None
        raise
    finally:
        _run.is_going_on = False
    if _run.is_read or any(isinstance(each, _HandedOn) for each in tree_leaves(result)):
        raise ReadElsewhere
    return result


class LinkedNetwork(nn.Module):
    """A network with links, and the original for what that does not compute.

    Args:
        changed: the network with links.
        original: the network as it was.
    """

    def __init__(self, changed: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self.changed = changed
        self.original = original

    def forward(self, batch: torch.Tensor) -> Any:
        """Run the network."""
        kept = batch.clone()  # a network may overwrite its input
        try:
            return run_linked(self.changed, batch)
        except ReadElsewhere:
            return self.original(kept)
