"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import inspect
import itertools
import logging
import os
import re
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import hypothesis
import numpy as np
import pytest
from helpers import SHARED_DATA, job_values, write_job, write_volume

from beam_inference import arrays
from beam_inference.config.plugins import list_plugins

if "torch" not in list_plugins("engines"):
    pytest.exit(
        "the installed entry points are older than setup.py: run python setup.py -q egg_info here, "
        "or pip install -e ."
    )

# Loops are compiled once for all tests, whose caches are their own.
os.environ.setdefault(
    "NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled")
)

# Beam builds parsers of options by the hundred, each of which would ask the terminal for its size.
os.environ.setdefault("COLUMNS", "80")
os.environ.setdefault("LINES", "24")

# others may use the machine: no test is one of time
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Shells' background jobs ignore it, and so would what tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# it forks a process that imports openvino by itself, as tests do
sys.modules.setdefault("openvino_telemetry", cast(ModuleType, None))


def pytest_collection_finish() -> None:
    """Keep libraries and tests out of each search for garbage: they were 8 % of the CPU time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_google_credentials() -> None:
    """Keep Beam from searching Google credentials, which takes 20 s at the first gs:// path."""
    from apache_beam.internal.gcp import auth

    auth._Credentials._credentials_init = True


@pytest.fixture(autouse=True, scope="session")
def _signatures_looked_at_once() -> Iterator[None]:
    """Keep Beam from parsing each DoFn's methods ten times a job: a sixth of a small job's time."""
    from apache_beam.transforms import core
    from apache_beam.typehints import decorators

    look: Callable[[object], inspect.Signature] = decorators.get_signature
    known = weakref.WeakKeyDictionary[FunctionType, inspect.Signature]()

    def recall(function: object) -> inspect.Signature:
        if not isinstance(function, MethodType) or not isinstance(function.__func__, FunctionType):
            return look(function)
        signature = known.get(function.__func__)
        if signature is None:
            signature = known[function.__func__] = look(function)
        return signature

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "get_signature", recall)
        yield


@pytest.fixture(autouse=True)
def _used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new arrays with NaN or extremes, so that reading before writing shows."""
    empty = arrays.empty

    def used(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        array = empty(shape, dtype)
        array.fill(
            np.nan
            if array.dtype.kind == "f"
            else np.iinfo(array.dtype).max
            if array.dtype.kind in "iu"
            else 1
        )
        return array

    monkeypatch.setattr(arrays, "empty", used)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder for each test; pytest's own lists the folders of all tests before to number it."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return make_numbered(tmp_path_factory, name)


def make_numbered(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Make a folder that nobody has had in this process."""
    folder = tmp_path_factory.getbasetemp() / f"{name}_{next(_numbers)}"
    folder.mkdir(mode=0o700)
    return folder


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache of its own: none is spared a trial by another one's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(make_numbered(tmp_path_factory, "cache")))


@pytest.fixture
def volume_in(tmp_path: Path) -> Path:
    """A volume of 40×70×50 random uint8 voxels at offset (3, -5, 2)."""
    array = np.random.default_rng(0).integers(0, 256, (40, 70, 50), dtype=np.uint8)
    write_volume(tmp_path / "in", array, (3, -5, 2))
    return tmp_path / "in"


@pytest.fixture
def job(volume_in: Path, tmp_path: Path) -> Callable[..., str]:
    """A function that writes a job file over the small random volume and returns its path."""

    def make(**sections: dict[str, Any]) -> str:
        return str(
            write_job(tmp_path / "job.yaml", job_values(volume_in, tmp_path / "out", **sections))
        )

    return make


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real test data are not there: {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session")
def fib25_image(shared_data: Path) -> np.ndarray:
    """FIB-25, 250³ uint8 voxels of 10 nm."""
    image: np.ndarray = np.load(shared_data / "fib25_medulla_train2_image.npy")
    return image


@pytest.fixture(scope="session")
def fib25_labels(shared_data: Path) -> np.ndarray:
    """Bodies of FIB-25, uint16; 0 is unlabelled."""
    with np.load(shared_data / "fib25_medulla_train2_labels.npz") as file:
        labels: np.ndarray = file["labels"]
        return labels


@pytest.fixture(scope="session")
def fib25(fib25_image: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The FIB-25 volume as precomputed with blocks of 64³."""
    folder = tmp_path_factory.mktemp("fib25") / "image"
    write_volume(folder, fib25_image, block_shape=(64, 64, 64))
    return folder


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """Restore the levels and handlers of loggers, which a command sets for its whole process.

    A handler would also write to the standard error of a test that is over.
    """
    loggers = [logging.getLogger(name) for name in (None, "beam_inference", "apache_beam")]
    levels = [each.level for each in loggers]
    handlers = logging.getLogger().handlers[:]
    yield
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)
    for handler in set(logging.getLogger().handlers) - {*handlers}:
        logging.getLogger().removeHandler(handler)
