"""Prediction on arrays: the oracle's values, and the bits of a job with the same settings."""

import doctest
import sys
import warnings

import numpy as np
import pytest
import torch
from fakes.networks import NumpyNetwork, position_dependent
from helpers import OF_RANGE, TOYS, job_values, oracle, plan_of, read_volume, toy, write_volume
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chunks import cut_out, infer_all
from torch import nn
from toy_networks import Position, batch_norm

from beam_inference import predict
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError, EngineError, ModelContractError
from beam_inference.geometry.blending import BUMP, BlendWindow
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.exact_sums import largest_rounding
from beam_inference.launch.prepare import prepare
from beam_inference.worker import predict as predict_module
from beam_inference.worker.worker import Worker

IMAGE = np.random.default_rng(0).integers(0, 256, (20, 40, 37), dtype=np.uint8)
SETTINGS = {"patch_shape": [8, 16, 16], "patch_overlap": [2, 8, 8], "batch_size": 2}


def run_job(folder, model, inference=(), image=IMAGE):
    """The output of a job with several chunks."""
    write_volume(folder / "in", image)
    values = job_values(
        folder / "in",
        folder / "out",
        model=model,
        inference={**SETTINGS, "threads": 1, **dict(inference)},
    )
    worker = Worker(prepare(parse_job(values, folder)))
    assert worker.job.plan.chunks.count > 4
    records = worker.infer_chunks(range(worker.job.plan.chunks.count))
    assert {record.outcome for record in records} == {"done"}
    return read_volume(folder / "out")


@pytest.mark.parametrize("normalize", ["unit", {"scale": 0.25, "offset": -3, "clip": [-2, 40]}])
@pytest.mark.parametrize("activation", ["none", "sigmoid"])
def test_a_module_has_the_bits_of_a_job(tmp_path, normalize, activation):
    keys = {"output_channels": 2, "normalize": normalize, "activation": activation}
    expected = run_job(tmp_path, toy("batch_norm", **keys))
    result = predict(IMAGE, batch_norm(), **SETTINGS, **keys, device="cpu", threads=1)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, expected)


def test_a_path_has_the_bits_of_a_job(tmp_path):
    keys = {"output_channels": 2, "normalize": "unit"}
    expected = run_job(tmp_path, toy("position", **keys))
    result = predict(IMAGE, f"{TOYS}:position", **SETTINGS, **keys, device="cpu", threads=1)
    np.testing.assert_array_equal(result, expected)
    module = predict(IMAGE[None], Position(), **SETTINGS, **keys, device="cpu", threads=1)
    np.testing.assert_array_equal(module, expected)


def test_margins_augmentation_and_fill_are_those_of_a_job(tmp_path):
    model = toy("position", output_channels=2, crop_margin=[1, 2, 2], channels=[{}, {}])
    expected = run_job(tmp_path, model, {"augment": "xy"})
    result = predict(
        IMAGE,
        Position(),
        **SETTINGS,
        output_channels=2,
        crop_margin=(1, 2, 2),
        augment="xy",
        device="cpu",
        threads=1,
    )
    np.testing.assert_array_equal(result, expected)


BLENDS = [
    ("bump", BUMP),
    ("constant", BlendWindow("constant")),
    ({"gaussian": 0.25}, BlendWindow("gaussian", 0.25)),
    (
        {"gaussian": 0.125, "floor": "nnunet"},
        BlendWindow("gaussian", 0.125, is_on_voxel=True),
    ),
    ({"gaussian": 0.125, "floor": "monai"}, BlendWindow("gaussian", 0.125, floor=1e-3)),
]


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_a_function_has_the_oracles_values_and_the_bits_of_chunks_of_any_shape(data):
    shape = data.draw(st.tuples(*[st.integers(1, 14)] * 3))
    patch = data.draw(st.tuples(*[st.integers(1, 7)] * 3))
    overlap = tuple(data.draw(st.integers(0, p - 1)) for p in patch)
    margin = data.draw(st.tuples(*[st.integers(0, 2)] * 3))
    batch_size = data.draw(st.integers(1, 3))
    lattice = data.draw(st.sampled_from(["stride", "spread", "pad"]))
    fill = data.draw(st.sampled_from(["reflect", "symmetric", "edge"]))
    blend, window = data.draw(st.sampled_from(BLENDS))
    array = np.random.default_rng(1).random(shape, np.float32)
    result = predict(
        array,
        position_dependent,
        patch_shape=patch,
        patch_overlap=overlap,
        crop_margin=margin,
        output_channels=2,
        batch_size=batch_size,
        prediction_bound=64,
        lattice=lattice,
        blend=blend,
        fill=fill,
    )
    chunk = data.draw(st.tuples(*[st.integers(1, 14)] * 3))
    plan = plan_of(
        BoundingBox((0, 0, 0), shape), patch, overlap, chunk, crop_margin=margin, lattice=lattice
    )
    network = NumpyNetwork(position_dependent)
    np.testing.assert_array_equal(
        result, infer_all(array, plan, network, 2, batch_size, fill, bound=64.0, window=window)
    )

    def predict_patch(box):
        prediction = position_dependent(cut_out(array, plan, box.grow(margin), fill)[None])[0]
        z, y, x = (slice(m, m + p) for m, p in zip(margin, patch, strict=True))
        return prediction[:, z, y, x]

    expected, _ = oracle(plan.lattice, predict_patch, 2, window)
    expected = expected[(slice(None), *plan.chunks.roi.slices_in(plan.lattice.domain))]
    allowed = largest_rounding(64.0, plan.lattice.most_patches) + 4e-7 * np.abs(expected).max()
    assert np.abs(result - expected).max() <= allowed


