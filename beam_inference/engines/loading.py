"""Loads a job's network on its device."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from beam_inference.config.engines import (
    Engine,
    LoadRequest,
    NetworkKind,
    get_engine,
    make_anew,
)
from beam_inference.config.inference import Inference, Mirror
from beam_inference.config.network import Network, network_keys
from beam_inference.engines.cache import user_cache
from beam_inference.engines.choice import engine_description, is_installed
from beam_inference.engines.ensemble import average_members
from beam_inference.engines.exact_sums_check import check_exact_sums
from beam_inference.engines.identity import identity_predictor
from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.numpy_forward import numpy_forward
from beam_inference.engines.over_planes import plane_batch_shapes, run_over_planes
from beam_inference.engines.per_shape import patch_by_patch, per_shape
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.scaled import repeat_output, scale_output
from beam_inference.engines.surroundings import describe_surroundings
from beam_inference.engines.turned import turn_axes
from beam_inference.errors import (
    DeviceOutOfMemory,
    EngineError,
    ModelContractError,
    WorkerFault,
)
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import grown_shape
from beam_inference.models.hashes import NetworkFiles, file_states
from beam_inference.models.loading import LoadedNetwork, load_network, suffix_of
from beam_inference.models.local_files import existing_file
from beam_inference.models.trust import Trust

if TYPE_CHECKING:
    from numpy.typing import NDArray


logger = logging.getLogger(__name__)


def load_predictor(
    model: Network,
    inference: Inference,
    *,
    trust: Trust = Trust.NOTHING,
    network: LoadedNetwork | None = None,
    quantized: bytes | None = None,
) -> Predictor:
    """Load a job's network on its device.

    Args:
        model: the job's section, its files local.
        inference: the job's section; device and engine must not be left to choose.
        trust: which code that the network's files carry may run.
        network: the network itself, which is changed; by default ``model.path`` is loaded.
        quantized: in precision int8, what :func:`quantize_network` has made of it at the job's
            first launch.

    Raises:
        ModelContractError: the model cannot be loaded, or contradicts the job.
        EngineError: the engine cannot run it.
        ConfigError: the device is absent.
    """
    if network is None and model.path == "identity":
        predictor = identity_predictor(model.activation)
    elif network is None and model.ensemble:
        predictor = _load_members(model, [inference] * len(model.members), trust)
    else:
        predictor = _load(model, inference, trust, network, quantized)
    return _surround(predictor, model, inference)


def _surround(predictor: Predictor, model: Network, inference: Inference) -> Predictor:
    """A network with what the job has around it."""
    if model.axes == "xyz":
        predictor = replace(predictor, predict=turn_axes(predictor.predict, predictor.device))
    if model.finer_by != (1, 1, 1):
        scaled = scale_output(predictor.predict, predictor.device, model.finer_by)
        predictor = replace(predictor, predict=scaled)
    if model.planes is not None:
        over_planes = run_over_planes(predictor.predict, predictor.device, model)
        predictor = replace(predictor, predict=over_planes)
    predictor = _augment(predictor, model, inference)
    if model.coarser_by == (1, 1, 1):
        return predictor
    repeated = repeat_output(predictor.predict, predictor.device, model.coarser_by)
    return replace(predictor, predict=repeated)


def _load_members(model: Network, inferences: Sequence[Inference], trust: Trust) -> Predictor:
    """Load the networks of an ensemble, each with its settings, as one that answers their mean."""
    others: list[Any] = []
    members = [
        _load(each, inference, trust, None, None, others)
        for each, inference in zip(model.members, inferences, strict=True)
    ]
    return average_members(members, model.shares, network_keys(model))


def _augment(predictor: Predictor, model: Network, inference: Inference) -> Predictor:
    """The predictor as one whose answers are means over the symmetries of the job."""
    if inference.augment == "none":
        return predictor
    from beam_inference.engines.augmented import augment, symmetries

    if isinstance(inference.augment, Mirror):
        over = symmetries("".join(inference.augment.mirror), transpose=False)
    else:
        over = symmetries("zyx" if inference.augment == "xyz" else "yx", transpose=True)
    offsets = [channel.affinity for channel in model.channels or ()]
    forward = augment(predictor.predict, predictor.device, over, offsets)
    return replace(predictor, predict=forward)


def quantize_network(
    model: Network,
    inference: Inference,
    samples: Sequence[NDArray[np.float32]],
    *,
    trust: Trust = Trust.NOTHING,
) -> bytes:
    """Make a network of integers of a job's network, for precision int8.

    Args:
        model: the job's section, its files local.
        inference: the job's section; device and engine must not be left to choose.
        samples: inputs of the network, normalised: (C, Z, Y, X), the crop margin included. What it
            computes of them decides how values become integers.
        trust: as for :func:`load_predictor`.

    Raises:
        UserError: as for :func:`load_predictor`.
    """
    engine = get_engine(inference.engine)
    if engine.quantize is None or model.path == "identity":
        raise EngineError(
            f"precision: int8 is not for model.path {model.path} with engine: {engine.name}: write "
            "precision: float32"
        )
    engine_description(model, inference)  # is it there?
    files = None if trust else NetworkFiles.of(model)
    source = _source(engine, model, inference, trust)
    one_patch = inference.model_copy(update={"batch_size": 1, "precision": "float32"})
    request = _request(source, model, one_patch)
    request = replace(request, keep=_keeper(engine, request, files))
    try:
        return engine.quantize(request, [each.reshape(request.batch_shape) for each in samples])
    except EngineError as error:
        if suffix_of(model) != ".pt2" or inference.patches_per_call == 1:
            raise
        raise EngineError(
            f"precision: int8 is calibrated on one patch at a time, and model.path {model.path} "
            f"does not take one ({error}). Export it for a batch of 1, and write "
            "inference.batch_size: 1, or write precision: float32."
        ) from None


def load_reference(
    model: Network, inference: Inference, *, trust: Trust = Trust.NOTHING
) -> Predictor | None:
    """Load the same network in PyTorch, in float32, undivided, to compare what the job runs with.

    A network that PyTorch cannot run is loaded in the engine that reads its file as it is meant, if
    that is installed, or, in precision int8, in its own engine, in float32. In an ensemble, each is
    loaded by these rules.

    Returns:
        None where the job asks for just that, or where there is nothing else to compare with.

    Raises:
        EngineError: that engine cannot run it, so that nobody would see a wrong answer.
        UserError: as :func:`load_predictor`.
    """
    plain = inference.model_copy(
        update={
            "engine": "torch",
            "precision": "float32",
            "memory_format": "contiguous",
            "partition": (1, 1, 1),
        }
    )
    if model.path == "identity" or inference == plain:
        return None
    inferences = [_reference_of(each, inference, plain) for each in model.members]
    if all(each == inference for each in inferences):
        return None
    others = {each.engine for each in inferences} - {"torch", inference.engine}
    try:
        if not model.ensemble:
            return load_predictor(model, inferences[0], trust=trust)
        reference = _surround(_load_members(model, inferences, trust), model, inference)
    except EngineError as error:
        if not others:
            raise
        raise EngineError(
            f"what {inference.engine} answers cannot be compared: {str(error).removesuffix('.')}. "
            f"A network that only {inference.engine} runs is not run: nobody would see where it "
            "answers otherwise than the file means. Export it with other operations."
        ) from None
    # of several, the one that is less exact
    engine = {"engine": min(others)} if others else {}
    return replace(reference, description={**reference.description, **engine})


_READS_AS_MEANT = {".onnx": "onnxruntime"}
"""The engine, by the suffix of a file, whose answers are what the file's format means."""


