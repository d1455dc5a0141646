"""Shared parts of the two DAGs: settings, the form of a run, and the verification at its end.

Settings are environment variables of every Airflow component. None of them is a secret: credentials
are in connections.

``BEAM_INFERENCE_PYTHON``
    The python of the environment in which beam-inference is installed, on the Airflow workers.
    Required.
``BEAM_INFERENCE_<FIELD>``
    The initial value of a field of the form, such as ``BEAM_INFERENCE_REGION=europe-west4``.
``BEAM_INFERENCE_DATAFLOW_SCHEDULE``, ``BEAM_INFERENCE_LOCAL_SCHEDULE``
    When runs of a DAG start by themselves, such as ``@daily``. Without it you start them by hand.
``BEAM_INFERENCE_JOBS``
    A YAML file of further DAGs, one for each row; without it, Airflow's variable
    ``beam_inference_jobs``, which holds such YAML.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import Asset, Context, Param, Variable

PREFIX = "BEAM_INFERENCE_"

OVERRIDES = ("input", "output", "model", "weights", "roi", "resume", "max_failed_chunks")
"""Fields that override keys of the job file; the command line's flags have the same names."""

_CORNER = "-?[0-9]+x-?[0-9]+x-?[0-9]+"


RUNS: dict[str, Any] = {
    "start_date": datetime(2000, 1, 1),
    "catchup": False,
    "max_active_runs": 1,
    "default_args": {"retries": 3},
    "tags": ["beam-inference"],
}
"""Settings of both DAGs: one run at a time, none for past dates, and retries, which resume."""


NO_ROW: Mapping[str, Any] = {}
"""The row of a DAG that has none."""

JOBS_VARIABLE = "beam_inference_jobs"
_OF_ROW = ("dag", "schedule", "assets")
_KINDS = ("local", "dataflow")


@dataclass(frozen=True)
class ScheduledJob:
    """A DAG that a row asks for.

    Attributes:
        dag_id: its name.
        schedule: when its runs start: a word or cron, assets, or None.
        fields: fields of the form that the row presets.
    """

    dag_id: str
    schedule: str | list[Asset] | None
    fields: Mapping[str, Any]


def scheduled_jobs(kind: str, known: Mapping[str, Any]) -> list[ScheduledJob]:
    """The DAGs of a kind that the rows ask for.

    Args:
        kind: "local" or "dataflow".
        known: the fields that a row of the kind may preset.

    Raises:
        ValueError: a row is wrong; Airflow shows the message as an import error.
    """
    return [
        _scheduled_job(name, row, known)
        for name, row in _rows().items()
        if row.get("dag", "local") == kind
    ]


def _rows() -> Mapping[str, Mapping[str, Any]]:
    """The rows, by their names.

    Raises:
        ValueError: they are not rows.
    """
    path = os.environ.get(f"{PREFIX}JOBS")
    source = path or f"the variable {JOBS_VARIABLE}"
    text = Path(path).read_text() if path else Variable.get(JOBS_VARIABLE, default=None)
    rows = yaml.safe_load(text or "{}") or {}
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ValueError(f"{source}: expected rows by names, such as 'em: {{job: /data/em.yaml}}'")
    for name, row in rows.items():
        if not re.fullmatch("[A-Za-z0-9_.-]+", str(name)):
            raise ValueError(f"{source}: {name}: a name has letters, digits, _ . and -")
        if name in _KINDS:
            raise ValueError(f"{source}: {name} is the name of a DAG without a row: choose another")
        if row.get("dag", "local") not in _KINDS:
            raise ValueError(f"{source}: {name}: dag: expected {' or '.join(_KINDS)}")
        if not isinstance(row.get("assets", []), list):
            raise ValueError(f"{source}: {name}: assets: expected a list of URIs")
    return rows


def _scheduled_job(name: str, row: Mapping[str, Any], known: Mapping[str, Any]) -> ScheduledJob:
    fields = {key: value for key, value in row.items() if key not in _OF_ROW}
    unknown = sorted(fields.keys() - known.keys())
    if unknown:
        raise ValueError(
            f"{name}: {', '.join(unknown)}: no field of the form; expected {', '.join(_OF_ROW)}, "
            f"{', '.join(known)}"
        )
    if "schedule" in row and "assets" in row:
        raise ValueError(f"{name}: schedule and assets both say when runs start: remove one")
    assets = [Asset(uri) for uri in row.get("assets", ())]
    return ScheduledJob(f"beam_inference_{name}", assets or row.get("schedule"), fields)


