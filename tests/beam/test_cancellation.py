"""A pipeline that was asked to stop, where nobody reads that request."""

from fakes.clock import Clock
from fakes.flink_rest import StandInJob

from beam_inference.beam.cancellation import Cancellation
from beam_inference.beam.flags import beam_options, with_job_name


class Result:
    """A pipeline that was submitted."""

    cancelled = False

    def cancel(self):
        self.cancelled = True


def cancellation_on(master, clock):
    flags = ["--runner=FlinkRunner", f"--flink_master={master}"]
    cancellation = Cancellation(with_job_name(beam_options(flags), "launch"), clock)
    cancellation.begin()
    return cancellation


def test_a_job_of_which_nothing_runs_is_cancelled_after_ten_seconds(flink):
    flink.jobs = [StandInJob("another", running=0, id="0" * 32), StandInJob("launch", running=0)]
    clock = Clock()
    cancellation = cancellation_on(flink.url, clock)
    clock.now += 9
    assert cancellation.look(Result()) is None
    clock.now += 2
    assert "it is cancelled" in cancellation.look(Result())
    assert [job.state for job in flink.jobs] == ["RUNNING", "CANCELED"]
    assert cancellation.was_done
    assert not cancellation.is_over(Result())
    clock.now += 11
    assert cancellation.is_over(Result())


def test_a_job_at_work_is_left_to_its_workers(flink):
    flink.jobs = [StandInJob("launch", running=2)]
    clock = Clock()
    cancellation = cancellation_on(flink.url, clock)
    clock.now += 300
    assert cancellation.look(Result()) is None
    assert not cancellation.is_over(Result())


def test_without_a_cluster_to_ask_the_job_service_cancels_after_a_minute():
    clock = Clock()
    cancellation = cancellation_on("localhost:1", clock)
    result = Result()
    clock.now += 59
    assert cancellation.look(result) is None
    clock.now += 2
    assert "has not ended after 61 s" in cancellation.look(result)
    assert result.cancelled


def test_a_job_that_was_never_submitted_is_not_waited_for():
    clock = Clock()
    cancellation = cancellation_on("localhost:1", clock)
    assert not cancellation.is_over(None)
    clock.now += 11
    assert cancellation.is_over(None)


def test_the_local_runner_is_never_cancelled():
    clock = Clock()
    cancellation = Cancellation(beam_options([]), clock)
    cancellation.begin()
    clock.now += 300
    assert cancellation.look(Result()) is None
    assert not cancellation.is_over(None)


def test_a_name_that_was_given_stays():
    flags = ["--runner=FlinkRunner", "--job_name=mine"]
    assert with_job_name(beam_options(flags), "launch").get_all_options()["job_name"] == "mine"
    assert with_job_name(beam_options([]), "launch").get_all_options()["job_name"] is None