def _reference_of(model: Network, inference: Inference, plain: Inference) -> Inference:
    """How one network is run to compare with; as the job does where there is nothing else."""
    engine = get_engine(inference.engine)
    suffix = suffix_of(model)
    if engine.networks == "torch" and suffix not in engine.suffixes:
        return plain
    if inference.precision == "int8":
        return inference.model_copy(update={"precision": "float32"})
    other = _READS_AS_MEANT.get(suffix, engine.name)
    if other == engine.name:
        return inference
    if not is_installed(get_engine(other)):
        logger.info(
            "%s is not installed: it would tell whether %s answers right", other, engine.name
        )
        return inference
    return inference.model_copy(update={"engine": other})


@dataclass(frozen=True, slots=True)
class _Source:
    """A network and its settings, as an engine receives them.

    Attributes:
        network: a network, or the path of a file.
        kind: what the network is.
        device: the device as PyTorch names it.
        parameters: hash of the network's parameters, where no file of weights states them.
        files: the files that determine the network, as they were before it was loaded; None where
            none do.
    """

    network: Any
    kind: NetworkKind
    device: str
    parameters: str | None = None
    files: NetworkFiles | None = None


def _load(
    model: Network,
    inference: Inference,
    trust: Trust,
    network: LoadedNetwork | None,
    quantized: bytes | None,
    others: list[Any] | None = None,
) -> Predictor:
    engine = get_engine(inference.engine)
    description = engine_description(model, inference)  # before anything is loaded: is it there?
    if inference.precision == "int8":
        if quantized is None:
            raise EngineError(
                "precision: int8 is for jobs, whose first launch makes a network of integers: "
                "write precision: float32"
            )
        description["quantized"] = hashlib.sha256(quantized).hexdigest()
    if engine.arrays == "torch" or engine.networks == "torch":
        _check_torch(model)
    if network is None:
        files = None if trust else NetworkFiles.of(model)
        source = replace(_source(engine, model, inference, trust), files=files)
        if others is not None and source.kind == "module" and not isinstance(source.network, Path):
            _refuse_shared(source.network, others, model)
            others.append(source.network)
    else:
        _check_runs(engine, network, model)
        source = _prepare_source(engine, network, model, inference)
    if source.parameters is not None:
        description["parameters"] = source.parameters
    if inference.members > 1:
        forward = _divided_forward(source, model, inference, trust, is_given=network is not None)
    else:
        forward = _forward(engine, source, model, inference, quantized)
    if engine.arrays == "numpy":
        forward = numpy_forward(
            forward, activation=model.activation, dims=model.dims, heads=model.heads or ()
        )
        return Predictor(NumpyDevice(), forward, description)
    import torch

    from beam_inference.engines.torch_forward import torch_predictor
    from beam_inference.engines.torch_network import torch_memory_format

    predictor = torch_predictor(
        forward,
        torch.device(source.device),
        precision=inference.precision,
        activation=model.activation,
        heads=model.heads or (),
        dims=model.dims,
        threads=inference.threads or 1,
        memory_format=torch_memory_format(model, inference),
        description=description,
    )
    if not predictor.device.on_host:
        check_exact_sums(predictor.device, f"inference.device: {inference.device}")
    return predictor


