"""Test what a real Airflow shows of the DAGs without running them: imports and forms."""

import json
import subprocess

from airflow_home import DATAFLOW_FIELDS, PYTHON

CHECK = """
import copy, json, pathlib, sys
from airflow.dag_processing.dagbag import BundleDagBag
from airflow.sdk.exceptions import ParamValidationError
bag = BundleDagBag(sys.argv[1], bundle_path=pathlib.Path(sys.argv[1]), bundle_name="dags-folder")
def refused(dag, fields):
    params = copy.deepcopy(bag.dags[dag].params)
    try:
        params.update(fields)
        params.validate()
    except ParamValidationError as error:
        return str(error)
answers = [refused(*question) for question in json.loads(sys.argv[2])]
print(json.dumps({"errors": bag.import_errors, "dags": sorted(bag.dags), "answers": answers}))
"""


def parse(airflow, questions=(), **environment):
    """Import errors, DAGs, and the refusals of some (DAG, fields), from one process of Airflow."""
    done = subprocess.run(
        [
            PYTHON,
            "-W",
            "ignore",
            "-c",
            CHECK,
            airflow.environment["AIRFLOW__CORE__DAGS_FOLDER"],
            json.dumps(questions),
        ],
        env={**airflow.environment, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LOCAL_FIELDS = {"job": "/data/job.yaml"}
BAD = [
    ("local", {}, "job"),
    ("local", {"job": "relative.yaml"}, "job"),
    ("local", {**LOCAL_FIELDS, "roi": "0x0:64x64"}, "roi"),
    ("local", {**LOCAL_FIELDS, "max_failed_chunks": -1}, "max_failed_chunks"),
    ("local", {**LOCAL_FIELDS, "resume": "yes"}, "resume"),
    ("local", {**LOCAL_FIELDS, "beam_flags": "--direct_num_workers=2"}, "beam_flags"),
    ("dataflow", {**DATAFLOW_FIELDS, "job": "/data/job.yaml"}, "job"),
    ("dataflow", {**DATAFLOW_FIELDS, "output": "https://host/out"}, "output"),
    ("dataflow", {**DATAFLOW_FIELDS, "gpu": "gtx"}, "gpu"),
    ("dataflow", {**DATAFLOW_FIELDS, "gpu_count": 0}, "gpu_count"),
    ("dataflow", {**DATAFLOW_FIELDS, "region": "Europe"}, "region"),
    ("dataflow", {**DATAFLOW_FIELDS, "sdk_container_image": "no-tag"}, "sdk_container_image"),
    ("dataflow", {**DATAFLOW_FIELDS, "template": None}, "template"),
    ("local", {**LOCAL_FIELDS, "runner": None}, "runner"),
]
GOOD = [
    (
        "local",
        {
            **LOCAL_FIELDS,
            "roi": "-3x0x0:64x512x512",
            "input": "gs://bucket/in",
            "beam_flags": {"a": 1},
        },
    ),
    (
        "dataflow",
        {**DATAFLOW_FIELDS, "gpu": "l4", "gpu_count": 2, "output": "gs://bucket/{{ ds }}/out"},
    ),
    ("dataflow", {**DATAFLOW_FIELDS, "gpu": None, "marker": None}),
]


def test_both_dags_parse_and_their_forms_refuse_what_is_wrong(airflow):
    questions = [(f"beam_inference_{dag}", fields) for dag, fields, *_ in [*BAD, *GOOD]]
    found = parse(airflow, questions)
    assert found["errors"] == {}
    assert found["dags"] == ["beam_inference_dataflow", "beam_inference_local"]
    for (_, fields, name), answer in zip(BAD, found["answers"], strict=False):
        assert answer, f"{fields} was accepted"
        assert f"param {name}:" in answer
    assert found["answers"][len(BAD) :] == [None] * len(GOOD)


def test_a_field_is_preset_by_the_environment(airflow):
    preset = {"BEAM_INFERENCE_JOB": "/data/job.yaml", "BEAM_INFERENCE_MAX_FAILED_CHUNKS": "x"}
    (answer,) = parse(airflow, [("beam_inference_local", {})], BEAM_INFERENCE_JOB="/data/job.yaml")[
        "answers"
    ]
    assert answer is None
    assert "BEAM_INFERENCE_MAX_FAILED_CHUNKS" in str(parse(airflow, **preset)["errors"])


def test_a_schedule_needs_what_the_form_would_ask_for(airflow):
    errors = parse(airflow, BEAM_INFERENCE_LOCAL_SCHEDULE="@daily")["errors"]
    assert list(errors) == ["beam_inference_local.py"]
    preset = {"BEAM_INFERENCE_LOCAL_SCHEDULE": "@daily", "BEAM_INFERENCE_JOB": "/data/job.yaml"}
    assert parse(airflow, **preset)["errors"] == {}


def test_without_an_interpreter_the_dags_say_what_to_set(airflow):
    errors = parse(airflow, BEAM_INFERENCE_PYTHON="")["errors"]
    assert len(errors) == 2
    assert all(
        "BEAM_INFERENCE_PYTHON is not set. Expected: the python of" in error
        for error in errors.values()
    )


ROWS = """
em: {schedule: "@daily", job: /data/em.yaml}
cloud: {dag: dataflow, assets: ["x://bucket/in"], job: gs://b/job.yaml, region: europe-west4,
  template: gs://b/t.json, sdk_container_image: "host/image:1"}
"""


def test_each_row_is_a_dag(airflow, tmp_path):
    (tmp_path / "jobs.yaml").write_text(ROWS)
    file = {"BEAM_INFERENCE_JOBS": str(tmp_path / "jobs.yaml")}
    for rows in (file, {"AIRFLOW_VAR_BEAM_INFERENCE_JOBS": ROWS}):
        found = parse(airflow, [("beam_inference_em", {})], **rows)
        assert found["errors"] == {}
        names = ("cloud", "dataflow", "em", "local")
        assert found["dags"] == [f"beam_inference_{name}" for name in names]
        assert found["answers"] == [None]
    (tmp_path / "jobs.yaml").write_text("em: {jobs: x}")
    assert "jobs: no field of the form" in str(parse(airflow, **file)["errors"])
