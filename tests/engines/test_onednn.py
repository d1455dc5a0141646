"""Convolutions by oneDNN: what they give is what PyTorch gives, in the bits of a batch of two."""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_jobs import FIB25
from helpers import job_values, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from toy_networks import residual_unet

from beam_inference.config.job_file import parse_job
from beam_inference.engines.loading import load_predictor
from beam_inference.engines.onednn import run_by_onednn


def convolutions(network, batch):
    """Names of the convolutions, of more than a voxel in the plane, in a call; its answer."""
    with (
        torch.inference_mode(),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled,
    ):
        answer = network(batch)
    events = profiled.key_averages(group_by_input_shape=True)
    return {
        event.key for event in events if "conv" in event.key and event.input_shapes[1][3:] != [1, 1]
    }, answer


def random(*shape, seed=0, dtype=torch.float32):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) - 0.5


def answer_or_message(network, batch):
    try:
        return network(batch), None
    except RuntimeError as error:  # a kernel larger than what it is for
        return None, str(error)


# PyTorch's own, once
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even")

axes = st.tuples(*[st.integers(1, 3)] * 3)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 2),
    st.tuples(*[st.integers(1, 9)] * 3),
    axes,
    st.sampled_from([1, 2, (1, 2, 1), [2, 1, 3]]),
    st.sampled_from([0, 1, [1], (1, 0, 2), "valid", "same", (1, 1)]),
    st.sampled_from([1, 2, (1, 1, 2)]),
    st.sampled_from([(1, 1, 1), (1, 3, 5), (2, 4, 2), (3, 3, 3)]),
    st.booleans(),
)
def test_any_convolution_is_that_of_pytorch(
    batch, shape, kernel, stride, padding, dilation, channels, has_bias
):
    groups = channels[0]
    inputs = channels[0] * channels[1]
    outputs = channels[0] * channels[2]
    x = random(batch, inputs, *shape)
    weight = random(outputs, channels[1], *kernel, seed=1)
    bias = random(outputs, seed=2) if has_bias else None
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}

    def network(array):
        return functional.conv3d(array, weight, bias, **options)

    expected, message = answer_or_message(network, x)
    found = answer_or_message(run_by_onednn(network), x)
    assert found[1] == message
    if message is None:
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fib25", "residual U-Net", "exported"])
def test_one_patch_takes_the_way_of_two_and_has_its_bits(name, tmp_path):
    keys = {"patch_shape": [8, 16, 32], "patch_overlap": [0, 0, 0]}
    model = FIB25 if name != "residual U-Net" else toy("residual_unet", output_channels=3)
    if name == "exported":
        plain = load_plain(model)
        count = torch.export.Dim("batch", min=1, max=8)
        program = torch.export.export(
            plain, (random(2, 1, 8, 16, 32),), dynamic_shapes=({0: count},)
        )
        torch.export.save(program, tmp_path / "net.pt2")
        model = {"path": str(tmp_path / "net.pt2"), "output_channels": 3}
    config = parse_job(job_values("in", "out", model=model, inference=keys), Path("/"))
    predictor = load_predictor(config.model, config.inference)
    two = random(2, 1, 8, 16, 32)
    with predictor.device.session():
        done, one = convolutions(predictor.predict, two[:1])
        assert "aten::mkldnn_convolution" in done
        assert not {key for key in done if "slow_conv" in key}
        torch.testing.assert_close(one, predictor.predict(two)[:1], rtol=0, atol=0)
    done, _ = convolutions(load_plain(FIB25), two[:1])
    assert "aten::slow_conv3d_forward" in done, (
        "PyTorch does so itself by now: engines/onednn.py can go"
    )


def load_plain(model):
    import safetensors.torch
    from networks.fib25 import fib25_network

    if model is not FIB25:
        return residual_unet().eval()
    network = fib25_network()
    network.load_state_dict(safetensors.torch.load_file(FIB25["weights"]))
    return network.eval()


def test_what_is_not_for_it_is_left_to_pytorch():
    for network, batch in (
        (nn.Conv3d(2, 3, (3, 1, 1)), random(1, 2, 4, 5, 6)),
        (nn.Conv3d(2, 3, 3).double(), random(1, 2, 4, 5, 6, dtype=torch.float64)),
        (nn.Conv3d(2, 3, (2, 3, 3), padding="same"), random(1, 2, 4, 5, 6)),
        (nn.Conv3d(2, 3, 3), random(2, 4, 5, 6)),
        (nn.ConvTranspose3d(2, 3, 3), random(1, 2, 4, 5, 6)),
    ):
        torch.testing.assert_close(run_by_onednn(network)(batch), network(batch), rtol=0, atol=0)
        with torch.inference_mode():
            done, _ = convolutions(run_by_onednn(network), batch)
        assert "aten::mkldnn_convolution" not in done or isinstance(network, nn.ConvTranspose3d)
    with pytest.raises(
        RuntimeError, match=r"expected input.* to have 2 channels, but got 5 channels instead"
    ):
        run_by_onednn(nn.Conv3d(2, 3, 3))(random(1, 5, 4, 5, 6))


def test_padding_by_name_and_numbers_of_other_kinds():
    weight = random(3, 2, 3, 3, 3, seed=1)
    batch = random(1, 2, 8, 9, 10)
    for padding in ("same", "valid", np.int64(1), torch.tensor(1), (np.int64(1), 0, 1)):

        def network(array, padding=padding):
            return functional.conv3d(array, weight, padding=padding)

        torch.testing.assert_close(
            run_by_onednn(network)(batch), network(batch), rtol=1e-5, atol=1e-5
        )
        done, _ = convolutions(run_by_onednn(network), batch)
        assert ("aten::mkldnn_convolution" in done) == isinstance(padding, (str, tuple))


def test_bits_are_the_same_while_another_thread_exports_a_network(monkeypatch):
    torch.manual_seed(0)
    network = run_by_onednn(nn.Conv3d(3, 4, 3, padding=1))
    batch = torch.rand(1, 3, 8, 16, 16)
    with torch.no_grad():
        expected = network(batch)
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # what an export sets
        assert torch.compiler.is_compiling()
        assert torch.equal(network(batch), expected)


def test_a_network_that_compiles_itself_still_does():
    network = torch.compile(nn.Conv3d(1, 2, 3).eval(), backend="eager")
    batch = random(1, 1, 6, 7, 8)
    with torch.inference_mode():
        torch.testing.assert_close(
            run_by_onednn(network)(batch), network(batch), rtol=1e-5, atol=1e-5
        )


def test_autocast_in_a_network_is_its_own():
    network = nn.Conv3d(1, 2, 3)
    batch = random(1, 1, 6, 7, 8)

    def half(array):
        with torch.autocast("cpu", torch.bfloat16):
            return network(array)

    with torch.inference_mode():
        assert run_by_onednn(half)(batch).dtype == torch.bfloat16


def test_low_precision_is_still_autocasts():
    keys = {"patch_shape": [8, 16, 16], "precision": "bfloat16"}
    config = parse_job(job_values("in", "out", model=toy("conv"), inference=keys), Path("/"))
    predictor = load_predictor(config.model, config.inference)
    batch = random(1, 1, 8, 16, 16)
    torch.manual_seed(0)
    network = nn.Conv3d(1, 2, 3, padding=1)
    with predictor.device.session(), torch.autocast("cpu", torch.bfloat16):
        expected = network(batch).float()
    with predictor.device.session():
        torch.testing.assert_close(predictor.predict(batch), expected, rtol=0, atol=0)