def _refuse_shared(network: Any, others: Sequence[Any], model: Network) -> None:
    """Refuse a network that has parameters or buffers of an earlier one of its ensemble."""
    from beam_inference.engines.torch_network import storages_of

    if any(storages_of(network) & storages_of(other) for other in others):
        raise ModelContractError(
            f"model.path {model.path}: the factory returned a network that shares parameters with "
            "an earlier one of model.ensemble, so both would have the weights that were loaded "
            "last. Make a new network at each call: keep none in a variable of the module, or in a "
            "cache."
        )


def _check_torch(model: Network) -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ModelContractError(
            f"model.path {model.path} needs PyTorch, which cannot be imported: {error}"
        ) from None


def _device(engine: Engine, inference: Inference) -> str:
    if engine.arrays == "numpy":
        return "cpu"
    from beam_inference.engines.torch_network import torch_device

    return str(torch_device(inference))


def _source(engine: Engine, model: Network, inference: Inference, trust: Trust) -> _Source:
    device = _device(engine, inference)
    if suffix_of(model) in engine.suffixes:
        if model.batch_norm == "batch":
            raise ModelContractError(
                f"{model.path} has BatchNorm as it was exported, which cannot be changed by "
                "model.batch_norm: batch. Remove that."
            )
        if model.heads is not None and not engine.joins_heads:
            raise EngineError(
                f"inference.engine: {engine.name} takes one array of {model.path}, and model.heads "
                "names several: write engine: openvino or onnxruntime, or remove model.heads"
            )
        return _Source(existing_file(model.path, "model.path"), "module", device)
    loaded = load_network(model, trust=trust)
    _check_runs(engine, loaded, model)
    if loaded.kind == "function":
        return _prepare_source(engine, loaded, model, inference)
    from beam_inference.engines.torch_network import parameters_hash

    parameters = parameters_hash(loaded, model, trust=trust)
    source = _prepare_source(engine, loaded, model, inference)
    return replace(source, parameters=parameters)


def _prepare_source(
    engine: Engine, loaded: LoadedNetwork, model: Network, inference: Inference
) -> _Source:
    device = _device(engine, inference)
    if loaded.kind == "function":
        return _Source(loaded.network, loaded.kind, device)
    from beam_inference.engines.torch_network import prepare_network

    network = prepare_network(loaded, model, inference, device)
    if model.heads is not None:
        from beam_inference.engines.torch_heads import JoinedHeads

        network = JoinedHeads(network, model.heads)
    return _Source(network, loaded.kind, device)


def _check_runs(engine: Engine, loaded: LoadedNetwork, model: Network) -> None:
    """Refuse networks of a kind that the engine does not run."""
    if engine.networks == "none":
        raise EngineError(
            f"inference.engine: {engine.name} runs {' and '.join(engine.suffixes)} files only, not "
            f"model.path {model.path}"
        )
    if loaded.kind == "function" and engine.networks == "torch":
        raise EngineError(
            f"model.path {model.path} is a function of NumPy arrays, which inference.engine: "
            f"{engine.name} does not run: write engine: numpy and device: cpu"
        )
    if loaded.kind != "function" and engine.networks == "functions":
        raise EngineError(
            f"model.path {model.path} is a network of PyTorch, which inference.engine: "
            f"{engine.name} does not run: write engine: torch, or auto"
        )


