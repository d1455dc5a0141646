"""nnU-Net results folders as packages: how nnU-Net itself runs the network, as keys of a job file.

What nnU-Net 2.8.1 does was read in its code: ``inference/predict_from_raw_data.py`` and
``preprocessing/preprocessors/default_preprocessor.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import shorten_text
from beam_inference.models.nnunet_plans import (
    CHECKPOINT,
    Intensities,
    is_results_folder,
    list_checkpoints,
    stored_order,
)
from beam_inference.models.packages import (
    Folds,
    NotCompared,
    PackagedNetwork,
    PackageKind,
    Recipe,
    Setting,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from beam_inference.models.nnunet_network import TrainedModel

LEVELS = "levels.json"
"""Name of the file of levels in a normalisation that needs one."""

_LEAST_STD = 1e-8
"""What nnU-Net divides by at least."""

_IN_MILLIMETRES = ("SimpleITKIO", "SimpleITKIOWithReorient", "NibabelIO", "NibabelIOWithReorient")
"""Readers of nnU-Net whose voxel sizes are in millimetres; others have that of the user."""


def _list_files(root: Traversable, folds: Folds | None) -> list[str]:
    return ["plans.json", "dataset.json", *list_checkpoints(root, folds)]


@dataclass(frozen=True, slots=True)
class _ResultsFolder:
    """A results folder that was read: a :class:`beam_inference.models.packages.PackagedNetwork`."""

    model: TrainedModel
    folds: Folds | None

    def load(self) -> torch.nn.Module:
        from beam_inference.models.nnunet_network import make_network

        return make_network(self.model)

    def describe(self) -> Recipe:
        return _describe(self.model)

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
            Setting("model.input_channels", len(model.dataset.channels), "dataset.json"),
            Setting("model.output_channels", len(model.dataset.classes), "dataset.json, labels"),
            *_plane_settings(model),
            Setting("model.normalize", normalize, reason),
            *_loop_settings(model),
            *_result_settings(model),
        ],
        voxel_size=stored_order(model.configuration.spacing, model.plans, None),
        has_unit=model.plans.image_reader_writer in _IN_MILLIMETRES,
        padding=_padding(model),
        needs_levels=isinstance(normalize, dict) and "levels" in normalize,
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
    """``model.normalize`` for a network of one channel, and the reason."""
    schemes = model.configuration.normalization_schemes
    if len(schemes) != len(model.dataset.channels) or len(set(schemes)) > 1:
        raise ModelContractError(
            f"{model.root / 'plans.json'}: its channels are normalised by {', '.join(schemes)}, "
            "each in its own way, which a job file cannot say yet. Write it by hand, with an input "
            "that is normalised before."
        )
    scheme = schemes[0]
    make = _NORMALIZATIONS.get(scheme)
    if make is None:
        raise ModelContractError(
            f"{model.root / 'plans.json'}: {shorten_text(scheme)} is none of the normalisations "
            f"that are known here: {', '.join(_NORMALIZATIONS)}"
        )
    if len(schemes) > 1 and scheme in ("ZScoreNormalization", "RescaleTo01Normalization"):
        raise ModelContractError(
            f"{model.root / 'plans.json'}: {len(schemes)} channels are normalised by statistics "
            "of their own, which a job file cannot say yet. Write it by hand, with an input that "
            "is normalised before."
        )
    if scheme == "ZScoreNormalization" and any(model.configuration.use_mask_for_norm):
        raise ModelContractError(
            f"{model.root / 'plans.json'}: use_mask_for_norm: only voxels inside the object are "
            "normalised, which a job file cannot say yet. Write it by hand, with an input that is "
            "normalised before."
        )
    return make(model), f"plans.json: {scheme}"


def _ct(model: TrainedModel) -> Any:
    channels = [_intensities(model, channel) for channel in range(len(model.dataset.channels))]
    limits = [[values.percentile_00_5, values.percentile_99_5] for values in channels]
    means = [values.mean for values in channels]
    deviations = [max(values.std, _LEAST_STD) for values in channels]
    if len(channels) == 1:
        return [{"clip": limits[0]}, {"standard": {"mean": means[0], "std": deviations[0]}}]
    return [{"clip": limits}, {"standard": {"mean": means, "std": deviations}}]


def _padding(model: TrainedModel) -> float | None:
    """The stored value that becomes 0, with which nnU-Net pads what is normalised already."""
    scheme = model.configuration.normalization_schemes[0]
    if scheme in ("NoNormalization", "RGBTo01Normalization"):
        return 0.0
    if scheme != "CTNormalization":
        return None
    means = {_intensities(model, n).mean for n in range(len(model.dataset.channels))}
    return means.pop() if len(means) == 1 else None


def _intensities(model: TrainedModel, channel: int) -> Intensities:
    intensities = model.plans.intensities.get(str(channel))
    if intensities is None:
        raise ModelContractError(
            f"{model.root / 'plans.json'}: CTNormalization needs "
            f"foreground_intensity_properties_per_channel.{channel}, which is absent"
        )
    return intensities


_NORMALIZATIONS: dict[str, Callable[[TrainedModel], Any]] = {
    "CTNormalization": _ct,
    "ZScoreNormalization": lambda _: {"levels": LEVELS, "to": "standard"},
    "NoNormalization": lambda _: "none",
    "RescaleTo01Normalization": lambda _: {"levels": LEVELS, "low": 0.0, "high": 1.0},
    "RGBTo01Normalization": lambda _: {"scale": 1 / 255},
}


def _cautions(model: TrainedModel) -> list[str]:
    cautions = [
        "nnU-Net crops an image to the box of its non-zero voxels before it lays out patches; this "
        "job does not, so results differ where an image has a border of zeros. Name the box as roi."
    ]
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
)
