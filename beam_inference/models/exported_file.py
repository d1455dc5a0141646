"""Reads networks saved by ``torch.export``, and refuses files that could run code."""

from __future__ import annotations

import io
import logging
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from beam_inference.environment import filter_logs, set_variable
from beam_inference.errors import ModelContractError
from beam_inference.models.archive import check_archive, is_archive, open_archive
from beam_inference.models.exported_calls import check_calls
from beam_inference.models.exported_program import (
    UnsafeProgram,
    check_example_inputs,
    check_program,
    parse_object,
)
from beam_inference.models.own_copy import own_copy
from beam_inference.models.pickle_bounds import PickleOutOfBounds
from beam_inference.models.pickles import ALLOW_HINT, first_line
from beam_inference.models.saved_pickles import check_saved
from beam_inference.models.tensors import tensor_fault

_KIND = "torch.export file"
_TALKERS = ("torch.export", "torch.export.pt2_archive._package", "torch._export.serde.serialize")

_PROGRAM = re.compile(r"models/\w+\.json|serialized_exported_program\.json")
_PAYLOADS = re.compile(r"data/(weights|constants)/\w+_(weights|constants)_config\.json")
_PAYLOAD_NAME = re.compile(r"(weight|tensor)_\d+")
_TENSORS = re.compile(
    r"data/(weights|constants|sample_inputs)/\w+\.pt"
    r"|serialized_(state_dict|constants|example_inputs)\.pt"
)
_BYTES = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|extra(_files)?/.+"
    r"|archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)"
)


def load_file(path: Path, *, allow_pickle: bool) -> Any:
    """Load the program of a ``torch.export`` file.

    Raises:
        ModelContractError: it is none, or could run code of its own while ``allow_pickle`` is not
            given.
    """
    if allow_pickle:
        return _load(path, allow_pickle=True)
    with own_copy(path) as copy:
        return _load(copy, allow_pickle=False)


def _load(path: Path, *, allow_pickle: bool) -> Any:
    if not is_archive(path):
        raise ModelContractError(
            f"cannot load the {_KIND} {path}: it is not an archive as torch.export.save(…) writes "
            "it. Save or copy it again."
        )
    with open_archive(path, _KIND) as archive:
        if not allow_pickle:
            _check_members(archive, path)
    variable = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch.export asks torch.load for more than tensors
    failures: list[BaseException] = []
    try:
        with nullcontext() if allow_pickle else set_variable(variable, "1"), _quiet(failures):
            program = torch.export.load(path)
        if not allow_pickle:
            _check_tensors(program)
            check_example_inputs(program.example_inputs)
            check_calls(program)
        return program
    except UnsafeProgram as error:
        raise _unsafe(path, str(error)) from None
    except pickle.UnpicklingError:
        raise _unsafe(path, "it holds more than tensors") from None
    except Exception as error:
        # it raises one RuntimeError for all failures, of which it only logs the cause
        has_cause = failures and isinstance(error, RuntimeError)
        reason = first_line(failures[0] if has_cause else error)
        raise ModelContractError(f"cannot load the {_KIND} {path}: {reason}") from None


def _check_tensors(program: torch.export.ExportedProgram) -> None:
    for name, value in [*program.state_dict.items(), *program.constants.items()]:
        fault = tensor_fault(value)
        if fault:
            raise UnsafeProgram(f"its {name!a:.60} is {fault}, not a dense tensor of plain numbers")


def _unsafe(path: Path, reason: str) -> ModelContractError:
    return ModelContractError(
        f"the {_KIND} {path} may run any code, or read what lies in memory, and is refused: "
        f"{reason}. {ALLOW_HINT}"
    )


def _check_members(archive: zipfile.ZipFile, path: Path) -> None:
    """Check what an archive holds: a program, and tensors for it.

    Members of other kinds hold pickled objects, or libraries that PyTorch would load and run.

    Raises:
        ModelContractError: it holds anything else.
    """
    names = _names(archive)
    try:
        for name in names:
            _check_member(archive, name, names)
    except UnsafeProgram as error:
        raise _unsafe(path, str(error)) from None
    except ValueError as error:
        raise ModelContractError(
            f"cannot load the {_KIND} {path}: {first_line(error)}. Save or copy it again."
        ) from None


def _names(archive: zipfile.ZipFile) -> dict[str, str]:
    """The members' names, below the one folder in which today's files have all of them."""
    names = archive.namelist()
    root = names[0].partition("/")[0] + "/"
    if "version" in names or not all(name.startswith(root) for name in names):
        root = ""
    return {name.removeprefix(root): name for name in names}


def _check_member(archive: zipfile.ZipFile, name: str, names: Mapping[str, str]) -> None:
    if _BYTES.fullmatch(name):
        return
    known = any(kind.fullmatch(name) for kind in (_PROGRAM, _PAYLOADS, _TENSORS))
    if not known:
        raise UnsafeProgram(f"its member {name} is neither a program nor tensors")
    content = archive.read(names[name])
    if _PROGRAM.fullmatch(name):
        check_program(content)
        return
    if _PAYLOADS.fullmatch(name):
        _check_payloads(content, name)
        return
    with io.BytesIO(content) as file:
        if content.startswith(b"PK"):
            with zipfile.ZipFile(file) as inner:
                check_archive(file, inner)
        try:
            check_saved(file)
        except PickleOutOfBounds as error:
            raise UnsafeProgram(f"of its member {name}, {error}") from None


def _check_payloads(content: bytes, name: str) -> None:
    """Check that all weights, or constants, are tensors as bytes."""
    payloads = parse_object(content).get("config")
    if not isinstance(payloads, dict):
        raise ValueError(f"its member {name} lists nothing")
    for key, payload in payloads.items():
        is_tensor = (
            isinstance(payload, dict)
            and not payload.get("use_pickle")
            and _PAYLOAD_NAME.fullmatch(str(payload.get("path_name")))
        )
        if not is_tensor:
            raise UnsafeProgram(f"{key!a:.60} in its member {name} is pickled")


@contextmanager
def _quiet(failures: list[BaseException]) -> Iterator[None]:
    """Keep PyTorch from printing the traceback of what it could not read.

    Args:
        failures: is given the errors that it would have printed, and then hides.
    """

    def is_shown(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            failures.append(record.exc_info[1])
        return False

    with warnings.catch_warnings(), filter_logs(_TALKERS, is_shown):
        warnings.simplefilter("ignore")
        yield
