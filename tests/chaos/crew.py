"""Processes of this project that are launched, looked for and disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from helpers import TOYS

from chaos.clocks import Clocks

DASK = Path(sys.executable).with_name("dask")
_WORKER_TTL = "120s"
"""Silence of a worker until Dask starts it again.

Its signs of life are timed by the clock of the day: set back, they cease for as long.
"""
PROCESSES = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        words: its command.
        code: its exit code; negative where a signal ended it.
        text: what it wrote.
    """

    words: tuple[str, ...]
    code: int
    text: str


class Launcher:
    """A command in a session of its own.

    Args:
        words: the command after ``beam-inference``.
        log: the file that it writes to.
        temporary: its folder for temporary files.
        variables: variables of its environment, beside those of this process.
    """

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        temporary: Path,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.words = tuple(words)
        self._log = log
        temporary.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "beam_inference", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(TMPDIR=str(temporary), **variables),
            )

    def ending(self) -> Ending | None:
        """How it ended; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return Ending(self.words, code, self._log.read_text(errors="replace"))

    def wait(self, seconds: float) -> Ending | None:
        """Wait for its end; None if that does not come in time."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.ending()


def run_to_end(words: Sequence[str], log: Path, temporary: Path, seconds: float) -> Ending | None:
    """Run a command; None if it does not end in time, when it is killed."""
    launcher = Launcher(words, log, temporary)
    ending = launcher.wait(seconds)
    if ending is None:
        signal_all([launcher.process.pid], signal.SIGKILL)
        launcher.process.wait()
    return ending


class DaskCluster:
    """A scheduler and two worker processes under nannies; its parts may be killed.

    Args:
        folder: where its files lie, and its log.
        clocks: of which the scheduler and each nanny see one.
    """

    def __init__(self, folder: Path, clocks: Clocks) -> None:
        self._folder = folder
        self._clocks = clocks
        self._starts = 0
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def sessions(self) -> list[int]:
        """Ids of the sessions of its processes."""
        return [process.pid for process in self._processes]

    def start(self) -> list[str]:
        """Start what of it does not live; returns the flags of a launch on it."""
        if not self._processes or self._processes[0].poll() is not None:
            self.stop()
            self._starts += 1
            self._start_scheduler()
        self.start_workers()
        return ["--runner=DaskRunner", f"--dask_scheduler_file={self._file}"]

    def stop(self) -> None:
        """Kill what is left of it."""
        signal_all(self.sessions, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes = []

    @property
    def _file(self) -> Path:
        return self._folder / f"scheduler-{self._starts}.json"

    def start_workers(self) -> None:
        """Start worker processes where there is a scheduler, and no nanny lives."""
        if not self._processes or any(each.poll() is None for each in self._processes[1:]):
            return
        nannies = ["--nworkers", "2", "--nthreads", "1", "--local-directory", str(self._folder)]
        self._run("worker", *nannies)

    def _start_scheduler(self) -> None:
        self._run("scheduler", "--port", "0")
        deadline = time.monotonic() + 60
        while not (self._file.exists() and self._file.read_text().strip()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"Dask's scheduler did not start: see {self._folder}/dask.log")
            time.sleep(0.1)

    def _run(self, *words: str) -> None:
        with (self._folder / "dask.log").open("a") as log:
            process = subprocess.Popen(
                [str(DASK), *words, "--scheduler-file", str(self._file), "--no-dashboard"],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environment(
                    TMPDIR=str(self._folder),
                    DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL=_WORKER_TTL,
                    **self._clocks.make(),
                ),
            )
        self._processes.append(process)


def processes_of(sessions: Iterable[int]) -> list[int]:
    """Ids of the processes of some sessions that are alive, in order."""
    wanted = set(sessions)
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, IndexError, ValueError):
            # the name of the program, in brackets, may hold anything
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in wanted and state not in "ZX":
                found.append(int(folder.name))
    return sorted(found)


def signal_all(sessions: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to every process of some sessions."""
    for pid in processes_of(sessions):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _environment(**variables: str) -> dict[str, str]:
    package = TOYS.parents[1]
    path = os.pathsep.join([str(package), str(TOYS.parent)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
