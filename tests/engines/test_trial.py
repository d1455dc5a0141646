import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import job_values, toy

from beam_inference.config.job_file import parse_job
from beam_inference.engines import trial
from beam_inference.engines.loading import load_predictor
from beam_inference.engines.torch_forward import torch_predictor
from beam_inference.engines.trial import (
    SETTLING_CALLS,
    ChannelDistances,
    check_contract,
    check_difference,
    check_no_numbers,
    settle,
)
from beam_inference.errors import EngineError, ModelContractError
from beam_inference.operators.normalize import Normalization


def contract(model, patch=(6, 8, 10), **options):
    job = parse_job(job_values("in", "out", model=model), Path("/"))
    predictor = load_predictor(job.model, job.inference)
    settings = {
        "batch_size": 2,
        "patch_shape": patch,
        "crop_margin": (0, 0, 0),
        "output_channels": 2,
    }
    array = np.random.default_rng(0).integers(0, 256, (1, *patch), dtype=np.uint8)
    return check_contract(predictor, array, Normalization(), **settings | options)


def test_the_contract_is_held_and_measured():
    report = contract(toy("conv", output_channels=2), (32, 64, 64))
    assert report.low < report.high
    assert report.working_set_bytes > 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            toy("conv", output_channels=2),
            r"returns an array of shape \[2, 2, 6, 8, 10\] .* expected \[2, 5, 6, 8, 10\]",
        ),
        (toy("pair"), "returns a tuple; expected one real tensor"),
        (toy("not_a_number"), "returns NaN or infinite values"),
        (toy("flat"), "fails on an input of shape"),
    ],
)
def test_networks_that_break_the_contract(model, message):
    options = {"output_channels": 5} if model["path"].endswith(":conv") else {"output_channels": 1}
    with pytest.raises(ModelContractError, match=message):
        contract(model, **options)


def once(network, output_channels=1):
    """Try a network on a batch of one patch."""
    array = np.random.default_rng(0).integers(0, 256, (1, 6, 8, 10), dtype=np.uint8)
    return check_contract(
        torch_predictor(network, torch.device("cpu")),
        array,
        Normalization(),
        batch_size=1,
        patch_shape=(6, 8, 10),
        crop_margin=(0, 0, 0),
        output_channels=output_channels,
    )


def test_values_of_the_input_that_are_no_numbers_are_not_called_the_networks():
    patch = np.full((1, 6, 8, 10), 3, np.float32)
    patch[0, 2, 3, 4] = np.nan
    with pytest.raises(ModelContractError, match=r"that could be tried.*holds NaN.*input\.mask"):
        check_contract(
            torch_predictor(lambda batch: batch, torch.device("cpu")),
            patch,
            Normalization(),
            batch_size=1,
            patch_shape=(6, 8, 10),
            crop_margin=(0, 0, 0),
            output_channels=1,
        )


class Counter:
    """A network whose answer is a little higher every time."""

    def __init__(self, step):
        self.sum = 0.0
        self.step = step

    def __call__(self, batch):
        self.sum += self.step
        return batch / 255 + self.sum


def test_a_network_that_keeps_something_answers_one_batch_in_two_ways():
    with pytest.raises(ModelContractError, match="answers the same batch in two ways"):
        once(Counter(0.01))


def beside_large_values(network):
    """A network with a second channel, whose values are large."""
    return lambda batch: torch.cat([network(batch), batch * 1e4 + 1e6], 1)


def test_a_channel_is_not_lost_beside_one_of_large_values():
    with pytest.raises(ModelContractError, match="answers the same batch in two ways"):
        once(beside_large_values(Counter(0.01)), output_channels=2)


@pytest.mark.parametrize("precision", ["int8", "bfloat16"])
def test_a_network_of_small_values_is_not_lost_in_what_is_allowed(precision):
    patch = np.random.default_rng(0).integers(1, 256, (1, 4, 6, 8)).astype(np.float32)

    def check(ours):
        described = {"engine": "openvino", "precision": precision}
        one = torch_predictor(ours, torch.device("cpu"), description=described)
        small = torch_predictor(
            lambda x: x * 3e-5, torch.device("cpu"), description={"engine": "torch", **FLOAT32}
        )
        return check_difference(one, small, patch, lambda batch: batch, 2)

    with pytest.raises(EngineError, match="differs from PyTorch in float32"):
        check(torch.zeros_like)
    with pytest.raises(EngineError, match="differs from PyTorch in float32"):
        check(lambda x: x * 4e-5)
    check(lambda x: x * 3.1e-5)


