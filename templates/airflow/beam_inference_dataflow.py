"""DAGs that run a beam-inference job on Dataflow from its Flex Template, and verify it.

wait_for_input
    Waits until the input's marker exists. Skipped if there is no marker.
run
    Starts the Dataflow job, or waits for the job that an earlier attempt of this run started. The
    job's name follows from the run, so Dataflow also refuses a second one at the same time. After
    a failed or lost job, a retry starts another job, which does only chunks without a receipt.
verify
    Fails unless every chunk is done. Its log lists missing and quarantined chunks.

Connection: ``google_cloud_default``. Project, region, template, image and so on are fields of the
    form; their defaults come from the environment, as ``beam_inference_common`` says. See
    docs/airflow.md.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from airflow.providers.google.cloud.hooks.dataflow import DataflowJobStatus
from airflow.providers.google.cloud.links.dataflow import DataflowJobLink
from airflow.providers.google.cloud.operators.dataflow import DataflowStartFlexTemplateOperator
from airflow.providers.google.cloud.sensors.gcs import GCSObjectExistenceSensor
from airflow.providers.google.cloud.triggers.dataflow import DataflowStartYamlJobTrigger
from airflow.sdk import DAG, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
from beam_inference_common import (
    NO_ROW,
    OVERRIDES,
    PREFIX,
    RUNS,
    ScheduledJob,
    all_given,
    date_of,
    field,
    given,
    job_fields,
    scheduled_jobs,
    verification,
)

GPU_FIELDS = ("gpu", "gpu_count", "gpu_driver", "gpu_sharing")
TEMPLATE_FIELDS = ("job", "sdk_container_image", *OVERRIDES, "chunks", *GPU_FIELDS)
"""Fields that are parameters of the Flex Template, under the same names."""

ENVIRONMENT_FIELDS = {
    "service_account": "serviceAccountEmail",
    "temp_location": "tempLocation",
    "staging_location": "stagingLocation",
    "machine_type": "machineType",
    "launcher_machine_type": "launcherMachineType",
    "num_workers": "numWorkers",
    "max_workers": "maxWorkers",
    "subnetwork": "subnetwork",
    "ip_configuration": "ipConfiguration",
}
"""Fields that are keys of the launch's environment, by their names in the form."""

_BUCKET = "^gs://.+$"
_SOURCE = "^(gs|s3|https?)://.+$"
_TARGET = "^(gs|s3)://.+$"


def form_fields(row: Mapping[str, Any] = NO_ROW) -> dict[str, Any]:
    """The fields of the form of a Dataflow launch.

    Args:
        row: Values that the row of the DAG presets.
    """
    place: dict[str, Any] = {"section": "Dataflow", "row": row}
    gpu: dict[str, Any] = {"section": "GPUs", "row": row}
    workers: dict[str, Any] = {"section": "Workers", "row": row}
    return {
        **job_fields(job=_BUCKET, source=_SOURCE, target=_TARGET, row=row),
        **field(
            "marker",
            "Marker",
            "The object to wait for, in the input's folder or as gs://…. For precomputed: info, "
            "zarr v3: zarr.json, zarr v2: .zarray. These exist once the input is created, not "
            "only once it is filled. Empty: do not wait.",
            default="info",
            row=row,
        ),
        **field(
            "template",
            "Flex Template",
            "The template's gs:// file.",
            required=True,
            pattern=_BUCKET,
            **place,
        ),
        **field(
            "sdk_container_image",
            "Image",
            "The template's image, with its tag; the workers run in it as well.",
            required=True,
            pattern="^[^/ ]+/[^ ]+(:[A-Za-z0-9_][A-Za-z0-9_.-]*|@sha256:[0-9a-f]{64})$",
            **place,
        ),
        **field(
            "region",
            "Region",
            "europe-west4",
            required=True,
            pattern="^[a-z]+-[a-z]+[0-9]+$",
            **place,
        ),
        **field(
            "project",
            "Project",
            "Empty: the project of the connection.",
            pattern="^[a-z][a-z0-9.:-]+[a-z0-9]$",
            **place,
        ),
        **field(
            "service_account", "Workers' account", "e-mail", pattern="^[^@ ]+@[^@ ]+$", **place
        ),
        **field("temp_location", "Temporary files", "gs://…", pattern=_BUCKET, **place),
        **field("staging_location", "Staged files", "gs://…", pattern=_BUCKET, **place),
        **field(
            "gpu", "GPU", "", enum=["t4", "l4", "a100", "a100-80gb", "h100", "h100-mega"], **gpu
        ),
        **field("gpu_count", "GPUs per worker", "", type="integer", minimum=1, **gpu),
        **field(
            "gpu_driver", "Driver", "latest", pattern="^(default|latest|[0-9][0-9a-z.]*)$", **gpu
        ),
        **field(
            "gpu_sharing", "Sharing", "one-model", enum=["one-model", "mps", "processes"], **gpu
        ),
        **field("machine_type", "Machine", "g2-standard-8", pattern="^[a-z0-9-]+$", **workers),
        **field(
            "launcher_machine_type",
            "Launcher's machine",
            "n1-standard-2",
            pattern="^[a-z0-9-]+$",
            **workers,
        ),
        **field("num_workers", "Workers at first", "", type="integer", minimum=1, **workers),
        **field("max_workers", "Workers at most", "", type="integer", minimum=1, **workers),
        **field(
            "subnetwork",
            "Subnetwork",
            "regions/…/subnetworks/…",
            pattern="/subnetworks/",
            **workers,
        ),
        **field(
            "ip_configuration",
            "Addresses",
            "",
            enum=["WORKER_IP_PUBLIC", "WORKER_IP_PRIVATE"],
            **workers,
        ),
    }


