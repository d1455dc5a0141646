"""The extension of ``examples/extension``, installed for one test."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "extension"


def install_extension(site: Path) -> dict[str, str]:
    """Write what an installer writes of a package, beside which the package itself lies.

    Args:
        site: a folder, which is made if it is not there.

    Returns:
        Environment of a process in which the extension is installed.
    """
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
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
    path = [str(site), str(FOLDER), *([inherited] if inherited else [])]
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
