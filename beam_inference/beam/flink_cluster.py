"""A Flink cluster, asked by its REST interface: slots, settings, jobs; and to cancel one."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from http.client import HTTPException
from typing import TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions
from pydantic import AliasPath, BaseModel, Field, RootModel, ValidationError

from beam_inference.beam.portable_engines import flink_url
from beam_inference.errors import BeamInferenceError

_ANSWER_SECONDS = 5.0
_MOST_BYTES = 2**24
_SECURED = (401, 403)


class FlinkError(BeamInferenceError):
    """A Flink cluster does not answer, or not as Flink does.

    Attributes:
        is_secured: whether it answers, but not to everybody.
    """

    def __init__(self, message: str, *, is_secured: bool = False) -> None:
        super().__init__(message)
        self.is_secured = is_secured


class TaskManager(BaseModel):
    """A TaskManager.

    Attributes:
        id: name, unique in its cluster.
        path: where its actor is, such as ``pekko.tcp://flink@10.0.0.7:40513/user/rpc/…``.
        slots: how many slots it has.
        free_slots: how many of them no job has.
        cores: CPU cores that it sees.
    """

    id: str
    path: str = ""
    slots: int = Field(alias="slotsNumber", ge=0)
    free_slots: int = Field(alias="freeSlots", ge=0)
    cores: int = Field(1, validation_alias=AliasPath("hardware", "cpuCores"), ge=1)

    @property
    def host(self) -> str:
        """The host that it is on, as far as its path says."""
        return self.path.partition("@")[2].rpartition("/user/")[0].rpartition(":")[0]


class FlinkJob(BaseModel):
    """A job on a cluster.

    Attributes:
        id: Flink's id of it.
        name: its name.
        state: such as RUNNING, RESTARTING, CANCELED.
        begun_ms: when it began, since 1970.
        running_tasks: tasks that have a slot and run.
    """

    id: str = Field(alias="jid")
    name: str
    state: str
    begun_ms: int = Field(0, alias="start-time")
    running_tasks: int = Field(0, validation_alias=AliasPath("tasks", "running"))

    @property
    def is_over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state in ("FINISHED", "FAILED", "CANCELED")


class FlinkFailure(BaseModel):
    """Why a task of a job failed.

    Attributes:
        trace: the stack of a Java exception.
        at_ms: when it failed, since 1970.
    """

    trace: str = Field(alias="stacktrace")
    at_ms: int = Field(alias="timestamp")


class _History(BaseModel):
    entries: list[FlinkFailure]


class _Exceptions(BaseModel):
    history: _History = Field(alias="exceptionHistory")


class _Overview(BaseModel):
    version: str = Field(alias="flink-version")


class _TaskManagers(BaseModel):
    taskmanagers: list[TaskManager]


class _Jobs(BaseModel):
    jobs: list[FlinkJob]


class _Setting(BaseModel):
    key: str
    value: str


class _Settings(RootModel[list[_Setting]]):
    pass


_Answer = TypeVar("_Answer", bound=BaseModel)


@dataclass(frozen=True)
class OwnJob:
    """Where the job of a pipeline will be.

    Attributes:
        cluster: the Flink cluster.
        name: the job's name.
    """

    cluster: FlinkCluster
    name: str

    def find(self) -> FlinkJob | None:
        """The job, if it has arrived; the last one of several. Raises FlinkError."""
        named = [job for job in self.cluster.jobs() if job.name == self.name]
        return max(named, key=lambda job: job.begun_ms, default=None)


def own_job(options: PipelineOptions) -> OwnJob | None:
    """Where the job of a pipeline will be, if that is a Flink cluster that can be asked.

    Args:
        options: of Beam, before the pipeline was built, with the job's name.
    """
    url = flink_url(options)
    if url is None:
        return None
    return OwnJob(FlinkCluster(url), str(options.view_as(GoogleCloudOptions).job_name))


class FlinkCluster:
    """The cluster whose JobManager has its REST interface at a URL.

    Each method makes one request of at most some seconds, and raises FlinkError where it fails.

    Args:
        url: such as ``http://host:8081``.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def version(self) -> str:
        """Flink's version, such as "1.19.3"."""
        return self._ask("/overview", _Overview).version

    def task_managers(self) -> list[TaskManager]:
        """The TaskManagers that have registered."""
        return self._ask("/taskmanagers", _TaskManagers).taskmanagers

    def settings(self) -> dict[str, str]:
        """The JobManager's configuration."""
        found = self._ask("/jobmanager/config", _Settings).root
        return {setting.key: setting.value for setting in found}

    def jobs(self) -> list[FlinkJob]:
        """All jobs that the cluster remembers."""
        return self._ask("/jobs/overview", _Jobs).jobs

    def last_failure(self, job: FlinkJob) -> FlinkFailure | None:
        """The latest of a job's failures, if there was one."""
        entries = self._ask(f"/jobs/{job.id}/exceptions", _Exceptions).history.entries
        return max(entries, key=lambda failure: failure.at_ms, default=None)

    def page_of(self, job: FlinkJob) -> str:
        """Address of a job's page, for people."""
        return f"{self.url}/#/job/running/{job.id}"

    def cancel(self, job: FlinkJob) -> None:
        """Cancel a job."""
        self._request(f"/jobs/{job.id}?mode=cancel", "PATCH")

    def _ask(self, path: str, kind: type[_Answer]) -> _Answer:
        try:
            return kind.model_validate_json(self._request(path))
        except ValidationError as error:
            raise FlinkError(
                f"{self.url}{path} does not answer as Flink does ({error.error_count()} values are "
                "missing or of another kind). Is it the REST interface of a JobManager?"
            ) from None

    def _request(self, path: str, method: str = "GET") -> bytes:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise FlinkError(f"{self.url} is no address of a Flink cluster: http://host:8081 is")
        try:
            with urlopen(Request(self.url + path, method=method), timeout=_ANSWER_SECONDS) as got:
                answer: bytes = got.read(_MOST_BYTES)
                return answer
        except HTTPError as error:
            with error:
                raise FlinkError(
                    f"{self.url}{path} answers {error.code} {error.reason}",
                    is_secured=error.code in _SECURED,
                ) from None
        except (URLError, HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise FlinkError(
                f"{self.url} does not answer: {reason}",
                is_secured=isinstance(reason, ssl.SSLCertVerificationError),
            ) from None
