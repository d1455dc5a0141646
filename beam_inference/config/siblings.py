"""Modules that belong to the Python code that a job names, and which that code imports.

They lie beside it, or in folders that it puts on ``sys.path``. Python keeps one module of a name,
and one path, for a whole process. A second file that finds its own ``helper`` would be given the
first one's, and compute with that, without a word.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import site
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import islice
from pathlib import Path

from beam_inference.config.syntax import parse_python
from beam_inference.errors import ModelContractError

_OWN_PACKAGE = __name__.partition(".")[0]
_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_IMPORTS_BY_TEXT = frozenset({"importlib", "__import__", "exec", "eval", "runpy"})
"""Names in code that may import a module whose name is a text."""

_MOST_ENTRIES = 20_000

_sources: dict[Path, _Source] = {}
"""The files and modules that jobs of this process named."""

_hashes: dict[Path, str] = {}
"""Hashes of the modules beside them, as they were at first."""

_added: dict[Path, list[str]] = {}
"""What each file has put on ``sys.path``."""


@contextmanager
def own_path(file: Path) -> Iterator[None]:
    """Run code of a file with the ``sys.path`` that it would have in a process of its own.

    What other files have put there comes behind its own afterwards.
    """
    mine = _added.setdefault(file.resolve(), [])
    foreign = {entry for entries in _added.values() for entry in entries}.difference(mine)
    hidden = [entry for entry in sys.path if entry in foreign]
    sys.path[:] = [entry for entry in sys.path if entry not in foreign]
    before = Counter(sys.path)
    try:
        yield
    finally:
        new = Counter(sys.path) - before
        mine += [entry for entry in new if entry not in mine]
        sys.path += [entry for entry in hidden if entry not in sys.path]


def hint_at_folder(error: BaseException, file: Path) -> str:
    """What to do where a file's code does not find a module that lies beside it; else nothing."""
    name = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    folder = file.parent.resolve()
    if not name or not ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
        return ""
    return (
        f". It lies beside that file, in {folder}, where Python does not look by itself: give the "
        "command with this folder in PYTHONPATH, or begin the file with import sys; "
        "sys.path.insert(0, …)"
    )


def note_source(file: Path, module: str | None = None) -> None:
    """Note code that a job names, and check it and all that were noted before.

    Args:
        file: a Python file, which was run.
        module: the dotted name that it was imported by; None if it was run as a file.

    Raises:
        ImportError: as :func:`check_siblings`; or a module beside the file was changed since this
            process imported it.
    """
    file = file.resolve()
    source = _sources[file] = _Source(file, module)
    if not _is_installed(file):
        for name, sibling in source.siblings.items():
            _check_compiled(name)
            found = _hash_of(sibling)
            if _hashes.setdefault(sibling, found) != found:
                raise ImportError(
                    f"{sibling}, which {file} imports, was changed since this process imported it: "
                    "give the command in a new process"
                )
    check_siblings(file)


def _check_compiled(name: str) -> None:
    """Refuse modules of which Python runs a compiled form of another source. Raises ImportError."""
    for each in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
        spec = getattr(sys.modules[each], "__spec__", None)
        loader = None if spec is None else spec.loader
        if isinstance(loader, SourceFileLoader) and not runs_its_source(loader, each):
            raise ImportError(
                f"Python runs a compiled form of {loader.path} that was made of another source. "
                f"Remove the folder {Path(loader.path).parent / '__pycache__'}, or touch the file"
            )


def runs_its_source(loader: SourceFileLoader, name: str) -> bool:
    """Whether what Python runs of a module is what its source says; its size and time may lie."""
    file = Path(loader.path)
    return loader.get_code(name) == loader.source_to_code(file.read_bytes(), str(file))


