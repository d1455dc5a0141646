"""Networks that predict batches of patches: which implementation a job needs."""

from __future__ import annotations

from dataclasses import replace

from beam_inference.config.job import Inference
from beam_inference.config.job import Network as NetworkConfig
from beam_inference.engines.choice import (
    CPU_ENGINES,
    engines_to_measure,
    engines_to_try,
    runs_on_cpu_only,
)
from beam_inference.engines.identity import identity_predictor
from beam_inference.engines.predictor import Predictor
from beam_inference.errors import ModelContractError

__all__ = ["CPU_ENGINES", "Predictor", "engines_to_measure", "engines_to_try"]


def load_predictor(
    model: NetworkConfig, inference: Inference, *, allow_pickle: bool = False
) -> Predictor:
    """Load a job's network on its device; ``inference.device`` and ``inference.engine`` must not be "auto".

    Unless ``allow_pickle``, no file is loaded in a way that can execute code it carries.

    Raises:
        ModelContractError: the model cannot be loaded, or contradicts the job.
        EngineError: the engine cannot run it.
        ConfigError: the device is absent.
    """
    if inference.augment != "none":
        from beam_inference.engines.augmented import augment

        plain = inference.model_copy(update={"augment": "none"})
        predictor = load_predictor(model, plain, allow_pickle=allow_pickle)
        offsets = [channel.affinity for channel in model.channels or ()]
        forward = augment(predictor.predict, predictor.device, inference.augment, offsets)
        return replace(predictor, predict=forward)
    if model.path == "identity":
        return identity_predictor(model.activation)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ModelContractError(
            f"model.path {model.path} needs PyTorch, which cannot be imported: {error}"
        ) from None
    from beam_inference.engines.torch_loading import load_torch_predictor

    return load_torch_predictor(model, inference, allow_pickle=allow_pickle)


def load_reference(
    model: NetworkConfig, inference: Inference, *, allow_pickle: bool = False
) -> Predictor | None:
    """The same network in PyTorch, in float32: what another engine or precision is held against.

    None where the job asks for just that, or where there is no such network. Raises as
    :func:`load_predictor`.
    """
    plain = inference.model_copy(
        update={"engine": "torch", "precision": "float32", "memory_format": "contiguous"}
    )
    if model.path == "identity" or runs_on_cpu_only(model) or inference == plain:
        return None
    return load_predictor(model, plain, allow_pickle=allow_pickle)
