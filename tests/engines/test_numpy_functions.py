"""Networks that are functions of NumPy arrays."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engine_jobs import PATCH, answer, batch_of, job_config, load
from extension import FOLDER
from helpers import job_values, toy, write_job

from beam_inference.cli.main import main
from beam_inference.config.engines import LoadRequest
from beam_inference.engines.choice import describe_engine, engines_to_measure, engines_to_try
from beam_inference.engines.numpy_functions import ENGINE
from beam_inference.errors import ConfigError, DeviceOutOfMemory, EngineError, ModelContractError
from beam_inference.launch import decide

EDGES = {"path": f"{FOLDER / 'beam_inference_example' / 'network.py'}:edges"}
SCALED = EDGES["path"].replace(":edges", ":scaled_edges")


def factory(tmp_path, source):
    """The model section of a job whose network's factory is in a file."""
    (tmp_path / "net.py").write_text(source)
    return {"path": f"{tmp_path / 'net.py'}:network"}


def test_auto_and_fastest_are_numpy():
    job = job_config(EDGES, engine="auto")
    assert engines_to_try(job.model, job.inference) == ["numpy"]
    assert engines_to_measure(job.model, job.inference) == [{"engine": "numpy"}]


def test_a_launcher_knows_what_a_worker_will_say_though_there_are_no_weights():
    job = job_config(EDGES, engine="numpy")
    description = load(EDGES, "numpy").description
    assert describe_engine(job.model, job.inference) == description
    assert description["engine_version"] == np.__version__


@pytest.mark.parametrize("engine", ["torch", "openvino", "compile"])
def test_other_engines_do_not_run_functions(engine):
    with pytest.raises(EngineError, match="function of NumPy arrays.* write engine: numpy"):
        load(EDGES, engine)


def test_networks_of_pytorch_are_not_run_as_functions():
    with pytest.raises(EngineError, match="network of PyTorch.* write engine: torch"):
        load(toy("conv"), "numpy")


class Counting:
    """A network that notes by how many threads it is called at a time."""

    def __init__(self, thread_safe):
        self.thread_safe = thread_safe
        self.busy = 0
        self.most = 0
        self.lock = threading.Lock()

    def __call__(self, batch):
        with self.lock:
            self.busy += 1
            self.most = max(self.most, self.busy)
        time.sleep(0.05)
        with self.lock:
            self.busy -= 1
        return batch


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_function_is_called_by_one_thread_at_a_time_unless_it_is_thread_safe(is_safe):
    network = Counting(is_safe)
    job = job_config(EDGES, engine="numpy")
    request = LoadRequest(
        network=network,
        kind="function",
        batch_shape=(2, 1, *PATCH),
        device="cpu",
        weights=None,
        model=job.model,
        inference=job.inference,
    )
    forward = ENGINE.load(request)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(forward, [batch_of({})] * 8))
    assert (network.most > 1) == is_safe


def test_activations_and_two_dimensions(tmp_path):
    model = factory(
        tmp_path,
        "import numpy as np\n"
        "def network():\n"
        "    return lambda batch: np.concatenate([batch, 1 - batch], 1).astype(np.float64)\n",
    )
    batch = batch_of({}, depth=1)
    both = np.concatenate([batch, 1 - batch], 1)
    keys = {"patch_shape": (1, 16, 32)}
    flat = {**model, "dims": 2, "output_channels": 2}
    found = answer(load({**flat, "activation": "sigmoid"}, "numpy", **keys), batch)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-both)), rtol=1e-6)
    found = answer(load({**flat, "activation": "softmax"}, "numpy", **keys), batch)
    np.testing.assert_allclose(found, np.exp(both) / np.exp(both).sum(1, keepdims=True), rtol=1e-6)
    assert found.dtype == np.float32


def test_answers_that_are_no_real_numbers_and_memory_that_is_short(tmp_path):
    complex_numbers = factory(tmp_path, "def network():\n    return lambda batch: 1j * batch\n")
    with pytest.raises(ModelContractError, match="array of complex64; expected real numbers"):
        load(complex_numbers, "numpy").predict(batch_of({}))
    short = factory(
        tmp_path, "def network():\n    return short\ndef short(batch):\n    raise MemoryError\n"
    )
    with pytest.raises(DeviceOutOfMemory):
        load(short, "numpy").predict(batch_of({}))


def test_a_factory_may_load_its_weights_itself(tmp_path):
    np.savez(tmp_path / "weights.npz", scale=np.float32(3))
    weights = {"weights": str(tmp_path / "weights.npz")}
    found = answer(load({"path": SCALED, **weights}, "numpy"), batch_of({}))
    np.testing.assert_allclose(found, 3 * answer(load(EDGES, "numpy"), batch_of({})), rtol=1e-6)
    with pytest.raises(ModelContractError, match="give the factory a parameter weights_path"):
        load({**EDGES, **weights}, "numpy")


def test_a_change_of_the_source_is_another_job(volume_in, tmp_path, capsys):
    model = factory(tmp_path, "def network():\n    return lambda batch: batch\n")
    values = job_values(volume_in, tmp_path / "out", model=model, inference={"engine": "numpy"})
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", job]) == 0
    assert main(["verify", job, "--deep"]) == 0
    factory(tmp_path, "def network():\n    return lambda batch: 2 * batch\n")
    assert main(["run", job]) == 2
    assert "model.sha256" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["auto", "fastest"])
def test_a_function_runs_on_the_cpu_though_the_machine_has_a_gpu(
    volume_in, tmp_path, monkeypatch, engine
):
    monkeypatch.setattr(decide, "find_accelerator", lambda: "cuda")
    open_keys = {"engine": engine, "device": "auto"}
    values = job_values(volume_in, tmp_path / "out", model=EDGES, inference=open_keys)
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    record = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    inference = record["config"]["inference"]
    assert (inference["engine"], inference["device"]) == ("numpy", "cpu")


def test_the_device_of_other_networks_is_as_before(monkeypatch, tmp_path):
    monkeypatch.setattr(decide, "find_accelerator", lambda: "cuda")
    absent = {"path": f"{tmp_path / 'absent.py'}:network"}
    for model in (toy("conv"), absent, {"path": "identity"}):
        for engine in ("auto", "torch"):
            job = job_config(model, engine=engine, device="auto")
            assert decide.decide_device(job, None) == "cuda"
    tf32 = job_config(EDGES, engine="auto", device="auto", precision="tf32")
    with pytest.raises(ConfigError, match="CUDA devices, and this network is a function"):
        decide.decide_device(tf32, None)
