"""DAGs that run a beam-inference job on Airflow's workers or on a Beam runner, and verify it.

run
    Runs ``main.py`` with the job file and the fields of the form, in the python that has
    beam-inference. A retry does only chunks without a receipt.
verify
    Fails unless every chunk is done. Its log lists missing and quarantined chunks.

No connection is needed. ``BEAM_INFERENCE_MAIN`` is the path of ``templates/main.py``, unless this
file lies in its checkout; the other settings are those of ``beam_inference_common``. See
docs/airflow.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.providers.apache.beam.operators.beam import BeamRunPythonPipelineOperator
from airflow.sdk import DAG, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from beam_inference_common import (
    NO_ROW,
    OVERRIDES,
    PREFIX,
    RUNS,
    ScheduledJob,
    all_given,
    field,
    job_fields,
    python,
    scheduled_jobs,
    verification,
)

# exit codes of beam-inference
BAD_INPUT = 2
QUARANTINED = 3

_PLACE = "^(/|[a-z][a-z0-9+.-]*://).+$"


def flags(context: Context, **_: object) -> dict[str, Any]:
    """Flags for ``main.py``."""
    return {**context["params"]["beam_flags"], **all_given(context, "job", *OVERRIDES, "chunks")}


class RunOperator(BeamRunPythonPipelineOperator):
    """Runs ``main.py``, and distinguishes how it ended by its exit code."""

    def execute(self, context: Context) -> None:
        """Run it; leave quarantined chunks to the verification, and do not retry bad input."""
        try:
            super().execute(context)
        except AirflowException as error:
            match = re.search(r"return code (-?\d+)", str(error))
            code = int(match[1]) if match else None
            if code == BAD_INPUT:
                raise AirflowFailException(
                    "refused as bad input, for the reason above; a retry would not help"
                ) from None
            if code != QUARANTINED:
                raise
            self.log.warning("finished with quarantined chunks; the verification lists them")


def form_fields(row: Mapping[str, Any] = NO_ROW) -> dict[str, Any]:
    """The fields of the form of a local run.

    Args:
        row: Values that the row of the DAG presets.
    """
    return {
        **job_fields(job=_PLACE, source=_PLACE, target=_PLACE, row=row),
        **field(
            "runner",
            "Runner",
            "The Beam runner.",
            required=True,
            default="DirectRunner",
            pattern="^[A-Za-z.]+$",
            row=row,
        ),
        **field(
            "beam_flags",
            "Flags of Beam",
            '{"direct_num_workers": 2}',
            type="object",
            required=True,
            default={},
            row=row,
        ),
    }


def make_dag(job: ScheduledJob) -> DAG:
    """A DAG that runs a job here, and verifies it."""
    with DAG(
        dag_id=job.dag_id,
        description="Inference over a volume, verified",
        doc_md=__doc__,
        schedule=job.schedule,
        params=form_fields(job.fields),
        **RUNS,
    ) as dag:
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
    return dag


DAGS = [
    make_dag(job)
    for job in (
        ScheduledJob(
            "beam_inference_local", os.environ.get(f"{PREFIX}LOCAL_SCHEDULE") or None, NO_ROW
        ),
        *scheduled_jobs("local", form_fields()),
    )
]
