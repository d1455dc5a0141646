"""Where compiled loops are kept, and what happens without Numba."""

import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference.errors import ConfigError
from beam_inference.segmentation.compiled import kernels
from beam_inference.segmentation.compiled_folder import compiled_folder

WHOLE = st.integers(-(2**62), 2**62)


@settings(deadline=None)  # the first call compiles
@given(WHOLE | st.integers(-(2**54), 2**54), st.integers(1, 2**62) | st.integers(1, 2**54))
def test_a_mean_is_the_float_nearest_to_the_quotient(total, count):
    assert kernels().mean_of(total, count) == float(Fraction(total, count))


def test_loops_are_kept_where_only_this_user_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = compiled_folder()
    assert folder == tmp_path / "cache" / "beam-inference-compiled"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert compiled_folder() is None
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert compiled_folder() is None, "a link leads to where somebody else may point it"


def test_without_a_folder_each_process_compiles(tmp_path):
    (tmp_path / "file").touch()
    code = (
        "from beam_inference.segmentation.compiled import kernels; print(kernels().mean_of(7, 2))"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "file"), "NUMBA_CACHE_DIR": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("3.5\n", 0), done.stderr
    assert (tmp_path / "file").is_file()


def test_a_second_process_need_not_compile(tmp_path):
    code = (
        "from beam_inference.segmentation.compiled import kernels; mean = kernels().mean_of; "
        "mean(7, 2); print(*map(len, (mean.stats.cache_hits, mean.stats.cache_misses)))"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    printed = [
        subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        for _ in range(2)
    ]
    assert printed == ["0 1\n", "1 0\n"]


def test_without_numba_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "beam_inference.segmentation.kernels", raising=False)
    monkeypatch.delattr("beam_inference.segmentation.kernels", raising=False)
    with pytest.raises(ConfigError, match=r"needs Numba .* 'beam-inference\[segmentation\]'"):
        kernels()


def test_numbers_of_labels_are_replaced_in_place():
    labels = np.array([[[0, 2, 1], [2, 2, 0]]], np.uint32)
    kernels().renumber(labels, np.array([0, 7, 5], np.uint32), labels)
    assert labels.tolist() == [[[0, 5, 7], [5, 5, 0]]]
