"""The volumes of a job before its launch: the size of each, and why some cannot be opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from beam_inference.config.cohort import Cohort
from beam_inference.errors import UserError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.place import THIS_PROCESS, Place
from beam_inference.launch.planned_job import PlannedJob, plan_job


@dataclass(frozen=True, slots=True)
class PlannedVolume:
    """The size of a volume.

    Attributes:
        roi: the box to produce.
        chunks: number of its chunks.
        patches: number of patches that the network is run on.
        host_bytes: memory of a worker process that works on it.
        output: URL of its output.
        output_exists: whether that is there.
    """

    roi: BoundingBox
    chunks: int
    patches: int
    host_bytes: int
    output: str
    output_exists: bool

    @classmethod
    def of(cls, job: PlannedJob, place: Place = THIS_PROCESS) -> Self:
        """The size of a job of one volume, whose workers run at a place."""
        plan = job.plan
        return cls(
            roi=plan.chunks.roi,
            chunks=plan.chunks.count,
            patches=plan.totals.patch_count,
            host_bytes=max(each.host_bytes for each in job.all_memory(place)),
            output=job.output.url,
            output_exists=job.output_exists,
        )


@dataclass(frozen=True, slots=True)
class PlannedCohort:
    """A job of several volumes; none of them is kept open.

    Attributes:
        volumes: those that could be opened, by name.
        faults: why the others could not, by name.
    """

    volumes: Mapping[str, PlannedVolume]
    faults: Mapping[str, str]

    @property
    def host_bytes(self) -> int:
        """Memory of a worker process, of the volume that takes most."""
        return max(each.host_bytes for each in self.volumes.values())


def plan_cohort(cohort: Cohort, place: Place = THIS_PROCESS) -> PlannedCohort:
    """Open each volume and derive its geometry; nothing is written.

    Args:
        cohort: the volumes.
        place: where the workers run.

    Raises:
        UserError: no volume can be opened.
    """
    volumes: dict[str, PlannedVolume] = {}
    faults: dict[str, str] = {}
    first_error: UserError | None = None
    for name, config in cohort.volumes.items():
        try:
            job = plan_job(config, place)
        except UserError as error:
            first_error = first_error or error
            faults[name] = str(error)
            continue
        volumes[name] = PlannedVolume.of(job, place)
    if first_error is not None and not volumes:
        raise first_error
    return PlannedCohort(volumes, faults)
