"""Packages of networks: folders or zip files that also say how the network is to be run.

The tools that train networks ship them in such packages. A kind of package is installed by an entry
point of the group ``beam_inference.packages``, which names a :class:`PackageKind`. What a package
says about running its network becomes keys of a job file when one is written
(:mod:`beam_inference.launch.new_job`); a job that names the package takes only the network of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, Protocol

from beam_inference.config.plugins import list_plugins, load_plugin
from beam_inference.errors import ConfigError, ModelContractError
from beam_inference.foreign_text import shorten_text
from beam_inference.models.archive import open_packed
from beam_inference.models.package_files import check_sha256, find_file, list_folders

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Folds = Sequence[int | Literal["all"]]
"""Numbers of the folds that a network was trained on; "all" is one that was trained on all data."""

LEVELS = "levels.json"
"""Name of the file of levels in a normalisation that needs one."""

_NAMED_SUFFIXES = (".onnx",)
"""Suffixes of networks in packages that a job names by their file: such files only compute."""

_MOST_FOLDERS = 256
"""Folders on one level that are looked into for a network."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a job file, as a package wants it.

    Attributes:
        key: where the key stands, such as ``inference.patch_shape``.
        value: as it would be written in a job file.
        reason: what in the package says so; a clause of one line.
    """

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnResampling:
    """How a package's own tool brings an image to the voxel size of the training data, and back.

    Attributes:
        order: of the spline for the image.
        separate_z: whether the axis of the longest voxels takes the nearest ones; "auto" if that
            depends on the voxel sizes.
        clip: what values are kept within, before and after, as ``input.resample.clip`` says it;
            None for nothing.
        order_back: of the spline for what the network gives.
        separate_z_back: as ``separate_z``, on the way back.
        cautions: what the tool does otherwise; sentences.
    """

    order: Literal[0, 1, 3]
    separate_z: bool | Literal["auto"]
    clip: list[float] | list[list[float]] | dict[str, str] | None
    order_back: Literal[0, 1, 3]
    separate_z_back: bool | Literal["auto"]
    cautions: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a package says about its network, and how its own tool runs it.

    Attributes:
        title: what the package is, in a few words.
        facts: what a user may want to know, by name: licence, classes, folds.
        settings: the keys of a job file that give what its own tool gives.
        voxel_size: what the network was trained at, ZYX; None on an axis where any will do, as on z
            for a network of planes.
        has_unit: whether that is in millimetres, rather than in whatever unit the training data
            had.
        resampling: how its own tool brings images to that voxel size; None if it does not, or in a
            way that is not known here.
        needs_levels: whether the settings name levels of the input volume.
        needs_object: whether these are also of the inside of an object alone.
        cautions: what its own tool does that these settings do not; sentences.
        obstacle: why a job cannot run it, in a clause; None if it can.
        network_file: the file in the package that a job names in its place; None if a job names the
            package.
        network_sha256: hash of that file, by what the package says; None if it says none.
    """

    title: str
    facts: Mapping[str, str]
    settings: Sequence[Setting]
    voxel_size: tuple[float | None, float | None, float | None]
    has_unit: bool
    resampling: OwnResampling | None = None
    needs_levels: bool = False
    needs_object: bool = False
    cautions: Sequence[str] = ()
    obstacle: str | None = None
    network_file: str | None = None
    network_sha256: str | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The settings' values by their keys."""
        return {setting.key: setting.value for setting in self.settings}


@dataclass(frozen=True, slots=True)
class Sample:
    """An example of what a network makes of an image, as its package brings it.

    Attributes:
        image: stored values (C, Z, Y, X).
        result: what a job should make of them, (C, Z, Y, X).
        absolute: difference that is allowed anywhere.
        relative: and this share of the result's value.
        mismatches: share of the values that may differ by more.
    """

    image: NDArray[Any]
    result: NDArray[Any]
    absolute: float
    relative: float
    mismatches: float


class NotCompared(Exception):
    """A package's own tool cannot be asked here; the message says why."""


