"""Hostile use of components and segment: wrong units, kills, disks that are full or read-only.

Numbers in names and comments are rows of the list of hostile cases.
"""

import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from fakes.disks import run_on_disk
from helpers import files_of, job_values, read_volume, write_job, write_volume

from beam_inference.cli.main import main


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with maps of uint8 and of floats, of one channel and of three affinities."""
    random = np.random.default_rng(0)
    maps = np.repeat(np.repeat(random.integers(0, 256, (3, 4, 6, 6)), 4, 2), 4, 3)
    maps = np.repeat(maps, 4, 1).astype(np.uint8)
    write_volume(tmp_path / "affinities", maps)
    write_volume(tmp_path / "boundaries", maps[0])
    write_volume(tmp_path / "affinity_floats", maps / np.float32(255))
    write_volume(tmp_path / "boundary_floats", maps[0] / np.float32(255))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("segment affinities out --threshold 0.6 --low 26 --high 253", "--threshold 153"),
        ("segment affinities out --threshold 153 --low 0.1 --high 253", "--low 26"),
        ("segment affinities out --threshold 153 --low 26 --high 0.99", "--high 253"),
        ("segment affinities out --threshold 999 --low 26 --high 253", "from 0 to 255"),
        ("segment affinities out --threshold 153 --low -5 --high 253", "from 0 to 255"),
        ("segment affinity_floats out --threshold 5000 --low 26 --high 253", "-1024"),
        ("components boundaries out --threshold 0.6", "--threshold 153"),
        ("components boundaries out --threshold 999", "from 0 to 255"),
        ("components boundaries out --threshold 0", "from 1 to 255"),
        ("components boundary_floats out --threshold 1e39", "from -3.4"),
    ],
)
def test_thresholds_in_the_wrong_unit_are_refused(command, advice, workplace, capsys):
    assert main(shlex.split(command)) == 2
    captured = capsys.readouterr()
    assert advice in captured.err
    assert "stored units" in captured.err or "every value" in captured.err or "-1024" in advice
    assert not (workplace / "out").exists()


def test_a_threshold_of_run_in_the_wrong_unit_is_refused(workplace, capsys):
    values = job_values("boundaries", "out", model={"activation": "sigmoid"})
    values["output"]["dtype"] = "uint8"
    values["postprocess"] = [{"operator": "threshold", "at": 128}]
    assert main(["run", str(write_job(workplace / "job.yaml", values))]) == 2
    assert "threshold at 128, but the values there are from 0 to 1" in capsys.readouterr().err
    assert not (workplace / "out").exists()


@pytest.mark.slow
def test_a_result_that_separates_nothing_comes_with_a_warning(workplace, capsys):
    assert main(shlex.split("components boundary_floats out --threshold 128")) == 0
    warning = "^Warning: .*out is empty: no voxel of .*boundary_floats is at least 128"
    assert re.search(warning, capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["components", "segment"])
def test_the_examples_of_the_help_separate_objects(command, workplace, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    examples = re.findall(r"^  beam-inference (.*)", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) >= 2
    write_volume(workplace / "far_labels", np.repeat([[[1, 0, 2]]], 9, 0).astype(np.uint32))
    for example in examples:
        line = example.split(" --runner")[0].replace("gs://bucket/floats", "affinity_floats")
        assert main(shlex.split(line.replace("gs://bucket/", "far_"))) == 0
        told = capsys.readouterr().out
        assert "Warning" not in told
        assert int(re.search(r"(\d+) (components|segments) in ", told)[1]) > 1


LAYOUT = "--chunk_shape 8x8x8 --block_shape 8x8x8"
COMMANDS = {
    "components": f"components affinities out --channel 0 --threshold 128 {LAYOUT}",
    "segment": f"segment affinities out --threshold 153 --low 26 --high 253 {LAYOUT}",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", COMMANDS)  # rows 439 and 448
def test_five_kills_leave_the_bytes_of_an_undisturbed_run(kind, workplace):
    write_volume(  # so that a run takes long enough to be killed
        workplace / "noise",
        np.random.default_rng(1).integers(0, 256, (3, 24, 24, 24)).astype(np.uint8),
        block_shape=(8, 8, 8),
    )
    words = shlex.split(COMMANDS[kind].replace(" affinities ", " noise "))
    command = [sys.executable, "-m", "beam_inference", *words]
    undisturbed = [*command[:5], "undisturbed", *command[6:]]
    told = subprocess.run(undisturbed, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    records = workplace / "out" / "_beam_inference" / kind
    kills = 0
    for _ in range(5):
        done = len(list(records.glob("**/*.json")))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        while process.poll() is None and len(list(records.glob("**/*.json"))) < done + 6:
            time.sleep(0.005)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills == 5
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert files_of(workplace / "out") == files_of(workplace / "undisturbed")
    assert read_volume(workplace / "out").any()


def run_components_on(options, workplace):
    """What components told, and a copy of the disk that it was to write to."""
    (workplace / "disk").mkdir()
    command = COMMANDS["components"].replace(" out ", " disk/out ")
    words = [sys.executable, "-m", "beam_inference", *shlex.split(command)]
    return run_on_disk(words, workplace / "disk", options, workplace / "copy")


@pytest.mark.slow  # row 268
def test_components_onto_a_read_only_disk(workplace):
    told = run_components_on("ro", workplace)
    assert told.returncode in (1, 2), told.stderr
    assert "disk/out" in told.stdout + told.stderr
    assert "Traceback" not in told.stderr
    assert "not foreseen" not in told.stderr


@pytest.mark.slow  # row 303
@pytest.mark.parametrize("kilobytes", [40, 120])
def test_components_onto_a_disk_that_becomes_full(kilobytes, workplace):
    told = run_components_on(f"size={kilobytes}k", workplace)
    assert told.returncode in (1, 2), told.stderr
    assert "Traceback" not in told.stderr
    assert "not foreseen" not in told.stderr
    assert "complete" not in told.stdout
    # with space again, the same command completes what was begun there
    (workplace / "disk").rmdir()
    (workplace / "copy").rename(workplace / "disk")
    command = COMMANDS["components"]
    assert main(shlex.split(command.replace(" out ", " disk/out "))) == 0
    assert main(shlex.split(command)) == 0
    assert files_of(workplace / "disk" / "out") == files_of(workplace / "out")
