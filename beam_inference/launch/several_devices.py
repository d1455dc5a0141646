"""One worker process for each GPU of this machine, where a launch leaves the processes open."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from beam_inference.beam.dataflow_gpus import runner_of_flags
from beam_inference.config.job import JobConfig
from beam_inference.engines.devices import count_devices
from beam_inference.launch.decide import decide_device

logger = logging.getLogger(__name__)

_LOCAL_RUNNERS = ("directrunner", "fnapirunner")
_MODES = {"--direct_running_mode", "--direct_num_workers"}


def with_process_per_device(config: JobConfig, flags: Sequence[str]) -> list[str]:
    """Beam's flags, with those for as many processes as the job's kind of device is there.

    Process k takes device k; see :func:`beam_inference.engines.devices.claim_device`. Flags of
    another runner, or that state the processes, stay as they are.

    Args:
        config: the job file.
        flags: Beam's command-line flags as given.
    """
    names = {flag.split("=")[0] for flag in flags}
    if names & _MODES or runner_of_flags(flags) not in _LOCAL_RUNNERS:
        return list(flags)
    count = count_devices(decide_device(config, None))
    if count < 2:
        return list(flags)
    logger.info("%d devices: one worker process for each", count)
    return [*flags, "--direct_running_mode=multi_processing", f"--direct_num_workers={count}"]
