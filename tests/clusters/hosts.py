"""Hosts for a cluster on this machine: two network namespaces, or this machine itself.

A process of a host reaches the others by their addresses, and its own host as ``localhost``: two
worker pools may listen on the same port. That needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_PATIENCE_SECONDS = 120.0


@dataclass
class Host:
    """A host, and the processes that tests started on it.

    Attributes:
        address: where others reach it.
        namespace: its network namespace; None for this machine itself.
        folder: for logs.
        processes: by the names that they were started with.
    """

    address: str
    namespace: str | None
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a process, in a session of its own.

        Args:
            name: for its log, and to end it.
            command: program and arguments.
            environment: variables besides this process's.
        """
        prefix = [] if self.namespace is None else ["ip", "netns", "exec", self.namespace]
        with (self.folder / f"{name}-{self.address}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(environment or {}),
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill a process with all of its group, and wait until it is gone."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def lose(self) -> None:
        """Kill everything that runs on the host, also what its processes started."""
        for name in list(self.processes):
            self.kill(name)
        if self.namespace is not None:
            for pid in _output("ip", "netns", "pids", self.namespace).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def log(self, name: str) -> str:
        """The last lines of a process's log."""
        lines = (self.folder / f"{name}-{self.address}.log").read_text(errors="replace")
        return "\n".join(lines.splitlines()[-40:])


def can_have_two_hosts() -> bool:
    """Whether network namespaces may be made here."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, list[Host]]]:
    """Make a host for masters, which is this machine, and two for workers.

    Where namespaces are not to be had, both lists are this machine alone, once.

    Args:
        folder: for logs.

    Yields:
        This machine, and the hosts of workers. All that they run is killed at the end.
    """
    if not can_have_two_hosts():
        here = Host("127.0.0.1", None, folder)
        try:
            yield here, [here]
        finally:
            here.lose()
        return
    name = f"bi{os.getpid() % 100000}"
    net = f"10.99.{os.getpid() % 250}"
    here = Host(f"{net}.1", None, folder)
    hosts = [Host(f"{net}.{number + 1}", f"{name}h{number}", folder) for number in (1, 2)]
    try:
        _run("ip", "link", "add", f"{name}br", "type", "bridge")
        _run("ip", "addr", "add", f"{here.address}/24", "dev", f"{name}br")
        _run("ip", "link", "set", f"{name}br", "up")
        for number, host in enumerate(hosts, 1):
            _connect(host, f"{name}br", f"{name}v{number}")
        yield here, hosts
    finally:
        for host in (*hosts, here):
            host.lose()
        for host in hosts:
            subprocess.run(["ip", "netns", "del", str(host.namespace)], check=False)
        subprocess.run(["ip", "link", "del", f"{name}br"], check=False)


def _connect(host: Host, bridge: str, link: str) -> None:
    namespace = str(host.namespace)
    _run("ip", "netns", "add", namespace)
    _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _run("ip", "link", "set", link, "master", bridge, "up")
    _run("ip", "-n", namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _run("ip", "-n", namespace, "link", "set", "eth0", "up")
    _run("ip", "-n", namespace, "link", "set", "lo", "up")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens on."""
    (port,) = free_ports(1, address)
    return port


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Different ports that nobody listens on."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((address, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def listens(address: str, port: int) -> bool:
    """Whether somebody listens at a port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((address, port)) == 0


def wait_until(is_so: Callable[[], bool], what: str, patience: float = _PATIENCE_SECONDS) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: it is not, after ``patience`` seconds.
    """
    deadline = time.monotonic() + patience
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not after {patience:.0f} s: {what}")
        time.sleep(0.1)