def job_name(context: Context) -> str:
    """Name of the Dataflow job: the same for all attempts of a run, different for each run."""
    dag_id = context["dag"].dag_id
    run_id = context["run_id"]
    digest = hashlib.sha256(f"{dag_id} {run_id}".encode()).hexdigest()[:8]
    return re.sub("[^a-z0-9]+", "-", f"{dag_id}-{date_of(context):%Y%m%dt%H%M%S}-{digest}".lower())


def launch_request(context: Context, **_: object) -> dict[str, Any]:
    """Request that launches the template on Dataflow."""
    environment = all_given(context, *ENVIRONMENT_FIELDS)
    return {
        "launchParameter": {
            "jobName": job_name(context),
            "containerSpecGcsPath": given(context, "template"),
            "parameters": all_given(context, *TEMPLATE_FIELDS),
            "environment": {ENVIRONMENT_FIELDS[name]: value for name, value in environment.items()},
        }
    }


def marker(context: Context) -> tuple[str, str]:
    """Bucket and name of the object to wait for; both empty if there is none."""
    name = given(context, "marker") or ""
    folder = given(context, "input") or ""
    url = urlsplit(name if "://" in name or not name else f"{folder.rstrip('/')}/{name}")
    return (url.netloc, url.path.lstrip("/")) if url.scheme == "gs" else ("", "")


def skip_without_marker(context: Context) -> None:
    """Skip the task if there is nothing to wait for."""
    if not marker(context)[0]:
        raise AirflowSkipException(
            "not waiting: no marker, no input in the form, or the input is not in gs://"
        )


