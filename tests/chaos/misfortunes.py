"""What goes wrong: each function brings one misfortune, and says what it has done."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaos.clocks import Clocks
from chaos.crew import processes_of
from chaos.disk import SmallDisk
from chaos.web import MoodyServer

STATE_FOLDER = "_beam_inference"


@dataclass
class Scene:
    """What misfortunes come upon.

    Attributes:
        output: the folder of the output.
        disk: the disk that it lies on.
        server: the server of the input; None where the input is local.
        clocks: what the processes of the crew take for the time.
        cancel: tells all launches of a job to stop; None where the command is none.
        has_checksums: whether ``verify --deep`` can notice damaged blocks.
        launchers: ids of the processes that were launched, dead ones too.
        sessions: ids of the sessions of the crew's processes, dead ones too.
        copies: damaged descriptions of the job, as they were.
        damaged_blocks: blocks of the output that were damaged.
    """

    output: Path
    disk: SmallDisk
    server: MoodyServer | None
    clocks: Clocks
    cancel: Callable[[], None] | None
    has_checksums: bool
    launchers: list[int] = field(default_factory=list)
    sessions: list[int] = field(default_factory=list)
    copies: dict[Path, bytes] = field(default_factory=dict)
    damaged_blocks: set[Path] = field(default_factory=set)

    @property
    def state(self) -> Path:
        """The state folder."""
        return self.output / STATE_FOLDER

    def heal(self) -> None:
        """End what lasts: stopped processes, full disks, bad answers, wrong clocks."""
        self.disk.heal()
        self.clocks.set_all(0)
        if self.server is not None:
            self.server.bad_share = 0.0
        for pid in processes_of(self.sessions):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


Misfortune = Callable[[Scene, random.Random], str | None]
"""Brings a misfortune upon a scene; returns what was done, or None if there was nothing to do."""


def kill(scene: Scene, chance: random.Random) -> str | None:
    """Kill any process of the crew."""
    pids = processes_of(scene.sessions)
    if not pids:
        return None
    pid = chance.choice(pids)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return f"killed process {pid}, of {len(pids)}"


def stop(scene: Scene, chance: random.Random) -> str | None:
    """Stop any process of the crew for a while."""
    pids = processes_of(scene.sessions)
    if not pids:
        return None
    pid = chance.choice(pids)
    seconds = chance.uniform(0.2, 3)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    return f"stopped process {pid}, of {len(pids)}, for {seconds:.1f} s"


def tell_to_stop(scene: Scene, chance: random.Random) -> str | None:
    """Tell a launch to stop, by a signal, or all of a job, by the command."""
    pids = [pid for pid in scene.launchers if pid in processes_of([pid])]
    if not pids:
        return None
    if scene.cancel is not None and chance.random() < 0.5:
        scene.cancel()
        return "cancelled the job"
    pid = chance.choice(pids)
    number = chance.choice([signal.SIGINT, signal.SIGTERM])
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    return f"sent {number.name} to launcher {pid}"


def set_clock(scene: Scene, chance: random.Random) -> str | None:
    """Set the clock of some processes of the crew: wrong, or right again."""
    return scene.clocks.jump(chance)


def fill_disk(scene: Scene, chance: random.Random) -> str | None:
    """Leave no room on the disk for a while."""
    if not scene.disk.is_mounted:
        return None
    seconds = chance.uniform(0.05, 1.5)
    scene.disk.fill()
    time.sleep(seconds)
    scene.disk.heal()
    return f"the disk was full for {seconds:.1f} s"


def forbid_writing(scene: Scene, chance: random.Random) -> str | None:
    """Let the disk be read only for a while."""
    if not scene.disk.is_mounted or not scene.disk.set_writable(writable=False):
        return None
    seconds = chance.uniform(0.05, 1.5)
    time.sleep(seconds)
    scene.disk.heal()
    return f"the disk was read-only for {seconds:.1f} s"


def disturb_reads(scene: Scene, chance: random.Random) -> str | None:
    """Let the input's server answer badly for a while."""
    if scene.server is None:
        return None
    share = chance.choice([0.2, 0.5, 0.9])
    seconds = chance.uniform(0.5, 3)
    scene.server.bad_share = share
    time.sleep(seconds)
    scene.server.bad_share = 0.0
    return f"{share:.0%} of the requests for the input were answered badly, for {seconds:.1f} s"


