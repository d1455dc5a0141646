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
    from beam_inference.errors import BeamInferenceError, UserError
    from beam_inference.geometry.bounding_box import BoundingBox
    from beam_inference.geometry.plan import InferencePlan, make_plan
    from beam_inference.job.messages import Launch, Record
    from beam_inference.job.place import Place
    from beam_inference.job.state import State
    from beam_inference.job.verification import verify
    from beam_inference.launch.job_files import load_job
    from beam_inference.launch.prepare import prepare
    from beam_inference.launch.run_job import run_job
    from beam_inference.volumes.opening import open_volume
    from beam_inference.volumes.volume import Volume
    from beam_inference.worker.predict import predict
    from beam_inference.worker.worker import Worker

__version__ = "0.1.0"

_HOMES = {
    "BoundingBox": "geometry.bounding_box",
    "JobConfig": "config.job",
    "load_job": "launch.job_files",
    "parse_job": "config.job_file",
    "BeamInferenceError": "errors",
    "UserError": "errors",
    "Place": "job.place",
    "prepare": "launch.prepare",
    "InferencePlan": "geometry.plan",
    "make_plan": "geometry.plan",
    "run_job": "launch.run_job",
    "State": "job.state",
    "GenerateRuns": "beam.transforms",
    "InferChunks": "beam.transforms",
    "InferVolume": "beam.transforms",
    "verify": "job.verification",
    "Volume": "volumes.volume",
    "open_volume": "volumes.opening",
    "Launch": "job.messages",
    "Record": "job.messages",
    "Worker": "worker.worker",
    "predict": "worker.predict",
}

__all__ = [
    "BeamInferenceError",
    "BoundingBox",
    "GenerateRuns",
    "InferChunks",
    "InferVolume",
    "InferencePlan",
    "JobConfig",
    "Launch",
    "Place",
    "Record",
    "State",
    "UserError",
    "Volume",
    "Worker",
    "load_job",
    "make_plan",
    "open_volume",
    "parse_job",
    "predict",
    "prepare",
    "run_job",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'beam_inference' has no attribute '{name}'")
    return getattr(import_module(f"beam_inference.{_HOMES[name]}"), name)
