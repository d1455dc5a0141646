"""Test that networks of integers compute the same bits everywhere, near those in float32."""

import hashlib
import sys
import warnings

import numpy as np
import pytest
import torch
from engine_jobs import FIB25, answer, job_config
from helpers import toy

from beam_inference.config.engines import Engine, get_engine
from beam_inference.engines.loading import load_predictor, load_reference, quantize_network
from beam_inference.errors import ConfigError, EngineError

PATCH = (8, 16, 32)


def samples(seed, count=3, channels=1):
    """Smooth noise: what NNCF calibrates on."""
    random = np.random.default_rng(seed)
    coarse = random.random((count, channels, 2, 4, 8), np.float32)
    return list(coarse.repeat(4, 2).repeat(4, 3).repeat(4, 4))


@pytest.fixture
def int8():
    """A function that loads a network of integers of a job's network."""
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")

    def load(model=FIB25, content=None, **keys):
        job = job_config(model, engine="openvino", precision="int8", patch_shape=PATCH, **keys)
        content = content or quantize_network(job.model, job.inference, samples(0))
        load.content = content
        return load_predictor(job.model, job.inference, quantized=content)

    return load


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": "auto"}, "engine: auto does not choose it: write engine: openvino"),
        ({"engine": "fastest"}, "engine: fastest does not choose it"),
        ({"engine": "torch"}, "engine: torch runs .*; write engine: openvino"),
        ({"engine": "onnxruntime"}, "engine: onnxruntime runs .*; write engine: openvino"),
        ({"engine": "openvino", "device": "cuda"}, "openvino runs on the CPU in float32 or int8"),
    ],
)
def test_only_an_engine_that_is_named_runs_integers(keys, message):
    with pytest.raises(ConfigError, match=message):
        job_config(FIB25, precision="int8", **keys)


def test_an_engine_for_integers_says_how_it_makes_them():
    assert get_engine("openvino").quantize is not None
    with pytest.raises(ValueError, match="precision int8 is what quantize is for"):
        Engine(name="x", package="x", load=lambda _: None, install="", precisions=("int8",))


def test_a_network_that_no_launch_has_made_is_not_loaded():
    job = job_config(FIB25, engine="openvino", precision="int8")
    with pytest.raises(EngineError, match="int8 is for jobs, whose first launch makes a network"):
        load_predictor(job.model, job.inference)


def test_without_nncf_the_message_says_what_to_install(monkeypatch):
    pytest.importorskip("openvino")
    monkeypatch.setitem(sys.modules, "nncf", None)
    job = job_config(FIB25, engine="openvino", precision="int8", patch_shape=PATCH)
    with pytest.raises(EngineError, match=r"needs NNCF .*pip install 'beam-inference\[int8\]'"):
        quantize_network(job.model, job.inference, samples(0))


def test_values_are_near_those_in_float32(int8):
    job = job_config(FIB25, engine="openvino", precision="int8", patch_shape=PATCH)
    reference = load_reference(job.model, job.inference)
    batch = np.stack(samples(1, 2))
    difference = answer(int8(), batch) - answer(reference, batch)
    assert reference.description["precision"] == "float32"
    assert 0 < np.sqrt(np.mean(difference**2)) < 1e-2


@pytest.mark.slow
def test_the_same_samples_give_the_same_network(int8):
    first = int8()
    content = int8.content
    second = int8()
    assert int8.content == content
    assert first.description == second.description
    assert first.description["quantized"] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_bits_depend_neither_on_the_batch_nor_on_the_place_in_it(int8, threads):
    patches = samples(1, 3)
    one = int8(batch_size=1, threads=threads)
    expected = [answer(one, patch[None])[0] for patch in patches]
    three = int8(content=int8.content, batch_size=3, threads=threads)
    np.testing.assert_array_equal(answer(three, np.stack(patches)), expected)
    np.testing.assert_array_equal(answer(three, np.stack(patches[::-1])), expected[::-1])


GROUPS = """
import torch


def make():
    torch.manual_seed(0)
    first, middle, last = (
        torch.nn.Conv3d(n, m, 3, padding=1) for n, m in ((1, 8), (8, 8), (8, 2))
    )
    norm = torch.nn.GroupNorm(2, 8)
    return torch.nn.Sequential(first, norm, torch.nn.ReLU(), middle, torch.nn.ReLU(), last)
"""


@pytest.fixture
def groups(tmp_path):
    """The model section of a network that normalises over groups of channels."""
    (tmp_path / "groups.py").write_text(GROUPS)
    return {"path": f"{tmp_path}/groups.py:make", "output_channels": 2}


