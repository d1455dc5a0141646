"""Errors of engines, as they were met, and what is told."""

import pytest

from beam_inference.beam.engine_messages import translate
from beam_inference.beam.execution import explain

STATE = "Pipeline beam-inference-1cd4_84ee failed in state FAILED: "


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            f"{STATE}java.net.ConnectException: java.net.ConnectException: finishConnect(..) "
            "failed: Connection refused",
            "--environment_config",
        ),
        (
            f"{STATE}java.lang.RuntimeException: docker: Cannot connect to the Docker daemon",
            "--environment_type=EXTERNAL",
        ),
        (
            f"{STATE}java.util.concurrent.TimeoutException: No client connected within timeout",
            "a pool of its own",
        ),
        (
            f"{STATE}org.apache.flink.runtime.jobmanager.scheduler.NoResourceAvailableException: x",
            "--parallelism",
        ),
        (
            "org.apache.flink.runtime.JobException: Recovery is suppressed by "
            "NoRestartBackoffTimeStrategy",
            "restart-strategy.type",
        ),
        (
            f"{STATE}org.apache.beam.vendor.grpc.v1p69p0.io.grpc.StatusRuntimeException: "
            "CANCELLED: client cancelled",
            "a worker process was lost",
        ),
        ("ModuleNotFoundError: No module named 'beam_inference'", "lack the package"),
        ("Pipeline x_y failed in state CANCELLED: unknown error", "was cancelled on its engine"),
        (
            f"{STATE}org.apache.flink.runtime.client.JobCancellationException: Job was cancelled.",
            "was cancelled on its engine",
        ),
    ],
)
def test_what_is_known_is_told_with_what_to_do(text, part):
    assert part in translate(text)
    assert part in explain(RuntimeError(text))


def test_of_a_java_stack_the_cause_is_told():
    text = (
        "java.lang.RuntimeException: outer\n\tat a.B.c(B.java:1)\n"
        "Caused by: java.io.IOException: the disk is full\n"
        "\tat java.base/java.lang.Thread.run(Thread.java:840)"
    )
    assert explain(RuntimeError(text)) == "java.io.IOException: the disk is full"
    assert explain(RuntimeError(f"{STATE}java.lang.Error: x")) == "java.lang.Error: x"


def test_other_errors_are_left_to_others():
    assert translate("something of Beam's own") is None