def test_several_input_channels_and_a_constant_outside():
    array = np.stack([IMAGE, 255 - IMAGE])
    result = predict(
        array,
        lambda batch: batch.sum(axis=1, keepdims=True),
        patch_shape=(32, 64, 64),
        crop_margin=(1, 1, 1),
        fill="constant",
    )
    np.testing.assert_allclose(result, np.full((1, *IMAGE.shape), 255), rtol=0, atol=OF_RANGE)


@pytest.mark.parametrize("keys", [{"patch_shape": [8, 16, 16]}, {}], ids=["patches", "whole"])
def test_arrays_of_several_shapes_are_each_as_alone(keys):
    random = np.random.default_rng(3)
    shapes = [(9, 20, 17), (8, 16, 16), (2, 8, 16, 24), (9, 20, 17), (8, 16, 16)]
    arrays = [random.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]
    keys = keys | {"normalize": "unit", "output_channels": 2}
    networks = {3: nn.Conv3d(1, 2, 3, padding=1), 4: nn.Conv3d(2, 2, 3, padding=1)}
    for ndim, network in networks.items():
        some = [each for each in arrays if each.ndim == ndim]
        found = predict(some, network, device="cpu", threads=1, **keys)
        assert [each.shape[-3:] for each in found] == [each.shape[-3:] for each in some]
        for each, result in zip(some, found, strict=True):
            alone = predict(each, network, device="cpu", threads=1, **keys)
            np.testing.assert_array_equal(result, alone)
    if "patch_shape" not in keys:
        image = torch.from_numpy(arrays[0][None, None] / np.float32(255))
        with torch.no_grad():
            expected = networks[3](image)[0].numpy()
        alone = predict(arrays[0], networks[3], device="cpu", **keys)
        np.testing.assert_allclose(alone, expected, rtol=0, atol=1e-6)


def test_of_no_arrays_there_are_no_results():
    assert predict([], lambda batch: batch) == []


