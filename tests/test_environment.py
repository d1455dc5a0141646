"""What a process may use, and what is set for it."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from beam_inference.environment import (
    available_memory,
    bound_memory,
    format_bytes,
    peak_memory,
    start_peak_memory,
    usable_cores,
    usable_memory,
)

_MEMORY = """
import json
from contextlib import nullcontext
from pathlib import Path
import numpy as np
from beam_inference.environment import avoid_heap, use_one_heap

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024

use_one_heap()
found = []
for place in (nullcontext(), avoid_heap(), nullcontext()):
    with place:
        before = held()
        arrays = [np.ones(2**20, np.uint8) for _ in range(40)]
        last = np.ones(2**20, np.uint8)
        arrays.clear()
        found.append(held() - before)
        del last
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of GNU's allocator")
def test_what_is_freed_stays_on_the_heap_unless_it_is_left_alone():
    printed = subprocess.run(
        [sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True, timeout=60
    )
    heap, alone, again = json.loads(printed.stdout)
    assert heap > 40 * 2**20  # the last array lies behind the holes
    assert alone < 4 * 2**20
    assert again < 4 * 2**20  # in the holes of the first time


_GARBAGE = """
import sys
from beam_inference.environment import end_without_collecting

class Loop:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("collected")

if sys.argv[1:]:
    end_without_collecting()
loop = Loop()
"""


@pytest.mark.parametrize(("words", "printed"), [([], "collected\n"), (["so"], "")])
def test_nothing_is_collected_at_the_end(words, printed):
    ended = subprocess.run(
        [sys.executable, "-c", _GARBAGE, *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ended.stdout == printed


@pytest.mark.parametrize(
    ("written", "cores"),
    [
        ("max 100000", 64),
        ("400000 100000", 4),
        ("150000 100000", 2),
        ("9900000 100000", 64),
        (None, 64),
    ],
)
def test_a_containers_share_of_the_cores(written, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    if written is not None:
        (tmp_path / "cpu.max").write_text(written + "\n")
    assert usable_cores(container=tmp_path) == cores


def test_a_containers_memory(tmp_path):
    all_of_it = usable_memory(container=tmp_path)
    for written, expected in (("max", all_of_it), (str(2**20), 2**20), (str(2**60), all_of_it)):
        (tmp_path / "memory.max").write_text(written + "\n")
        assert usable_memory(container=tmp_path) == expected


def test_memory_that_is_free_now(tmp_path):
    meminfo = tmp_path / "meminfo"
    assert available_memory(tmp_path, meminfo) is None
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 60 kB\nSwapFree: 4 kB\nHugePages: 0\n")
    assert available_memory(tmp_path, meminfo) == 64 * 1024
    (tmp_path / "memory.max").write_text("40000\n")
    (tmp_path / "memory.current").write_text("30000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nactive_file 2000\ninactive_file 3000\n")
    assert available_memory(tmp_path, meminfo) == 15000
    (tmp_path / "memory.current").write_text("90000\n")
    assert available_memory(tmp_path, meminfo) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path, meminfo) == 64 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the bound is there on Linux only")
def test_an_allocation_beyond_free_memory_fails_and_only_for_a_while():
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    with bound_memory():
        with pytest.raises(MemoryError):
            np.empty((available_memory() or 0) + 2**28, np.uint8)
        assert np.ones(2**20, np.uint8).all()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.skipif(sys.platform != "linux", reason="memory is told on Linux only")
def test_the_most_memory_is_counted_from_a_start():
    held = start_peak_memory()
    assert held is not None
    array = np.ones(2**26, np.uint8)
    del array
    assert 0.9 * 2**26 < peak_memory() - held < 2**27
    start_peak_memory()
    assert peak_memory() - held < 2**25


def test_where_the_peak_cannot_be_counted_anew_it_is_unknown(tmp_path):
    (tmp_path / "clear_refs").mkdir()  # as of a /proc that may not be written
    assert start_peak_memory(tmp_path) is None


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (300 * 2**10, "300 KiB"),
        (1010 * 2**10, "0.986 MiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**50, "1 PiB"),
        (5000 * 2**60, "5,000 EiB"),
    ],
)
def test_bytes_are_told_in_three_digits_of_the_fitting_unit(count: float, text: str) -> None:
    assert format_bytes(count) == text
