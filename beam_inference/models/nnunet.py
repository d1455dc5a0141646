"""nnU-Net results folders as packages: how nnU-Net itself runs the network, as keys of a job file.

What nnU-Net 2.8.1 does was read in its code: ``inference/predict_from_raw_data.py`` and
``preprocessing/preprocessors/default_preprocessor.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from beam_inference.config.fields import Json
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import shorten_text
from beam_inference.models.nnunet_plans import (
    CHECKPOINT,
    Intensities,
    ResamplingArguments,
    is_results_folder,
    list_checkpoints,
    stored_order,
)
from beam_inference.models.packages import (
    LEVELS,
    Folds,
    NotCompared,
    OwnResampling,
    PackagedNetwork,
    PackageKind,
    Recipe,
    Sample,
    Setting,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from beam_inference.models.nnunet_network import TrainedModel

_LEAST_STD = 1e-8
"""What nnU-Net divides by at least."""

_IN_MILLIMETRES = ("SimpleITKIO", "SimpleITKIOWithReorient", "NibabelIO", "NibabelIOWithReorient")
"""Readers of nnU-Net whose voxel sizes are in millimetres; others have that of the user."""

_RESAMPLED = "resample_data_or_seg_to_shape"
_NOT_RESAMPLED = "no_resampling_data_or_seg_to_shape"
_ORDERS: dict[int, Literal[0, 1, 3]] = {0: 0, 1: 1, 3: 3}
_CUBIC = 3


def _list_files(root: Traversable, folds: Folds | None) -> list[str]:
    return ["plans.json", "dataset.json", *list_checkpoints(root, folds)]


@dataclass(frozen=True, slots=True)
class _ResultsFolder:
    """A results folder that was read: a :class:`beam_inference.models.packages.PackagedNetwork`."""

    model: TrainedModel
    folds: Folds | None

    def load(self, *, is_trusted: bool) -> torch.nn.Module:  # noqa: ARG002
        from beam_inference.models.nnunet_network import make_network

        return make_network(self.model)

    def describe(self) -> Recipe:
        return _describe(self.model)

    def sample(self) -> Sample | None:
        return None

    def predict_by_tool(self, image: NDArray[np.float32]) -> NDArray[np.float32]:
        if not isinstance(self.model.root, Path):
            raise NotCompared(
                "its own tool reads folders alone: unpack the zip file to compare with it"
            )
        try:
            return _predict_by_nnunet(self.model.root, self.folds, image)
        except ModuleNotFoundError as error:
            raise NotCompared(f"its own tool is not installed here ({error})") from None


def _read(root: Traversable, folds: Folds | None) -> PackagedNetwork:
    from beam_inference.models.nnunet_network import read_model

    return _ResultsFolder(read_model(root, folds), folds)


def _describe(model: TrainedModel) -> Recipe:
    _check_known(model)
    normalize, reason = _normalization(model)
    return Recipe(
        title=f"nnU-Net, {model.checkpoints[0].configuration}",
        facts=_facts(model),
        settings=[
            *_input_settings(),
            Setting("model.input_channels", len(model.dataset.channels), "dataset.json"),
            Setting("model.output_channels", len(model.dataset.classes), "dataset.json, labels"),
            *_plane_settings(model),
            Setting("model.normalize", normalize, reason),
            *_loop_settings(model),
            *_result_settings(model),
        ],
        voxel_size=_voxel_size(model),
        has_unit=model.plans.image_reader_writer in _IN_MILLIMETRES,
        resampling=_resampling(model),
        needs_levels=True,
        needs_object=bool(_masked_channels(model)),
        cautions=_cautions(model),
    )


def _predict_by_nnunet(
    root: Path, folds: Folds | None, image: NDArray[np.float32]
) -> NDArray[np.float32]:
    import torch
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    names = [name.partition("/")[0] for name in list_checkpoints(root, folds)]
    predictor = nnUNetPredictor(
        device=torch.device("cpu"), perform_everything_on_device=False, allow_tqdm=False
    )
    predictor.initialize_from_trained_model_folder(
        str(root), [name.removeprefix("fold_") for name in names], CHECKPOINT
    )
    with torch.inference_mode():
        logits = predictor.predict_logits_from_preprocessed_data(torch.from_numpy(image))
    prediction: NDArray[np.float32] = logits.float().numpy()
    return prediction


def _check_known(model: TrainedModel) -> None:
    """Refuse what nnU-Net would do by other classes than its usual ones."""
    kinds = {
        "preprocessor_name": (model.configuration.preprocessor_name, "DefaultPreprocessor"),
        "label_manager": (model.plans.label_manager, "LabelManager"),
    }
    for key, (name, known) in kinds.items():
        if name != known:
            raise ModelContractError(
                f"{model.root / 'plans.json'}: {key} is {shorten_text(name)}; only {known} is "
                "known here, so how the network is run cannot be told. Its job file must be "
                "written by hand."
            )


def _facts(model: TrainedModel) -> dict[str, str]:
    dataset = model.dataset
    files = [checkpoint.file for checkpoint in model.checkpoints]
    # nnU-Net's decoders keep their encoder, whose values a state dict lists once more
    distinct = {each.data_ptr(): each.numel() for each in model.checkpoints[0].weights.values()}
    return {
        "network": model.configuration.architecture.network_class_name.rpartition(".")[2],
        "values of a fold": f"{sum(distinct.values()):,}",
        "folds": ", ".join(str(file).rpartition("fold_")[2].partition("/")[0] for file in files),
        "trained by": model.checkpoints[0].trainer,
        "plans": model.plans.plans_name,
        "dataset": dataset.name or "not named",
        "licence": dataset.licence or dataset.license or "not stated",
        "reference": dataset.reference or "not stated",
        "channels": ", ".join(dataset.channels),
        "classes": ", ".join(dataset.classes),
    }


def _plane_settings(model: TrainedModel) -> list[Setting]:
    if len(model.configuration.patch_size) == 3:
        return []
    return [Setting("model.dims", 2, "plans.json: patches are planes, section by section")]


def _loop_settings(model: TrainedModel) -> list[Setting]:
    shape = stored_order(model.configuration.patch_size, model.plans, 1)
    settings = [
        Setting("inference.patch_shape", list(shape), "plans.json, in the order Z, Y, X"),
        Setting(
            "inference.patch_overlap",
            [n // 2 for n in shape],
            "nnU-Net's default: steps of half a patch",
        ),
        Setting("inference.lattice", "spread", "nnU-Net spreads its patches evenly"),
        Setting(
            "inference.blend",
            {"gaussian": 0.125, "floor": "nnunet"},
            "nnU-Net's weights: a Gaussian of an eighth of the patch",
        ),
    ]
    axes = model.checkpoints[0].mirror_axes
    if axes:
        names = _mirror_names(model)
        settings.append(
            Setting(
                "inference.augment",
                {"mirror": names},
                f"the checkpoint: mean of {2 ** len(names)} flips; remove it to be "
                f"{2 ** len(names)} times as fast, with another result",
            )
        )
        settings.append(
            Setting(
                "model.channels",
                [{} for _ in model.dataset.classes],
                "every channel is a value of the voxel, which flips do not change",
            )
        )
    return settings


def _mirror_names(model: TrainedModel) -> list[str]:
    """The axes of flips, in the order of stored images."""
    dims = len(model.configuration.patch_size)
    is_mirrored = [axis in model.checkpoints[0].mirror_axes for axis in range(dims)]
    flags = stored_order(is_mirrored, model.plans, False)
    return [name for name, flag in zip("zyx", flags, strict=True) if flag]


def _result_settings(model: TrainedModel) -> list[Setting]:
    if model.dataset.has_regions:
        labels = model.dataset.regions_class_order or []
        operators = [
            {"operator": "sigmoid"},
            {"operator": "regions", "labels": labels, "above": 0.5},
        ]
        reason = "dataset.json has regions: regions_class_order, where the probability is above 0.5"
    else:
        labels = list(range(len(model.dataset.classes)))
        operators = [{"operator": "argmax"}]
        reason = "the class with the largest sum; write softmax instead to keep probabilities"
    dtype = "uint8" if max(labels, default=0) < 1 << 8 else "uint16"
    return [
        Setting("postprocess", operators, reason),
        Setting("output.dtype", dtype, "whole numbers, the labels of dataset.json"),
    ]


def _normalization(model: TrainedModel) -> tuple[Any, str]:
    """``model.normalize``, and the reason."""
    schemes = model.configuration.normalization_schemes
    channels = len(model.dataset.channels)
    if len(schemes) != channels:
        raise ModelContractError(
            f"{model.root / 'plans.json'}: normalization_schemes has {len(schemes)} entries, and "
            f"dataset.json {channels} channels: expected one for each"
        )
    unknown = [name for name in schemes if name not in _STEPS]
    if unknown:
        raise ModelContractError(
            f"{model.root / 'plans.json'}: {shorten_text(unknown[0])} is none of the "
            f"normalisations that are known here: {', '.join(_STEPS)}"
        )
    masked = _masked_channels(model)
    kinds = [(name, channel in masked) for channel, name in enumerate(schemes)]
    steps: list[Json] = []
    for kind in dict.fromkeys(kinds):
        chosen = [channel for channel in range(channels) if kinds[channel] == kind]
        which = {} if len(chosen) == channels else {"channels": chosen}
        name, is_masked = kind
        made = [{"standard": _OF_OBJECT}] if is_masked else _STEPS[name](model, chosen)
        steps += [step | which for step in made]
    reason = f"plans.json: {', '.join(schemes)}"
    if masked:
        reason += "; use_mask_for_norm: inside the object alone"
        resampling = _resampling(model)
        if resampling is not None and resampling.order == _CUBIC:
            steps.append({"clip": _OF_BOX | {"low": 0, "high": 1}})
            reason += "; what nnU-Net resamples it keeps within the values that occur"
    return steps or "none", reason


def _masked_channels(model: TrainedModel) -> list[int]:
    """The channels normalised inside the object alone; only the z-score looks at that."""
    configuration = model.configuration
    pairs = zip(configuration.normalization_schemes, configuration.use_mask_for_norm, strict=False)
    return [
        channel
        for channel, (name, is_masked) in enumerate(pairs)
        if name == "ZScoreNormalization" and is_masked
    ]


def _ct_steps(model: TrainedModel, channels: Sequence[int]) -> list[Json]:
    values = [_intensities(model, channel) for channel in channels]
    limits = [[each.percentile_00_5, each.percentile_99_5] for each in values]
    means = [each.mean for each in values]
    deviations = [max(each.std, _LEAST_STD) for each in values]
    if len(channels) == 1:
        return [{"clip": limits[0]}, {"standard": {"mean": means[0], "std": deviations[0]}}]
    return [{"clip": limits}, {"standard": {"mean": means, "std": deviations}}]


def _intensities(model: TrainedModel, channel: int) -> Intensities:
    intensities = model.plans.intensities.get(str(channel))
    if intensities is None:
        raise ModelContractError(
            f"{model.root / 'plans.json'}: CTNormalization needs "
            f"foreground_intensity_properties_per_channel.{channel}, which is absent"
        )
    return intensities


_OF_BOX = {"levels": LEVELS, "of": "nonzero_box"}
_OF_OBJECT = {"levels": LEVELS, "of": "object"}

_STEPS: dict[str, Callable[[TrainedModel, Sequence[int]], list[Json]]] = {
    "CTNormalization": _ct_steps,
    "ZScoreNormalization": lambda *_: [{"standard": _OF_BOX}],
    "NoNormalization": lambda *_: [],
    "RescaleTo01Normalization": lambda *_: [{"rescale": _OF_BOX}],
    "RGBTo01Normalization": lambda *_: [{"scale": 1 / 255}],
}
"""Steps of ``model.normalize`` for some channels, by nnU-Net's name for what it does."""


