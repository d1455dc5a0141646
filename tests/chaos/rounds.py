"""A round: a command is disturbed until it is complete, and then judged."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from helpers import without_provenance

from beam_inference.cli.main import main as cli_main
from beam_inference.job.state import State
from chaos.clocks import Clocks, build_library
from chaos.crew import (
    PROCESSES,
    DaskCluster,
    Ending,
    Launcher,
    processes_of,
    run_to_end,
    signal_all,
)
from chaos.disk import SmallDisk
from chaos.misfortunes import MISFORTUNES, STATE_FOLDER, Scene
from chaos.subjects import EXCHANGE, OTHERS, RECOMPUTE, Subject
from chaos.web import MoodyServer

_CODES = {0, 1, 2, 3, 75, 130, -signal.SIGKILL, -signal.SIGINT, -signal.SIGTERM}
"""How a launch that was disturbed may end; any other code is a crash."""
_SHARDS = 3
_JOINING = 0.15
"""Chance of a launch that joins, each second."""
_MOST_LAUNCHES = 4
_START_AGAIN = re.compile(r"(pass|with) --overwrite to (start|compute|make|replace)")
"""Advice of a message that is followed."""
_DEFECTS = ("not foreseen", "defect", "Segmentation fault")
_CALM_LAUNCHES = 4
_CALM_SECONDS = 1800
_ORPHAN_SECONDS = 180
_LONG_AGO = 2 * 3600


class Crew(StrEnum):
    """What does the work of a round."""

    LOCAL = "local"
    DASK = "Dask"
    MIXED = "mixed"


class Lost(Exception):
    """A promise was broken; the message says which."""


@dataclass(frozen=True)
class Case:
    """A command that is disturbed in a round, and what does its work.

    Attributes:
        subject: the command.
        crew: what does the work: launches on this machine, launches on a Dask cluster, or both at
            once.
        over_http: whether the input is read from a web server.
    """

    subject: Subject
    crew: Crew
    over_http: bool

    @property
    def name(self) -> str:
        """Its name, for messages and figures."""
        return f"{self.subject.name}, {self.crew}{', HTTP' if self.over_http else ''}"


def draw_case(seed: int, number: int) -> Case:
    """Draw what a round disturbs: of seven rounds, six are ``run``, in equal shares."""
    cycle, place = divmod(number, 7)
    chance = random.Random(f"{seed}/cycle {cycle}")
    other = OTHERS[(seed + cycle) % len(OTHERS)]
    over_http = other.begin is None
    cases = [
        *(
            Case(subject, crew, chance.random() < 0.5)
            for subject in (RECOMPUTE, EXCHANGE)
            for crew in Crew
        ),
        Case(
            other,
            Crew.DASK if chance.random() < 0.3 else Crew.LOCAL,
            over_http and chance.random() < 0.5,
        ),
    ]
    chance.shuffle(cases)
    return cases[place]


@dataclass
class Figures:
    """What happened in rounds.

    Attributes:
        rounds: rounds by case.
        misfortunes: misfortunes by kind.
        launches: launches by crew.
        codes: exit codes of launches.
        lost: what was lost, with the command that repeats it.
    """

    rounds: Counter[str] = field(default_factory=Counter)
    misfortunes: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)


class Workshop:
    """The folder of all rounds: the inputs, and what undisturbed commands make of them.

    Args:
        folder: the folder, where ``inputs`` were written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inputs = folder / "inputs"

    def undisturbed(self, subject: Subject) -> dict[str, bytes]:
        """What a command makes if nothing disturbs it; it is run once, and leaves nothing else."""
        folder = self.folder / "undisturbed" / subject.name.replace(", ", "-")
        output = folder / "out"
        is_made = folder / "made"
        if not is_made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            if subject.begin is not None:
                subject.begin(self.inputs, output)
            words = subject.words(str(self.inputs), output, folder)
            ending = run_to_end(words, folder / "log", folder / "tmp", _CALM_SECONDS)
            if ending is None or ending.code:
                raise RuntimeError(f"{words} failed undisturbed: see {folder}/log")
            left = [*folder.joinpath("tmp").iterdir(), *find_leftovers(output)]
            if left:
                raise Lost(f"undisturbed, {subject.name} leaves {left} behind")
            is_made.touch()
        return read_products(output)


