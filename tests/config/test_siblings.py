"""Modules beside code that a job names: one of a name in a process."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from beam_inference.config import siblings
from beam_inference.config.factories import load_object
from beam_inference.config.siblings import check_siblings, note_source


@pytest.fixture
def make_folder(tmp_path, monkeypatch):
    """A function that writes Python files into a folder of ``sys.path``; the first one's path."""
    monkeypatch.setattr(siblings, "_sources", {})
    monkeypatch.setattr(siblings, "_hashes", {})
    monkeypatch.setattr(siblings, "_added", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = {*sys.modules}

    def make(folder, is_on_path=True, **sources):
        for name, source in sources.items():
            file = (
                tmp_path / folder / f"{name.replace('__', '/').replace('//init/', '/__init__')}.py"
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        if is_on_path:
            sys.path.append(str(tmp_path / folder))
        importlib.invalidate_caches()
        return tmp_path / folder / f"{next(iter(sources))}.py"

    yield make
    for name in {*sys.modules} - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    "code",
    [
        "import helper",
        "import helper.part as part",
        "from helper import value",
        "def network():\n    from helper import value",
        "def network():\n    import importlib\n    importlib.import_module('helper.part')",
        "from importlib import import_module as load\nload('helper')",
        "__import__('helper')",
        "import middle",
    ],
)
@pytest.mark.parametrize("module", ["helper", "helper____init__", "helper__part"])
def test_two_modules_of_one_name(make_folder, code, module):
    keys = {"net": code, "middle": "import helper"}
    note_source(make_folder("a", **keys, **{module: "value = 1"}))
    note_source(make_folder("c", **keys, **{module: "value = 1"}))  # the same module
    with pytest.raises(ImportError, match=r"b/helper.*, and would be given .*/a/"):
        note_source(make_folder("b", **keys, **{module: "value = 2"}))


FIRST = {"net": "import helper\nvalue = helper.value", "helper": "value = 1"}
SECOND = {"other": "import helper\nvalue = helper.value", "helper": "value = 2"}
WITHIN = {"other": "value = 2\ndef make():\n    import helper", "helper": "value = 2"}


@pytest.mark.parametrize("second", [SECOND, WITHIN], ids=["at the top", "in a function"])
@pytest.mark.parametrize("is_file", [(True, False), (False, True), (False, False)])
def test_files_beside_modules(make_folder, second, is_file):
    """Both have a helper, and only one of them would be imported."""
    files = [make_folder("a", **FIRST), make_folder("b", **second)]
    paths = [
        f"{file if by_path else file.stem}:value"
        for file, by_path in zip(files, is_file, strict=True)
    ]
    assert load_object(paths[0]) == 1
    with pytest.raises(ImportError, match="Give one of them another name"):
        load_object(paths[1])


def test_the_other_one_is_imported_later(make_folder):
    """The first one imports its helper when it is called; by then there is another one."""
    first = make_folder("a", is_on_path=False, net="def make():\n    import helper", helper="x = 1")
    note_source(first)
    second = make_folder("b", net="", helper="x = 2")
    note_source(second)
    importlib.import_module("helper")
    sys.path.remove(str(second.parent))
    with pytest.raises(ImportError, match="would be given .*/b/helper.py"):
        check_siblings(second)


def test_an_installed_module_whose_helper_was_taken(make_folder, monkeypatch):
    installed = make_folder("lib", network="import helper\nvalue = 1", helper="value = 1")
    monkeypatch.setattr(siblings, "_installed_folders", lambda: [installed.parent.resolve()])
    file = make_folder("b", net="import helper", helper="value = 2")
    sys.path.insert(0, str(file.parent))
    assert load_object(f"{file}:helper").value == 2
    with pytest.raises(ImportError, match=r"network.py imports .* given .*/b/helper.py"):
        load_object("network:value")


REPOSITORIES = {
    "src": ("net.py", "src/helper.py", "insert(0, here + '/src')", "from helper import value"),
    "lib": ("net.py", "lib/helper.py", "append(here + '/lib')", "from helper import value"),
    "root": ("nets/net.py", "helper.py", "insert(0, here + '/..')", "from helper import value"),
    "package": (
        "nets/net.py",
        "common/helper.py",
        "insert(0, here + '/..')",
        "from common.helper import value",
    ),
}


def write_repository(root, kind, value, *, within=False):
    """A file that puts a folder on the path and imports from it, at once or in its function."""
    file, helper, change, code = REPOSITORIES[kind]
    for name in (file, helper):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / helper).write_text(f"value = {value}")
    start = f"import sys, os\nhere = os.path.dirname(__file__)\nsys.path.{change}\n"
    call = f"def make():\n    {code}\n    return value\n" if within else f"{code}\n"
    (root / file).write_text(f"# {root}\n{start}{call}")
    importlib.invalidate_caches()
    return f"{root / file}:{'make' if within else 'value'}"


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("kind", REPOSITORIES)
def test_folders_that_files_put_on_the_path(make_folder, tmp_path, kind, within):
    make_folder("unused", net="")
    first = load_object(write_repository(tmp_path / "a", kind, 1, within=within))
    assert (first() if within else first) == 1
    load_object(write_repository(tmp_path / "same", kind, 1, within=within))
    with pytest.raises(ImportError, match="imports the module .*, and would be given"):
        load_object(write_repository(tmp_path / "b", kind, 2, within=within))


