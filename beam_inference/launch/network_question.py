"""What a launch asks a worker about its network, where the launcher is no machine that computes.

A worker plans the job as the launcher has, decides the device by what it has itself, and tries the
network as a launch on its machine would. Its answer, or the mistake that it has found, comes back
as a record in the job's state folder, because not every runner hands anything else back.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from beam_inference.config.devices import DefiniteDevice
from beam_inference.config.engines import DefiniteEngineName
from beam_inference.config.fields import Frozen, SafeText, describe_fault
from beam_inference.config.job import JobConfig
from beam_inference.environment import available_memory
from beam_inference.errors import (
    AlignmentError,
    ConfigError,
    EngineError,
    ModelContractError,
    StateError,
    UserError,
    VolumeError,
    WorkerFault,
)
from beam_inference.job.messages import check_versions, own_versions
from beam_inference.job.place import Place
from beam_inference.job.state import State
from beam_inference.launch.kept_trial import TrialFindings, TriedNetwork, find_out_about_network
from beam_inference.launch.memory import check_memory, check_trial_memory
from beam_inference.launch.planned_job import NetworkNeeds, PlannedJob, plan_job
from beam_inference.models.fetch import local_model
from beam_inference.models.hashes import model_sha256
from beam_inference.models.trust import Trust

logger = logging.getLogger(__name__)

_MOST_FACTS = 64
_LONGEST_TEXT = 100_000
_ENGINE_NAME: TypeAdapter[str] = TypeAdapter(DefiniteEngineName)
_Host = Annotated[SafeText, Field(max_length=255)]
_Text = Annotated[SafeText, Field(max_length=_LONGEST_TEXT)]

_KINDS: Mapping[str, type[UserError]] = {
    kind.__name__: kind
    for kind in (
        AlignmentError,
        ConfigError,
        EngineError,
        ModelContractError,
        StateError,
        UserError,
        VolumeError,
    )
}


@dataclass(frozen=True, slots=True)
class NetworkQuestion:
    """A question to a worker: small, and picklable.

    Attributes:
        config: the job file as JSON, with the choices that the launcher has made.
        state_url: the job's state folder, where the answer is recorded.
        launch: name of the launch that asks.
        model_sha256: hash of the network's files.
        needs_bound: whether the prediction bound is to be found.
        trust: which code that the network's files carry may run.
        place: where the workers run, as the launcher sees it.
        versions: of this package and of Beam, where the launch is made.
    """

    config: str
    state_url: str
    launch: str
    model_sha256: str
    needs_bound: bool
    trust: Trust
    place: Place
    versions: str = field(default_factory=own_versions)

    def read_config(self) -> JobConfig:
        """Return the job file."""
        return JobConfig.model_validate_json(self.config)

    def state(self) -> State:
        """Return the job's state folder."""
        return State(self.state_url, self.read_config().storage)


class WorkerChoice(Frozen):
    """What a worker has decided, and found out about the network.

    Attributes:
        host: its machine.
        device: where the network runs.
        description: what of the engine determines bits.
        findings: what its trial has found.
    """

    host: _Host
    device: DefiniteDevice
    description: dict[_Text, _Text] = Field(max_length=_MOST_FACTS)
    findings: TrialFindings

    @field_validator("findings")
    @classmethod
    def _check_engine(cls, findings: TrialFindings) -> TrialFindings:
        _ENGINE_NAME.validate_python(findings.engine)  # one that only workers have cannot be named
        return findings

    @property
    def tried(self) -> TriedNetwork:
        """The network as it was tried."""
        return TriedNetwork(self.findings, self.description)


class WorkerRefusal(Frozen):
    """A mistake that a worker has found.

    Attributes:
        host: its machine.
        kind: name of the error's class.
        message: text of the error.
    """

    host: _Host
    kind: _Text
    message: _Text

    @property
    def error(self) -> UserError:
        """The error, as the launch raises it."""
        return _KINDS.get(self.kind, UserError)(self.message)


AskWorker: TypeAlias = Callable[[NetworkQuestion], WorkerChoice]
"""Has a worker answer a question. Raises the UserError that the worker has found."""