def delete_records(scene: Scene, chance: random.Random) -> str | None:
    """Delete a few records of what is done, and of who does it."""
    return _to_each(_records(scene), 5, chance, "deleted", lambda path: path.unlink())


def damage_records(scene: Scene, chance: random.Random) -> str | None:
    """Damage a few records of what is done, and of who does it."""
    return _to_each(_records(scene), 5, chance, "damaged", lambda path: damage(path, chance))


def damage_seams(scene: Scene, chance: random.Random) -> str | None:
    """Damage or delete a few seam files."""
    files = _files(scene.state / "seams")
    if chance.random() < 0.3:
        return _to_each(files, 20, chance, "deleted", lambda path: path.unlink())
    return _to_each(files, 20, chance, "damaged", lambda path: damage(path, chance))


def damage_description(scene: Scene, chance: random.Random) -> str | None:
    """Damage what describes the job, whose content is kept: it is to be put back."""
    paths = [*scene.state.glob("job.json"), *scene.state.glob("*/job.json")]

    def damage_copied(path: Path) -> None:
        content = path.read_bytes()
        damage(path, chance)
        scene.copies.setdefault(path, content)

    return _to_each(paths, 1, chance, "damaged", damage_copied)


def damage_blocks(scene: Scene, chance: random.Random) -> str | None:
    """Damage a block of the output."""
    if not scene.has_checksums:
        return None
    blocks = [
        path
        for path in _files(scene.output)
        if scene.state not in path.parents
        and path.suffix == ""
        and path.name not in ("info", "provenance")
    ]

    def damage_noted(path: Path) -> None:
        damage(path, chance)
        scene.damaged_blocks.add(path)

    return _to_each(blocks, 2, chance, "damaged", damage_noted)


MISFORTUNES: dict[str, tuple[Misfortune, float]] = {
    "process killed": (kill, 2),
    "process stopped": (stop, 2),
    "launch told to stop": (tell_to_stop, 1),
    "clock jumped": (set_clock, 2),
    "disk full": (fill_disk, 1.5),
    "disk read-only": (forbid_writing, 1.5),
    "input answered badly": (disturb_reads, 3),
    "records deleted": (delete_records, 1),
    "records damaged": (damage_records, 2),
    "seam files damaged": (damage_seams, 2),
    "description damaged": (damage_description, 0.5),
    "block damaged": (damage_blocks, 1),
}
"""Each kind of misfortune, and how often it comes, relative to others."""


def damage(path: Path, chance: random.Random) -> None:
    """Damage a file in one of the ways in which files are damaged."""
    content = path.read_bytes()
    place = chance.randrange(max(1, len(content)))
    flipped = bytearray(content or b"\0")
    flipped[place] ^= 1 << chance.randrange(8)
    path.write_bytes(
        chance.choice(
            [
                b"",
                content[:place],
                chance.randbytes(len(content)),
                bytes(flipped),
                content + content[place:] + b"}",
            ]
        )
    )


def _records(scene: Scene) -> list[Path]:
    names = ("receipts", "sums", "quarantine", "claims", "workers", "shards", "once", "launches")
    of_job = [path for name in names for path in _files(scene.state / name)]
    of_job += scene.state.glob("shards.json")
    return of_job + [path for path in scene.state.glob("*/*/*/done/*/*.json") if path.is_file()]


def _files(folder: Path) -> list[Path]:
    """Files that are complete, in and below a folder, whose parts may vanish meanwhile."""
    return [
        Path(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if not name.endswith((".__lock", ".draft", ".guard"))
    ]


def _to_each(
    paths: Iterable[Path],
    most: int,
    chance: random.Random,
    verb: str,
    action: Callable[[Path], None],
) -> str | None:
    found = sorted(paths)
    chosen = chance.sample(found, min(len(found), chance.randint(1, most)))
    done = []
    for path in chosen:
        with suppress(OSError):  # gone meanwhile, or the disk is full
            action(path)
            done.append(str(path.relative_to(path.parents[2])))
    return f"{verb} {', '.join(done)}" if done else None
