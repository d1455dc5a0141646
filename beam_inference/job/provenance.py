"""The record of how a volume was made, which its own metadata hold.

It is written before the first chunk, and a later launch leaves it as it is: whatever determines the
bits is in the fingerprint, and a launch that would change that is refused. Several jobs that fill
parts of one volume have a record each. The same job by the same versions has the same record, which
holds neither times nor anything that was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from beam_inference.config.fields import Frozen, Json
from beam_inference.config.formats import OutputSpec
from beam_inference.config.job_file import rename_paths
from beam_inference.config.normalize import holes_of, rename_levels
from beam_inference.config.storage import Storage
from beam_inference.errors import ModelContractError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.recorded_paths import RecordedPaths
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.stage_job import StageJob
from beam_inference.job.state import network_key
from beam_inference.models.fetch import local_model
from beam_inference.models.hashes import (
    HashedFile,
    hash_files,
    model_sha256,
    network_file_states,
)
from beam_inference.volumes.provenance import change_provenance, read_provenance

RUN = "beam-inference run"
"""What made the volumes of jobs; other commands are named in the same way."""

_BOX: TypeAdapter[BoundingBox] = TypeAdapter(BoundingBox)

_NOT_OF_OUTPUT: dict[str, Any] = {
    "config": {"job", "storage"},
    "working_set_bytes": True,
    "patch_seconds": True,
}
"""Parts of a resolved job that tell of its launch, and not of its output."""


class NeededFile(Frozen):
    """A volume or file that a job has read.

    Attributes:
        key: the key of the job file that names it.
        name: its name, without its folders; inside a package, its path there.
        sha256: its hash; None of volumes.
    """

    key: str
    name: str
    sha256: str | None = None


class ProvenanceRecord(Frozen):
    """How a volume, or a box of it, was made.

    Attributes:
        record: version of the form of such records.
        made_by: the command.
        version: version of beam-inference.
        fingerprint: hash of all that determines the voxels.
        box: the voxels.
        sources: the volumes that it was made of, as :class:`RecordedPaths` puts them.
        needs: of jobs, what they have read.
        job: of jobs, the resolved job, its paths as :class:`RecordedPaths` puts them.
        how: of other commands, what they were asked for.
    """

    record: Literal[1] = 1
    made_by: str
    version: str
    fingerprint: str
    box: BoundingBox
    sources: list[str]
    needs: tuple[NeededFile, ...] = ()
    job: Json | None = None
    how: Json | None = None


def record_job(job: ResolvedJob, *, replace: bool = False) -> None:
    """Tell in each of a job's outputs how it is made, unless it is told there.

    Each tells of the job as if it wrote this output alone, which gives the same bits.

    Args:
        job: the job, as its first launch resolved it.
        replace: whether it makes again what was made there before, so that what is told of that is
            removed.

    Raises:
        UserError: the output's metadata cannot be understood, or a file of the network is gone.
        WorkerFault: they cannot be written.
    """
    storage = job.config.storage
    for key in job.config.output_keys:
        single = job.of_output(key)
        url = single.config.output.path
        entries = read_provenance(url, storage)
        if replace or not _tells_of(entries, single.fingerprint, single.plan.chunks.roi):
            _add(_job_record(single), url, storage, replace=replace)


def record_command(command: str, job: StageJob, output: OutputSpec, source: str, how: Json) -> None:
    """Tell in the volume that a command makes how it does so, unless it is told there.

    Args:
        command: its name, such as "convert".
        job: what the command does.
        output: the volume, which is there.
        source: path or URL of what it is made of.
        how: what the user asked for.

    Raises:
        VolumeError: the volume's metadata cannot be understood.
        WorkerFault: they cannot be written.
    """
    record = ProvenanceRecord(
        made_by=f"beam-inference {command}",
        version=version("beam-inference"),
        fingerprint=job.fingerprint,
        box=output.bounds,
        sources=[RecordedPaths(output.url).record_volume(source)],
        how=how,
    )
    _add(record, output.url, output.storage, replace=False)


def no_record(url: str) -> str:
    """A message on a volume whose metadata do not tell how it was made."""
    return (
        f"the metadata of {url} do not tell how it was made: it is not of beam-inference, or of a "
        "version before there were such records. Giving the job's run command again adds one, also "
        "when nothing is left to do."
    )


def _add(record: ProvenanceRecord, url: str, storage: Storage, *, replace: bool) -> None:
    values = record.model_dump(mode="json")
    entry = {key: value for key, value in values.items() if value is not None}

    def add(entries: list[Json]) -> list[Json]:
        kept = [each for each in entries if not (replace and _is_replaced(each, record.box))]
        if _tells_of(kept, record.fingerprint, record.box):
            return kept
        # one of the same fingerprint is of a smaller ROI
        return [*(each for each in kept if each.get("fingerprint") != record.fingerprint), entry]

    change_provenance(url, storage, add)


def _tells_of(entries: Sequence[Json], fingerprint: str, box: BoundingBox) -> bool:
    told = {"start": list(box.start), "stop": list(box.stop)}
    return any(
        entry.get("fingerprint") == fingerprint and entry.get("box") == told for entry in entries
    )


def _is_replaced(entry: Json, box: BoundingBox) -> bool:
    """Whether what an entry tells of is made again with a box.

    Jobs fill boxes that are apart, or are replaced whole; other commands make whole volumes.
    """
    try:
        told = _BOX.validate_python(entry.get("box"))
    except (ValidationError, ValueError):
        return False
    return box.intersection(told).size > 0 if "job" in entry else box.contains(told)


def _job_record(job: ResolvedJob) -> ProvenanceRecord:
    config = job.config
    paths = RecordedPaths(config.output.path)
    renamed = rename_paths(
        config,
        file=lambda path, _key: paths.record_file(path),
        volume=lambda path, _key: paths.record_volume(path),
    )
    spec = config.input.spec
    if spec is not None:
        changed = renamed.input.model_copy(update={"spec": paths.record_spec(spec)})
        renamed = renamed.model_copy(update={"input": changed})
    request = job.requested_normalize
    recorded = job.model_copy(
        update={
            "config": renamed.model_copy(
                update={"output": renamed.output.model_copy(update={"path": "."})}
            ),
            "requested_normalize": request and rename_levels(request, paths.record_volume),
        }
    )
    return ProvenanceRecord(
        made_by=RUN,
        version=version("beam-inference"),
        fingerprint=job.fingerprint,
        box=job.plan.chunks.roi,
        sources=[
            path
            for path in (renamed.input.path, *(each.path for each in renamed.inputs))
            if path is not None
        ],
        needs=tuple(needed_files(job)),
        job=recorded.model_dump(mode="json", exclude=_NOT_OF_OUTPUT),
    )


def _network_files(job: ResolvedJob) -> list[HashedFile]:
    """The files of a job's network, each with its hash; raises as :func:`needed_files`."""
    network = local_model(job.config.model, job.config.storage, job.model_sha256)
    before = network_file_states(network)
    files = hash_files(network)
    if model_sha256(network) != job.model_sha256 or network_file_states(network) != before:
        raise ModelContractError(
            "the network's files were written or replaced since they were loaded, so the output's "
            "record would name others than those that make it. Restore them, and give the same "
            "command again."
        )
    return files


