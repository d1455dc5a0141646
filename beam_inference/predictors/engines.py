"""Engines that run a network in PyTorch's stead on the CPU: converted as they are loaded, for one shape of batch.

Each function returns a forward pass on float32 tensors, which it may give back in a buffer of its own that the next
call overwrites. ``source`` is a network as PyTorch has it, or a file of the engine's own format.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beam_inference.errors import EngineError
from beam_inference.predictors.short_sums import by_short_sums

Forward = Callable[[Tensor], Tensor]

_TALKERS = ("torch.onnx", "torch.export", "torch._dynamo", "torch._inductor", "onnxscript", "openvino")
_lock = threading.RLock()


def per_shape(make: Callable[[tuple[int, ...]], Forward], shape: tuple[int, ...]) -> Forward:
    """A forward pass for batches of any shape, each made by ``make`` when it is first met, that of ``shape`` at once.

    Only a device that runs out of memory needs a second one.
    """
    made = {shape: make(shape)}  # one at a time: the old one's memory is what is short

    def forward(batch: Tensor) -> Tensor:
        met = tuple(batch.shape)
        if met not in made:
            made.clear()
            made[met] = make(met)
        return made[met](batch)

    return forward


def openvino_forward(source: Any, shape: tuple[int, ...], threads: int, weights: Path | None = None) -> Forward:
    """By OpenVINO, in float32; ``weights`` are those of a file.

    Its own choice would be to bind threads to cores, the same ones in every process, which then wait for each other.

    Raises:
        EngineError: OpenVINO is absent, or cannot convert the network.
    """
    with _conversion("openvino"):
        # Its telemetry forks this process and calls home at every conversion; without the package it goes without.
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        import openvino

        from beam_inference.predictors.openvino_sums import with_short_sums

        core = openvino.Core()
        if isinstance(source, Path):
            network = core.read_model(source, *([] if weights is None else [weights]))
            network.reshape(list(shape))
        else:
            graph = source if isinstance(source, torch.jit.ScriptModule) else _exported(source, shape)
            network = openvino.convert_model(graph, example_input=torch.zeros(shape))
            network.reshape(list(shape))
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        compiled = core.compile_model(with_short_sums(network), "CPU", settings)
        if len(compiled.outputs) != 1:
            raise EngineError(f"the network has {len(compiled.outputs)} outputs; expected one")
        request = compiled.create_infer_request()

    def forward(batch: Tensor) -> Tensor:
        results = request.infer([batch.contiguous().numpy()], share_inputs=True, share_outputs=True)
        return torch.from_numpy(results[0])

    return forward


def _exported(source: Any, shape: tuple[int, ...]) -> torch.export.ExportedProgram:
    """The network as a graph. It is not run for that, which tracing would do, several times."""
    return by_short_sums(torch.export.export(source, (torch.zeros(shape),)))


def onnxruntime_forward(source: Any, shape: tuple[int, ...], threads: int) -> Forward:
    """By ONNX Runtime.

    Raises:
        EngineError: ONNX Runtime or what exports to it is absent, or cannot convert the network.
    """
    with _conversion("onnxruntime"):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # its threads share cores with others
        network = str(source) if isinstance(source, Path) else _as_onnx(source, shape)
        session = onnxruntime.InferenceSession(network, options, ["CPUExecutionProvider"])
        if len(session.get_outputs()) != 1:
            raise EngineError(f"the network has {len(session.get_outputs())} outputs; expected one")
        name = session.get_inputs()[0].name

    def forward(batch: Tensor) -> Tensor:
        (result,) = session.run(None, {name: batch.contiguous().numpy()})
        return torch.from_numpy(result)

    return forward


def _as_onnx(source: Any, shape: tuple[int, ...]) -> bytes:
    if isinstance(source, torch.jit.ScriptModule):
        raise EngineError("a TorchScript network cannot be exported to ONNX; write engine: openvino or torch")
    program = torch.onnx.export(_exported(source, shape), dynamo=True, verbose=False)
    if program is None:
        raise EngineError("PyTorch exported nothing")
    content: bytes = program.model_proto.SerializeToString()
    return content


def compiled_forward(
    source: Any, shape: tuple[int, ...], device: torch.device, memory_format: torch.memory_format
) -> Forward:
    """By torch.compile, with the weights as constants on a CPU; it needs a C++ compiler, and most of a minute.

    Raises:
        EngineError: it cannot compile the network.
    """
    if isinstance(source, torch.jit.ScriptModule):
        raise EngineError("a TorchScript network cannot be compiled; write engine: openvino or torch")
    with _conversion("torch.compile"):
        from torch._inductor import config

        config.freezing = device.type == "cpu"
        compiled: Forward = torch.compile(source, dynamic=False)
        with torch.inference_mode():
            compiled(torch.zeros(shape, device=device).contiguous(memory_format=memory_format))
    return compiled


@contextmanager
def _conversion(engine: str) -> Iterator[None]:
    """Conversions warn of what is being deprecated within them, log, print, and raise anything."""
    loggers = [logging.getLogger(name) for name in _TALKERS]
    levels = [logger.level for logger in loggers]
    try:
        # What is told, and where, is the process's: one conversion at a time.
        with _lock, warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        extra = f"pip install 'beam-inference[{engine}]', here and on the workers"
        raise EngineError(f"inference.engine: {engine} is not installed ({error}): {extra}") from None
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
