"""Python objects that a job file names: ``package.module:name``, or ``file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_FACTORY = re.compile(r"(?P<module>.+):(?P<name>[A-Za-z_]\w*)")


def factory_parts(path: str) -> tuple[str, str] | None:
    """Module (dotted, or a .py file) and name in ``package.module:name``; None for other text."""
    match = _FACTORY.fullmatch(path)
    return (match["module"], match["name"]) if match else None


def load_object(path: str) -> Any:
    """Import a module, or run a Python file, and return one of its objects.

    Args:
        path: ``package.module:name`` or ``file.py:name``, the file local.

    Raises:
        Exception: the module's own code runs, and may raise anything; ImportError and
            AttributeError where the module, or the name in it, is absent.
    """
    parts = factory_parts(path)
    if parts is None:
        raise ImportError(f"{path} is not of the form package.module:name or file.py:name")
    module, name = parts
    loaded = load_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    return getattr(loaded, name)


def load_file(file: Path) -> ModuleType:
    """Run a Python file as a module, once per content.

    The module's name is derived from the content: two jobs in one process may have files of the
    same name.

    Raises:
        Exception: the file's own code runs, and may raise anything; ImportError where it is absent.
    """
    return sys.modules.get(_module_name(file)) or run_file(file)


def run_file(file: Path) -> ModuleType:
    """Run a Python file as a module, also where it has been run before.

    Raises:
        Exception: the file's own code runs, and may raise anything; ImportError where it is absent.
    """
    unique = _module_name(file)
    spec = importlib.util.spec_from_file_location(unique, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def _module_name(file: Path) -> str:
    if not file.is_file():
        raise ImportError(f"there is no file {file}")
    return f"beam_inference_file_{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
