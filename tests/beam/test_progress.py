import io
import re
import sys

import pytest

from beam_inference.beam import progress as progress_module
from beam_inference.beam.progress import Phase, Progress
from beam_inference.errors import WorkerFault


class Clock:
    """Time that passes when told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_plain_lines_say_chunks_speed_and_time_left(clock, capsys):
    done = [16]
    # 64 chunks of 16³ voxels
    with Progress(Phase("chunks", 64, 4096.0, lambda: done[0])) as progress:
        clock.now += 5
        progress.update()
        assert capsys.readouterr().err == ""
        clock.now += 15
        done[0] = 48
        progress.update()
    # 32 chunks of 4096 voxels in 20 s, and 16 to go.
    assert capsys.readouterr().err == "48 of 64 chunks, 0.01 Mvoxel/s, 10 s left\n"


def test_the_next_phase_begins_when_one_is_complete_with_a_speed_of_its_own(clock, capsys):
    done = [0]
    made = [0]
    phases = [
        Phase("chunks", 4, 1e6, lambda: done[0]),
        Phase("chunks of the pyramid", 8, 1e6, lambda: made[0]),
    ]
    with Progress(*phases) as progress:
        clock.now += 100
        done[0] = 3
        progress.update()
        clock.now += 100
        done[0] = 4
        progress.update()
        clock.now += 10
        made[0] = 5
        progress.update()
    assert capsys.readouterr().err.splitlines() == [
        "3 of 4 chunks, 0.03 Mvoxel/s, 33 s left",
        "0 of 8 chunks of the pyramid, 0.00 Mvoxel/s",
        "5 of 8 chunks of the pyramid, 0.50 Mvoxel/s, 6 s left",
    ]


def test_receipts_are_not_counted_at_every_call(clock):
    calls = []
    with Progress(Phase("chunks", 64, 4096.0, lambda: calls.append(1) or 0)) as progress:
        for _ in range(100):
            clock.now += 0.01
            progress.update()
    assert len(calls) <= 5


def test_a_state_that_does_not_answer_does_not_end_the_launch(clock, capsys):
    answers = iter([0])

    def count():
        for answer in answers:
            return answer
        raise WorkerFault("gone")

    with Progress(Phase("chunks", 64, 4096.0, count)) as progress:
        clock.now += 20
        progress.update()


def test_a_terminal_shows_a_bar(clock, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with Progress(Phase("chunks", 32, 4096.0, lambda: 16)) as progress:
        clock.now += 1
        progress.update()
        progress.say("stopping")
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue())
    assert "16/32" in text
    assert "stopping" in text
