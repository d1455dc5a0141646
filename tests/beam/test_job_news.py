"""What a Flink cluster says of a job while a launch waits for it."""

import pytest
from fakes.clock import Clock
from fakes.flink_rest import StandInJob

from beam_inference.beam.flags import beam_options, with_job_name
from beam_inference.beam.job_news import JobNews

LOST_WORKER = (
    "java.util.concurrent.ExecutionException: java.lang.RuntimeException\n"
    "\tat java.base/java.util.concurrent.CompletableFuture.get(CompletableFuture.java:2073)\n"
    "Caused by: org.apache.beam.vendor.grpc.v1p69p0.io.grpc.StatusRuntimeException: CANCELLED: "
    "client cancelled\n\tat java.base/java.lang.Thread.run(Thread.java:840)\n"
)
OWN_FAULT = (
    "java.lang.RuntimeException: Error received from SDK harness for instruction 4: Traceback\n"
    "beam_inference.errors.StateError: the output is gone [while running 'Infer']\n\n"
    "\tat org.apache.beam.runners.fnexecution.control.FnApiControlClient.java:1)\n"
)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def news(flink, clock):
    """News of a job called launch, three seconds after its launch."""
    flags = ["--runner=FlinkRunner", f"--flink_master={flink.url}"]
    made = JobNews(with_job_name(beam_options(flags), "launch"), clock)
    clock.now += 3
    return made


def test_the_page_of_a_job_is_told_once(flink, news, clock):
    assert news.look() is None
    flink.jobs = [StandInJob("launch", running=1)]
    assert news.look() is None, "not so soon"
    clock.now += 3
    job = flink.jobs[0].id
    assert news.look() == f"Flink job {job}: {flink.url}/#/job/running/{job}"
    clock.now += 30
    assert news.look() is None


def test_each_failure_of_a_task_is_told_once(flink, news, clock):
    job = StandInJob("launch", running=1)
    flink.jobs = [job]
    assert "/#/job/running/" in news.look()
    job.failures = [LOST_WORKER]
    clock.now += 6
    told = news.look()
    assert "a task of the Flink job failed: a worker process was lost" in told
    assert "waited for, about a minute" in told
    clock.now += 6
    assert news.look() is None
    job.failures = [LOST_WORKER, OWN_FAULT]
    assert news.look() is None, "not so soon"
    clock.now += 6
    assert "a task of the Flink job failed: the output is gone. With" in news.look()


def test_the_same_reason_is_told_once_a_minute(flink, news, clock):
    job = StandInJob("launch", running=1)
    flink.jobs = [job]
    assert news.look() is not None
    told = []
    for _ in range(20):
        job.failures.append(LOST_WORKER)
        clock.now += 6
        told.append(news.look() is not None)
    assert [number for number, is_told in enumerate(told) if is_told] == [0, 10]


def test_a_cluster_that_does_not_answer_is_asked_again(flink, news, clock):
    flink.jobs = [StandInJob("launch", running=1, failures=[LOST_WORKER])]
    flink.status = 503
    assert news.look() is None
    flink.status = 200
    clock.now += 3
    assert "/#/job/running/" in news.look()
    flink.status = 503
    clock.now += 6
    assert news.look() is None
    flink.status = 200
    clock.now += 6
    assert "a worker process was lost" in news.look()


def test_a_job_that_never_arrives_is_looked_for_no_longer(flink, news, clock):
    clock.now += 200
    assert news.look() is None
    flink.jobs = [StandInJob("launch", running=1)]
    clock.now += 200
    assert news.look() is None


def test_without_a_cluster_there_is_no_news(clock):
    news = JobNews(beam_options([]), clock)
    clock.now += 300
    assert news.look() is None
