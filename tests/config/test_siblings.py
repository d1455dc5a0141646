"""Modules beside files that a job names: one of a name in a process."""

import sys

import pytest

from beam_inference.config import siblings
from beam_inference.config.siblings import check_siblings


@pytest.fixture
def make_folder(tmp_path, monkeypatch):
    """A function that writes Python files into a folder of ``sys.path``; the first one's path."""
    monkeypatch.setattr(siblings, "_known", {})
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(folder, is_on_path=True, **sources):
        for name, source in sources.items():
            file = tmp_path / folder / f"{name.replace('__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        if is_on_path:
            sys.path.append(str(tmp_path / folder))
        return tmp_path / folder / f"{next(iter(sources))}.py"

    return make


@pytest.mark.parametrize(
    "code",
    [
        "import helper",
        "import helper.part as part",
        "from helper import value",
        "def network():\n    from helper import value",
        "import middle",
    ],
)
@pytest.mark.parametrize("module", ["helper", "helper____init__", "helper__part"])
def test_two_modules_of_one_name(make_folder, code, module):
    keys = {"net": code, "middle": "import helper"}
    check_siblings(make_folder("a", **keys, **{module: "value = 1"}))
    check_siblings(make_folder("c", **keys, **{module: "value = 1"}))  # the same module
    with pytest.raises(ImportError, match="the module helper beside it, and another file .*/a/"):
        check_siblings(make_folder("b", **keys, **{module: "value = 2"}))


def test_a_module_that_was_changed(make_folder):
    check_siblings(make_folder("a", net="import helper", helper="value = 1"))
    with pytest.raises(ImportError, match="helper.py, which .*net.py imports, was changed"):
        check_siblings(make_folder("a", net="import helper", helper="value = 2"))


@pytest.mark.parametrize(
    "keys",
    [
        {"net": "import numpy", "helper": "value = 2"},
        {"net": "from . import helper", "helper": "value = 2"},
        {"net": "import helper", "helper": "value = 2", "is_on_path": False},
        {"net": "no Python", "helper": "value = 2"},
    ],
    ids=["not imported", "relative", "not on the path", "no Python"],
)
def test_what_python_would_not_confuse(make_folder, keys):
    check_siblings(make_folder("a", net="import helper", helper="value = 1"))
    check_siblings(make_folder("b", **keys))


def test_what_lies_in_a_package_and_is_no_module(make_folder):
    file = make_folder("a", net="import helper", helper____init__="value = 1")
    package = file.parent / "helper"
    (package / ".#layers.py").symlink_to("nowhere")
    (package / "templates.py").mkdir()
    (package / "written.py").write_text("value = " + "(" * 90 + "1" + ")" * 90)
    (package / "deep.py").write_text("value = " + "-" * 100_000 + "1")
    check_siblings(file)
    check_siblings(file)
