"""A short time of chaos: one round of each seam mode, and rules of the driver itself."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from chaos.clocks import Clocks, build_library
from chaos.misfortunes import MISFORTUNES, damage
from chaos.rounds import draw_case, find_leftovers

TESTS = Path(__file__).parents[1]


def test_a_seed_draws_the_same_cases_again():
    assert [draw_case(7, n) for n in range(20)] == [draw_case(7, n) for n in range(20)]
    assert [draw_case(7, n).name for n in range(20)] != [draw_case(8, n).name for n in range(20)]


def test_seam_modes_and_crews_have_equal_shares_and_every_command_has_its_turn():
    cases = [draw_case(3, number) for number in range(35)]
    jobs = Counter((case.subject.name, case.crew) for case in cases if case.subject.is_job)
    assert set(jobs.values()) == {5}
    assert len(jobs) == 6
    others = [case.subject.name for case in cases if not case.subject.is_job]
    assert sorted(others) == ["components", "convert", "levels", "pyramid", "segment"]


def test_damage_leaves_no_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    for seed in range(100):
        path.write_bytes(b'{"chunk":7}')
        damage(path, random.Random(seed))
        assert path.read_bytes() != b'{"chunk":7}'


@pytest.mark.parametrize(
    "name",
    [
        "0-8_0-8_0-8_0123456789abcdef.__lock",
        "_beam_inference/owners.json.guard",
        "_beam_inference/seams/0123/000000000/000000000001/000000000002.000",
        "_beam_inference/claims/0123456789abcdef/infer/4/000000000000.json",
        "_beam_inference/workers/0123-4567.json",
        "_beam_inference/what_is_this",
    ],
)
def test_what_is_left_behind_is_found(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    assert find_leftovers(tmp_path) == [name]


def test_every_misfortune_finds_nothing_to_do_where_there_is_nothing(tmp_path):
    from chaos.disk import SmallDisk
    from chaos.misfortunes import Scene

    clocks = Clocks(tmp_path / "clocks", build_library(tmp_path))
    scene = Scene(tmp_path, SmallDisk(tmp_path), None, clocks, None, has_checksums=True)
    for bring, _ in MISFORTUNES.values():
        assert bring(scene, random.Random(0)) is None


def test_a_clock_jumps_for_those_who_see_it_alone(tmp_path):
    library = build_library(tmp_path)
    if library is None:
        pytest.skip("there is no compiler")
    clocks = Clocks(tmp_path, library)
    variables = clocks.make()
    chance = random.Random(0)
    while " off by +0 " in str(clocks.jump(chance)):
        pass
    code = (
        "import os, threading, time; threading.Event().wait(0.01); time.sleep(0.01); "
        "print(time.time(), time.monotonic(), os.stat('.').st_mtime)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
        cwd=tmp_path,
        env={**os.environ, **variables},
    )
    now, since_start, modified = map(float, ended.stdout.split())
    assert abs(now - time.time()) > 20
    assert abs(since_start - time.monotonic()) < 20
    assert abs(modified - time.time()) < 20
    clocks.set_all(0)
    assert (tmp_path / "clock-0").read_bytes() == bytes(8)


def test_without_a_compiler_clocks_are_right(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    clocks = Clocks(tmp_path, build_library(tmp_path))
    assert clocks.make() == {}
    assert clocks.jump(random.Random(0)) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_time_of_chaos_loses_nothing(tmp_path):
    words = ["--seed", "0", "--disturbed", "15", "--seconds", "20", "--folder", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-m", "chaos", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 0 lost" in ended.stdout


@pytest.mark.slow
def test_an_orphan_is_seen(tmp_path):
    from chaos.crew import processes_of

    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert processes_of([process.pid]) == [process.pid]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while processes_of([process.pid]):
        assert time.monotonic() < deadline