def test_a_network_is_not_changed():
    network = nn.Sequential(nn.BatchNorm3d(1), nn.Dropout(0.5)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    predict(IMAGE, network, patch_shape=(20, 40, 37), device="cpu")
    assert network.training
    assert network[0].training
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


OF_OBJECT = {"standard": {"mean": 1, "std": 2, "of": "object"}}


@pytest.mark.parametrize(
    ("array", "network", "keys", "error", "message"),
    [
        (np.zeros((3, 3)), Position(), {}, ConfigError, r"found one of shape \[3, 3\]"),
        (np.zeros((3, 3, 3), complex), Position(), {}, ConfigError, "dtype complex128"),
        (np.zeros((3, 3, 3), np.longdouble), Position(), {}, ConfigError, "up to 64 bits"),
        (np.zeros((0, 3, 3)), Position(), {}, ConfigError, r"shape \[0, 3, 3\]"),
        ((IMAGE, IMAGE), Position(), {}, ConfigError, r"found a tuple of 2: give list"),
        (np.ma.masked_equal(IMAGE, 0), Position(), {}, ConfigError, "found one with a mask"),
        (IMAGE, Position(), {"patch_overlap": (8, 0, 0)}, ConfigError, "must be smaller"),
        (IMAGE, Position(), {"normalize": {"levels": "l.json"}}, ConfigError, "belong to a volume"),
        (IMAGE, Position(), {"normalize": [OF_OBJECT]}, ConfigError, "belong to a volume"),
        (IMAGE / 2, Position(), {"normalize": "unit"}, ConfigError, "needs an integer input"),
        (IMAGE, Position(), {}, ModelContractError, "returns an array of shape"),
        (IMAGE, 7, {}, ModelContractError, "is a int, not a torch module or a function"),
    ],
)
def test_mistakes_are_named(array, network, keys, error, message):
    with pytest.raises(error, match=message):
        predict(array, network, **{"patch_shape": (8, 16, 16), "device": "cpu", **keys})


def test_the_example_of_its_documentation_holds():
    results = doctest.testmod(predict_module)
    assert (results.failed, results.attempted > 3) == (0, True)


@pytest.mark.parametrize("value", [0.5, -0.5, 254.7, 256, -1])
def test_a_fill_value_that_the_array_cannot_hold(value):
    """It would be cut off, as a job does not."""
    with pytest.raises(ConfigError, match=f"fill_value {float(value)} is not a value of the vol"):
        predict(IMAGE, nn.Identity(), **SETTINGS, fill="constant", fill_value=value)


def test_a_partition_into_no_parts():
    with pytest.raises(ConfigError, match="partition"):
        predict(IMAGE, nn.Identity(), **SETTINGS, partition=(0, 1, 1))


def test_a_network_that_keeps_its_normalised_weights():
    """They are steps on the way to a gradient, which PyTorch does not copy."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        network = nn.utils.weight_norm(nn.Conv3d(1, 1, 3, padding=1))
    network(torch.zeros(1, 1, 8, 16, 16))
    before = network.weight
    found = predict(IMAGE, network, **SETTINGS)
    assert network.weight is before
    with torch.no_grad():
        plain = nn.Conv3d(1, 1, 3, padding=1)
        plain.weight.copy_(network.weight)
        plain.bias.copy_(network.bias)
    np.testing.assert_allclose(found, predict(IMAGE, plain, **SETTINGS), rtol=1e-5, atol=1e-4)


def test_an_exported_program():
    network = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2)).eval()
    program = torch.export.export(network, (torch.zeros(2, 1, 8, 16, 16),))
    before = {key: tensor.clone() for key, tensor in program.state_dict.items()}
    keys = {**SETTINGS, "output_channels": 2, "normalize": "unit", "device": "cpu", "threads": 1}
    found = predict(IMAGE, program, **keys)
    np.testing.assert_allclose(found, predict(IMAGE, network, **keys), atol=1e-5)
    assert all(torch.equal(program.state_dict[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("engine", ["torch", "openvino", "onnxruntime"])
@pytest.mark.parametrize("form", ["module", "pt2"])
def test_autocast_of_the_caller_changes_nothing(tmp_path, monkeypatch, engine, form):
    """Networks that were converted within it were wrong, and kept for those without."""
    pytest.importorskip("torch" if engine == "torch" else engine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 2, 1)).eval()
    if form == "pt2":
        program = torch.export.export(network, (torch.zeros(2, 1, 8, 16, 16),))
        torch.export.save(program, tmp_path / "n.pt2")
    given = network if form == "module" else str(tmp_path / "n.pt2")
    keys = {**SETTINGS, "output_channels": 2, "normalize": "unit", "device": "cpu", "threads": 1}
    expected = predict(IMAGE, network, **keys, engine="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = predict(IMAGE, given, **keys, engine=engine)
    np.testing.assert_allclose(within, expected, atol=1e-5)
    np.testing.assert_array_equal(predict(IMAGE, given, **keys, engine=engine), within)


class HalfAnswer(nn.Module):
    """A convolution that answers in a shorter type of float, also by autocast of its own."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv3d(1, 1, 3, padding=1)
        self.how = how

    def forward(self, batch):
        if self.how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.convolution(batch)
        return self.convolution(batch).to(self.how)


@pytest.mark.parametrize("how", [torch.bfloat16, torch.float16, torch.float64, "autocast"])
def test_openvino_gives_what_a_network_of_another_dtype_answers(how):
    pytest.importorskip("openvino")
    keys = {**SETTINGS, "normalize": "unit", "device": "cpu", "threads": 1}
    network = HalfAnswer(how).eval()
    expected = predict(IMAGE, network, **keys)
    found = predict(IMAGE, network, **keys, engine="openvino")
    np.testing.assert_allclose(found, expected, atol=0.02)


class ToBeSent(nn.Identity):
    """A network whose class says where it is defined."""


def test_a_partition_of_a_network_of_the_calling_script(monkeypatch):
    """Pickle takes it, by a name that stands for another program in the members."""
    monkeypatch.setattr(ToBeSent, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "ToBeSent", ToBeSent, raising=False)
    with pytest.raises(EngineError, match=r"\(ToBeSent is of the script that runs\): define its"):
        predict(IMAGE, ToBeSent(), **SETTINGS, partition=(1, 1, 2))


def test_a_partition_of_a_network_that_cannot_be_pickled():
    network = nn.Identity()
    network.function = lambda array: array
    with pytest.raises(EngineError, match="cannot be sent to other processes"):
        predict(IMAGE, network, **SETTINGS, partition=(1, 1, 2))
