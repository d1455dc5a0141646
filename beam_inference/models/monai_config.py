"""What the configuration of a MONAI bundle says, read without running any of it.

A configuration is a tree of components, ``{"_target_": class, argument: value}``, with references
(``@name``) and Python expressions (``$…``). References to plain values are followed; expressions
are refused where a value is needed, and never run. What the keys mean was read in MONAI 1.6.1.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from typing import Any

from beam_inference.config.fields import Json
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import shorten_text, shorten_value
from beam_inference.models.package_files import read_json, read_yaml

CONFIGS = ("configs/inference.json", "configs/inference.yaml", "configs/inference.yml")
METADATA = "configs/metadata.json"

_CONSTANTS = {"$torch.float32": "float32", "$torch.float": "float32", "$np.float32": "float32"}
"""Expressions that stand for names."""

_REFERENCE = re.compile(r"\$?(@[\w#:]+)")
"""What stands for another part of the configuration, and for nothing else."""

_OF_COMPOSE = {"_target_", "_desc_", "_disabled_", "transforms", "map_items", "lazy", "log_stats"}
"""Keys of a list of transforms that change no value."""

_READER = re.compile(r"\$?(monai\.data\.)?(ITK|Nibabel|Nrrd|Numpy|PIL|Pydicom)Reader")

_FLOATS = re.compile(r"\$?((torch|np|numpy)\.)?(float|float32|float64|double)")
_OF_A_DTYPE = ("EnsureType", "EnsureTyped", "LoadImage", "LoadImaged", "ToTensor", "ToTensord")
"""Transforms that change values if they are told a dtype."""

_DEEPEST = 32
"""References that are followed from one to the next, and components inside of components."""


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a configuration.

    Attributes:
        name: of its class, without the module.
        target: the class as the configuration names it.
        place: where it stands, for messages.
        arguments: by name; plain values, references followed.
    """

    name: str
    target: str
    place: str
    arguments: Json

    def refuse(self, reason: str) -> ModelContractError:
        """An error that names the component."""
        return ModelContractError(
            f"{self.place}: {shorten_text(self.name)} {reason}. Write the job file by hand."
        )

    def check_arguments(self, known: Mapping[str, object]) -> None:
        """Refuse arguments that would change what it computes.

        Args:
            known: arguments that may have any value, as ``...``; or only this one.

        Raises:
            ModelContractError: there is another one, or one of another value.
        """
        for name, value in self.arguments.items():
            if name not in known:
                raise self.refuse(f"has the argument {shorten_text(name)}, which is not known here")
            expected = known[name]
            if expected is not ... and value != expected:
                raise self.refuse(
                    f"has {shorten_text(name)}: {shorten_value(value)}; only "
                    f"{shorten_value(expected)} is known here"
                )


