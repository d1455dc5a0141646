"""Flags of Beam that are refused, or without effect."""

import pytest

from beam_inference.beam.flags import beam_options, warn_of_unused_flags
from beam_inference.errors import ConfigError

PORTABLE = ["--runner=PortableRunner", "--job_endpoint=localhost:1"]
DATAFLOW = ["--runner=DataflowRunner", "--sdk_container_image=image"]


@pytest.mark.parametrize("runner", [[], ["--runner=DirectRunner"], PORTABLE, DATAFLOW])
def test_streaming_is_refused(runner):
    with pytest.raises(ConfigError, match="--streaming: a job has an end"):
        beam_options([*runner, "--streaming"])


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        (["--machine_type=n1-standard-4"], "--machine_type is without effect: the runner FnApi"),
        (["--region", "r", "--num_workers=3"], "--region, --num_workers are without effect"),
        (["--environment_type=EXTERNAL"], "--environment_type is without effect"),
        ([*PORTABLE, "--direct_num_workers=2"], "--direct_num_workers is without effect"),
        ([*DATAFLOW, "--direct_running_mode=in_memory"], "the runner DataflowRunner"),
    ],
)
def test_flags_that_the_runner_does_not_use_are_told(flags, idle, caplog):
    warn_of_unused_flags(flags, beam_options(flags))
    assert idle in caplog.text


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--direct_num_workers=2"],
        ["--labels=a=b", "--temp_location=/tmp"],
        [*PORTABLE, "--environment_type=EXTERNAL", "--job_name=a"],
        [*DATAFLOW, "--machine_type=n1-standard-4", "--region=r", "--num_workers=3"],
    ],
)
def test_flags_that_are_used_are_not_told(flags, caplog):
    warn_of_unused_flags(flags, beam_options(flags))
    assert caplog.text == ""
