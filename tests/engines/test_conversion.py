"""Test that conversions are quiet, and take nothing of what other threads print."""

import contextlib
import io
import sys
import threading

import pytest

from beam_inference.engines.conversion import quiet_conversion
from beam_inference.errors import EngineError


class Converting(threading.Thread):
    """A conversion in another thread, which has begun; it prints when it begins and ends."""

    def __init__(self):
        super().__init__()
        self._begun = threading.Event()
        self._enough = threading.Event()
        self.start()
        assert self._begun.wait(60)

    def run(self):
        with quiet_conversion("openvino"):
            print("of the conversion")
            self._begun.set()
            self._enough.wait(60)
            print("of the conversion", file=sys.stderr)

    def end(self):
        self._enough.set()
        self.join()


def fail():
    with quiet_conversion("openvino"):
        print("of the conversion")
        sys.stdout.writelines(["of the ", "conversion"])
        raise ValueError("no")


def test_a_conversion_prints_nothing(capsys):
    with pytest.raises(EngineError, match="openvino cannot take this network: no"):
        fail()
    print("after it")
    assert capsys.readouterr() == ("after it\n", "")


def test_other_threads_print_meanwhile(capsys):
    conversion = Converting()
    print("of another thread")
    print("error", file=sys.stderr)
    conversion.end()
    assert capsys.readouterr() == ("of another thread\n", "error\n")


@pytest.mark.usefixtures("capsys")
def test_a_stream_that_another_thread_puts_back_meanwhile_stays():
    before = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        conversion = Converting()
    conversion.end()
    assert sys.stdout is before


def test_a_stream_that_another_thread_takes_meanwhile_is_not_muted_for_ever(capsys):
    conversion = Converting()
    with contextlib.redirect_stdout(io.StringIO()):
        conversion.end()
    print("after both")
    assert capsys.readouterr().out == "after both\n"