class RunOnceOperator(DataflowStartFlexTemplateOperator):
    """Runs a Flex Template once per DAG run: later attempts wait for the job of an earlier one."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Start the job, or find the job of an earlier attempt, and wait for its end."""
        self.project_id = self.project_id or self.hook.project_id
        earlier = self._newest()
        if (
            earlier is not None
            and earlier["currentState"] == DataflowJobStatus.JOB_STATE_CANCELLING
        ):
            raise AirflowException(
                f"{_told(earlier)} is still being cancelled; a retry starts another when it has "
                "ended"
            )
        if earlier is None or self._is_over(earlier, context["dag_run"].start_date):
            then = self.execute_complete
            job = self.hook.launch_job_with_flex_template(
                body=self.body, location=self.location, project_id=self.project_id
            )
        else:
            then = self.found_complete
            job = earlier
            self.log.info(
                "%s was started by an earlier attempt: %s", _told(job), job["currentState"]
            )
        self.job = job
        DataflowJobLink.persist(
            context=context, project_id=self.project_id, region=self.location, job_id=job["id"]
        )
        if job.get("currentState") != DataflowJobStatus.JOB_STATE_DONE:
            self._wait_for(job["id"], then)
        return job

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Judge the job that this attempt started, at its end."""
        return self._judged(event, cancelled=AirflowFailException)

    def found_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Judge the job that this attempt found; clearing the task may have cancelled it."""
        return self._judged(event, cancelled=AirflowException)

    def _judged(self, event: dict[str, Any], cancelled: type[AirflowException]) -> dict[str, Any]:
        """Judge by the job's state: the trigger also ends when the API does not answer."""
        self.project_id = self.project_id or self.hook.project_id
        job = self._newest()
        if job is None:
            raise AirflowException(
                f"Dataflow does not know the job any more ({event['message']}): a retry resumes it"
            )
        if job["currentState"] == DataflowJobStatus.JOB_STATE_CANCELLED:
            raise cancelled(
                f"{_told(job)} was cancelled. What it has done is kept: clear this task to go on."
            )
        if job["currentState"] != DataflowJobStatus.JOB_STATE_DONE:
            raise AirflowException(f"{_told(job)}: {job['currentState']} ({event['message']})")
        return job

    def _newest(self) -> dict[str, Any] | None:
        """Newest job of this name, or None."""
        return max(self._jobs(self.body["launchParameter"]["jobName"]), key=_created, default=None)

    def _jobs(self, name: str) -> Iterator[dict[str, Any]]:
        jobs = self.hook.get_conn().projects().locations().jobs()
        request = jobs.list(projectId=self.project_id, location=self.location, name=name)
        while request is not None:
            page = request.execute(num_retries=self.hook.num_retries)
            yield from (job for job in page.get("jobs", []) if job["name"] == name)
            request = jobs.list_next(request, page)

    @staticmethod
    def _is_over(job: dict[str, Any], since: datetime | None) -> bool:
        """Whether another job is needed: this one failed, or was done before the run started."""
        if job["currentState"] == DataflowJobStatus.JOB_STATE_DONE:
            return since is not None and _created(job) < since
        return job["currentState"] in DataflowJobStatus.TERMINAL_STATES

    def _wait_for(self, job_id: str, then: Callable[..., Any]) -> None:
        self.defer(
            # Of the provider's triggers, only this one both ends when the job is cancelled in
            # Dataflow, which it must be told to expect, and cancels the job when the task is
            # cleared or marked in Airflow.
            trigger=DataflowStartYamlJobTrigger(
                job_id=job_id,
                project_id=self.project_id,
                location=self.location,
                gcp_conn_id=self.gcp_conn_id,
                poll_sleep=self.poll_sleep,
                impersonation_chain=self.impersonation_chain,
                expected_terminal_state=DataflowJobStatus.JOB_STATE_CANCELLED,
                cancel_on_kill=self.cancel_on_kill,
            ),
            method_name=then.__name__,
        )


def _created(job: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(job["createTime"])


def _told(job: dict[str, Any]) -> str:
    return f"the Dataflow job {job['name']} ({job['id']})"


def make_dag(job: ScheduledJob) -> DAG:
    """A DAG that runs a job on Dataflow, and verifies it."""
    with DAG(
        dag_id=job.dag_id,
        description="Inference over a volume on Dataflow, verified",
        doc_md=__doc__,
        schedule=job.schedule,
        params=form_fields(job.fields),
        **RUNS,
    ) as dag:
        wait_for_input = GCSObjectExistenceSensor(
            task_id="wait_for_input",
            bucket=lambda context, **_: marker(context)[0],
            object=lambda context, **_: marker(context)[1],
            pre_execute=skip_without_marker,
            poke_interval=30,
            deferrable=True,
        )
        run = RunOnceOperator(
            task_id="run",
            body=launch_request,
            location="{{ params.region }}",
            project_id=lambda context, **_: given(context, "project"),
            deferrable=True,
            append_job_name=False,
            trigger_rule="none_failed",
            # an attempt also ends when the API does not answer; the next one finds the job
            retries=5,
        )
        wait_for_input >> run >> verification()
    return dag


DAGS = [
    make_dag(job)
    for job in (
        ScheduledJob(
            "beam_inference_dataflow", os.environ.get(f"{PREFIX}DATAFLOW_SCHEDULE") or None, NO_ROW
        ),
        *scheduled_jobs("dataflow", form_fields()),
    )
]
