"""What a job service says of its options: they are accepted as flags, and tell its engine."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc

from beam_inference.beam.engine_checks import ask_engine
from beam_inference.beam.flags import beam_options
from beam_inference.beam.job_service import list_service_options
from beam_inference.errors import ConfigError


class StandIn(beam_job_api_pb2_grpc.JobServiceServicer):
    """A job service that only describes its options."""

    def __init__(self, names):
        self.names = names

    def DescribePipelineOptions(self, request, context):
        return beam_job_api_pb2.DescribePipelineOptionsResponse(
            options=[beam_job_api_pb2.PipelineOptionDescriptor(name=name) for name in self.names]
        )


@pytest.fixture
def flags_for():
    """A function that starts a job service with some options, and gives the flags to it."""
    servers = []

    def start(*names):
        server = grpc.server(ThreadPoolExecutor(1))
        beam_job_api_pb2_grpc.add_JobServiceServicer_to_server(StandIn(names), server)
        port = server.add_insecure_port("localhost:0")
        server.start()
        servers.append(server)
        return [
            "--runner=PortableRunner",
            f"--job_endpoint=localhost:{port}",
            "--environment_type=LOOPBACK",
        ]

    yield start
    for server in servers:
        server.stop(0).wait()


def test_options_of_the_job_service_are_flags(flags_for):
    flags = flags_for("flink_master", "execution_mode_for_batch")
    endpoint = flags[1].partition("=")[2]
    assert "execution_mode_for_batch" in list_service_options(endpoint)
    beam_options([*flags, "--execution_mode_for_batch=BATCH"])
    beam_options([*flags, "--execution_mode_for_batch", "BATCH"])
    with pytest.raises(ConfigError, match="unknown flag --execution_mode_for_bitch"):
        beam_options([*flags, "--execution_mode_for_bitch=BATCH"])


@pytest.mark.parametrize(("runner", "engine"), [("Flink", "Spark"), ("Spark", "Flink")])
def test_the_runner_of_another_engine_is_refused(runner, engine, flags_for):
    flags = [*flags_for(f"{engine.lower()}_master"), f"--runner={runner}Runner"]
    with pytest.raises(ConfigError, match=f"is a job server for {engine}, .* --runner={engine}"):
        ask_engine(beam_options(flags))


def test_a_kept_job_server_of_flink_is_told_to_need_parallelism(flags_for):
    flags = flags_for("flink_master")
    assert "--parallelism=N takes more" in ask_engine(beam_options(flags)).notes[0]
    assert not ask_engine(beam_options([*flags, "--parallelism=2"])).notes
