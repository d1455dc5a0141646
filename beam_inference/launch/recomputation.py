"""Some chunks of a job computed again, from its input, and compared with the output in every bit.

A chunk is computed as a worker does it that has lost all its neighbours' sums: its input is read,
every patch that touches it is computed, sums are added in the order of the job, and operators, mask
and the output's encoding follow. So the bits are those of either strategy. Nothing is written.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.config.job import OUTPUT
from beam_inference.engines.loading import load_predictor, quantize_network
from beam_inference.engines.predictor import Predictor
from beam_inference.errors import (
    BeamInferenceError,
    ChunkFault,
    ConfigError,
    StateError,
    WorkerFault,
)
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.exact_sums import bound_after_trial
from beam_inference.geometry.partition import in_runs
from beam_inference.geometry.sampling import sample_chunks
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER
from beam_inference.job.identity import ROUNDING
from beam_inference.job.messages import Launch
from beam_inference.job.parts import open_input, output_spec
from beam_inference.job.recomputed import Recomputation
from beam_inference.job.records import Receipt
from beam_inference.job.resolved_job import NUMERICS, ResolvedJob
from beam_inference.job.state import State, default_state_url
from beam_inference.models.fetch import local_model
from beam_inference.models.trust import Trust
from beam_inference.volumes.folders import delete_folder
from beam_inference.volumes.outputs import create_output
from beam_inference.worker.chunk_steps import ChunkSteps
from beam_inference.worker.open_job import OpenJob, OpenOutput, open_job
from beam_inference.worker.previews import OpenPreview
from beam_inference.worker.trial import calibration_samples, find_prediction_bounds
from beam_inference.worker.worker import make_chunk_inference

if TYPE_CHECKING:
    from collections.abc import Iterator

_SEED_BITS = 32
_MOST_CHUNKS = 10**6
"""Most chunks that are computed again; at a second for each they take eleven days."""
_MOST_TIMES_USUAL = 2.0**6
"""How far a recorded prediction bound may lie above that of a trial: sums lose six bits of 24."""
_LAUNCH = "verify"
"""Name of the launch in log lines; nothing is recorded under it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """How a chunk differs from the output.

    Attributes:
        text: words on it.
        is_rounding: whether it is as small as batches of another size can make it.
    """

    text: str
    is_rounding: bool = False


def recompute_chunks(
    job: ResolvedJob,
    state: State,
    share: float,
    *,
    seed: int | None = None,
    trust: Trust = Trust.NOTHING,
    progress: Callable[[int], None] | None = None,
) -> Recomputation:
    """Compute a random share of a job's finished chunks again, and compare bits with the output.

    Args:
        job: the job, with its output where it is now.
        state: its state folder.
        share: share of the chunks, above 0 and at most 1; at least one chunk is drawn, if any is
            done.
        seed: seed of the draw; None for a new one.
        trust: which code that the network's files carry may run.
        progress: is called with the number of chunks computed so far.

    Raises:
        UserError: the chunks cannot be computed here: input, network or engine are not those of the
            job, or are absent.
    """
    seed = secrets.randbits(_SEED_BITS) if seed is None else seed

    def done_among(drawn: Iterable[int]) -> dict[int, Receipt]:
        # those that cannot be understood are told of by the comparison of receipts
        return {
            receipt.chunk: receipt
            for some in in_runs(drawn, CHUNKS_PER_FOLDER)
            for receipt in state.of(job).read_receipts(some)
        }

    receipts = _draw(job, share, seed, done_among)
    compared = _Comparison([], [])
    if receipts:
        with _refusing_faults():
            recomputer = _Recomputer(_open_doubted(job, state.url, trust))

            def is_explained(chunk: int) -> bool:
                is_mixed = job.config.inference.mixed_devices
                return is_mixed or not recomputer.has_full_batches(receipts[chunk])

            compared = recomputer.compare(receipts, is_explained, progress)
    return Recomputation(share, seed, list(receipts), compared.different, compared.undecided)


