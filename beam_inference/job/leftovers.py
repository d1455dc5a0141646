"""What killed launches leave behind in an output and in its state folder."""

from __future__ import annotations

from beam_inference.config.job import JobConfig
from beam_inference.volumes.drafts import sweep_drafts
from beam_inference.volumes.kvstores import is_within, place_of_url


def sweep_job_drafts(config: JobConfig, state_url: str) -> int:
    """Remove drafts that killed writers left; see :func:`beam_inference.volumes.drafts`.

    Args:
        config: the job file.
        state_url: URL of the state folder, which need not lie in the output.

    Returns:
        How many were removed.
    """
    outputs = [single.output for single in config.by_output.values()]
    urls = [output.path for output in outputs]
    urls += [output.preview_path for output in outputs if output.preview_path is not None]
    removed = sum(map(sweep_drafts, urls))
    if is_within(place_of_url(state_url), place_of_url(config.output.path)):
        return removed
    return removed + sweep_drafts(state_url)
