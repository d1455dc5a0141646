import pytest

from beam_inference.errors import ChunkFault, TransientReadError, WorkerFault
from beam_inference.worker.retries import Success, attempt


def failing(errors):
    """An action that raises each of these once, and then answers."""
    left = list(errors)

    def action():
        if left:
            raise left.pop(0)
        return "answer"

    return action


def attempt_read(errors, attempts=3):
    """The success of an action that fails with these errors first, and the lines logged."""
    lines = []

    def is_transient(error):
        return isinstance(error, TransientReadError)

    def log(number, cause):
        lines.append((number, cause))

    return attempt(failing(errors), attempts, "read", is_transient, log), lines


def test_what_may_pass_is_tried_again_and_logged():
    assert attempt_read([TransientReadError("busy")]) == (Success("answer", 2), [(1, "busy")])


def test_what_does_not_pass_is_the_chunks_fault():
    with pytest.raises(ChunkFault, match="busy") as fault:
        attempt_read([TransientReadError("busy")] * 3)
    assert (fault.value.stage, fault.value.attempts) == ("read", 3)
    with pytest.raises(ChunkFault, match="ValueError: odd"):
        attempt_read([ValueError("odd")])


def test_a_process_without_memory_is_at_fault_itself():
    with pytest.raises(WorkerFault, match="out of memory: no memory for an array of 7 bytes"):
        attempt_read([MemoryError("no memory for an array of 7 bytes")])


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), BaseException("odd")])
def test_code_that_raises_more_than_errors_costs_its_chunk_only(error):
    def fail():
        raise error

    with pytest.raises(ChunkFault, match=type(error).__name__):
        attempt(fail, 2, "infer", lambda _: False, lambda *_: None)


def test_an_interruption_is_no_fault_of_a_chunk():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupt, 2, "infer", lambda _: False, lambda *_: None)