def needed_files(job: ResolvedJob) -> Iterator[NeededFile]:
    """What a job has read, with the hashes of files; all is named as the output's record names it.

    Raises:
        UserError: a file of the network is gone, or another than the job's.
    """
    config = job.config
    paths = RecordedPaths(config.output.path)

    def name(path: str) -> str:
        return PurePosixPath(paths.record_volume(path).partition("|")[0]).name

    volumes = {
        "input.path": config.input.path,
        **{f"inputs.{number}.path": each.path for number, each in enumerate(config.inputs)},
        "input.mask.path": None if config.input.mask is None else config.input.mask.path,
        "mask.path": None if config.mask is None else config.mask.path,
    }
    for key, path in volumes.items():
        if path is not None:
            yield NeededFile(key=key, name=name(path))
    holes = holes_of(config.model.normalize)
    if holes is not None:
        yield NeededFile(key="model.normalize", name=name(holes.path), sha256=holes.sha256)
    for file in _network_files(job):
        yield NeededFile(key=file.key, name=file.name, sha256=file.sha256)
    if job.quantized_sha256 is not None:
        yield NeededFile(
            key="inference.precision",
            name=network_key(job.quantized_sha256),
            sha256=job.quantized_sha256,
        )
    for number, operator in enumerate(config.postprocess):
        key = f"postprocess.{number}"
        hashes: Sequence[str | None] = job.operator_sha256.get(key, "").split("+")
        for path, sha256 in zip(operator.needed_files, hashes, strict=False):
            yield NeededFile(key=key, name=name(path), sha256=sha256 or None)
