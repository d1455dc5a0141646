"""ONNX files that other tools have made: what engines take otherwise than the format means."""

import json

import numpy as np
import pytest
from engine_jobs import answer, job_config, load
from helpers import job_values, read_volume, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.engines import openvino_operations
from beam_inference.engines.choice import engines_to_try
from beam_inference.engines.loading import load_predictor, load_reference
from beam_inference.engines.trial import BETWEEN_ENGINES, check_difference
from beam_inference.errors import EngineError

onnx = pytest.importorskip("onnx")
pytest.importorskip("openvino")
pytest.importorskip("onnxruntime")

FLOAT = onnx.TensorProto.FLOAT
SHAPE = (2, 1, 8, 8, 8)
ENGINES = ["openvino", "onnxruntime"]


def save(path, nodes, constants=(), *, opset=17, taken=FLOAT, given=FLOAT, inputs=("x",)):
    """An ONNX file with an input x, or several, and an output y; constants by their names."""
    helper = onnx.helper
    named = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in dict(constants).items()]
    given_to = [helper.make_tensor_value_info(each, taken, list(SHAPE)) for each in inputs]
    y = helper.make_tensor_value_info("y", given, None)
    graph = helper.make_graph(nodes, "g", given_to, [y], named)
    opsets = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return {"path": str(path), "output_channels": 1, "normalize": "none"}


def node(operator, inputs, output, **keys):
    return onnx.helper.make_node(operator, inputs, [output], **keys)


def batch_of(low=0.0, high=1.0):
    return np.random.default_rng(0).uniform(low, high, SHAPE).astype(np.float32)


def loaded(model, engine):
    return load(model, engine, patch_shape=SHAPE[2:])


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_patches_of_another_extent_than_the_files_are_refused(tmp_path, suffix):
    """Constants in it may be of that extent."""
    import openvino

    model = save(tmp_path / "a.onnx", [node("Relu", ["x"], "y")])
    if suffix == ".xml":
        network = openvino.Core().read_model(model["path"])
        openvino.save_model(network, tmp_path / "a.xml")
        model["path"] = str(tmp_path / "a.xml")
    batch = batch_of()
    np.testing.assert_array_equal(answer(loaded(model, "openvino"), batch), batch)
    with pytest.raises(EngineError, match=r"exported for patches of \[2,1,8,8,8\], and gets"):
        load(model, "openvino", patch_shape=(16, 8, 8))


def test_a_file_whose_constants_hold_its_batch_names_the_batch_size_to_write(tmp_path):
    nodes = [node("Reshape", ["x", "s"], "y")]
    model = save(tmp_path / "a.onnx", nodes, {"s": np.array(SHAPE, np.int64)})
    batch = batch_of()
    np.testing.assert_array_equal(answer(loaded(model, "openvino"), batch), batch)
    with pytest.raises(EngineError, match="for batches of 2, and gets 3: write .*batch_size: 2"):
        load(model, "openvino", patch_shape=SHAPE[2:], batch_size=3)


KERNEL = np.ones((1, 1, 3, 3, 3), np.float32)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "nodes",
    [
        # OpenVINO ended the process
        pytest.param([node("Conv", ["x"], "y")], id="an input is missing"),
        pytest.param([node("Clip", ["", "x"], "y")], id="an input has no name"),
        pytest.param([node("Max", [], "y")], id="there is no input"),
        # OpenVINO took the default
        pytest.param([node("Conv", ["x", "w"], "y", padz=[1] * 6)], id="a name nobody knows"),
        pytest.param([node("Softmax", ["x"], "y", axis=1.5)], id="another type"),
    ],
)
def test_operators_that_are_not_the_standards_are_refused(tmp_path, engine, nodes):
    model = save(tmp_path / "a.onnx", nodes, {"w": KERNEL})
    with pytest.raises(EngineError, match="as the ONNX standard has it|INVALID_GRAPH|FAIL"):
        loaded(model, engine)


