"""The network of an nnU-Net results folder, made of its plans and checkpoints; no code in it runs.

The classes are those of the package ``dynamic_network_architectures``, on which nnU-Net builds.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any

import torch

from beam_inference.config.fields import Json
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import describe_error, shorten_text, shorten_value
from beam_inference.models.axis_order import Transposed
from beam_inference.models.module_versions import copy_state
from beam_inference.models.nnunet_plans import (
    Architecture,
    Configuration,
    Dataset,
    Plans,
    check_order,
    list_checkpoints,
    read_dataset,
    read_plans,
    select_configuration,
)
from beam_inference.models.package_files import local_file
from beam_inference.models.packages import Folds
from beam_inference.models.weights import check_tensors, fit_weights, load_checkpoint

_NETWORKS = ("PlainConvUNet", "ResidualEncoderUNet", "ResidualUNet")
"""Classes that plans may name, of ``dynamic_network_architectures.architectures.unet``."""

_LAYER = re.compile(r"torch\.nn\.(?:modules\.\w+\.)?(\w+)")

_LAYERS = frozenset(
    {f"{kind}{dims}d" for kind in ("Conv", "InstanceNorm", "BatchNorm", "Dropout") for dims in "23"}
    | {"GroupNorm", "LeakyReLU", "ReLU", "ReLU6", "PReLU", "ELU", "GELU", "SiLU", "Mish"}
    | {"Dropout", "Identity", "Sigmoid", "Tanh"}
)
"""Classes of ``torch.nn`` that plans may name as arguments."""

_MOST_STAGES = 16
_MOST_CHANNELS = 1 << 14
_MOST_LAYERS = 64
_COUNTS = ("n_conv_per_stage", "n_blocks_per_stage", "n_conv_per_stage_decoder")
"""Arguments that say how many layers a stage has."""

_OWN_TRAINERS = (
    r"(?:DA5|DA5ord0|DA5Segord0|DA5_10epochs|NoDA|_DASegOrd0|_DASegOrd0_NoMirroring|_noDummy2DDA|"
    r"NoMirroring|_onlyMirror01|_onlyMirror01_1500ep|_onlyMirror01_DASegOrd0|_onlyMirror01_DA5|"
    r"_warmup|CosAnneal|Adan|Adan1en[13]|Adan3en4|AdanCosAnneal|Adam|VanillaAdam|VanillaAdam1en3|"
    r"VanillaAdam3en4|Adam1en3|Adam3en4|Benchmark_5epochs|Benchmark_5epochs_noDataLoading|"
    r"_\d+epochs?|_\d+epochs_NoMirroring|DiceLoss|DiceCELoss_noSmooth|Topk10Loss|Topk10LossLS01|"
    r"DiceTopK10Loss|CELoss|CELoss_5epochs|NoDeepSupervision|_probabilisticOversampling(?:_\d+)?)"
)
"""What follows nnUNetTrainer in the names of nnU-Net's trainers that train the planned network."""

