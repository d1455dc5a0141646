"""One launch of a job of several volumes: a launch for each of them, which workers look up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from beam_inference.config.cohort import volume_state_url
from beam_inference.config.storage import Storage
from beam_inference.job.messages import Launch, own_versions
from beam_inference.job.state import State

_LAUNCH = TypeAdapter(Launch)


@dataclass(frozen=True, slots=True)
class CohortLaunch:
    """One launch of a job of several volumes, as its workers need to know it: small, and picklable.

    It holds no launch of a volume: these lie in the volumes' state folders, so that the pipeline
    does not grow with what there is to know of each.

    Attributes:
        state_url: the state folder that all volumes share.
        id: name of this launch, and of that of each volume.
        storage: settings of the object stores.
        threads_per_process: harness threads of a process.
        versions: of this package and of Beam, where the launch was made.
    """

    state_url: str
    id: str
    storage: Storage
    threads_per_process: int
    versions: str = field(default_factory=own_versions)

    def volume_state(self, name: str) -> State:
        """The state folder of a volume."""
        return State(volume_state_url(self.state_url, name), self.storage)

    def record(self, name: str, launch: Launch) -> None:
        """Record the launch of a volume, for the workers.

        Raises:
            WorkerFault: the state folder cannot be written.
        """
        text = _LAUNCH.dump_json(launch).decode()
        self.volume_state(name).write_launch(self.id, text)

    def of_volume(self, name: str) -> Launch:
        """Look up the launch of a volume.

        Raises:
            WorkerFault: it is gone.
        """
        return _LAUNCH.validate_json(self.volume_state(name).read_launch(self.id))


def request_stop(launch: CohortLaunch, names: Iterable[str]) -> None:
    """Ask the workers of a launch, wherever they are, to start no further chunk.

    Raises:
        WorkerFault: a state folder cannot be written.
    """
    for name in names:
        launch.volume_state(name).request_stop(launch.id)