def files_beside(file: Path) -> list[tuple[str, Path]]:
    """The source files of the modules beside a Python file that it imports, or that they import.

    Args:
        file: a Python file, which need not have been run. Of a link, modules lie beside it, or
            beside what it leads to.

    Returns:
        Each with its module's name, and its path in that. None of what code adds to ``sys.path``
        elsewhere, and none of a file among installed packages.

    Raises:
        ModelContractError: a package holds too many files to look through.
    """
    resolved = file.resolve()
    if _is_installed(resolved):
        return []
    source = _Source(resolved, None)
    found = set()
    for folder in {file.absolute().parent, resolved.parent}:
        for name, module in source.siblings_in([folder]).items():
            files = _python_files(module)
            if not files:
                raise ModelContractError(
                    f"{module}, which {file} imports, holds {_MOST_ENTRIES:,} files or more: which "
                    "of them are code, and part of the job's identity, is not looked for. Move "
                    "data elsewhere."
                )
            found |= {(f"{name}/{each.relative_to(module).as_posix()}", each) for each in files}
    return sorted(each for each in found if each[1].resolve() != resolved)


def check_siblings(file: Path) -> None:
    """Check that all code that jobs name is given the modules that belong to it.

    What a function imports when it is called is known afterwards: call this again then.

    Args:
        file: the file that was run last, which is forgotten if it does not go with the others.

    Raises:
        ImportError: this process has, or finds, another module of such a name elsewhere.
    """
    try:
        _check_all()
    except ImportError:
        _forget(file.resolve())
        raise


def _forget(file: Path) -> None:
    """Forget a file, and the modules of its own: others are not to be given these."""
    source = _sources.pop(file, None)
    kept = {sibling for each in _sources.values() for sibling in each.siblings.values()}
    own = {} if source is None or _is_installed(file) else source.siblings
    for name, sibling in own.items():
        # before the path is changed, for that moves packages that have no file
        if _loaded(name) == sibling and sibling not in kept:
            for loaded in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
                del sys.modules[loaded]
    added = set(_added.pop(file, ()))
    shared = {entry for entries in _added.values() for entry in entries}
    sys.path[:] = [entry for entry in sys.path if entry in shared or entry not in added]


def _check_all() -> None:
    sources = list(_sources.values())
    private = {name for each in sources if not _is_installed(each.file) for name in each.siblings}
    for source in sources:
        if not _is_installed(source.file) or any(map(source.find, private)):
            source.check()


class _Source:
    """Code that a job names.

    Args:
        file: the file.
        module: the dotted name that it was imported by; None if it was run as a file.
    """

    def __init__(self, file: Path, module: str | None) -> None:
        self.file = file
        self._folder = file.parent  # from which it imports
        self._starts = [file]
        if module is not None:
            top, *parts = module.split(".")
            depth = len(parts) + (file.name == "__init__.py")
            self._folder = file.parents[depth]
            own = _sibling(top, self._folder)
            self._starts = [file] if own is None else _python_files(own)

    def find(self, name: str) -> Path | None:
        """The file or the folder of a module of some name that belongs to it, if there is one."""
        return _first_sibling(name, self._folders)

    @property
    def _folders(self) -> list[Path]:
        return [*map(Path, _added.get(self.file, ())), self._folder]

    @cached_property
    def siblings(self) -> dict[str, Path]:
        """The modules of its own that it imports, or that they import: a file or folder each."""
        return self.siblings_in(self._folders)

    def siblings_in(self, folders: Sequence[Path]) -> dict[str, Path]:
        """Those of its own modules that lie in some folders."""
        found: dict[str, Path] = {}
        waiting = list(self._starts)
        is_installed = _is_installed(self.file)  # where much more lies than what is its own
        while waiting:
            for name in sorted(_imported_names(waiting.pop())):
                sibling = _first_sibling(name, folders)
                if sibling is not None and name not in found and name != _OWN_PACKAGE:
                    found[name] = sibling
                    waiting += [] if is_installed else _python_files(sibling)
        return found

    def check(self) -> None:
        """Check that Python gives it these modules. Raises ImportError."""
        for name, sibling in self.siblings.items():
            given = _loaded(name) or _find(name)
            if given in (None, sibling) or not _python_files(sibling):  # removed since
                continue
            # What would a process of its own be given?
            may_be_meant = _is_installed(given) or not _is_on_path(sibling.parent)
            if may_be_meant and _find(name) == given:
                continue
            if _hash_of(given) != _hash_of(sibling):
                raise ImportError(
                    f"{self.file} imports the module {sibling}, and would be given {given}: Python "
                    f"keeps one module of the name {name}. Give one of them another name"
                )


