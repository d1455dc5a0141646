"""What an nnU-Net results folder says about its network, read from its JSON files.

The folder is one of nnU-Net v2, such as ``nnUNetTrainer__nnUNetPlans__3d_fullres``: ``plans.json``,
``dataset.json``, and ``fold_N/checkpoint_final.pth`` for each fold. What its keys mean was read in
the code of nnU-Net 2.8.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, field_validator

from beam_inference.config.fields import Json
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import shorten_value
from beam_inference.models.package_files import (
    AnyForeign,
    ForeignModel,
    Length,
    list_folders,
    parse_foreign,
    read_json,
)
from beam_inference.models.packages import Folds

CHECKPOINT = "checkpoint_final.pth"
"""The file in each fold's folder that nnU-Net takes unless it is told otherwise."""

_MOST_INHERITED = 16
"""Configurations that may inherit from each other; nnU-Net's own have two."""

Size = Annotated[int, Field(gt=0, le=1 << 16)]


class Architecture(ForeignModel):
    """How a network is made: the name of a class, and its arguments.

    Attributes:
        network_class_name: dotted name of the class.
        arch_kwargs: its arguments, but for channels and classes.
        needs_import: arguments that are dotted names of classes.
    """

    network_class_name: str
    arch_kwargs: dict[str, Any]
    needs_import: list[str] = Field(alias="_kw_requires_import")


class Intensities(ForeignModel):
    """Statistics of one channel's foreground voxels over the training data."""

    mean: FiniteFloat
    std: Annotated[FiniteFloat, Field(ge=0)]
    percentile_00_5: FiniteFloat
    percentile_99_5: FiniteFloat


class ResamplingArguments(ForeignModel):
    """Arguments of the function that resamples.

    Attributes:
        order: of the spline.
        order_z: of the spline along the axis of thick sections, where that is separate.
        force_separate_z: whether it is; None if that depends on the voxel sizes.
        separate_z_anisotropy_threshold: how much thicker sections are then.
        is_seg: whether values are labels.
    """

    order: int = 3
    order_z: int = 0
    force_separate_z: bool | None = False
    separate_z_anisotropy_threshold: Literal[3] = 3
    is_seg: Literal[False] = False


_BY_VOXEL_SIZES = ResamplingArguments(force_separate_z=None)
"""What plans that say nothing mean."""


class Configuration(ForeignModel):
    """One configuration of plans, such as ``3d_fullres``, with what it inherits.

    Attributes:
        patch_size: in the network's order of axes, Z, Y, X or Y, X.
        spacing: voxel size in the network's order, in the unit of the training data.
        normalization_schemes: one for each channel.
        use_mask_for_norm: whether only voxels of the object are normalised, for each channel.
        preprocessor_name: the class that prepares images.
        resampling_fn_data: name of the function that resamples images.
        resampling_fn_data_kwargs: its arguments.
        resampling_fn_probabilities: name of the function that resamples what the network gives.
        resampling_fn_probabilities_kwargs: its arguments.
        architecture: how the network is made.
        previous_stage: the configuration whose result is an input of this one, in a cascade.
    """

    patch_size: Annotated[list[Size], Field(min_length=2, max_length=3)]
    spacing: Annotated[list[Length], Field(min_length=2, max_length=3)]
    normalization_schemes: list[str]
    use_mask_for_norm: list[bool]
    preprocessor_name: str = "DefaultPreprocessor"
    resampling_fn_data: str = "not named"
    resampling_fn_data_kwargs: ResamplingArguments = _BY_VOXEL_SIZES
    resampling_fn_probabilities: str = "not named"
    resampling_fn_probabilities_kwargs: ResamplingArguments = _BY_VOXEL_SIZES
    architecture: Architecture
    previous_stage: str | None = None


class Plans(ForeignModel):
    """The file ``plans.json``."""

    plans_name: str = "unknown"
    transpose_forward: Annotated[list[int], Field(min_length=3, max_length=3)] = Field([0, 1, 2])
    transpose_backward: list[int] | None = None
    image_reader_writer: str = "unknown"
    label_manager: str = "LabelManager"
    configurations: dict[str, dict[str, Any]]
    foreground_intensity_properties_per_channel: dict[str, Intensities] = Field({})
    foreground_intensity_properties_by_modality: dict[str, Intensities] = Field({})

    @property
    def intensities(self) -> Mapping[str, Intensities]:
        """Statistics of the training data by number of the channel."""
        return (
            self.foreground_intensity_properties_per_channel
            or self.foreground_intensity_properties_by_modality
        )