def test_in_float32_small_values_are_compared_as_finely_as_others():
    patch = np.random.default_rng(0).random((1, 4, 6, 8)).astype(np.float32)

    def scaled(factor):
        described = {"engine": "torch", **FLOAT32}
        return torch_predictor(lambda x: x * factor, torch.device("cpu"), description=described)

    def check(factor):
        return check_difference(scaled(factor), scaled(1e-4), patch, lambda batch: batch, 2)

    with pytest.raises(EngineError, match="differs from PyTorch in float32"):
        check(1.05e-4)
    check(1.001e-4)


def test_a_reference_that_cannot_run_the_shape_is_told():
    def only_of_eight(batch):
        if batch.shape[-1] != 8 or len(batch) != 1:
            raise RuntimeError("Got: 6 Expected: 8")
        return batch

    patch = np.random.default_rng(0).random((1, 4, 6, 8)).astype(np.float32)
    one, other = (
        torch_predictor(each, torch.device("cpu"), description={"engine": name, **FLOAT32})
        for name, each in (("openvino", lambda x: x), ("onnxruntime", only_of_eight))
    )
    with pytest.raises(EngineError, match=r"onnxruntime in float32.*Got: 6 Expected: 8.*patch_sha"):
        check_difference(one, other, patch, lambda batch: batch, 2)
    check_difference(one, other, patch, lambda batch: batch, 1)


@pytest.mark.parametrize("culprit", ["ours", "theirs"])
def test_what_fails_on_zeros_or_nan_alone_is_told(culprit):
    def no_zeros(batch):
        if not batch.any():
            raise SystemExit("nothing there")
        return batch

    patch = np.random.default_rng(0).random((1, 4, 6, 8)).astype(np.float32)
    ours, theirs = (
        torch_predictor(each, torch.device("cpu"), description={"engine": name, **FLOAT32})
        for name, each in (
            ("onnxruntime", no_zeros if culprit == "ours" else torch.relu),
            ("torch", no_zeros if culprit == "theirs" else torch.relu),
        )
    )
    expected = ModelContractError if culprit == "ours" else EngineError
    with pytest.raises(expected, match="nothing there"):
        check_no_numbers(ours, theirs, patch, lambda batch: batch, 1)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.trunc, torch.floor),  # the same for the patch, which has no negative values
        (lambda x: x.clamp(max=300), lambda x: x),
        (beside_large_values(lambda x: x), beside_large_values(lambda x: x + 0.01)),
    ],
)
def test_differences_beyond_the_patch_and_in_one_channel(ours, theirs, batch_size):
    patch = np.random.default_rng(0).integers(1, 256, (1, 4, 6, 8)).astype(np.float32)
    one, other = (
        torch_predictor(each, torch.device("cpu"), description={"engine": "torch", **FLOAT32})
        for each in (ours, theirs)
    )
    with pytest.raises(EngineError, match="differs from PyTorch in float32"):
        check_difference(one, other, patch, lambda batch: batch / 2, batch_size)
    check_difference(one, one, patch, lambda batch: batch / 2, batch_size)


def test_noise_that_is_too_much_for_a_network_says_nothing():
    patch = np.random.default_rng(0).random((1, 4, 6, 8), np.float32)
    predictor = torch_predictor(
        torch.sqrt, torch.device("cpu"), description={"engine": "torch", **FLOAT32}
    )
    check_difference(predictor, predictor, patch, lambda batch: batch, 1)


FLOAT32 = {"precision": "float32"}


def seeded(batch):
    torch.manual_seed(0)
    return torch.dropout(batch, 0.5, True)


@pytest.mark.parametrize(
    "network",
    [
        torch.rand_like,
        lambda batch: torch.dropout(batch, 0.5, True),
        lambda batch: batch + (batch > 1000) * torch.rand_like(batch),
        seeded,
    ],
    ids=["noise", "dropout", "where nothing shows", "seeded"],
)
def test_networks_that_draw_random_numbers(network):
    torch.rand(1)  # so that a seed changes something
    with pytest.raises(ModelContractError, match="draws random numbers"):
        once(network)


def test_other_last_bits_are_warned_about(caplog):
    once(Counter(1e-6))
    assert "with other last bits" in caplog.text
    caplog.clear()
    once(torch.sigmoid)
    assert not caplog.text


def test_tensors_on_another_device_are_told_as_that():
    def network(batch):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            "cuda:0 and cpu!"
        )

    with pytest.raises(ModelContractError, match="makes a tensor on the CPU: make it on the input"):
        once(network)


def test_a_network_may_overwrite_its_input(caplog):
    once(lambda batch: batch.mul_(0.5))
    assert not caplog.text


def differentiate_backwards(batch):
    return torch.autograd.functional.vjp(lambda x: x**2, batch, torch.ones_like(batch))[1]


def differentiate_forwards(batch):
    return torch.autograd.functional.jvp(lambda x: x**2, batch, torch.ones_like(batch))[1]