def test_what_was_refused_does_no_harm_to_what_follows(make_folder, tmp_path):
    make_folder("unused", net="")
    load_object(write_repository(tmp_path / "a", "src", 1))
    with pytest.raises(ImportError, match="keeps one module"):
        load_object(write_repository(tmp_path / "b", "src", 2))
    assert load_object(write_repository(tmp_path / "a", "src", 1)) == 1
    late = write_repository(tmp_path / "c", "package", 3, within=True)
    load_object(late)
    with pytest.raises(ImportError, match="keeps one module"):
        load_object(write_repository(tmp_path / "d", "package", 4))
    assert load_object(late)() == 3


def test_files_of_one_repository_share_their_modules(make_folder, tmp_path):
    make_folder("unused", net="")
    for name in ("net.py", "other.py"):
        path = write_repository(tmp_path / "a", "root", 1)
        moved = tmp_path / "a" / "nets" / name
        Path(path.rpartition(":")[0]).rename(moved)
        assert load_object(f"{moved}:value") == 1


def test_a_file_sees_nothing_that_others_put_on_the_path(make_folder, tmp_path):
    make_folder("unused", net="")
    load_object(write_repository(tmp_path / "a", "src", 1))
    del sys.modules["helper"]
    (tmp_path / "b.py").write_text("import helper")
    with pytest.raises(ModuleNotFoundError):
        load_object(f"{tmp_path}/b.py:helper")
    assert str(tmp_path / "a" / "src") in sys.path


def test_a_folder_of_data_is_no_module(make_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(siblings, "_MOST_ENTRIES", 20)
    file = make_folder("a", net="import helper", helper__part="value = 1")
    for number in range(20):
        (tmp_path / "a" / "helper" / f"{number}").touch()
    note_source(file)
    note_source(make_folder("b", net="import helper", helper="value = 2"))


def test_a_module_that_was_changed(make_folder):
    note_source(make_folder("a", net="import helper", helper="value = 1"))
    with pytest.raises(ImportError, match="helper.py, which .*net.py imports, was changed"):
        note_source(make_folder("a", net="import helper", helper="value = 2"))


@pytest.mark.parametrize(
    "keys",
    [
        {"net": "import numpy", "helper": "value = 2"},
        {"net": "from . import helper", "helper": "value = 2"},
        {"net": "import helper", "helper": "value = 2", "is_on_path": False},
        {"net": "no Python", "helper": "value = 2"},
        {"net": "name = 'helper'", "helper": "value = 2"},
    ],
    ids=["not imported", "relative", "not on the path", "no Python", "a text"],
)
def test_what_python_would_not_confuse(make_folder, keys):
    note_source(make_folder("a", net="import helper", helper="value = 1"))
    note_source(make_folder("b", **keys))


def test_both_are_given_the_installed_module(make_folder):
    """Each has a module of the name of an installed one, which comes before them."""
    for folder in ("a", "b"):
        file = make_folder(
            folder, net="import yaml\nvalue = yaml.YAMLError", yaml=f"x = '{folder}'"
        )
        assert load_object(f"{file}:value").__module__ == "yaml.error"


def test_an_installed_module_that_is_loaded_in_place_of_the_own_one(make_folder):
    file = make_folder("a", net="import yaml", yaml="value = 1")
    importlib.import_module("yaml")
    sys.path.insert(0, str(file.parent))
    with pytest.raises(ImportError, match="would be given .*site-packages/yaml"):
        note_source(file)


def test_a_folder_that_is_gone(make_folder):
    file = make_folder("a", net="import helper", helper="value = 1")
    note_source(file)
    Path(file.parent / "helper.py").unlink()
    note_source(make_folder("b", net="import helper", helper="value = 2"))


def test_what_lies_in_a_package_and_is_no_module(make_folder):
    file = make_folder("a", net="import helper", helper____init__="value = 1")
    package = file.parent / "helper"
    (package / ".#layers.py").symlink_to("nowhere")
    (package / "templates.py").mkdir()
    (package / "written.py").write_text("value = " + "(" * 90 + "1" + ")" * 90)
    (package / "deep.py").write_text("value = " + "-" * 100_000 + "1")
    note_source(file)
    note_source(file)


def test_a_compiled_form_of_another_source_is_refused(make_folder, monkeypatch):
    """Python looks at a file's size and time alone, and would run what was compiled before."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = make_folder("a", network="import layers_of_a", layers_of_a="value = 1")
    load_object(f"{file}:layers_of_a")
    helper = file.with_name("layers_of_a.py")
    before = helper.stat()
    helper.write_text("value = 2")
    os.utime(helper, ns=(before.st_atime_ns, before.st_mtime_ns))
    for known in (siblings._sources, siblings._hashes, siblings._added):
        known.clear()
    for name in [
        each for each in sys.modules if each.startswith(("layers_of_a", "beam_inference_f"))
    ]:
        del sys.modules[name]
    with pytest.raises(ImportError, match=r"compiled form of .*layers_of_a\.py that was made of"):
        load_object(f"{file}:layers_of_a")
