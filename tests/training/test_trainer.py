"""Trainings: that they learn, go on after a kill, share work, and leave a job that runs."""

import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import yaml
from helpers import read_volume, write_volume
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from beam_inference.cli.main import main
from beam_inference.errors import (
    ConfigError,
    ModelContractError,
    StateError,
    VolumeError,
    WorkerFault,
)
from beam_inference.launch.job_files import load_job
from beam_inference.models.loading import load_network
from beam_inference.training.config import load_training, parse_training
from beam_inference.training.events import EVENTS
from beam_inference.training.output_files import hold_folder
from beam_inference.training.results import JOB_FILE, NETWORK_FILE, RESULTS
from beam_inference.training.trainer import CHECKPOINT, TrainingDiverged, train, try_steps

NETWORK = """
import pathlib
import torch
from torch import nn
from beam_inference.residual_unet import InPlaceBatchNorm

def network():
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.Dropout(0.1), nn.ReLU(), nn.Conv3d(4, {channels}, 1)
    )

class Branches(nn.Module):
    # side by side, so that ranks might come to the statistics in two orders
    def __init__(self):
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.left = nn.Sequential(nn.Conv3d(4, 4, 1), nn.BatchNorm3d(4))
        self.right = nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d(4))
        self.last = nn.Conv3d(4, 3, 1)
    def forward(self, batch):
        batch = self.first(batch)
        return self.last(torch.relu(self.left(batch) + self.right(batch)))

def batch_norm():
    return Branches()

def plain():
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1))

class Crossing(nn.Module):
    def forward(self, batch):
        return batch - batch.mean((0, 2, 3, 4), keepdim=True)

def crossing():
    return nn.Sequential(nn.Conv3d(1, 3, 1), Crossing(), nn.BatchNorm3d(3))

def function():
    return lambda batch: batch

def wrong():
    return nn.Conv3d(1, 7, 1)

def picky():
    return nn.Conv3d(2, 3, 1)

class Reused(nn.Module):
    # its exponential needs what its batch normalisation overwrites
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv3d(1, 3, 1)
        self.norm = InPlaceBatchNorm(3)
    def forward(self, batch):
        x = self.inner(batch).exp()
        return self.norm(x)

def reused():
    return Reused()

class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv3d(1, 3, 1)
    def forward(self, batch):
        return self.inner(batch), None

def several():
    return Several()

class Masked(nn.Module):
    # a constant that is kept with the weights, as masks of attention are
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv3d(1, 3, 1)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    def forward(self, batch):
        return self.inner(batch) + self.mask.exp().sum()

def masked():
    return Masked()

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv3d(1, 3, 1)
        self.same = nn.Conv3d(1, 3, 1)
        self.same.weight = self.inner.weight
    def forward(self, batch):
        return self.inner(batch) + self.same(batch)

def tied():
    return Tied()

class Scale(nn.Module):
    # its first version kept the logarithms of its factors
    _version = 2
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((3,), 2.0))
    def _load_from_state_dict(self, state, prefix, metadata, *others):
        if metadata.get("version", 1) < 2:
            state[prefix + "factor"] = state[prefix + "factor"].exp()
        super()._load_from_state_dict(state, prefix, metadata, *others)
    def forward(self, batch):
        return batch * self.factor[:, None, None, None]

def versioned():
    return nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), Scale())

class Answer(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.inner = nn.Conv3d(1, 3, 1)
        self.change = change
    def forward(self, batch):
        return self.change(self.inner(batch))

def fewer():
    return Answer(lambda answer: answer[:1])

def imaginary():
    return Answer(lambda answer: answer * 1j)

def frozen():
    return nn.Conv3d(1, 3, 1).requires_grad_(False)

def lazy():
    return nn.LazyConv3d(3, 1)

class Extra(nn.Conv3d):
    def get_extra_state(self):
        return dict(a=1)

def extra():
    return Extra(1, 3, 1)

class Growing(nn.Module):
    # training changes more of it than its weights
    def __init__(self, keeps):
        super().__init__()
        self.inner = nn.Conv3d(1, 3, 1)
        self.register_buffer("scale", torch.ones(()), persistent=keeps)
    def forward(self, batch):
        if self.training:
            self.scale *= 1.5
        return self.inner(batch) * self.scale

def growing():
    return Growing(keeps=False)

def growing_kept():
    return Growing(keeps=True)

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv3d(1, 3, 1)
        self.steps = 0
    def forward(self, batch):
        self.steps += self.training
        return self.inner(batch) * (1 + self.steps)

def counting():
    return Counting()

def another():
    made = pathlib.Path(__file__).with_name("made")
    layers = [nn.Conv3d(1, 3, 1)]
    if made.exists():
        layers.append(nn.Conv3d(3, 3, 1))
    made.touch()
    return nn.Sequential(*layers)

def nan():
    class Nan(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv3d(1, 3, 1)
        def forward(self, batch):
            return self.inner(batch) * torch.nan
    return Nan()
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a labelled volume of bright and dark columns, and factories."""
    y, x = np.indices((48, 48))
    labels = np.broadcast_to((1 + y // 6 * 8 + x // 6) % 5, (24, 48, 48)).astype(np.uint32)
    noise = np.random.default_rng(0).integers(0, 30, labels.shape)
    write_volume(tmp_path / "labels", labels)
    write_volume(tmp_path / "em", (labels * 40 + noise).astype(np.uint8))
    (tmp_path / "networks.py").write_text(NETWORK.format(channels=3))
    return tmp_path


def values(**keys):
    return {
        "volumes": [{"image": "em", "labels": "labels"}],
        "output": "trained",
        "patch_shape": [4, 12, 12],
        "split": {"block_shape": [8, 24, 24], "validation": 0.2, "test": 0.1},
        "target": {"kind": "affinities"},
        "network": {"path": "networks.py:network"},
        "steps": 6,
        "batch_size": 2,
        "validation_every": 3,
        "validation_batches": 1,
        "checkpoint_every": 2,
        "device": "cpu",
        "threads": 1,
    } | keys


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weights(folder, name="trained"):
    return safetensors.torch.load_file(folder / name / "weights.safetensors")


def check_same(first, second):
    assert first.keys() == second.keys()
    for name, each in first.items():
        assert torch.equal(each, second[name]), name


def events(folder, name="trained"):
    """What TensorBoard reads of a training."""
    read = EventAccumulator(str(folder / name / EVENTS))
    read.Reload()
    return read


def test_tensorboard_shows_losses_and_planes_also_of_a_training_that_goes_on(
    folder, one_thread, monkeypatch
):
    keys = {"optimizer": {"schedule": "constant", "learning_rate": 0.01}, "steps": 4}
    train(parse_training(values(**keys), folder))
    checkpoint = folder / "trained" / CHECKPOINT
    before = checkpoint.read_bytes()
    train(parse_training(values(**keys | {"steps": 5}), folder))
    checkpoint.write_bytes(before)  # as if killed after the last steps, before they were saved
    done = train(parse_training(values(**keys | {"steps": 6}), folder))
    found = events(folder)
    losses = [(each.step, each.value) for each in found.Scalars("loss/training")]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert np.allclose([loss for _, loss in losses], done.metrics.loss)
    assert [each.step for each in found.Scalars("loss/validation")] == [3, 4, 6]
    assert {each.value for each in found.Scalars("learning_rate")} == {np.float32(0.01).item()}
    for name in ("image", "target", "prediction"):
        pictures = found.Images(f"sample/{name}")
        assert [each.step for each in pictures] == [3, 4, 6]
        assert (pictures[0].height, pictures[0].width) == (12, 12)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    train(parse_training(values(**keys) | {"output": "without"}, folder))
    assert not (folder / "without" / EVENTS).exists()
    check_same(
        *(
            torch.load(each)["network"]
            for each in (io.BytesIO(before), folder / "without" / CHECKPOINT)
        )
    )


def test_a_tensorboard_that_cannot_be_used_ends_no_training(
    folder, one_thread, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert train(parse_training(values(steps=2), folder)).steps_done == 2
    assert "TensorBoard is installed, but cannot be used" in caplog.text
    assert not (folder / "trained" / EVENTS).exists()


def test_a_training_leaves_a_job_that_plan_accepts(folder, one_thread, capsys):
    (folder / "training.yaml").write_text(yaml.safe_dump(values(ema=0.5)))
    assert main(["train", str(folder / "training.yaml")]) == 0
    assert "6 steps (6 by this launch)" in capsys.readouterr().out
    assert main(["plan", str(folder / "trained" / "job.yaml")]) == 0
    job = yaml.safe_load((folder / "trained" / "job.yaml").read_text())
    assert job["model"]["activation"] == "sigmoid"
    assert job["model"]["voxel_size_nm"] == [10, 10, 10]
    assert job["model"]["channels"][1] == {"affinity": [0, -1, 0]}
    with safetensors.safe_open(folder / "trained" / "weights.safetensors", "pt") as file:
        record = json.loads(file.metadata()["training"])
    assert record["split"]["block_shape"] == [8, 24, 24]
    metrics = json.loads((folder / "trained" / "metrics.json").read_text())
    assert [step for step, _ in metrics["validation"]] == [3, 6]
    assert "data:image/png" in (folder / "trained" / "training.html").read_text()
    assert main(["train", str(folder / "training.yaml")]) == 0
    assert "6 steps (0 by this launch)" in capsys.readouterr().out


def test_a_resumed_training_gives_the_same_bits(folder, one_thread):
    keys = {"ema": 0.9, "optimizer": {"kind": "adamw", "schedule": "constant"}}
    whole = parse_training(values(**keys), folder)
    train(whole)
    parts = values(**keys) | {"output": "parts"}
    train(parse_training(parts | {"steps": 4}, folder))
    done = train(parse_training(parts, folder))
    assert done.steps_done == 2
    check_same(weights(folder), weights(folder, "parts"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_that_is_killed_at_random_gives_the_same_bits(folder):
    keys = {"steps": 400, "checkpoint_every": 7, "ema": 0.9, "augmentation": {"elastic": {}}}
    for name in ("whole", "killed"):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values(**keys) | {"output": name}))
    command = [sys.executable, "-m", "beam_inference", "train"]
    subprocess.run([*command, str(folder / "whole.yaml")], check=True, capture_output=True)
    kills = 0
    chance = random.Random(0)
    checkpoint = folder / "killed" / CHECKPOINT
    while not (folder / "killed" / "weights.safetensors").exists():
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        process = subprocess.Popen([*command, str(folder / "killed.yaml")], stderr=subprocess.PIPE)
        while process.poll() is None:
            if checkpoint.exists() and checkpoint.stat().st_mtime_ns != before:
                time.sleep(chance.random() * 0.5)
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        assert process.returncode in (0, -signal.SIGKILL)
    assert kills > 2
    check_same(weights(folder, "whole"), weights(folder, "killed"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "network",
    [
        {"path": "networks.py:plain"},
        {"residual_unet": {"widths": [3], "normalization": "batch"}},
    ],
    ids=["plain", "batch_norm"],
)
def test_two_ranks_give_one_ranks_weights(folder, network):
    train_with_ranks(folder, 1, network=network)
    train_with_ranks(folder, 2, network=network)
    check_close(weights(folder, "ranks1"), weights(folder, "ranks2"))


RANKS_KEYS = {
    "steps": 20,
    "batch_size": 4,
    "optimizer": {"kind": "sgd", "learning_rate": 0.05},
    "loss": {"kind": "dice_cross_entropy", "balance": 0.5},
    "target": {"kind": "affinities", "unlabelled": 3},
}


def train_with_ranks(folder, count, **keys):
    """Train in as many processes, into the folder "ranks" and their number."""
    path = folder / f"ranks{count}.yaml"
    config = values(**RANKS_KEYS) | keys | {"output": f"ranks{count}"}
    path.write_text(yaml.safe_dump(config))
    run = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    subprocess.run(
        [sys.executable, "-m", *run, "-m", "beam_inference", "train", str(path)],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def check_close(first, second):
    assert first.keys() == second.keys()
    for name, each in first.items():
        torch.testing.assert_close(each, second[name], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "partition", "network"),
    [
        (2, [1, 1, 2], {"path": "networks.py:plain", "crop_margin": [1, 2, 2]}),
        (4, [1, 2, 1], {"residual_unet": {"widths": [3, 4], "pooling": [1, 2, 2]}}),
        (4, [2, 1, 1], {"residual_unet": {"widths": [3], "normalization": "batch"}}),
        (2, [2, 1, 1], {"residual_unet": {"widths": [3, 4], "pooling": [4, 2, 2]}}),
        (4, [1, 1, 2], {"path": "networks.py:batch_norm"}),
    ],
    ids=["crop margin", "two teams", "in place", "a share without voxels", "batch norm"],
)
def test_ranks_that_share_patches_give_one_ranks_weights(folder, count, partition, network):
    train_with_ranks(folder, 1, network=network, ema=0.9)
    train_with_ranks(folder, count, network=network, ema=0.9, partition=partition)
    check_close(weights(folder, "ranks1"), weights(folder, f"ranks{count}"))
    metrics = [json.loads((folder / f"ranks{n}" / "metrics.json").read_text()) for n in (1, count)]
    assert np.allclose(metrics[0]["loss"], metrics[1]["loss"], atol=1e-5)
    assert np.allclose(metrics[0]["validation"], metrics[1]["validation"], atol=1e-5)


SHAPES = [{"shape": [4, 12, 12]}, {"shape": [2, 8, 8], "weight": 2}, {"shape": [6, 16, 16]}]
UNET = {"widths": [3, 4], "pooling": [1, 2, 2]}
IN_PLACE = {"residual_unet": UNET | {"normalization": "batch"}}
UNEQUAL_SHARES = {
    "unequal shares": (3, {"residual_unet": UNET}),
    "unequal shares, batch norm": (3, {"path": "networks.py:batch_norm"}),
    "unequal shares, batch norm in place": (
        3,
        {"residual_unet": UNET | {"normalization": "batch"}},
    ),
    "no work": (1, {"path": "networks.py:plain", "crop_margin": [0, 2, 2]}),
    "no work, batch norm": (1, {"path": "networks.py:batch_norm"}),
    "no work, batch norm in place": (1, IN_PLACE),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("batch_size", "network"), UNEQUAL_SHARES.values(), ids=UNEQUAL_SHARES)
def test_ranks_with_unequal_shares_give_one_ranks_weights(folder, network, batch_size):
    keys = {"network": network, "batch_size": batch_size, "patch_shapes": SHAPES, "ema": 0.9}
    train_with_ranks(folder, 1, **keys)
    train_with_ranks(folder, 2, **keys)
    check_close(weights(folder, "ranks1"), weights(folder, "ranks2"))
    metrics = [json.loads((folder / f"ranks{n}" / "metrics.json").read_text()) for n in (1, 2)]
    assert np.allclose(metrics[0]["loss"], metrics[1]["loss"], atol=1e-5)
    assert np.allclose(metrics[0]["validation"], metrics[1]["validation"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_do_not_share_a_folder_are_told(folder):
    """As machines without a folder in common: each process stands in one of its own."""
    for rank in "01":
        (folder / rank).mkdir()
    keys = values(steps=2, batch_size=2, network={"residual_unet": {"widths": [3]}})
    (folder / "training.yaml").write_text(yaml.safe_dump(keys | {"output": "PLACE/trained"}))
    (folder / "train.py").write_text(APART)
    run = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", folder / "train.py"]

    def launch():
        done = subprocess.run([sys.executable, "-m", *run, folder], capture_output=True, text=True)
        assert done.returncode
        return done.stderr

    assert "rank 1 does not find" in launch()
    train(parse_training(keys | {"output": "0/trained"}, folder))
    assert "unlike steps, [2, 0]" in launch()


APART = """
import os, sys
from pathlib import Path
import yaml
from beam_inference.training.config import parse_training
from beam_inference.training.trainer import train

folder = Path(sys.argv[1])
text = (folder / "training.yaml").read_text().replace("PLACE", str(folder / os.environ["RANK"]))
train(parse_training(yaml.safe_load(text), folder))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_that_shares_patches_may_go_on_alone(folder):
    network = {"residual_unet": {"widths": [3, 4], "pooling": [1, 2, 2]}}
    optimizer = {"kind": "sgd", "learning_rate": 0.05, "schedule": "constant"}
    keys = {"network": network, "optimizer": optimizer}
    train_with_ranks(folder, 2, partition=[1, 1, 2], **keys | {"steps": 10})
    (folder / "ranks2").rename(folder / "ranks1")
    train_with_ranks(folder, 1, **keys)
    (folder / "ranks1").rename(folder / "both")
    train_with_ranks(folder, 1, **keys)
    check_close(weights(folder, "both"), weights(folder, "ranks1"))


def test_a_layer_over_samples_is_refused_before_the_first_step(folder, one_thread):
    keys = {"network": {"path": "networks.py:crossing"}, "batch_size": 1, "patch_shapes": SHAPES}
    with pytest.raises(ModelContractError, match=r"1 \(Crossing\) cannot take them together"):
        train(parse_training(values(**keys), folder))
    assert not (folder / "trained" / CHECKPOINT).exists()


def test_trying_the_shapes_leaves_statistics_as_they_were(folder, one_thread):
    network = {"path": "networks.py:batch_norm"}
    optimizer = {"kind": "sgd", "schedule": "constant"}
    keys = {"network": network, "patch_shapes": SHAPES, "optimizer": optimizer}
    train(parse_training(values(**keys), folder))
    parts = values(**keys) | {"output": "parts"}
    train(parse_training(parts | {"steps": 4}, folder))
    train(parse_training(parts, folder))
    check_same(weights(folder), weights(folder, "parts"))


def test_a_number_of_ranks_that_does_not_fit_is_refused(folder, monkeypatch, one_thread):
    config = parse_training(values(partition=[1, 2, 2]), folder)
    for count in ("1", "6"):
        monkeypatch.setenv("WORLD_SIZE", count)
        with pytest.raises(ConfigError, match=f"4 ranks share each patch, and there are {count}"):
            train(config)
    with pytest.raises(ConfigError, match="steps are tried by one process"), try_steps(config):
        pass


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("normalization", ["instance", "batch"])
def test_a_trained_network_tells_objects_apart(folder, normalization):
    unet = {"widths": [4, 8], "pooling": [1, 2, 2], "normalization": normalization}
    network = {"residual_unet": unet}
    config = values(network=network, steps=80, validation_every=40, batch_size=4)
    optimizer = {"learning_rate": 0.01}
    done = train(parse_training(config | {"optimizer": optimizer}, folder))
    assert done.metrics.validation[-1][1] < 0.5 * done.metrics.loss[0]
    job = str(folder / "trained" / "job.yaml")
    assert main(["run", job, "--set", "output.block_shape=[8,12,12]"]) == 0
    found = read_volume(folder / "trained" / "prediction")
    labels = read_volume(folder / "labels")[0]
    y = (labels[:, 1:] == labels[:, :-1]) & (labels[:, 1:] != 0)
    assert found[1, :, 1:][y].mean() > 150 > 110 > found[1, :, 1:][~y].mean()


def test_samples_of_several_shapes_are_trained_with_and_resumed(folder, one_thread):
    keys = {"network": IN_PLACE, "patch_shapes": SHAPES, "batch_size": 3}
    constant = {"optimizer": {"schedule": "constant"}}
    parts = values(**keys) | {"output": "parts"} | constant
    train(parse_training(values(**keys) | {"output": "whole"} | constant, folder))
    train(parse_training(parts | {"steps": 4}, folder))
    train(parse_training(parts, folder))
    check_same(weights(folder, "whole"), weights(folder, "parts"))
    job = yaml.safe_load((folder / "parts" / "job.yaml").read_text())
    assert job["inference"]["patch_shape"] == [4, 12, 12]


@pytest.mark.gpu
@pytest.mark.parametrize("network", [{"residual_unet": UNET}, IN_PLACE], ids=["instance", "batch"])
def test_a_gpu_gives_the_weights_of_a_cpu(folder, network):
    keys = {"network": network, "patch_shapes": SHAPES, "batch_size": 3}
    optimizer = {"optimizer": {"kind": "sgd", "learning_rate": 0.05}}
    for device in ("cpu", "cuda"):
        config = values(**keys) | optimizer | {"device": device, "output": device}
        train(parse_training(config, folder))
    for name, each in weights(folder, "cpu").items():
        torch.testing.assert_close(each, weights(folder, "cuda")[name], rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_training_goes_on_on_a_gpu(folder, precision):
    keys = {"network": {"residual_unet": UNET}, "patch_shapes": SHAPES, "batch_size": 3}
    keys |= {"optimizer": {"kind": "sgd", "learning_rate": 0.05, "schedule": "constant"}}
    keys |= {"device": "cuda", "precision": precision, "ema": 0.9, "steps": 8}
    train(parse_training(values(**keys), folder))
    parts = values(**keys) | {"output": "parts"}
    train(parse_training(parts | {"steps": 5}, folder))
    assert train(parse_training(parts, folder)).steps_done == 3
    for name, each in weights(folder).items():  # gradients are added up in no certain order
        torch.testing.assert_close(each, weights(folder, "parts")[name], rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_more_ranks_than_gpus_are_refused(folder):
    count = torch.cuda.device_count() + 1
    with pytest.raises(subprocess.CalledProcessError) as caught:
        train_with_ranks(folder, count, device="cuda", batch_size=count)
    message = caught.value.stderr.decode()
    assert f"there are {count} ranks on this machine" in message
    assert "defect of beam-inference" not in message


def test_classes_are_learnt_by_numbers(folder, one_thread):
    (folder / "networks.py").write_text(NETWORK.format(channels=5))
    loss = {"kind": "dice_cross_entropy", "balance": 1}
    config = values(target={"kind": "classes", "count": 5}, loss=loss, steps=2)
    done = train(parse_training(config, folder))
    assert len(done.metrics.loss) == 2
    job = yaml.safe_load((folder / "trained" / "job.yaml").read_text())
    assert job["model"]["activation"] == "softmax"


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("function", ConfigError, "only a torch.nn.Module can be trained"),
        ("wrong", ConfigError, r"the network returned \[2, 7, 4, 12, 12\]; expected 3 channels"),
        ("none", ModelContractError, "has no function none"),
        ("picky", ModelContractError, "the network failed on an image of shape"),
        ("several", ModelContractError, "the network returned a tuple"),
        ("fewer", ConfigError, r"returned \[1, 3, 4, 12, 12\] for a batch of 2 samples"),
        ("imaginary", ModelContractError, r"the network returned a torch\.complex64"),
        ("frozen", ConfigError, "has no parameter that is trained"),
        ("lazy", ConfigError, "has parameters without values"),
        ("extra", ConfigError, "saves more than tensors"),
        ("reused", ModelContractError, "changes in place what its gradients need"),
        ("nan", TrainingDiverged, "the loss of step 0 is nan"),
    ],
)
def test_networks_that_cannot_be_trained_are_told(folder, one_thread, factory, error, message):
    with pytest.raises(error, match=message):
        train(parse_training(values(network={"path": f"networks.py:{factory}"}), folder))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("growing", r"after step 2, .* answers otherwise .* Not among its weights: scale\."),
        ("counting", r"after step 2, .* answers otherwise .* was trained\. Keep all"),
        ("another", "makes anew does not take the weights"),
    ],
)
def test_a_network_that_is_more_than_its_weights_is_refused(folder, one_thread, factory, message):
    """Its weights alone are written: a job ran another network than was validated."""
    with pytest.raises(ConfigError, match=message):
        train(parse_training(values(network={"path": f"networks.py:{factory}"}), folder))
    assert not (folder / "trained" / CHECKPOINT).exists()


def test_a_buffer_that_is_saved_may_change(folder, one_thread):
    train(parse_training(values(network={"path": "networks.py:growing_kept"}, ema=0.9), folder))
    assert weights(folder)["scale"] > 1


def test_layers_may_share_their_weights(folder, one_thread):
    train(parse_training(values(network={"path": "networks.py:tied"}), folder))
    saved = weights(folder)
    assert torch.equal(saved["inner.weight"], saved["same.weight"])
    assert main(["run", str(folder / "trained" / "job.yaml")]) == 0


def test_weights_keep_the_versions_of_their_modules(folder, one_thread):
    """A job, a second launch and a further training would convert them as those of an old one."""
    path = "networks.py:versioned"
    keys = {"network": {"path": path}, "optimizer": {"schedule": "constant"}}
    train(parse_training(values(**keys, steps=2), folder))
    train(parse_training(values(**keys), folder))
    trained = weights(folder)
    assert torch.allclose(trained["1.factor"], torch.tensor(2.0), atol=0.5)
    model = load_job(folder / "trained" / "job.yaml").model
    check_same(load_network(model).network.state_dict(), trained)
    begun = {"path": path, "weights": str(folder / "trained" / "weights.safetensors")}
    still = {"schedule": "constant", "learning_rate": 1e-9}
    train(parse_training(values(network=begun, steps=1, optimizer=still, output="further"), folder))
    further = weights(folder, "further")
    assert torch.allclose(further["1.factor"], trained["1.factor"], atol=1e-5)


def replace_volume(path, values):
    shutil.rmtree(path)
    write_volume(path, values)


SGD = {"kind": "sgd", "schedule": "constant", "momentum": 0}
NO_VALIDATION = {"block_shape": [8, 24, 24], "validation": 0, "test": 0}


@pytest.mark.parametrize(
    "split", [{}, {"split": NO_VALIDATION}], ids=["validation", "no validation"]
)
@pytest.mark.parametrize("rate", [1e38, 3e38])
def test_what_the_last_update_has_ruined_is_not_kept(folder, one_thread, split, rate):
    network = {"residual_unet": {"widths": [2]}}
    good = values(steps=1, network=network, optimizer=SGD | {"learning_rate": 0.1}) | split
    train(parse_training(good | {"output": "good"}, folder))
    bad = good | {"optimizer": SGD | {"learning_rate": rate}}
    with pytest.raises(TrainingDiverged, match=r"is nan|is inf|holds NaN"):
        train(parse_training(bad, folder))
    assert not [each for each in (folder / "trained").iterdir() if each.name != EVENTS]


def test_a_buffer_that_is_no_number_is_not_kept(folder, one_thread):
    """Running statistics of an image of huge values; each step's own loss is a number."""
    image = read_volume(folder / "em")[0] * np.float32(1e22)
    replace_volume(folder / "em", image)
    network = {"residual_unet": {"widths": [2], "normalization": "batch"}}
    keys = values(network=network, normalize="none", steps=2, augmentation=None)
    with pytest.raises(TrainingDiverged):
        train(parse_training(keys, folder))
    assert not (folder / "trained" / CHECKPOINT).exists()


def test_constants_that_are_not_finite_are_kept(folder, one_thread):
    network = {"path": "networks.py:masked"}
    train(parse_training(values(steps=2, network=network), folder))
    assert torch.isinf(weights(folder)["mask"][1])
    optimizer = {"kind": "sgd", "learning_rate": 0.01, "schedule": "constant"}
    same = {"network": network, "optimizer": optimizer, "output": "more"}
    train(parse_training(values(steps=2, **same), folder))
    train(parse_training(values(steps=4, **same), folder))
    assert torch.isinf(weights(folder, "more")["mask"][1])
    train(parse_training(values(steps=4, ema=0.9, network=network, output="average"), folder))
    averaged = weights(folder, "average")
    assert averaged["mask"].tolist() == [0.0, -np.inf]
    assert all(value.isfinite().all() for name, value in averaged.items() if name != "mask")


def test_a_training_that_diverges_keeps_the_checkpoint_before(folder, one_thread):
    network = {"residual_unet": {"widths": [2]}}
    calm = values(steps=2, network=network, optimizer=SGD | {"learning_rate": 1e-30})
    train(parse_training(calm, folder))
    checkpoint = folder / "trained" / CHECKPOINT
    state = torch.load(checkpoint, weights_only=True)
    wild = SGD | {"learning_rate": 1e38}
    state["config"]["optimizer"]["learning_rate"] = 1e38
    state["config"]["steps"] = 3
    torch.save(state, checkpoint)
    before = {path.name: path.read_bytes() for path in (folder / "trained").glob("*.*")}
    with pytest.raises(TrainingDiverged):
        train(parse_training(calm | {"steps": 3, "optimizer": wild}, folder))
    assert {path.name: path.read_bytes() for path in (folder / "trained").glob("*.*")} == before


@pytest.mark.parametrize(
    "target",
    [{"kind": "affinities", "unlabelled": 0}, {"kind": "classes", "count": 2, "unlabelled": 0}],
    ids=["affinities", "classes"],
)
def test_a_training_of_which_nothing_is_known_is_refused(folder, one_thread, caplog, target):
    replace_volume(folder / "labels", np.zeros((24, 48, 48), np.uint8))
    keys = values(target=target, network={"residual_unet": {"widths": [2]}}, steps=4)
    with pytest.raises(VolumeError, match="nothing is known of any of the 8 samples"):
        train(parse_training(keys, folder))
    assert "nothing is known of the 2 samples of the validation after step 3" in caplog.text
    assert not (folder / "trained" / "weights.safetensors").exists()


def test_labels_that_are_rare_need_not_be_in_the_first_samples(folder, one_thread, caplog):
    labels = np.zeros((24, 48, 48), np.uint8)
    labels[:8, :24] = 1
    replace_volume(folder / "labels", labels)
    keys = values(
        target={"kind": "affinities", "unlabelled": 0},
        network={"residual_unet": {"widths": [2]}},
        split=NO_VALIDATION,
        batch_size=1,
        checkpoint_every=1,
        steps=40,
    )
    done = train(parse_training(keys, folder))
    assert done.metrics.loss[0] == 0 < max(done.metrics.loss)


def test_stored_values_of_a_job_are_scaled_where_the_training_says_so(folder, one_thread):
    stored = read_volume(folder / "labels")[0].astype(np.uint8) * 50
    replace_volume(folder / "labels", stored)
    target = {"kind": "stored", "channels": [{}]}
    keys = values(target=target, network={"residual_unet": {"widths": [2]}}, steps=2)
    with pytest.raises(VolumeError, match=r"labels cannot be learnt: in \[.*target.value_range"):
        train(parse_training(keys, folder))
    done = train(parse_training(keys | {"target": target | {"value_range": [0, 1]}}, folder))
    assert all(0 < loss < 2 for loss in done.metrics.loss)


def test_a_training_that_is_begun_anew_leaves_the_former_results_together(folder, one_thread):
    unet = {"widths": [2, 2], "pooling": [1, 2, 2]}
    former = values(steps=2, network={"residual_unet": unet})
    train(parse_training(former, folder))
    trained = folder / "trained"
    results = {name: (trained / name).read_bytes() for name in RESULTS}
    (trained / CHECKPOINT).unlink()
    replace_volume(folder / "labels", np.zeros((24, 48, 48), np.uint8))
    other = former | {
        "network": {"residual_unet": unet | {"pooling": [1, 1, 1]}},
        "target": {"kind": "affinities", "unlabelled": 0},
    }
    with pytest.raises(VolumeError, match="nothing is known"):
        train(parse_training(other, folder))
    assert {name: (trained / name).read_bytes() for name in RESULTS} == results


def test_a_job_of_another_network_than_the_weights_is_refused(folder, one_thread, capsys):
    """As where somebody puts files of two trainings together."""
    unet = {"widths": [2, 2], "pooling": [1, 2, 2]}
    train(parse_training(values(steps=1, network={"residual_unet": unet}), folder))
    source = folder / "trained" / NETWORK_FILE
    source.write_text(source.read_text().replace("pooling=(1, 2, 2)", "pooling=(1, 1, 1)"))
    assert main(["run", str(folder / "trained" / "job.yaml")]) == 2
    assert "network.py and " in (told := capsys.readouterr().err)
    assert "the job says model.sha256" in told


def test_a_kill_between_two_results_leaves_a_job_that_is_refused(folder, one_thread, capsys):
    unet = {"widths": [2, 2], "pooling": [1, 2, 2]}
    keys = values(steps=1, network={"residual_unet": unet})
    trained = folder / "trained"
    train(parse_training(keys, folder))
    former = {name: (trained / name).read_bytes() for name in RESULTS}
    (trained / CHECKPOINT).unlink()
    keys["network"] = {"residual_unet": unet | {"pooling": [1, 1, 1]}}
    train(parse_training(keys, folder))
    for done in range(RESULTS.index(JOB_FILE), 0, -1):
        name = RESULTS[done]  # in their order, this one and those after it are still the former
        (trained / name).write_bytes(former[name])
        assert main(["run", str(trained / JOB_FILE)]) == 2
        assert "the job says model.sha256" in capsys.readouterr().err


def test_a_full_disk_leaves_the_last_checkpoint(folder, one_thread):
    keys = values(
        steps=2,
        network={"residual_unet": {"widths": [8]}},
        optimizer={"schedule": "constant"},
    )
    train(parse_training(keys, folder))
    before = {path.name: path.read_bytes() for path in (folder / "trained").glob("*.*")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(WorkerFault, match=r"cannot write .*checkpoint\.pt: File too large"):
            train(parse_training(keys | {"steps": 4}, folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in (folder / "trained").glob("*.*")} == before
    assert train(parse_training(keys | {"steps": 4}, folder)).steps_done == 2


def test_more_samples_than_memory_are_refused_before_any_is_read(folder, one_thread):
    with pytest.raises(ConfigError, match=r"a step's samples take .* TiB of each process"):
        train(parse_training(values(batch_size=10**10), folder))
    assert not (folder / "trained" / CHECKPOINT).exists()


def test_two_launches_do_not_train_into_one_folder(folder, one_thread):
    config = parse_training(values(steps=1), folder)
    with hold_folder(folder / "trained", "1"), pytest.raises(StateError, match="another launch"):
        train(config)
    assert train(config).steps_done == 1


@pytest.mark.parametrize("name", [CHECKPOINT, "network.py", "job.unfinished", "metrics.json"])
def test_a_pipe_in_the_folder_is_not_waited_for(folder, one_thread, name):
    (folder / "trained").mkdir()
    os.mkfifo(folder / "trained" / name)
    with pytest.raises(StateError, match=f"{name} is a pipe"):
        train(parse_training(values(steps=1), folder))


def test_a_checkpoint_of_another_training_is_refused(folder, one_thread):
    train(parse_training(values(steps=2), folder))
    with pytest.raises(StateError, match="whose seed had other values"):
        train(parse_training(values(steps=2, seed=5), folder))


def test_a_refused_training_leaves_the_network_of_the_former_one(folder, one_thread):
    """Its job file would otherwise run the former weights in another network."""
    unet = {"widths": [4, 8], "pooling": [1, 2, 2]}
    former = values(steps=2, network={"residual_unet": unet})
    train(parse_training(former, folder))
    file = folder / "trained" / NETWORK_FILE
    source = file.read_text()
    other = former | {"network": {"residual_unet": unet | {"widths": [4, 4]}}}
    with pytest.raises(StateError, match="whose network had other values"):
        train(parse_training(other, folder))
    assert file.read_text() == source


@pytest.mark.parametrize("is_dangling", [False, True])
def test_no_link_is_followed_where_a_training_writes(folder, one_thread, is_dangling):
    train(parse_training(values(steps=2, output="whole"), folder))
    names = {path.name for path in (folder / "whole").iterdir()} | {"checkpoint.unfinished"}
    names.add(NETWORK_FILE)  # with the residual U-Net
    assert {"metrics.json", "job.yaml", "training.html", EVENTS} < names
    outside = folder / "outside"
    (folder / "trained").mkdir()
    for name in names:
        if not is_dangling:
            outside.mkdir() if name == EVENTS else outside.write_text("precious")
        link = folder / "trained" / name
        link.symlink_to(outside)
        with pytest.raises(StateError, match=f"{name} is a link"):
            train(parse_training(values(steps=2), folder))
        link.unlink()
        if is_dangling:
            assert not outside.exists()
        elif name == EVENTS:
            outside.rmdir()
        else:
            assert outside.read_text() == "precious"
            outside.unlink()
    assert not [*(folder / "trained").iterdir()]


def _flip_in_weights(path):
    """Change a byte in the middle, which PyTorch reads without a word."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _set(key, value):
    def change(path):
        torch.save(torch.load(path, weights_only=True) | {key: value}, path)

    return change


DAMAGES = {
    "torn": lambda path: path.write_bytes(b"torn"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "flipped": _flip_in_weights,
    "a step before the first": _set("step", -1),
    "no weights": _set("network", {}),
    "unknown metrics": _set("metrics", {"unknown": 1}),
    "no state": lambda path: torch.save(
        {"config": torch.load(path, weights_only=True)["config"]}, path
    ),
}


def test_a_damaged_checkpoint_is_refused_by_name_and_then_begun_anew(folder, one_thread):
    config = parse_training(values(steps=2), folder)
    train(config)
    weights = safetensors.torch.load_file(folder / "trained" / "weights.safetensors")
    checkpoint = folder / "trained" / CHECKPOINT
    sound = checkpoint.read_bytes()
    for damage in DAMAGES.values():
        checkpoint.write_bytes(sound)
        damage(checkpoint)
        with pytest.raises(StateError, match=r"is no checkpoint that can be read") as refusal:
            train(config)
        assert f"{checkpoint} is no checkpoint" in str(refusal.value)
        # what is no option of a training is no advice, and a sentence ends once
        assert not re.search(r"allow_pickle|\.\. ", str(refusal.value))
    checkpoint.unlink()
    train(config)
    again = safetensors.torch.load_file(folder / "trained" / "weights.safetensors")
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[key], again[key]) for key in weights)


def test_a_checkpoint_of_another_sequence_of_samples_is_told_as_that(folder, one_thread):
    config = parse_training(values(steps=2), folder)
    train(config)
    path = folder / "trained" / CHECKPOINT
    _set("stream", {"step": 1, "sequence": "another"})(path)
    with pytest.raises(StateError, match=r"checkpoint\.pt: the position is one in another"):
        train(config)


def test_a_factory_that_was_changed_since_is_refused(folder, one_thread, capsys):
    """By the next launch, and by the job that was written."""
    keys = values(steps=1, network={"path": "networks.py:network"})
    optimizer = {"kind": "sgd", "learning_rate": 0.01, "schedule": "constant"}
    train(parse_training(keys | {"optimizer": optimizer}, folder))
    job = folder / "trained" / JOB_FILE
    assert main(["plan", str(job)]) == 0
    file = folder / "networks.py"
    source = file.read_text()
    file.write_text(f"{source}\n# changed\n")
    with pytest.raises(StateError, match=r"network\.path was another file, or had another content"):
        train(parse_training(keys | {"optimizer": optimizer, "steps": 2}, folder))
    assert main(["run", str(job)]) == 2
    assert "the job says model.sha256" in capsys.readouterr().err
    file.write_text(source)
    train(parse_training(keys | {"optimizer": optimizer, "steps": 2}, folder))


def test_a_checkpoint_with_sparse_tensors_is_refused(folder, one_thread):
    train(parse_training(values(steps=1), folder))
    path = folder / "trained" / CHECKPOINT
    more = {"more": [torch.ones(2).to_sparse()]}
    torch.save(torch.load(path, weights_only=True) | more, path)
    with pytest.raises(StateError, match="no checkpoint that can be read"):
        train(parse_training(values(steps=1), folder))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"stepps": 3}, "stepps: unknown key; did you mean 'steps'"),
        ({"steps": 0}, "steps: input should be greater than 0; found 0"),
        ({"patch_shape": [4, 12, 16]}, "transpose swaps y and x"),
        ({"network": {"path": "network.pt"}}, "only networks with their source can be trained"),
        ({"output": "gs://bucket/out"}, "expected a local folder"),
        ({"target": {"kind": "affinity"}}, "target"),
        ({"patch_shapes": []}, "patch_shapes: list should have at least 1 item"),
        ({"patch_shapes": [{"shape": [4, 8, 8]}] * 2}, "a shape is there twice"),
        ({"patch_shapes": [{"shape": [4, 8, 12]}]}, "transpose swaps y and x"),
        (
            {"patch_shapes": [{"shape": [4, 8, 8]}], "partition": [1, 1, 2]},
            "need samples of one shape",
        ),
        (
            {
                "target": {"kind": "stored", "channels": [{}]},
                "augmentation": {"elastic": {}},
            },
            "stored channels cannot follow",
        ),
    ],
)
def test_wrong_training_files_are_refused(folder, keys, message):
    with pytest.raises(ConfigError, match=message):
        parse_training(values(**keys), folder)


def test_files_that_are_none_are_refused(tmp_path, capsys):
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    assert "cannot read the training file" in capsys.readouterr().err
    for text in ("[1, 2", "- 1\n", "\0"):
        (tmp_path / "training.yaml").write_text(text)
        with pytest.raises(ConfigError):
            load_training(Path(tmp_path / "training.yaml"))