def read_products(output: Path) -> dict[str, bytes]:
    """Every file of an output but its state, by name, without where its source lies."""
    return {
        str(path.relative_to(output)): without_provenance(path)
        for path in output.rglob("*")
        if path.is_file() and STATE_FOLDER not in path.relative_to(output).parts
    }


_MAY_STAY = re.compile(
    r"(job|owners|shards)\.json|quarantine\.jsonl"
    r"|(receipts|sums|quarantine|shards/\w+)/\w+/\d{9}/\d{12}\.json"
    r"|launches/\w+\.(started|chunks|stop|json)|[a-z_]+/job\.json"
    r"|(?!claims/|seams/|workers/)[a-z_]+/\w{16}/.*"
)
_DRAFT = re.compile(r".*(__lock|\.draft|\.guard)")


def find_leftovers(output: Path) -> list[str]:
    """Files that a complete command must not leave: drafts, seam files, claims, unknown ones."""
    left = []
    for path in output.rglob("*"):
        if not path.is_file():
            continue
        name = str(path.relative_to(output))
        of_state = name.removeprefix(f"{STATE_FOLDER}/")
        is_unknown = of_state != name and not _MAY_STAY.fullmatch(of_state)
        if is_unknown or _DRAFT.fullmatch(name):
            left.append(name)
    return sorted(left)


