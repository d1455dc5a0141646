"""Modules that lie beside a Python file which a job names, and which that file imports.

Python keeps one module of a name for a whole process. A second file that finds its own ``helper``
beside it would be given the first one's, and compute with that, without a word.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

_known: dict[str, tuple[Path, str]] = {}
"""Where the siblings of the files that this process ran lie, and the hash of their source."""


def check_siblings(file: Path) -> None:
    """Check that no other module has the name of one that a file imports from its own folder.

    What can be imported from there depends on ``sys.path``, so the file was run before.

    Args:
        file: a Python file.

    Raises:
        ImportError: this process has another module of such a name, or another content of it.
    """
    folder = file.resolve().parent
    if not any(Path(entry).resolve() == folder for entry in sys.path):
        return
    for name, source in _imported_siblings(file, folder).items():
        found = (source, _hash_of(source))
        first = _known.setdefault(name, found)
        if first[1] == found[1]:
            continue
        if first[0] == source:
            raise ImportError(
                f"{source}, which {file} imports, was changed since this process imported it: give "
                "the command in a new process"
            )
        raise ImportError(
            f"{file} imports the module {name} beside it, and another file the module {first[0]}: "
            "Python keeps one module of a name, so both would run the same. Give one of them "
            "another name"
        )


def _imported_siblings(file: Path, folder: Path) -> dict[str, Path]:
    """The modules in a folder that a file imports, or that they import: a file or folder each."""
    found: dict[str, Path] = {}
    waiting = [file]
    while waiting:
        for name in _imported_names(waiting.pop()):
            source = _sibling(name, folder)
            if source is not None and name not in found:
                found[name] = source
                waiting += _sources(source)
    return found


def _imported_names(file: Path) -> Iterator[str]:
    """First parts of the names of all modules that a file imports, wherever in its code."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # it is not imported, or fails where it is, or nests so deeply that a machine has written it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def _sibling(name: str, folder: Path) -> Path | None:
    """The file or the folder of a module of some name in a folder, if there is one."""
    package = folder / name
    if (package / "__init__.py").is_file():
        return package
    module = folder / f"{name}.py"
    if module.is_file():
        return module
    return package if package.is_dir() and _sources(package) else None


def _sources(module: Path) -> list[Path]:
    files = sorted(module.rglob("*.py")) if module.is_dir() else [module]
    return [file for file in files if file.is_file()]  # editors leave links that lead nowhere


def _hash_of(module: Path) -> str:
    digest = hashlib.sha256()
    for file in _sources(module):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(module)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