def descend(batch):
    with torch.enable_grad():
        batch = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad((batch**2).sum(), batch, create_graph=True)
        return slope


@pytest.mark.parametrize("network", [differentiate_backwards, differentiate_forwards, descend])
def test_a_network_may_differentiate(network):
    patch = np.random.default_rng(0).random((1, 4, 6, 8)).astype(np.float32)
    predictor = torch_predictor(network, torch.device("cpu"))
    with predictor.device.session():
        answer = predictor.predict(predictor.device.upload(patch[None]))
        found = predictor.device.download(answer)()
    np.testing.assert_allclose(found[0], 2 * patch, rtol=1e-6)
    assert once(network).high > 0


def test_out_of_memory_at_the_trial_halves_the_batch_as_the_job_will():
    def little_room(batch):
        if len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch

    def no_room(batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    settings = {
        "batch_size": 4,
        "patch_shape": (6, 8, 10),
        "crop_margin": (0, 0, 0),
        "output_channels": 1,
    }
    patch = np.ones((1, 6, 8, 10), np.uint8)
    predictor = torch_predictor(little_room, torch.device("cpu"))
    assert check_contract(predictor, patch, Normalization(), **settings).high == 1
    predictor = torch_predictor(no_room, torch.device("cpu"))
    with pytest.raises(ModelContractError, match=r"out of memory for one patch of \[6, 8, 10\]"):
        check_contract(predictor, patch, Normalization(), **settings)


def test_what_a_batch_that_was_too_large_held_is_free_before_the_next_is_tried():
    held = []
    alive = []

    def network(batch):
        alive.append(sum(reference() is not None for reference in held))
        activations = batch + 1
        held.append(weakref.ref(activations))
        if len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch

    settings = {
        "batch_size": 8,
        "patch_shape": (6, 8, 10),
        "crop_margin": (0, 0, 0),
        "output_channels": 1,
    }
    predictor = torch_predictor(network, torch.device("cpu"))
    assert (
        check_contract(
            predictor, np.ones((1, 6, 8, 10), np.uint8), Normalization(), **settings
        ).batch_size
        == 1
    )
    assert alive[:4] == [0, 0, 0, 0]


def test_where_half_a_batch_is_refused_it_is_said_why_it_was_tried():
    def network(batch):
        if len(batch) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        raise ValueError("expected 4")

    settings = {
        "batch_size": 4,
        "patch_shape": (6, 8, 10),
        "crop_margin": (0, 0, 0),
        "output_channels": 1,
    }
    predictor = torch_predictor(network, torch.device("cpu"))
    with pytest.raises(
        ModelContractError,
        match=r"expected 4.*\(4 at a time are too many for the device's memory\)",
    ):
        check_contract(predictor, np.ones((1, 6, 8, 10), np.uint8), Normalization(), **settings)


def test_a_network_settles_on_a_jobs_batches_and_fails_only_at_the_first_chunk():
    shapes = []

    def network(batch):
        shapes.append(tuple(batch.shape))
        if len(batch) == 3:
            raise ValueError("not three")
        return batch

    predictor = torch_predictor(network, torch.device("cpu"))
    settle(predictor, (2, 1, 4, 6, 8))
    assert shapes == [(2, 1, 4, 6, 8)] * SETTLING_CALLS
    settle(predictor, (3, 1, 4, 6, 8))
    assert shapes[SETTLING_CALLS:] == [(3, 1, 4, 6, 8)]


def test_where_the_system_does_not_count_memory_the_network_is_tried_all_the_same(monkeypatch):
    monkeypatch.setattr(trial, "start_peak_memory", lambda: None)
    report = contract(toy("conv", output_channels=2))
    assert report.low < report.high
    assert report.working_set_bytes == 0


def test_what_a_network_makes_at_its_first_call_is_not_of_its_working_set():
    kept = []

    def network(batch):
        if not kept:
            kept.append(torch.ones(2**24))
        return batch + torch.ones(2**21).sum()

    predictor = torch_predictor(network, torch.device("cpu"))
    settings = {
        "batch_size": 1,
        "patch_shape": (6, 8, 10),
        "crop_margin": (0, 0, 0),
        "output_channels": 1,
    }
    report = check_contract(
        predictor, np.ones((1, 6, 8, 10), np.uint8), Normalization(), **settings
    )
    assert 0.9 * 2**23 < report.working_set_bytes < 2**24  # to a few pages


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_an_answer_that_is_no_number_is_infinitely_far_off(wrong):
    theirs = np.ones((2, 3, 4), np.float32)
    ours = theirs.copy()
    ours[1, 2, 3] = wrong
    distances = ChannelDistances.between(ours, theirs, 0)
    assert distances.worst(1e-4)[0] == np.inf
    assert distances.typical.tolist() == [0, np.inf]