class Round:
    """One round, in a folder of its own.

    Args:
        workshop: the inputs, and what is to come of them.
        case: what is disturbed.
        seed: of all draws.
        number: of this round.
        seconds: how long it is disturbed at most.
        figures: to which this round's are added.
    """

    def __init__(
        self,
        workshop: Workshop,
        case: Case,
        seed: int,
        number: int,
        seconds: float,
        figures: Figures,
    ) -> None:
        self._workshop = workshop
        self._case = case
        self._seed = seed
        self._number = number
        self._seconds = seconds
        self._figures = figures
        self._chance = random.Random(f"{seed}/{number}")
        self._folder = workshop.folder / f"round-{seed}-{number}"
        self._output = self._folder / "disk" / "out"
        self._launches = 0
        self._spared_until = 0.0
        self._again: list[str] = []

    def run(self) -> None:
        """Disturb the command until it is complete, and judge it.

        Raises:
            Lost: a promise was broken.
        """
        expected = self._workshop.undisturbed(self._case.subject)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        with contextlib.ExitStack() as stack:
            scene = self._make_scene(stack)
            self._tell(self._case.name)
            self._disturb(scene)
            scene.heal()
            self._end_calmly(scene)
            self._judge(scene, expected)
            self._check_nothing_is_left(scene)
        self._figures.rounds[self._case.name] += 1
        shutil.rmtree(self._folder)

    def _make_scene(self, stack: contextlib.ExitStack) -> Scene:
        case = self._case
        disk = stack.enter_context(SmallDisk(self._folder / "disk"))
        server = None
        inputs = str(self._workshop.inputs)
        if case.over_http:
            server = stack.enter_context(MoodyServer(self._workshop.inputs, self._number))
            inputs = server.url
        if case.subject.begin is not None:
            case.subject.begin(self._workshop.inputs, self._output)
        self._words = case.subject.words(inputs, self._output, self._folder)
        clocks = self._folder / "clocks"
        self._clocks = Clocks(clocks, build_library(clocks))
        self._cluster = DaskCluster(self._folder, self._clocks)
        scene = Scene(
            self._output,
            disk,
            server,
            self._clocks,
            self._cancel if case.subject.is_job else None,
            has_checksums=case.subject.is_job,
        )
        stack.callback(lambda: signal_all(scene.sessions, signal.SIGKILL))
        stack.callback(self._cluster.stop)
        return scene

    def _disturb(self, scene: Scene) -> None:
        """Launch again and again, with a misfortune each second, until the time is up."""
        deadline = time.monotonic() + self._seconds
        running: list[Launcher] = []
        while time.monotonic() < deadline:
            for launcher in running:
                ending = launcher.ending()
                if ending is not None:
                    self._note(ending)
                    self._obey(scene, ending)
            running = [each for each in running if each.ending() is None]
            if not running:
                running = self._launch_crew(scene)
            elif self._case.subject.is_job and self._chance.random() < _JOINING:
                running += self._join(scene, running)
            time.sleep(self._chance.uniform(0.5, 1.5))
            self._bring_misfortune(scene)
            self._start_workers(scene)
        self._running = running

    def _start_workers(self, scene: Scene) -> None:
        """Start a cluster's workers again, as whoever runs it would: a launch waits for them."""
        self._cluster.start_workers()
        scene.sessions += set(self._cluster.sessions) - set(scene.sessions)

    def _launch_crew(self, scene: Scene) -> list[Launcher]:
        # what is killed at once every time has done nothing yet
        self._spared_until = time.monotonic() + self._chance.choice([0, 8, 12, 16, 20])
        launchers = []
        if self._case.crew != Crew.LOCAL:
            self._figures.launches["Dask"] += 1
            launchers.append(self._launch(scene, self._start_cluster(scene)))
        if self._case.crew != Crew.DASK:
            launchers += self._launch_here(scene)
        return launchers

    def _start_cluster(self, scene: Scene) -> list[str]:
        """Start what of the cluster does not live; returns the flags of a launch on it."""
        flags = self._cluster.start()
        scene.sessions += set(self._cluster.sessions) - set(scene.sessions)
        return flags

    def _launch_here(self, scene: Scene) -> list[Launcher]:
        crews = ["one launcher", "two launchers", "worker processes"]
        if self._case.subject.is_job and not self._again:
            # a job is divided by a launch of its own, so that more are due then
            crews += ["shards"] * (8 if _is_divided(scene) else 2)
        crew = self._chance.choice(crews)
        if crew == "shards":
            return self._launch_shards(scene)
        count = 2 if crew == "two launchers" else 1
        self._figures.launches[crew] += count
        flags = [*PROCESSES] if crew == "worker processes" else []
        return [self._launch(scene, flags) for _ in range(count)]

    def _launch_shards(self, scene: Scene) -> list[Launcher]:
        """Launch some shards, or the command that comes before them, or the one after them."""
        job = self._words[1]
        if not _is_divided(scene):
            return [self._launch_words(scene, ["prepare", job, f"--shards={_SHARDS}"], "prepare")]
        if self._chance.random() < 0.2:
            return [self._launch_words(scene, ["finish", job], "finish")]
        shards = self._chance.sample(range(_SHARDS), self._chance.choice([1, 2, _SHARDS]))
        launchers = []
        for shard in shards:
            until = self._chance.choice([[], ["--stop_after=12s"]])
            words = ["run", job, f"--shard={shard}/{_SHARDS}", *until]
            launchers.append(self._launch_words(scene, words, "shard"))
        return launchers

    def _join(self, scene: Scene, running: list[Launcher]) -> list[Launcher]:
        """Launch the job once more, beside the launches that do it."""
        if len(running) >= _MOST_LAUNCHES or self._again:
            return []
        joiners = ["joining launch", "joining launch", "joining launch without claims"]
        if self._case.crew == Crew.MIXED:
            joiners += ["joining launch on Dask", "shards"]
        joiner = self._chance.choice(joiners)
        if joiner == "shards":
            return self._launch_shards(scene)
        flags = {
            "joining launch on Dask": lambda: self._start_cluster(scene),
            "joining launch without claims": lambda: ["--no_claims"],
        }.get(joiner, list)()
        return [self._launch_words(scene, [*self._words, *flags], joiner)]

    def _launch(self, scene: Scene, flags: list[str]) -> Launcher:
        words = [*self._words, *self._again, *flags]
        self._again = []  # of two launchers, one starts again
        return self._launch_words(scene, words)

    def _launch_words(self, scene: Scene, words: list[str], crew: str | None = None) -> Launcher:
        if crew is not None:
            self._figures.launches[crew] += 1
        self._launches += 1
        log = self._folder / f"launch-{self._launches}.log"
        clock = self._clocks.make() if self._chance.random() < 0.5 else {}
        launcher = Launcher(words, log, self._folder / "tmp", clock)
        self._tell(f"launch {self._launches} is process {launcher.process.pid}: {words}")
        scene.launchers.append(launcher.process.pid)
        scene.sessions.append(launcher.process.pid)
        return launcher

    def _cancel(self) -> None:
        ending = ask("cancel", self._words[1])
        if ending.code not in (0, 1, 2):
            raise Lost(f"cancel ends with {ending.code}: {ending.text[-600:]}")

    def _bring_misfortune(self, scene: Scene) -> None:
        names = sorted(MISFORTUNES)
        weights = [MISFORTUNES[name][1] for name in names]
        for name in self._chance.choices(names, weights, k=8):
            if name == "process killed" and time.monotonic() < self._spared_until:
                continue
            done = MISFORTUNES[name][0](scene, self._chance)
            if done is not None:
                self._figures.misfortunes[name] += 1
                self._tell(done)
                return

    def _end_calmly(self, scene: Scene) -> None:
        """Let what runs come to its end, and launch until the command says that it is complete."""
        self._start_workers(scene)
        for launcher in self._running:
            ending = launcher.wait(_CALM_SECONDS)
            if ending is None:
                raise Lost(f"a launch does not end: {self._folder}")
            self._note(ending)
            self._obey(scene, ending)
        self._running = []
        if _is_divided(scene):  # which says anew how many shards there are
            words = ["prepare", self._words[1], f"--shards={_SHARDS}", "--resplit"]
            self._end_undisturbed(scene, self._launch_words(scene, words))
        endings = []
        for _ in range(_CALM_LAUNCHES):
            flags = self._start_cluster(scene) if self._case.crew == Crew.DASK else []
            ending = self._end_undisturbed(scene, self._launch(scene, flags))
            if ending.code == 0:
                break
            endings.append(f"{ending.code}: {ending.text[-600:]}")
        else:
            raise Lost(f"not complete after {_CALM_LAUNCHES} undisturbed launches: {endings[-1]}")
        if _is_divided(scene):
            finish = self._launch_words(scene, ["finish", self._words[1]])
            ending = self._end_undisturbed(scene, finish)
            if ending.code != 0:
                raise Lost(f"finish of a complete job ends with {ending.code}: {ending.text}")

    def _end_undisturbed(self, scene: Scene, launcher: Launcher) -> Ending:
        self._figures.launches["undisturbed"] += 1
        ending = launcher.wait(_CALM_SECONDS)
        if ending is None:
            raise Lost(f"an undisturbed launch does not end: {self._folder}")
        self._note(ending)
        self._obey(scene, ending)
        return ending

    def _note(self, ending: Ending) -> None:
        self._figures.codes[str(ending.code)] += 1
        self._tell(f"a launch ended with {ending.code}: {ending.text.strip()[-200:]!r}")
        if ending.code not in _CODES:
            raise Lost(f"a launch ended with {ending.code}: {ending.text[-600:]}")
        for word in _DEFECTS:
            if word in ending.text:
                raise Lost(f"a launch speaks of what is {word}: {ending.text[-1500:]}")

    def _obey(self, scene: Scene, ending: Ending) -> None:
        """Do what a launch that was refused asks for: restore a description, or start again."""
        damaged = [path for path in scene.copies if str(path.parent) in ending.text]
        for path in list(scene.copies) if ending.code == 0 else damaged:
            with contextlib.suppress(OSError):
                path.write_bytes(scene.copies[path])
                del scene.copies[path]
        if ending.code in (1, 2) and not damaged and _START_AGAIN.search(ending.text):
            self._figures.misfortunes["had to start again"] += 1
            self._again = ["--overwrite"]

    def _judge(self, scene: Scene, expected: dict[str, bytes]) -> None:
        """Compare the output with the undisturbed one, and with what the commands say of it."""
        for path, content in scene.copies.items():
            path.write_bytes(content)
        self._sweep(scene)
        if not self._case.subject.is_job:
            _require_same(self._products(scene), expected)
            return
        wrong = self._verify()
        differing = _differing(read_products(self._output), expected)
        if differing and not wrong:
            raise Lost(f"verify --deep calls complete what differs: {differing[:5]}")
        if wrong:
            self._redo(scene, wrong, differing)
            _require_same(read_products(self._output), expected)
        self._require_records()

    def _products(self, scene: Scene) -> dict[str, bytes]:
        """What the command has made, as if it had read the input from the disk."""
        products = read_products(self._output)
        if scene.server is None:
            return products
        served = scene.server.url.encode()
        local = self._workshop.inputs.as_uri().encode()
        return {name: content.replace(served, local) for name, content in products.items()}

    def _redo(self, scene: Scene, wrong: list[str], differing: list[str]) -> None:
        """Do chunks again whose blocks were damaged, as a user would: without their receipts."""
        if not scene.damaged_blocks or not differing:
            raise Lost(f"verify --deep finds what nobody has damaged: {wrong[:3]}, {differing[:3]}")
        for line in wrong:
            match = re.match(r"chunk (\d+) ", line)
            if match is None:
                raise Lost(f"verify --deep does not name the chunk: {line}")
            _remove_receipts(scene, match[1])
        self._end_calmly(scene)
        again = self._verify()
        if again:
            raise Lost(f"verify --deep finds chunks that were done again: {again[:3]}")

    def _verify(self) -> list[str]:
        """What ``verify --deep`` finds; its exit code and those of others must agree with it."""
        job = self._words[1]
        deep = ask("verify", job, "--deep", "--json")
        found = json.JSONDecoder().raw_decode(deep.text, deep.text.index("{"))[0]
        wrong = list(found["wrong"])
        codes = (deep.code, ask("verify", job).code, ask("status", job).code)
        if codes != (1 if wrong else 0, 0, 0):
            raise Lost(f"exit codes of verify --deep, verify, status: {codes}; found {found}")
        return wrong

    def _require_records(self) -> None:
        receipts = [path.stem for path in self._output.glob(f"{STATE_FOLDER}/receipts/*/*/*.json")]
        job = State(f"file://{self._output}/{STATE_FOLDER}").load_job()
        chunks = 0 if job is None else job.plan.chunks.count
        if sorted(map(int, receipts)) != list(range(chunks)):
            raise Lost(f"{len(receipts)} receipts for {chunks} chunks")

    def _sweep(self, scene: Scene) -> None:
        """Let every draft be old, so that ``clean``, or the command again, removes them."""
        for path in self._output.rglob("*"):
            if _DRAFT.fullmatch(path.name):
                moment = time.time() - _LONG_AGO
                os.utime(path, (moment, moment))
        if not self._case.subject.is_job:
            self._end_calmly(scene)
            return
        ending = ask("clean", self._words[1])
        if ending.code:
            raise Lost(f"clean ends with {ending.code}: {ending.text[-600:]}")

    def _check_nothing_is_left(self, scene: Scene) -> None:
        left = find_leftovers(self._output)
        if left:
            raise Lost(f"{len(left)} files are left behind: {left[:5]}")
        own = set(scene.sessions) - set(self._cluster.sessions)
        self._cluster.stop()
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while processes_of(own):
            if time.monotonic() > deadline:
                raise Lost(f"processes are left behind: {list(_command_lines(own))}")
            time.sleep(0.2)

    def _tell(self, text: str) -> None:
        with (self._workshop.folder / "log").open("a") as log:
            now = time.strftime("%H:%M:%S")
            log.write(f"{now} round {self._number} of seed {self._seed}: {text}\n")


def _is_divided(scene: Scene) -> bool:
    return (scene.state / "shards.json").exists()


def ask(*words: str) -> Ending:
    """Run a command that writes no volume in this process, which has imported what it needs."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli_main([*words])
    return Ending(words, code, f"{out.getvalue()}{err.getvalue()}")


def _remove_receipts(scene: Scene, chunk: str) -> None:
    for stage in ("receipts", "sums"):
        for receipt in scene.state.glob(f"{stage}/*/*/{int(chunk):012d}.json"):
            with contextlib.suppress(OSError):  # the disk may be read-only
                receipt.unlink()


def _differing(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    return sorted(name for name in found.keys() | expected if found.get(name) != expected.get(name))


def _require_same(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    differing = _differing(found, expected)
    if differing:
        raise Lost(f"{len(differing)} files differ from the undisturbed ones: {differing[:5]}")


def _command_lines(sessions: set[int]) -> Iterator[str]:
    for pid in processes_of(sessions):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            yield f"{pid} {words.decode(errors='replace')[:200]}"
