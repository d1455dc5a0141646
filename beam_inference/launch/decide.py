"""Choices that a job file leaves open, made without its network: one function for each.

Each takes the job file, what is known of its input, and ``earlier``: the job as its first launch
resolved it. What an earlier launch has chosen is kept, because another choice would be another job.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

from beam_inference.config.definite import DefiniteNormalize, Settings
from beam_inference.config.devices import TRAITS, DefiniteDevice, kind_of
from beam_inference.config.engines import CHOOSE
from beam_inference.config.factories import factory_parts
from beam_inference.config.fields import INTEGER_DTYPES
from beam_inference.config.formats import get_format
from beam_inference.config.inference import BatchSize, Inference
from beam_inference.config.job import OUTPUT, JobConfig
from beam_inference.config.normalize import Normalize, Statistics, levels_files, rename_levels
from beam_inference.config.volumes import Bounds, LevelsBox, Output
from beam_inference.engines.choice import runs_on_cpu_only
from beam_inference.engines.devices import find_accelerator
from beam_inference.environment import usable_cores
from beam_inference.errors import ConfigError, ModelContractError, VolumeError
from beam_inference.geometry.alignment import is_aligned
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.exact_sums import bound_after_trial
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.plan import Strategy
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.geometry import common_write_shape
from beam_inference.job.place import Place
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.models.fetch import local_model
from beam_inference.models.loading import gives_function
from beam_inference.operators.level_steps import definite_normalization
from beam_inference.operators.levels import Levels, load_levels
from beam_inference.volumes.kvstores import read_file
from beam_inference.volumes.outputs import BlockLayout, stored_layout
from beam_inference.volumes.volume import Volume

logger = logging.getLogger(__name__)

AnyOutput = TypeVar("AnyOutput", bound=Output)

_THREADS_PER_CORE = 16
_THREADS_ANYWHERE = 64
"""Threads that any machine takes: a job may be tried on another than the one it is written for."""


def job_of_engine(config: JobConfig, earlier: ResolvedJob | None) -> ResolvedJob | None:
    """The launched job whose engine is kept; None where every launch chooses its own."""
    return None if config.inference.mixed_devices else earlier


def decide_settings(
    config: JobConfig,
    place: Place,
    normalize: DefiniteNormalize,
    earlier: ResolvedJob | None,
    of_engine: ResolvedJob | None,
) -> Settings:
    """Make every choice that needs no network; ``normalize`` is made already.

    Args:
        config: the job file.
        place: where the workers run.
        normalize: how values are normalised.
        earlier: the job as its first launch resolved it.
        of_engine: the same where its device and threads are kept, see :func:`job_of_engine`.

    Raises:
        ConfigError: the job's precision exists only on a device that this machine lacks.
    """
    choose_device = decide_device if place.is_this_machine else suppose_device
    return Settings(
        device=choose_device(config, of_engine),
        threads=decide_threads(config, place, of_engine),
        normalize=normalize,
        chunk_shape=_preliminary_chunk_shape(config, earlier),
        strategy=decide_strategy(config, earlier) or "recompute",
        chunk_crop_margin=decide_chunk_crop_margin(config),
        value_ranges={key: decide_value_range(single) for key, single in config.by_output.items()},
    )


def decide_device(config: JobConfig, earlier: ResolvedJob | None) -> DefiniteDevice:
    """Choose where the network runs.

    Raises:
        ConfigError: the job's precision exists only on a device that this machine lacks.
    """
    inference = config.inference
    if inference.device != "auto":
        return inference.device
    if earlier is not None:
        return kind_of(earlier.config.inference.device)
    device: DefiniteDevice = "cpu"
    if runs_on_cpu_only(config.model, inference):
        reason = "this network runs on the CPU only"
    elif (accelerator := find_accelerator()) is None:
        reason = "this machine has none"
    elif inference.engine in CHOOSE and _has_function(config):
        reason = "this network is a function of NumPy arrays"
    else:
        device = accelerator
        reason = f"this machine has {TRAITS[accelerator].title}"
    if inference.precision == "tf32" and device != "cuda":
        raise ConfigError(f"inference.precision: tf32 exists only on CUDA devices, and {reason}")
    return device


def suppose_device(config: JobConfig, earlier: ResolvedJob | None) -> DefiniteDevice:
    """The device of workers elsewhere: the CPU, until one of them has decided ``auto``."""
    device = config.inference.device
    if device != "auto":
        return device
    return "cpu" if earlier is None else kind_of(earlier.config.inference.device)


def left_to_workers(inference: Inference) -> list[str]:
    """The keys of ``inference`` that only a machine that computes can decide."""
    engine = inference.engine
    is_open = {
        "device": inference.device == "auto",
        # on an accelerator auto is torch, wherever that is
        "engine": engine == "fastest" or (engine == "auto" and inference.device in ("auto", "cpu")),
        "batch_size": inference.batch_size == "auto",
    }
    return [key for key, value in is_open.items() if value]


def _has_function(config: JobConfig) -> bool:
    """Whether the job's network is a function of NumPy arrays; a factory is called to find out."""
    try:
        model = config.model
        if factory_parts(model.path):
            model = local_model(model, config.storage)
        return gives_function(model)
    except ModelContractError:  # the trial of the network tells, and no plan needs the network
        return False


