"""What one process holds to do chunks: the stores, the network, the device's lock. No Beam in here.

:meth:`Worker.do` is what the ``InferChunks`` transform does to an element, as a plain method.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tenacity
from numpy.typing import NDArray

from beam_inference.chunk_inference import ChunkResult, Encoding, infer_chunk
from beam_inference.chunk_run import run_chunks
from beam_inference.config import Network
from beam_inference.environment import use_one_heap
from beam_inference.errors import (
    BeamInferenceError,
    ChunkFault,
    DeviceOutOfMemory,
    NonFiniteError,
    PermanentReadError,
    StateError,
    TransientReadError,
    WorkerFault,
)
from beam_inference.files import local_model
from beam_inference.job_parts import normalization, open_input, output_spec, try_network
from beam_inference.outputs import open_output
from beam_inference.predictors import Predictor, load_predictor, load_reference, model_sha256
from beam_inference.resolved_job import Box, ResolvedJob
from beam_inference.state import ChannelStatistics, QuarantineRecord, Receipt, State
from beam_inference.verification import crc32
from beam_inference.volumes import TransientWriteError

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

SICK_AFTER = 3
"""A process whose first chunks, this many of them, all fail in the network may be at fault itself: it is tried."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a job, as its workers need to know it: small, and picklable.

    Attributes:
        job: the resolved job, as JSON.
        state_url: the state folder.
        id: of this launch.
        honour_receipts: skip chunks that have a receipt, also in a replayed bundle.
        allow_pickle: load models that can execute code.
        contract_checked: whether the launcher has run the network; if not, each worker does first.
        chunks_file: URL of a quarantine file or of chunk indices, to do these only; workers read it themselves.
    """

    job: str
    state_url: str
    id: str
    honour_receipts: bool
    allow_pickle: bool
    contract_checked: bool
    chunks_file: str | None = None

    def resolved(self) -> ResolvedJob:
        """The job."""
        return ResolvedJob.model_validate_json(self.job)

    def state(self) -> State:
        """The job's state folder, with its receipts and its quarantine."""
        job = self.resolved()
        return State(self.state_url, job.config.storage).of(job)


class Record(NamedTuple):
    """What became of a chunk: ``outcome`` is "done", "skipped" (it had a receipt) or "quarantined"."""

    chunk: int
    outcome: str
    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    infer_seconds: float = 0.0
    write_seconds: float = 0.0
    uniform_patches: int = 0


class _Cutout(NamedTuple):
    array: NDArray[Any]
    seconds: float
    attempts: int


class _Core(NamedTuple):
    result: ChunkResult
    read: _Cutout  # its array dropped
    read_bytes: int
    seconds: float
    attempts: int