def _input_settings() -> list[Setting]:
    return [
        Setting(
            "input.box",
            {"levels": LEVELS},
            "nnU-Net crops to the box of non-zero voxels, and lays its patches out in there; needs "
            "one pass over the volume",
        ),
        Setting("input.fill", "constant", "around a box that is smaller than a patch"),
        Setting("input.fill_value", 0, "what nnU-Net pads with"),
        Setting("input.fill_units", "network", "nnU-Net pads what is normalised already"),
    ]


def _voxel_size(model: TrainedModel) -> tuple[float | None, float | None, float | None]:
    """The voxel size of the training data, ZYX; None where images keep their own."""
    if model.configuration.resampling_fn_data == _NOT_RESAMPLED:
        return (None, None, None)
    return stored_order(model.configuration.spacing, model.plans, None)


def _resampling(model: TrainedModel) -> OwnResampling | None:
    configuration = model.configuration
    names = (configuration.resampling_fn_data, configuration.resampling_fn_probabilities)
    there = configuration.resampling_fn_data_kwargs
    back = configuration.resampling_fn_probabilities_kwargs
    if names != (_RESAMPLED, _RESAMPLED) or there.order_z != 0 or back.order_z != 0:
        return None
    order = _ORDERS.get(there.order)
    order_back = _ORDERS.get(back.order)
    if order is None or order_back is None:
        return None
    return OwnResampling(
        order=order,
        separate_z=_separation(there),
        clip=_limits(model),
        order_back=order_back,
        separate_z_back=_separation(back),
        cautions=_cautions_of_resampling(model),
    )


