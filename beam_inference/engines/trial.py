"""Tries a network on one batch before a job, and measures its memory."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.arrays import AnyArray
from beam_inference.engines.choice import keeps_memory
from beam_inference.engines.devices import device_peak, start_device_peak
from beam_inference.engines.predictor import Predictor
from beam_inference.environment import (
    avoid_heap,
    bound_memory,
    peak_memory,
    start_peak_memory,
)
from beam_inference.errors import (
    BeamInferenceError,
    DeviceOutOfMemory,
    EngineError,
    ModelContractError,
)
from beam_inference.geometry.bounding_box import grown_shape
from beam_inference.geometry.zyx import Zyx

logger = logging.getLogger(__name__)


SETTLING_CALLS = 2
"""Warm-up calls; after a single one PyTorch still allocates occasionally."""

_SAMPLED_VALUES = 1 << 16
"""About how many values of an answer are compared with those of the second one."""


@dataclass(frozen=True, slots=True)
class ChannelDistances:
    """How far answers are from others, channel by channel.

    A channel of small values beside one of large values, such as a probability beside a distance,
    would be lost among these.

    Attributes:
        typical: root mean square of each channel over a patch, the largest of those compared.
        magnitude: the largest magnitude of each channel.
    """

    typical: NDArray[np.float64]
    magnitude: NDArray[np.float64]

    @classmethod
    def between(cls, ours: AnyArray, theirs: AnyArray, channel_axis: int) -> ChannelDistances:
        """The distances of answers from others, ``theirs``."""
        other_axes = tuple(axis for axis in range(theirs.ndim) if axis != channel_axis)
        with np.errstate(invalid="ignore"):  # infinity less infinity
            difference = np.subtract(ours, theirs, dtype=np.float64)
        difference[ours == theirs] = 0
        squares = np.square(difference)
        typical = np.sqrt(squares.mean(other_axes))
        magnitude = np.abs(theirs).max(other_axes).astype(np.float64)
        return cls(np.nan_to_num(typical, nan=np.inf, posinf=np.inf), np.nan_to_num(magnitude))

    def joined(self, other: ChannelDistances | None) -> ChannelDistances:
        """The larger ones of these and others."""
        if other is None:
            return self
        return ChannelDistances(
            np.maximum(self.typical, other.typical), np.maximum(self.magnitude, other.magnitude)
        )

    def worst(self, tolerance: float) -> tuple[float, float]:
        """The channel that is farthest off for what is allowed: its ``typical``, and that.

        Args:
            tolerance: a share of the channel's largest magnitude, or of 1 where that is less; but
                never more than a hundred times that share, or :data:`MOST_OF_ALL`, of the largest
                magnitude of all channels.
        """
        share = min(MOST_OF_ALL, 100 * tolerance)
        most = max(share * self.magnitude.max(), _ROUNDING)
        allowed = np.minimum(tolerance * np.fmax(self.magnitude, 1.0), most)
        channel = int(np.argmax(self.typical / allowed))
        return float(self.typical[channel]), float(allowed[channel])


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a network's answers are from those of the same network in float32.

    Attributes:
        largest: of any value.
        typical: root mean square over a patch, the largest of several patches, of the channel that
            is farthest off for its values.
        allowed: what ``typical`` may be.
    """

    largest: float
    typical: float
    allowed: float


@dataclass(frozen=True, slots=True)
class ContractReport:
    """Results of running one batch.

    Attributes:
        working_set_bytes: memory the network allocated beyond its weights, input and output; 0
            where not measurable.
        batch_size: patches that it was made of; fewer than the job's if the device ran out of
            memory.
        low, high: range of the predicted values, after the activation.
        seconds: that a batch took, the second time.
        difference: from the network in float32, where it was compared.
    """

    working_set_bytes: int
    batch_size: int
    low: float
    high: float
    seconds: float
    difference: Difference | None = None


