"""A function is called in a process of its own, which it may end."""

import pytest

from beam_inference.conversion.process_apart import run_apart
from beam_inference.errors import VolumeError


def test_a_function_that_ends_or_raises_is_none_of_its_business():
    run_apart("no", "os.path", "exists", "a")
    run_apart("no", "os", "remove", "/does/not/exist")


def test_a_crash_is_told():
    with pytest.raises(VolumeError, match=r"a\.h5 .*: its library crashes on it \(SIGABRT\)"):
        run_apart("a.h5 cannot be read", "os", "abort")


def test_what_does_not_end_is_ended():
    with pytest.raises(VolumeError, match="did not end within 1 s of the processor"):
        run_apart(
            "a.h5 cannot be read", "shutil", "copyfile", "/dev/zero", "/dev/null", cpu_seconds=1
        )


def test_modules_in_the_working_folder_are_not_loaded(tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("import os; os.abort()")
    monkeypatch.chdir(tmp_path)
    run_apart("no", "beam_inference.conversion.hdf5", "try_dataset", "a.h5")