def python() -> str:
    """Path of the python that has beam-inference.

    Raises:
        LookupError: it is not set; Airflow then shows the message as an import error of the DAG.
    """
    interpreter = os.environ.get(f"{PREFIX}PYTHON")
    if not interpreter:
        raise LookupError(
            f"{PREFIX}PYTHON is not set. Expected: the python of the environment in which "
            "beam-inference is installed, such as /opt/beam-inference/bin/python. Set it for "
            "every component of Airflow."
        )
    return interpreter


def field(
    name: str,
    title: str,
    description: str,
    *,
    type: str = "string",
    required: bool = False,
    row: Mapping[str, Any] = NO_ROW,
    **schema: Any,
) -> dict[str, Param]:
    """One field of the form, by its name; a required field cannot be left empty.

    A required field may have a default. The row of the DAG may preset any field, and else the
    environment.

    Raises:
        ValueError: the environment presets the field with a value of another type.
    """
    preset = os.environ.get(PREFIX + name.upper())
    if name in row:
        schema["default"] = row[name]
    elif preset:
        schema["default"] = preset if type == "string" else _parsed(name, preset, type)
    if required:
        return {name: Param(title=title, description=description, type=type, **schema)}
    if "enum" in schema:
        schema["enum"] = [None, *schema["enum"]]
    return {
        name: Param(
            title=title,
            description=description,
            type=["null", type],
            **{"default": None, **schema},
        )
    }


def _parsed(name: str, preset: str, type: str) -> Any:
    try:
        return json.loads(preset)
    except json.JSONDecodeError:
        raise ValueError(
            f"{PREFIX}{name.upper()}={preset}: expected JSON, of type {type}. Correct it."
        ) from None


def job_fields(
    job: str, source: str, target: str, row: Mapping[str, Any] = NO_ROW
) -> dict[str, Param]:
    """Fields of every run: the job file, overrides of its keys, and how it is verified.

    Args:
        job: Pattern of the job file's URL or path.
        source: Pattern of URLs or paths that are read.
        target: Pattern of URLs or paths that are written.
        row: Values that the row of the DAG presets.
    """
    general: dict[str, Any] = {"row": row}
    instead: dict[str, Any] = {"section": "Overrides of the job file", "row": row}
    return {
        **field(
            "job",
            "Job file",
            "A YAML file, also of several steps on Airflow's workers. {{ ds }} stands for "
            "the run's date.",
            required=True,
            pattern=job,
            **general,
        ),
        **field("input", "Input volume", "input.path", pattern=source, **instead),
        **field("output", "Output volume", "output.path", pattern=target, **instead),
        **field(
            "roi",
            "Region of interest",
            "0x0x0:64x512x512, z y x",
            pattern=f"^{_CORNER}:{_CORNER}$",
            **instead,
        ),
        **field("model", "Network", "model.path", minLength=1, **instead),
        **field(
            "weights",
            "Weights",
            "model.weights, where model is a factory",
            pattern=source,
            **instead,
        ),
        **field(
            "max_failed_chunks",
            "Largest number of quarantined chunks",
            "job.max_failed_chunks",
            type="integer",
            minimum=0,
            **instead,
        ),
        **field(
            "resume",
            "Resume",
            "Skip chunks that have a receipt; retries need this. job.resume",
            type="boolean",
            required=True,
            default=True,
            **instead,
        ),
        **field(
            "chunks",
            "Chunks file",
            "Compute only the chunks of a quarantine file.",
            pattern=source,
            **general,
        ),
        **field(
            "deep",
            "Verify deeply",
            "Read every chunk back.",
            type="boolean",
            required=True,
            default=False,
            **general,
        ),
    }


def given(context: Context, name: str) -> str | None:
    """Value of a field as a flag's value; None where it is empty."""
    value = context["params"][name]
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return re.sub(r"\{\{ *ds *\}\}", f"{date_of(context):%Y-%m-%d}", str(value))


def all_given(context: Context, *names: str) -> dict[str, str]:
    """Values of the named fields that are not empty."""
    values = {name: given(context, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def date_of(context: Context) -> datetime:
    """Date that a run is for; a run by hand without a date is for the day it was started."""
    run = context["dag_run"]
    return run.logical_date or run.run_after


def verification() -> BashOperator:
    """Task that fails unless every chunk of the job is done."""
    interpreter = python()

    def command(context: Context, **_: object) -> str:
        flags = [f"--{name}={value}" for name, value in all_given(context, *OVERRIDES).items()]
        deep = ["--deep"] if context["params"]["deep"] else []
        job = given(context, "job") or ""
        return shlex.join([interpreter, "-m", "beam_inference", "verify", job, *flags, *deep])

    return BashOperator(task_id="verify", bash_command=command, retries=1)