def test_a_file_whose_names_are_no_text_is_refused(tmp_path):
    model = save(tmp_path / "a.onnx", [node("Relu", ["x"], "y", consumed_inputs=[1])])
    content = (tmp_path / "a.onnx").read_bytes()
    assert b"consumed_inputs" in content
    (tmp_path / "a.onnx").write_bytes(content.replace(b"consumed_inputs", b"consumed\xf5inputs"))
    with pytest.raises(EngineError, match="is not as the ONNX standard has it"):
        loaded(model, "openvino")


def test_answers_in_bfloat16(tmp_path):
    """NumPy has no such dtype, and OpenVINO passed them as float16."""
    bfloat16 = onnx.TensorProto.BFLOAT16
    cast = node("Cast", ["x"], "y", to=bfloat16)
    model = save(tmp_path / "a.onnx", [cast], given=bfloat16)
    batch = batch_of(-3, 3)
    np.testing.assert_allclose(answer(loaded(model, "openvino"), batch), batch, rtol=2**-7)
    with pytest.raises(EngineError, match="answers in bfloat16"):
        loaded(model, "onnxruntime")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["UINT8", "INT16", "INT64"])
def test_networks_of_integers_are_refused(tmp_path, engine, name):
    """Normalised values between 0 and 1 would be cut off."""
    taken = getattr(onnx.TensorProto, name)
    model = save(tmp_path / "a.onnx", [node("Cast", ["x"], "y", to=FLOAT)], taken=taken)
    with pytest.raises(EngineError, match="they would be cut off"):
        loaded(model, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("inputs", [("x", "z"), ()])
def test_networks_of_other_than_one_input_are_refused(tmp_path, engine, inputs):
    add = node("Add", ["x", "z"], "y")
    constants = {} if inputs else {"x": np.ones(SHAPE, np.float32), "z": np.float32(1)}
    model = save(tmp_path / "a.onnx", [add], constants, inputs=inputs)
    with pytest.raises(EngineError, match=f"takes {len(inputs)} inputs; expected one"):
        loaded(model, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["FLOAT16", "DOUBLE"])
def test_other_floats_are_taken(tmp_path, engine, name):
    taken = getattr(onnx.TensorProto, name)
    model = save(tmp_path / "a.onnx", [node("Cast", ["x"], "y", to=FLOAT)], taken=taken)
    batch = batch_of()
    np.testing.assert_allclose(answer(loaded(model, engine), batch), batch, rtol=2**-10)


@pytest.mark.parametrize("engine", ENGINES)
def test_products_of_integers_do_not_overflow(tmp_path, engine):
    """As ONNX Runtime's own tool writes them; two products of 8 bits are more than 16 hold."""
    scale, zero = np.float32(1 / 255), np.uint8(0)
    weights = np.full((1, 1, 3, 3, 3), 127, np.int8)
    constants = {"s": scale, "z": zero, "w": weights, "ws": np.float32(0.01), "wz": np.int8(0)}
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], "q"),
        node("DequantizeLinear", ["q", "s", "z"], "d"),
        node("DequantizeLinear", ["w", "ws", "wz"], "v"),
        node("Conv", ["d", "v"], "c", pads=[1] * 6),
        node("QuantizeLinear", ["c", "os", "z"], "p"),
        node("DequantizeLinear", ["p", "os", "z"], "y"),
    ]
    model = save(tmp_path / "a.onnx", nodes, constants | {"os": np.float32(34.3 / 255)})
    batch = np.ones(SHAPE, np.float32)
    inside = answer(loaded(model, engine), batch)[:, :, 1:-1, 1:-1, 1:-1]
    np.testing.assert_allclose(inside, 27 * 1.27, rtol=0, atol=0.1)


def old_softmax(path):
    """Before version 13 of the standard: over this axis and all behind it."""
    return save(path, [node("Softmax", ["x"], "y", axis=2)], opset=11)


def test_openvino_is_compared_with_onnxruntime(tmp_path):
    model = old_softmax(tmp_path / "a.onnx")
    job = job_config(model, engine="openvino", patch_shape=SHAPE[2:])
    reference = load_reference(job.model, job.inference)
    assert reference.description["engine"] == "onnxruntime"
    predictor = load_predictor(job.model, job.inference)
    with pytest.raises(EngineError, match="openvino in float32 differs from onnxruntime"):
        check_difference(predictor, reference, batch_of()[0], lambda batch: batch, 2)
    job = job_config(model, engine="onnxruntime", patch_shape=SHAPE[2:])
    assert load_reference(job.model, job.inference) is None
    assert engines_to_try(job.model, job.inference.model_copy(update={"engine": "auto"})) == ENGINES


