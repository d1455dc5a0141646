"""A DAG that runs a job of beam-inference where Airflow's workers are, or on a Beam runner they reach, and verifies it.

run ``main.py`` with the job file and the fields of the form, in the python that has beam-inference.
    A retry does what has no receipt yet.
verify
    Fails unless every chunk is done: missing or quarantined ones are listed in its log.

No connection is needed. ``BEAM_INFERENCE_MAIN`` is the path of ``templates/main.py``, unless this
file lies in its checkout; the other settings are those of ``beam_inference_common``. See
docs/airflow.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from airflow.providers.apache.beam.operators.beam import BeamRunPythonPipelineOperator
from airflow.sdk import DAG, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from beam_inference_common import (
    OVERRIDES,
    PREFIX,
    RUNS,
    all_given,
    field,
    job_fields,
    python,
    verification,
)

# exit codes of beam-inference
BAD_INPUT = 2
QUARANTINED = 3

_PLACE = "^(/|[a-z][a-z0-9+.-]*://).+$"


def flags(context: Context, **_: object) -> dict[str, Any]:
    """The flags of ``main.py``."""
    return {**context["params"]["beam_flags"], **all_given(context, "job", *OVERRIDES, "chunks")}


class RunOperator(BeamRunPythonPipelineOperator):
    """Runs ``main.py``, and minds how it ended."""

    def execute(self, context: Context) -> None:
        """Run it; what is quarantined is left to the verification, and a mistake in the job is not retried."""
        try:
            super().execute(context)
        except AirflowException as error:
            match = re.search(r"return code (-?\d+)", str(error))
            code = int(match[1]) if match else None
            if code == BAD_INPUT:
                raise AirflowFailException(
                    "refused as bad input, for the reason above; trying again is no use"
                ) from None
            if code != QUARANTINED:
                raise
            self.log.warning("finished, with quarantined chunks: the verification lists them")


with DAG(
    dag_id="beam_inference_local",
    description="Inference over a volume, verified",
    doc_md=__doc__,
    schedule=os.environ.get(f"{PREFIX}LOCAL_SCHEDULE"),
    params={
        **job_fields(job=_PLACE, source=_PLACE, target=_PLACE),
        **field(
            "runner",
            "Runner",
            "Beam's.",
            required=True,
            default="DirectRunner",
            pattern="^[A-Za-z.]+$",
        ),
        **field(
            "beam_flags",
            "Flags of Beam",
            '{"direct_num_workers": 2}',
            type="object",
            required=True,
            default={},
        ),
    },
    **RUNS,
):
    run = RunOperator(
        task_id="run",
        py_file=os.environ.get(f"{PREFIX}MAIN")
        or str(Path(__file__).resolve().parents[1] / "main.py"),
        py_interpreter=python(),
        pipeline_options=flags,
        runner="{{ params.runner }}",
        deferrable=False,
    )
    run >> verification()