class PackagedNetwork(Protocol):
    """What was read of a package. Weights may still lie in its files until they are loaded."""

    def load(self, *, is_trusted: bool) -> torch.nn.Module | torch.export.ExportedProgram:
        """The network, in PyTorch, on the CPU.

        Args:
            is_trusted: whether code in the package may be run.

        Raises:
            ModelContractError: the package contradicts itself, or asks for what is not known here.
        """

    def describe(self) -> Recipe:
        """What the package says about running its network.

        Raises:
            ModelContractError: the package's own tool does what is not known here.
        """

    def sample(self) -> Sample | None:
        """An example in the package; None if there is none.

        Raises:
            ModelContractError: it is damaged.
        """

    def predict_by_tool(self, image: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the package's own tool predicts.

        Args:
            image: normalised, float32 (C, Z, Y, X).

        Returns:
            The prediction before postprocessing, float32 (C, Z, Y, X).

        Raises:
            NotCompared: the tool cannot be asked; the message says why.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageKind:
    """A kind of package.

    Attributes:
        title: what such a package is called.
        contents: the files by which it is known, for messages.
        is_root: whether a folder is one of this kind, by the names of the files in it.
        list_files: the files, relative to such a folder, that determine the network.
        read: reads such a folder, once; the package is open as long as what it returns is used.
        may_hold_programs: whether its networks may be TorchScript, which are programs.
    """

    title: str
    contents: str
    is_root: Callable[[Traversable], bool]
    list_files: Callable[[Traversable, Folds | None], Sequence[str]]
    read: Callable[[Traversable, Folds | None], PackagedNetwork]
    may_hold_programs: bool = True


@dataclass(frozen=True)
class Package:
    """A package on this machine, opened.

    Attributes:
        path: the folder or zip file.
        folds: those that are used; None for those that the package's own tool takes.
        plugin: the name by which its kind is installed.
        kind: what it is.
        root: the folder in it that holds the network.
    """

    path: Path
    folds: Folds | None
    plugin: str
    kind: PackageKind
    root: Traversable

    @cached_property
    def network(self) -> PackagedNetwork:
        """What the package says, and its network; read when it is first asked for.

        Raises:
            ModelContractError: the package is damaged, or asks for what is not known here.
        """
        return self.kind.read(self.root, self.folds)

    @property
    def load_object(self) -> str:
        """Where the kind is defined, as ``package.module:name``."""
        return list_plugins("packages")[self.plugin].object

    def find_network(self, recipe: Recipe) -> Traversable | None:
        """The file of the network that a job names in place of the package; None if it names none.

        What a file is taken for, such as a program or a factory, follows from its name.

        Args:
            recipe: what the package says.

        Raises:
            ModelContractError: it leads out of the package, is absent, has another hash than the
                package says, or would be taken for something that runs code.
        """
        name = recipe.network_file
        if name is None:
            return None
        if PurePosixPath(name).suffix not in _NAMED_SUFFIXES:
            raise ModelContractError(
                f"{self.root}: its network is said to be ONNX, and lies in "
                f"{shorten_text(name)}: expected a name with the suffix "
                f"{', '.join(_NAMED_SUFFIXES)}, since a job would take that file for what its name "
                "says. If you trust the package, rename the file, there and in the description."
            )
        file = find_file(self.root, name, "the network")
        check_sha256(file, recipe.network_sha256)
        return file

    def list_files(self) -> list[Path]:
        """The local files that determine the network: those of a folder, or the zip file."""
        if not self.path.is_dir():
            return [self.path]
        root = Path(str(self.root))
        return [root / name for name in self.kind.list_files(self.root, self.folds)]


def may_be_package(path: Path) -> bool:
    """Whether a local path is a folder, or named as a zip file."""
    return path.suffix == ".zip" or path.is_dir()


@contextmanager
def open_package(path: Path, folds: Folds | None = None) -> Iterator[Package]:
    """Open a package.

    Args:
        path: of a folder, or of a zip file of one.
        folds: those that are to be used; None for those that the package's own tool takes.

    Raises:
        ModelContractError: it is none, or holds several networks.
    """
    if not may_be_package(path):
        raise ModelContractError(
            f"{path} is neither a folder nor a zip file: expected a package that says how its "
            f"network is run. {'' if path.exists() else 'There is no such file. '}Of other files "
            "of networks you say so yourself: see docs/models.md"
        )
    kinds = _installed_kinds()
    with nullcontext(path) if path.is_dir() else open_packed(path) as top:
        candidates = [
            Package(path, folds, name, kinds[name], root) for name, root in _find_roots(top, kinds)
        ]
        if not candidates:
            known = "; ".join(f"{kind.title} ({kind.contents})" for kind in kinds.values())
            what = "folder" if path.is_dir() else "zip file"
            raise ModelContractError(
                f"model.path {path} is a {what}, but holds none of the packages of networks that "
                f"are known here: {known}"
            )
        if len(candidates) > 1:
            names = ", ".join(str(package.root) for package in candidates)
            raise ModelContractError(
                f"model.path {path} holds several networks: {names}. Name the folder of one "
                "(unpack a zip file first)."
            )
        yield candidates[0]


def _find_roots(
    top: Traversable, kinds: Mapping[str, PackageKind]
) -> list[tuple[str, Traversable]]:
    """The folders of networks in a folder, with their kinds: itself, or those one or two below."""
    level: list[Traversable] = [top]
    for _ in range(3):
        roots = [
            (name, folder)
            for folder in level
            for name, kind in kinds.items()
            if kind.is_root(folder)
        ]
        if roots:
            return roots
        level = [inner for folder in level for inner in list_folders(folder)]
        if len(level) > _MOST_FOLDERS:
            raise ModelContractError(
                f"{top} holds {len(level):,} folders, of which none is looked into: name the one "
                "that holds the network"
            )
    return []


def _installed_kinds() -> dict[str, PackageKind]:
    kinds = {}
    for name in list_plugins("packages"):
        kind = load_plugin("packages", name)
        if not isinstance(kind, PackageKind):
            raise ConfigError(
                f"package {name} is installed as {list_plugins('packages')[name].object}, which is "
                "not a beam_inference.models.packages.PackageKind"
            )
        kinds[name] = kind
    return kinds
