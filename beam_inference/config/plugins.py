"""Extensions that are installed: operators, engines, networks and formats, found by entry point.

Extensions of this package register in the same way as anybody else's, in ``setup.py``. A name is
looked up when a job file is read, so a name that is not installed is refused before anything is
opened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, TypeVar

from beam_inference.errors import ConfigError
from beam_inference.foreign_text import describe_error

logger = logging.getLogger(__name__)

Extension = TypeVar("Extension")

Group = Literal["operators", "engines", "models", "packages", "formats"]
GROUPS: tuple[Group, ...] = ("operators", "engines", "models", "packages", "formats")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One installed extension.

    Attributes:
        group: what kind of extension it is.
        name: the word that job files use for it.
        object: where it is defined, as ``package.module:name``.
        distribution: the installed distribution that brings it, such as ``beam-inference``.
        version: that distribution's version.
    """

    group: Group
    name: str
    object: str
    distribution: str
    version: str


@cache
def list_plugins(group: Group) -> dict[str, Plugin]:
    """List the installed extensions of one kind, by name, in alphabetical order.

    Raises:
        ConfigError: two distributions bring different extensions of the same name.
    """
    plugins: dict[str, Plugin] = {}
    for entry_point in sorted(_entry_points(group), key=lambda each: each.name):
        plugin = _describe(group, entry_point)
        earlier = plugins.setdefault(plugin.name, plugin)
        if earlier.object != plugin.object:
            raise ConfigError(
                f"two installed packages provide {group[:-1]} {plugin.name}: "
                f"{earlier.distribution} ({earlier.object}) and {plugin.distribution} "
                f"({plugin.object}). Uninstall one of them."
            )
    return plugins


@cache
def load_plugin(group: Group, name: str) -> object:
    """Import an installed extension.

    Args:
        group: what kind of extension it is.
        name: the word that job files use for it.

    Raises:
        ConfigError: nothing of that name is installed, or importing it raises an error.
    """
    if not list_plugins(group):
        raise ConfigError(
            f"no {group} are installed, not even those of beam-inference: its installation is "
            "incomplete, or older than its files. Install it again: pip install -e . in a checkout"
        )
    if name not in list_plugins(group):
        raise ConfigError(
            f"{name} is not among the installed {group}: {', '.join(list_plugins(group))}. Install "
            "the package that brings it, here and on the workers."
        )
    (entry_point, *_) = (each for each in _entry_points(group) if each.name == name)
    try:
        return entry_point.load()
    except Exception as error:  # the module's own code runs, and may raise anything
        plugin = _describe(group, entry_point)
        raise ConfigError(
            f"{group[:-1]} {name} is installed as {plugin.object} by {plugin.distribution} "
            f"{plugin.version}, but cannot be imported: {describe_error(error)}"
        ) from error


def load_usable(group: Group, load: Callable[[str], Extension]) -> dict[str, Extension]:
    """Load all installed extensions of one kind, but for broken ones, which are warned about.

    Args:
        group: what kind of extension they are.
        load: returns the extension of a name, or raises ConfigError.

    Returns:
        The extensions by name, in alphabetical order.
    """
    extensions: dict[str, Extension] = {}
    for name in list_plugins(group):
        try:
            extensions[name] = load(name)
        except ConfigError as error:
            _warn_once(f"left out: {error}")
    return extensions


def list_versions(group: Group, names: Iterable[str]) -> dict[str, str]:
    """Versions of the distributions that bring extensions, by name of the distribution.

    Args:
        group: what kind of extension they are.
        names: names of extensions; those that are not installed are left out.
    """
    installed = list_plugins(group)
    plugins = [installed[name] for name in names if name in installed]
    return {plugin.distribution: plugin.version for plugin in plugins}


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _entry_points(group: Group) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=f"beam_inference.{group}"))


def _describe(group: Group, entry_point: EntryPoint) -> Plugin:
    distribution = entry_point.dist
    return Plugin(
        group=group,
        name=entry_point.name,
        object=entry_point.value,
        distribution="unknown" if distribution is None else distribution.name,
        version="unknown" if distribution is None else distribution.version,
    )
