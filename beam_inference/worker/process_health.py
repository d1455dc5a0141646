"""Whether a worker process is itself at fault for its failed chunks."""

from __future__ import annotations

from beam_inference.arrays import AnyArray
from beam_inference.errors import ChunkFault, WorkerFault
from beam_inference.worker.non_finite import is_finite
from beam_inference.worker.open_job import OpenJob
from beam_inference.worker.trial import try_network

SICK_AFTER = 3
"""If so many first chunks of a process all fail in the network, the network is tried again."""


class ProcessHealth:
    """Suspects a process whose first chunks all fail in the network.

    Its methods are called by one thread at a time.

    Args:
        opened: the job and its network.
    """

    def __init__(self, opened: OpenJob) -> None:
        self._opened = opened
        self._failures = 0
        self._is_proven = False

    def note_success(self) -> None:
        """Note that a chunk has passed the network, which clears the process of suspicion."""
        self._is_proven = True

    def note_failure(self, fault: ChunkFault, cutout: AnyArray) -> None:
        """Note that a chunk failed in the network, and try the network if it is one too many.

        Args:
            fault: what went wrong.
            cutout: the chunk's input; if that is not finite, the process is not at fault.

        Raises:
            WorkerFault: the network fails on a patch of the ROI, so the chunks are not at fault.
        """
        if self._is_proven or not is_finite(cutout):
            return
        self._failures += 1
        if self._failures < SICK_AFTER:
            return
        opened = self._opened
        try:
            try_network(opened.predictor, opened.job.config, opened.input, opened.job.plan)
        except Exception:
            raise WorkerFault(
                f"the first {SICK_AFTER} chunks of this process all failed in the network, the "
                f"last with: {fault}; and so does a patch from the middle of the ROI. The network "
                "or the device is at fault, not the chunks."
            ) from fault
        self._is_proven = True  # The network works: these chunks are bad.