_TRAINER = re.compile(rf"nnUNetTrainer{_OWN_TRAINERS}?|nnUNet_Trainer_BS8")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint of nnU-Net says, beside the weights.

    Attributes:
        file: where it lies.
        weights: state dict of the network, whose tensors may still lie in the file.
        trainer: name of the class that trained it.
        configuration: name of the configuration, such as ``3d_fullres``.
        mirror_axes: axes of the network over whose flips its answers are averaged.
    """

    file: Traversable
    weights: Mapping[str, torch.Tensor]
    trainer: str
    configuration: str
    mirror_axes: Sequence[int]


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """All that a results folder says.

    Attributes:
        root: the folder.
        plans: its plans.
        dataset: its dataset.
        configuration: the configuration that was trained.
        checkpoints: those of the folds that are used.
    """

    root: Traversable
    plans: Plans
    dataset: Dataset
    configuration: Configuration
    checkpoints: Sequence[Checkpoint]


class FoldMean(torch.nn.Module):
    """The mean of several networks' answers, which nnU-Net takes over folds, before any softmax."""

    def __init__(self, members: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.members = torch.nn.ModuleList(members)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The mean answer (N, classes, Z, Y, X), summed in the order of the folds."""
        total: torch.Tensor | None = None
        for member in self.members:
            answer = member(batch)
            total = answer if total is None else total + answer
        assert total is not None
        return total / len(self.members)


def read_model(root: Traversable, folds: Folds | None) -> TrainedModel:
    """Read a results folder.

    Args:
        root: the folder.
        folds: which folds; see :func:`beam_inference.models.nnunet_plans.list_checkpoints`.

    Raises:
        ModelContractError: it is incomplete or damaged, a part of a cascade, or was trained by a
            trainer that is none of nnU-Net's.
    """
    plans = read_plans(root)
    check_order(plans, root / "plans.json")
    dataset = read_dataset(root)
    checkpoints = [_read_checkpoint(root / name) for name in list_checkpoints(root, folds)]
    first = checkpoints[0]
    for other in checkpoints[1:]:
        if (other.configuration, other.trainer) != (first.configuration, first.trainer):
            raise ModelContractError(
                f"{other.file} is of {other.trainer}, {other.configuration}; {first.file} of "
                f"{first.trainer}, {first.configuration}. Folds of one network are expected."
            )
    configuration = select_configuration(plans, first.configuration, root / "plans.json")
    if configuration.previous_stage is not None:
        raise ModelContractError(
            f"{root} is the second stage of a cascade: {first.configuration} also takes the result "
            f"of {configuration.previous_stage}. Cascades cannot be run here; name the folder of "
            "3d_fullres or 3d_lowres."
        )
    if len(configuration.patch_size) == 2 and plans.transpose_forward != [0, 1, 2]:
        raise ModelContractError(
            f"{root / 'plans.json'}: transpose_forward is {plans.transpose_forward} for a network "
            "of planes; only sections along z, with axes in the order y, x, can be run here. "
            "Transpose the volume, and write a factory (file.py:function)."
        )
    return TrainedModel(root, plans, dataset, configuration, checkpoints)


def make_network(model: TrainedModel) -> torch.nn.Module:
    """The network of a results folder: of several folds, the mean of their answers.

    Raises:
        ModelContractError: plans and weights contradict each other.
    """
    members = [_make_member(model, checkpoint) for checkpoint in model.checkpoints]
    network = members[0] if len(members) == 1 else FoldMean(members)
    order = model.plans.transpose_forward
    is_volume = len(model.configuration.patch_size) == 3
    return Transposed(network, order) if is_volume and order != [0, 1, 2] else network


def _read_checkpoint(file: Traversable) -> Checkpoint:
    with local_file(file) as path:
        content = load_checkpoint(path, allow_pickle=False, in_place=True)
    if not isinstance(content, Mapping):
        raise ModelContractError(f"{file} is no checkpoint of nnU-Net: it holds no keys")
    arguments = content.get("init_args")
    configuration = arguments.get("configuration") if isinstance(arguments, Mapping) else None
    trainer = content.get("trainer_name")
    weights = content.get("network_weights")
    axes = content.get("inference_allowed_mirroring_axes") or ()
    if (
        not isinstance(configuration, str)
        or not isinstance(trainer, str)
        or not isinstance(weights, Mapping)
        or not isinstance(axes, list | tuple)
        or not all(axis in (0, 1, 2) for axis in axes)
    ):
        raise ModelContractError(
            f"{file} is no checkpoint of nnU-Net v2: expected network_weights, trainer_name, "
            "init_args.configuration and inference_allowed_mirroring_axes; found the keys "
            f"{shorten_value(sorted(map(str, content)))}"
        )
    if not _TRAINER.fullmatch(trainer):
        raise ModelContractError(
            f"{file} was trained by {shorten_text(trainer)}, which is none of nnU-Net's trainers, "
            "or one that changes the network: its code would have to run. Write a factory that "
            "makes the network (file.py:function), and name the checkpoint as model.weights."
        )
    check_tensors(weights, str(file))
    return Checkpoint(file, weights, trainer, configuration, sorted(set(axes)))


def _make_member(model: TrainedModel, checkpoint: Checkpoint) -> torch.nn.Module:
    plans_file = model.root / "plans.json"
    architecture = model.configuration.architecture
    network_class = _network_class(architecture, plans_file)
    arguments = _arguments(architecture, plans_file)
    channels = len(model.dataset.channels)
    try:
        with torch.device("meta"):  # no memory, before the weights show how large it is
            network = network_class(
                input_channels=channels,
                num_classes=len(model.dataset.classes),
                **arguments,
                deep_supervision=False,
            )
    except Exception as error:  # of the class, which is given whatever plans say
        raise ModelContractError(
            f"{plans_file}: {architecture.network_class_name} cannot be made of its arguments: "
            f"{describe_error(error)}"
        ) from None
    # copies, for the file may change while the network is used; what is stored once stays so
    weights = copy.deepcopy(copy_state(checkpoint.weights))
    fit_weights(network, weights, str(checkpoint.file), replace=True)
    return network


def _network_class(architecture: Architecture, source: Traversable) -> type[torch.nn.Module]:
    module, _, name = architecture.network_class_name.rpartition(".")
    if not module.startswith("dynamic_network_architectures.architectures") or (
        name not in _NETWORKS
    ):
        raise ModelContractError(
            f"{source}: the network is a {shorten_text(architecture.network_class_name)}; only "
            f"{', '.join(_NETWORKS)} of dynamic_network_architectures are known here. Write a "
            "factory that makes it (file.py:function), and name the checkpoint as model.weights."
        )
    try:
        from dynamic_network_architectures.architectures import unet
    except ImportError as error:
        raise ModelContractError(
            f"a network of nnU-Net needs the package dynamic-network-architectures ({error}): "
            "pip install 'beam-inference[nnunet]', here and on the workers"
        ) from None
    network_class: type[torch.nn.Module] = getattr(unet, name)
    return network_class


def _arguments(architecture: Architecture, source: Traversable) -> Json:
    arguments = dict(architecture.arch_kwargs)
    for forbidden in ("input_channels", "num_classes", "deep_supervision"):
        arguments.pop(forbidden, None)
    for name in architecture.needs_import:
        if arguments.get(name) is not None:
            arguments[name] = _layer(arguments[name], f"{source}: {name}")
    stages = arguments.get("n_stages")
    widths = arguments.get("features_per_stage")
    if not isinstance(stages, int) or not 0 < stages <= _MOST_STAGES:
        raise ModelContractError(
            f"{source}: n_stages must be a number up to {_MOST_STAGES}, found "
            f"{shorten_value(stages)}"
        )
    counts = _numbers([arguments.get(name) for name in _COUNTS])
    if any(count > _MOST_LAYERS for count in counts):
        raise ModelContractError(
            f"{source}: a stage has {max(counts):g} layers; up to {_MOST_LAYERS} are expected"
        )
    for value in _numbers(arguments):
        if abs(value) > _MOST_CHANNELS:
            raise ModelContractError(
                f"{source}: the network's arguments hold {value:g}; numbers up to "
                f"{_MOST_CHANNELS:,} are expected (features_per_stage is {shorten_value(widths)})"
            )
    return arguments


def _numbers(value: object) -> list[float]:
    """All numbers in JSON values."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return [number for inner in value for number in _numbers(inner)]
    return [value] if isinstance(value, int | float) else []


def _layer(name: object, place: str) -> Any:
    match = _LAYER.fullmatch(name) if isinstance(name, str) else None
    if match is None or match[1] not in _LAYERS:
        raise ModelContractError(
            f"{place} is {shorten_value(name)}; only these classes of torch.nn are made of plans: "
            f"{', '.join(sorted(_LAYERS))}"
        )
    return getattr(torch.nn, match[1])
