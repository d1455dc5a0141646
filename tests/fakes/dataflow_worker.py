"""Execute a staged ``pipeline.pb`` in one process, with four attempts per bundle as on Dataflow.

    python -m fakes.dataflow_worker PIPELINE.PB

The container image of its environments is taken to be this process; what they would have to install
is refused.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner

NOTE = b"submission_environment_dependencies.txt"  # what the launcher had, for the record


def main(path: str) -> int:
    """Run the pipeline; 0 if it came to its end."""
    logging.basicConfig(level=logging.WARNING)
    pipeline = beam_runner_api_pb2.Pipeline.FromString(Path(path).read_bytes())
    for environment in pipeline.components.environments.values():
        to_install = [each for each in environment.dependencies if NOTE not in each.role_payload]
        if to_install:
            raise ValueError(
                f"to be installed at start, though the image should have all: {to_install}"
            )
    result = beam.Pipeline.from_runner_api(
        pipeline, BundleBasedDirectRunner(), PipelineOptions([])
    ).run()
    state = result.wait_until_finish()
    counters = {
        counter.key.metric.name: counter.committed
        for counter in result.metrics().query()["counters"]
    }
    print(json.dumps({"state": state, "counters": counters}))
    return 0 if state == "DONE" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
