"""The Flex Template: its form agrees with the command line, and its images with the lock file."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fakes.dataflow import DataflowStandIn

from beam_inference.cli.flex_template import main, metadata
from beam_inference.cli.run import drop_empty_flags, flags_parser

ROOT = Path(__file__).parents[2]
FLEX = ROOT / "templates" / "flex"
IMAGES = ["Dockerfile", "Dockerfile.cpu"]


@pytest.fixture(scope="module")
def parser():
    return flags_parser()


@pytest.fixture(scope="module")
def parameters(parser):
    return {parameter["name"]: parameter for parameter in metadata(parser)["parameters"]}


def test_the_committed_form_is_the_generated_one(parser):
    generated = json.dumps(metadata(parser), indent=2, ensure_ascii=False) + "\n"
    assert (FLEX / "metadata.json").read_text() == generated, "run make metadata"


def test_the_command_prints_the_form(capsys):
    assert main() == 0
    assert json.loads(capsys.readouterr().out) == metadata(flags_parser())


def test_googles_own_type_reads_it(parser):
    dataflow = pytest.importorskip(
        "google.cloud.dataflow_v1beta3", reason="google-cloud-dataflow-client is absent"
    )
    read = dataflow.TemplateMetadata.from_json(json.dumps(metadata(parser)))
    assert {parameter.name: parameter.param_type.name for parameter in read.parameters} == {
        parameter["name"]: parameter["paramType"] for parameter in metadata(parser)["parameters"]
    }


def test_gcloud_takes_it(tmp_path):
    gcloud = shutil.which("gcloud")
    if gcloud is None:
        pytest.skip("gcloud is absent")
    command = [
        gcloud,
        "dataflow",
        "flex-template",
        "build",
        "gs://b/t.json",
        "--image=r-docker.pkg.dev/p/r/i:1",
    ]
    command += [
        "--sdk-language=PYTHON",
        f"--metadata-file={FLEX / 'metadata.json'}",
        "--project=p",
        "--print-only",
    ]
    environment = {
        **os.environ,
        "CLOUDSDK_CONFIG": str(tmp_path),
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    }
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert '"sdk_container_image"' in run.stdout


def test_gcloud_launches_it_with_the_parameters_as_given(tmp_path):
    gcloud = shutil.which("gcloud")
    if gcloud is None:
        pytest.skip("gcloud is absent")
    given = {
        "job": "gs://bucket/job.yaml",
        "sdk_container_image": "h/i:1",
        "roi": "0x0x0:64x512x512",
        "gpu": "l4",
    }
    command = [
        gcloud,
        "dataflow",
        "flex-template",
        "run",
        "fib25-1",
        "--region=europe-west4",
        "--max-workers=4",
    ]
    command.append("--template-file-gcs-location=gs://bucket/t.json")
    command.append(f"--parameters={','.join(f'{key}={value}' for key, value in given.items())}")
    with DataflowStandIn() as dataflow:
        settings = {
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_DATAFLOW": f"{dataflow.url}/",
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CORE_PROJECT": "my-project",
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CONFIG": str(tmp_path),
        }
        done = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        (launch,) = dataflow.launches
    assert launch["parameters"] == given
    assert launch["environment"]["maxWorkers"] == 4


def test_what_the_service_wants_of_each_parameter(parameters):
    for name, parameter in parameters.items():
        for key in ("label", "helpText"):
            assert len(parameter[key]) > 2, (name, key)
        assert "%(" not in parameter["helpText"]
        assert isinstance(parameter.get("defaultValue", ""), str)
        assert parameter.get("parentName", "job") in parameters


def test_parameters_are_the_flags(parser, parameters):
    flags = {action.dest for action in parser._actions} - {"help", "debug", "set"}
    assert set(parameters) == flags | {"sdk_container_image"}
    assert [name for name, p in parameters.items() if not p.get("isOptional")] == [
        "job",
        "sdk_container_image",
    ]
    # What the launcher passes from the launch's environment must not be a parameter too.
    launcher = {
        "runner",
        "project",
        "region",
        "job_name",
        "template_location",
        "machine_type",
        "experiments",
    }
    assert not launcher & set(parameters)


def test_enumerations_are_the_parsers_choices(parser, parameters):
    enumerated = 0
    for action in parser._actions:
        if action.choices is None or action.dest not in parameters:
            continue
        values = [option["value"] for option in parameters[action.dest].get("enumOptions", [])]
        if parameters[action.dest]["paramType"] == "ENUM":
            enumerated += 1
            assert values == list(action.choices)
            assert (
                action.default is None or parameters[action.dest]["defaultValue"] == action.default
            )
        else:
            assert set(action.choices) == {"true", "false"}
            assert parameters[action.dest]["paramType"] == "BOOLEAN"
    assert enumerated >= 3


def test_switches_are_booleans(parser, parameters):
    for action in parser._actions:
        if action.nargs == 0 and action.dest in parameters:
            assert parameters[action.dest]["paramType"] == "BOOLEAN"
            assert parameters[action.dest]["defaultValue"] == "false"


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        (
            "roi",
            ["0x0x0:64x512x512", "-3x-5x2:16x27x52"],
            ["0,0,0:1,1,1", "0x0:1x1", "0x0x0", "0x0x0:1x1x1 "],
        ),
        ("input", ["gs://b/em", "s3://b/em", "https://h/em"], ["em", "/data/em", "gs://"]),
        ("output", ["gs://b/o", "s3://b/o"], ["https://h/o", "out", "file:///o"]),
        ("weights", ["gs://b/w.safetensors"], ["w.pt"]),
        ("max_failed_chunks", ["0", "12"], ["-1", "many", "1.5"]),
        ("gpu_count", ["1", "16"], ["0", "-1", "one"]),
        ("gpu_driver", ["latest", "default", "5xx", "580.95.05"], ["550;count:8", "newest", ""]),
        (
            "sdk_container_image",
            [
                "europe-west4-docker.pkg.dev/p/r/beam-inference:0.1.0",
                f"gcr.io/p/i@sha256:{'0' * 64}",
                "host:5000/i:1",
            ],
            ["beam-inference", "gcr.io/p/i", "gcr.io/p/i:", "gcr.io/p/i:a b"],
        ),
    ],
)
def test_patterns(parameters, name, accepted, refused):
    (pattern,) = parameters[name]["regexes"]
    for value in accepted:
        assert re.fullmatch(pattern, value), value
    for value in refused:
        assert not re.search(pattern, value), value


def test_patterns_are_posix(parameters):
    for name, parameter in parameters.items():
        for pattern in parameter.get("regexes", []):
            re.compile(pattern)
            assert not re.search(r"\\[a-zA-Z]|\(\?", pattern), name


def test_defaults_of_a_form_are_no_wish(parser, parameters):
    """A form passes every field: one that nobody has filled in must mean the same as no flags."""
    filled = [
        f"--{name}={p['defaultValue']}" for name, p in parameters.items() if "defaultValue" in p
    ]
    empty = [
        f"--{name}="
        for name, p in parameters.items()
        if "defaultValue" not in p and p.get("isOptional")
    ]
    words = drop_empty_flags(["--job=gs://b/job.yaml", *filled, *empty], parser)
    assert parser.parse_args(words) == parser.parse_args(["--job=gs://b/job.yaml"])


def test_a_flag_without_description_is_an_error():
    parser = argparse.ArgumentParser()
    parser.add_argument("--novel", help="something")
    with pytest.raises(LookupError, match="--novel: describe it"):
        metadata(parser)


@pytest.mark.parametrize("name", IMAGES)
def test_hadolint_finds_nothing(name):
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is absent")
    run = subprocess.run([hadolint, str(FLEX / name)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", IMAGES)
def test_images_hold_what_the_lock_says(name):
    text = (FLEX / name).read_text()
    lock = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    )
    (beam,) = re.findall(r"^ARG BEAM_VERSION=(.+)$", text, re.MULTILINE)
    assert beam == lock["apache-beam"]
    (python,) = re.findall(r"^ARG PYTHON_VERSION=(.+)$", text, re.MULTILINE)
    minor = ".".join(python.split(".")[:2])
    assert f"FROM apache/beam_python{minor}_sdk:" in text
    assert f"/python{minor.replace('.', '')}-template-launcher-base:" in text
    assert f'python_requires=">={minor}"' in (ROOT / "setup.py").read_text()
    for install in re.findall(r"pip install (?:.*\\\n)*.*", text):
        assert "--no-cache-dir" in install
        assert "-c requirements.txt" in install or "--no-deps" in install
    assert "pip check" in text


def test_the_constraints_are_of_the_locks_torch():
    constraints = (FLEX / "constraints.txt").read_text()
    (torch,) = re.findall(r"^torch==(.+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert f"torch=={torch} " in constraints, (
        "another torch has other CUDA libraries: resolve them anew"
    )
    locked = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    assert not locked & set(re.findall(r"^([\w.-]+)==", constraints, re.MULTILINE))


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_copied_is_let_through(name):
    let_through = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set()
    for sources in re.findall(
        r"^COPY (?!--from)(.+) \S+$", (FLEX / name).read_text(), re.MULTILINE
    ):
        copied |= set(sources.split())
    assert copied == let_through
    assert all((ROOT / path).exists() for path in copied)


def test_the_cloud_build_builds_an_image_of_these():
    build = yaml.safe_load((FLEX / "cloudbuild.yaml").read_text())
    assert (ROOT / build["substitutions"]["_DOCKERFILE"]).name in IMAGES
    used = set(re.findall(r"\$(_\w+)", str(build["steps"]) + str(build["images"])))
    assert used == {"_IMAGE", *build["substitutions"]}
    for argument in re.findall(r"--build-arg=(\w+)=", str(build["steps"])):
        assert all(f"ARG {argument}=" in (FLEX / name).read_text() for name in IMAGES)
