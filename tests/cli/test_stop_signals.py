"""A command that is asked to end does so, and finishes an import first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_SLOW_MODULE = """
import os, pathlib, time
os.kill(os.getpid(), {number})
time.sleep({seconds})
pathlib.Path("imported").touch()
"""

_PROGRAM = """
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from beam_inference.cli import main, stop_signals
stop_signals._LONGEST_IMPORT = 10.0
def action(_):
    import slow_module
    import time
    time.sleep(300)
    pathlib.Path("waited").touch()
    return 0
main.jobs.status = action
sys.exit(main.main(["status", "job.yaml"]))
"""


@pytest.mark.parametrize(
    ("number", "seconds", "is_finished"),
    [
        (signal.SIGTERM, 0.4, True),
        pytest.param(signal.SIGINT, 0.4, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 0.4, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 300, False, marks=pytest.mark.slow),
    ],
    ids=["SIGTERM", "Ctrl-C", "SIGUSR1", "an import without end"],
)
def test_an_import_comes_to_its_end(
    tmp_path: Path, number: signal.Signals, seconds: float, is_finished: bool
) -> None:
    module = _SLOW_MODULE.format(number=int(number), seconds=seconds)
    (tmp_path / "slow_module.py").write_text(module)
    program = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(
        program,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert (tmp_path / "imported").exists() == is_finished
    assert not (tmp_path / "waited").exists()


_ELSEWHERE = """
import os, signal, threading, time
from beam_inference.cli.stop_signals import requests_to_stop
from beam_inference.errors import AskedToStop
numbers = (signal.SIGINT, signal.SIGTERM)
before = [signal.getsignal(number) for number in numbers]
try:
    with requests_to_stop():
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(30)
        print("waited")
except AskedToStop:
    assert [signal.getsignal(number) for number in numbers] == before
    print("asked to stop")
"""


def test_elsewhere_it_ends_at_once_and_handlers_are_put_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (done.returncode, done.stdout) == (0, "asked to stop\n"), done.stderr
