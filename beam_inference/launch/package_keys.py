"""Tells where a job runs a packaged network otherwise than the package's own tool does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from beam_inference.config.fields import Json
from beam_inference.config.job import JobConfig
from beam_inference.config.network import Network, network_keys
from beam_inference.foreign_text import shorten_value
from beam_inference.models.loading import package_path
from beam_inference.models.packages import Setting, open_package

logger = logging.getLogger(__name__)

_SECTIONS = ("model", "inference")
"""Sections whose keys a package's own tool decides; what becomes of the results is the user's."""

_NO_AUGMENTATION = Setting("inference.augment", "none", "the package does not say otherwise")


def warn_of_departures(config: JobConfig, model: Network) -> None:
    """Warn once, for each package among the networks, of all keys that differ from what it says.

    Args:
        config: the job file.
        model: its network, with its files on this machine.

    Raises:
        ModelContractError: a package is damaged.
    """
    for key, named, member in zip(
        network_keys(model), config.model.members, model.members, strict=True
    ):
        path = package_path(member)
        if path is None:
            continue
        with open_package(path, member.folds) as package:
            recipe = package.network.describe()
        departures = list_departures(config, recipe.settings)
        if departures:
            logger.warning(
                "%s.path %s is %s, which its own tool runs otherwise than this job does: %s. "
                "Results differ from those of its tool; beam-inference init writes its keys.",
                key,
                named.path,
                recipe.title,
                "; ".join(departures),
            )


def list_departures(config: JobConfig, settings: Sequence[Setting]) -> list[str]:
    """What a job says otherwise than settings that a package wants, a clause for each key.

    Args:
        config: the job file.
        settings: those of the package. Names of levels files are not compared.
    """
    wanted = [each for each in settings if each.key.partition(".")[0] in _SECTIONS]
    if not any(each.key == _NO_AUGMENTATION.key for each in wanted):
        wanted.append(_NO_AUGMENTATION)
    ours = config.model_dump()
    return [
        f"{setting.key} is {shorten_value(_value_at(ours, setting.key))}, its tool has "
        f"{shorten_value(setting.value)}"
        for setting in wanted
        if not _says(config, setting)
    ]


def _says(config: JobConfig, setting: Setting) -> bool:
    """Whether a job says what a setting does, in whatever words."""
    values = config.model_dump()
    *sections, name = setting.key.split(".")
    place = values
    for section in sections:
        place = place[section]
    place[name] = setting.value
    try:
        changed = JobConfig.model_validate(values)
    except ValidationError:
        return False  # the other keys of the job do not go with it
    ours, theirs = (_value_at(each.model_dump(), setting.key) for each in (config, changed))
    return bool(_without_files(ours) == _without_files(theirs))


def _value_at(values: Json, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def _without_files(value: Any) -> Any:
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {
            key: None if key == "levels" else _without_files(each) for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_files(each) for each in value]
    return value
