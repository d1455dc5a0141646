"""Layers that rely on one another: each knows whether it follows the one before it.

Where layers were changed together, such as a convolution that does the next one's work, the answer
of the first means nothing to other code. torch.fx tells which layers follow each other, but does
not notice code that depends on what it is given by ways such as ``isinstance``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class ReadElsewhere(BaseException):
    """Something else than the next layer reads a linked one: none of a network's own errors."""


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
        raise ReadElsewhere


class Link(nn.Module):
    """A layer in a chain of layers, each of which reads the one before it.

    Args:
        replaced: the layer as it was; it is not run, but code may look for it among modules.
        layer: the layer, as it is in the changed network.
        before: the link that it reads; None for the first.
    """

    def __init__(self, replaced: nn.Module, layer: nn.Module, before: Link | None) -> None:
        super().__init__()
        self.replaced = replaced
        self.layer = layer
        self._is_first = before is None
        self._readers: tuple[Link, ...] = ()  # a module of its own would become part of this one
        if before is not None:
            before._readers = (self,)

    def __getattr__(self, name: str) -> Any:
        """What a layer would have; code that asks whether it is there is told the wrong thing."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # Python's own questions, such as how to copy it
                raise
            raise ReadElsewhere from None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Run the layer. Raises ReadElsewhere where it does not follow that before it."""
        if not self._is_first:
            if not isinstance(batch, _HandedOn) or batch.reader is not self:
                raise ReadElsewhere
            batch = batch.answer
        answer: torch.Tensor = self.layer(batch)
        if not self._readers:
            return answer
        handed_on = answer.as_subclass(_HandedOn)
        handed_on.answer = answer
        handed_on.reader = self._readers[0]
        return handed_on


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
            result = self.changed(batch)
        except ReadElsewhere:
            return self.original(kept)
        if any(isinstance(each, _HandedOn) for each in tree_leaves(result)):
            return self.original(kept)
        return result
