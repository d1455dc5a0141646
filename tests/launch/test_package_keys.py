"""Jobs that run a packaged network otherwise than the package's own tool does."""

import logging

import nnunet_folders as made
import numpy as np
import pytest
from helpers import write_volume

from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.launch.package_keys import list_departures
from beam_inference.models.packages import Setting

pytest.importorskip("dynamic_network_architectures")

PLAIN = {
    "input": {"path": "in"},
    "output": {"path": "out"},
    "model": {"path": "identity", "normalize": {"scale": 0.5}},
    "inference": {"patch_shape": [8, 8, 8], "patch_overlap": [4, 4, 4], "chunk_shape": [8, 8, 8]},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A place with the job that init wrote for a results folder and a volume."""
    made.make_folder(tmp_path / "model", mirror_axes=(0, 1, 2))
    array = np.random.default_rng(0).integers(1, 256, (20, 60, 50), dtype=np.uint8)
    write_volume(tmp_path / "em", array, voxel_size_nm=(2e6, 1e6, 1e6))
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--model", "model", "--input", "em"]) == 0
    assert main(["levels", "em", "--to", "levels.json"]) == 0
    return tmp_path


def warnings_of(caplog, *words):
    """What a first launch warns of, and then another."""
    with caplog.at_level(logging.WARNING):
        assert main(["run", "job.yaml", *words]) == 0
        assert main(["run", "job.yaml", *words]) == 0
    return [each.getMessage() for each in caplog.records if "own tool" in each.getMessage()]


def test_a_job_as_init_wrote_it_departs_nowhere(folder, caplog):
    assert warnings_of(caplog) == []


def test_what_was_changed_is_told_once(folder, caplog):
    words = ["--set=inference.augment=none", "--set=inference.blend=bump"]
    (message,) = warnings_of(caplog, *words, "--set=output.dtype=uint16")
    assert "is nnU-Net, 3d_fullres, which its own tool runs otherwise" in message
    assert "inference.blend is 'bump', its tool has {" in message
    assert "inference.augment is 'none', its tool has {'mirror'" in message
    assert message.count("its tool has") == 2


def test_packages_among_the_members_of_an_ensemble_are_told_of_by_their_keys(folder, caplog):
    """A member that is fed otherwise gives a wrong share of the mean, and nothing told."""
    members = '--set=model.ensemble=[{"path": "model", "share": 2}]'
    messages = warnings_of(caplog, members, "--set=inference.blend=bump")
    keys = [each.partition(".path ")[0] for each in messages]
    assert keys == ["model", "model.ensemble.0"]
    assert all("inference.blend is 'bump', its tool has {" in each for each in messages)


@pytest.mark.parametrize(
    ("setting", "number"),
    [
        (Setting("model.normalize", {"scale": 0.5}, ""), 0),
        (Setting("model.normalize", {"scale": 0.25}, ""), 1),
        (Setting("inference.patch_overlap", [4, 4, 4], ""), 0),
        (Setting("inference.patch_shape", [2, 2, 2], ""), 1),  # goes with no overlap of 4
        (Setting("output.dtype", "uint8", ""), 0),
    ],
)
def test_values_are_compared_not_words(setting, number, tmp_path):
    assert len(list_departures(parse_job(PLAIN, tmp_path), [setting])) == number


def test_augmentation_that_no_package_asks_for_is_told(tmp_path):
    job = PLAIN | {"inference": PLAIN["inference"] | {"augment": "xy"}}
    job["model"] = PLAIN["model"] | {"channels": [{}]}
    (clause,) = list_departures(parse_job(job, tmp_path), [])
    assert clause == "inference.augment is 'xy', its tool has 'none'"