class Dataset(ForeignModel):
    """The file ``dataset.json``."""

    labels: dict[str, int | list[int]] = Field(min_length=2)
    regions_class_order: list[int] | None = None
    channel_names: dict[str, str] = Field({})
    modality: dict[str, str] = Field({})
    name: str = ""
    licence: str = ""
    license: str = ""
    reference: str = ""

    @field_validator("channel_names", "modality")
    @classmethod
    def _check_numbers(cls, names: dict[str, str]) -> dict[str, str]:
        if sorted(names) != sorted(map(str, range(len(names)))):
            raise ValueError(
                f"expected the numbers of the channels, from 0 on, as keys; found "
                f"{shorten_value(list(names))}"
            )
        return names

    @property
    def channels(self) -> list[str]:
        """Names of the input channels, in their order."""
        names = self.channel_names or self.modality
        return [names[key] for key in sorted(names, key=int)]

    @property
    def has_regions(self) -> bool:
        """Whether the network's channels are regions that may lie within each other."""
        return any(isinstance(label, list) and len(label) > 1 for label in self.labels.values())

    @property
    def classes(self) -> list[str]:
        """Names of the network's output channels, in their order.

        Without regions these are the labels from background on; with them, all but background.
        """
        names = {name: label for name, label in self.labels.items() if name != "ignore"}
        if self.has_regions:
            return [name for name, label in names.items() if label not in (0, [0])]
        return sorted(names, key=lambda name: _one_number(names[name]))


def is_results_folder(folder: Traversable) -> bool:
    """Whether a folder is one of a trained network, by the names of what lies in it."""
    has_files = all((folder / name).is_file() for name in ("plans.json", "dataset.json"))
    return has_files and any(inner.name.startswith("fold_") for inner in list_folders(folder))


def list_checkpoints(root: Traversable, folds: Folds | None) -> list[str]:
    """Names of the checkpoints in a results folder.

    Args:
        root: the folder.
        folds: which ones; by default all that are numbered, or "all" if there is no other, as
            nnU-Net takes them.

    Raises:
        ModelContractError: one is absent, or there is none.
    """
    present = {
        inner.name.removeprefix("fold_"): f"{inner.name}/{CHECKPOINT}"
        for inner in list_folders(root)
        if inner.name.startswith("fold_") and (inner / CHECKPOINT).is_file()
    }
    numbers = sorted((name for name in present if name.isdecimal()), key=int)
    wanted = [str(fold) for fold in folds] if folds is not None else numbers or sorted(present)
    missing = [name for name in wanted if name not in present]
    if missing or not wanted:
        of = f" of fold {', '.join(missing)}" if missing else ""
        raise ModelContractError(
            f"{root} has no {CHECKPOINT}{of}; there is one of: {', '.join(sorted(present))}. Write "
            "model.folds with folds that are there, or finish their training."
        )
    return [present[name] for name in wanted]


def read_plans(root: Traversable) -> Plans:
    """Read ``plans.json``.

    Raises:
        ModelContractError: it is no such file.
    """
    return _read(root / "plans.json", Plans)


def read_dataset(root: Traversable) -> Dataset:
    """Read ``dataset.json``.

    Raises:
        ModelContractError: it is no such file, or its labels are none that nnU-Net trains with.
    """
    dataset = _read(root / "dataset.json", Dataset)
    fault = _label_fault(dataset)
    if fault:
        raise ModelContractError(f"{root / 'dataset.json'}: {fault}")
    return dataset


def _label_fault(dataset: Dataset) -> str | None:
    regions = dataset.regions_class_order
    if dataset.has_regions:
        if regions is None or len(regions) != len(dataset.classes):
            return f"regions_class_order must have {len(dataset.classes)} entries, one for a region"
        return None
    labels = sorted(
        _one_number(label) for name, label in dataset.labels.items() if name != "ignore"
    )
    if labels != list(range(len(labels))):
        return f"expected labels from 0 on without gaps, found {shorten_value(labels)}"
    return None


def _one_number(label: int | list[int]) -> int:
    return label if isinstance(label, int) else label[0] if label else -1


