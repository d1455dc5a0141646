"""The Airflow DAGs without Airflow: their fields are flags, and a filled form becomes a launch.

Airflow's modules are empty shells here; ``make airflow-test`` runs the DAGs in a real Airflow.
"""

import ast
import importlib
import json
import re
import shlex
import sys
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import yaml
from helpers import job_values, write_volume

from beam_inference.beam.dataflow_gpus import DRIVERS, GPUS, SHARINGS
from beam_inference.cli.flex_template import metadata
from beam_inference.cli.main import command_parser, main, run_with_flags
from beam_inference.cli.run import flags_parser

TEMPLATES = Path(__file__).parents[2] / "templates"
FILES = sorted((TEMPLATES / "airflow").glob("*.py"))
# with overwrite a retry would delete, with redo it would do again what is done
NOT_IN_THE_FORMS = {
    "sample",
    "seed",
    "overwrite",
    "redo",
    "volume",
    "step",
    "allow_pickle",
    "trust_model",
    "log_format",
}


class Shell:
    """Stands for every class of Airflow: it keeps what it was made with."""

    def __init__(self, *words, **keywords):
        self.words = words
        self.keywords = keywords

    @staticmethod
    def get(_key, default=None):
        return default

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __rshift__(self, other):
        return other


@pytest.fixture
def dags(monkeypatch):
    """The two DAG modules, and what they share."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("airflow"):
                for name in accumulate(node.module.split("."), "{}.{}".format):
                    module = ModuleType(name)
                    module.__getattr__ = lambda name: Shell
                    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(TEMPLATES / "airflow")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("BEAM_INFERENCE_PYTHON", "/opt/py thon")
    modules = {}
    for file in FILES:
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
        modules[file.stem.removeprefix("beam_inference_")] = importlib.import_module(file.stem)
    yield SimpleNamespace(**modules)
    for file in FILES:
        sys.modules.pop(file.stem)


def context(dags, fields, **run):
    """A run with these fields filled in, all others as the form presets them."""
    every = {**dags.common.job_fields(".", ".", "."), **dags.dataflow.form_fields()}
    every |= dags.common.field("beam_flags", "", "", type="object", required=True, default={})
    params = {name: param.keywords.get("default") for name, param in every.items()} | fields
    moment = datetime(2024, 3, 1, tzinfo=UTC)
    dag_run = SimpleNamespace(logical_date=moment, run_after=moment, **run)
    return {
        "params": params,
        "dag_run": dag_run,
        "run_id": "manual__1",
        "dag": SimpleNamespace(dag_id="Beam_inference"),
    }


def test_the_fields_are_flags_of_the_command_line(dags):
    flag_names = {action.dest for action in flags_parser()._actions}
    assert {"job", "chunks", *dags.common.OVERRIDES, *dags.dataflow.GPU_FIELDS} <= flag_names
    flags = [f"--{name}=1" for name in dags.common.OVERRIDES if name not in ("roi", "resume")]
    _, unknown = command_parser().parse_known_args(
        ["verify", "job.yaml", "--deep", *flags, "--roi=0x0x0:1x1x1", "--resume=true"]
    )
    assert unknown == []


def test_the_dataflow_form_is_that_of_the_template(dags):
    template = {each["name"]: each for each in metadata(flags_parser())["parameters"]}
    assert set(dags.dataflow.TEMPLATE_FIELDS) == template.keys() - NOT_IN_THE_FORMS
    fields = {name: param.keywords for name, param in dags.dataflow.form_fields().items()}
    assert set(dags.dataflow.ENVIRONMENT_FIELDS) < fields.keys()
    for name in dags.dataflow.TEMPLATE_FIELDS:
        # empty would be the job file's
        required = "isOptional" not in template[name] or name == "resume"
        assert ("null" not in fields[name]["type"]) == required, name
        if "regexes" in template[name] and name != "max_failed_chunks" and name != "gpu_count":
            assert fields[name]["pattern"] == template[name]["regexes"][0], name
    assert fields["gpu"]["enum"] == [None, *GPUS]
    assert fields["gpu_sharing"]["enum"] == [None, *SHARINGS]
    assert fields["gpu_driver"]["pattern"] == f"^({DRIVERS})$"


def test_what_dataflow_is_asked_for(dags):
    fields = {
        "job": "gs://b/{{ ds }}/job.yaml",
        "resume": False,
        "max_failed_chunks": 0,
        "gpu": "l4",
        "max_workers": 8,
    }
    fields |= {"template": "gs://b/t.json", "input": "gs://b/{{ds}}"}
    request = dags.dataflow.launch_request(context(dags, fields))
    launch = request["launchParameter"]
    assert re.fullmatch(r"beam-inference-20240301t000000-[0-9a-f]{8}", launch["jobName"])
    assert launch["parameters"] == {
        "job": "gs://b/2024-03-01/job.yaml",
        "input": "gs://b/2024-03-01",
        "resume": "false",
        "max_failed_chunks": "0",
        "gpu": "l4",
    }
    assert launch["environment"] == {"maxWorkers": "8"}
    json.dumps(request)


def test_a_name_is_the_same_for_a_run_and_another_for_another(dags):
    run = context(dags, {})
    assert dags.dataflow.job_name(run) == dags.dataflow.job_name(
        context(dags, {"job": "gs://b/other.yaml"})
    )
    assert dags.dataflow.job_name(run) != dags.dataflow.job_name({**run, "run_id": "manual__2"})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"input": "gs://b/em/"}, ("b", "em/info")),
        ({"input": "gs://b/{{ ds }}", "marker": "zarr.json"}, ("b", "2024-03-01/zarr.json")),
        ({"input": "s3://b/em", "marker": "gs://c/ready"}, ("c", "ready")),
        ({"marker": "gs://c/ready"}, ("c", "ready")),
        ({"input": "s3://b/em"}, ("", "")),
        ({"input": "gs://b/em", "marker": None}, ("", "")),
        ({}, ("", "")),
    ],
)
def test_what_is_waited_for(dags, fields, expected):
    assert dags.dataflow.marker(context(dags, fields)) == expected


def test_the_flags_of_a_local_run(dags):
    fields = {
        "job": "/data/job.yaml",
        "roi": "0x0x0:1x2x3",
        "beam_flags": {"direct_num_workers": 2},
        "chunks": "/c",
    }
    assert dags.local.flags(context(dags, fields)) == {
        "direct_num_workers": 2,
        "job": "/data/job.yaml",
        "roi": "0x0x0:1x2x3",
        "resume": "true",
        "chunks": "/c",
    }


def test_the_verification_is_of_the_same_job_and_cannot_be_taken_for_shell_commands(dags):
    fields = {
        "job": "/data/job.yaml; rm x",
        "output": "gs://b/$(out)",
        "deep": True,
        "chunks": "/c",
    }
    words = shlex.split(
        dags.common.verification().keywords["bash_command"](context=context(dags, fields))
    )
    assert words == [
        *("/opt/py thon", "-m", "beam_inference", "verify", "/data/job.yaml; rm x"),
        *("--output=gs://b/$(out)", "--resume=true", "--deep"),
    ]


@pytest.mark.slow
def test_a_job_file_of_steps_is_run_and_verified(dags, tmp_path, monkeypatch):
    array = np.random.default_rng(0).integers(1, 256, (16, 32, 32), dtype=np.uint8)
    write_volume(tmp_path / "in", array)
    model = {"normalize": {"levels": "levels.json"}}
    steps = {
        "levels": "levels in --to levels.json",
        "map": job_values("in", "map", model=model),
        "coarse": "pyramid map --num-scales 1 --method mean",
    }
    job = tmp_path / "steps.yaml"
    job.write_text(yaml.safe_dump({"steps": steps}, sort_keys=False))
    run = context(dags, {"job": str(job), "beam_flags": {"direct_num_workers": 1}, "deep": True})
    verify = shlex.split(dags.common.verification().keywords["bash_command"](context=run))
    assert main(verify[3:]) == 1, "nothing is done yet"
    monkeypatch.setattr(sys, "argv", ["main.py"])
    flags = [f"--{name}={value}" for name, value in dags.local.flags(run).items()]
    assert run_with_flags(["--runner=DirectRunner", "--labels=airflow-version=v3", *flags]) == 0
    assert main(verify[3:]) == 0


ROWS = """
em: {schedule: "@daily", job: "/data/{{ ds }}.yaml", deep: true}
tissue: {assets: [x://bucket/tissue], job: /data/tissue.yaml}
cloud: {dag: dataflow, job: gs://bucket/job.yaml, region: europe-west4}
"""


def test_each_row_is_a_dag_whose_form_it_presets(dags, tmp_path, monkeypatch):
    (tmp_path / "jobs.yaml").write_text(ROWS)
    monkeypatch.setenv("BEAM_INFERENCE_JOBS", str(tmp_path / "jobs.yaml"))
    daily, tissue = dags.common.scheduled_jobs("local", dags.local.form_fields())
    assert (daily.dag_id, daily.schedule) == ("beam_inference_em", "@daily")
    (asset,) = tissue.schedule
    assert asset.words == ("x://bucket/tissue",)
    params = dags.local.make_dag(daily).keywords["params"]
    assert params["job"].keywords["default"] == "/data/{{ ds }}.yaml"
    assert params["deep"].keywords["default"] is True
    assert params["runner"].keywords["default"] == "DirectRunner"
    (cloud,) = dags.common.scheduled_jobs("dataflow", dags.dataflow.form_fields())
    assert cloud.schedule is None
    params = dags.dataflow.make_dag(cloud).keywords["params"]
    assert params["region"].keywords["default"] == "europe-west4"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("[em]", "expected rows by names"),
        ("em: /data/em.yaml", "expected rows by names"),
        ("a b: {job: x}", "a name has letters"),
        ("em: {dag: flink}", "expected local or dataflow"),
        ("local: {job: x}", "choose another"),
        ("em: {assets: 'x://y'}", "expected a list of URIs"),
        ("em: {jobs: x}", "jobs: no field of the form; expected dag, schedule, assets, job"),
        ("em: {schedule: '@daily', assets: [x://y]}", "remove one"),
    ],
)
def test_rows_that_say_nothing_sensible_are_refused(dags, tmp_path, monkeypatch, rows, message):
    (tmp_path / "jobs.yaml").write_text(rows)
    monkeypatch.setenv("BEAM_INFERENCE_JOBS", str(tmp_path / "jobs.yaml"))
    with pytest.raises(ValueError, match=message):
        dags.common.scheduled_jobs("local", dags.local.form_fields())
