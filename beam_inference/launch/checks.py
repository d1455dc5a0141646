"""Checks of a job before its first chunk."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from beam_inference.config.definite import DefiniteNormalize
from beam_inference.config.factories import factory_parts
from beam_inference.config.inference import Inference
from beam_inference.config.job import JobConfig
from beam_inference.config.network import network_keys
from beam_inference.config.normalize import (
    InsideStandardStep,
    SectionLimits,
    Sections,
    holes_of,
    is_of_object,
    section_steps,
)
from beam_inference.config.operators import Operator
from beam_inference.errors import ConfigError, StateError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.plan import InferencePlan
from beam_inference.job.geometry import whole_cells
from beam_inference.job.operator_files import operator_key
from beam_inference.job.parts import OutputVoxels
from beam_inference.job.place import Place
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.shards import Shard
from beam_inference.job.state import State, default_state_url
from beam_inference.launch.decide import left_to_workers
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.input_volume import InputVolume
from beam_inference.volumes.mask import Mask, open_mask
from beam_inference.volumes.volume import Volume

logger = logging.getLogger(__name__)

_HALO_ANYWHERE = 1024
"""Voxels around a voxel that an operator may look at in the smallest volume."""


def check_no_auto(inference: Inference) -> None:
    """Refuse choices of remote workers where no pipeline can be started that has them made.

    Raises:
        ConfigError: the job file leaves some of them open.
    """
    keys = left_to_workers(inference)
    if not keys:
        return
    advice = {
        "device": "device: cuda (or mps, xpu), or device: cpu",
        "engine": "engine: torch, or openvino if it is installed there",
        "batch_size": "batch_size: 1, or more for small patches: auto is determined by a trial",
    }
    values = ", ".join(f"inference.{key}: {getattr(inference, key)}" for key in keys)
    raise ConfigError(
        f"{values} {'is' if len(keys) == 1 else 'are'} not known before the launch on a remote "
        "runner. The command run asks a worker, by a short pipeline; a job that is staged for "
        "another to run (--template_location, --output_executable_path) and prepare() of Python "
        f"ask none. Write {'; '.join(advice[key] for key in keys)}."
    )


def check_no_auto_of_integers(inference: Inference) -> None:
    """Refuse a batch size that remote workers would decide, where the launcher tries the network.

    Raises:
        ConfigError: the network is one of integers, which the launcher makes for all workers.
    """
    if inference.precision == "int8" and inference.batch_size == "auto":
        raise ConfigError(
            "inference.batch_size: auto is not known before the launch on a remote runner: with "
            "precision: int8 the network is made and tried where you launch, not on a worker. "
            "Write a number: 1 does for large patches."
        )


def check_paths(config: JobConfig, place: Place) -> None:
    """Check a job's paths without opening anything.

    Raises:
        ConfigError: workers could not reach one of them, or it carries credentials.
    """
    if place.shares_files:
        return
    paths = {
        "input.path": config.input.path,
        **{f"inputs.{number}.path": each.path for number, each in enumerate(config.inputs)},
        "job.state_path": config.job.state_path,
        "input.mask.path": config.input.mask.path if config.input.mask else None,
        "mask.path": config.mask.path if config.mask else None,
    }
    named = list(paths.items())
    for model, key in zip(config.model.members, network_keys(config.model), strict=True):
        factory = factory_parts(model.path)
        in_package = model.path == "identity" or (
            factory is not None and not factory[0].endswith(".py")
        )
        named += [
            (f"{key}.path", None if in_package else model.path),
            (f"{key}.weights", model.weights),
        ]
    for output, single in config.by_output.items():
        named.append((f"{output}.path", single.output.path))
        named.append((f"{output}.preview.path", single.output.preview_path))
        for number, operator in enumerate(single.postprocess):
            key = f"{operator_key(number, output)}.function"
            named += [(key, path) for path in operator.needed_files]
    _check_reachable(named)


def _check_reachable(named: Iterable[tuple[str, str | None]]) -> None:
    """Refuse paths of this machine, by the keys that name them."""
    for key, path in named:
        if path is not None and (path.startswith("file://") or "://" not in path):
            raise ConfigError(
                f"{key} {path} is on this machine, which remote workers cannot reach. Use gs:// or "
                "s3://."
            )


def open_masks(config: JobConfig, volume: InputVolume, voxels: OutputVoxels) -> dict[str, Mask]:
    """Open the masks of a job, by their keys in the job file."""
    masks = {} if volume.mask is None else {"input.mask": volume.mask}
    if config.mask is not None:
        masks["mask"] = open_mask(
            "mask", config.mask, voxels.voxel_size_nm, voxels.rest, config.storage
        )
    return masks


def check_halos(operators: Sequence[Operator], bounds: BoundingBox) -> None:
    """Refuse operators that look much further than the volume, in the output's voxels, reaches.

    A chunk would hold, and go through, more voxels than there are.
    """
    largest = max(_HALO_ANYWHERE, *bounds.shape)
    for number, operator in enumerate(operators):
        if max(operator.halo_zyx) > largest:
            raise ConfigError(
                f"postprocess.{number}: {operator.display_name} looks {list(operator.halo_zyx)} "
                f"voxels (z, y, x) around each voxel; at most {largest:,} make sense in an input "
                f"of {list(bounds.shape)}. Make its "
                f"{'sigma' if operator.operator == 'smooth' else 'halo'} smaller."
            )


def check_sections(normalize: DefiniteNormalize, volume: InputVolume) -> None:
    """Refuse levels by section that do not cover the input's sections, or are of others."""
    every = section_steps(normalize)
    if isinstance(normalize, Sections):
        every = [SectionLimits(start=normalize.start, limits=normalize.levels)]
    if not every:
        return
    if volume.resampling is not None and not volume.resampling.axes[0].is_identity:
        raise ConfigError(
            "model.normalize has levels of stored sections, and input.resample makes other "
            "sections of them: normalise by the whole volume (by: volume), or resample to the "
            "stored voxel size along z"
        )
    for each in every:
        first = each.start
        last = each.start + each.count
        if first > volume.bounds.start[0] or last < volume.bounds.stop[0]:
            raise ConfigError(
                f"model.normalize has levels for the sections {first} … {last - 1}; the input has "
                f"{volume.bounds.start[0]} … {volume.bounds.stop[0] - 1}"
            )


