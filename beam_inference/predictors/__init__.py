"""Networks that predict batches of patches: which implementation a job needs."""

from __future__ import annotations

from beam_inference.config import Inference, factory_parts
from beam_inference.config import Network as NetworkConfig
from beam_inference.errors import ConfigError, ModelContractError
from beam_inference.predictors.engine import (
    CONVERTED_SUFFIXES,
    CPU_ENGINES,
    engine_description,
    engines_to_measure,
    engines_to_try,
    suffix_of,
)
from beam_inference.predictors.protocol import Predictor

__all__ = ["CPU_ENGINES", "Predictor", "engines_to_measure", "engines_to_try"]


def load_predictor(model: NetworkConfig, inference: Inference, *, allow_pickle: bool = False) -> Predictor:
    """Load a job's network on its device; ``inference.device`` and ``inference.engine`` must not be "auto".

    Unless ``allow_pickle``, no file is loaded in a way that can execute code it carries.

    Raises:
        ModelContractError: the model cannot be loaded, or contradicts the job.
        EngineError: the engine cannot run it.
        ConfigError: the device is absent.
    """
    if inference.augment != "none":
        from beam_inference.predictors.augmented import AugmentedPredictor

        plain = inference.model_copy(update={"augment": "none"})
        inner = load_predictor(model, plain, allow_pickle=allow_pickle)
        return AugmentedPredictor(inner, inference.augment, [each.affinity for each in model.channels or ()])
    if model.path == "identity":
        from beam_inference.predictors.identity import IdentityPredictor

        return IdentityPredictor(model.activation)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ModelContractError(f"model.path {model.path} needs PyTorch, which cannot be imported: {error}") from None
    from beam_inference.predictors.torch_predictor import load_torch_predictor

    return load_torch_predictor(model, inference, allow_pickle=allow_pickle)


def runs_on_cpu_only(model: NetworkConfig) -> bool:
    """Whether the network's file is one that PyTorch cannot run."""
    return suffix_of(model) in CONVERTED_SUFFIXES


def resolved_device(device: str) -> str:
    """Make "auto" definite: "cuda" where torch sees a CUDA device, else "cpu"."""
    if device != "auto":
        return device
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_memory() -> int | None:
    """Bytes of memory of the CUDA device, or None where there is none."""
    try:
        import torch
    except ImportError:
        return None
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def load_reference(model: NetworkConfig, inference: Inference, *, allow_pickle: bool = False) -> Predictor | None:
    """The same network in PyTorch, in float32: what another engine or precision is held against.

    None where the job asks for just that, or where there is no such network. Raises as :func:`load_predictor`.
    """
    plain = inference.model_copy(update={"engine": "torch", "precision": "float32", "memory_format": "contiguous"})
    if model.path == "identity" or runs_on_cpu_only(model) or inference == plain:
        return None
    return load_predictor(model, plain, allow_pickle=allow_pickle)


def describe_engine(model: NetworkConfig, inference: Inference) -> dict[str, str]:
    """What :meth:`Predictor.describe` will say on a worker that has this process's libraries; nothing is loaded."""
    if model.path == "identity":
        from beam_inference.predictors.identity import IdentityPredictor

        return IdentityPredictor().describe()
    if factory_parts(model.path) and model.weights is None:
        raise ConfigError(
            f"model.path {model.path} has no model.weights beside it: workers elsewhere could not tell whether they "
            "have the same network. Save its weights to a file, and name that as model.weights."
        )
    return engine_description(model, inference)


def model_sha256(model: NetworkConfig) -> str:
    """Hash of what defines the network; "identity" for identity. Raises ModelContractError for absent files."""
    if model.path == "identity":
        return "identity"
    from beam_inference.predictors.model_files import files_sha256

    return files_sha256(model)
