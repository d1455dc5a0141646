import io
import logging

import pytest

from beam_inference.cli import main
from beam_inference.errors import WorkerFault
from beam_inference.execution import explain


def raised(error, cause=None):
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WorkerFault("the disk is full"), "the disk is full"),
        (raised(RuntimeError("wrapped"), WorkerFault("the disk is full")), "the disk is full"),
        (
            RuntimeError(
                "Traceback\n  File x\nbeam_inference.errors.WorkerFault: the disk is full [while running 'A/B']\n"
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