class Worker:
    """Opens all that a job needs, once per process; harness threads share it and take turns on the device."""

    def __init__(self, launch: Launch) -> None:
        use_one_heap()
        self.launch = launch
        self.job = launch.resolved()
        self.state = launch.state()
        self._input = open_input(self.job.config, self.job.cached_input_bytes)
        output = open_output(output_spec(self.job))
        if output is None:
            raise WorkerFault(f"the output {self.job.config.output.path} is gone: it was there at launch")
        self._output = output
        self._normalize = normalization(self.job.config, self._input.dtype)
        model = self._model()
        self._predictor = load_predictor(model, self.job.config.inference, allow_pickle=launch.allow_pickle)
        found = {**self._predictor.describe()}
        if found != self.job.engine:
            raise WorkerFault(
                f"this worker's engine is {found}, the job was launched with {self.job.engine}: its output would "
                "differ. Use one image for launcher and workers."
            )
        if not launch.contract_checked:
            inference, allow_pickle = self.job.config.inference, launch.allow_pickle
            self._try_network(load_reference(model, inference, allow_pickle=allow_pickle))
        self._stop, self._stop_known_until = False, 0.0
        self._run_of: dict[int, int] = {}  # chunks under way, and the first chunk of their run
        self._device_lock = threading.Lock()
        self._batch_size = self.job.config.inference.patches_per_call
        self._encoding = Encoding(np.dtype(self.job.config.output.dtype), self.job.config.output.value_range)
        self._answers: dict[tuple[float, ...], Any] = {}
        self._failed_at_start: list[str] | None = []  # None once a chunk has passed the network

    def _model(self) -> Network:
        """The network's files, on this machine, and the very ones that the job was launched with."""
        model = local_model(self.job.config.model, self.job.config.storage, self.job.model_sha256)
        found = model_sha256(model)
        if found != self.job.model_sha256:
            raise WorkerFault(
                f"the network's files have the sha256 {found}, the job was launched with {self.job.model_sha256}: they "
                "were changed since, or this machine has others."
            )
        return model

    def do(self, indices: Sequence[int]) -> Iterator[Record]:
        """Do a run of chunks; one record per chunk, each when it is durable.

        Raises:
            WorkerFault: this process cannot go on; chunks done so far have their receipts.
        """
        self._run_of.update(dict.fromkeys(indices, indices[0]))
        start, outcomes = time.perf_counter(), Counter[str]()
        for record in self._do(indices):
            outcomes[record.outcome] += 1
            yield record
        seconds = time.perf_counter() - start
        told = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "stopped before its first"
        extra = {**self._about(indices[0]), "seconds": round(seconds, 3), "outcomes": dict(outcomes)}
        logger.info("run of %d chunks from %d: %s", len(indices), indices[0], told, extra=extra)
        for index in indices:
            self._run_of.pop(index, None)

    def _do(self, indices: Sequence[int]) -> Iterator[Record]:
        receipts = self.state.read_receipts(indices) if self.launch.honour_receipts else []
        yield from map(self._done_before, receipts)
        done = {receipt.chunk for receipt in receipts}
        yield from run_chunks(
            [index for index in indices if index not in done],
            self._read,
            self._infer,
            self._write,
            self._quarantine,
            self._should_stop,
        )

    def _should_stop(self) -> bool:
        """Asked before every chunk, and looked up once a second: a request to the store is not free."""
        if time.monotonic() >= self._stop_known_until and not self._stop:
            self._stop = self.state.stop_requested(self.launch.id)
            self._stop_known_until = time.monotonic() + 1
        return self._stop

    def _about(self, index: int) -> dict[str, object]:
        """What a structured log tells beside a message about a chunk."""
        return {
            "job": self.job.fingerprint[:16],
            "launch": self.launch.id,
            "run": self._run_of.get(index, index),
            "chunk": index,
        }

    def _done_before(self, receipt: Receipt) -> Record:
        if receipt.fingerprint != self.job.fingerprint:
            raise StateError(
                f"{self.state.url} holds a receipt of another job for chunk {receipt.chunk} (fingerprint "
                f"{receipt.fingerprint[:12]}, expected {self.job.fingerprint[:12]}). Give this job its own state_path."
            )
        # A bundle that is tried again finds its own first attempt's work: that is done, not skipped.
        return Record(receipt.chunk, "done" if receipt.launch == self.launch.id else "skipped")

    def _read(self, index: int) -> _Cutout:
        work, config = self.job.plan.work(index), self.job.config
        start = time.perf_counter()

        def cutout() -> NDArray[Any]:
            return self._input.cutout(work.input_box, config.input.fill, config.input.fill_value)

        array, attempts = self._attempt(cutout, index, "read", lambda e: isinstance(e, TransientReadError))
        return _Cutout(array, time.perf_counter() - start, attempts)

    def _infer(self, index: int, cutout: _Cutout) -> _Core:
        work, config = self.job.plan.work(index), self.job.config

        def core() -> ChunkResult:
            try:
                result = infer_chunk(
                    cutout.array,
                    work,
                    self._predictor,
                    self._normalize,
                    config.model.output_channels,
                    self._batch_size,
                    self._encoding,
                    self._answers,
                )
            except NonFiniteError:
                raise NonFiniteError(_explain_non_finite(cutout.array)) from None
            self._batch_size = result.batch_size  # what was too much for the device once is not tried again
            return result

        with self._device_lock:
            start = time.perf_counter()  # waiting for the device is not using it
            try:
                result, attempts = self._attempt(core, index, "infer", lambda e: not isinstance(e, BeamInferenceError))
            except DeviceOutOfMemory as error:
                raise WorkerFault(str(error)) from error
            except ChunkFault as fault:
                self._judge_own_health(fault, cutout.array)
                raise
            self._failed_at_start = None
        return _Core(
            result,
            cutout._replace(array=np.empty(0)),
            cutout.array.nbytes,
            time.perf_counter() - start,
            attempts,
        )

    def _write(self, index: int, core: _Core) -> Record:
        box = self.job.plan.chunks.core_box(index)
        start = time.perf_counter()
        array = core.result.core
        statistics = [ChannelStatistics.of(channel) for channel in array]
        checksum = crc32(array)
        _, attempts = self._attempt(
            lambda: self._output.write(box, array), index, "write", lambda e: isinstance(e, TransientWriteError)
        )
        seconds = time.perf_counter() - start
        self.state.write_receipt(
            Receipt(
                chunk=index,
                box=Box.of(box),
                crc32=checksum,
                channels=statistics,
                batch_size=core.result.batch_size,
                uniform_patches=core.result.uniform_patches,
                seconds={"read": core.read.seconds, "infer": core.seconds, "write": seconds},
                attempts={"read": core.read.attempts, "infer": core.attempts, "write": attempts},
                finished_at=datetime.now(UTC),
                worker=f"{platform.node()}:{os.getpid()}",
                launch=self.launch.id,
                fingerprint=self.job.fingerprint,
            )
        )
        return Record(
            index,
            "done",
            read_bytes=core.read_bytes,
            written_bytes=array.nbytes,
            read_seconds=core.read.seconds,
            infer_seconds=core.seconds,
            write_seconds=seconds,
            uniform_patches=core.result.uniform_patches,
        )

    def _quarantine(self, index: int, fault: ChunkFault) -> Record:
        work = self.job.plan.work(index)
        extra = {**self._about(index), "stage": fault.stage, "attempt": fault.attempts}
        logger.warning("chunk %d %s quarantined: %s", index, work.core_box, fault, extra=extra)
        self.state.write_quarantine(
            QuarantineRecord(
                chunk=index,
                box=Box.of(work.core_box),
                input_box=Box.of(work.input_box),
                stage=fault.stage,
                cause=str(fault),
                attempts=fault.attempts,
                launch=self.launch.id,
                fingerprint=self.job.fingerprint,
            )
        )
        return Record(index, "quarantined")

    def _attempt(
        self, action: Callable[[], Value], index: int, stage: str, is_transient: Callable[[BaseException], bool]
    ) -> tuple[Value, int]:
        """The action's value and the number of attempts; transient trouble is tried again, with backoff and jitter.

        Raises:
            ChunkFault: reading or inferring failed for good.
            WorkerFault, DeviceOutOfMemory: as the action raises them; not the chunk's fault.
        """
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.job.config.job.attempts),
            wait=tenacity.wait_exponential_jitter(initial=0.1, max=20, jitter=0.2),
            retry=tenacity.retry_if_exception(is_transient),
            before_sleep=lambda state: logger.warning(
                "chunk %d: %s failed, attempt %d: %s",
                index,
                stage,
                state.attempt_number,
                _first_line(state.outcome.exception() if state.outcome else None),
                extra={**self._about(index), "stage": stage, "attempt": state.attempt_number},
            ),
            reraise=True,
        )
        try:
            value = retrying(action)
        except (WorkerFault, DeviceOutOfMemory, StateError):
            raise
        except Exception as error:
            attempts = int(retrying.statistics["attempt_number"])
            expected = isinstance(error, (PermanentReadError, TransientReadError, BeamInferenceError))
            cause = str(error) if expected else f"{type(error).__name__}: {_first_line(error)}"
            raise ChunkFault(cause, stage, attempts) from error
        return value, int(retrying.statistics["attempt_number"])

    def _judge_own_health(self, fault: ChunkFault, cutout: NDArray[Any]) -> None:
        """Raise if it is likelier that this process is sick than that all its first chunks are bad."""
        if self._failed_at_start is None or not _all_finite(cutout):
            return
        self._failed_at_start.append(str(fault))
        if len(self._failed_at_start) < SICK_AFTER:
            return
        try:
            self._try_network()
        except Exception:
            raise WorkerFault(
                f"the first {SICK_AFTER} chunks of this process all failed in the network, the last with: {fault}; "
                "and so does a patch from the middle of the ROI. The network or the device is at fault, not the chunks."
            ) from fault
        self._failed_at_start = None  # the network works: these chunks are bad

    def _try_network(self, reference: Predictor | None = None) -> None:
        try_network(self._predictor, self.job.config, self._input, self.job.plan, reference)


def _all_finite(array: NDArray[Any]) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _explain_non_finite(cutout: NDArray[Any]) -> str:
    if _all_finite(cutout):
        return "the network returned NaN or infinite values for finite input"
    return f"the input holds {int((~np.isfinite(cutout)).sum())} NaN or infinite voxels, and so does the result"


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]
