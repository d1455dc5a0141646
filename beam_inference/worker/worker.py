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
from datetime import UTC, datetime
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.job import Network
from beam_inference.engines.loading import CPU_ENGINES, Predictor, load_predictor, load_reference
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.engines.trial import ContractReport, settle
from beam_inference.environment import use_one_heap
from beam_inference.errors import (
    BeamInferenceError,
    ChunkFault,
    DeviceOutOfMemory,
    NonFiniteError,
    StateError,
    TransientReadError,
    WorkerFault,
)
from beam_inference.geometry.bounding_box import BoundingBox, grown_shape
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.seam_sums import add_sums
from beam_inference.job.messages import Launch, Record
from beam_inference.job.parts import cutout, normalization, open_input, output_spec
from beam_inference.job.records import Part, QuarantineRecord, Receipt
from beam_inference.job.state import StopRequest
from beam_inference.models.fetch import local_model
from beam_inference.models.files import model_sha256
from beam_inference.volumes.outputs import LOSSY, open_output
from beam_inference.volumes.volume import TransientWriteError, Volume
from beam_inference.worker.chunk_inference import infer_chunk
from beam_inference.worker.chunk_run import run_chunks
from beam_inference.worker.finishing import Finishing
from beam_inference.worker.retries import attempt
from beam_inference.worker.trial import try_network

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

SICK_AFTER = 3
"""A process whose first chunks, this many of them, all fail in the network may be at fault itself: it is tried."""


class Cutout(NamedTuple):
    """What a chunk reads, (input channels, Z, Y, X), of the box ``frame``; ``uploaded`` gives it as a device array."""

    array: NDArray[Any]
    uploaded: Callable[[], Any]
    frame: BoundingBox
    seconds: float
    attempts: int


class Core(NamedTuple):
    """What was computed for a chunk: values to write, or sums."""

    array: NDArray[Any]
    batch_size: int
    uniform_patches: int
    read_bytes: int
    seconds: dict[str, float]
    attempts: dict[str, int]


