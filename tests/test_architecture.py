"""Test that packages import only from those below them, and the lowest no heavy libraries."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import beam_inference

PACKAGE = Path(beam_inference.__file__).parent
PACKAGES = [  # from the ground up
    "geometry",
    "config",
    "volumes",
    "operators",
    "models",
    "engines",
    "job",
    "worker",
    "training",
    "beam",
    "pyramid",
    "conversion",
    "segmentation",
    "launch",
    "report",
    "view",
    "evaluation",
    "demo",
    "cli",
]
# modules that every package may import
GROUND = {"arrays", "environment", "errors", "foreign_text", "limits", "residual_unet"}
FORBIDDEN = {
    "geometry": {"apache_beam", "tensorstore", "torch", "pydantic"},
    "config": {"apache_beam", "tensorstore", "torch"},
    **{package: {"apache_beam"} for package in PACKAGES[2:9]},
}
MOST_LOOSE_MODULES = 8
LONGEST_CHAIN = 14

FILES = sorted(PACKAGE.rglob("*.py"))


def package_of(path):
    """The package that a file is in, or the file's own name if it lies loose on top."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("beam_inference", *parts)).removesuffix(".__init__")


def imports_of(path):
    """Full names of the modules that a file imports, also in functions, but not only for types."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module.startswith("beam_inference"):
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                yield from (name for name in names if name in MODULES)


MODULES = {module_of(path): path for path in FILES}


@cache
def own_imports_of(path):
    """The package's own modules that a file imports, the package itself left out."""
    return {name for name in imports_of(path) if name.startswith("beam_inference.")} - {
        module_of(path)
    }


def test_every_folder_is_a_package_of_the_list():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(PACKAGES)


def test_few_modules_lie_loose():
    loose = {path.stem for path in PACKAGE.glob("*.py")}
    assert loose == GROUND | {"__init__", "__main__"}
    assert len(loose) <= MOST_LOOSE_MODULES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_or_sideways(path):
    package = package_of(path)
    for module in imports_of(path):
        top = module.split(".")[0]
        assert top not in FORBIDDEN.get(package, ()), f"{path} imports {module}"
    for module in own_imports_of(path):
        imported = module.split(".")[1]
        if package in GROUND:
            assert imported in GROUND, f"{path} imports {module}"
        elif package in PACKAGES and imported not in GROUND:
            assert PACKAGES.index(imported) <= PACKAGES.index(package), f"{path} climbs to {module}"


def test_there_is_no_circle_of_imports():
    graph = {
        module: own_imports_of(path)
        for module, path in MODULES.items()
        if module != "beam_inference"
    }
    finished = set()
    path = []

    def visit(module):
        assert module not in path, f"circle: {' → '.join([*path, module])}"
        if module in finished or module not in graph:
            return
        path.append(module)
        for imported in graph[module]:
            visit(imported)
        path.pop()
        finished.add(module)

    for module in graph:
        visit(module)


def test_chains_of_imports_between_packages_are_short():
    below = {package: set() for package in PACKAGES}
    for path in FILES:
        if package_of(path) in below:
            below[package_of(path)] |= {module.split(".")[1] for module in own_imports_of(path)}

    def chain_from(package):
        imported = (below[package] & set(PACKAGES)) - {package}
        return [*max((chain_from(each) for each in imported), key=len, default=[]), package]

    longest = max((chain_from(package) for package in PACKAGES), key=len)
    assert len(longest) <= LONGEST_CHAIN, " → ".join(reversed(longest))


def is_packed_assignment(node):
    """Whether a statement is `a, b = x, y` and no swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    values = {ast.unparse(each) for each in ast.walk(node.value) if isinstance(each, ast.expr)}
    targets = [
        each for target in node.targets if isinstance(target, ast.Tuple) for each in target.elts
    ]
    return bool(targets) and not any(ast.unparse(each) in values for each in targets)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_tuples_are_assigned_only_to_unpack_or_swap(path):
    packed = [
        node.lineno for node in ast.walk(ast.parse(path.read_text())) if is_packed_assignment(node)
    ]
    assert not packed, f"{path}: lines {packed}: give each name an assignment of its own"


def test_importing_the_package_imports_neither_torch_nor_beam():
    code = (
        "import sys, beam_inference; print([m for m in ('torch', 'apache_beam', 'tensorstore') if "
        "m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_every_public_name_can_be_had():
    for name in beam_inference.__all__:
        assert getattr(beam_inference, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        beam_inference.nope  # noqa: B018
