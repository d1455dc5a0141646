"""What identifies a job's network: hashes of its files, part of the job's fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from beam_inference.config.factories import factory_parts
from beam_inference.config.network import Network, network_keys
from beam_inference.config.plugins import list_plugins
from beam_inference.config.siblings import files_beside
from beam_inference.errors import ModelContractError
from beam_inference.models.loading import loader_of, package_path, source_file, suffix_of
from beam_inference.models.local_files import code_sha256, existing_file, file_sha256
from beam_inference.models.onnx_file import check_self_contained
from beam_inference.models.openvino_file import check_network
from beam_inference.models.packages import open_package


def model_sha256(model: Network) -> str:
    """Hash of what defines the network.

    Returns:
        "identity" for ``identity``; else the hash of the model's file or folder, of the files of a
        package that determine its network, or of the factory's source file with the modules beside
        it that it imports, and after a "+" that of ``model.weights``, if there are any. Of an
        ensemble, that of each network, between commas.

    Raises:
        ModelContractError: a file is absent, or ``model.sha256`` is given and differs.
    """
    return ",".join(map(_member_sha256, model.members))


def _member_sha256(model: Network) -> str:
    if model.path == "identity":
        return "identity"
    files = _member_files(model)
    suffix = suffix_of(model)
    if suffix == ".onnx":
        check_self_contained(files[0])
    if suffix == ".xml":
        if model.weights is None:  # OpenVINO would take those beside it, which nothing hashed
            raise ModelContractError(
                f"model.path {model.path} is a network of OpenVINO, whose weights are in a file of "
                "their own. Write its path, which ends in .bin, as model.weights."
            )
        check_network(files[0])
    digests = [file_sha256(path) for path in files]
    if len(digests) > 1 and model.weights is None:  # of a package
        lines = [f"{path.name} {digest}\n" for path, digest in zip(files, digests, strict=True)]
        digests = [hashlib.sha256("".join(lines).encode()).hexdigest()]
    together = "+".join(digests)
    if _beside(model):
        digests[0] = code_sha256(files[0])
    with_modules = "+".join(digests)
    if model.sha256 not in (None, with_modules):
        _check_sha256(model.sha256, files, together)
    return with_modules


def _beside(model: Network) -> list[Path]:
    """The modules beside a factory's file that it imports; none of other networks."""
    module, _ = factory_parts(model.path) or ("", "")
    beside = files_beside(source_file(model)) if module.endswith(".py") else []
    return [file for _, file in beside]


def _check_sha256(expected: str, files: Sequence[Path], found: str) -> None:
    """Compare hashes with what the job says: of the last file, or of factory and weights."""
    if "+" not in expected:
        files = files[-1:]
        found = found.rpartition("+")[2]
    if found != expected:
        raise ModelContractError(
            f"{' and '.join(map(str, files))} have the sha256 {found}, the job says model.sha256: "
            f"{expected}. They are other files, or were changed or damaged."
            if len(files) > 1
            else f"{files[-1]} has the sha256 {found}, the job says model.sha256: {expected}. It "
            "is another file, or was changed or damaged."
        )


@dataclass(frozen=True, slots=True)
class HashedFile:
    """A file that determines a network.

    Attributes:
        key: the key of the job file that names it, or the package that it lies in.
        name: its name; inside a package, its path there.
        sha256: its hash.
    """

    key: str
    name: str
    sha256: str


def hash_files(model: Network) -> list[HashedFile]:
    """The files of a network that a job names, or its package, each with its hash.

    Args:
        model: the job's section, its files local.

    Raises:
        ModelContractError: a file is absent.
    """
    if model.path == "identity":
        return []
    pairs = zip(model.members, network_keys(model), strict=True)
    return [file for member, key in pairs for file in _hash_member(member, key)]


def _hash_member(model: Network, key: str) -> list[HashedFile]:
    """The files of a network, which lies under a key of the job file."""
    package = package_path(model)
    root = None if package is None or not package.is_dir() else package
    return [
        HashedFile(
            key=f"{key}.weights" if number and package is None else f"{key}.path",
            name=file.name if root is None else file.relative_to(root).as_posix(),
            sha256=file_sha256(file),
        )
        for number, file in enumerate(_member_files(model))
    ]


@dataclass(frozen=True)
class NetworkFiles:
    """The files that a network is loaded of, as they were when this was made.

    Attributes:
        model: the job's section, its files local.
        states: what shows that the files were written again, or replaced.
    """

    model: Network
    states: Sequence[tuple[int, ...]]

    @classmethod
    def of(cls, model: Network) -> NetworkFiles | None:
        """The files of a model, before it is loaded.

        Returns:
            None where files do not determine the network: a factory runs code of its own, and other
            people's loaders may.

        Raises:
            ModelContractError: a file is absent.
        """
        for member in model.members:
            if member.path == "identity" or factory_parts(member.path):
                return None
            if not _is_own_kind(member):
                return None
        return cls(model, network_file_states(model))

    @cached_property
    def sha256(self) -> str:
        """Hash of the files; see :func:`model_sha256`."""
        return model_sha256(self.model)

    def are_unchanged(self) -> bool:
        """Whether the files are those that they were, so that what was loaded has their hash."""
        return network_file_states(self.model) == self.states


def network_file_states(model: Network) -> list[tuple[int, ...]]:
    """What shows that a network's files were written again, or replaced, and be it for a moment.

    Raises:
        ModelContractError: a file is absent.
    """
    return file_states(_files(model))


def file_states(files: Sequence[Path]) -> list[tuple[int, ...]]:
    """What shows that files, or links to them, were written again, or replaced."""
    stats = [stat for file in files for stat in (file.lstat(), file.stat())]
    return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]


def _is_own_kind(model: Network) -> bool:
    """Whether it is loaded by code of this package, which takes nothing but the files."""
    package = package_path(model)
    if package is not None:
        with open_package(package) as opened:
            return opened.load_object.startswith("beam_inference.")
    plugin = list_plugins("models").get(suffix_of(model).removeprefix("."))
    return plugin is None or plugin.object.startswith("beam_inference.")


def _files(model: Network) -> list[Path]:
    members = [each for each in model.members if each.path != "identity"]
    return [file for member in members for file in _member_files(member) + _beside(member)]


def _member_files(model: Network) -> list[Path]:
    package = package_path(model)
    if package is not None:
        with open_package(package, model.folds) as opened:
            return opened.list_files()
    files = [_model_file(model)]
    if model.weights is not None:
        files.append(existing_file(model.weights, "model.weights"))
    return files


def _model_file(model: Network) -> Path:
    if factory_parts(model.path):
        return source_file(model)
    loader = loader_of(model)
    is_folder = loader is not None and loader.is_folder
    return existing_file(model.path, "model.path", is_folder=is_folder)
