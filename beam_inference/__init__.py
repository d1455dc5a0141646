"""Run a trained 3-D ConvNet over a volume of any size, as an Apache Beam job.

The names below are the public API; they are loaded when first used, so importing the package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from beam_inference.bounding_box import BoundingBox
    from beam_inference.config import JobConfig
    from beam_inference.elements import Launch, Record
    from beam_inference.errors import BeamInferenceError, UserError
    from beam_inference.files import load_job
    from beam_inference.job_file import parse_job
    from beam_inference.launch import prepare
    from beam_inference.plan import InferencePlan, make_plan
    from beam_inference.runner import run_job
    from beam_inference.state import State
    from beam_inference.survey import Place
    from beam_inference.transforms import GenerateRuns, InferChunks, InferVolume
    from beam_inference.verification import verify
    from beam_inference.volumes import Volume, open_volume
    from beam_inference.worker import Worker

__version__ = "0.1.0"

_HOMES = {
    "BoundingBox": "bounding_box",
    "JobConfig": "config",
    "load_job": "files",
    "parse_job": "job_file",
    "BeamInferenceError": "errors",
    "UserError": "errors",
    "Place": "survey",
    "prepare": "launch",
    "InferencePlan": "plan",
    "make_plan": "plan",
    "run_job": "runner",
    "State": "state",
    "GenerateRuns": "transforms",
    "InferChunks": "transforms",
    "InferVolume": "transforms",
    "verify": "verification",
    "Volume": "volumes",
    "open_volume": "volumes",
    "Launch": "elements",
    "Record": "elements",
    "Worker": "worker",
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
    "prepare",
    "run_job",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'beam_inference' has no attribute '{name}'")
    return getattr(import_module(f"beam_inference.{_HOMES[name]}"), name)
