"""A Slurm cluster of one node on this machine: its daemons, and its commands."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_PATIENCE_SECONDS = 60.0
_SYSTEM_PROGRAMS = "/usr/sbin:/sbin"
"""Where Debian has the daemons, which not every user's PATH holds."""

_SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,requeue_delay=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster that runs.

    Attributes:
        environment: variables with which its commands find it.
        folder: of its settings and logs.
    """

    environment: dict[str, str]
    folder: Path

    def run(self, *command: str) -> str:
        """Run a command of Slurm, or a script that uses them; return what it prints."""
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def signal(self, job: str, name: str) -> None:
        """Send a signal to the steps of the tasks of a job that run, as Slurm does before the end.

        ``scancel`` does so, and fails all the same where other tasks of the job wait.
        """
        _answer(self, "scancel", f"--signal={name}", "--state=RUNNING", job)

    def states(self, job: str) -> list[str]:
        """Return the states of the tasks of a job, such as ``RUNNING``."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner")
        return [word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")]

    def wait(self, job: str, seconds: float) -> list[str]:
        """Wait until no task of a job waits or runs; return how they ended."""
        deadline = time.monotonic() + seconds
        while not {"PENDING", "RUNNING", "COMPLETING", "REQUEUED"}.isdisjoint(self.states(job)):
            assert time.monotonic() < deadline, self.run("scontrol", "show", "job", job)
            time.sleep(0.5)
        return self.states(job)


@contextmanager
def slurm_cluster(folder: Path, cores: int = 2) -> Iterator[Slurm]:
    """Run a cluster of one node; the test is skipped where Slurm's daemons are not installed.

    Args:
        folder: for its settings, its state and its logs.
        cores: CPUs that the node says it has.
    """
    programs = [_program(name) for name in ("munged", "slurmctld", "slurmd")]
    if os.getuid() != 0:
        pytest.skip("slurmd runs as root alone")
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    settings = folder / "slurm.conf"
    settings.write_text(
        _SETTINGS.format(
            host=socket.gethostname().partition(".")[0],
            user="root",
            controller_port=_free_port(),
            node_port=_free_port(),
            folder=folder,
            cores=cores,
        )
    )
    python = Path(sys.executable).parent
    path = f"{python}:{os.environ['PATH']}:{_SYSTEM_PROGRAMS}"
    slurm = Slurm({**os.environ, "PATH": path, "SLURM_CONF": str(settings)}, folder)
    munge = [f"--{name}={folder}/munge/{name}" for name in ("socket", "pid-file", "log-file")]
    munge += [f"--key-file={key}", f"--seed-file={folder}/munge/seed"]
    commands = [
        [programs[0], "--foreground", "--force", *munge],
        [programs[1], "-D", "-f", str(settings)],
        [programs[2], "-D", "-f", str(settings)],
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            daemons.append(_start(command, slurm))
            if command is commands[0]:
                _wait_until((folder / "munge" / "socket").exists, "munged", folder)
        _wait_until(lambda: "idle" in _answer(slurm, "sinfo", "--noheader"), "slurmctld", folder)
        yield slurm
    finally:
        _answer(slurm, "scancel", "--state=PENDING,RUNNING", "--user=root")
        for daemon in reversed(daemons):
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in daemons:
            daemon.wait(timeout=30)


def _program(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ['PATH']}:{_SYSTEM_PROGRAMS}")
    if path is None:
        pytest.skip(f"there is no {name}: Debian's packages slurm-wlm and munge have it")
    return path


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _start(command: Sequence[str], slurm: Slurm) -> subprocess.Popen[bytes]:
    name = Path(command[0]).name
    with (slurm.folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=slurm.environment,
            start_new_session=True,
        )


def _answer(slurm: Slurm, *command: str) -> str:
    """What a command prints, whether it succeeds or not."""
    return subprocess.run(command, env=slurm.environment, capture_output=True, text=True).stdout


def _wait_until(is_so: Callable[[], bool], daemon: str, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not is_so():
        log = (folder / f"{daemon}.log").read_text(errors="replace")
        assert time.monotonic() < deadline, f"{daemon} does not get ready: {log[-2000:]}"
        time.sleep(0.2)