def check_contract(
    predictor: Predictor,
    patch: AnyArray,
    normalize: Callable[[Any], Any],
    *,
    batch_size: int,
    patch_shape: Zyx,
    crop_margin: Zyx,
    output_channels: int,
) -> ContractReport:
    """Run one batch of a patch twice, or half of it where the device has too little memory.

    Another batch comes between.

    Args:
        predictor: the network on its device.
        patch: (channels, Z, Y, X), stored values, grown by the crop margin.
        normalize: maps a float32 batch of stored values to the network's input.
        batch_size: patches of a batch.
        patch_shape: of the job, ZYX.
        crop_margin: of the job, ZYX.
        output_channels: that the network must answer.

    Raises:
        ModelContractError: the network fails on it, or returns another shape or values that are not
            finite, or other values the second time; or one patch alone is too much for the device.
    """
    first_size = batch_size
    smaller = ""
    while True:
        try:
            with network_failures((batch_size, *patch.shape), smaller):
                return _try_batch(
                    predictor,
                    patch,
                    normalize,
                    shape=(batch_size, output_channels),
                    patch_shape=patch_shape,
                    crop_margin=crop_margin,
                )
        except DeviceOutOfMemory as error:
            if batch_size == 1:
                raise ModelContractError(
                    f"the device is out of memory for one patch of {list(patch.shape[1:])} voxels "
                    "(z, y, x; crop margin included). Make inference.patch_shape smaller if the "
                    f"model allows it, or use a device with more memory. ({error})"
                ) from None
        predictor.device.make_room()  # only here is what the failed call held free again
        logger.warning(
            "device out of memory with %d patches a batch; trying %d", batch_size, batch_size // 2
        )
        batch_size //= 2
        smaller = f" ({first_size} at a time are too many for the device's memory)"


@contextmanager
def network_failures(shape: Sequence[int], hint: str = "") -> Iterator[None]:
    """Raise what a network's own code raises as an error of the network, not of ours.

    Args:
        shape: of the input, (N, C, Z, Y, X).
        hint: more to say, behind a space.

    Raises:
        ModelContractError: instead of any error but ours; ``sys.exit()`` in a network ends nothing
            but its trial.
    """
    try:
        yield
    except (BeamInferenceError, KeyboardInterrupt):
        raise
    except BaseException as error:
        reason = _reason_of(error)
        raise ModelContractError(
            f"the network fails on an input of shape {list(shape)} (batch, channels, z, y, x): "
            f"{_last_line(reason)}. {_advice(reason)}{hint}"
        ) from error


def _reason_of(error: BaseException) -> str:
    """What an error says, or else its name."""
    try:
        reason = str(error).strip() if isinstance(error, Exception) else repr(error)
    except Exception:  # of somebody else's class, which may fail at this, too
        reason = ""
    return reason or type(error).__name__


def _last_line(reason: str) -> str:
    return reason.splitlines()[-1][:400].rstrip(".")


def _advice(reason: str) -> str:
    """What to look at where a network fails for a reason."""
    if "on the same device" in reason:
        return (
            "The network makes a tensor on the CPU: make it on the input's device, as by "
            "torch.zeros(…, device=batch.device), or register it as a buffer."
        )
    if "[ONNXRuntimeError]" in reason:
        return (
            "Check model.input_channels, inference.batch_size and inference.patch_shape. If these "
            "are the file's, ONNX Runtime lacks an operation: export the network with others."
        )
    return (
        "Check model.input_channels, model.dims (of 2, also model.sections) and "
        "inference.patch_shape."
    )


def _sample(predictor: Predictor, predictions: Any) -> NDArray[np.float32]:
    """Copy some values of predictions (N, C, Z, Y, X), evenly spaced, to the host."""
    size = math.prod(predictions.shape)
    step = max(1, math.ceil((size / _SAMPLED_VALUES) ** (1 / 3)))
    some = predictor.device.copy(predictions[:, :, ::step, ::step, ::step])
    return np.array(predictor.device.download(some)())


