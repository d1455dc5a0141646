"""Other engines than PyTorch: they give what PyTorch gives, and jobs keep their choice."""

import json
import logging
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_networks
from engine_jobs import (
    CONVERTED,
    FIB25,
    PATCH,
    ROI,
    UNET,
    answer,
    batch_of,
    job_config,
    load,
    run_job,
)
from fib25_job import affinity_job
from helpers import job_values, read_volume, toy, write_job

from beam_inference.cli.main import main
from beam_inference.engines import choice
from beam_inference.engines.choice import describe_engine, engines_to_try
from beam_inference.engines.loading import load_predictor, load_reference
from beam_inference.engines.trial import check_difference
from beam_inference.errors import EngineError, ModelContractError
from beam_inference.models.hashes import model_sha256

pytest.importorskip("openvino")
pytest.importorskip("onnxruntime")


@pytest.mark.parametrize(
    "engine",
    [
        "openvino",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("onnxruntime", "compile")),
    ],
)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(FIB25, id="trained, instance norm"),
        pytest.param(UNET, id="the residual U-Net"),
        pytest.param(toy("batch_norm"), id="batch norm"),
        pytest.param(toy("flat", dims=2), id="2-D"),
        pytest.param(toy("stack", dims=2, sections=5), id="five sections"),
        pytest.param(toy("conv", activation="softmax"), id="convolution, softmax"),
    ],
)
def test_every_engine_gives_what_pytorch_gives(model, engine):
    patch = {"patch_shape": (1, *PATCH[1:])} if model.get("dims") == 2 else {}
    batch = batch_of(model, depth=model.get("sections", 1) if patch else PATCH[0])
    expected = answer(load(model, "torch", **patch), batch)
    predictor = load(model, engine, **patch)
    np.testing.assert_allclose(answer(predictor, batch), expected, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(answer(predictor, batch), answer(predictor, batch))
    described = predictor.description
    assert described["engine"] == engine
    assert described["threads"] == "1"


@pytest.mark.parametrize(
    "engine", ["openvino", pytest.param("onnxruntime", marks=pytest.mark.slow)]
)
def test_statistics_of_the_batch_are_kept(engine):
    model = toy("batch_norm", batch_norm="batch")
    batch = batch_of(model, count=1)
    expected = answer(load(model, "torch", batch_size=1), batch)
    running = answer(load(toy("batch_norm"), "torch", batch_size=1), batch)
    assert np.abs(expected - running).max() > 0.1
    np.testing.assert_allclose(
        answer(load(model, engine, batch_size=1), batch), expected, rtol=0, atol=2e-5
    )


@pytest.mark.parametrize(
    "engine", ["openvino", pytest.param("onnxruntime", marks=pytest.mark.slow)]
)
def test_another_batch_size_as_after_halving(engine):
    model = toy("batch_norm")
    predictor = load(model, engine)
    batch = batch_of(model)
    np.testing.assert_allclose(
        answer(predictor, batch[:1]), answer(predictor, batch)[:1], rtol=0, atol=2e-5
    )


def test_threads_describe_the_engine():
    one, two = (load(toy("conv"), "openvino", threads=threads) for threads in (1, 2))
    assert (one.description["threads"], two.description["threads"]) == ("1", "2")


def test_a_torchscript_file(tmp_path):
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        torch.jit.script(toy_networks.conv()).save(tmp_path / "conv.pt")
    model = {"path": str(tmp_path / "conv.pt"), "output_channels": 2}
    expected = answer(load(model, "torch"), batch_of(model))
    np.testing.assert_allclose(
        answer(load(model, "openvino"), batch_of(model)), expected, rtol=0, atol=2e-5
    )
    for engine in ("onnxruntime", "compile"):
        with pytest.raises(
            EngineError, match="TorchScript network cannot be .*; write engine: openvino or torch"
        ):
            load(model, engine)


@pytest.mark.parametrize("engine", CONVERTED)
def test_an_exported_file(tmp_path, engine):
    program = torch.export.export(toy_networks.conv().eval(), (torch.zeros(2, 1, *PATCH),))
    torch.export.save(program, tmp_path / "conv.pt2")
    model = {"path": str(tmp_path / "conv.pt2"), "output_channels": 2}
    expected = answer(load(model, "torch"), batch_of(model))
    np.testing.assert_allclose(
        answer(load(model, engine), batch_of(model)), expected, rtol=0, atol=2e-5
    )


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A convolution as conv.onnx, and as conv.xml with its conv.bin."""
    import openvino

    folder = tmp_path_factory.mktemp("converted")
    network = toy_networks.conv().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            network, (torch.zeros(1, 1, *PATCH),), dynamo=True, verbose=False
        )
    program.save(folder / "conv.onnx", external_data=False)
    openvino.save_model(
        openvino.convert_model(folder / "conv.onnx"), folder / "conv.xml", compress_to_fp16=False
    )
    return folder


@pytest.mark.parametrize(
    ("name", "engine"),
    [("conv.onnx", "openvino"), ("conv.onnx", "onnxruntime"), ("conv.xml", "openvino")],
)
def test_files_of_the_engines_own(converted, name, engine):
    model = {"path": str(converted / name), "output_channels": 2}
    expected = answer(load(toy("conv"), "torch", batch_size=1), batch_of(model, 1))
    np.testing.assert_allclose(
        answer(load(model, engine, batch_size=1), batch_of(model, 1)),
        expected,
        rtol=0,
        atol=2e-5,
    )
    job = job_config(model, engine=engine, batch_size=1)
    reference = load_reference(job.model, job.inference)
    if (name, engine) == ("conv.onnx", "openvino"):
        assert reference.description["engine"] == "onnxruntime"
    else:
        assert reference is None
    assert (
        describe_engine(job.model, job.inference)
        == load_predictor(job.model, job.inference).description
    )


def without_openvino(engine):
    return engine.name != "openvino"


def test_which_engines_may_be_meant(converted, monkeypatch):
    def to_try(model, **inference):
        job = job_config(model, **{"engine": "auto", **inference})
        return list(engines_to_try(job.model, job.inference))

    onnx, xml = ({"path": str(converted / name)} for name in ("conv.onnx", "conv.xml"))
    assert to_try(FIB25) == ["openvino", "torch"]
    assert to_try(FIB25, engine="compile") == ["compile"]
    assert to_try({"path": "identity"}) == ["torch"]
    assert to_try(FIB25, device="cuda") == to_try(FIB25, precision="bfloat16") == ["torch"]
    assert to_try(onnx) == ["openvino", "onnxruntime"]
    assert to_try(xml) == ["openvino"]
    assert to_try(onnx, engine="onnxruntime") == ["onnxruntime"]
    with pytest.raises(
        EngineError, match="is run by openvino, not by inference.engine: onnxruntime"
    ):
        to_try(xml, engine="onnxruntime")
    with pytest.raises(EngineError, match="CPU in float32 or int8 only: write device: cpu$"):
        to_try(onnx, device="cuda")
    with pytest.raises(EngineError, match="or int8 only: write precision: float32$"):
        to_try(onnx, precision="bfloat16")
    with pytest.raises(EngineError, match="not by inference.engine: torch"):
        to_try(onnx, engine="torch", device="cuda")
    with pytest.raises(EngineError, match=r"model\.ensemble\.0\.path .*conv\.onnx is run by"):
        to_try({**FIB25, "ensemble": [onnx]}, engine="torch")
    monkeypatch.setattr(choice, "is_installed", without_openvino)
    assert to_try(FIB25) == ["torch"]
    assert to_try(onnx) == ["onnxruntime"]
    with pytest.raises(
        EngineError,
        match=r"run by openvino, which is not installed: pip install 'beam-inference\[",
    ):
        to_try(xml)


def test_a_wrong_engine_is_refused_and_what_it_differs_by_is_told(caplog):
    caplog.set_level(logging.INFO)
    model = toy("conv")
    patch = batch_of(FIB25)[0]
    right = load(model, "openvino")
    wrong = load({**model, "activation": "sigmoid"}, "openvino")
    check_difference(right, load(model, "torch"), patch, lambda batch: batch, 2)
    assert "openvino in float32 differs from PyTorch in float32 by" in caplog.text
    with pytest.raises(EngineError, match="that are allowed. Write engine: torch"):
        check_difference(wrong, load(model, "torch"), patch, lambda batch: batch, 2)


@pytest.mark.parametrize("fault", ["last", "exchanged"])
def test_an_engine_that_is_wrong_in_some_of_a_batch_only_is_refused(fault):
    patch = batch_of(FIB25)[0]
    model = toy("conv")
    right = load(model, "torch")
    wrong = load(model, "openvino")

    def faulty(batch):
        answer = wrong.predict(batch).clone()
        if fault == "last":
            answer[-1, :, -1] += 0.01
        return answer if fault == "last" else answer.flip(0)

    with pytest.raises(EngineError, match="differs from PyTorch"):
        check_difference(replace(wrong, predict=faulty), right, patch, lambda batch: batch, 3)


def test_half_precision_is_held_against_full_precision(caplog):
    """The canary: a wrong kernel on a GPU would be noticed before the first chunk."""
    caplog.set_level(logging.INFO)
    job = job_config(FIB25, precision="bfloat16")
    half = load_predictor(job.model, job.inference)
    reference = load_reference(job.model, job.inference)
    assert reference.description["precision"] == "float32"
    patch = batch_of(FIB25)[0]
    check_difference(half, reference, patch, lambda batch: batch, 2)
    assert "torch in bfloat16 differs" in caplog.text
    with pytest.raises(EngineError, match="torch in bfloat16 differs"):
        check_difference(
            half, load({**FIB25, "activation": "none"}, "torch"), patch, lambda batch: batch, 2
        )


def test_what_auto_was_is_kept(fib25, tmp_path, monkeypatch, capsys):
    values = affinity_job(fib25, tmp_path / "out", (16, 64, 64), roi=ROI)
    values["inference"]["engine"] = "auto"
    (tmp_path / "some").write_text("0\n")
    job = str(write_job(tmp_path / "job.yaml", values))
    with monkeypatch.context() as without:
        without.setattr(choice, "is_installed", without_openvino)
        assert main(["run", job, "--chunks", str(tmp_path / "some")]) == 0
    assert main(["run", job]) == 0, "it could be openvino now, but would be another job"
    assert (
        json.loads((tmp_path / "out/_beam_inference/job.json").read_text())["engine"]["engine"]
        == "torch"
    )
    assert main(["verify", job, "--deep"]) == 0


def test_auto_is_torch_where_openvino_cannot(volume_in, tmp_path, capsys, caplog):
    """A network that chooses by its input's values has no graph."""
    values = job_values(
        volume_in, tmp_path / "out", model=toy("choosing"), inference={"engine": "auto"}
    )
    assert run_job(tmp_path, values)["engine"]["engine"] == "torch"
    assert (
        "inference.engine: auto is torch here: inference.engine: openvino cannot take"
        in caplog.text
    )
    values["inference"]["engine"] = "openvino"
    values["output"]["path"] = str(tmp_path / "refused")
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    assert "openvino cannot take this network" in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()


def test_a_patch_that_suits_no_pooling_is_told_alone(volume_in, tmp_path, caplog, capfd):
    """PyTorch logged a traceback of the conversion, and a warning put the blame on OpenVINO."""
    odd = {"engine": "auto", "patch_shape": [7, 16, 16], "patch_overlap": [0, 0, 0]}
    values = job_values(volume_in, tmp_path / "out", model=toy("skipping"), inference=odd)
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    told = capfd.readouterr().err
    assert "error: the network fails on an input of shape [2, 1, 7, 16, 16]" in told
    assert "Traceback" not in told
    assert "openvino" not in told + caplog.text


def test_an_openvino_file_by_url_is_fetched_with_its_weights(
    converted, volume_in, tmp_path, monkeypatch
):
    import http.server
    import threading
    from functools import partial

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(converted))
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        model = {"path": f"http://localhost:{server.server_port}/conv.xml", "output_channels": 2}
        shapes = {
            "patch_shape": list(PATCH),
            "patch_overlap": [0, 0, 0],
            "engine": "auto",
            "batch_size": 1,
        }
        run_job(tmp_path, job_values(volume_in, tmp_path / "out", model=model, inference=shapes))
        server.shutdown()
    shapes["engine"] = "torch"
    run_job(
        tmp_path,
        job_values(
            volume_in, tmp_path / "torch", model=toy("conv", output_channels=2), inference=shapes
        ),
    )
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(tmp_path / "torch"), rtol=0, atol=2e-3
    )