def test_a_network_that_onnxruntime_cannot_load_is_not_run_by_openvino(tmp_path):
    bfloat16 = onnx.TensorProto.BFLOAT16
    cast = node("Cast", ["x"], "y", to=bfloat16)
    model = save(tmp_path / "a.onnx", [cast], given=bfloat16)
    job = job_config(model, engine="openvino", patch_shape=SHAPE[2:])
    with pytest.raises(EngineError, match="what openvino answers cannot be compared"):
        load_reference(job.model, job.inference)


def dilated(path):
    """A network that ONNX Runtime loads, and fails to run: it pads no dilated convolution.

    OpenVINO (2026.4.1) runs it, and answers otherwise than the format means.
    """
    convolution = node("Conv", ["x", "w"], "y", auto_pad="SAME_UPPER", dilations=[2, 1, 2])
    return save(path, [convolution], {"w": np.full((1, 1, 3, 3, 3), 1 / 27, np.float32)})


def run_file(folder, model, engine):
    """Run a job of random values; return them, and the exit code."""
    image = np.random.default_rng(0).random((16, 16, 16), np.float32)
    write_volume(folder / "in", image)
    values = job_values(folder / "in", folder / "out", model=model)
    inference = {"patch_shape": [8, 8, 8], "patch_overlap": [0, 0, 0], "chunk_shape": [16, 16, 16]}
    values["inference"] |= {**inference, "engine": engine}
    values["output"]["block_shape"] = [16, 16, 16]
    return image, main(["run", str(write_job(folder / "job.yaml", values))])


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_what_onnxruntime_cannot_run_is_run_by_nobody(tmp_path, capfd, engine):
    _, exit_code = run_file(tmp_path, dilated(tmp_path / "a.onnx"), engine)
    captured = capfd.readouterr().err
    assert exit_code == 2
    assert captured.startswith("error: ")  # ONNX Runtime itself prints nothing
    message = " ".join(captured.split())
    assert "Dilation not supported for AutoPadType" in message
    assert "export the network with others" in message or "export it with others" in message
    assert not (tmp_path / "out").exists()


def test_auto_takes_the_engine_that_answers_as_the_file_means(tmp_path):
    image, exit_code = run_file(tmp_path, old_softmax(tmp_path / "a.onnx"), "auto")
    assert exit_code == 0
    engine = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())["engine"]
    assert engine["engine"] == "onnxruntime"
    patch = np.exp(image[:8, :8, :8])
    found = read_volume(tmp_path / "out")[0, :8, :8, :8]
    np.testing.assert_allclose(found, patch / patch.sum(), rtol=1e-4)


POOLS = """
import torch


class Pool(torch.nn.Module):
    def forward(self, x):
        x = torch.nn.functional.avg_pool3d(x, 3, 2, 1, ceil_mode=True)
        return torch.nn.functional.interpolate(x, size=(8, 8, 8))

def pool():
    return Pool()
"""


@pytest.mark.parametrize("is_first", [False, True])
def test_members_that_pytorch_can_run_are_compared_with_it(tmp_path, is_first, monkeypatch):
    """The other one is a file, of which PyTorch knows nothing."""
    monkeypatch.setattr(openvino_operations, "_averages_inside", lambda node: True)
    (tmp_path / "net.py").write_text(POOLS)
    file = save(tmp_path / "a.onnx", [node("Identity", ["x"], "y")])["path"]
    factory = f"{tmp_path}/net.py:pool"
    first, second = (file, factory) if is_first else (factory, file)
    model = {"path": first, "ensemble": [{"path": second}], "output_channels": 1}
    job = job_config(model, engine="openvino", patch_shape=SHAPE[2:])
    reference = load_reference(job.model, job.inference)
    predictor = load_predictor(job.model, job.inference)
    with pytest.raises(EngineError, match="openvino in float32 differs from"):
        check_difference(predictor, reference, batch_of()[0], lambda batch: batch, 2)
    assert engines_to_try(job.model, job.inference.model_copy(update={"engine": "auto"})) == ENGINES