def check_object(
    config: JobConfig, normalize: DefiniteNormalize, volume: InputVolume, place: Place
) -> None:
    """Refuse what would stand outside of an object instead of zero, before its inside is changed.

    Args:
        config: the job file.
        normalize: its normalisation, of numbers.
        volume: the input; nothing is refused of one beside which no object is read.
        place: where the workers run, which must reach the holes of the object.
    """
    if volume.inside is None:
        return
    holes = holes_of(normalize)
    if holes is not None and not place.shares_files:
        _check_reachable([("model.normalize: the holes of the object,", holes.path)])
    of_fill = config.input.fill == "constant" and config.input.network_fill is None
    fills = {f"inputs.{number}.fill_value": each for number, each in enumerate(volume.further)}
    values = {"input.fill_value": config.input.fill_value if of_fill else 0.0}
    values |= {key: each.fill_value for key, each in fills.items() if each.fill == "constant"}
    values |= {} if volume.mask is None else {"input.mask.fill_value": volume.mask.fill_value}
    for key, value in values.items():
        if value:
            raise ConfigError(
                f"{key} is {value:g}, and model.normalize changes the inside of the object alone "
                "(of: object), where all must be zero outside: write 0, or for what lies beyond "
                "the volume input.fill_units: network"
            )
    for each in volume.volumes:
        if any(low > 0 or high < 0 for low, high in each.limits):
            raise ConfigError(
                f"input.resample.clip of {each.url} does not hold 0, and model.normalize changes "
                "the inside of the object alone (of: object), where all must be zero outside: "
                "clip by a step after it (clip: {levels: FILE, of: nonzero_box, low: 0, high: 1})"
            )


def check_nonzero(normalize: DefiniteNormalize, volume: InputVolume) -> None:
    """Refuse to change what is not zero where that is not what is stored as such."""
    steps = normalize if isinstance(normalize, tuple) else ()
    if not any(isinstance(step, InsideStandardStep) and not is_of_object(step) for step in steps):
        return
    for each in volume.volumes:
        if each.limits or (each.resampling is not None and any(each.resampling.orders)):
            raise ConfigError(
                f"model.normalize changes what is not zero alone (of: nonzero), and {each.url} is "
                "resampled or clipped before: zeros beside other values are none any more, and the "
                "levels are of stored values. Resample the volume first (beam-inference resample), "
                "and make levels of that; or write of: object"
            )


def check_unit(normalize: DefiniteNormalize, volume: InputVolume) -> None:
    """Refuse ``normalize: unit`` of volumes of several dtypes, whose maxima are several ones."""
    dtypes = {each.values_dtype.name: each for each in volume.volumes}
    if normalize == "unit" and len(dtypes) > 1:
        raise ConfigError(
            f"model.normalize: unit is of one dtype, and the inputs have {' and '.join(dtypes)}: "
            "write a list of steps, such as [{scale: 0.00392, channels: [0]}, …]"
        )