def test_what_does_not_go_together(job, tmp_path, capsys):
    for keys, message in [
        ({"engine": "openvino", "device": "cuda"}, "engine: openvino runs on the CPU in float32"),
        (
            {"engine": "onnxruntime", "precision": "bfloat16"},
            "engine: onnxruntime runs on the CPU in float32",
        ),
        ({"engine": "tensorrt"}, "engine"),
    ]:
        assert main(["run", job(inference=keys)]) == 2
        assert message in capsys.readouterr().err


def test_onnx_with_weights_beside_it_is_refused(tmp_path):
    network = torch.nn.Sequential(
        torch.nn.Conv3d(1, 16, 3, padding=1), torch.nn.Conv3d(16, 2, 3, padding=1)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, external in (("apart.onnx", True), ("one.onnx", False)):
            program = torch.onnx.export(
                network, (torch.zeros(1, 1, *PATCH),), dynamo=True, verbose=False
            )
            program.save(tmp_path / name, external_data=external)
    assert (tmp_path / "apart.onnx.data").exists()
    model_sha256(job_config({"path": str(tmp_path / "one.onnx")}).model)
    with pytest.raises(
        ModelContractError, match=r"keeps its weights in another file.*external_data=False"
    ):
        model_sha256(job_config({"path": str(tmp_path / "apart.onnx")}).model)


def test_statistics_of_the_batch_cannot_be_had_from_a_converted_file(converted):
    with pytest.raises(ModelContractError, match=r"cannot be changed by model.batch_norm: batch"):
        load(
            {"path": str(converted / "conv.onnx"), "batch_norm": "batch"}, "openvino", batch_size=1
        )


@pytest.mark.slow
def test_no_process_is_started_and_nobody_is_called_by_a_conversion():
    script = (
        "import multiprocessing, sys; sys.path.insert(0, sys.argv[1])\n"
        "def refuse(*_, **__): raise SystemExit('a process was started')\n"
        "multiprocessing.Process.start = refuse\n"
        "import toy_networks\n"
        "from beam_inference.engines.openvino import openvino_forward\n"
        "openvino_forward(toy_networks.conv().eval(), (1, 1, 4, 8, 8), 1)\n"
        "import openvino_telemetry\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        "ModuleNotFoundError: import of openvino_telemetry halted"
    )


@pytest.mark.slow
def test_a_signal_finds_its_stack_after_a_network_was_let_go_by_another_thread():
    script = (
        "import os, signal, sys, threading; sys.path.insert(0, sys.argv[1])\n"
        "import toy_networks\n"
        "from beam_inference.engines.openvino import openvino_forward\n"
        "networks = [openvino_forward(toy_networks.conv().eval(), (1, 1, 4, 8, 8), 1)]\n"
        "thread = threading.Thread(target=networks.clear)\n"
        "thread.start()\n"
        "thread.join()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\n"
        "signal.raise_signal(signal.SIGUSR1)\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parents[1])]
    assert subprocess.run(command, check=False).returncode == 7


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint64", "float32"])
def test_an_empty_patch_does_not_hide_a_wrong_engine(dtype):
    """On zeros both answer the same; on noise they do not."""
    model = toy("conv")
    patch = np.zeros((1, *PATCH), dtype)
    right = load(model, "openvino")
    wrong = load(toy("conv_with_the_same_bias"), "torch")
    zeros = np.zeros((2, 1, *PATCH), np.float32)
    np.testing.assert_allclose(answer(right, zeros), answer(wrong, zeros), atol=1e-6)
    with pytest.raises(EngineError, match="differs from PyTorch"):
        check_difference(right, wrong, patch, lambda batch: batch.mul_(1 / 255), 2)
    check_difference(right, load(model, "torch"), patch, lambda batch: batch.mul_(1 / 255), 2)


def test_a_network_whose_parts_are_absent(tmp_path):
    with pytest.raises(ModelContractError, match=r"model.path: there is no file .*none.onnx"):
        load({"path": str(tmp_path / "none.onnx")}, "openvino")
    (tmp_path / "bad.onnx").write_bytes(b"no network")
    for engine in CONVERTED:
        with pytest.raises(
            EngineError,
            match=f"inference.engine: {engine}(: .*bad.onnx is not as| cannot take this network)",
        ):
            load({"path": str(tmp_path / "bad.onnx")}, engine)
