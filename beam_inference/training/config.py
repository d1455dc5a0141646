"""What a training file may say, and its reading: YAML, with unknown keys refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, PositiveFloat, ValidationError, model_validator

from beam_inference.config.definite import DefiniteNormalize
from beam_inference.config.factories import factory_parts
from beam_inference.config.fields import (
    Count,
    Margin,
    Model,
    Natural,
    Point,
    Shape,
    Url,
    VoxelSize,
    unknown_key_hint,
)
from beam_inference.config.job_file import absolute_path
from beam_inference.config.normalize import Sections, object_steps, section_steps
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import Mask, VolumeSource
from beam_inference.config.yaml_text import parse_yaml
from beam_inference.errors import ConfigError
from beam_inference.foreign_text import shorten_value
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx
from beam_inference.training.augmentation import Augmentation
from beam_inference.training.labelled_volumes import LabelledVolume
from beam_inference.training.split import Split, default_block_shape
from beam_inference.training.targets import Classes, Stored, TargetConfig

Share = Annotated[float, Field(ge=0, lt=1)]


class BoxConfig(Model):
    """A box of voxels of a volume."""

    start: Point = Field(description="first voxel, z, y, x")
    stop: Point = Field(description="one past the last voxel, z, y, x")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(b <= a for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"a box from {list(self.start)} to {list(self.stop)} has no voxels")
        return self

    @classmethod
    def of(cls, box: BoundingBox) -> Self:
        """The box as it stands in a file."""
        return cls(start=box.start, stop=box.stop)

    @property
    def box(self) -> BoundingBox:
        """The box."""
        return BoundingBox(self.start, self.stop)


class VolumeConfig(Model):
    """A volume and its labels."""

    image: Url = Field(description="what the network reads")
    labels: Url = Field(description="what is known of it, on the same grid")
    scale: Natural = Field(0, description="which scale of the image, 0 the finest")
    labels_scale: Natural = Field(0, description="which scale of the labels")
    mask: Mask | None = Field(None, description="where labels count; everywhere if none")
    within: BoxConfig | None = Field(
        None, description="box in which labels count; everywhere if none"
    )
    without: list[BoxConfig] = Field(
        [], description="boxes in which labels do not count, such as those corrected since"
    )
    name: str = Field("", description="of the place that the volume shows, for the split")
    weight: PositiveFloat = Field(1.0, description="how often samples come from it, per place")


class SplitConfig(Model):
    """Which voxels are for training."""

    block_shape: Shape | None = Field(None, description="of blocks; default four patches an axis")
    validation: Share = Field(0.1, description="share of blocks for validation; 0 for none")
    test: Share = Field(0.1, description="share of blocks that training never sees")
    seed: Natural = Field(0, description="another one gives another split")


class UNetConfig(Model):
    """The residual U-Net."""

    widths: list[Count] = Field([16, 32, 64, 80], description="feature maps of each level")
    pooling: Shape = Field((1, 2, 2), description="factor from one level to the next, z, y, x")
    normalization: Literal["instance", "batch"] = Field(
        "instance", description="batch: in place, of all ranks together; half of the memory"
    )


class NetworkConfig(Model):
    """The network that is trained."""

    path: Url | None = Field(
        None, description="package.module:factory or file.py:factory; default the residual U-Net"
    )
    residual_unet: UNetConfig = Field(UNetConfig(), description="where there is no path")
    weights: Url | None = Field(None, description="weights to begin with; default random ones")
    input_channels: Count = 1
    crop_margin: Margin = Field(
        (0, 0, 0), description="voxels by which the input exceeds its patch, per side"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.path is not None and factory_parts(self.path) is None:
            raise ValueError(
                f"path is {self.path}; expected package.module:factory or file.py:factory, "
                "since only networks with their source can be trained"
            )
        return self


class LossConfig(Model):
    """What is made small."""

    kind: Literal["cross_entropy", "dice_cross_entropy"] = Field(
        "cross_entropy", description="of logits: binary, or of classes for such targets"
    )
    dice: float = Field(0.9, ge=0, le=1, description="share of Dice in dice_cross_entropy")
    balance: float = Field(
        0.0,
        ge=0,
        le=1,
        description="0: each voxel counts alike. 1: each class counts alike, in each step",
    )


class PatchShapeConfig(Model):
    """A shape of patches that a network is trained with."""

    shape: Shape = Field(description="voxels, z, y, x")
    weight: PositiveFloat = Field(1.0, description="how often samples are of it")


class OptimizerConfig(Model):
    """How weights follow the loss."""

    kind: Literal["adamw", "sgd"] = "adamw"
    learning_rate: PositiveFloat = 1e-3
    weight_decay: FiniteFloat = Field(0.0, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1, description="of sgd")
    schedule: Literal["constant", "cosine"] = Field(
        "cosine", description="cosine: the learning rate sinks to zero at the last step"
    )
    warm_up: Natural = Field(0, description="steps over which the learning rate rises")


class TrainingConfig(Model):
    """A training file."""

    volumes: list[VolumeConfig] = Field(min_length=1)
    output: Url = Field(description="local folder for checkpoints, weights, page and job file")
    patch_shape: Shape = Field(description="voxels of a patch, of the job and of validation")
    patch_shapes: list[PatchShapeConfig] | None = Field(
        None, min_length=1, description="shapes that samples have; default patch_shape alone"
    )
    target: TargetConfig
    network: NetworkConfig = NetworkConfig()
    normalize: DefiniteNormalize = Field("unit", description="as model.normalize of a job")
    voxel_size_nm: VoxelSize | None = Field(None, description="default: the first image's")
    split: SplitConfig = SplitConfig()
    label_weights: dict[int, float] | None = Field(
        None, description="weights of voxels by label, by which boxes are chosen; others weigh 1"
    )
    augmentation: Augmentation | None = Augmentation()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="share of the average of weights that a step keeps, such as 0.999"
    )
    seed: Natural = 0
    steps: Count = 1000
    batch_size: Count = Field(1, description="samples of a step, of all ranks together")
    partition: Shape = Field(
        (1, 1, 1), description="ranks along z, y, x that divide each sample between them"
    )
    workers: Natural = Field(0, description="processes that read; 0 for threads alone")
    validation_every: Count = 100
    validation_batches: Count = 4
    checkpoint_every: Count = 100
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count | None = Field(None, description="CPU threads of a rank; default all")
    cache_bytes: Natural = 2**28
    storage: Storage = Storage()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.normalize, Sections) or section_steps(self.normalize):
            raise ValueError("normalize: sections belong to one volume; write scale and offset")
        if object_steps(self.normalize):
            raise ValueError("normalize: an object belongs to one volume; write mean and std alone")
        self._check_patch_shapes()
        augmentation = self.augmentation
        if augmentation is None:
            return self
        margin = self.network.crop_margin
        for _, y, x in self.shapes_of_samples:
            if augmentation.transpose and (y != x or margin[1] != margin[2]):
                raise ValueError(
                    f"augmentation.transpose swaps y and x, but patches are {y} × {x} with crop "
                    f"margins {margin[1]} and {margin[2]}: make them equal, or write "
                    "transpose: false"
                )
        if isinstance(self.target, Stored) and augmentation.elastic is not None:
            raise ValueError(
                "augmentation.elastic deforms labels, which stored channels cannot follow: remove "
                "it, or make the target of labels"
            )
        return self

    def _check_patch_shapes(self) -> None:
        if self.patch_shapes is None:
            return
        shapes = [each.shape for each in self.patch_shapes]
        if len(set(shapes)) < len(shapes):
            raise ValueError("patch_shapes: a shape is there twice; give it one weight")
        if math.prod(self.partition) > 1:
            raise ValueError(
                f"patch_shapes: ranks that divide each sample (partition: {list(self.partition)}) "
                "need samples of one shape; remove one of the two keys"
            )

    @property
    def shapes_of_samples(self) -> dict[Zyx, float]:
        """The shapes that samples of the training set have, and how often."""
        if self.patch_shapes is None:
            return {self.patch_shape: 1.0}
        return {each.shape: each.weight for each in self.patch_shapes}

    @property
    def output_channels(self) -> int:
        """Channels of the network's output."""
        return len(self.target.channel_offsets)

    @property
    def activation(self) -> Literal["sigmoid", "softmax"]:
        """What turns logits into predictions."""
        return "softmax" if isinstance(self.target, Classes) else "sigmoid"

    @property
    def definite_split(self) -> Split:
        """The split, with blocks of a definite shape."""
        shape = self.split.block_shape
        if shape is None:
            shape = default_block_shape([self.patch_shape, *self.shapes_of_samples])
        return Split(shape, self.split.validation, self.split.test, self.split.seed)

    @property
    def labelled_volumes(self) -> list[LabelledVolume]:
        """The volumes, as sample streams take them."""
        return [
            LabelledVolume(
                VolumeSource(each.image, scale=each.scale, storage=self.storage),
                VolumeSource(each.labels, scale=each.labels_scale, storage=self.storage),
                each.mask,
                each.name,
                each.weight,
                None if each.within is None else each.within.box,
                tuple(part.box for part in each.without),
            )
            for each in self.volumes
        ]