def average(path, depth):
    """An average pooling whose last window along z alone reaches beyond the padding."""
    shape = [1, 1, depth, 15, 15]
    x = onnx.helper.make_tensor_value_info("x", FLOAT, shape)
    y = onnx.helper.make_tensor_value_info("y", FLOAT, None)
    keys = {"kernel_shape": [3] * 3, "pads": [1] * 6, "count_include_pad": 1, "ceil_mode": 1}
    nodes = [
        node("AveragePool", ["x"], "p", strides=[2] * 3, **keys),
        node("Resize", ["p", "", "", "shape"], "y", mode="nearest"),
    ]
    constant = onnx.numpy_helper.from_array(np.array(shape), "shape")
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], [constant])
    opsets = [onnx.helper.make_opsetid("", 19)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))
    model = {"path": str(path), "output_channels": 1, "normalize": "none"}
    return job_config(model, engine="openvino", patch_shape=shape[2:], batch_size=1)


def test_windows_beyond_the_padding_are_refused(tmp_path):
    job = average(tmp_path / "a.onnx", 16)
    with pytest.raises(EngineError, match="last window reaches beyond the padding"):
        load_predictor(job.model, job.inference)
    job = average(tmp_path / "b.onnx", 15)
    predictor = load_predictor(job.model, job.inference)
    reference = load_reference(job.model, job.inference)
    patch = np.random.default_rng(0).random((1, 15, 15, 15), np.float32)
    check_difference(predictor, reference, patch, lambda batch: batch, 1)


def test_norms_of_small_values_are_left_to_another_engine(tmp_path):
    model = save(tmp_path / "a.onnx", [node("LpNormalization", ["x"], "y", axis=2, p=2)])
    with pytest.raises(EngineError, match="that small values are lost beside"):
        loaded(model, "openvino")
    batch = batch_of(1e-6, 1e-3)
    norms = np.linalg.norm(batch, axis=2, keepdims=True)
    found = answer(loaded(model, "onnxruntime"), batch)
    np.testing.assert_allclose(found, batch / norms, rtol=1e-5)


@pytest.mark.parametrize(("point", "is_run"), [(1, False), (2, True), (None, True)])
def test_halves_are_rounded_as_the_standard_has_it(point, is_run, tmp_path):
    inputs = ["x", "scale"] + ["point"] * (point is not None)
    nodes = [node("QuantizeLinear", inputs, "q"), node("DequantizeLinear", ["q", *inputs[1:]], "y")]
    constants = {"scale": np.float32(0.25)}
    constants |= {} if point is None else {"point": np.uint8(point)}
    model = save(tmp_path / "a.onnx", nodes, constants)
    if is_run:
        batch = np.full(SHAPE, 1.375, np.float32)
        found = [answer(loaded(model, engine), batch) for engine in ENGINES]
        np.testing.assert_array_equal(*found)
    else:
        with pytest.raises(EngineError, match="halves are rounded otherwise"):
            loaded(model, "openvino")


def test_what_is_wrong_at_one_side_of_a_patch_is_noticed(tmp_path, monkeypatch):
    """In the whole patch it would be less than two engines may differ by."""
    monkeypatch.setattr(openvino_operations, "_averages_inside", lambda node: True)
    job = average(tmp_path / "a.onnx", 160)
    predictor = load_predictor(job.model, job.inference)
    reference = load_reference(job.model, job.inference)
    patch = np.random.default_rng(0).random((1, 160, 15, 15), np.float32)
    with pytest.raises(EngineError, match="over a patch or a side of it, more than the"):
        check_difference(predictor, reference, patch, lambda batch: batch, 1)
    ours, theirs = (answer(each, patch[None]) for each in (predictor, reference))
    assert np.sqrt(np.square(ours - theirs).mean()) < BETWEEN_ENGINES
