"""A file imports only from its own floor or a lower one; floors 0 and 1 know neither Beam, TensorStore nor torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import beam_inference

PACKAGE = Path(beam_inference.__file__).parent
FLOORS = [
    [
        "errors",
        "arrays",
        "environment",
        "bounding_box",
        "grids",
        "ownership",
        "blending",
        "fill",
        "memory",
        "partition",
        "sample",
        "sharding",
        "simulation",
        "pyramid_levels",
        "downsampling",
    ],
    [
        "storage",
        "volume_config",
        "operator_config",
        "normalize_config",
        "config",
        "job_file",
        "plan",
        "seams",
        "suggest",
        "cost",
        "chunk_inference",
        "chunk_run",
        "alignment",
        "accelerators",
    ],
    [
        *(
            "stores",
            "files",
            "ome_zarr",
            "detection",
            "volumes",
            "outputs",
            "mask",
            "predictors",
            "operators",
            "resolved_job",
            "chunk_entries",
            "state",
        ),
        *(
            "levels",
            "level_counts",
            "verification",
            "status",
            "runs",
            "job_parts",
            "residual_unet",
            "elements",
            "seam_files",
            "attempts",
            "finishing",
            "worker",
            "exchange",
            "survey",
            "calibration",
            "relaunch",
            "launch",
            "precomputed_scales",
            "ome_scales",
            "scales",
            "segmentation",
            "view",
            "conversion",
        ),
    ],
    ["chunk_tasks", "transforms"],
    [
        "pipeline",
        "beam_flags",
        "logs",
        "progress",
        "execution",
        "task_runner",
        "runner",
        "printing",
        "standing",
        "report",
        "flex_template",
        "shared_arguments",
        "volume_commands",
        "volume_arguments",
        "arguments",
        "cli",
        "commands",
        "make_labels",
        "mosaic",
        "pyramid",
        "output_pyramid",
        "thumbnail",
        "convert",
        "demo",
        "__main__",
        "__init__",
    ],
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
FORBIDDEN = {
    0: {"apache_beam", "tensorstore", "torch", "pydantic"},
    1: {"apache_beam", "tensorstore", "torch"},
    2: {"apache_beam"},
}

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path):
    """Full names of the modules that a file imports, also inside functions, but not for types only."""
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
            if node.module == "beam_inference":
                yield from (f"beam_inference.{alias.name}" for alias in node.names)


def test_every_module_has_a_floor():
    assert {name_of(path) for path in FILES} == set(FLOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_or_sideways(path):
    floor = FLOOR[name_of(path)]
    for module in imports(path):
        top = module.split(".")[0]
        assert top not in FORBIDDEN.get(floor, ()), f"{path.name} on floor {floor} imports {module}"
        if top == "beam_inference" and module != "beam_inference":
            other = FLOOR[module.split(".")[1]]
            assert other <= floor, f"{path.name} on floor {floor} imports {module} of floor {other}"


def test_there_is_no_circle_of_imports():
    graph = {}
    for path in FILES:
        module = ".".join(("beam_inference", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        graph[module] = {name for name in imports(path) if name.startswith("beam_inference.") and name != module}
    graph.pop("beam_inference")
    done, path = set(), []

    def visit(module):
        assert module not in path, f"circle: {' → '.join([*path, module])}"
        if module in done or module not in graph:
            return
        path.append(module)
        for other in graph[module]:
            visit(other)
        path.pop()
        done.add(module)

    for module in graph:
        visit(module)


@pytest.mark.parametrize("path", [*FILES, *Path(__file__).parent.rglob("*.py")], ids=lambda path: path.name)
def test_no_file_outgrows_its_subject(path):
    assert len(path.read_text().splitlines()) <= 400


def test_importing_the_package_imports_neither_torch_nor_beam():
    code = "import sys, beam_inference; print([m for m in ('torch', 'apache_beam', 'tensorstore') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_public_name_can_be_had():
    for name in beam_inference.__all__:
        assert getattr(beam_inference, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        beam_inference.nope  # noqa: B018
