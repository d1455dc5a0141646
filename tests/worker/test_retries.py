import pytest

from beam_inference.errors import ChunkFault, TransientReadError, WorkerFault
from beam_inference.worker.retries import attempt


def failing(errors):
    """An action that raises each of these once, and then answers."""
    left = list(errors)

    def action():
        if left:
            raise left.pop(0)
        return "answer"

    return action


def tried(errors, attempts=3):
    told = []
    is_transient = lambda error: isinstance(error, TransientReadError)  # noqa: E731
    return (
        attempt(failing(errors), attempts, "read", is_transient, lambda *line: told.append(line)),
        told,
    )


def test_what_may_pass_is_tried_again_and_told():
    assert tried([TransientReadError("busy")]) == (("answer", 2), [(1, "busy")])


def test_what_does_not_pass_is_the_chunks_fault():
    with pytest.raises(ChunkFault, match="busy") as fault:
        tried([TransientReadError("busy")] * 3)
    assert (fault.value.stage, fault.value.attempts) == ("read", 3)
    with pytest.raises(ChunkFault, match="ValueError: odd"):
        tried([ValueError("odd")])


def test_a_process_without_memory_is_at_fault_itself():
    with pytest.raises(WorkerFault, match="out of memory: no memory for an array of 7 bytes"):
        tried([MemoryError("no memory for an array of 7 bytes")])
