"""The extension of ``examples/extension``, installed for one test."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from beam_inference.config.plugins import list_plugins, load_plugin

FOLDER = Path(__file__).parents[1] / "examples" / "extension"


def install_extension(site: Path, package: Path = FOLDER) -> dict[str, str]:
    """Write what an installer writes of a package, beside which the package itself lies.

    Args:
        site: a folder, which is made if it is not there.
        package: the folder of a package with a ``pyproject.toml``.

    Returns:
        Environment of a process in which the extension is installed.
    """
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = (
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in names.items()), ""])
        for group, names in project["entry-points"].items()
    )
    (folder / "entry_points.txt").write_text("\n".join(groups))
    inherited = os.environ.get("PYTHONPATH", "")
    path = [str(site), str(package), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def run_with_extension(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of beam-inference in a process in which the extension is installed."""
    return subprocess.run(
        [sys.executable, "-m", "beam_inference", *arguments],
        env=install_extension(site),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@contextmanager
def extension_in_this_process(site: Path, package: Path = FOLDER) -> Iterator[None]:
    """Install a package for this process, and for those that it starts meanwhile."""
    environment = install_extension(site, package)
    with pytest.MonkeyPatch.context() as patched:
        for folder in (site, package):
            patched.syspath_prepend(str(folder))
        patched.setenv("PYTHONPATH", environment["PYTHONPATH"])
        _forget_plugins()
        yield
    _forget_plugins()


def _forget_plugins() -> None:
    """Have the installed extensions looked up anew."""
    list_plugins.cache_clear()
    load_plugin.cache_clear()
