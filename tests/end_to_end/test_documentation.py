"""Execute every command and example of the documentation, on a volume and a network for it."""

import doctest
import importlib
import json
import os
import pkgutil
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path
from typing import get_args

import nnunet_folders
import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import write_volume

import beam_inference
from beam_inference.cli.main import main
from beam_inference.config.job import JobConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (?:file: )?([\w-]+\.(?:yaml|py))\n")


def blocks(page):
    return [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the pages' volume em, their network affinity.ts and the README's job.yaml."""
    array = np.random.default_rng(0).integers(0, 256, (40, 100, 90), dtype=np.uint8)
    write_volume(tmp_path / "em", array, voxel_size_nm=(40.0, 8.0, 8.0))
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv3d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(8, 3, 3, padding=1)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(network).save(str(tmp_path / "affinity.ts"))
    safetensors.torch.save_file(network.state_dict(), tmp_path / "network.safetensors")
    (language, job), *_ = blocks(ROOT / "README.md")
    assert language == "yaml"
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "templates").symlink_to(ROOT / "templates")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_nnunet_files(folder):
    """The results folder of docs/nnunet.md, a finer volume, and one of a petavoxel."""
    pytest.importorskip("dynamic_network_architectures")
    spacing = [4e-5, 8e-6, 8e-6]
    plans = nnunet_folders.plans(
        configurations={"3d_fullres": nnunet_folders.configuration(spacing=spacing)}
    )
    name = "nnUNetTrainer__nnUNetPlans__3d_fullres"
    nnunet_folders.make_folder(folder / name, made=plans, folds=(0, 1))
    array = np.random.default_rng(0).integers(0, 256, (40, 80, 60), dtype=np.uint8)
    write_volume(folder / "em_finer", array, voxel_size_nm=(20.0, 4.0, 4.0))
    info = json.loads((folder / "em" / "info").read_text())
    info["scales"][0]["size"] = [100_000] * 3
    (folder / "big" / info["scales"][0]["key"]).mkdir(parents=True)
    (folder / "big" / "info").write_text(json.dumps(info))


def add_fib25(folder, data):
    """The two arrays of docs/labelling.md."""
    (folder / "fib25_image.npy").symlink_to(data / "fib25_medulla_train2_image.npy")
    with np.load(data / "fib25_medulla_train2_labels.npz") as file:
        np.save(folder / "fib25_labels.npy", file["labels"])


def assert_second_round_is_better(folder):
    """The scores of the best threshold on the box that no training has seen."""
    for score in ("variation_of_information", "adapted_rand_error"):
        first, second = (
            min(each["objects"][score] for each in json.loads(path.read_text())["thresholds"])
            for path in (folder / "first.json", folder / "second.json")
        )
        assert second < first, score


def run_line(line):
    program, *arguments = shlex.split(line)
    if program == "python":
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, check=False
        ).returncode
    assert program == "beam-inference", line
    return (
        looked_at(arguments)
        if arguments[0] == "view" and "--link" not in arguments
        else main(arguments)
    )


def looked_at(arguments):
    """Open what a command serves, and interrupt it; its exit code."""
    command = [sys.executable, "-m", "beam_inference", *arguments]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DISPLAY", "WAYLAND_DISPLAY")
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        url = process.stdout.readline().split()[0]
        with urllib.request.urlopen(f"{url}state.json") as state:
            assert json.load(state)["layers"]
        process.send_signal(signal.SIGINT)
        return process.wait(timeout=90)


SLOW_PAGES = (
    "laptop.md",
    "components.md",
    "evaluate.md",
    "many-volumes.md",
    "models.md",
    "nnunet.md",
    "planning.md",
    "pyramid.md",
    "report.md",
    "segment.md",
    "steps.md",
    "training.md",
    "tutorial.md",
    "view.md",
)
SLOW = (pytest.mark.slow, pytest.mark.timeout(600))
SLOWEST = (pytest.mark.slow, pytest.mark.timeout(2400))  # two trainings


def marks_of(page):
    if page.name == "labelling.md":
        return SLOWEST
    return SLOW if page.name in SLOW_PAGES else ()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks_of(page), id=page.name) for page in PAGES],
)
def test_the_pages_commands_and_examples_work(page, workplace, request):
    names = {}
    if page.name == "nnunet.md":
        add_nnunet_files(workplace)
    if page.name == "labelling.md":
        add_fib25(workplace, request.getfixturevalue("shared_data"))
    for language, text in blocks(page):
        name = FILE_NAME.match(text)
        if name:
            (workplace / name[1]).write_text(text)
        elif language == "python":
            exec(compile(text, str(page), "exec"), names)
        elif language == "console":
            for line in text.strip().splitlines():
                assert run_line(line) == 0, line
        else:
            raise AssertionError(f"{page.name}: what is a block of {language}?")
    if page.name == "labelling.md":
        assert_second_round_is_better(workplace)


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
            name, _, section = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), f"{page.name}: {target}"
            assert not section or section in sections(file), f"{page.name}: {target}"


def sections(page):
    """The names by which links reach a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", ["guarantees.md", "nnunet.md"])
def test_tests_that_a_page_names_exist(page):
    paths = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / page).read_text())
    assert paths
    for path in paths:
        assert (ROOT / path).is_file(), path


def models_in(annotation):
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [model for each in get_args(annotation) for model in models_in(each)]


def test_files_that_the_map_of_the_code_names_exist():
    page = (ROOT / "docs" / "architecture.md").read_text().split("## Where to look")[1]
    for path in re.findall(r"`((?!beam_inference)[\w/]+(?:\.py|/))`", page):
        folder = ROOT if path.startswith("tests/") else ROOT / "beam_inference"
        assert (folder / path).exists(), path


def test_the_page_on_extending_shows_the_example():
    page = (ROOT / "docs" / "extending.md").read_text()
    folder = ROOT / "examples" / "extension"
    for path in folder.glob("beam_inference_example/[!_]*.py"):
        assert f"# file: {path.name}\n{path.read_text()}```" in page, path.name
    indented = [
        f"    {line}".rstrip() for line in (folder / "pyproject.toml").read_text().split("\n")
    ]
    assert "\n".join(indented).rstrip() in page


def test_every_key_of_the_job_file_is_documented():
    page = (ROOT / "docs" / "job-file.md").read_text()
    for section, field in JobConfig.model_fields.items():
        heading = f"## {section}\n"
        assert heading in page
        text = page.split(heading)[1].split("\n## ")[0]
        models = models_in(field.annotation)
        assert models
        for key in {key for model in models for key in model.model_fields}:
            assert f"`{key}`" in text or f"`{key}: " in text, f"{section}.{key}"


def test_docstring_examples():
    attempted = 0
    for info in pkgutil.walk_packages(beam_inference.__path__, "beam_inference."):
        if not info.name.endswith("__main__"):
            result = doctest.testmod(importlib.import_module(info.name))
            assert result.failed == 0
            attempted += result.attempted
    assert attempted > 0
