"""The queue of a process's threads for the device: first come, first served."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from beam_inference.worker.chunk_inference import WaitingChunk


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    chunk: WaitingChunk | None


class DeviceQueue:
    """Threads wait here for their turn on the device; it sees what they wait with."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._places: deque[_Place] = deque()

    @contextmanager
    def turn(self, chunk: WaitingChunk | None = None) -> Iterator[None]:
        """Wait for the device, and keep it while the context is entered.

        Args:
            chunk: the chunk that is to be computed; meanwhile others may compute patches of it.
        """
        place = _Place(chunk)
        with self._changed:
            self._places.append(place)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._places[0] is place)
            yield
        finally:
            with self._changed:
                self._places.remove(place)
                self._changed.notify_all()

    def waiting(self) -> list[WaitingChunk]:
        """The chunks that wait while another one has its turn, the next one first."""
        with self._changed:
            places = [*islice(self._places, 1, None)]
        return [place.chunk for place in places if place.chunk is not None]
