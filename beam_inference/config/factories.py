"""Python objects that a job file names: ``package.module:name``, or ``file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from beam_inference.config.siblings import note_source, own_path

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
            AttributeError where the module, or the name in it, is absent; ImportError where it
            imports a module of which this process has another one of the same name.
    """
    parts = factory_parts(path)
    if parts is None:
        raise ImportError(f"{path} is not of the form package.module:name or file.py:name")
    module, name = parts
    if module.endswith(".py"):
        return getattr(load_file(Path(module)), name)
    loaded = importlib.import_module(module)
    file = getattr(loaded, "__file__", None)  # built-in modules have none
    if file is not None:
        note_source(Path(file), module)
    return getattr(loaded, name)


def load_file(file: Path) -> ModuleType:
    """Run a Python file as a module, once per content.

    The module's name is derived from the content: two jobs in one process may have files of the
    same name.

    Raises:
        Exception: the file's own code runs, and may raise anything; ImportError where it is absent,
            or where it imports a module of which this process has another one of the same name.
    """
    source = _Source(file)
    return sys.modules.get(source.module_name) or _run(source)


def run_file(file: Path) -> ModuleType:
    """Run a Python file as a module, also where it has been run before.

    Raises:
        Exception: the file's own code runs, and may raise anything; ImportError where it is absent,
            or where it imports a module of which this process has another one of the same name.
    """
    return _run(_Source(file))


class _Source(importlib.abc.SourceLoader):
    """Loads a module from a file's content, which is read once.

    Python's own loader would run what it compiled earlier, and kept in ``__pycache__``, wherever
    the file has the same size and time as then: another content than the one that is hashed.
    """

    def __init__(self, file: Path) -> None:
        if not file.is_file():
            raise ImportError(f"there is no file {file}")
        self._file = file
        self._content = file.read_bytes()
        digest = hashlib.sha256(self._content).hexdigest()
        self.module_name = f"beam_inference_file_{digest[:16]}"

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002
        """The path, for ``__file__`` and tracebacks."""
        return str(self._file)

    def get_data(self, path: str) -> bytes:  # noqa: ARG002
        """The source; nothing compiled is asked for, because :meth:`path_stats` is not there."""
        return self._content


def _run(source: _Source) -> ModuleType:
    name = source.module_name
    spec = importlib.util.spec_from_loader(name, source)
    if spec is None:
        raise ImportError(f"{source.get_filename(name)} is not Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        file = Path(source.get_filename(name))
        with own_path(file):
            source.exec_module(module)
        note_source(file)
    except BaseException:
        del sys.modules[name]
        raise
    return module
