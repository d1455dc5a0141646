"""What killed launches leave behind in an output and in its state folder."""

from __future__ import annotations

from beam_inference.volumes.drafts import sweep_drafts
from beam_inference.volumes.kvstores import is_within, place_of_url


def sweep_job_drafts(output_url: str, state_url: str) -> int:
    """Remove drafts that killed writers left; see :func:`beam_inference.volumes.drafts`.

    Args:
        output_url: URL of the output.
        state_url: URL of the state folder, which need not lie in the output.

    Returns:
        How many were removed.
    """
    removed = sweep_drafts(output_url)
    if is_within(place_of_url(state_url), place_of_url(output_url)):
        return removed
    return removed + sweep_drafts(state_url)
