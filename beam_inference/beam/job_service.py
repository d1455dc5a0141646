"""Asks a Beam job service which options it takes, besides those that Beam's Python knows."""

from __future__ import annotations

import re

import grpc
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc

from beam_inference.beam.job_server import job_server
from beam_inference.errors import ConfigError

_ANSWER_SECONDS = 5.0


def list_service_options(endpoint: str) -> frozenset[str]:
    """Names of the options that a job service takes.

    Args:
        endpoint: ``host:port``.

    Raises:
        ConfigError: it does not answer.
    """
    with grpc.insecure_channel(endpoint) as channel:
        stub = beam_job_api_pb2_grpc.JobServiceStub(channel)
        try:
            answer = stub.DescribePipelineOptions(
                beam_job_api_pb2.DescribePipelineOptionsRequest(), timeout=_ANSWER_SECONDS
            )
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return frozenset()
            raise ConfigError(
                f"--job_endpoint={endpoint}: no job service answers there ({_reason(error)}). "
                "Start Beam's job server first, or name the port where it takes jobs (--job-port)."
            ) from None
    return frozenset(option.name for option in answer.options)


def list_engine_options(options: PipelineOptions) -> frozenset[str]:
    """Names of the options that a portable runner's engine takes.

    A job server of our own is started for this, where the launch would start one.

    Args:
        options: of Beam, those of a portable runner.

    Raises:
        BeamInferenceError: the job service does not answer, or cannot be started.
    """
    with job_server(options) as led:
        endpoint = led.view_as(PortableOptions).job_endpoint
        if not endpoint or endpoint == "embed":
            return frozenset()
        return list_service_options(endpoint)


def _reason(error: grpc.RpcError) -> str:
    details = str(error.details())
    known = re.search(r"Connection refused|Name or service not known|DNS resolution", details)
    return known[0] if known else f"{error.code().name}: {details[:120]}"
