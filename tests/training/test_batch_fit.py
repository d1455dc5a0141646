"""The batch that fits: projected memory against measured memory, and what the command says."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from helpers import write_volume

from beam_inference.cli.main import main
from beam_inference.training.batch_fit import fit_batch
from beam_inference.training.config import load_training

MEBIBYTE = 2**20


@pytest.fixture
def path(tmp_path):
    """A training file over a small volume."""
    write_volume(tmp_path / "em", np.zeros((64, 128, 128), np.uint8))
    values = {
        "volumes": [{"image": "em", "labels": "em"}],
        "output": "trained",
        "patch_shape": [16, 32, 32],
        "target": {"kind": "affinities"},
        "network": {"residual_unet": {"widths": [8, 16]}},
        "split": {"validation": 0},
        "batch_size": 2,
        "threads": 1,
    }
    (tmp_path / "training.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "training.yaml"


MEASURE = """
import sys
from pathlib import Path
from beam_inference.training.batch_fit import held_memory, measure_peak
from beam_inference.training.config import load_training
from beam_inference.training.trainer import try_steps

with try_steps(load_training(Path(sys.argv[1]))) as trial:
    before = held_memory()
    trial.take_step(1)
    print(measure_peak(trial, int(sys.argv[2])) - before)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_projected_memory_is_that_of_a_step(path):
    available = 1000 * MEBIBYTE
    fit = fit_batch(load_training(path), available)
    assert fit.samples >= 16
    assert fit.step_bytes <= available < 2.2 * fit.step_bytes
    told = subprocess.check_output([sys.executable, "-c", MEASURE, path, str(fit.samples)])
    assert int(told) == pytest.approx(fit.step_bytes, rel=0.2)
    assert fit_batch(load_training(path), available_bytes=1).samples == 0
    assert not (path.parent / "trained").exists()


@pytest.mark.slow
def test_the_command_names_a_batch_and_trains_nothing(path, capsys):
    assert main(["train", str(path), "--fit-batch"]) == 0
    told = re.search(r"batch_size: (\d+) fits, for each process", capsys.readouterr().out)
    assert int(told[1]) >= 8
    assert not (path.parent / "trained").exists()


@pytest.mark.gpu
def test_on_a_gpu_steps_grow_until_one_does_not_fit(path):
    fit = fit_batch(load_training(path))
    assert fit.samples >= 8
    assert 0 < fit.step_bytes <= torch.cuda.get_device_properties(0).total_memory
