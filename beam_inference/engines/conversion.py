"""Conversion of networks for other engines than PyTorch: quiet, and one at a time."""

from __future__ import annotations

import io
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

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
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
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