class Worker:
    """Opens all that a job needs, once per process; harness threads share it and take turns on the device."""

    def __init__(self, launch: Launch) -> None:
        use_one_heap()
        self.launch = launch
        self.job = launch.resolved()
        self.state = launch.state()
        self._input = open_input(
            self.job.config, self.job.cached_input_bytes(launch.threads_per_process)
        )
        output, blank = (
            open_output(output_spec(self.job), keep_blank=keep) for keep in (True, False)
        )
        if output is None or blank is None:
            raise WorkerFault(
                f"the output {self.job.config.output.path} is gone: it was there at launch"
            )
        self._output = output
        self._blank_output = blank
        self.finishing = Finishing(self.job)
        self._normalize = normalization(self.job.config, self._input.dtype)
        model = self._model()
        inference = self.job.config.inference
        self._predictor = load_predictor(model, inference, allow_pickle=launch.allow_pickle)
        found = self._predictor.description
        if found != self.job.engine:
            raise WorkerFault(
                f"this worker's engine is {found}, the job was launched with {self.job.engine}: "
                "its output would differ. Use one image for launcher and workers."
            )
        self._batch_size = inference.patches_per_call
        if not launch.contract_checked:
            report = self._try_network(
                load_reference(model, inference, allow_pickle=launch.allow_pickle)
            )
            self._batch_size = report.batch_size
        # trying it has settled it, too
        elif inference.device == "cpu" and inference.engine not in CPU_ENGINES:
            patch = grown_shape(inference.patch_shape, self.job.plan.crop_margin)
            settle(self._predictor, (inference.patches_per_call, self.job.input_channels, *patch))
        self.should_stop = StopRequest(self.state, launch.id)
        self._run_of: dict[int, int] = {}  # chunks under way, and the first chunk of their run
        self._device_lock = threading.Lock()
        self._answers: dict[tuple[float, ...], Any] = {}
        self._failed_at_start: list[str] | None = []  # None once a chunk has passed the network

    def _model(self) -> Network:
        """The network's files, on this machine, and the very ones that the job was launched with."""
        model = local_model(self.job.config.model, self.job.config.storage, self.job.model_sha256)
        found = model_sha256(model)
        if found != self.job.model_sha256:
            raise WorkerFault(
                f"the network's files have the sha256 {found}, the job was launched with "
                f"{self.job.model_sha256}: they were changed since, or this machine has others."
            )
        return model

    def do(self, indices: Sequence[int]) -> Iterator[Record]:
        """Do a run of chunks, each without its neighbours; one record per chunk, when it is durable.

        Raises:
            WorkerFault: this process cannot go on; chunks done so far have their receipts.
        """
        yield from self.logged(indices, self._do(indices))

    def logged(self, indices: Sequence[int], records: Iterator[Record]) -> Iterator[Record]:
        """The records of a run under way, and a line in the log at its end."""
        self._run_of.update(dict.fromkeys(indices, indices[0]))
        start = time.perf_counter()
        outcomes = Counter[str]()
        for record in records:
            outcomes[record.outcome] += 1
            yield record
        seconds = time.perf_counter() - start
        told = (
            ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            or "stopped before its first"
        )
        extra = {
            **self._about(indices[0]),
            "seconds": round(seconds, 3),
            "outcomes": dict(outcomes),
        }
        logger.info("run of %d chunks from %d: %s", len(indices), indices[0], told, extra=extra)
        for index in indices:
            self._run_of.pop(index, None)

    def _do(self, indices: Sequence[int]) -> Iterator[Record]:
        receipts = self.receipts(indices)
        yield from map(self.done_before, receipts.values())
        masked = [index for index in indices if index not in receipts and self.is_masked(index)]
        yield from (self.write_blank(index) for index in masked if not self.should_stop())
        yield from run_chunks(
            [index for index in indices if index not in receipts and index not in masked],
            lambda index: self.read(index, self.job.plan.work(index).input_box),
            self.whole_core,
            self._write,
            self.quarantine,
            self.should_stop,
        )

    def receipts(self, indices: Sequence[int]) -> dict[int, Receipt]:
        """Those to be honoured, by chunk.

        Raises:
            StateError: one is of another job.
        """
        receipts = self.state.read_receipts(indices) if self.launch.honour_receipts else []
        for receipt in receipts:
            if receipt.fingerprint != self.job.fingerprint:
                raise StateError(
                    f"{self.state.url} holds a receipt of another job for chunk {receipt.chunk} "
                    f"(fingerprint {receipt.fingerprint[:12]}, expected "
                    f"{self.job.fingerprint[:12]}). Give this job its own state_path."
                )
        return {receipt.chunk: receipt for receipt in receipts}

    def done_before(self, receipt: Receipt) -> Record:
        """The record of a chunk that has a receipt."""
        # A bundle that is tried again finds its own first attempt's work: that is done, not
        # skipped.
        return Record(receipt.chunk, "done" if receipt.launch == self.launch.id else "skipped")

    def _about(self, index: int) -> dict[str, object]:
        """What a structured log tells beside a message about a chunk."""
        return {
            "job": self.job.fingerprint[:16],
            "launch": self.launch.id,
            "run": self._run_of.get(index, index),
            "chunk": index,
        }

    def read(self, index: int, box: BoundingBox) -> Cutout:
        """Cut out what a chunk reads, and send it on to the device. Raises ChunkFault if it cannot be read."""
        start = time.perf_counter()
        array, attempts = self._attempt(
            lambda: cutout(self.job.config, self._input, box),
            index,
            "read",
            lambda e: isinstance(e, TransientReadError),
        )
        seconds = time.perf_counter() - start
        return Cutout(array, self._predictor.device.begin_upload(array), box, seconds, attempts)

    def whole_core(self, index: int, cutout: Cutout) -> Core:
        """A chunk's core as it is to be written, from every patch that touches it.

        With ``seams: exchange`` the patches are added up by owner, and these sums in the owners'
        order, which gives the bits that the exchange would have given.
        """
        plan = self.job.plan
        core_box = plan.chunks.core_box(index)
        if plan.exchange is not None:
            works = plan.exchange.contributions(index)
            channels = self.job.config.model.output_channels
            core = self.infer(
                index,
                cutout,
                works,
                AS_COMPUTED,
                lambda sums: add_sums(core_box, works, sums, channels),
            )
            return core._replace(array=self.finishing.encoded(core.array, core_box, core_box))
        work = plan.work(index)
        core = self.infer(index, cutout, [work], self.finishing.on_device, next)
        return core._replace(array=self.finishing.finished(core.array, work.core_box, core_box))

    def is_masked(self, index: int) -> bool:
        """Whether the output is wanted nowhere in a chunk."""
        return self.finishing.is_masked(self.job.plan.chunks.core_box(index))

    def write_blank(self, index: int) -> Record:
        """Write a chunk in which the output is wanted nowhere."""
        box = self.job.plan.chunks.core_box(index)
        array = self.finishing.blank(box)
        part, attempts = self.write(index, box, array, self._blank_output)
        batch_size = self.job.config.inference.patches_per_call
        self.state.write_receipt(
            self.receipt(index, [part], batch_size, 0, {}, {"write": attempts})
        )
        return Record(index, "done", 0, array.nbytes)

    def infer(
        self,
        index: int,
        cutout: Cutout,
        works: Sequence[ChunkWork],
        encoding: Encoding,
        together: Callable[[Iterator[NDArray[Any]]], NDArray[Any]],
    ) -> Core:
        """Compute works on a chunk's cutout, one after the other, and put their results together.

        Raises:
            ChunkFault: the network fails on this chunk.
            WorkerFault: it fails on any.
        """
        uniform_patches = 0
        batch_size = self._batch_size
        uploaded = cache(cutout.uploaded)

        def result_of(work: ChunkWork) -> NDArray[Any]:
            nonlocal uniform_patches, batch_size
            here = (slice(None), *work.input_box.slices_in(cutout.frame))
            result = infer_chunk(
                cutout.array[here],
                work,
                self._predictor,
                self._normalize,
                self.job.config.model.output_channels,
                self._batch_size,
                encoding,
                self._answers,
                lambda: uploaded()[here],
            )
            # what was too much once is not tried again
            batch_size = self._batch_size = result.batch_size
            uniform_patches += result.uniform_patches
            return result.core

        def core() -> NDArray[Any]:
            nonlocal uniform_patches
            while True:
                uniform_patches = 0
                try:
                    return together(map(result_of, works))
                except NonFiniteError:
                    raise NonFiniteError(_explain_non_finite(cutout.array)) from None
                except DeviceOutOfMemory:
                    if not self._predictor.device.make_room():
                        raise

        with self._device_lock:
            start = time.perf_counter()  # waiting for the device is not using it
            try:
                array, attempts = self._attempt(
                    core, index, "infer", lambda e: not isinstance(e, BeamInferenceError)
                )
            except DeviceOutOfMemory as error:
                raise WorkerFault(str(error)) from error
            except ChunkFault as fault:
                self._judge_own_health(fault, cutout.array)
                raise
            self._failed_at_start = None
        seconds = {"read": cutout.seconds, "infer": time.perf_counter() - start}
        tried = {"read": cutout.attempts, "infer": attempts}
        return Core(array, batch_size, uniform_patches, cutout.array.nbytes, seconds, tried)

    def _write(self, index: int, core: Core) -> Record:
        box = self.job.plan.chunks.core_box(index)
        start = time.perf_counter()
        part, attempts = self.write(index, box, core.array)
        seconds = core.seconds | {"write": time.perf_counter() - start}
        tried = core.attempts | {"write": attempts}
        self.state.write_receipt(
            self.receipt(index, [part], core.batch_size, core.uniform_patches, seconds, tried)
        )
        return Record(
            index, "done", core.read_bytes, core.array.nbytes, seconds, core.uniform_patches
        )

    def write(
        self, index: int, box: BoundingBox, array: NDArray[Any], output: Volume | None = None
    ) -> tuple[Part, int]:
        """Write whole blocks of a chunk, durably; what was written, and the number of attempts."""
        to = output or self._output

        def written() -> NDArray[Any]:
            to.write(box, array)
            return to.read(box) if self.job.config.output.encoding in LOSSY else array

        try:
            stored, attempts = self._attempt(
                written,
                index,
                "write",
                lambda e: isinstance(e, (TransientWriteError, TransientReadError)),
            )
        except ChunkFault as fault:  # the destination's, not the chunk's
            raise WorkerFault(f"chunk {index} cannot be written, or read back: {fault}") from fault
        return Part.of(box, stored), attempts

    def receipt(
        self,
        index: int,
        parts: list[Part],
        batch_size: int,
        uniform_patches: int,
        seconds: dict[str, float],
        attempts: dict[str, int],
    ) -> Receipt:
        """A receipt of this process's, finished now."""
        return Receipt(
            chunk=index,
            parts=parts,
            batch_size=batch_size,
            uniform_patches=uniform_patches,
            seconds=seconds,
            attempts=attempts,
            finished_at=datetime.now(UTC),
            worker=f"{platform.node()}:{os.getpid()}",
            launch=self.launch.id,
            fingerprint=self.job.fingerprint,
        )

    def quarantine(self, index: int, fault: ChunkFault) -> Record:
        """Record that a chunk cannot be done."""
        work = self.job.plan.work(index)
        core_box = self.job.plan.chunks.core_box(index)
        extra = {**self._about(index), "stage": fault.stage, "attempt": fault.attempts}
        logger.warning("chunk %d %s quarantined: %s", index, core_box, fault, extra=extra)
        self.state.write_quarantine(
            QuarantineRecord(
                chunk=index,
                box=core_box,
                input_box=work.input_box,
                stage=fault.stage,
                cause=str(fault),
                attempts=fault.attempts,
                launch=self.launch.id,
                fingerprint=self.job.fingerprint,
            )
        )
        return Record(index, "quarantined")

    def _attempt(
        self,
        action: Callable[[], Value],
        index: int,
        stage: str,
        is_transient: Callable[[BaseException], bool],
    ) -> tuple[Value, int]:
        """As :func:`~beam_inference.worker.retries.attempt`, with a line in the log for each that failed."""

        def tell(number: int, cause: str) -> None:
            extra = {**self._about(index), "stage": stage, "attempt": number}
            logger.warning(
                "chunk %d: %s failed, attempt %d: %s", index, stage, number, cause, extra=extra
            )

        return attempt(action, self.job.config.job.attempts, stage, is_transient, tell)

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
                f"the first {SICK_AFTER} chunks of this process all failed in the network, the "
                f"last with: {fault}; and so does a patch from the middle of the ROI. The network "
                "or the device is at fault, not the chunks."
            ) from fault
        self._failed_at_start = None  # the network works: these chunks are bad

    def _try_network(self, reference: Predictor | None = None) -> ContractReport:
        return try_network(self._predictor, self.job.config, self._input, self.job.plan, reference)


def _all_finite(array: NDArray[Any]) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _explain_non_finite(cutout: NDArray[Any]) -> str:
    if _all_finite(cutout):
        return "the network returned NaN or infinite values for finite input"
    return (
        f"the input holds {int((~np.isfinite(cutout)).sum())} NaN or infinite voxels, and so does "
        "the result"
    )
