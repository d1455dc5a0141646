"""What is set for a whole process."""

import json
import subprocess
import sys

import pytest

_MEMORY = """
import json
from contextlib import nullcontext
from pathlib import Path
import numpy as np
from beam_inference.environment import heap_left_alone, use_one_heap

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024

use_one_heap()
found = []
for place in (nullcontext(), heap_left_alone(), nullcontext()):
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
    printed = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True, timeout=60)
    heap, alone, again = json.loads(printed.stdout)
    assert heap > 40 * 2**20  # the last array lies behind the holes
    assert alone < 4 * 2**20
    assert again < 4 * 2**20  # in the holes of the first time
