"""Run a trained 3-D ConvNet over a volume of any size, as an Apache Beam job.

The names below are the public API; they are loaded when first used, so importing the package is
cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from beam_inference.beam.transforms import GenerateRuns, InferChunks, InferVolume
    from beam_inference.config.job import JobConfig
    from beam_inference.config.job_file import parse_job
    from beam_inference.conversion.convert import convert
    from beam_inference.errors import BeamInferenceError, UserError
    from beam_inference.geometry.bounding_box import BoundingBox
    from beam_inference.geometry.plan import InferencePlan, make_plan
    from beam_inference.job.messages import Launch, Record
    from beam_inference.job.place import Place
    from beam_inference.job.state import State
    from beam_inference.job.status import JobStatus
    from beam_inference.job.verification import VerifyReport
    from beam_inference.launch.count_levels import count_levels
    from beam_inference.launch.job_files import load_job
    from beam_inference.launch.launched_job import status, verify
    from beam_inference.launch.planned_job import PlannedJob, plan_job
    from beam_inference.launch.prepare import prepare
    from beam_inference.launch.run_job import JobOutcome, run_job
    from beam_inference.pyramid.pyramid import make_pyramid
    from beam_inference.segmentation.make_labels import components, segment
    from beam_inference.volumes.opening import open_volume
    from beam_inference.volumes.volume import Volume
    from beam_inference.worker.predict import predict
    from beam_inference.worker.worker import Worker

__version__ = "0.1.0"

_HOMES = {
    "BeamInferenceError": "errors",
    "BoundingBox": "geometry.bounding_box",
    "GenerateRuns": "beam.transforms",
    "InferChunks": "beam.transforms",
    "InferVolume": "beam.transforms",
    "InferencePlan": "geometry.plan",
    "JobConfig": "config.job",
    "JobOutcome": "launch.run_job",
    "JobStatus": "job.status",
    "Launch": "job.messages",
    "Place": "job.place",
    "PlannedJob": "launch.planned_job",
    "Record": "job.messages",
    "State": "job.state",
    "UserError": "errors",
    "VerifyReport": "job.verification",
    "Volume": "volumes.volume",
    "Worker": "worker.worker",
    "components": "segmentation.make_labels",
    "convert": "conversion.convert",
    "count_levels": "launch.count_levels",
    "load_job": "launch.job_files",
    "make_plan": "geometry.plan",
    "make_pyramid": "pyramid.pyramid",
    "open_volume": "volumes.opening",
    "parse_job": "config.job_file",
    "plan_job": "launch.planned_job",
    "predict": "worker.predict",
    "prepare": "launch.prepare",
    "run_job": "launch.run_job",
    "segment": "segmentation.make_labels",
    "status": "launch.launched_job",
    "verify": "launch.launched_job",
}
"""The module of each public name."""

__all__ = [
    "BeamInferenceError",
    "BoundingBox",
    "GenerateRuns",
    "InferChunks",
    "InferVolume",
    "InferencePlan",
    "JobConfig",
    "JobOutcome",
    "JobStatus",
    "Launch",
    "Place",
    "PlannedJob",
    "Record",
    "State",
    "UserError",
    "VerifyReport",
    "Volume",
    "Worker",
    "components",
    "convert",
    "count_levels",
    "load_job",
    "make_plan",
    "make_pyramid",
    "open_volume",
    "parse_job",
    "plan_job",
    "predict",
    "prepare",
    "run_job",
    "segment",
    "status",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'beam_inference' has no attribute '{name}'")
    return getattr(import_module(f"beam_inference.{_HOMES[name]}"), name)
