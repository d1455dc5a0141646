"""Files of packages of networks: read within bounds, as data, whatever they hold."""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from beam_inference.config.fields import Json, describe_fault
from beam_inference.config.json_text import parse_json
from beam_inference.config.yaml_text import DEEPEST, parse_yaml
from beam_inference.errors import ConfigError, ModelContractError
from beam_inference.foreign_text import shorten_text, shorten_value
from beam_inference.models.archive import ZIP_ERRORS

_LARGEST_TEXT = 1 << 24
"""Bytes of a package's largest JSON file. nnU-Net's plans have some ten thousand."""

_LARGEST_ARRAY = 1 << 30

Length = Annotated[FiniteFloat, Field(ge=1e-15, le=1e15)]
"""Of a voxel's edge, in whatever unit: one that is finite in any other, too."""


class ForeignModel(BaseModel):
    """What is used of a file that another tool wrote; its other keys are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)


AnyForeign = TypeVar("AnyForeign", bound=ForeignModel)


def parse_foreign(
    values: object, model: type[AnyForeign], source: Traversable, tool: str
) -> AnyForeign:
    """Read values of a file as another tool writes them.

    Args:
        values: of the file.
        model: what is expected.
        source: the file, for messages.
        tool: what writes such files, for messages.

    Raises:
        ModelContractError: they are none of that tool.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ModelContractError(
            f"{source} is not as {tool} writes it: {describe_fault(error)}"
        ) from None


def list_folders(folder: Traversable) -> list[Traversable]:
    """The folders in a folder, by name.

    Raises:
        ModelContractError: it cannot be read.
    """
    try:
        inner = [each for each in folder.iterdir() if each.is_dir()]
    except OSError as error:
        raise ModelContractError(f"cannot read the folder {folder}: {error.strerror}") from None
    return sorted(inner, key=lambda each: each.name)


def read_json(file: Traversable) -> Json:
    """Read a JSON file of a package.

    Raises:
        ModelContractError: it is absent, too large, or no JSON object.
    """
    try:
        values = parse_json(_read_text(file))
    except ValueError as error:
        raise ModelContractError(f"{file} is no JSON: {error}") from None
    _check_depth(values, file)
    return _as_mapping(values, file, "JSON object")


def is_file(file: Traversable) -> bool:
    """Whether there is a file, also of a name that is too long for the file system."""
    try:
        return file.is_file()
    except OSError:
        return False


def _read_text(file: Traversable) -> bytes:
    if not is_file(file):
        raise ModelContractError(
            f"{file} is no file: it is a folder, a pipe or the like, or absent"
        )
    try:
        with file.open("rb") as stream:
            text: bytes = stream.read(_LARGEST_TEXT + 1)
    except (OSError, *ZIP_ERRORS) as error:
        raise ModelContractError(f"cannot read {file}: {error}") from None
    if len(text) > _LARGEST_TEXT:
        raise ModelContractError(f"{file} is larger than {_LARGEST_TEXT:,} bytes")
    return text


def _check_depth(values: object, file: Traversable) -> None:
    level = [values]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in _inner_values(value)]
    if level:
        raise ModelContractError(f"{file}: values lie inside values on more than {DEEPEST} levels")


def _inner_values(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _as_mapping(values: Any, file: Traversable, expected: str) -> Json:
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ModelContractError(f"{file}: expected a {expected}, found {shorten_value(values)}")
    return values


@contextmanager
def local_file(file: Traversable) -> Iterator[Path]:
    """A file of a package as a local file, which is removed afterwards if it had to be unpacked.

    Raises:
        ModelContractError: it cannot be unpacked.
    """
    if isinstance(file, Path):
        yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        try:
            with file.open("rb") as packed, copy.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        except (OSError, *ZIP_ERRORS) as error:
            raise ModelContractError(f"cannot unpack {file}: {error}") from None
        yield copy


def read_yaml(file: Traversable) -> Json:
    """Read a YAML file of a package.

    Raises:
        ModelContractError: it is absent, too large, or no YAML mapping.
    """
    try:
        values = parse_yaml(_read_text(file).decode())
    except (ConfigError, UnicodeDecodeError) as error:
        raise ModelContractError(f"{file} is not read: {error}") from None
    return _as_mapping(values, file, "YAML mapping")


def read_array(file: Traversable) -> NDArray[Any]:
    """Read an array of a package, in NumPy's own format.

    Raises:
        ModelContractError: it is none, or unpacks into too much.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(_LARGEST_ARRAY + 1)
        if len(content) > _LARGEST_ARRAY:
            raise ModelContractError(f"{file} is larger than {_LARGEST_ARRAY:,} bytes")
        array: NDArray[Any] = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    # its header may promise more than there is memory, whatever follows, or be no Python
    except (OSError, MemoryError, tokenize.TokenError, *ZIP_ERRORS) as error:
        raise ModelContractError(f"{file} is no array of NumPy: {error}") from None
    return array


def find_file(root: Traversable, name: str, key: str) -> Traversable:
    """A file inside a package that the package itself names.

    Args:
        root: the package's folder.
        name: a path relative to it.
        key: where it is named, for messages.

    Raises:
        ModelContractError: it leads elsewhere, or is absent.
    """
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or {"", ".."} & set(parts):
        raise ModelContractError(
            f"{root}: {key} is {shorten_text(name)}: expected the plain path of a file in the "
            "package. Files elsewhere are not fetched: put them into the package, and name them "
            "there."
        )
    file = root
    for part in parts:
        file = file / part
    if not is_file(file):
        raise ModelContractError(f"{root}: {key} names {name}, and there is no such file")
    return file


def check_sha256(file: Traversable, expected: str | None) -> None:
    """Compare a file's content with the hash that a package states for it.

    Raises:
        ModelContractError: it differs, or the file cannot be read.
    """
    if expected is None:
        return
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except (OSError, *ZIP_ERRORS) as error:
        raise ModelContractError(f"cannot read {file}: {error}") from None
    if digest.hexdigest() != expected.lower():
        raise ModelContractError(
            f"{file} has the sha256 {digest.hexdigest()}, the package says {shorten_text(expected)}"
            ": it is another file, or was changed or damaged"
        )
