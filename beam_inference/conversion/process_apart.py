"""A function that runs in a process of its own first, because a library may end that process.

HDF5's library trusts much of what a file says. Some damaged files let it crash, or run for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from beam_inference.errors import VolumeError

_CPU_SECONDS = 30
"""Time of the processor; waiting for a slow disk does not count."""

# The first arguments are the bound, the module and the function; the others are the function's.
_PROGRAM = """
import importlib, resource, sys
seconds = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from beam_inference.environment import bound_memory
from beam_inference.errors import BeamInferenceError
with bound_memory():
    try:
        getattr(importlib.import_module(sys.argv[2]), sys.argv[3])(*sys.argv[4:])
    except BeamInferenceError:
        pass
"""


def run_apart(
    complaint: str, module: str, function: str, *arguments: str, cpu_seconds: int = _CPU_SECONDS
) -> None:
    """Call a function in a process of its own, to see whether that process survives it.

    What the function returns or raises is not told: it is to be called again.

    Args:
        complaint: what is wrong if it does not, such as "a.h5 cannot be read as HDF5".
        module: name of the module.
        function: name of the function.
        arguments: what it is given.
        cpu_seconds: time of the processor that it may take.

    Raises:
        VolumeError: the process crashed, or took too long.
    """
    # The folder that this process runs in may hold modules of strangers: -P keeps it out.
    command = [sys.executable, "-P", "-c", _PROGRAM, str(cpu_seconds), module, function]
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [*command, *arguments],
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if ended.returncode >= 0:
        return
    name = signal.Signals(-ended.returncode).name
    reason = (
        f"its library did not end within {cpu_seconds} s of the processor"
        if name == "SIGXCPU"
        else f"its library crashes on it ({name})"
    )
    raise VolumeError(f"{complaint}: {reason}. The file is damaged: copy or save it again.")