def decide_threads(config: JobConfig, place: Place, earlier: ResolvedJob | None) -> int:
    """Choose how many CPU threads the network has in a worker process; 1 on remote runners.

    Raises:
        ConfigError: the job file asks for many more than this machine has cores.
    """
    threads = config.inference.threads
    if threads is not None:
        most = max(_THREADS_ANYWHERE, _THREADS_PER_CORE * usable_cores())
        if place.is_this_machine and threads > most:
            raise ConfigError(
                f"inference.threads: {threads} are too many for the {usable_cores()} cores of this "
                f"machine: at most {most}, because each takes memory, and those beyond the number "
                "of cores only wait. Write the number of cores, or remove it."
            )
        return threads
    if earlier is not None:
        return earlier.config.inference.threads
    if not place.is_this_machine:
        return 1
    return max(1, usable_cores() // (place.processes_per_host * config.inference.members))


def decide_levels_of_input(config: JobConfig, earlier: ResolvedJob | None) -> JobConfig:
    """Put into the job what its levels files say about the input: ``box`` and ``resample.clip``.

    Where a file is gone, what an earlier launch took from it is taken.

    Raises:
        ConfigError: a file is absent, or does not hold it.
    """
    return _decide_clip(_decide_box(config, earlier), earlier)


def _decide_box(config: JobConfig, earlier: ResolvedJob | None) -> JobConfig:
    box = config.input.box
    if not isinstance(box, LevelsBox):
        return config
    known = None if earlier is None else earlier.config.input.box
    levels = _levels_unless_gone(config, "input.box", box.levels, known)
    if levels is None:
        return _with_input(config, box=known)
    if levels.nonzero is None:
        raise ConfigError(f"input.box.levels: {levels.input} is zero throughout: there is no box")
    return _with_input(config, box=Bounds(start=levels.nonzero.start, stop=levels.nonzero.stop))


def _decide_clip(config: JobConfig, earlier: ResolvedJob | None) -> JobConfig:
    resample = config.input.resample
    if resample is None or not isinstance(resample.clip, Statistics):
        return config
    before = None if earlier is None else earlier.config.input.resample
    known = None if before is None else before.clip
    levels = _levels_unless_gone(config, "input.resample.clip", resample.clip.levels, known)
    if levels is None:
        return _with_input(config, resample=resample.model_copy(update={"clip": known}))
    try:
        channels = levels.channels_of(resample.clip.of)
    except LookupError as error:
        raise ConfigError(f"input.resample.clip: {error}") from None
    limits = [(float(each.values[0]), float(each.values[-1])) for each in channels]
    if any(low == high for low, high in limits):
        raise ConfigError(
            f"input.resample.clip: a channel of {levels.input} holds one value only: there is "
            "nothing to see in it"
        )
    return _with_input(config, resample=resample.model_copy(update={"clip": limits}))


def _levels_unless_gone(config: JobConfig, key: str, url: str, known: object) -> Levels | None:
    """The levels file of a key; None if it is gone, and an earlier launch had it.

    Args:
        config: the job.
        key: of the job file, for messages.
        url: of the file.
        known: what an earlier launch took from it; None if there was none.

    Raises:
        ConfigError: it is absent, or does not hold levels of each channel.
    """
    if known is not None:
        try:
            read_file(url, config.storage)
        except VolumeError as error:
            logger.warning("%s.levels: %s; this job continues with what it began with", key, error)
            return None
    levels = load_levels(url, config.storage, f"{key}.levels")
    if levels.channels is None:
        raise ConfigError(
            f"{key}.levels: {url} was made by an earlier version, without the box of what is not "
            "zero. Make it again: beam-inference levels INPUT --to FILE --overwrite"
        )
    if levels.input not in (config.input.path, ""):
        logger.warning("%s was made of %s, the input is %s", url, levels.input, config.input.path)
    return levels


def keep_levels_of_input(config: JobConfig, earlier: ResolvedJob) -> JobConfig:
    """Put into the job what its first launch took from levels files, where it names any."""
    known = earlier.config.input
    if isinstance(config.input.box, LevelsBox) and known.box is not None:
        config = _with_input(config, box=known.box)
    resample = config.input.resample
    if resample is None or known.resample is None or not isinstance(resample.clip, Statistics):
        return config
    kept = resample.model_copy(update={"clip": known.resample.clip})
    return _with_input(config, resample=kept)


def _with_input(config: JobConfig, **changes: object) -> JobConfig:
    section = config.input.model_copy(update=changes)
    return config.model_copy(update={"input": section})


def decide_normalization(
    config: JobConfig, volumes: Sequence[Volume], earlier: ResolvedJob | None
) -> DefiniteNormalize:
    """Make values of the levels file that ``model.normalize`` names, if it names one.

    Where that file is gone, the values that an earlier launch made of it are taken, if the job
    still asks for the same.

    Raises:
        ConfigError: the file is absent, or does not fit the input.
    """
    normalize = config.model.normalize
    if earlier is not None and requests_same_levels(normalize, earlier):
        try:
            for url in levels_files(normalize):
                read_file(url, config.storage)
        except VolumeError as error:
            logger.warning(
                "model.normalize.levels: %s; this job continues with the values it began with",
                error,
            )
            return earlier.config.model.normalize
    return definite_normalization(normalize, volumes, config.storage)


def requests_same_levels(normalize: Normalize, earlier: ResolvedJob) -> bool:
    """Whether a job asks of levels files, wherever they lie now, what it asked at first launch."""
    at_first = earlier.requested_normalize
    if at_first is None or not levels_files(normalize):
        return False
    return rename_levels(normalize, _nowhere) == rename_levels(at_first, _nowhere)


def _nowhere(_: str) -> str:
    return ""


def decide_chunk_crop_margin(config: JobConfig) -> Zyx | None:
    """Choose the voxels that are cropped at chunk borders: by default the patch overlap."""
    inference = config.inference
    if inference.seams == "crop" and inference.chunk_crop_margin is None:
        return inference.patch_overlap
    return inference.chunk_crop_margin


def decide_strategy(config: JobConfig, earlier: ResolvedJob | None) -> Strategy | None:
    """Choose how chunks get what they share; a choice of ``auto`` is kept, though it need not be.

    Returns:
        The strategy, or None if it is to be found by what it costs.
    """
    if config.stated_strategy is not None or earlier is None:
        return config.stated_strategy
    return earlier.config.inference.plan_strategy


def _preliminary_chunk_shape(config: JobConfig, earlier: ResolvedJob | None) -> Zyx:
    """The chunk shape as it is written; one block stands for ``auto`` until it is decided."""
    chunk_shape = config.inference.chunk_shape
    if chunk_shape != "auto":
        return chunk_shape
    return common_write_shape(config) if earlier is None else earlier.config.inference.chunk_shape


def decide_layout(
    config: JobConfig, bounds: BoundingBox, written: BoundingBox, earlier: JobConfig | None
) -> BlockLayout:
    """Choose how the blocks of an output are encoded and packed into shards, where that is open.

    An existing volume keeps what it has, and an earlier launch's choice is kept.

    Args:
        config: the job file, as if it wrote this output alone.
        bounds: the output's bounding box.
        written: what the job writes of it.
        earlier: the same of an earlier launch, if there was one.

    Raises:
        VolumeError: the existing volume cannot be opened.
    """
    output = config.output
    encoding = output.encoding
    shard_shape = output.shard_shape
    if encoding != "auto" and shard_shape != "auto":
        return BlockLayout(encoding, shard_shape)
    if earlier is not None:
        usual = decide_layout(earlier, bounds, written, None)
    else:
        existing = stored_layout(output.path, output.format, config.storage)
        usual = existing or _usual_layout(config, bounds, written)
    return BlockLayout(
        usual.encoding if encoding == "auto" else encoding,
        usual.shard_shape if shard_shape == "auto" else shard_shape,
    )


def with_layouts(config: JobConfig, layouts: Mapping[str, BlockLayout]) -> JobConfig:
    """The job with encodings and shards that were decided, by the keys of the outputs."""

    def changed(key: str, output: AnyOutput) -> AnyOutput:
        layout = layouts.get(key)
        if layout is None:
            return output
        values = {"encoding": layout.encoding, "shard_shape": layout.shard_shape}
        return output.model_copy(update=values)

    outputs = {name: changed(f"outputs.{name}", each) for name, each in config.outputs.items()}
    output = changed(OUTPUT, config.output)
    return config.model_copy(update={"output": output, "outputs": outputs})


def keep_layouts(config: JobConfig, earlier: ResolvedJob) -> JobConfig:
    """Put into the job the encodings and shards of its first launch, where it leaves them open."""
    before = earlier.config.by_output
    layouts = {
        key: decide_layout(single, earlier.output_bounds, earlier.roi, before[key])
        for key, single in config.by_output.items()
        if key in before
    }
    return with_layouts(config, layouts)


def _usual_layout(config: JobConfig, bounds: BoundingBox, written: BoundingBox) -> BlockLayout:
    return BlockLayout(_usual_encoding(config), _usual_shards(config, bounds, written))


def _usual_encoding(config: JobConfig) -> str:
    output = config.output
    return get_format(output.format).usual_encoding(
        output.dtype, config.output_channels, labels=config.gives_labels
    )


def _usual_shards(config: JobConfig, bounds: BoundingBox, written: BoundingBox) -> Zyx | None:
    """The largest of the format's usual shards of which chunks write whole ones; None for none."""
    output = config.output
    usual = get_format(output.format).usual_shards(bounds.shape, output.block_shape)
    chunk_shape = config.inference.chunk_shape
    for shape in reversed(usual):
        chunks = ChunkGrid(written, shape if chunk_shape == "auto" else chunk_shape)
        if is_aligned(chunks, shape, bounds):
            return shape
    return None


def decide_value_range(config: JobConfig) -> tuple[float, float] | None:
    """Choose the values that map onto an integer dtype's range.

    The default is what the operators give of the network's values; where they do not say, 0 to 1:
    the job file has a sigmoid or softmax then, or was refused.
    """
    output = config.output
    is_scaled = output.dtype in INTEGER_DTYPES and not config.gives_labels
    if is_scaled and output.value_range is None:
        return config.output_interval or (0.0, 1.0)
    return output.value_range


def decide_prediction_bounds(
    config: JobConfig, earlier: ResolvedJob | None
) -> tuple[float | None, ...]:
    """Choose the powers of two that the values of the network, or of its heads, are to stay within.

    Returns:
        For each head, or for the whole network if it has none: the bound, or None if only a trial
        of the network, or the output's range of values, can tell.
    """
    stated = config.model.stated_bounds
    known = () if earlier is None else earlier.sum_bounds
    if len(known) != len(stated):
        return stated
    return tuple(
        theirs if bound is None else bound for bound, theirs in zip(stated, known, strict=True)
    )


def complete_bounds(bounds: Sequence[float | None], found: Sequence[float]) -> tuple[float, ...]:
    """The bounds with those that are not known taken from others, which a trial has found."""
    pairs = zip(bounds, found, strict=True)
    return tuple(of_trial if bound is None else bound for bound, of_trial in pairs)


def prediction_bounds_elsewhere(
    config: JobConfig, bounds: Sequence[float | None]
) -> tuple[float, ...]:
    """Choose the prediction bounds of a network that cannot be tried here.

    Args:
        config: the job file.
        bounds: those that are known; None for a head, or a network, without activation.

    Raises:
        ConfigError: the job file does not say how large its values are.
    """
    heads = config.model.heads or ()
    for number, head in enumerate(heads):
        if bounds[number] is None:
            raise ConfigError(
                f"nothing says how large the values of the head {head.key} are: it has no "
                "activation, and cannot be tried here, where its workers do not run. Write "
                f"model.heads.{number}.prediction_bound: a magnitude that they stay within."
            )
    return tuple(_bound_elsewhere(config) if bound is None else bound for bound in bounds)


def _bound_elsewhere(config: JobConfig) -> float:
    """Choose the prediction bound of a network without heads by the output's range of values."""
    value_range = config.output.value_range
    if value_range is None or config.postprocess:  # operators may have changed the values' unit
        raise ConfigError(
            "nothing says how large the network's values are: it has no activation, and cannot be "
            "tried here, where its workers do not run. Write model.prediction_bound: a magnitude "
            "that they stay within. If it is ten times too large, the result has a digit less."
        )
    return bound_after_trial(max(map(abs, value_range)))


def engine_request(config: JobConfig, earlier: ResolvedJob | None) -> tuple[str, str]:
    """Engine and memory format that a trial is to start from; an earlier launch has chosen them."""
    inference = config.inference
    if earlier is not None and inference.engine in CHOOSE:
        return earlier.config.inference.engine, earlier.config.inference.memory_format
    return inference.engine, inference.memory_format


def batch_size_request(config: JobConfig, earlier: ResolvedJob | None) -> BatchSize:
    """Batch size that a trial is to start from.

    An earlier launch has chosen it, also where the device had too little memory for the number that
    the job file says.
    """
    batch_size = config.inference.batch_size
    if earlier is not None and batch_size in ("auto", earlier.requested_batch_size):
        return earlier.config.inference.batch_size
    return batch_size


def with_known_device(config: JobConfig, known: ResolvedJob) -> JobConfig:
    """The job file with device and threads of another job of the same network, where left open."""
    inference = config.inference
    before = known.config.inference
    update: dict[str, object] = {}
    if inference.device == "auto":
        update["device"] = kind_of(before.device)
    if inference.threads is None:
        update["threads"] = before.threads
    return config.model_copy(update={"inference": inference.model_copy(update=update)})


def warn_of_smaller_batch(config: JobConfig, earlier: ResolvedJob) -> None:
    """Warn where a job keeps a smaller batch than its file requests."""
    if config.inference.batch_size == earlier.requested_batch_size:
        logger.warning(
            "inference.batch_size is %d in this job: at its first launch the device had no memory "
            "for %d. To try that size again and recompute every chunk, pass --overwrite.",
            earlier.config.inference.batch_size,
            earlier.requested_batch_size,
        )
