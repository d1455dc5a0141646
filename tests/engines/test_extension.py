"""An engine, a kind of model file and a network without PyTorch, of another package."""

import json
from pathlib import Path

import numpy as np
import pytest
from extension import FOLDER, extension_in_this_process
from helpers import OF_RANGE, job_values, read_volume, toy, write_job
from scipy import ndimage

from beam_inference.cli.main import main
from beam_inference.config.engines import get_engine, list_engines
from beam_inference.config.formats import installed_formats
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError

WHOLE = {"patch_shape": [40, 70, 50], "patch_overlap": [0, 0, 0], "chunk_shape": [48, 80, 64]}
NETWORK = FOLDER / "beam_inference_example" / "network.py"


@pytest.fixture
def extension(tmp_path):
    with extension_in_this_process(tmp_path / "site"):
        yield


def run(tmp_path, values, *flags):
    assert main(["run", str(write_job(tmp_path / "job.yaml", values)), *flags]) == 0
    record = Path(values["output"]["path"]) / "_beam_inference" / "job.json"
    return json.loads(record.read_text())


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(
            ("--direct_running_mode=multi_processing", "--direct_num_workers=2"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_engine(flags, volume_in, tmp_path, capsys):
    model = toy("conv", output_channels=2)
    values = job_values(volume_in, tmp_path / "out", model=model, inference={"engine": "double"})
    record = run(tmp_path, values, *flags)
    assert record["engine"]["engine"] == "double"
    assert record["versions"]["beam-inference-example"] == "0.1"
    values["output"]["path"] = str(tmp_path / "torch")
    values["inference"]["engine"] = "torch"
    assert "beam-inference-example" not in run(tmp_path, values)["versions"]
    found, expected = (read_volume(tmp_path / name) for name in ("out", "torch"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    assert (found != expected).any()
    values["output"]["path"] = str(tmp_path / "out")
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    assert "engine.engine: torch here, double there" in capsys.readouterr().err


@pytest.mark.usefixtures("extension")
def test_the_limits_of_an_engine_are_checked_and_the_schema_lists_it(tmp_path):
    values = job_values("in", "out", inference={"engine": "double", "device": "cuda"})
    with pytest.raises(ConfigError, match="engine: double runs on the CPU in float32"):
        parse_job(values, tmp_path)
    schema = JobConfig.model_json_schema()["$defs"]["Inference"]["properties"]["engine"]
    assert {"auto", "fastest", "torch", "openvino", "double"} < set(schema["enum"])


def test_an_engine_that_is_not_installed(tmp_path):
    values = job_values("in", "out", inference={"engine": "double"})
    with pytest.raises(
        ConfigError, match="double is not among auto, fastest and the installed engines: compile, "
    ):
        parse_job(values, tmp_path)


@pytest.mark.usefixtures("extension")
def test_a_kind_of_model_file(volume_in, tmp_path):
    kernels = np.random.default_rng(0).random((2, 3, 3, 3), np.float32)
    np.savez(tmp_path / "net.npz", kernels=kernels)
    model = {"path": str(tmp_path / "net.npz"), "output_channels": 2}
    values = job_values(
        volume_in, tmp_path / "out", model=model, inference={**WHOLE, "engine": "auto"}
    )
    record = run(tmp_path, values)
    assert record["engine"]["engine"] == "numpy"
    assert record["versions"]["beam-inference-example"] == "0.1"
    volume = read_volume(volume_in)[0].astype(np.float32)
    expected = [ndimage.correlate(volume, kernel, mode="constant") for kernel in kernels]
    np.testing.assert_allclose(read_volume(tmp_path / "out"), expected, rtol=0, atol=OF_RANGE)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("module", ["beam_inference_example.network", str(NETWORK)])
def test_a_network_without_pytorch(volume_in, tmp_path, module):
    model = {"path": f"{module}:edges"}
    values = job_values(
        volume_in, tmp_path / "out", model=model, inference={**WHOLE, "engine": "auto"}
    )
    record = run(tmp_path, values)
    assert record["engine"]["engine"] == record["config"]["inference"]["engine"] == "numpy"
    z, y, x = np.gradient(read_volume(volume_in)[0].astype(np.float32))
    expected = np.sqrt(z * z + y * y + x * x)
    np.testing.assert_allclose(read_volume(tmp_path / "out")[0], expected, rtol=0, atol=OF_RANGE)


def test_what_is_installed_as_an_engine_and_is_none(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "wrong"\nversion = "1"\n'
        '[project.entry-points."beam_inference.engines"]\n'
        'wrong = "math:pi"\nother = "beam_inference.engines.pytorch:ENGINE"\n'
    )
    with extension_in_this_process(tmp_path / "site", tmp_path):
        for name in ("wrong", "other"):
            with pytest.raises(ConfigError, match=f"which is not a .*Engine of the name {name}"):
                get_engine(name)


@pytest.fixture(
    params=[
        pytest.param("raise OSError('no licence')", marks=pytest.mark.slow),
        pytest.param("1 / 0", marks=pytest.mark.slow),
        "import absent_library",
    ]
)
def broken_package(request, tmp_path):
    """A package with one extension of each kind, whose import fails."""
    (tmp_path / "broken_extension.py").write_text(request.param)
    groups = ("engines", "formats", "models", "operators")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "broken-package"\nversion = "1.5"\n'
        + "".join(
            f'[project.entry-points."beam_inference.{group}"]\n'
            f'broken = "broken_extension:{group.upper()}"\n'
            for group in groups
        )
    )
    with extension_in_this_process(tmp_path / "site", tmp_path):
        yield


@pytest.mark.usefixtures("broken_package")
def test_a_broken_package_stops_no_job_that_does_not_use_it(volume_in, tmp_path):
    inference = {"engine": "auto", "device": "cpu"}
    values = job_values(volume_in, tmp_path / "out", model=toy("conv"), inference=inference)
    values["model"]["output_channels"] = 2
    record = run(tmp_path, values)
    libraries = {"python", "beam-inference", "apache-beam", "tensorstore", "torch", "numpy"}
    assert set(record["versions"]) == libraries
    assert "broken" not in [each.name for each in list_engines()]
    assert "broken" not in [each.name for each in installed_formats()]
    JobConfig.model_json_schema()


@pytest.mark.usefixtures("broken_package")
@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("inference", {"engine": "broken"}),
        ("output", {"format": "broken"}),
        ("model", {"path": "net.broken"}),
        ("postprocess", [{"operator": "broken"}]),
    ],
)
def test_a_job_that_uses_a_broken_package_is_refused(volume_in, tmp_path, capsys, section, keys):
    (tmp_path / "net.broken").touch()
    values = job_values(volume_in, tmp_path / "out", model=toy("conv"))
    if isinstance(keys, dict):
        keys = {**values.get(section, {}), **keys}
    values[section] = keys
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "by broken-package 1.5, but cannot be imported: " in message


def test_a_broken_engine_is_warned_about_once(tmp_path, caplog):
    (tmp_path / "no_driver.py").write_text("raise OSError('no driver')")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "driver"\nversion = "2"\n'
        '[project.entry-points."beam_inference.engines"]\ndriven = "no_driver:ENGINE"\n'
    )
    with extension_in_this_process(tmp_path / "site", tmp_path):
        for _ in range(2):
            assert "driven" not in [each.name for each in list_engines()]
    (message,) = caplog.messages
    assert message == (
        "left out: engine driven is installed as no_driver:ENGINE by driver 2, but cannot be "
        "imported: OSError: no driver"
    )
