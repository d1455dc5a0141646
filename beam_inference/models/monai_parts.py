"""Which parts of a MONAI bundle are run: those that are read here, or others.

A bundle is run by its evaluator, dataloader and dataset. What these are told beside the parts that
are read (network, inferer, transforms) may change what comes out: what is known not to is listed,
and the rest is refused. What each argument does was read in MONAI 1.6.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from beam_inference.config.fields import Json
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import shorten_text, shorten_value
from beam_inference.models.monai_config import Config, class_name, is_foreign, is_of_the_parser

_BY_HAND = "Write the job file by hand."

_NETWORK = re.compile(r"\$?@network_def(\.to\(@device\))?(\.eval\(\))?")
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

_COLLATED = re.compile(r"\$(monai\.data\.(utils\.)?)?(list_data_collate|pad_list_data_collate)")
"""How images are put into batches by default."""

_HANDLERS = frozenset(
    (
        "CheckpointLoader",
        "CheckpointSaver",
        "ClassificationSaver",
        "DecollateBatch",
        "GarbageCollector",
        "LogfileHandler",
        "MLFlowHandler",
        "MetricLogger",
        "MetricsSaver",
        "ProgressBar",
        "StatsHandler",
        "TensorBoardImageHandler",
        "TensorBoardStatsHandler",
        "Timer",
    )
)
"""Handlers that look on, or load weights, which are looked at by themselves."""

_FILTERED = re.compile(r"\$list\(filter\(bool, ?(@[\w#:]+)\)\)")

_ACTIONS = ("initialize", "run", "evaluating", "finalize")
"""Lists of what MONAI does as it runs a bundle."""

_WITHOUT_EFFECT_ON_VALUES = re.compile(
    r"\$\s*(import [\w., ]+"
    r"|from [\w.]+ import [\w, ]+"
    r"|(monai\.utils\.)?set_determinism\([\w=, ]*\)"
    r"|setattr\(torch\.backends\.cudnn, ?['\"]\w+['\"], ?\w+\)"
    r"|@evaluator\.run\(\))"
)
_CALL_OF_THE_EVALUATOR = re.compile(r"\$(@[\w#:]+)\(@evaluator\)")
_WEIGHTS = re.compile(r"\.(pt|pth|ts|ckpt)\b")


def check_parts(config: Config) -> None:
    """Refuse a configuration of which MONAI would run other parts than those that are read here.

    Raises:
        ModelContractError: it is one.
    """
    _check_keys(config)
    _check_network(config)
    sections: dict[str, Json] = {}
    for section, parts in _PARTS.items():
        value = config.follow(config.values.get(section), section)
        sections[section] = value if isinstance(value, dict) else {}
        _check_class(config, section, sections[section])
        for key, expected in parts.items():
            _check_part(config, f"{section}.{key}", sections[section], key, expected)
    _check_evaluator(config, sections["evaluator"])
    collate = sections["dataloader"].get("collate_fn")
    if collate is not None and not _COLLATED.fullmatch(str(collate)):
        raise _changes_values(config, "dataloader.collate_fn", collate)
    for key in _ACTIONS:
        _check_actions(config, key)


def _check_keys(config: Config) -> None:
    for key in config.values:
        if key.startswith(("+", "~")) or "#" in key or "::" in key:
            raise ModelContractError(
                f"{config.file}: {shorten_text(key)} changes another part, which is not read here: "
                "write the whole there"
            )


def _check_network(config: Config) -> None:
    network = config.values.get("network")
    if network is not None and not _is_network(network):
        raise ModelContractError(
            f"{config.file}: network is {shorten_value(network)}; only @network_def is known here, "
            f"and MONAI would run another network. {_BY_HAND}"
        )
    described = config.values.get("network_def")
    arguments = described.items() if isinstance(described, dict) else [("", described)]
    for name, value in arguments:
        if isinstance(value, str) and _WEIGHTS.search(value):
            raise ModelContractError(
                f"{config.file}: network_def{name and '.'}{shorten_text(name)} is "
                f"{shorten_text(value)}: MONAI would load a network from that file. {_BY_HAND}"
            )


def _is_network(value: object) -> bool:
    return isinstance(value, str) and _NETWORK.fullmatch(value.replace(" ", "")) is not None


def _check_class(config: Config, section: str, component: Json) -> None:
    name = class_name(component)
    own = ("monai", "torch") if section == "dataloader" else ("monai",)
    if name is not None and (name not in _CLASSES[section] or is_foreign(component, own)):
        raise ModelContractError(
            f"{config.file}: {section} is a {shorten_text(component['_target_'])}; only "
            f"{', '.join(_CLASSES[section])} of MONAI are known here. {_BY_HAND}"
        )


def _check_part(config: Config, place: str, section: Json, key: str, expected: str) -> None:
    """Refuse a section that names another part than the one read, or leaves out one that is."""
    named = section.get(key)
    if named is None:
        is_left_out = key in section or class_name(section) is not None
        if is_left_out and config.values.get(expected[1:]) is not None:
            raise ModelContractError(
                f"{config.file}: {place} is {'null' if key in section else 'not given'}, and so "
                f"MONAI would not run {expected}, which is read here. {_BY_HAND}"
            )
        return
    is_known = isinstance(named, str) and (
        named.removeprefix("$") == expected or (key == "network" and _is_network(named))
    )
    if not is_known:
        raise ModelContractError(
            f"{config.file}: {place} is {shorten_value(named)}; only {expected} is known here, and "
            f"MONAI would run another part. {_BY_HAND}"
        )


def _check_evaluator(config: Config, evaluator: Json) -> None:
    if (mode := evaluator.get("mode", "eval")) not in _MODES:
        raise ModelContractError(
            f"{config.file}: evaluator.mode is {shorten_value(mode)}: MONAI would not run the "
            f"network as trained. Only eval is known here. {_BY_HAND}"
        )
    if (decollate := evaluator.get("decollate", True)) is not True:
        raise ModelContractError(
            f"{config.file}: evaluator.decollate is {shorten_value(decollate)}: MONAI would run "
            f"the postprocessing on whole batches. Only true is known here. {_BY_HAND}"
        )
    known = {*_PARTS["evaluator"], *_WITHOUT_EFFECT, "mode", "decollate"}
    for key, value in evaluator.items():
        if key not in known and not is_of_the_parser(key) and value not in (None, {}):
            raise _changes_values(config, f"evaluator.{shorten_text(key)}", value)
    _check_handlers(config, evaluator.get("val_handlers"))


def _check_handlers(config: Config, handlers: object) -> None:
    """Refuse handlers that are not known to leave what the network has answered as it is."""
    place = "evaluator.val_handlers"
    filtered = _FILTERED.fullmatch(handlers) if isinstance(handlers, str) else None
    found = config.follow(handlers if filtered is None else filtered[1], place)
    for number, each in enumerate(found if isinstance(found, list) else [found]):
        handler = config.follow(each, f"{place}.{number}")
        if handler is None:
            continue
        is_known = (
            isinstance(handler, dict)
            and class_name(handler) in _HANDLERS
            and not is_foreign(handler, ("monai", "ignite"))
        )
        if not is_known:
            value = handler.get("_target_", handler) if isinstance(handler, dict) else handler
            raise _changes_values(config, f"{place}.{number}", value)


def _check_actions(config: Config, key: str) -> None:
    """Refuse what a bundle does beside running its evaluator, where that may change values."""
    actions = config.values.get(key)
    for number, action in enumerate(actions if isinstance(actions, list) else [actions]):
        place = f"{key}.{number}"
        if action is None or (
            isinstance(action, str) and _WITHOUT_EFFECT_ON_VALUES.fullmatch(action)
        ):
            continue
        call = _CALL_OF_THE_EVALUATOR.fullmatch(action) if isinstance(action, str) else None
        loader = config.follow(call[1], place) if call else None
        if not isinstance(loader, dict) or class_name(loader) != "CheckpointLoader":
            raise _changes_values(config, place, action)


def _changes_values(config: Config, place: str, value: object) -> ModelContractError:
    return ModelContractError(
        f"{config.file}: {place} is {shorten_value(value)}, which may change values, and is not "
        f"run here. {_BY_HAND}"
    )
