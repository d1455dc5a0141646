"""The job file with nothing left open: the same keys, with types that know no ``auto``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Tag, TypeAdapter, model_validator

from beam_inference.config.devices import DefiniteDevice, DeviceKind, kind_of
from beam_inference.config.engines import DefiniteEngineName
from beam_inference.config.fields import Count, Shape
from beam_inference.config.inference import Inference
from beam_inference.config.job import OUTPUT, FurtherOutput, JobConfig
from beam_inference.config.network import Network
from beam_inference.config.normalize import (
    Affine,
    DefiniteSteps,
    Normalize,
    Sections,
    normalization_kind,
)
from beam_inference.config.volumes import Output
from beam_inference.geometry.plan import Strategy
from beam_inference.geometry.zyx import Zyx

DefiniteNormalize = Annotated[
    Annotated[Literal["none", "unit"], Tag("name")]
    | Annotated[Affine, Tag("affine")]
    | Annotated[Sections, Tag("sections")]
    | Annotated[DefiniteSteps, Tag("steps")],
    Discriminator(normalization_kind),
]


_DEFINITE_NORMALIZE: TypeAdapter[DefiniteNormalize] = TypeAdapter(DefiniteNormalize)


def as_definite(normalize: Normalize) -> DefiniteNormalize:
    """A normalisation that names no levels file, as the type that says so."""
    return _DEFINITE_NORMALIZE.validate_python(normalize)


class DefiniteNetwork(Network):
    """A network whose normalisation is made of no file any more."""

    normalize: DefiniteNormalize = "none"


class DefiniteInference(Inference):
    """How the network is applied, with every choice made."""

    chunk_shape: Shape
    batch_size: Count = 1
    device: DefiniteDevice
    engine: DefiniteEngineName
    threads: Count

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
        if self.seams == "exact" and self.strategy == "auto":
            raise ValueError("strategy: auto is not decided")
        return self

    @property
    def plan_strategy(self) -> Strategy:
        """The strategy of a plan; ``seams: crop`` leaves no other choice."""
        return "crop" if self.strategy == "auto" else self.strategy


class DefiniteConfig(JobConfig):
    """A job file with every choice made: what the resolved job records and the workers go by."""

    model: DefiniteNetwork
    inference: DefiniteInference


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices that are made before the network is loaded.

    Attributes:
        device: where the network runs.
        threads: CPU threads of the network per worker process.
        normalize: how stored values become the network's input.
        chunk_shape: the unit of work, voxels ZYX.
        strategy: how chunks get the values of patches that they share with neighbours.
        chunk_crop_margin: voxels cropped at chunk borders, ZYX; None unless ``seams`` is "crop".
        value_ranges: values that map onto an integer dtype's range, by the key of the output; None
            where nothing is scaled.
    """

    device: DefiniteDevice
    threads: int
    normalize: DefiniteNormalize
    chunk_shape: Zyx
    strategy: Strategy
    chunk_crop_margin: Zyx | None
    value_ranges: Mapping[str, tuple[float, float] | None]

    @property
    def device_kind(self) -> DeviceKind:
        """The kind of the device, without its number."""
        return kind_of(self.device)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Choices that may need a trial of the network.

    Attributes:
        engine: what runs the network.
        memory_format: how PyTorch lays out the network's arrays.
        batch_size: patches per call.
    """

    engine: str
    memory_format: str
    batch_size: int


def make_definite(config: JobConfig, settings: Settings, engine: EngineSettings) -> DefiniteConfig:
    """Put the choices into a job: the only place where a definite job is made of an open one.

    Args:
        config: the job as the user wrote it.
        settings: the choices made without the network.
        engine: the choices that the network's trial made.

    Returns:
        A job of its own, validated anew.
    """
    model = _values(config.model) | {"normalize": settings.normalize}
    inference = _values(config.inference) | {
        "device": settings.device,
        "threads": settings.threads,
        "chunk_shape": settings.chunk_shape,
        "strategy": "auto" if settings.strategy == "crop" else settings.strategy,
        "chunk_crop_margin": settings.chunk_crop_margin,
        "engine": engine.engine,
        "memory_format": engine.memory_format,
        "batch_size": engine.batch_size,
    }
    ranges = settings.value_ranges
    output = _values(config.output) | {"value_range": ranges[OUTPUT]}
    outputs = {
        name: FurtherOutput.model_validate(
            _values(each) | {"value_range": ranges[f"outputs.{name}"]}
        )
        for name, each in config.outputs.items()
    }
    return DefiniteConfig(
        input=config.input,
        inputs=config.inputs,
        output=Output.model_validate(output),
        model=DefiniteNetwork.model_validate(model),
        inference=DefiniteInference.model_validate(inference),
        postprocess=config.postprocess,
        outputs=outputs,
        mask=config.mask,
        roi=config.roi,
        job=config.job,
        storage=config.storage,
    )


def _values(model: Network | Inference | Output) -> dict[str, object]:
    return dict(model)
