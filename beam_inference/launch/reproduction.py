"""Chunks of an output computed again, with the job taken from the output's own metadata alone.

A record is text of whoever could write to the volume. It is held to the rules of a job file, and to
what lies there; and of what it names, nothing that is code is run unless the user says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from beam_inference.config.definite import DefiniteConfig, DefiniteNetwork
from beam_inference.config.factories import factory_parts
from beam_inference.config.fields import Frozen, describe_fault
from beam_inference.config.job_file import rename_paths
from beam_inference.config.network import Network, network_keys
from beam_inference.config.storage import Storage, check_url
from beam_inference.config.volumes import Input
from beam_inference.errors import ConfigError, ModelContractError, StateError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.place import THIS_PROCESS
from beam_inference.job.provenance import (
    NeededFile,
    ProvenanceRecord,
    needed_files,
    no_record,
)
from beam_inference.job.recomputed import Recomputation
from beam_inference.job.recorded_paths import RecordedPaths
from beam_inference.job.resolved_job import NUMERICS, ResolvedJob
from beam_inference.launch.memory import check_memory
from beam_inference.launch.planned_job import NetworkNeeds, plan_job
from beam_inference.launch.prepare import resolve_without_network
from beam_inference.launch.recomputation import recompute_output
from beam_inference.models.loading import loader_of, package_path, suffix_of
from beam_inference.models.local_files import local_path
from beam_inference.models.packages import open_package
from beam_inference.models.trust import Trust
from beam_inference.volumes.kvstores import url_of
from beam_inference.volumes.provenance import read_provenance

Parsed = TypeVar("Parsed", bound=Frozen)

_SAFE_SUFFIXES = (".pt2",)
"""Suffixes of networks with a loader that runs nothing of what a file holds."""

_ENGINE_KEYS = ("engine_version", "converted_from")
"""Properties of an engine that other versions of libraries change."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """Chunks of one job of an output, computed again.

    Attributes:
        record: what the output tells of the job.
        bounds: bounding box of the output, of which the record's box may be a part.
        cautions: what is not as it was when the output was computed; sentences.
        recomputation: how the chunks compare with the output.
    """

    record: ProvenanceRecord
    bounds: BoundingBox
    cautions: list[str]
    recomputation: Recomputation


@dataclass(frozen=True, slots=True)
class Consent:
    """What the user allows that a record names.

    Attributes:
        code: what a job file of the user's own may name without leave: factories, operators with
            code, TorchScript programs.
        network: which code that the network's files carry may run.
    """

    code: bool = False
    network: Trust = Trust.NOTHING


def reproduce(
    output: str,
    share: float,
    *,
    seed: int | None = None,
    files: Mapping[str, str] | None = None,
    consent: Consent | None = None,
    storage: Storage | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Reproduction]:
    """Compute a random share of an output's chunks again, by what its metadata tell.

    Args:
        output: path or URL of the volume.
        share: share of the chunks of each job, above 0 and at most 1.
        seed: seed of the draw; None for a new one.
        files: paths or URLs, by the key of the job file, of what does not lie where it lay.
        consent: what the user allows; by default nothing.
        storage: how object stores are reached.
        progress: is called with the number of chunks of a job computed so far.

    Returns:
        One for each job that has written there.

    Raises:
        UserError: chunks cannot be computed again here: the metadata do not tell how, or something
            is absent or not what it was.
    """
    url = url_of(output)
    storage = storage or Storage()
    consent = consent or Consent()
    if url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{url} is opened as a worker opens it, which http(s):// does not allow: name the same "
            "volume by a local folder, gs:// or s3://"
        )
    jobs = find_jobs(url, files or {}, storage)
    for job in jobs:
        job.check_consent(consent)
    prepared = [job.prepare() for job in jobs]
    return [
        Reproduction(
            job.record,
            ready.job.output_bounds,
            ready.cautions,
            recompute_output(
                ready.job,
                share,
                seed=seed,
                trust=consent.network,
                is_other_engine=ready.is_other_engine,
                progress=progress,
            ),
        )
        for job, ready in zip(jobs, prepared, strict=True)
    ]


def find_jobs(url: str, files: Mapping[str, str], storage: Storage) -> list[RecordedJob]:
    """The jobs that a volume's metadata tell of; nothing that they name is opened.

    Args:
        url: URL of the volume.
        files: paths or URLs, by the key of the job file, of what does not lie where it lay.
        storage: how object stores are reached.

    Raises:
        UserError: the metadata tell of no job, or cannot be understood, or do not say where
            something lies.
    """
    return [RecordedJob.of(each, url, files, storage) for each in _job_records(url, storage)]


def _job_records(url: str, storage: Storage) -> list[ProvenanceRecord]:
    """What the volume tells of jobs.

    Raises:
        StateError: it tells nothing, or of other commands only.
    """
    entries = read_provenance(url, storage)
    if not entries:
        raise StateError(no_record(url))
    of_jobs = [entry for entry in entries if "job" in entry]
    if not of_jobs:
        made_by = ", ".join(str(entry.get("made_by")) for entry in entries)
        raise StateError(
            f"{url} was made by {made_by}, and only what jobs have computed (beam-inference run) "
            "can be computed again: give that command again, with another target, and compare"
        )
    return [_parse(ProvenanceRecord, json.dumps(entry), url) for entry in of_jobs]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A job that can be computed again here.

    Attributes:
        job: the job, with the engine of this machine.
        cautions: see :class:`Reproduction`.
        is_other_engine: whether libraries are others than those that computed the output, or may
            be.
    """

    job: ResolvedJob
    cautions: list[str]
    is_other_engine: bool


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job as a volume's metadata tell of it, with its paths as they are here.

    Attributes:
        record: the record.
        job: its job.
        named: keys of the files that the user has named.
    """

    record: ProvenanceRecord
    job: ResolvedJob
    named: frozenset[str]

    @classmethod
    def of(
        cls, record: ProvenanceRecord, url: str, files: Mapping[str, str], storage: Storage
    ) -> RecordedJob:
        """Understand a record.

        Raises:
            UserError: it cannot be understood, or does not say where something lies.
        """
        values = {"working_set_bytes": 0, **(record.job or {})}
        job = _parse(ResolvedJob, json.dumps(values), url)
        if job.config.outputs:  # further outputs would be opened, and their operators run
            raise StateError(
                f"what the metadata of {url} tell of its job names further outputs, and a record "
                "is of one output alone: it was changed, or is of another version"
            )
        config = _Finder(url, files, storage).find_config(job.config)
        found = job.model_copy(update={"config": config, "requested_normalize": None})
        if record.box != job.plan.chunks.roi:
            raise StateError(
                f"what the metadata of {url} tell does not fit itself: the box {record.box}, of a "
                f"job that computes {job.plan.chunks.roi}: the record was changed"
            )
        # once more: what a path leads to may be what no job may name
        return cls(record, _parse(ResolvedJob, found.model_dump_json(), url), frozenset(files))

    def check_consent(self, consent: Consent) -> None:
        """Refuse code that the record names, unless the user allows it. Raises ConfigError."""
        code = self._named_code()
        if code and not consent.code:
            raise ConfigError(
                f"the record names code, which would run on this machine with your rights: "
                f"{'; '.join(code)}. If you trust whoever wrote that output, and these files, pass "
                "--trust_code; a network that you name yourself with --model needs no leave."
            )

    def _named_code(self) -> list[str]:
        config = self.job.config
        code = []
        for model, section in zip(config.model.members, network_keys(config.model), strict=True):
            key = f"{section}.path"
            if key not in self.named and _is_code(model):
                code.append(f"{key} {model.path}")
        for number, operator in enumerate(config.postprocess):
            if operator.operator == "own" or operator.needed_files:
                code.append(f"postprocess.{number} {operator.display_name}")
        return code

    def prepare(self) -> _Prepared:
        """Compare what lies here with the record.

        Raises:
            UserError: something is absent, or another one.
        """
        recorded = self.job
        if recorded.numerics != NUMERICS:
            raise StateError(
                f"nothing can be computed again: the output was computed by rules of version "
                f"{recorded.numerics}, and this version of beam-inference follows version "
                f"{NUMERICS}, which gives other bits. Use beam-inference {self.record.version}."
            )
        with _hinting_at_flags():
            planned = plan_job(recorded.config, THIS_PROCESS, earlier=recorded)
            here = resolve_without_network(planned, recorded)
        inference = recorded.config.inference
        needs = NetworkNeeds.of_engine(
            inference.engine, inference.patches_per_call, recorded.working_set_bytes
        )
        check_memory(planned.memory(THIS_PROCESS, needs), THIS_PROCESS, inference.device)
        other = [line for line in here.differences(recorded) if not _is_of_version(line)]
        if other:
            raise StateError(
                "nothing can be computed again: what lies here is not what the output was made "
                "of:\n" + "\n".join(f"  {line}" for line in other) + f"\n{_FLAGS}"
            )
        if _hashes(needed_files(here)) != _hashes(self.record.needs):
            raise StateError(
                "nothing can be computed again: what the record lists as needed is not what its "
                "job names: the record was changed. beam-inference show prints both"
            )
        engines = [line for line in here.differences(recorded) if _is_of_version(line)]
        is_other = bool(engines) or inference.mixed_devices
        return _Prepared(here, _cautions(here, recorded, engines), is_other)


class _Finder:
    """Finds the volumes and files that a record names.

    Args:
        url: URL of the volume with the record.
        files: paths or URLs, by key, that the user has named instead.
        storage: how object stores are reached.
    """

    def __init__(self, url: str, files: Mapping[str, str], storage: Storage) -> None:
        for key, path in files.items():
            check_url(path, key)
        self._url = url
        self._files = files
        self._storage = storage
        self._paths = RecordedPaths(url)
        self._used = set[str]()

    def find_config(self, config: DefiniteConfig) -> DefiniteConfig:
        """A recorded job file with the places that its paths mean here.

        Raises:
            UserError: the record does not say where something lies, or names no file of a key.
        """
        sections = {
            "input": self._find_input(config.input),
            "model": self._find_model(config.model),
            "output": config.output.model_copy(update={"path": self._url, "pyramid": None}),
            "storage": self._storage,
        }
        changed = config.model_copy(update=sections)
        found = rename_paths(changed, file=self._find_file, volume=self._find_volume)
        unused = sorted(set(self._files) - self._used)
        if unused:
            raise ConfigError(
                f"--file {', '.join(unused)}: the record names no such file. It names what "
                "beam-inference show lists under needs."
            )
        return found

    def _find_file(self, path: str, key: str) -> str:
        if key in self._files and key != "model.path":
            self._used.add(key)
            return _absolute(self._files[key])
        return self._paths.find_file(path, key)

    def _find_volume(self, path: str, key: str) -> str:
        if key in self._files:
            self._used.add(key)
            return url_of(self._files[key])
        return self._paths.find_volume(path, key)

    def _find_input(self, section: Input) -> Input:
        if section.spec is None:
            return section
        if "input.path" in self._files:
            return section.model_copy(update={"spec": None, "path": "."})
        spec = self._paths.find_spec(section.spec, "input.path")
        return section.model_copy(update={"spec": spec})

    def _find_model(self, section: DefiniteNetwork) -> DefiniteNetwork:
        """The network as the user has named it, if so; that name may be of a factory."""
        path = self._files.get("model.path")
        if path is None:
            return section
        self._used.add("model.path")
        factory = factory_parts(path) if path != "identity" else None
        if factory is None:
            path = _absolute(path) if path != "identity" else path
        elif factory[0].endswith(".py"):
            path = f"{_absolute(factory[0])}:{factory[1]}"
        return section.model_copy(update={"path": path})


_FLAGS = "Name what was moved with --input, --model, --weights or --file KEY=PATH."


@contextmanager
def _hinting_at_flags() -> Iterator[None]:
    """Tell, where a file is absent, how the user says where it is."""
    try:
        yield
    except (VolumeError, ModelContractError) as error:
        raise type(error)(f"{str(error).rstrip('.')}. {_FLAGS}") from None


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).absolute())


def _is_code(model: Network) -> bool:
    """Whether a network is a program, or made by one, or a package of a kind that holds programs.

    Raises:
        ModelContractError: it is a package of no known kind.
    """
    if model.path == "identity":
        return False
    if factory_parts(model.path) is not None:
        return True
    if loader_of(model) is not None:
        return suffix_of(model) not in _SAFE_SUFFIXES
    if local_path(model.path) is None:
        return True  # what will be fetched is not known yet
    path = package_path(model)
    if path is None or not path.exists():
        return False
    with open_package(path) as package:
        return package.kind.may_hold_programs


def _hashes(needs: Iterable[NeededFile]) -> list[tuple[str, str]]:
    """Keys and hashes of what is needed, but for volumes, which have none."""
    return sorted((each.key, each.sha256) for each in needs if each.sha256 is not None)


def _is_of_version(difference: str) -> bool:
    return difference.startswith(tuple(f"engine.{key}:" for key in _ENGINE_KEYS))


def _cautions(here: ResolvedJob, recorded: ResolvedJob, engines: Sequence[str]) -> list[str]:
    """What is not as it was when the output was computed."""
    versions = [
        f"{name} {recorded.versions[name]} then, {now} here"
        for name, now in here.versions.items()
        if recorded.versions.get(name, now) != now
    ]
    cautions = []
    if versions:
        cautions.append(f"other versions: {'; '.join(versions)}")
    if engines:
        cautions.append(
            f"another engine: {'; '.join(engines)}. Its last bits may differ: chunks that differ "
            "by as little are undecided"
        )
    return cautions


def _parse(kind: type[Parsed], text: str, url: str) -> Parsed:
    """Understand a part of a record.

    Raises:
        StateError: it is not of that kind.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise StateError(
            f"what the metadata of {url} tell of its job cannot be understood "
            f"({error.error_count()} faults, the first: {describe_fault(error)}): it is damaged, "
            "from another version, or of an extension that is not installed here"
        ) from None