_ANSWER: TypeAdapter[WorkerChoice | WorkerRefusal] = TypeAdapter(WorkerChoice | WorkerRefusal)


def make_question(
    planned: PlannedJob,
    place: Place,
    state: State,
    launch: str,
    *,
    sha256: str,
    needs_bound: bool,
    trust: Trust,
) -> NetworkQuestion:
    """Make the question about the network of a job.

    What the launcher decides stands in the question, so that the worker cannot decide otherwise:
    it may have another number of cores, and may not reach a levels file.

    Args:
        planned: the job.
        place: where its workers run.
        state: its state folder.
        launch: name of the launch.
        sha256: hash of the network's files.
        needs_bound: whether the prediction bound is to be found.
        trust: which code that the network's files carry may run.
    """
    config = planned.config
    settings = planned.settings
    model = config.model.model_copy(update={"normalize": settings.normalize})
    inference = config.inference.model_copy(
        update={"threads": settings.threads, "chunk_shape": settings.chunk_shape}
    )
    decided = config.model_copy(update={"model": model, "inference": inference})
    return NetworkQuestion(
        config=decided.model_dump_json(),
        state_url=state.url,
        launch=launch,
        model_sha256=sha256,
        needs_bound=needs_bound,
        trust=trust,
        place=place,
    )


def answer_question(question: NetworkQuestion) -> WorkerChoice | WorkerRefusal:
    """Decide, on this machine, what a launch elsewhere asks; nothing is written.

    Args:
        question: the question.

    Raises:
        WorkerFault: this machine has other versions, or other files of the network.
    """
    check_versions(question.versions)
    host = socket.gethostname()
    try:
        planned, tried = _try_network(question)
    except UserError as error:
        kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _KINDS)
        message = str(error)
        if not isinstance(error, ModelContractError):
            # such as a path: what it says of this machine is not true of the launcher's
            message = f"on the worker {host}: {message}"
        return WorkerRefusal(host=host, kind=kind, message=message)
    return WorkerChoice(
        host=host,
        device=planned.settings.device,
        description=dict(tried.description),
        findings=tried.findings,
    )


def _try_network(question: NetworkQuestion) -> tuple[PlannedJob, TriedNetwork]:
    config = question.read_config()
    place = Place(
        processes_per_host=question.place.processes_per_host,
        threads_per_process=question.place.threads_per_process,
    )
    planned = plan_job(config, place)
    if planned.settings.device == "cpu":
        check_trial_memory(planned.memory(place), available_memory())
    model = local_model(config.model, config.storage, question.model_sha256)
    if (sha256 := model_sha256(model)) != question.model_sha256:
        raise WorkerFault(
            f"the network's files have the sha256 {sha256} on this worker, "
            f"{socket.gethostname()}, and {question.model_sha256} where the job is launched: they "
            "were changed since, or this machine has others."
        )
    tried = find_out_about_network(
        planned,
        place,
        model,
        trust=question.trust,
        earlier=None,
        needs_bound=question.needs_bound,
    )
    found = tried.findings
    needs = NetworkNeeds.of_engine(found.engine, found.fitting_batch_size, found.working_set_bytes)
    for memory in planned.all_memory(place, needs):
        check_memory(memory, place, planned.settings.device)
    return planned, tried


def record_answer(question: NetworkQuestion) -> None:
    """Answer a question on this machine, unless it is answered, or its launch was asked to stop.

    Raises:
        WorkerFault: this machine cannot answer, or the state folder cannot be written.
    """
    state = question.state()
    is_stopped = state.has_stop_request(question.launch)
    if is_stopped or state.read_answer(question.launch) is not None:
        return
    answer = answer_question(question)
    state.write_answer(question.launch, answer.model_dump_json())


def read_answer(state: State, launch: str) -> WorkerChoice | WorkerRefusal | None:
    """Read what a worker has answered to a launch; None if none has.

    Raises:
        StateError: the record cannot be understood.
    """
    text = state.read_answer(launch)
    if text is None:
        return None
    try:
        return _ANSWER.validate_json(text)
    except ValidationError as error:
        raise StateError(
            f"{state.url}/launches/{launch}.answer cannot be understood "
            f"({describe_fault(error)}): it is damaged, or the worker has another version"
        ) from None
