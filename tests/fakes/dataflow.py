"""A stand-in for Dataflow's REST API v1b3 on localhost.

It knows the requests of Beam's DataflowRunner, of Google's client and of Airflow.

In a test: `with DataflowStandIn(work) as dataflow: …`. No job is executed by itself: `work` is
called with each job, in a thread of its own, and returns the state in which the job ends. For other
processes:
`PYTHONPATH=tests python -m fakes.dataflow --port 8081 --seconds 4 --state JOB_STATE_FAILED`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fakes.http_stand_in import HttpStandIn, Request, Response

Json = dict[str, Any]

QUEUED = "JOB_STATE_QUEUED"
RUNNING = "JOB_STATE_RUNNING"
CANCELLING = "JOB_STATE_CANCELLING"
DONE = "JOB_STATE_DONE"
FAILED = "JOB_STATE_FAILED"
CANCELLED = "JOB_STATE_CANCELLED"
ACTIVE_STATES = (QUEUED, RUNNING, CANCELLING)
LOST = "lost"
"""A job that the service knows nothing of any more."""

_PAGE = 2  # jobs per page of a list: few, so that clients must turn pages
_LOCATED = r"/v1b3/projects/(?P<project>[^/]+)/locations/(?P<location>[^/]+)"
_ANYWHERE = r"/v1b3/projects/(?P<project>[^/]+)(?:/locations/(?P<location>[^/]+))?"
_JOB = rf"{_ANYWHERE}/jobs/(?P<id>[^/:]+)"
ROUTES = [  # method, path, the stand-in's method that answers
    ("POST", rf"{_LOCATED}/jobs", "_create_job"),
    ("POST", rf"{_LOCATED}/flexTemplates:launch", "_launch_template"),
    ("GET", rf"{_ANYWHERE}/jobs(?::aggregated)?", "_list"),
    ("GET", _JOB, "_get"),
    ("PUT", _JOB, "_update"),
    ("GET", rf"{_JOB}/messages", "_messages"),
    ("GET", rf"{_JOB}/metrics", "_metrics"),
]


@dataclass
class Job:
    """One job.

    Attributes:
        body: As it came: a job with its steps and environment, or the launch parameter of a Flex
            Template.
        state: As the API calls it; `LOST` for a job that it denies knowledge of.
        messages: Texts of its log, to be set by a test.
        metrics: In the API's form, to be set by a test.
        hiccups: How many more times a question for this job is answered with an internal error, to
            be set by a test.
        cancelled: Set when somebody asks for cancellation.
    """

    id: str
    name: str
    project: str
    location: str
    body: Json
    state: str = QUEUED
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    changed: datetime = field(default_factory=lambda: datetime.now(UTC))
    messages: list[str] = field(default_factory=list)
    metrics: list[Json] = field(default_factory=list)
    hiccups: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def is_active(self) -> bool:
        """Not ended yet."""
        return self.state in ACTIVE_STATES

    def enter(self, state: str) -> None:
        """Go over into a state."""
        self.state = state
        self.changed = datetime.now(UTC)

    def view(self) -> Json:
        """As the API shows it; without steps and environment, which only a full view has."""
        return {
            "id": self.id,
            "name": self.name,
            "projectId": self.project,
            "location": self.location,
            "type": "JOB_TYPE_BATCH",
            "currentState": self.state,
            "currentStateTime": _timestamp(self.changed),
            "createTime": _timestamp(self.created),
            **(
                {"clientRequestId": self.body["clientRequestId"]}
                if "clientRequestId" in self.body
                else {}
            ),
        }


Work = Callable[[Job], str]


class DataflowStandIn(HttpStandIn):
    """Serves the API at `url`, while it is entered.

    Args:
        work: What is done in a job's name; its result is the job's last state, or `LOST`. When the
            job is to be cancelled (`job.cancelled` is set) it should return; the job is then
            cancelled, whatever the result.
        port: Of localhost; 0 takes a free one.

    Attributes:
        jobs: By id, in the order of creation.
        launches: The launch parameters of every Flex Template launch that was accepted.
        faults: Requests that the stand-in does not know, and exceptions of `work`; leaving it
            raises them.
    """

    def __init__(self, work: Work = lambda job: DONE, port: int = 0) -> None:
        super().__init__(port)
        self.work = work
        self.jobs: dict[str, Job] = {}
        self.launches: list[Json] = []
        self._lock = threading.Lock()

    def __exit__(self, kind: object, *rest: object) -> None:
        for job in self.jobs.values():
            job.cancelled.set()
        super().__exit__(kind, *rest)

    def _receive(self, request: Request) -> Response:
        for method, path, name in ROUTES:
            match = re.fullmatch(path, request.path)
            if match and method == request.method:
                compressed = request.header("Content-Encoding") == "gzip"
                body = json.loads(
                    (gzip.decompress(request.body) if compressed else request.body) or b"{}"
                )
                with self._lock:
                    answer: Response = getattr(self, name)(match.groupdict(), body, request.query)
                return answer
        self.faults.append(f"{request.method} {request.target}")
        return _error(404, f"no such method: {request.method} {request.path}")

    def _create_job(self, where: Json, body: Json, _: Json) -> Response:
        """Create a job, or return the active one of the same name, as the API documents."""
        job = self._active(body["name"]) or self._begin(body["name"], where, body)
        return Response.of_json(job.view())

    def _launch_template(self, where: Json, body: Json, _: Json) -> Response:
        launch = body["launchParameter"]
        if missing := {"jobName", "containerSpecGcsPath"} - launch.keys():
            return _error(400, f"launchParameter lacks {', '.join(sorted(missing))}")
        if any(not isinstance(value, str) for value in launch.get("parameters", {}).values()):
            return _error(400, f"parameters must be strings: {launch['parameters']}")
        if not re.fullmatch("[a-z]([-a-z0-9]{0,1022}[a-z0-9])?", launch["jobName"]):
            return _error(400, f"invalid job name {launch['jobName']}")
        if self._active(launch["jobName"]):
            return _error(409, f"There is already an active job named {launch['jobName']}")
        if body.get("validateOnly"):
            return Response.of_json({})
        self.launches.append(launch)
        return Response.of_json({"job": self._begin(launch["jobName"], where, launch).view()})

    def _list(self, where: Json, _: Json, query: Json) -> Response:
        jobs = [job for job in self.jobs.values() if job.state != LOST and self._is_in(job, where)]
        if name := query.get("name"):
            jobs = [job for job in jobs if job.name == name]
        if (kind := query.get("filter")) in ("ACTIVE", "TERMINATED"):
            jobs = [job for job in jobs if job.is_active == (kind == "ACTIVE")]
        start = int(query.get("pageToken") or 0)
        page: Json = {"jobs": [job.view() for job in jobs[start : start + _PAGE]]} if jobs else {}
        if start + _PAGE < len(jobs):
            page["nextPageToken"] = str(start + _PAGE)
        return Response.of_json(page)

    def _get(self, where: Json, _: Json, __: Json) -> Response:
        job = self._job(where)
        if job is None:
            return _error(404, f"no job {where['id']}")
        if job.hiccups:
            job.hiccups -= 1
            return _error(500, "an injected failure")
        return Response.of_json(job.view())

    def _update(self, where: Json, body: Json, _: Json) -> Response:
        job = self._job(where)
        if job is None:
            return _error(404, f"no job {where['id']}")
        if body.get("requestedState") not in (CANCELLED, 5):  # Google's client writes its number
            return _error(400, f"expected requestedState {CANCELLED}, found {body}")
        if job.is_active:
            job.enter(CANCELLING)
            job.cancelled.set()
        return Response.of_json(job.view())

    def _messages(self, where: Json, _: Json, __: Json) -> Response:
        job = self._job(where)
        if job is None:
            return _error(404, f"no job {where['id']}")
        common = {"time": _timestamp(job.created), "messageImportance": "JOB_MESSAGE_BASIC"}
        messages = [
            {"id": str(i), "messageText": text, **common} for i, text in enumerate(job.messages)
        ]
        return Response.of_json({"jobMessages": messages})

    def _metrics(self, where: Json, _: Json, __: Json) -> Response:
        job = self._job(where)
        if job is None:
            return _error(404, f"no job {where['id']}")
        return Response.of_json({"metricTime": _timestamp(job.changed), "metrics": job.metrics})

    def _begin(self, name: str, where: Json, body: Json) -> Job:
        id = f"{datetime.now(UTC):%Y-%m-%d_%H_%M_%S}-{uuid.uuid4().int % 10**18}"
        job = Job(id, name, where["project"], where["location"], body)
        self.jobs[id] = job
        threading.Thread(target=self._carry_out, args=(job,), daemon=True).start()
        return job

    def _carry_out(self, job: Job) -> None:
        with self._lock:
            if job.state == QUEUED:
                job.enter(RUNNING)
        try:
            last = self.work(job)
        except Exception:
            self.faults.append(traceback.format_exc())
            last = FAILED
        with self._lock:
            job.enter(CANCELLED if job.state == CANCELLING else last)

    def _active(self, name: str) -> Job | None:
        return next((job for job in self.jobs.values() if job.name == name and job.is_active), None)

    def _job(self, where: Json) -> Job | None:
        job = self.jobs.get(where["id"])
        return job if job and job.state != LOST and self._is_in(job, where) else None

    @staticmethod
    def _is_in(job: Job, where: Json) -> bool:
        return job.project == where["project"] and where["location"] in (None, job.location)


def _timestamp(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _error(code: int, message: str) -> Response:
    return Response.of_json(
        {"error": {"code": code, "message": message, "status": _STATUS[code]}}, code
    )


_STATUS = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 409: "ALREADY_EXISTS", 500: "INTERNAL"}


def main() -> None:
    """Serve until killed; every job runs for the given seconds and ends in the given state."""
    parser = argparse.ArgumentParser(description="A stand-in for Dataflow's REST API.")
    parser.add_argument("--port", type=int, default=8081)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each job runs")
    parser.add_argument(
        "--state", default=DONE, help=f"each job's last state: {DONE}, {FAILED}, … or {LOST}"
    )
    known = parser.parse_args()

    def work(job: Job) -> str:
        print(f"{job.id} {job.name} {json.dumps(job.body)[:2000]}", flush=True)
        job.cancelled.wait(known.seconds)
        return str(known.state)

    with DataflowStandIn(work, known.port) as dataflow:
        print(f"serving at {dataflow.url}", flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
