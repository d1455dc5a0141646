from beam_inference.worker.effort import Effort


def test_time_adds_up_and_attempts_are_replaced():
    effort = Effort(4).with_seconds("write", 1.5).with_attempts("write", 3)
    again = effort.with_seconds("write", 2.0).with_seconds("merge", 1.0).with_attempts("write", 1)
    assert again.seconds == {"write": 3.5, "merge": 1.0}
    assert again.attempts == {"write": 1}
    assert (effort.seconds, effort.attempts) == ({"write": 1.5}, {"write": 3})
