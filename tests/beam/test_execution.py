import io
import logging
import sys
import threading
import time
from contextlib import redirect_stderr

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beam_inference.beam.execution import CapturedStderr, execute, explain
from beam_inference.beam.progress import Phase, Progress
from beam_inference.cli.main import main
from beam_inference.errors import WorkerFault


def raised(error, cause=None):
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WorkerFault("the disk is full"), "the disk is full"),
        (
            RuntimeError("no\nFor more information, see\nhttps://docs.dask.org/x"),
            "For more information, see https://docs.dask.org/x",
        ),
        (raised(RuntimeError("wrapped"), WorkerFault("the disk is full")), "the disk is full"),
        (
            RuntimeError(
                "Traceback\n  File x\nbeam_inference.errors.WorkerFault: the disk is full [while "
                "running 'A/B']\n"
            ),
            "the disk is full",
        ),
        (
            RuntimeError(
                "x\nbeam_inference.volumes.volume.TransientWriteError: the disk is full\n"
            ),
            "the disk is full",
        ),
        (RuntimeError("Traceback\n  File x\nsomething of Beam's own"), "something of Beam's own"),
        (KeyError(), "KeyError"),
    ],
)
def test_what_a_runner_made_of_an_error_is_told_as_one_message(error, message):
    assert explain(error) == message


def test_a_log_that_cannot_be_written_does_not_end_the_job(job):
    """As where standard error is a pipe whose reader has gone."""
    gone = io.StringIO()
    gone.close()
    handler = logging.StreamHandler(gone)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        assert main(["run", job(), "--debug"]) == 0
    finally:
        root.removeHandler(handler)


def test_log_handlers_that_fail_at_the_same_time_do_not_wait_for_each_other(caplog):
    """Each holds its own lock while it prints, and what is printed goes to the other one."""
    both = threading.Barrier(2, timeout=10)

    class Failing(logging.Handler):
        failed = False

        def emit(self, record):
            if record.getMessage() == "fails" and not self.failed:
                self.failed = True
                both.wait()
                try:
                    raise OSError("the disk is full")
                except OSError:
                    self.handleError(record)

    loggers = [logging.getLogger(), logging.getLogger("beam_inference.beam.execution")]
    handlers = [Failing(), Failing()]
    printed = CapturedStderr()
    logging.getLogger("beam_inference").setLevel(logging.DEBUG)
    threads = [
        threading.Thread(target=each.error, args=("fails",), daemon=True) for each in loggers
    ]
    for each, handler in zip(loggers, handlers, strict=True):
        each.addHandler(handler)
    try:
        with redirect_stderr(printed):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
        assert not any(thread.is_alive() for thread in threads)
        printed.log()
    finally:
        for each, handler in zip(loggers, handlers, strict=True):
            each.removeHandler(handler)
            handler.createLock()  # where they do wait, so would the end of the session
    assert all(handler.failed for handler in handlers)
    assert caplog.text.count("OSError: the disk is full") == 2


def test_what_is_printed_is_logged_also_what_comes_last_and_not_what_the_log_says_of_it(caplog):
    class Printing(logging.Handler):
        def emit(self, record):
            print("the log fails", file=sys.stderr)

    def build(_):
        print("at the beginning", file=sys.stderr)
        time.sleep(0.3)
        print("at the end", file=sys.stderr)
        raise WorkerFault("lost")

    logger = logging.getLogger("beam_inference.beam.execution")
    handler = Printing()
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        result = execute(
            PipelineOptions([]),
            build,
            1,
            Progress(Phase("chunks", 1, 1.0, lambda: 0)),
            lambda: None,
            "launch",
        )
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert not result.interrupted
    assert str(result.error) == "lost"
    assert [record.getMessage() for record in caplog.records if record.name == logger.name] == [
        "at the beginning",
        "at the end",
    ]