@dataclass(frozen=True)
class Config:
    """The configuration of a bundle.

    Attributes:
        file: where it lies.
        values: what it holds.
    """

    file: Traversable
    values: Json = field(repr=False)

    def component(self, key: str) -> Component | None:
        """A component on top of the configuration; None if there is none, or it is disabled.

        Raises:
            ModelContractError: it is made by an expression, or is no component.
        """
        if key not in self.values:
            return None
        found = self._component(self.values[key], key)
        return None if _is_disabled(found.arguments.pop("_disabled_", False)) else found

    def transforms(self, key: str, without_effect: Mapping[str, Container[str]]) -> list[Component]:
        """The transforms that a ``Compose`` lists; none if there is none.

        Args:
            key: on top of the configuration.
            without_effect: names of transforms that are left out, and of their arguments by which
                they change no value.

        Raises:
            ModelContractError: it is something else, or made by an expression.
        """
        value = self.values.get(key)
        if value is None:
            return []
        value = self.follow(value, key)
        if isinstance(value, dict) and self._own_name(value, key) == "Compose":
            if _is_disabled(self.follow(value.get("_disabled_", False), key)):
                return []
            for name in value.keys() - _OF_COMPOSE:
                raise ModelContractError(
                    f"{self.file}: {key} has the argument {shorten_text(name)}, which is not known "
                    "here. Write the job file by hand."
                )
            value = self.follow(value.get("transforms", []), f"{key}.transforms")
        if not isinstance(value, list):
            raise ModelContractError(
                f"{self.file}: {key} is {shorten_value(value)}: expected Compose with a list of "
                "transforms"
            )
        made = []
        for number, each in enumerate(value):
            place = f"{key}.{number}"
            followed = self.follow(each, place)
            name = self._own_name(followed, place) if isinstance(followed, dict) else None
            if isinstance(followed, dict) and name is not None and name in without_effect:
                self._check_keeps_values(followed, place, without_effect[name])
                continue  # its arguments may be expressions, which do not matter
            made.append(self._component(followed, place))
        return [each for each in made if not _is_disabled(each.arguments.pop("_disabled_", False))]

    def own_component(self, key: str) -> Component | None:
        """As :meth:`component`, of MONAI's own classes.

        Raises:
            ModelContractError: as there, or the class is another one.
        """
        found = self.component(key)
        if found is not None:
            self._own_name({"_target_": found.target}, key)
        return found

    def _own_name(self, value: Json, place: str) -> str | None:
        """Name of a class of MONAI's; None where there is none.

        Raises:
            ModelContractError: it is a class of others, which may do anything under that name.
        """
        if is_foreign(value):
            raise ModelContractError(
                f"{self.file}: {place} is a {shorten_text(value['_target_'])}, which is not "
                "MONAI's: its code would have to run. Write the job file by hand."
            )
        return class_name(value)

    def _check_keeps_values(self, transform: Json, place: str, known: Container[str]) -> None:
        """Check that a transform that is left out changes no value.

        Raises:
            ModelContractError: it does, or may.
        """
        for name, value in transform.items():
            if name not in known and not is_of_the_parser(name) and value is not None:
                raise ModelContractError(
                    f"{self.file}: {place} has the argument {shorten_text(name)}, which may change "
                    "values, and is not known here. Write the job file by hand."
                )
        reader = transform.get("reader")
        if reader is not None and not (isinstance(reader, str) and _READER.fullmatch(reader)):
            raise ModelContractError(
                f"{self.file}: {place}.reader is {shorten_value(reader)}; only MONAI's own readers "
                "are known to read what a file holds. Write the job file by hand."
            )
        dtypes = transform.get("dtype")
        if class_name(transform) not in _OF_A_DTYPE or dtypes is None:
            return
        for dtype in dtypes if isinstance(dtypes, list) else [dtypes]:
            if not isinstance(dtype, str) or not _FLOATS.fullmatch(dtype):
                raise ModelContractError(
                    f"{self.file}: {place} makes {shorten_value(dtype)} of the values; jobs "
                    "compute in float32. Write the job file by hand."
                )

    def _component(self, value: object, place: str) -> Component:
        value = self.follow(value, place)
        if not isinstance(value, dict) or class_name(value) is None:
            raise ModelContractError(
                f"{self.file}: {place} is {shorten_value(value)}: expected a component with "
                "_target_"
            )
        target = value["_target_"]
        arguments = {
            name: self._plain(each, f"{place}.{name}", 0)
            for name, each in value.items()
            if name not in ("_target_", "_desc_", "_requires_")
        }
        if (mode := arguments.pop("_mode_", "default")) != "default":
            raise ModelContractError(
                f"{self.file}: {place} has _mode_: {shorten_value(mode)}; only default is known "
                "here. Write the job file by hand."
            )
        name = target.rpartition(".")[2]
        return Component(name, target, f"{self.file}: {place}", arguments)

    def _plain(self, value: object, place: str, depth: int) -> Any:
        """A value without references; expressions and components in it are refused."""
        value = self.follow(value, place)
        if depth > _DEEPEST:
            raise ModelContractError(f"{self.file}: {place} is too deep")
        if isinstance(value, list):
            return [
                self._plain(each, f"{place}.{number}", depth + 1)
                for number, each in enumerate(value)
            ]
        if isinstance(value, dict):
            if "_target_" in value:
                raise ModelContractError(
                    f"{self.file}: {place} is a component, {shorten_value(value['_target_'])}: "
                    "only plain values are read there"
                )
            return {
                name: self._plain(each, f"{place}.{name}", depth + 1)
                for name, each in value.items()
            }
        return value

    def follow(self, value: object, place: str) -> object:
        """What a reference stands for, also one of another; other values as they are.

        Args:
            value: of the configuration.
            place: where it stands, for messages.

        Raises:
            ModelContractError: it is an expression, or leads nowhere.
        """
        for _ in range(_DEEPEST):
            if not isinstance(value, str):
                return value
            if value in _CONSTANTS:
                return _CONSTANTS[value]
            reference = _REFERENCE.fullmatch(value)
            if reference is None and value.startswith(("$", "@")):
                raise ModelContractError(
                    f"{self.file}: {place} is the expression {shorten_text(value)}, which is "
                    "Python code and is not run. Write its value there, or the job file by hand."
                )
            if value.startswith("%"):
                raise ModelContractError(
                    f"{self.file}: {place} is the macro {shorten_text(value)}, which is not read"
                )
            if reference is None:
                return value
            value = self.look_up(reference[1], place)
        raise ModelContractError(f"{self.file}: {place} refers to itself")

    def look_up(self, reference: str, place: str) -> object:
        """What a reference such as ``@name`` or ``@name#0`` names, which may be one itself.

        Raises:
            ModelContractError: there is nothing.
        """
        found: object = self.values
        for part in reference[1:].replace("::", "#").split("#"):
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                raise ModelContractError(
                    f"{self.file}: {place} refers to {shorten_text(reference)}, which is not there"
                )
        return found