def load_training(path: Path) -> TrainingConfig:
    """Read a training file; relative paths start from its folder.

    Raises:
        ConfigError: it cannot be read, or is not valid; the message names every fault.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the training file {path}: {error}") from None
    try:
        values = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return parse_training(values, path.parent, str(path))


def parse_training(values: object, folder: Path, source: str = "the training") -> TrainingConfig:
    """Validate a training given as nested dicts; relative paths start from ``folder``.

    Raises:
        ConfigError: it is not valid.
    """
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source}: expected a mapping with the keys {', '.join(TrainingConfig.model_fields)}"
        )
    try:
        config = TrainingConfig.model_validate(values)
    except ValidationError as error:
        faults = [
            f"  {_explain(each['loc'], each['type'], each['msg'], each['input'])}"
            for each in error.errors()[:50]
        ]
        raise ConfigError("\n".join([f"{source} is not a valid training:", *faults])) from None
    if "://" in config.output:
        raise ConfigError(f"{source}: output is {config.output}; expected a local folder")
    return _with_absolute_paths(config, folder)


def _explain(location: Sequence[int | str], kind: str, message: str, value: object) -> str:
    key = ".".join(map(str, location))
    if kind == "extra_forbidden":
        hint = unknown_key_hint(str(location[-1]), TrainingConfig.model_fields)
        return f"{key}: unknown key" + (f"; {hint}" if len(location) == 1 else "")
    if kind == "missing":
        return f"{key}: missing"
    if kind == "value_error":
        return f"{key}: {message.removeprefix('Value error, ')}".removeprefix(": ")
    return f"{key}: {message[0].lower()}{message[1:]}; found {shorten_value(value)}"


def _with_absolute_paths(config: TrainingConfig, folder: Path) -> TrainingConfig:
    def volume(path: str) -> str:
        path = absolute_path(path, folder)
        return path if "://" in path else Path(path).as_uri()

    def of_volume(each: VolumeConfig) -> VolumeConfig:
        update: dict[str, object] = {"image": volume(each.image), "labels": volume(each.labels)}
        if each.mask is not None:
            update["mask"] = each.mask.model_copy(update={"path": volume(each.mask.path)})
        return each.model_copy(update=update)

    network = config.network
    parts = None if network.path is None else factory_parts(network.path)
    if parts is not None and parts[0].endswith(".py"):
        path = f"{absolute_path(parts[0], folder)}:{parts[1]}"
        network = network.model_copy(update={"path": path})
    if network.weights is not None:
        weights = absolute_path(network.weights, folder)
        network = network.model_copy(update={"weights": weights})
    return config.model_copy(
        update={
            "volumes": [of_volume(each) for each in config.volumes],
            "output": absolute_path(config.output, folder),
            "network": network,
        }
    )
