"""What conversions of a network have in common: one at a time, quiet, with errors that say what to do."""

from __future__ import annotations

import io
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch

from beam_inference.engines.stable_norms import by_short_sums
from beam_inference.errors import EngineError

_TALKERS = (
    "torch.onnx",
    "torch.export",
    "torch._dynamo",
    "torch._inductor",
    "onnxscript",
    "openvino",
)


_CONVERSION_LOCK = threading.RLock()


def export_network(source: Any, shape: tuple[int, ...]) -> torch.export.ExportedProgram:
    """The network as a graph. It is not run for that, which tracing would do, several times."""
    return by_short_sums(torch.export.export(source, (torch.zeros(shape),)))


@contextmanager
def converting(engine: str) -> Iterator[None]:
    """Conversions warn of what is being deprecated within them, log, print, and raise anything."""
    loggers = [logging.getLogger(name) for name in _TALKERS]
    levels = [logger.level for logger in loggers]
    try:
        # What is told, and where, is the process's: one conversion at a time.
        with (
            _CONVERSION_LOCK,
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
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
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise EngineError(
            f"inference.engine: {engine} cannot take this network: {reason}. Write engine: torch."
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
