"""The workers of a process for several volumes, which share its network and its device."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from beam_inference.errors import UserError, WorkerFault
from beam_inference.job.cohort import CohortLaunch
from beam_inference.worker.open_job import ProcessNetwork, load_job_network
from beam_inference.worker.worker import Worker

logger = logging.getLogger(__name__)


class VolumeWorkers:
    """Opens volumes as their chunks come, and closes those that were not used for longest.

    As many are open as the process has threads, because each thread works on one.

    Args:
        launch: the launch that this process works for.
    """

    def __init__(self, launch: CohortLaunch) -> None:
        self._launch = launch
        self._lock = threading.Lock()
        self._network: ProcessNetwork | None = None
        self._workers = OrderedDict[str, Worker]()
        self._faulty: set[str] = set()
        self._has_opened = False

    def find_worker(self, name: str) -> Worker | None:
        """Find the worker of a volume, which is opened if it is not.

        Returns:
            The worker; None if the volume cannot be opened, which is recorded in its state folder.

        Raises:
            WorkerFault: this process cannot open any volume, or not the network.
            UserError: the network cannot be loaded.
        """
        with self._lock:  # one at a time, as they share the network
            worker = self._workers.pop(name, None)
            if worker is None and name not in self._faulty:
                worker = self._open(name)
            if worker is None:
                return None
            self._workers[name] = worker
            while len(self._workers) > self._launch.threads_per_process:
                self._workers.popitem(last=False)
            return worker

    def _open(self, name: str) -> Worker | None:
        launch = self._launch.of_volume(name)
        if self._network is None:
            self._network = ProcessNetwork(load_job_network(launch))
        try:
            worker = Worker(launch, network=self._network)
        except (UserError, WorkerFault) as error:
            # What no volume can be opened with is the process, or what all volumes share.
            if isinstance(error, WorkerFault) and not self._has_opened:
                raise
            logger.warning("volume %s cannot be opened: %s", name, error)
            self._faulty.add(name)
            self._launch.volume_state(name).write_fault(str(error))
            return None
        self._has_opened = True
        return worker