def test_patches_that_share_a_batch_are_not_normalised_together(int8, groups):
    patch, other = samples(1, 2)
    one = int8(groups, batch_size=1)
    expected = answer(one, patch[None])[0]
    three = int8(groups, int8.content, batch_size=3)
    assert three.description == one.description  # the trial may choose the size
    strange = 50 * other
    answers = answer(three, np.stack([strange, patch, np.zeros_like(patch)]))
    np.testing.assert_array_equal(answers[1], expected)
    assert not np.array_equal(answers[0], answers[2])


@pytest.mark.parametrize("suffix", ["onnx", pytest.param("xml", marks=pytest.mark.slow)])
def test_a_file_gives_the_same_network_whatever_the_process_has_made_before(
    int8, groups, tmp_path, suffix
):
    openvino = pytest.importorskip("openvino")
    namespace = {}
    exec(GROUPS, namespace)
    program = torch.export.export(namespace["make"]().eval(), (torch.zeros(1, 1, *PATCH),))
    file = tmp_path / f"net.{suffix}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if suffix == "onnx":
            pytest.importorskip("onnxscript")
            torch.onnx.export(program, dynamo=True, verbose=False).save(file)
        else:
            openvino.save_model(openvino.convert_model(program), file)
    model = {"path": str(file), "output_channels": 2}
    if suffix == "xml":
        model["weights"] = str(tmp_path / "net.bin")
    int8(model, batch_size=1)
    first = int8.content
    for _ in range(100):  # OpenVINO counts what it makes, and names layers by that
        openvino.opset13.constant(1.0)
    int8(model, batch_size=1)
    assert int8.content == first


def test_a_file_of_openvinos_is_compared_with_itself_in_float32(int8, tmp_path):
    openvino = pytest.importorskip("openvino")
    torch.manual_seed(0)
    convolutions = [torch.nn.Conv3d(a, b, 3, padding=1) for a, b in ((1, 8), (8, 8), (8, 2))]
    network = torch.nn.Sequential(convolutions[0], torch.nn.ReLU(), *convolutions[1:])
    graph = torch.export.export(network.eval(), (torch.zeros(1, 1, *PATCH),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = openvino.convert_model(graph)
    openvino.save_model(model, tmp_path / "net.xml", compress_to_fp16=False)
    model = {
        "path": str(tmp_path / "net.xml"),
        "weights": str(tmp_path / "net.bin"),
        "output_channels": 2,
    }
    job = job_config(model, engine="openvino", precision="int8", patch_shape=PATCH)
    reference = load_reference(job.model, job.inference)
    batch = np.stack(samples(1, 2))
    difference = answer(int8(model), batch) - answer(reference, batch)
    assert reference.description["engine"] == "openvino"
    assert 0 < np.abs(difference).max() < 1e-2


def test_a_network_that_would_stay_in_float32_is_refused(int8):
    with pytest.raises(EngineError, match="convolutions between its first and its last .* has 1"):
        int8(toy("conv", output_channels=2))


def test_a_network_of_integers_for_other_batches_is_refused(int8):
    int8(batch_size=1)
    job = job_config(FIB25, engine="openvino", precision="int8", patch_shape=(16, 16, 32))
    message = r"integers in the state folder is for batches of the shape \[1,1,8,16,32\], and gets"
    with pytest.raises(EngineError, match=message):
        load_predictor(job.model, job.inference, quantized=int8.content)


def test_a_network_of_integers_of_several_inputs_is_refused(int8, tmp_path):
    openvino = pytest.importorskip("openvino")
    int8(batch_size=1)
    size = 8 + int.from_bytes(int8.content[:8])
    network = openvino.Core().read_model(int8.content[8:size], int8.content[size:])
    another = openvino.opset13.parameter([1], name="another")
    network.add_parameters([another])
    end = network.outputs[0].get_node().input(0)
    end.replace_source_output(openvino.opset13.add(end.get_source_output(), another).output(0))
    openvino.serialize(network, tmp_path / "net.xml", tmp_path / "net.bin")
    forged = (tmp_path / "net.xml").read_bytes()
    forged = len(forged).to_bytes(8) + forged + (tmp_path / "net.bin").read_bytes()
    with pytest.raises(EngineError, match="takes 2 inputs; expected one"):
        int8(content=forged, batch_size=1)


@pytest.mark.slow
def test_pytorch_computes_the_same_bits_after_nncf_was_imported(int8):
    torch.manual_seed(0)
    network = torch.nn.Conv3d(1, 4, 3)
    batch = torch.rand(1, 1, *PATCH)
    with torch.inference_mode():
        before = network(batch)
        int8()
        assert torch.equal(network(batch), before)