def _first_sibling(name: str, folders: Iterable[Path]) -> Path | None:
    found = (_sibling(name, folder) for folder in folders)
    return next((each for each in found if each is not None), None)


def _loaded(name: str) -> Path | None:
    """The file or folder of the module of some name that this process has loaded."""
    return _place_of(getattr(sys.modules.get(name), "__spec__", None))


def _find(name: str) -> Path | None:
    """The file or folder of the module of some name that Python would import by now."""
    try:
        return _place_of(PathFinder.find_spec(name, sys.path))
    except (ImportError, ValueError, OSError):
        return None


def _place_of(spec: ModuleSpec | None) -> Path | None:
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        return Path(folder).resolve()
    return Path(spec.origin).resolve() if spec.has_location and spec.origin else None


def _is_on_path(folder: Path) -> bool:
    return any(Path(entry).resolve() == folder for entry in sys.path)


def _is_installed(file: Path) -> bool:
    return any(map(file.is_relative_to, _installed_folders()))


@cache
def _installed_folders() -> list[Path]:
    """Where Python and installed packages lie."""
    paths = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return [Path(path).resolve() for path in paths if path]


def _imported_names(file: Path) -> frozenset[str]:
    """First parts of the names of all modules that a file imports, wherever in its code."""
    try:
        source = file.read_bytes()
    except OSError:  # it is not imported, or fails where it is
        return frozenset()
    return _names_in(source)


@lru_cache(1_000)  # each launch of a process asks for the same files
def _names_in(source: bytes) -> frozenset[str]:
    """First parts of the names of all modules that some code imports."""
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # it is not imported, or fails where it is, or nests so deeply that a machine has written it
        return frozenset()
    found: set[str] = set()
    texts = []
    imports_by_text = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [each.name.partition(".")[0] for each in node.names]
            imports_by_text |= not _IMPORTS_BY_TEXT.isdisjoint(names)
            found.update(names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            name = node.module.partition(".")[0]
            imports_by_text |= name in _IMPORTS_BY_TEXT
            found.add(name)
        elif isinstance(node, ast.Name):
            imports_by_text |= node.id in _IMPORTS_BY_TEXT
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    if imports_by_text:
        found.update(text.partition(".")[0] for text in texts if _MODULE_NAME.fullmatch(text))
    return frozenset(found)


def _sibling(name: str, folder: Path) -> Path | None:
    """The file or the folder of a module of some name in a folder, if there is one."""
    package = folder / name
    if (package / "__init__.py").is_file():
        return package.resolve()
    module = folder / f"{name}.py"
    if module.is_file():
        return module.resolve()
    return package.resolve() if package.is_dir() and _python_files(package) else None


def _python_files(module: Path) -> list[Path]:
    """The files of a module; none of a folder with so many others that it holds data."""
    entries = list(islice(_walk(module), _MOST_ENTRIES)) if module.is_dir() else [module]
    if len(entries) == _MOST_ENTRIES:
        return []
    # editors leave links that lead nowhere
    return sorted(file for file in entries if file.suffix == ".py" and file.is_file())


def _walk(folder: Path) -> Iterator[Path]:
    """Yield what lies in a folder, also behind links to folders, from which Python imports."""
    seen: set[Path] = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        here = Path(path)
        if here.resolve() in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(here.resolve())
        yield from (here / name for name in [*folders, *files])


def _hash_of(module: Path) -> str:
    digest = hashlib.sha256()
    for file in _python_files(module):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(module)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