def _check_repeats(
    answer: NDArray[np.float32], again: NDArray[np.float32], predictor: Predictor
) -> None:
    """Compare a network's answers to one batch that it was given twice.

    Raises:
        ModelContractError: they differ by more than arithmetic in another order explains.
    """
    if np.array_equal(answer, again):
        return
    tolerance = TOLERANCES[predictor.description.get("precision", "float32")]
    difference, allowed = ChannelDistances.between(again, answer, 1).worst(tolerance)
    if not difference <= allowed:
        raise ModelContractError(
            "the network answers the same batch in two ways, which differ by "
            f"{difference:.1e}, root mean square: it draws random numbers, such as a dropout that "
            "was exported while training, or it keeps something from one batch to the next. Its "
            "output would depend on the order of the work. Save it in evaluation mode, and without "
            "state."
        )
    logger.warning(
        "the network answers the same batch with other last bits (%.1e, root mean square): so will "
        "another launch, and verify --recompute",
        difference,
    )


def _try_batch(
    predictor: Predictor,
    patch: AnyArray,
    normalize: Callable[[Any], Any],
    *,
    shape: tuple[int, int],
    patch_shape: Zyx,
    crop_margin: Zyx,
) -> ContractReport:
    """Run one batch of a patch twice, and noise between: ``shape`` is the answer's, (N, C)."""
    on_host = predictor.device.on_host
    bound = bound_memory() if on_host else nullcontext()
    noise = noise_unlike(patch)
    with bound, predictor.device.session(), avoid_heap():
        array = predictor.device.empty((shape[0], *patch.shape))

        def make_batch() -> Any:
            """Make it anew: a network may overwrite its input."""
            array[:] = predictor.device.upload(patch)
            return normalize(array)

        batch = make_batch()
        before = _start_peak(predictor)
        predictions = crop_to_patch(predictor.predict(batch), shape, patch_shape, crop_margin)
        low = float(predictions.min())
        high = float(predictions.max())
        answer = _sample(predictor, predictions)
        del predictions  # before the next ones, as in a job
        # what a network keeps of one batch for the next shows only if that is another one
        array[:] = predictor.device.upload(noise)
        predictor.predict(normalize(array))
        batch = make_batch()
        if on_host and not keeps_memory(predictor.description.get("engine", "torch")):
            # what PyTorch makes at its first call is not made again
            before = _start_peak(predictor)
        start = time.perf_counter()
        predictions = predictor.predict(batch)  # ONNX Runtime plans its memory by a first call
        working_set = 0 if before is None else max(0, _peak(predictor) - before)
        again = _sample(predictor, crop_to_patch(predictions, shape, patch_shape, crop_margin))
        seconds = time.perf_counter() - start  # a GPU has answered when the sample is here
    if not (np.isfinite(low) and np.isfinite(high)):
        if not np.isfinite(patch).all():
            raise ModelContractError(
                "each patch that could be tried, such as that in the middle of the domain, holds "
                "NaN or infinite values, and so does the network's answer. Chunks that read such "
                "values are quarantined: hide them by input.mask, or choose another roi."
            )
        raise ModelContractError(
            "the network returns NaN or infinite values for a patch of the input. Check "
            "model.normalize, model.weights and inference.precision."
        )
    _check_repeats(answer, again, predictor)
    return ContractReport(working_set, shape[0], low, high, seconds)


def settle(predictor: Predictor, shape: tuple[int, ...]) -> None:
    """Run a network on the host on batches of zeros before a process's first chunk.

    At its first calls PyTorch allocates small objects that stay. On the heap they would lie between
    the network's arrays and keep these apart for ever, and the heap would grow by as much again as
    the network needs; here the arrays are not on the heap. Errors are left to the first chunk,
    whose messages say where.

    Args:
        predictor: the network on its device.
        shape: of the job's batches, (N, C, Z, Y, X).
    """
    with suppress(Exception), predictor.device.session(), avoid_heap():
        batch = predictor.device.empty(shape)
        batch[:] = 0
        for _ in range(SETTLING_CALLS):
            predictor.predict(batch)