def recompute_output(
    job: ResolvedJob,
    share: float,
    *,
    seed: int | None = None,
    trust: Trust = Trust.NOTHING,
    is_other_engine: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Recomputation:
    """Compute a random share of a job's chunks again, without its state, and compare the bits.

    Args:
        job: the job, with its output where it is now.
        share: share of the chunks, above 0 and at most 1; at least one chunk is drawn.
        seed: seed of the draw; None for a new one.
        trust: which code that the network's files carry may run.
        is_other_engine: whether the output was computed by another version of the engine, so that
            differences as small as rounding decide nothing.
        progress: is called with the number of chunks computed so far.

    Raises:
        UserError: the chunks cannot be computed here, or are too many.
    """
    seed = secrets.randbits(_SEED_BITS) if seed is None else seed
    count = job.plan.chunks.count
    if count * share > _MOST_CHUNKS:
        raise ConfigError(
            f"--sample {share:g} of {count:,} chunks are more than the {_MOST_CHUNKS:,} that this "
            "process computes one after the other: take a smaller share"
        )
    chunks = _draw(job, share, seed, list)
    with _refusing_faults():
        recomputer = _Recomputer(_open_doubted(job, default_state_url(job.config), trust))
        compared = recomputer.compare(chunks, lambda _: is_other_engine, progress)
    return Recomputation(share, seed, chunks, compared.different, compared.undecided)


def check_agreement(
    job: ResolvedJob, state: State, witness: Receipt, *, trust: Trust = Trust.NOTHING
) -> None:
    """Compute what a receipt says is written, with the engine of now, and compare it with that.

    Args:
        job: the job, with the engine of this machine.
        state: its state folder.
        witness: a receipt, or one of the first stage that names written boxes.
        trust: which code that the network's files carry may run.

    Raises:
        StateError: it differs by more than engines may, or cannot be computed here.
    """
    with _refusing_faults():
        recomputer = _Recomputer(_open(job, state.url, trust=trust))
        fault = recomputer.fault_within(witness)
    if fault is not None and not fault.is_rounding:
        raise StateError(
            f"{state.url}: another engine has begun this job, and "
            f"{job.engine['engine']} on {job.config.inference.device} does not agree with it to "
            f"{ROUNDING:g} of the values. Chunk {witness.chunk}: {fault.text}. Choose another "
            "inference.engine, device or precision here, or leave the job to the machines that "
            "began it."
        )


Drawn = TypeVar("Drawn", bound=Collection[int])


def _draw(
    job: ResolvedJob, share: float, seed: int, choose: Callable[[Iterable[int]], Drawn]
) -> Drawn:
    """What is chosen of a random share of the chunks; of a larger one, if nothing is."""
    while True:
        chosen = choose(sample_chunks(job.plan.chunks, share, seed))
        if chosen or share >= 1:
            return chosen
        share = min(1.0, 2 * share)


def _open_doubted(job: ResolvedJob, state_url: str, trust: Trust) -> OpenJob:
    """Open a job of which only the network itself shows whether what is recorded is right.

    Raises:
        StateError: it is not.
        The errors of :func:`_open`.
    """
    made_again = _make_network_again(job, trust)
    opened = _open(job, state_url, trust=trust, predictor=made_again, is_doubted=True)
    _check_bounds(opened)
    return opened


def _check_bounds(opened: OpenJob) -> None:
    """Refuse recorded prediction bounds so large that they would have rounded values away.

    Raises:
        StateError: one is, and the job file does not state it.
        ModelContractError: the network gives no numbers.
    """
    config = opened.job.config
    stated = config.model.stated_bounds
    recorded = opened.job.sum_bounds
    if None not in stated or not recorded:
        return
    found = find_prediction_bounds(
        opened.predictor, config, opened.input, opened.job.plan, opened.batch_size
    )
    # where nothing could be tried, the launch has taken the bound from the range of values
    of_output = bound_after_trial(max(map(abs, config.output.value_range or (0.0,))))
    for bound, written, of_trial in zip(recorded, stated, found, strict=True):
        usual = max(of_trial, of_output)
        if written is None and bound > _MOST_TIMES_USUAL * usual:
            raise StateError(
                f"the recorded prediction_bound, {bound:g}, is far above the {usual:g} that the "
                "network's values here need: sums were rounded to multiples of "
                f"{bound * 2.0**-23:.2g}, and nothing smaller was kept. If that was meant, write "
                "it as model.prediction_bound; else compute every chunk again: run with --overwrite"
            )


def _make_network_again(job: ResolvedJob, trust: Trust) -> Predictor | None:
    """Make the network of integers of a job in precision int8 again, which others may have written.

    Returns:
        The network, loaded; None of a job in another precision.

    Raises:
        StateError: what NNCF makes of the network and the input here is not what the job has run.
        UserError: it cannot be made.
    """
    if job.quantized_sha256 is None:
        return None
    config = job.config
    samples = calibration_samples(config, open_input(config), job.plan)
    model = local_model(config.model, config.storage, job.model_sha256)
    quantized = quantize_network(model, config.inference, samples, trust=trust)
    if hashlib.sha256(quantized).hexdigest() != job.quantized_sha256:
        raise StateError(
            "nothing can be recomputed: NNCF makes another network of integers of the job's "
            "network and input here than the job has run. Other versions of NNCF and OpenVINO, or "
            "another processor, may explain that, or a roi that was smaller at first; so may "
            "somebody else's network in its place. Give this command where the job was launched"
        )
    return load_predictor(model, config.inference, trust=trust, quantized=quantized)


def _open(
    job: ResolvedJob,
    state_url: str,
    *,
    trust: Trust,
    predictor: Predictor | None = None,
    is_doubted: bool = False,
) -> OpenJob:
    """Open the job as a worker does.

    Args:
        job: the job.
        state_url: URL of its state folder.
        trust: which code that the network's files carry may run.
        predictor: the network, if it is loaded.
        is_doubted: whether the engine is compared with PyTorch, as at a launch.

    Raises:
        StateError: the rules of computing are others.
        The errors of :func:`beam_inference.worker.open_job.open_job`.
    """
    if job.numerics != NUMERICS:
        raise StateError(
            f"nothing can be recomputed: the job was computed by rules of version {job.numerics}, "
            f"and this version of beam-inference follows version {NUMERICS}, which gives other "
            "bits. Use the version in versions of job.json."
        )
    launch = Launch(
        job=job.model_dump_json(),
        state_url=state_url,
        id=_LAUNCH,
        honour_receipts=False,
        trust=trust,
        threads_per_process=1,
        contract_checked=not is_doubted,
    )
    return open_job(launch, predictor)


@contextmanager
def _refusing_faults() -> Iterator[None]:
    """Raise a fault of this process as something to be mended, since no runner will retry."""
    try:
        yield
    except WorkerFault as fault:
        raise StateError(f"nothing can be recomputed here: {fault}") from fault


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What was found of some chunks; see :class:`Recomputation`."""

    different: list[str]
    undecided: list[str]


class _Recomputer:
    """Computes chunks of an opened job, and compares them with its output."""

    def __init__(self, opened: OpenJob) -> None:
        self._opened = opened
        self._plan = opened.job.plan
        self._inference = make_chunk_inference(opened)
        self._steps = ChunkSteps(opened, self._inference)
        self._quantum = 4 * 2.0**-23 * max(opened.job.sum_bounds, default=1.0)

    def compare(
        self,
        chunks: Iterable[int],
        is_explained: Callable[[int], bool],
        progress: Callable[[int], None] | None,
    ) -> _Comparison:
        """Compute chunks again, one after the other.

        Args:
            chunks: their numbers.
            is_explained: whether something known can make a chunk differ by as little as rounding.
            progress: is called with the number of chunks computed so far.
        """
        found = _Comparison([], [])
        for number, chunk in enumerate(chunks, 1):
            fault = self.fault_of(chunk)
            if fault is not None:
                is_undecided = fault.is_rounding and is_explained(chunk)
                lines = found.undecided if is_undecided else found.different
                lines.append(f"chunk {chunk} {self._plan.chunks.core_box(chunk)}: {fault.text}")
            if progress:
                progress(number)
        return found

    def has_full_batches(self, receipt: Receipt) -> bool:
        """Whether a chunk was computed, then and now, with the job's patches per call."""
        receipts = [receipt]
        exchange = self._opened.job.exchange
        if exchange is not None:
            contributors = exchange.contributors(receipt.chunk)
            receipts += self._opened.state.read_sums(contributors)
        sizes = {self._inference.batch_size, *(each.batch_size for each in receipts)}
        return sizes == {self._opened.job.config.inference.patches_per_call}

    def fault_of(self, index: int) -> Fault | None:
        """How a chunk differs from the output; None if it does not."""
        box = self._plan.chunks.core_box(index)
        try:
            arrays = self._compute(index, box)
        except ChunkFault as fault:
            return Fault(f"it cannot be computed again: {fault}")
        faults = [
            found
            for output, array in zip(self._opened.outputs, arrays, strict=True)
            if (found := self._fault_in(output, box, array)) is not None
        ]
        faults += [
            found
            for preview in self._opened.previews
            if (found := self._fault_in_preview(preview, box, arrays[preview.source])) is not None
        ]
        return min(faults, key=lambda each: each.is_rounding, default=None)  # the worst of them

    def fault_within(self, receipt: Receipt) -> Fault | None:
        """How the boxes that a receipt names differ from what is computed; None if none does."""
        box = self._plan.chunks.core_box(receipt.chunk)
        try:
            arrays = self._compute(receipt.chunk, box)
        except ChunkFault as fault:
            return Fault(f"it cannot be computed here: {fault}")
        faults = [
            found
            for output, array in zip(self._opened.outputs, arrays, strict=True)
            for part in receipt.parts_by_output.get(output.key, ())
            if (found := self._fault_in(output, part.box, array[_part(part.box, box)])) is not None
        ]
        return min(faults, key=lambda each: each.is_rounding, default=None)

    def _fault_in_preview(
        self, preview: OpenPreview, box: BoundingBox, array: AnyArray
    ) -> Fault | None:
        """How the preview of what was computed of a box differs from that which is stored."""
        small = preview.box_of(box)
        try:
            found = preview.volume.read(small)
        except BeamInferenceError as error:
            return Fault(f"{preview.key}: {error}")
        difference = find_difference(preview.make(array, box), found, small, self._quantum)
        if difference is None:
            return None
        return Fault(f"{preview.key}: {difference.text}", difference.is_rounding)

    def _fault_in(self, output: OpenOutput, box: BoundingBox, array: AnyArray) -> Fault | None:
        """How what was computed of a box differs from an output; None if it does not."""
        config = self._opened.job.config.by_output[output.key]
        name = "" if output.key == OUTPUT else f"{output.key}: "
        try:
            found = output.volume.read(box)
        except BeamInferenceError as error:
            return Fault(f"{name}{error}")
        expected = self._as_stored(output, box, array)
        difference = find_difference(expected, found, box, self._quantum)
        if difference is None:
            return None
        if not found.any():
            text = f"{difference.text}; the output is zero throughout, as where nothing is written"
            difference = replace(difference, text=text)
        is_rounding = difference.is_rounding and not config.gives_labels
        return Fault(f"{name}{difference.text}", is_rounding)

    def _compute(self, index: int, box: BoundingBox) -> Sequence[AnyArray]:
        if self._steps.is_masked(index):
            return self._opened.postprocessing.blank(box)
        read = self._steps.read(index, self._plan.work(index).input_box)
        return self._steps.infer_core(index, read).arrays

    def _as_stored(self, output: OpenOutput, box: BoundingBox, array: AnyArray) -> AnyArray:
        """The values that read back once an array is written: others, where blocks are lossy."""
        if not output.is_lossy:
            return array
        spec = replace(
            output_spec(self._opened.job, output.key),
            url=f"memory://recomputed/{secrets.token_hex(8)}",
        )
        try:
            volume = create_output(spec)
            volume.write(box, array)
            return volume.read(box)
        finally:
            delete_folder(spec.url, spec.storage)


def _part(part: BoundingBox, box: BoundingBox) -> tuple[slice, ...]:
    return (slice(None), *part.slices_in(box))


def find_difference(
    expected: AnyArray, found: AnyArray, box: BoundingBox, quantum: float
) -> Fault | None:
    """How two arrays of a box differ in bits; None if they do not.

    Args:
        expected: what was computed, (C, Z, Y, X).
        found: what is stored.
        box: where they lie.
        quantum: what sums of predictions may be rounded by, however small they are.
    """
    differs = _bits(expected) != _bits(found)
    count = int(np.count_nonzero(differs))
    if not count:
        return None
    ours = expected[differs].astype(np.float64)
    theirs = found[differs].astype(np.float64)
    largest = float(np.abs(ours - theirs).max())
    place = np.argwhere(differs)[0]
    voxel = [int(offset) + start for offset, start in zip(place[1:], box.start, strict=True)]
    text = (
        f"{count} of {differs.size} values are not those computed again, the first in channel "
        f"{place[0]} at {voxel}; they differ by up to {largest:g}"
    )
    if expected.dtype.kind in "iu":
        return Fault(text, is_rounding=largest <= 1)
    magnitude = float(np.abs(expected, dtype=np.float64).max())
    return Fault(text, is_rounding=largest <= quantum + ROUNDING * magnitude)


def _bits(array: AnyArray) -> NDArray[np.generic]:
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")