def _is_disabled(value: object) -> bool:
    """Whether ``_disabled_`` says so; MONAI takes a text for what it means."""
    return value.strip().lower() == "true" if isinstance(value, str) else bool(value)


def class_name(component: Json) -> str | None:
    """Name of a component's class without the module; None where there is none."""
    target = component.get("_target_")
    return target.rpartition(".")[2] if isinstance(target, str) else None


def is_foreign(component: Json, own: tuple[str, ...] = ("monai",)) -> bool:
    """Whether a component's class is of other packages, and may do anything under its name."""
    target = component.get("_target_")
    root = target.rpartition(".")[0].partition(".")[0] if isinstance(target, str) else ""
    return root not in ("", *own)


def is_of_the_parser(key: str) -> bool:
    """Whether a key is for MONAI's parser, as ``_target_`` and ``_desc_``, and no argument."""
    return re.fullmatch(r"_[a-z]+_", key) is not None


def is_bundle(folder: Traversable) -> bool:
    """Whether a folder is a MONAI bundle, by the names of what lies in it."""
    return (folder / "configs").is_dir() and config_file(folder) is not None


def config_file(folder: Traversable) -> str | None:
    """Name of the configuration of a bundle for inference; None if there is none."""
    for name in CONFIGS:
        if _file(folder, name).is_file():
            return name
    return None


def read_config(folder: Traversable) -> Config:
    """Read the configuration of a bundle.

    Raises:
        ModelContractError: it is absent or damaged.
    """
    name = config_file(folder)
    if name is None:
        raise ModelContractError(f"{folder} has none of {', '.join(CONFIGS)}")
    file = _file(folder, name)
    return Config(file, read_json(file) if name.endswith(".json") else read_yaml(file))


def read_metadata(folder: Traversable) -> Json:
    """Read what a bundle says about itself; nothing if it says nothing.

    Raises:
        ModelContractError: it is damaged.
    """
    file = _file(folder, METADATA)
    return read_json(file) if file.is_file() else {}


def _file(folder: Traversable, name: str) -> Traversable:
    for part in name.split("/"):
        folder = folder / part
    return folder