def check_position(volume: Volume, earlier: ResolvedJob | None) -> None:
    """Refuse to go on with a job that began before the input's translation was read.

    Args:
        volume: the input.
        earlier: the job as its first launch resolved it, if there was one.

    Raises:
        StateError: it took the same voxels to lie elsewhere.
    """
    if earlier is None:
        return
    before = earlier.input_bounds
    now = volume.bounds
    if any(volume.origin.voxel) and before == now.translate(zyx.negative(volume.origin.voxel)):
        raise StateError(
            f"the metadata of {volume.url} say, by a translation, that it begins at the voxel "
            f"{list(now.start)} (z, y, x). This job began when translations were not read, and "
            f"took it to begin at {list(before.start)}: going on would put new chunks beside their "
            "place. Finish it with the version that began it, or start again: use another "
            "output.path, with roi and output.bounds in the input's coordinates."
        )


def check_output_scale(config: JobConfig, plan: InferencePlan) -> None:
    """Refuse patches that begin inside a voxel of the network's input, or of its output."""
    scale = config.model.finer_by
    domain = plan.lattice.domain
    start = domain.start
    cell = config.model.coarser_by
    if whole_cells(domain, cell, plan.volume) != domain:
        raise ConfigError(
            f"model.output_scale [{', '.join(map(str, config.model.output_scale))}]: the patches "
            f"cover {domain} of the input {plan.volume} (z, y, x), and begin or end inside a voxel "
            f"of the network's output, which is {list(cell)} voxels large. If the volume is "
            "smaller than a patch, make inference.patch_shape smaller, or larger by one such "
            "voxel; if there is a roi, let it begin and end with such voxels."
        )
    if any(n % s for n, s in zip(start, scale, strict=True)):
        raise ConfigError(
            f"model.output_scale {list(scale)}: the first patch begins at {list(start)} (z, y, x), "
            "inside a voxel of the network's input, because the volume is smaller than a patch. "
            "Make inference.patch_shape smaller, or larger by one voxel of the network's input."
        )


def check_voxel_size(config: JobConfig, volume: InputVolume) -> None:
    """Refuse an input of another voxel size than the network was trained for."""
    wanted = config.model.voxel_size_nm
    own = volume.stored.voxel_size_nm
    if wanted is None or config.input.resample is not None:
        return
    if own is None:
        logger.warning(
            "the input does not say its voxel size; model.voxel_size_nm %s is used",
            list(wanted),
        )
        return
    if zyx.is_same_size(wanted, own):
        return
    hint = (
        "No scale of the input fits: write input.resample: {order: 1}, and it is resampled chunk "
        "by chunk."
    )
    detected = volume_at(config.input.path, config.storage) if config.input.path else None
    for index, scale in enumerate(detected.scales if detected else []):
        z, y, x = scale.voxel_size_nm or (None, None, None)
        if z and y and x and zyx.is_same_size(wanted, (z, y, x)):
            hint = f"Scale {index} fits: write input.scale: {index}."
    raise ConfigError(
        f"model.voxel_size_nm is {list(wanted)} (z, y, x), the input {volume.url} at scale "
        f"{config.input.scale} has {list(own)}: the network would see objects of another size "
        f"than it was trained on. {hint}"
    )


def check_shard(shard: Shard, state: State, *, is_prepared: bool) -> None:
    """Refuse a shard of a job that was not divided, or into another number of shards.

    Args:
        shard: the shard.
        state: the state folder of the job.
        is_prepared: whether the job has been launched, or prepared.

    Raises:
        ConfigError: chunks would be left out, or done twice.
    """
    count = state.read_shard_count() if is_prepared else None
    if count is None:
        raise ConfigError(
            f"--shard {shard}: {state.url} says of no shards. Divide the job once, before its "
            f"first shard: beam-inference prepare JOB.YAML --shards {shard.count}"
        )
    if count != shard.count:
        raise ConfigError(
            f"--shard {shard}: the job was prepared for {count} shards. Those of {shard.count} are "
            f"other chunks, so that some would be left out. Give --shard I/{count}, or divide what "
            "is missing anew: beam-inference prepare JOB.YAML --shards "
            f"{shard.count} --resplit"
        )


def check_division(config: JobConfig, shards: int, *, resplit: bool) -> None:
    """Refuse to divide a job anew that was divided into another number of shards, unless asked to.

    Args:
        config: the job file.
        shards: number of shards.
        resplit: whether the user asks for another division.

    Raises:
        ConfigError: shards that are queued or run were of another division.
    """
    state = State(default_state_url(config), config.storage)
    before = None if resplit else state.read_shard_count()
    if before is not None and before != shards:
        raise ConfigError(
            f"--shards {shards}: the job was divided into {before} shards, which may be queued, or "
            f"run. Give --shards {before}; or pass --resplit to divide what is missing anew: "
            f"shards of {before} that begin later are refused then."
        )
