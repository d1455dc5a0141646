"""Which parts of a MONAI bundle its ``evaluator`` runs: those that are read here, or others.

A bundle is run by its evaluator, dataloader and dataset. What these are told beside the parts that
are read (network, inferer, transforms) may change what comes out: what is known not to is listed,
and the rest is refused. What each argument does was read in MONAI 1.6.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources.abc import Traversable

from beam_inference.config.fields import Json
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import shorten_text, shorten_value

_BY_HAND = "Write the job file by hand."

_NETWORK = re.compile(r"\$?@network_def(\.to\(@device\))?")
"""The network that is read here, as ``network`` names it."""

_PARTS: Mapping[str, Mapping[str, str]] = {
    "dataset": {"transform": "@preprocessing"},
    "dataloader": {"dataset": "@dataset"},
    "evaluator": {
        "val_data_loader": "@dataloader",
        "network": "@network",
        "inferer": "@inferer",
        "postprocessing": "@postprocessing",
    },
}
"""What each section runs: the parts that are read here."""

_CLASSES: Mapping[str, tuple[str, ...]] = {
    "dataset": (
        "CacheDataset",
        "CacheNTransDataset",
        "Dataset",
        "LMDBDataset",
        "PersistentDataset",
        "SmartCacheDataset",
    ),
    "dataloader": ("DataLoader", "ThreadDataLoader"),
    "evaluator": ("SupervisedEvaluator",),
}
"""Classes that run their parts on each image as it is, and nothing else."""

_WITHOUT_EFFECT = frozenset(
    (
        "additional_metrics",
        "amp",
        "compile",
        "compile_kwargs",
        "device",
        "epoch_length",
        "event_names",
        "event_to_attr",
        "key_val_metric",
        "metric_cmp_fn",
        "non_blocking",
        "val_handlers",
    )
)
"""Arguments of an evaluator that change no value, or digits only."""

_MODES = ("eval", "$ForwardMode.EVAL", "$monai.utils.ForwardMode.EVAL")

_OF_THE_CONFIGURATION = re.compile(r"_\w+_")
"""Keys of MONAI's own configuration, as ``_target_`` and ``_desc_``."""


def check_parts(file: Traversable, values: Json) -> None:
    """Refuse a configuration of which MONAI would run other parts than those that are read here.

    Args:
        file: where it lies, for messages.
        values: what it holds.

    Raises:
        ModelContractError: it is one.
    """
    _check_keys(file, values)
    _check_network(file, values.get("network"))
    for section, parts in _PARTS.items():
        value = values.get(section)
        if isinstance(value, str) and value.startswith("$"):
            raise ModelContractError(
                f"{file}: {section} is the expression {shorten_text(value)}, which is Python code "
                f"and is not run. {_BY_HAND}"
            )
        if isinstance(value, dict):
            _check_class(file, section, value)
            for key, expected in parts.items():
                _check_part(f"{file}: {section}.{key}", value, key, expected, values)
    if isinstance(evaluator := values.get("evaluator"), dict):
        _check_evaluator(file, evaluator)
        handlers = evaluator.get("val_handlers")
        if isinstance(handlers, str):
            handlers = values.get(handlers.removeprefix("$").removeprefix("@"))
        _check_handlers(file, handlers)
    dataloader = values.get("dataloader")
    if isinstance(dataloader, dict) and dataloader.get("collate_fn") is not None:
        raise _changes_values(f"{file}: dataloader.collate_fn", dataloader["collate_fn"])


def class_name(component: Json) -> str | None:
    """Name of a component's class without the module; None where there is none."""
    target = component.get("_target_")
    return target.rpartition(".")[2] if isinstance(target, str) else None


def is_foreign(component: Json, own: tuple[str, ...] = ("monai",)) -> bool:
    """Whether a component's class is of other packages, and may do anything under its name."""
    target = component.get("_target_")
    root = target.rpartition(".")[0].partition(".")[0] if isinstance(target, str) else ""
    return root not in ("", *own)


def _check_keys(file: Traversable, values: Json) -> None:
    for key in values:
        if key.startswith(("+", "~")) or "#" in key or "::" in key:
            raise ModelContractError(
                f"{file}: {shorten_text(key)} changes another part, which is not read here: write "
                "the whole there"
            )


def _check_network(file: Traversable, network: object) -> None:
    if isinstance(network, str) and not _is_network(network):
        raise ModelContractError(
            f"{file}: network is {shorten_text(network)}; only @network_def is known here, and "
            f"MONAI would run another network. {_BY_HAND}"
        )


def _is_network(text: str) -> bool:
    return _NETWORK.fullmatch(text.replace(" ", "")) is not None


def _check_class(file: Traversable, section: str, component: Json) -> None:
    name = class_name(component)
    own = ("monai", "torch") if section == "dataloader" else ("monai",)
    if name is not None and (name not in _CLASSES[section] or is_foreign(component, own)):
        raise ModelContractError(
            f"{file}: {section} is a {shorten_text(component['_target_'])}; only "
            f"{', '.join(_CLASSES[section])} of MONAI are known here. {_BY_HAND}"
        )


def _check_part(place: str, section: Json, key: str, expected: str, values: Json) -> None:
    """Refuse a section that names another part than the one read, or leaves out one that is."""
    named = section.get(key)
    if named is None:
        is_left_out = key in section or class_name(section) is not None
        if is_left_out and values.get(expected[1:]) is not None:
            raise ModelContractError(
                f"{place} is {'null' if key in section else 'not given'}, and so MONAI would not "
                f"run {expected}, which is read here. {_BY_HAND}"
            )
        return
    is_known = isinstance(named, str) and (
        named.removeprefix("$") == expected or (key == "network" and _is_network(named))
    )
    if not is_known:
        raise ModelContractError(
            f"{place} is {shorten_value(named)}; only {expected} is known here, and MONAI would "
            f"run another part. {_BY_HAND}"
        )


def _check_evaluator(file: Traversable, evaluator: Json) -> None:
    if (mode := evaluator.get("mode", "eval")) not in _MODES:
        raise ModelContractError(
            f"{file}: evaluator.mode is {shorten_value(mode)}: MONAI would not run the network as "
            f"trained. Only eval is known here. {_BY_HAND}"
        )
    if (decollate := evaluator.get("decollate", True)) is not True:
        raise ModelContractError(
            f"{file}: evaluator.decollate is {shorten_value(decollate)}: MONAI would run the "
            f"postprocessing on whole batches. Only true is known here. {_BY_HAND}"
        )
    known = {*_PARTS["evaluator"], *_WITHOUT_EFFECT, "mode", "decollate"}
    for key, value in evaluator.items():
        is_known = key in known or _OF_THE_CONFIGURATION.fullmatch(key)
        if not is_known and value not in (None, {}):
            raise _changes_values(f"{file}: evaluator.{shorten_text(key)}", value)


def _check_handlers(file: Traversable, handlers: object) -> None:
    """Refuse handlers that change what the network has answered, or may do anything."""
    if not isinstance(handlers, list):
        return
    for number, handler in enumerate(handlers):
        if not isinstance(handler, dict):
            continue
        if class_name(handler) == "PostProcessing" or is_foreign(handler, ("monai", "ignite")):
            raise _changes_values(f"{file}: evaluator.val_handlers.{number}", handler["_target_"])


def _changes_values(place: str, value: object) -> ModelContractError:
    return ModelContractError(
        f"{place} is {shorten_value(value)}, which may change values, and is not run here. "
        f"{_BY_HAND}"
    )