def check_difference(
    predictor: Predictor,
    reference: Predictor,
    patch: AnyArray,
    normalize: Callable[[Any], Any],
    batch_size: int,
) -> Difference:
    """Compare a network's answers to one batch with those of the same network in PyTorch, float32.

    The first and the last answer of the batch are compared; the last patch is another one, so that
    a wrong order shows: in float32 noise beyond the patch's own values, such as negative ones,
    which an engine may treat otherwise; else its mirror image, as fewer digits do not reach so far.
    The difference is logged. A patch of one value throughout, on which wrong networks agree, too,
    is replaced by noise.

    Args:
        predictor: the network as the job runs it.
        reference: the network in PyTorch.
        patch: as for :func:`check_contract`.
        normalize: as for :func:`check_contract`.
        batch_size: as for :func:`check_contract`.

    Raises:
        EngineError: they differ by more than :data:`TOLERANCES` allows.
    """
    patch = without_blank(patch)
    described = predictor.description
    is_exact = described["precision"] == "float32"
    other = noise_unlike(patch) if is_exact else np.ascontiguousarray(patch[:, ::-1, ::-1, ::-1])
    better = reference.description["engine"]
    theirs_name = _name_of_reference(better)
    answers = _answers_of_both(predictor, reference, (patch, other), normalize, batch_size)
    if is_exact and not np.isfinite(answers[1][-1]).all():
        _refuse_hidden(described["engine"], better, "noise", answers[0][-1], answers[1][-1])
        answers = answers[0][:-1], answers[1][:-1]  # the network is not for such values
    tolerance = TOLERANCES[described["precision"]]
    is_between = better not in ("torch", described["engine"])
    if is_between:
        tolerance = max(tolerance, BETWEEN_ENGINES)
    largest = 0.0
    found = []
    for ours, theirs in zip(*answers, strict=True):
        difference = np.abs(np.subtract(ours, theirs, dtype=np.float64))
        largest = float(np.maximum(largest, difference.max()))
        found.append(ChannelDistances.between(ours, theirs, 1).worst(tolerance))
        if is_between:  # so much would hide an operator that is wrong at a patch's border alone
            found += [
                ChannelDistances.between(ours[face], theirs[face], 1).worst(tolerance)
                for face in _FACES
            ]
    typical, allowed = max(found, key=lambda each: each[0] / each[1])
    name = f"{described['engine']} in {described['precision']}"
    if "partition" in described:
        name = f"the network divided by inference.partition, {name},"
    logger.info(
        "%s differs from %s by %.1e at most, %.1e root mean square",
        name,
        theirs_name,
        largest,
        typical,
    )
    if not typical <= allowed:
        engine = "" if described["precision"] == "int8" else f"engine: {better} and "
        if "partition" in described and is_exact:
            advice = "Remove inference.partition: a layer answers otherwise where it is divided."
        else:
            advice = f"Write {engine}precision: float32."
        raise EngineError(
            f"{name} differs from {theirs_name} by {typical:.1e}, root mean square over a "
            f"patch{' or a side of it' * is_between}, more than the {allowed:.1e} that are "
            f"allowed. {advice}"
        )
    return Difference(largest, typical, allowed)