def select_configuration(plans: Plans, name: str, source: Traversable) -> Configuration:
    """One configuration of plans, with what it inherits.

    Args:
        plans: the file's content.
        name: of the configuration.
        source: the file, for messages.

    Raises:
        ModelContractError: there is none of that name, it is incomplete, or inherits without end.
    """
    merged: Json = {}
    following: str | None = name
    inherited = 0
    while following is not None:
        if following not in plans.configurations:
            raise ModelContractError(
                f"{source} has no configuration {following}; it has "
                f"{', '.join(plans.configurations)}"
            )
        own = plans.configurations[following]
        merged = {**own, **merged}
        following = own.get("inherits_from")
        if following is not None and not isinstance(following, str):
            raise ModelContractError(
                f"{source}: inherits_from is {shorten_value(following)}; expected a name"
            )
        inherited += 1
        if inherited > _MOST_INHERITED:
            raise ModelContractError(
                f"{source}: the configuration {name} inherits from itself, or over more than "
                f"{_MOST_INHERITED} others (inherits_from). Mend the plans"
            )
    if "architecture" not in merged:
        merged["architecture"] = _former_architecture(merged, source)
    return parse_foreign(merged, Configuration, source, "nnU-Net")


_FORMER_KEYS = (
    "UNet_class_name",
    "UNet_base_num_features",
    "unet_max_num_features",
    "n_conv_per_stage_encoder",
    "n_conv_per_stage_decoder",
    "conv_kernel_sizes",
    "pool_op_kernel_sizes",
)


def _former_architecture(configuration: Json, source: Traversable) -> Json:
    """The architecture of plans made before nnU-Net 2.4, which did not write it down."""
    missing = [key for key in _FORMER_KEYS if key not in configuration]
    if missing:
        raise ModelContractError(f"{source} has neither an architecture nor {', '.join(missing)}")
    values = {key: configuration[key] for key in _FORMER_KEYS}
    stages = values["n_conv_per_stage_encoder"]
    widths = [values["UNet_base_num_features"], values["unet_max_num_features"]]
    patch = configuration.get("patch_size")
    are_whole = all(isinstance(width, int) for width in widths)
    if not isinstance(stages, list) or not isinstance(patch, list) or not are_whole:
        raise ModelContractError(
            f"{source}: n_conv_per_stage_encoder and patch_size must be lists, and the numbers of "
            "features whole"
        )
    first, most = widths
    dims = len(patch)
    name = values["UNet_class_name"]
    of_stage = "n_conv_per_stage" if name == "PlainConvUNet" else "n_blocks_per_stage"
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{name}",
        "arch_kwargs": {
            "n_stages": len(stages),
            "features_per_stage": [min(first * 2**i, most) for i in range(min(len(stages), 64))],
            "conv_op": f"torch.nn.Conv{dims}d",
            "kernel_sizes": values["conv_kernel_sizes"],
            "strides": values["pool_op_kernel_sizes"],
            of_stage: stages,
            "n_conv_per_stage_decoder": values["n_conv_per_stage_decoder"],
            "conv_bias": True,
            "norm_op": f"torch.nn.InstanceNorm{dims}d",
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def stored_order(values: Sequence[Any], plans: Plans, fill: Any) -> tuple[Any, Any, Any]:
    """Bring values from the network's order of axes to that of stored images, Z, Y, X.

    Args:
        values: one for each axis of the network; two for a network of planes.
        plans: say in which order the network takes the axes.
        fill: stands for z with a network of planes.
    """
    network = list(values) if len(values) == 3 else [fill, *values]
    (z, y, x) = (network[plans.transpose_forward.index(axis)] for axis in range(3))
    return (z, y, x)


def check_order(plans: Plans, source: Traversable) -> None:
    """Refuse an order of axes that is none.

    Raises:
        ModelContractError: ``transpose_forward`` does not list each axis once.
    """
    if sorted(plans.transpose_forward) != [0, 1, 2]:
        raise ModelContractError(
            f"{source}: transpose_forward must list 0, 1 and 2 once each, found "
            f"{shorten_value(plans.transpose_forward)}"
        )
    inverse = [plans.transpose_forward.index(axis) for axis in range(3)]
    if plans.transpose_backward not in (None, inverse):
        raise ModelContractError(
            f"{source}: transpose_backward must take back transpose_forward, which is {inverse}, "
            f"found {shorten_value(plans.transpose_backward)}"
        )


def _read(file: Traversable, model: type[AnyForeign]) -> AnyForeign:
    return parse_foreign(read_json(file), model, file, "nnU-Net")
