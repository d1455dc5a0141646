"""A stand-in for the REST interface of a Flink JobManager; its answers are like those of 1.19.3."""

from __future__ import annotations

from dataclasses import dataclass, field

from fakes.http_stand_in import HttpStandIn, Request, Response


@dataclass
class StandInTaskManager:
    """A TaskManager: where it is, and its slots."""

    host: str = "127.0.0.1"
    slots: int = 1
    free: int = 1

    def json(self, number: int) -> dict[str, object]:
        """As ``/taskmanagers`` lists it."""
        address = f"{self.host}:{40000 + number}"
        return {
            "id": f"{address}-2ed796",
            "path": f"pekko.tcp://flink@{address}/user/rpc/taskmanager_0",
            "slotsNumber": self.slots,
            "freeSlots": self.free,
            "hardware": {"cpuCores": 2, "physicalMemory": 25276502016},
        }


@dataclass
class StandInJob:
    """A job, as ``/jobs/overview`` lists it."""

    name: str
    running: int
    id: str = "79c21ce80bdad52f3fda3e001e578f92"
    state: str = "RUNNING"
    failures: list[str] = field(default_factory=list)

    def exceptions(self) -> dict[str, object]:
        """As ``/jobs/ID/exceptions`` has its failures, the latest first."""
        entries = [
            {
                "exceptionName": trace.partition(":")[0],
                "stacktrace": trace,
                "timestamp": 1795479108000 + number,
                "failureLabels": {},
                "taskName": "InferVolume (1/2)",
                "concurrentExceptions": [],
            }
            for number, trace in enumerate(self.failures)
        ]
        history = {"entries": entries[::-1], "truncated": False}
        return {"all-exceptions": [], "truncated": False, "exceptionHistory": history}

    def json(self) -> dict[str, object]:
        """As the REST interface has it."""
        tasks = {"running": self.running, "scheduled": 3}
        return {
            "jid": self.id,
            "name": self.name,
            "state": self.state,
            "start-time": 1795479107454,
            "tasks": tasks,
        }


@dataclass
class FlinkStandIn(HttpStandIn):
    """A cluster whose parts a test sets."""

    version: str = "1.19.3"
    managers: list[StandInTaskManager] = field(default_factory=lambda: [StandInTaskManager()])
    settings: dict[str, str] = field(
        default_factory=lambda: {"restart-strategy.type": "fixed-delay"}
    )
    jobs: list[StandInJob] = field(default_factory=list)
    status: int = 200

    def __post_init__(self) -> None:
        super().__init__()

    def _receive(self, request: Request) -> Response:
        if self.status != 200:
            return Response(self.status)
        if request.method == "PATCH":
            for job in self.jobs:
                if request.target == f"/jobs/{job.id}?mode=cancel":
                    job.state = "CANCELED"
            return Response.of_json({}, 202)
        settings = [{"key": key, "value": value} for key, value in self.settings.items()]
        managers = [manager.json(number) for number, manager in enumerate(self.managers)]
        answers: dict[str, object] = {
            "/overview": {"taskmanagers": len(managers), "flink-version": self.version},
            "/taskmanagers": {"taskmanagers": managers},
            "/jobmanager/config": settings,
            "/jobs/overview": {"jobs": [job.json() for job in self.jobs]},
        }
        answers |= {f"/jobs/{job.id}/exceptions": job.exceptions() for job in self.jobs}
        if request.path not in answers:
            self.faults.append(f"{request.method} {request.target}")
        return Response.of_json(answers.get(request.path, {}))
