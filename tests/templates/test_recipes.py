"""The recipes for schedulers have the form that each one's own library or schema asks for."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from beam_inference.cli.main import command_parser
from beam_inference.launch.schedulers import shard_of_scheduler

TEMPLATES = Path(__file__).parents[2] / "templates"
JOBS = sorted((TEMPLATES / "kubernetes" / "shards").glob("*.yaml"))


def load_json(name):
    return json.loads((TEMPLATES / name).read_text())


def container_of(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


@pytest.fixture
def jobs():
    """The three Jobs for Kubernetes, in order."""
    return [yaml.safe_load(path.read_text()) for path in JOBS]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_jobs_have_the_form_of_kubernetes(path):
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(yaml.safe_load(path.read_text()), "1.31", strict=True)


def test_kubernetes_is_told_the_number_of_shards_wherever_it_is_needed(jobs):
    prepare, shards, finish = jobs
    count = shards["spec"]["completions"]
    assert container_of(prepare)["args"][-1] == f"--shards={count}"
    assert container_of(shards)["args"][-1] == f"--shard=$(JOB_COMPLETION_INDEX)/{count}"
    assert len({container_of(job)["args"][1] for job in jobs}) == 1  # one job file
    text = JOBS[0].read_text()
    for path, job in zip(JOBS, jobs, strict=True):
        assert f"kubectl create -f {path.name}" in text
        assert job is finish or f"job/{job['metadata']['name']}" in text


def test_pods_that_stop_gently_are_no_failures(jobs):
    rules = jobs[1]["spec"]["podFailurePolicy"]["rules"]
    ended = [(rule["action"], rule["onExitCodes"]) for rule in rules if "onExitCodes" in rule]
    actions = {code: action for action, exits in ended for code in exits["values"]}
    assert actions == {2: "FailJob", 75: "Ignore"}
    assert {exits["containerName"] for _, exits in ended} == {container_of(jobs[1])["name"]}


def test_the_job_has_the_form_of_google_batch():
    batch = pytest.importorskip("google.cloud.batch_v1")
    values = load_json("google-batch/shards.json")
    job = batch.Job.from_json(json.dumps(values), ignore_unknown_fields=False)
    (group,) = job.task_groups
    assert group.task_count == 64
    policies = {
        code: policy.action.name
        for policy in group.task_spec.lifecycle_policies
        for code in policy.action_condition.exit_codes
    }
    assert policies == {2: "FAIL_TASK", 75: "RETRY_TASK", 50001: "RETRY_TASK"}


@pytest.mark.parametrize(
    ("name", "operation"),
    [("job-definition", "RegisterJobDefinition"), ("submit-job", "SubmitJob")],
)
def test_requests_have_the_form_of_aws_batch(name, operation):
    session = pytest.importorskip("botocore.session")
    validate = pytest.importorskip("botocore.validate")
    shape = session.get_session().get_service_model("batch").operation_model(operation).input_shape
    values = load_json(f"aws-batch/{name}.json")
    report = validate.ParamValidator().validate(values, shape)
    assert not report.has_errors(), report.generate_report()


def test_aws_batch_is_given_what_its_definition_asks_for():
    definition = load_json("aws-batch/job-definition.json")
    request = load_json("aws-batch/submit-job.json")
    assert request["jobDefinition"] == definition["jobDefinitionName"]
    assert request["parameters"].keys() == definition["parameters"].keys() == {"job"}
    assert "Ref::job" in definition["containerProperties"]["command"]
    assert {"onExitCode": "75", "action": "RETRY"} in definition["retryStrategy"]["evaluateOnExit"]


def test_the_services_have_the_form_of_compose():
    schema = os.environ.get("COMPOSE_SCHEMA")
    if not schema:
        pytest.skip("COMPOSE_SCHEMA names no schema of Compose: make recipes-test")
    jsonschema = pytest.importorskip("jsonschema")
    values = yaml.safe_load((TEMPLATES / "compose" / "compose.yaml").read_text())
    jsonschema.Draft201909Validator(json.loads(Path(schema).read_text())).validate(values)


def commands():
    """The words after ``beam-inference`` in each recipe, by its name."""
    found = {path.stem: container_of(yaml.safe_load(path.read_text()))["args"] for path in JOBS}
    (group,) = load_json("google-batch/shards.json")["taskGroups"]
    found["google"] = group["taskSpec"]["runnables"][0]["container"]["commands"]
    definition = load_json("aws-batch/job-definition.json")
    found["aws"] = definition["containerProperties"]["command"][1:]
    compose = yaml.safe_load((TEMPLATES / "compose" / "compose.yaml").read_text())
    found["compose"] = compose["services"]["worker"]["command"]
    for path in sorted((TEMPLATES / "slurm").glob("*.sbatch")):
        (line,) = re.findall(r"beam-inference (.+)", path.read_text())
        found[f"slurm {path.stem}"] = shlex.split(line)
    return found


@pytest.mark.parametrize("name", commands())
def test_every_command_is_one_of_ours(name):
    words = [
        word.replace("$(JOB_COMPLETION_INDEX)", "3").replace("$SHARDS", "64")
        for word in commands()[name]
    ]
    arguments, unknown = command_parser().parse_known_args(words)
    assert unknown == []
    assert callable(arguments.action)


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("google", {"BATCH_TASK_INDEX": "3", "BATCH_TASK_COUNT": "64"}),
        ("aws", {"AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ARRAY_SIZE": "64"}),
        (
            "slurm shards",
            {
                "SLURM_ARRAY_TASK_ID": "3",
                "SLURM_ARRAY_TASK_MIN": "0",
                "SLURM_ARRAY_TASK_MAX": "63",
                "SLURM_ARRAY_TASK_STEP": "1",
                "SLURM_ARRAY_TASK_COUNT": "64",
            },
        ),
    ],
)
def test_what_takes_its_shard_from_the_scheduler_finds_it(name, variables):
    words = commands()[name]
    assert "auto" in words or "--shard=auto" in words
    assert str(shard_of_scheduler(variables)) == "3/64"
