"""Inference on an array in memory: what a job does to a volume, without volumes and stores."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.config.definite import DefiniteNormalize, as_definite
from beam_inference.config.fields import Json
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job
from beam_inference.config.normalize import depends_on_place, levels_files
from beam_inference.engines.devices import find_accelerator
from beam_inference.engines.loading import load_predictor
from beam_inference.engines.predictor import Predictor
from beam_inference.environment import usable_cores
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.exact_sums import bound_after_trial
from beam_inference.geometry.fill import check_fill_value, fill_outside, source_box
from beam_inference.geometry.plan import InferencePlan, make_plan
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.parts import make_normalization
from beam_inference.models.fetch import local_model
from beam_inference.models.hashes import model_sha256
from beam_inference.models.loading import LoadedNetwork, as_network
from beam_inference.worker.chunk_inference import ChunkInference, NetworkFill
from beam_inference.worker.trial import largest_predictions, patches_to_bound

_AT_HAND = "beam_inference.worker.predict:network"
"""Stands for the path of a network that is given itself."""


Arrays = TypeVar("Arrays", AnyArray, list[AnyArray])
"""An array, or several of any shapes."""


def predict(
    array: Arrays,
    network: str | Callable[[Any], Any],
    *,
    patch_shape: Sequence[int] | None = None,
    patch_overlap: Sequence[int] = (0, 0, 0),
    lattice: Literal["stride", "spread", "pad"] = "stride",
    blend: Literal["bump", "constant"] | Mapping[str, float | str] = "bump",
    crop_margin: Sequence[int] = (0, 0, 0),
    output_channels: int = 1,
    dims: Literal[2, 3] = 3,
    sections: int = 1,
    planes: Sequence[str] | None = None,
    combine_planes: str | Mapping[str, Sequence[Mapping[str, int]]] = "mean",
    normalize: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] = "none",
    denormalize: bool = False,
    activation: Literal["none", "sigmoid", "softmax"] = "none",
    prediction_bound: float | None = None,
    batch_size: int = 1,
    device: str = "auto",
    engine: str | None = None,
    threads: int | None = None,
    augment: Literal["none", "xy", "xyz"] | Mapping[str, Sequence[str]] = "none",
    partition: Sequence[int] = (1, 1, 1),
    fill: Literal["reflect", "symmetric", "edge", "constant"] = "reflect",
    fill_value: float = 0.0,
    fill_units: Literal["stored", "network"] = "stored",
) -> Arrays:
    """Run a network over an array, patch by patch, and blend its predictions.

    Several arrays, of any shapes, may be given as a list: the result is a list, and each of its
    arrays is as if the array were alone; the network is loaded once for each shape of patches.

    The result has the bits that a job gives over a volume of the same values with the same
    settings, on the same device. Settings mean what the keys of a job file of the same name mean.
    A network of PyTorch is copied, not changed. Two settings of the process stay as they were
    needed: PyTorch's number of threads, and the flags by which cuDNN is deterministic.

    Example:
        >>> import numpy as np
        >>> from beam_inference import predict
        >>> image = np.arange(4 * 6 * 6, dtype=np.uint8).reshape(4, 6, 6)
        >>> result = predict(
        ...     image, lambda batch: 1 - batch, patch_shape=(4, 4, 4), patch_overlap=(0, 2, 2),
        ...     normalize={"scale": 0.5},
        ... )
        >>> result.shape, result.dtype.name
        ((1, 4, 6, 6), 'float32')
        >>> result[0, 0, 0].round(5).tolist()
        [1.0, 0.5, 0.0, -0.5, -1.0, -1.5]

    Args:
        array: shape (Z, Y, X) or (input channels, Z, Y, X), of integers or floats; or a list of
            such arrays.
        network: a ``torch.nn.Module`` or ``torch.export.ExportedProgram``; or a function that maps
            float32 NumPy arrays (N, input channels, Z, Y, X) to such arrays; or a path, as
            ``model.path`` in a job file.
        patch_shape: voxels of a patch, the network's output, ZYX; by default each array is one
            patch.
        patch_overlap: voxels shared by neighbouring patches, ZYX.
        lattice: where patches lie that do not fit the array exactly.
        blend: weights where patches overlap: "bump", "constant", or a mapping with ``gaussian`` and
            ``floor``.
        crop_margin: voxels by which the network's input exceeds its patch, per side, ZYX.
        output_channels: channels of the network's output.
        dims: 2 for a network of planes, which takes (N, C, Y, X).
        sections: of such a network, how many neighbouring sections it takes as channels.
        planes: the planes that such a network is run over, such as ``["yx", "zx", "zy"]``; patches
            are then 3-D.
        combine_planes: how its answers for them become one: "mean", "vote" or a mapping with
            ``sum``.
        normalize: from stored values to the network's input: "none", "unit", or a mapping with
            ``scale``, ``offset`` and ``clip``, or a list of steps.
        denormalize: whether that is undone on the network's values.
        activation: applied to the network's output, before blending.
        prediction_bound: how large the network's values are, after the activation; by default 1
            after an activation, else the largest value of a trial on three patches.
        batch_size: patches per network call; halved where the device is out of memory.
        device: where the network runs; "auto" is the GPU, if there is one.
        engine: what runs the network; by default "numpy" for functions, else "torch". Unlike a job,
            this function does not compare what another engine answers with PyTorch.
        threads: CPU threads of the network, by default as many as there are cores for each process
            of ``partition``; they change its last bits.
        augment: average over flips and transposes of each patch, or with ``{"mirror": "zyx"}``
            over flips of these axes alone.
        partition: processes of this machine that share each patch, along z, y and x; each has
            ``threads``.
        fill: what lies outside the array, where patches and crop margins reach beyond it.
        fill_value: value for ``fill="constant"``.
        fill_units: what that is: a stored value, which is normalised as others are, or one that
            the network sees.

    Returns:
        The blended predictions, float32, shape (output channels, Z, Y, X); of several arrays a list
        of them, in the order of the arrays.

    Raises:
        ConfigError: a setting is not valid, or the device is absent.
        ModelContractError: the network cannot be loaded, or returns arrays of another shape.
        EngineError: the engine cannot run the network.
        NonFiniteError: the result has NaN or infinite values.
        DeviceOutOfMemory: one patch at a time is still too much.
        Exception: what the network itself raises passes as it is.
    """
    user_network = None if isinstance(network, str) else as_network(network)
    is_function = user_network is not None and user_network.kind == "function"

    def settings(channels: AnyArray) -> JobConfig:
        return _parse_settings(
            model={
                "path": network if isinstance(network, str) else _AT_HAND,
                "input_channels": channels.shape[0],
                "output_channels": output_channels,
                "dims": dims,
                "sections": sections,
                "planes": None if planes is None else list(planes),
                "combine_planes": combine_planes,
                "channels": None if augment == "none" else [{}] * output_channels,
                "normalize": normalize,
                "denormalize": denormalize,
                "activation": activation,
                "prediction_bound": prediction_bound,
                "crop_margin": list(crop_margin),
            },
            inference={
                "patch_shape": list(channels.shape[1:] if patch_shape is None else patch_shape),
                "patch_overlap": list(patch_overlap),
                "lattice": lattice,
                "blend": blend if isinstance(blend, str) else dict(blend),
                "chunk_shape": list(channels.shape[1:]),
                "batch_size": batch_size,
                "device": "cpu" if is_function else _definite_device(device),
                "engine": engine or ("numpy" if is_function else "torch"),
                "threads": threads or max(1, usable_cores() // max(1, math.prod(partition))),
                "partition": list(partition),
                "augment": (
                    augment
                    if isinstance(augment, str)
                    else {name: list(axes) for name, axes in augment.items()}
                ),
            },
            fill={"fill": fill, "fill_value": fill_value, "fill_units": fill_units},
        )

    if not isinstance(array, list):
        channels = _with_channels(array)
        config = settings(channels)
        return _predict_array(channels, config, _load(config, user_network))
    # Arrays of one shape of patches one after the other: so one network is held at a time.
    every = [_with_channels(each) for each in array]
    configs = [settings(each) for each in every]
    results: dict[int, AnyArray] = {}
    by_patch: dict[tuple[int, Zyx], list[int]] = {}
    for index, each in enumerate(configs):
        kind = (each.model.input_channels, each.inference.patch_shape)
        by_patch.setdefault(kind, []).append(index)
    for indices in by_patch.values():
        predictor = _load(configs[indices[0]], user_network)
        for index in indices:
            results[index] = _predict_array(every[index], configs[index], predictor)
    return [results[index] for index in range(len(every))]


def _mix_values(channels: AnyArray, patch: AnyArray) -> AnyArray:
    """A patch of values of an array (C, Z, Y, X), drawn from anywhere in it."""
    places = np.random.default_rng(0).integers(0, channels[0].size, patch.shape[1:])
    z, y, x = np.unravel_index(places, channels.shape[1:])
    mixed: AnyArray = channels[:, z, y, x]
    return mixed


def _predict_array(
    channels: AnyArray, config: JobConfig, predictor: Predictor
) -> NDArray[np.float32]:
    """Run a network that is loaded over an array (C, Z, Y, X)."""
    if config.input.fill == "constant" and config.input.network_fill is None:
        check_fill_value("fill_value", config.input.fill_value, channels.dtype)
    plan = plan_array(channels.shape[1:], config)
    work = plan.work(0)
    model = config.model
    batch_size = config.inference.patches_per_call
    normalization = make_normalization(
        _of_no_volume(config), channels.dtype, is_undone=model.denormalize
    )
    bound = model.stated_bound
    if bound is None:
        patches = patches_to_bound(lambda box: _cut_out(channels, box, config), plan)
        largest = largest_predictions(
            predictor,
            patches,
            partial(_mix_values, channels),
            normalization,
            batch_size,
            [range(model.output_channels)],
        )
        bound = bound_after_trial(*largest)
    fill = config.input
    inference = ChunkInference(
        predictor,
        normalization,
        model.output_channels,
        batch_size,
        bound,
        largest=config.largest_predictions[0],
        window=config.inference.window,
        fill=None if fill.fill_units == "stored" else NetworkFill(plan.volume, fill.fill_value),
    )
    cutout = _cut_out(channels, work.input_box, config)
    return inference.infer(inference.start_upload(cutout, work.input_box), work).core


def _definite_device(device: str) -> str:
    if device != "auto":
        return device
    return find_accelerator() or "cpu"


def _with_channels(array: AnyArray) -> AnyArray:
    """The array (C, Z, Y, X) in the machine's byte order.

    Raises:
        ConfigError: it is no array, has other axes, no voxels, or values that are not real numbers.
    """
    if isinstance(array, tuple):  # NumPy would take its arrays for channels of one
        raise ConfigError(
            f"expected an array, or a list of arrays; found a tuple of {len(array)}: give "
            "list(arrays)"
        )
    if isinstance(array, np.ma.MaskedArray):  # NumPy would drop its mask
        raise ConfigError(
            "expected an array; found one with a mask, which the network cannot take: give "
            "array.filled(…), the value that masked voxels are to have"
        )
    array = np.asarray(array)
    is_number = array.dtype.kind in "iuf" and array.dtype.itemsize <= 8
    if array.ndim not in (3, 4) or array.size == 0 or not is_number:
        raise ConfigError(
            "expected an array (Z, Y, X) or (C, Z, Y, X) of integers or floats of up to 64 bits; "
            f"found one of shape {list(array.shape)} and dtype {array.dtype}"
        )
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return array if array.ndim == 4 else array[None]


def _parse_settings(model: Json, inference: Json, fill: Json) -> JobConfig:
    """The settings as those of a job, which checks them; its volumes do not exist."""
    values = {
        "input": {"path": "array", **fill},
        "output": {"path": "prediction", "dtype": "float32"},
        "model": model,
        "inference": inference,
    }
    return parse_job(values, Path.cwd(), "what predict was called with")


def _of_no_volume(config: JobConfig) -> DefiniteNormalize:
    normalize = config.model.normalize
    if levels_files(normalize) or depends_on_place(normalize):
        raise ConfigError("normalize: levels belong to a volume; give scale, offset and clip")
    return as_definite(normalize)


def plan_array(shape: Sequence[int], config: JobConfig) -> InferencePlan:
    """The plan of a job whose only chunk is the array."""
    z, y, x = shape
    box = BoundingBox((0, 0, 0), (z, y, x))
    zero: Zyx = (0, 0, 0)
    return make_plan(
        volume=box,
        roi=box,
        context=zero,
        patch_shape=config.inference.patch_shape,
        patch_overlap=config.inference.patch_overlap,
        chunk_shape=box.shape,
        crop_margin=config.model.input_margin,
        strategy="recompute",
        chunk_crop_margin=zero,
        block_shape=box.shape,
        lattice=config.inference.lattice,
    )


def _load(config: JobConfig, network: LoadedNetwork | None) -> Predictor:
    if network is None:
        model = local_model(config.model)
        model_sha256(model)  # which checks files of other engines than PyTorch, as for jobs
        return load_predictor(model, config.inference)
    if network.kind != "function":  # it will be brought to its device, and to evaluation mode
        network = LoadedNetwork(_copy(network.network), network.kind)
    return load_predictor(config.model, config.inference, network=network)


def _copy(network: Any) -> Any:
    """Copy a module, and what it keeps of its last answer, such as weights that were normalised."""
    import torch

    if isinstance(network, torch.export.ExportedProgram):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of PyTorch's about its own classes
            return deepcopy(network)
    kept = [
        value
        for module in network.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    with torch.no_grad():  # copies of TorchScript would be steps on the way to a gradient
        return deepcopy(network, {id(value): value.detach().clone() for value in kept})


def _cut_out(array: AnyArray, box: BoundingBox, config: JobConfig) -> AnyArray:
    """The values of a box, which may reach beyond the array."""
    _, z, y, x = array.shape
    volume = BoundingBox((0, 0, 0), (z, y, x))
    fill = config.input.fill
    source = source_box(box, volume, fill)
    values = array[(slice(None), *source.slices_in(volume))]
    value = config.input.fill_value if config.input.network_fill is None else 0.0
    return fill_outside(values, source, box, volume, fill, value)