def _separation(arguments: ResamplingArguments) -> bool | Literal["auto"]:
    return "auto" if arguments.force_separate_z is None else arguments.force_separate_z


def _limits(model: TrainedModel) -> list[float] | list[list[float]] | dict[str, str] | None:
    """What nnU-Net keeps resampled values within: limits of its clip, or the values that occur.

    Where it resamples what was normalised inside the object alone, these are values of no stored
    unit: a step of the normalisation keeps them.
    """
    if _masked_channels(model):
        return None
    if set(model.configuration.normalization_schemes) != {"CTNormalization"}:
        return _OF_BOX
    channels = [_intensities(model, channel) for channel in range(len(model.dataset.channels))]
    pairs = [[each.percentile_00_5, each.percentile_99_5] for each in channels]
    return pairs[0] if len(pairs) == 1 else pairs


def _cautions_of_resampling(model: TrainedModel) -> Sequence[str]:
    schemes = set(model.configuration.normalization_schemes)
    if len(schemes) == 1 or "CTNormalization" not in schemes:
        return ()
    return [
        "nnU-Net clips the channels of CT before it resamples, and this job afterwards, because "
        "other channels are not clipped: beside sharp edges results may differ."
    ]


def _cautions(model: TrainedModel) -> list[str]:
    cautions = []
    odd = [n for n in model.configuration.patch_size if n % 2 and n > 1]
    if odd:
        cautions.append(
            f"patch_shape has odd numbers ({', '.join(map(str, odd))}), whose half is no whole "
            "step: the lattice may have a patch more or less than nnU-Net's."
        )
    return cautions


KIND = PackageKind(
    title="an nnU-Net results folder",
    contents=f"plans.json, dataset.json, fold_N/{CHECKPOINT}",
    is_root=is_results_folder,
    list_files=_list_files,
    read=_read,
    may_hold_programs=False,
)