def check_no_numbers(
    predictor: Predictor,
    reference: Predictor,
    patch: AnyArray,
    normalize: Callable[[Any], Any],
    batch_size: int,
) -> None:
    """Check that an engine answers NaN where PyTorch does, and takes what PyTorch takes.

    A patch of zeros is tried, on which some networks divide by 0, and of floats the patch with one
    voxel of NaN, which some networks replace by a number.

    Args:
        predictor: as for :func:`check_difference`.
        reference: as there.
        patch: as there.
        normalize: as there.
        batch_size: as there.

    Raises:
        EngineError: the engine hides what is no number, or does not take it.
    """
    engine = predictor.description["engine"]
    better = reference.description["engine"]
    holed = patch.copy()
    if patch.dtype.kind == "f":
        _, depth, height, width = patch.shape
        holed[:, depth // 2, height // 2, width // 2] = np.nan
    patches = (np.zeros_like(patch), holed)
    ours, theirs = _answers_of_both(predictor, reference, patches, normalize, batch_size)
    for which, found, expected in zip(("zeros", "a voxel of NaN"), ours, theirs, strict=True):
        _refuse_hidden(engine, better, f"a patch with {which}", found, expected)
    if np.isfinite(theirs[1]).all() and not np.isfinite(ours[1]).all():
        raise EngineError(
            f"the network replaces NaN by numbers in {_name_of_reference(better)}, and {engine} "
            f"does not run such networks. Write engine: {better}."
        )


def _refuse_hidden(engine: str, better: str, what: str, ours: AnyArray, theirs: AnyArray) -> None:
    """Refuse answers that are numbers where those of the reference are none. Raises EngineError."""
    if (np.isfinite(ours) & ~np.isfinite(theirs)).any():
        raise EngineError(
            f"{engine} gives numbers for {what}, where {_name_of_reference(better)} gives NaN or "
            f"infinite values: it would hide where the network fails. Write engine: {better}."
        )


def _name_of_reference(engine: str) -> str:
    return f"{'PyTorch' if engine == 'torch' else engine} in float32"


_NOISE_SPAN = 2**16
"""Most values of the noise in place of a patch: more, of 32 bits, are in no image."""


def is_blank(patch: AnyArray) -> bool:
    """Whether a patch (C, Z, Y, X) has one value in each of its channels."""
    return bool((patch == patch[:, :1, :1, :1]).all())


def without_blank(patch: AnyArray) -> AnyArray:
    """The patch, or noise in its place if it is blank: integers from its own value on, or floats.

    It is made of all values of a dtype of 16 bits or less.
    """
    if not is_blank(patch):
        return patch
    random = np.random.default_rng(0)
    if patch.dtype.kind not in "iu":
        return random.random(patch.shape).astype(patch.dtype)
    info = np.iinfo(patch.dtype)
    span = min(_NOISE_SPAN, info.max - info.min)
    low = min(int(patch.min()), info.max - span)
    return random.integers(low, low + span, patch.shape, patch.dtype)


def noise_unlike(patch: AnyArray) -> AnyArray:
    """Noise of another mean and deviation, and of larger values, where the dtype has any."""
    low, high = (float(np.nan_to_num(end)) for end in (patch.min(), patch.max()))
    span = (high - low) or 1.0
    noise = np.random.default_rng(0).random(patch.shape) * (5 * span) + (low - span)
    info = np.iinfo(patch.dtype) if patch.dtype.kind in "iu" else np.finfo(patch.dtype)
    # the largest integers of 64 bits are not among the numbers of 64 bits
    return noise.clip(float(info.min), np.nextafter(float(info.max), 0)).astype(patch.dtype)


def _answers_of_both(
    predictor: Predictor,
    reference: Predictor,
    patches: tuple[AnyArray, AnyArray],
    normalize: Callable[[Any], Any],
    batch_size: int,
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """The answers of a network and of its reference to two patches, as :func:`_answers`.

    Raises:
        ModelContractError: the network fails.
        EngineError: the reference does.
    """
    shape = [batch_size, *patches[0].shape]
    with network_failures(shape):
        ours = _answers(predictor, *patches, normalize, batch_size)
    try:
        return ours, _answers(reference, *patches, normalize, batch_size)
    except (BeamInferenceError, MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise EngineError(
            f"{_name_of_reference(reference.description['engine'])}, with which "
            f"{predictor.description['engine']} is compared, cannot run the network on {shape} "
            f"(batch, channels, z, y, x): {_last_line(_reason_of(error))}. If the file was "
            "exported for one shape, write inference.patch_shape and batch_size as they are there, "
            "or export it for any; if it is an operation that is missing, export it with others: "
            "nobody would see a wrong answer"
        ) from error


def _answers(
    predictor: Predictor,
    patch: AnyArray,
    other: AnyArray,
    normalize: Callable[[Any], Any],
    batch_size: int,
) -> list[NDArray[np.float32]]:
    """The answers to a patch, first in a batch, and to another, last in it or in one of its own."""
    device = predictor.device
    found = []
    with device.session():
        batch = device.empty((batch_size, *patch.shape))
        for first, places in (
            [(patch, [0, batch_size - 1])] if batch_size > 1 else [(patch, [0]), (other, [0])]
        ):
            batch[:] = device.upload(first)
            if batch_size > 1:
                batch[batch_size - 1 :] = device.upload(other)
            answer = predictor.predict(normalize(batch))
            parts = [device.copy(answer[place : place + 1]) for place in places]
            found += [device.download(part)().copy() for part in parts]
    return found


def _start_peak(predictor: Predictor) -> int | None:
    """Return bytes in use now, from which :func:`_peak` counts; None where nobody tells."""
    if not predictor.device.on_host:
        return start_device_peak(predictor.description["device"])
    arrays.give_back()  # what is kept would be used again unseen
    return start_peak_memory()


def _peak(predictor: Predictor) -> int:
    """The most bytes in use since :func:`_start_peak`."""
    if not predictor.device.on_host:
        return device_peak(predictor.description["device"])
    return peak_memory()


def crop_to_patch(
    predictions: Any, leading: tuple[int, int], patch_shape: Zyx, crop_margin: Zyx
) -> Any:
    """Crop predictions (N, C, Z, Y, X) to the patch, if they are grown by the crop margin.

    A 2-D network that takes neighbouring sections returns one, and may be grown in y and x.

    Raises:
        ModelContractError: the shape is neither ``(*leading, *patch_shape)`` nor that grown by the
            margin, on every axis or in y and x.
    """
    grown = grown_shape(patch_shape, crop_margin)
    shape = tuple(predictions.shape)
    if shape == (*leading, *patch_shape):
        return predictions
    if shape in ((*leading, *grown), (*leading, patch_shape[0], *grown[1:])):
        depth = slice(crop_margin[0], crop_margin[0] + patch_shape[0])
        z = depth if shape[2] == grown[0] else slice(None)
        y, x = (slice(m, m + p) for m, p in zip(crop_margin[1:], patch_shape[1:], strict=True))
        return predictions[:, :, z, y, x]
    margin = f" or {[*leading, *grown]} (grown by model.crop_margin)" if any(crop_margin) else ""
    raise ModelContractError(
        f"the network returns an array of shape {list(shape)} (batch, channels, z, y, x) for an "
        f"input of {list(grown)}; expected {[*leading, *patch_shape]}{margin}. Check "
        "model.output_channels, model.crop_margin and inference.patch_shape."
    )


MOST_OF_ALL = 0.1
"""Difference, as a share of a network's largest value, with which it has become another one."""

_ROUNDING = 1e-6
"""Difference that may be left of values around 1, where they cancel out."""

_FACES = [
    (..., plane, *(slice(None),) * (2 - axis))
    for axis in range(3)
    for plane in (slice(1), slice(-1, None))
]
"""The outermost voxels of an array (…, z, y, x) on each side of each axis."""

BETWEEN_ENGINES = 1e-2
"""Allowed difference between two engines, neither of which is PyTorch.

Of a file of ONNX that normalises by instance, where contrast is low, ONNX Runtime is 2.5e-3 off by
itself; a network that is taken otherwise than it is meant is farther off.
"""

TOLERANCES = {"float32": 1e-5, "tf32": 1e-3, "float16": 3e-3, "bfloat16": 2e-2, "int8": 1e-2}
"""Allowed differences from PyTorch in float32, root mean square over a patch, by precision.

Each is a share of the largest magnitude there, or of 1 where that is less, within limits: see
:meth:`ChannelDistances.worst`. A wrong kernel, or BatchNorm in the wrong mode, is far beyond it.
Of the networks that were measured in int8, most are within two thirds of its bound, and one is at
seven times it: see docs/performance.md.
"""
