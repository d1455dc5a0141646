"""Running scripts with the tools that results are compared with."""

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("INTEROP_PYTHON")
BIOIMAGEIO_PYTHON = os.environ.get("BIOIMAGEIO_PYTHON")
SCRIPTS = Path(__file__).parent / "interop"

needs_tools = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        PYTHON is None, reason="INTEROP_PYTHON names no Python with nnU-Net: make interop-test"
    ),
]


def results_of(script, folder, python=PYTHON):
    """The folder in which a script has written what a tool gives."""
    command = [python, "-W", "ignore", str(SCRIPTS / script), str(folder)]
    # Threads of PyTorch wait for each other busily: beside other work, two take far more time.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder
