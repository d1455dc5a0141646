"""Conversion of networks for other engines than PyTorch: quiet, and one at a time."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TextIO, cast

import torch

from beam_inference.engines.stable_norms import replace_norms
from beam_inference.engines.torch_device import without_autocast
from beam_inference.errors import EngineError
from beam_inference.foreign_text import remove_colours, shorten_text

_TALKERS = (
    "torch.onnx",
    "torch.export",
    "torch._dynamo",
    "torch._inductor",
    "torch._subclasses",
    "torch.fx.experimental.symbolic_shapes",
    "onnxscript",
    "openvino",
    "nncf",
)


_CONVERSION_LOCK = threading.RLock()


def export_network(source: Any, shape: tuple[int, ...]) -> torch.export.ExportedProgram:
    """The network as a graph; it is not run for that, as tracing would, several times."""
    return replace_norms(
        torch.export.export(source, (torch.zeros(shape, dtype=torch.float32, device="cpu"),))
    )


@contextmanager
def quiet_conversion(engine: str) -> Iterator[None]:
    """Silence what a conversion warns of, logs and prints, and translate what it raises.

    Args:
        engine: as ``inference.engine`` names it, for messages.

    Raises:
        EngineError: the conversion fails.
    """
    loggers = [logging.getLogger(name) for name in _TALKERS]
    levels = [logger.level for logger in loggers]
    try:
        # Warnings and standard output belong to the process: one conversion at a time.
        with (
            _CONVERSION_LOCK,
            warnings.catch_warnings(),
            _mute("stdout"),
            _mute("stderr"),
            without_autocast(),
        ):
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)  # what fails is raised, too
            yield
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        extra = f"pip install 'beam-inference[{engine}]', here and on the workers"
        raise EngineError(
            f"inference.engine: {engine} is not installed ({error}): {extra}"
        ) from None
    except EngineError as error:
        raise EngineError(f"inference.engine: {engine}: {error}") from None
    except Exception as error:
        reason = shorten_text(" ".join(remove_colours(str(error)).split())) or type(error).__name__
        raise EngineError(
            f"inference.engine: {engine} cannot take this network: {reason}. Write engine: "
            "torch, if the network is PyTorch's."
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _MutedStream:
    """A text stream that drops what one thread writes, until it ends.

    Args:
        stream: the stream behind it, which gets what others write, and answers everything else.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._muted: int | None = threading.get_ident()

    def end(self) -> None:
        """Let all write from now on: somebody may have taken this for the process's stream."""
        self._muted = None

    def write(self, text: str) -> int:
        """Write a text, unless the thread is muted."""
        if threading.get_ident() != self._muted:
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _mute(name: Literal["stdout", "stderr"]) -> Iterator[None]:
    """Drop what the calling thread prints meanwhile; others may print, and redirect the stream."""
    before = getattr(sys, name)
    if before is None:  # a process without a terminal
        yield
        return
    muted = _MutedStream(before)
    setattr(sys, name, cast(TextIO, muted))
    try:
        yield
    finally:
        muted.end()
        if getattr(sys, name) is muted:  # else another thread has put its own there meanwhile
            setattr(sys, name, before)


def check_one_input(count: int) -> None:
    """Refuse a network that does not take one array. Raises EngineError."""
    if count != 1:
        raise EngineError(
            f"the network takes {count} inputs; expected one, of all channels. Export it with the "
            "others inside, as constants, or made of the first."
        )


def check_one_output(count: int) -> None:
    """Refuse a network with more than one output. Raises EngineError."""
    if count != 1:
        raise EngineError(f"the network has {count} outputs; expected one")
