"""Networks in OpenVINO's form: means and normalisations have PyTorch's digits."""

import numpy as np
import pytest
import torch
from engine_jobs import LARGE, answer_of_file, exact_answer, offset_noise
from helpers import vary_each
from torch import nn

openvino = pytest.importorskip("openvino")

from openvino import opset13  # noqa: E402

from beam_inference.engines.openvino import openvino_forward  # noqa: E402
from beam_inference.engines.openvino_norms import replace_long_sums  # noqa: E402
from beam_inference.errors import EngineError  # noqa: E402


class Own(nn.Module):
    """Somebody's own normalisation."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        difference = batch - batch.mean((2, 3, 4), keepdim=True)
        return difference / (difference.square().mean((2, 3, 4), keepdim=True) + 1e-5).sqrt()


class Pooled(nn.Module):
    """What is darker than the patch."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch - batch.mean((2, 3, 4))[:, :, None, None, None]


def weighted():
    network = nn.InstanceNorm3d(1, affine=True)
    network.load_state_dict({"weight": torch.tensor([1.7]), "bias": torch.tensor([0.3])})
    return network


NETWORKS = {
    "instances": lambda: nn.InstanceNorm3d(1),
    "instances, with weights": weighted,
    "groups": lambda: nn.GroupNorm(1, 1),
    "layers": lambda: nn.LayerNorm(LARGE[2:], elementwise_affine=False),
    "a mean": Pooled,
    "by hand": Own,
}


@pytest.mark.filterwarnings("ignore")  # PyTorch's, as it converts
@vary_each(kind=["ts", "onnx", "xml"], name=list(NETWORKS))
def test_files(name, kind, tmp_path):
    """By OpenVINO's own sums the first of these was 8e-3 off."""
    network = NETWORKS[name]().eval()
    path = tmp_path / f"network.{kind}"
    example = torch.zeros(LARGE)
    scripted = torch.jit.trace(network, torch.zeros(LARGE))
    if kind == "ts":
        scripted.save(path)
    elif kind == "xml":
        openvino.save_model(openvino.convert_model(scripted, example_input=example), path)
    else:
        pytest.importorskip("onnxscript")
        torch.onnx.export(
            network, (example,), path, dynamo=True, verbose=False, external_data=False
        )
    batch = offset_noise()
    # Weights in IR files are float16.
    np.testing.assert_allclose(
        answer_of_file(str(path), batch, "openvino"),
        exact_answer(network, batch),
        rtol=1e-3,
        atol=5e-6,
    )


def test_statistics_of_the_batch():
    """By OpenVINO's own sums it was 6e-5 off."""
    batch = offset_noise()[:1]
    network = nn.BatchNorm3d(1, track_running_stats=False).eval()
    found = openvino_forward(network, batch.shape, 2)(torch.from_numpy(batch)).numpy()
    np.testing.assert_allclose(found, exact_answer(network, batch), rtol=0, atol=5e-6)


@vary_each(
    mode=["inside_sqrt", "outside_sqrt"],
    variance=[True, False],
    axes=[[2, 3, 4], [-1, -2], [1, 3], [4]],
    shape=[(2, 3, 4, 5, 6), (1, 3, 1, 2000, 1), (1, 2, 3, 4, 1031), (1, 1, 1, 1, 2310)],
)
def test_operations(mode, variance, axes, shape):
    """OpenVINO's operations against ours, on few voxels; weights of channels, and of voxels."""
    random = np.random.default_rng(0)
    array = random.random(shape, np.float32)
    for weight in (
        None,
        random.random((1, shape[1], 1, 1, 1), np.float32),
        random.random((shape[3], 1), np.float32),
    ):
        parameter = opset13.parameter(array.shape, np.float32)
        normal = opset13.mvn(parameter, opset13.constant(axes), variance, 1e-3, mode)
        if weight is not None:
            normal = opset13.multiply(opset13.constant(weight), normal)
        means = [
            opset13.reduce_mean(parameter, opset13.constant(axes), keep) for keep in (True, False)
        ]
        network = openvino.Model([normal, *means], [parameter])
        expected = [*openvino.compile_model(network.clone(), "CPU")(array).values()]
        written = replace_long_sums(network)
        left = [node.get_type_name() for node in written.get_ordered_ops()]
        # short, or of no factors
        assert ("MVN" in left) == (axes == [4] and shape[4] in (1, 6, 1031))
        for found, before in zip(
            openvino.compile_model(written, "CPU")(array).values(), expected, strict=True
        ):
            np.testing.assert_allclose(found, before, rtol=1e-5, atol=1e-5)


def test_a_mean_of_all_values_has_no_axes():
    array = np.random.default_rng(0).random((2, 3, 4, 5), np.float32)
    parameter = opset13.parameter(array.shape, np.float32)
    mean = opset13.reduce_mean(parameter, opset13.constant([0, 1, 2, 3]))
    written = replace_long_sums(openvino.Model([opset13.subtract(parameter, mean)], [parameter]))
    [found] = openvino.compile_model(written, "CPU")(array).values()
    np.testing.assert_allclose(found, array - array.mean(), rtol=1e-5, atol=1e-6)


def test_what_it_cannot_know_stays():
    """Unknown shapes, axes that are inputs, and means of other dtypes than float32."""
    unknown = opset13.parameter([-1, 2, -1], np.float32)
    axes = opset13.parameter([2], np.int64)
    known = opset13.parameter([2, 3, 4], np.float32)
    whole = opset13.parameter([2, 3], np.int32)
    half = opset13.parameter([2, 3], np.float16)
    means = [
        opset13.reduce_mean(unknown, opset13.constant([1, 2])),
        opset13.reduce_mean(known, axes),
        opset13.reduce_mean(whole, opset13.constant([0, 1])),
        opset13.reduce_mean(half, opset13.constant([0, 1])),
    ]
    network = replace_long_sums(openvino.Model(means, [unknown, axes, known, whole, half]))
    assert [node.get_type_name() for node in network.get_ordered_ops()].count("ReduceMean") == len(
        means
    )


def test_weights_that_are_compressed_stay_so():
    """They are expanded as the engine is given them, and it knows better how."""
    parameter = opset13.parameter([2, 3, 4], np.float32)
    axes = opset13.constant([1])
    weights = opset13.convert(opset13.constant(np.ones((4, 4), np.int8)), np.float32)
    product = opset13.matmul(parameter, weights, False, False)
    mean = opset13.reduce_mean(product, opset13.concat([axes, opset13.constant([2])], 0))
    network = replace_long_sums(openvino.Model([mean], [parameter]))
    kinds = [node.get_type_name() for node in network.get_ordered_ops()]
    assert "Convert" in kinds
    assert "ReduceSum" in kinds  # though its axes had been computed


@pytest.mark.filterwarnings("ignore")  # PyTorch's, as it converts
def test_an_axis_that_is_none_is_refused(tmp_path):
    """A number of any size was taken for one of the axes, by its remainder."""
    path = tmp_path / "network.xml"
    network = nn.InstanceNorm3d(1).eval()
    openvino.save_model(openvino.convert_model(network, example_input=torch.zeros(LARGE)), path)
    weights = path.with_suffix(".bin")
    content = weights.read_bytes()
    for dtype in (np.int64, np.int32):
        axes, others = (np.array(each, dtype).tobytes() for each in ([2, 3, 4], [4194306, 3, 4]))
        content = content.replace(axes, others)
    weights.write_bytes(content)
    with pytest.raises(EngineError, match="an operation MVN with axes"):
        answer_of_file(str(path), offset_noise(), "openvino")