def _batch_shapes(model: Network, inference: Inference) -> list[tuple[int, ...]]:
    """Shapes of the batches that a network is called with: several, over planes of several."""
    grown = grown_shape(inference.patch_shape, model.crop_margin)
    size = inference.patches_per_call
    patch = zyx.ceil_div_each(grown, model.finer_by)
    if model.dims == 2:
        return plane_batch_shapes(model, patch, size)
    return [(size, model.input_channels, *(patch if model.axes == "zyx" else patch[::-1]))]


def _request(source: _Source, model: Network, inference: Inference) -> LoadRequest:
    """What an engine is to load for a job's batches."""
    return LoadRequest(
        network=source.network,
        kind=source.kind,
        batch_shape=_batch_shapes(model, inference)[0],
        device=source.device,
        weights=None if model.weights is None else existing_file(model.weights, "model.weights"),
        model=model,
        inference=inference,
    )


def _divided_forward(
    source: _Source, model: Network, inference: Inference, trust: Trust, *, is_given: bool
) -> Callable[[Any], Any]:
    """The forward pass of a mesh of processes; its members load the network as this one has."""
    from beam_inference.engines.partition.leader import lead_mesh
    from beam_inference.engines.partition.member import Orders, check_dividable

    check_dividable(source.network, source.kind, model)
    orders = Orders(0, "", model, inference, trust)
    return lead_mesh(source.network, orders, by_value=is_given)


def _integer_forward(
    engine: Engine, source: _Source, model: Network, inference: Inference, quantized: bytes
) -> Callable[[Any], Any]:
    """The forward pass of a network of integers, which was made for batches of one patch.

    Its constants may hold that number, so it is given no larger batch.
    """
    one_patch = inference.model_copy(update={"batch_size": 1})
    request = replace(_request(source, model, one_patch), quantized=quantized)
    forward = _convert(engine, request)
    if engine.arrays == "numpy":
        return patch_by_patch(forward, np.concatenate)
    import torch

    return patch_by_patch(forward, torch.cat)


def _forward(
    engine: Engine,
    source: _Source,
    model: Network,
    inference: Inference,
    quantized: bytes | None,
) -> Callable[[Any], Any]:
    if quantized is not None:
        return _integer_forward(engine, source, model, inference, quantized)
    request = _request(source, model, inference)
    if not engine.has_fixed_shape:
        return engine.load(request)
    files = [file for file in (source.network, request.weights) if isinstance(file, Path)]
    states = file_states(files)

    def convert(shape: tuple[int, ...]) -> Callable[[Any], Any]:
        shaped = replace(request, batch_shape=shape)
        forward = _convert(engine, replace(shaped, keep=_keeper(engine, shaped, source.files)))
        if isinstance(source.network, Path) and file_states(files) != states:
            raise WorkerFault(
                f"model.path {model.path}: the network's files were changed since they were loaded "
                "first, so batches of another size would be run by another network. Restore them, "
                "and give the same command again."
            )
        return forward

    try:
        return per_shape(convert, _batch_shapes(model, inference))
    except DeviceOutOfMemory as error:
        raise EngineError(
            f"inference.engine: {inference.engine}: out of memory for a batch of "
            f"{inference.batch_size}: {error}. Write a smaller inference.batch_size."
        ) from None


def _keeper(
    engine: Engine, request: LoadRequest, files: NetworkFiles | None
) -> Callable[[Callable[[], bytes]], bytes]:
    """Make what keeps an engine's conversions of a network from one process to the next."""
    if files is None:
        return make_anew

    def keep(make: Callable[[], bytes]) -> bytes:
        key = {
            # of a zip file that is read as another kind, or in other folds, the hash is the same
            "network": [files.sha256, suffix_of(files.model), files.model.folds],
            "kind": request.kind,
            "engine": engine.name,
            "batch_shape": list(request.batch_shape),
            "device": request.device,
            "settings": [
                request.model.batch_norm,
                request.model.dims,
                *([each.model_dump() for each in request.model.heads or ()]),
                request.inference.precision,
                request.inference.memory_format,
                request.threads,
            ],
            "surroundings": describe_surroundings(),
        }
        cache = user_cache()
        content = cache.read("conversion", key)
        if content is None:
            content = make()
            if files.are_unchanged():
                cache.write("conversion", key, content)
        return content

    return keep


def _convert(engine: Engine, request: LoadRequest) -> Callable[[Any], Any]:
    if engine.arrays == "numpy":
        return engine.load(request)
    from beam_inference.engines.device_errors import device_errors

    with device_errors():
        return engine.load(request)
