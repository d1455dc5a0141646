"""Checkpoints that somebody has forged: refused by name, or without a say in the training."""

import shutil

import numpy as np
import pytest
import torch
from helpers import write_volume

from beam_inference.errors import StateError
from beam_inference.training.checkpoint import CHECKPOINT, load_scaler
from beam_inference.training.config import parse_training
from beam_inference.training.trainer import train

KEYS = {
    "volumes": [{"image": "em", "labels": "labels"}],
    "output": "trained",
    "patch_shape": [4, 8, 8],
    "split": {"block_shape": [8, 16, 16], "validation": 0, "test": 0},
    "target": {"kind": "affinities"},
    "network": {"residual_unet": {"widths": [2], "normalization": "batch"}},
    "optimizer": {"schedule": "constant"},
    "ema": 0.9,
    "steps": 2,
    "device": "cpu",
    "threads": 1,
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with volumes and a training of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    y, x = np.indices((16, 16))
    labels = np.broadcast_to((1 + y // 4 * 8 + x // 4) % 5, (8, 16, 16)).astype(np.uint32)
    write_volume(folder / "labels", labels)
    write_volume(folder / "em", (labels * 40).astype(np.uint8))
    train(parse_training(KEYS, folder))
    return folder


@pytest.fixture
def forge(trained):
    """Changes the checkpoint by a function, and trains on with other keys."""
    path = trained / "trained" / CHECKPOINT
    kept = trained / "kept"
    if not kept.exists():
        shutil.copytree(trained / "trained", kept)

    def change_and_train(change, **keys):
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)
        return train(parse_training(KEYS | keys, trained))

    yield change_and_train
    shutil.rmtree(trained / "trained")
    shutil.copytree(kept, trained / "trained")


def put(value, *keys):
    """A change of the value under some keys."""

    def change(state):
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return change


def change_first(part, function):
    """A change of the first tensor of a part."""

    def change(state):
        name = next(iter(state[part]))
        state[part][name] = function(state[part][name])

    return change


def fill(value):
    return lambda tensor: torch.full_like(tensor, value)


MOMENTS = ("optimizer", "state", 0)
FORGED = {
    "a step that is true": (put(True, "step"), "it says step True of 2"),
    "samples at the end": (put(10**9, "stream", "step"), "its samples go on from step 1000000000"),
    "samples before the first": (put(-5, "stream", "step"), "its samples go on from step -5"),
    "samples anew": (
        put(0, "stream", "step"),
        "it is of step 2, but its samples go on from step 0",
    ),
    "samples by a float": (put(2.0, "stream", "step"), "its samples go on from step 2.0"),
    "text for losses": (put("<script>", "metrics", "loss"), "its losses are not 2 finite numbers"),
    "lists for losses": (put([[1.0], None], "metrics", "loss"), "its losses are not 2"),
    "no losses": (put([], "metrics", "loss"), "its losses are not 2 finite numbers"),
    "more losses": (put([0.5] * 1000, "metrics", "loss"), "its losses are not 2 finite numbers"),
    "a loss of NaN": (put([0.5, float("nan")], "metrics", "loss"), "its losses are not 2"),
    "a validation later": (put([(5, 0.1)], "metrics", "validation"), "one of its validations is"),
    "a validation of NaN": (
        put([(2, float("nan"))], "metrics", "validation"),
        "one of its validations is",
    ),
    "integers for weights": (
        change_first("network", lambda weight: weight.to(torch.int8)),
        "is torch.int8 of .* expected torch.float32",
    ),
    "complex weights": (
        change_first("network", lambda weight: weight.to(torch.complex64)),
        "is torch.complex64 of",
    ),
    "weights of NaN": (change_first("network", fill(float("nan"))), "values that are NaN"),
    "a buffer of infinity": (
        lambda state: [
            each.fill_(float("inf"))
            for name, each in state["network"].items()
            if name.endswith("running_var")
        ],
        "running_var holds values that are NaN or infinite",
    ),
    "an average of NaN": (
        lambda state: next(
            each for each in state["average"].values() if each.is_floating_point()
        ).fill_(float("nan")),
        "average.* holds values that are NaN",
    ),
    "an average of other steps": (
        put(torch.tensor(7), "average", "n_averaged"),
        "its average is of 7 steps, and not of 2",
    ),
    "no state of the optimizer": (put({}, "optimizer", "state"), "has no state, after 2 steps"),
    "moments of another shape": (
        put(torch.zeros(3), *MOMENTS, "exp_avg"),
        r"optimizer\.state\.0\.exp_avg is torch.float32 of \[3\]",
    ),
    "negative squares": (
        lambda state: state["optimizer"]["state"][0]["exp_avg_sq"].fill_(-1),
        r"exp_avg_sq has values below zero",
    ),
    "moments of more steps": (
        put(torch.tensor(9.0), *MOMENTS, "step"),
        r"optimizer\.state\.0\.step is 9.0, after 2 steps",
    ),
    **{
        f"steps as {dtype}": (
            put(torch.ones((), dtype=dtype), *MOMENTS, "step"),
            "step is no number as PyTorch counts steps",
        )
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.bfloat16, torch.float8_e4m3fn)
    },
    "steps in a list": (put(torch.ones(1), *MOMENTS, "step"), "step is no number as PyTorch"),
    "moments of no parameter": (
        put({}, "optimizer", "state", 999),
        "state of parameters that are not there",
    ),
    "other parameters": (
        put([0], "optimizer", "param_groups", 0, "params"),
        "its optimizer has other parameters",
    ),
    "a scaler": (put({"scale": 1.0}, "scaler"), "its scaler of gradients is not that"),
}


def scaled(scale, growth_tracker=0):
    return torch.amp.GradScaler("cpu").state_dict() | {
        "scale": scale,
        "_growth_tracker": growth_tracker,
    }


@pytest.mark.parametrize("doubled", [-3, -1, 0, 1, 2])
def test_a_scale_that_steps_lead_to_is_taken(doubled):
    scaler = torch.amp.GradScaler("cpu")
    load_scaler(scaler, scaled(2.0 ** (16 + doubled)), 4000)
    assert scaler.state_dict()["scale"] == 2.0 ** (16 + doubled)


@pytest.mark.parametrize("scale", [0.0, -1.0, 3e38, 1e-20, 1e300, 65537.0, 2.0**10, 2.0**17, "1"])
def test_a_scale_that_no_steps_lead_to(scale):
    with pytest.raises(ValueError, match="that 5 steps do not lead to"):
        load_scaler(torch.amp.GradScaler("cpu"), scaled(scale), 5)


@pytest.mark.parametrize("count", [-1, 2000, 1.0, True])
def test_a_count_of_growth_that_cannot_be(count):
    with pytest.raises(ValueError, match="do not lead to"):
        load_scaler(torch.amp.GradScaler("cpu"), scaled(65536.0, count), 5)


@pytest.mark.parametrize(("change", "message"), FORGED.values(), ids=FORGED)
def test_a_forged_checkpoint_is_refused_by_name(forge, change, message):
    with pytest.raises(StateError, match=rf"checkpoint\.pt is no checkpoint .*: .*{message}"):
        forge(change)


def test_how_moments_are_used_is_said_by_the_training_file(forge, trained):
    done = forge(lambda state: None, steps=4)
    weights = torch.load(trained / "trained" / CHECKPOINT, weights_only=True)["network"]
    shutil.rmtree(trained / "trained")
    shutil.copytree(trained / "kept", trained / "trained")

    def change(state):
        (group,) = state["optimizer"]["param_groups"]
        group |= {"maximize": True, "weight_decay": 1e6, "betas": "ab", "eps": float("nan")}

    assert forge(change, steps=4).metrics == done.metrics
    found = torch.load(trained / "trained" / CHECKPOINT, weights_only=True)["network"]
    assert all(torch.equal(each, found[name]) for name, each in weights.items())


def test_moments_that_share_their_memory_are_parted(forge):
    def change(state):
        moments = state["optimizer"]["state"][0]
        moments["exp_avg"] = torch.zeros(1).expand(moments["exp_avg"].shape)
        moments["exp_avg_sq"] = moments["exp_avg"]

    assert forge(change, steps=3).steps_done == 1


def test_fewer_steps_than_are_done(forge):
    with pytest.raises(StateError, match="has done 2 steps, and steps is 1 now: write steps: 2 or"):
        forge(lambda state: None, steps=1)
