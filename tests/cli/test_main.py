"""The command line as a user meets it: messages, exit codes, and what is left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import DATAFLOW, OF_RANGE, TOYS, job_values, read_volume, toy, write_job, write_volume

from beam_inference.beam.flags import beam_options, place_of
from beam_inference.cli.main import main, run_with_flags
from beam_inference.errors import WorkerFault
from beam_inference.volumes.volume import Volume

MAIN = Path(__file__).parents[2] / "templates" / "main.py"


def test_run_then_verify_then_run_again(job, capsys, tmp_path):
    path = job()
    assert main(["run", path]) == 0
    out = capsys.readouterr().out
    assert "18 of 18 chunks done" in out
    assert "(18 by this launch)" in out
    assert f"complete: file://{tmp_path}/out" in out
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=0, atol=OF_RANGE
    )
    assert main(["verify", path]) == 0
    assert main(["verify", path, "--deep"]) == 0
    assert "every chunk reads back as it was written" in capsys.readouterr().out
    assert main(["run", path]) == 0
    assert "(0 by this launch)" in capsys.readouterr().out


def test_the_output_has_the_inputs_place_and_voxel_size(job, tmp_path):
    assert main(["run", job()]) == 0
    source, output = (
        json.loads((tmp_path / name / "info").read_text())["scales"][0] for name in ("in", "out")
    )
    for key in ("voxel_offset", "size", "resolution"):
        assert source[key] == output[key]


def test_an_roi_in_bounds_and_a_second_one_beside_it(job, tmp_path):
    bounds = {"start": [3, -5, 2], "stop": [43, 65, 52]}
    first = {"start": [3, -5, 2], "stop": [19, 27, 52]}
    second = {"start": [19, -5, 2], "stop": [35, 27, 52]}
    for number, roi in enumerate((first, second)):
        path = job(roi=roi, output={"bounds": bounds}, job={"state_path": f"state{number}"})
        assert main(["run", path]) == 0
    result = read_volume(tmp_path / "out")
    array = read_volume(tmp_path / "in")
    np.testing.assert_allclose(result[:, :32, :32], array[:, :32, :32], rtol=0, atol=OF_RANGE)
    assert not result[:, 32:].any()


@pytest.mark.parametrize("format", ["zarr3", "zarr2"])
def test_zarr_outputs_are_padded_to_voxel_0_only_where_the_job_says_so(
    job, tmp_path, format, capsys
):
    roi = {"start": [16, 0, 16], "stop": [32, 32, 52]}
    output = {"format": format, "dtype": "uint8", "value_range": [0, 255]}
    assert main(["run", job(roi=roi, output=output)]) == 2
    assert "or write output.bounds: {start: [0, 0, 0], stop: [32, 32, 52]}" in (
        capsys.readouterr().err
    )
    output["bounds"] = {"start": [0, 0, 0], "stop": [32, 32, 52]}
    assert main(["run", job(roi=roi, output=output)]) == 0
    result = read_volume(tmp_path / "out")
    assert result.shape == (1, 32, 32, 52)
    array = read_volume(tmp_path / "in")
    np.testing.assert_array_equal(result[0, 16:, :, 16:], array[0, 13:29, 5:37, 14:50])


def test_a_two_dimensional_network(job, tmp_path):
    path = job(
        model=toy("flat", dims=2, output_channels=2),
        inference={"patch_shape": [1, 24, 24], "patch_overlap": [0, 8, 8], "batch_size": 3},
    )
    assert main(["run", path]) == 0
    assert read_volume(tmp_path / "out").shape == (2, 40, 70, 50)


def test_a_network_that_crops_its_own_margin(job, tmp_path):
    path = job(model=toy("valid", crop_margin=[1, 1, 1]))
    assert main(["run", path]) == 0
    sys.path.insert(0, str(TOYS.parent))
    import toy_networks

    array = np.pad(read_volume(tmp_path / "in")[0].astype(np.float32), 1, mode="reflect")
    with torch.inference_mode():
        whole = toy_networks.valid()(torch.from_numpy(array[None, None])).numpy()[0]
    np.testing.assert_allclose(read_volume(tmp_path / "out"), whole, rtol=1e-4, atol=1e-2)


def test_what_the_network_returns_is_not_written_into(job, tmp_path):
    assert main(["run", job(model=toy("own_buffer"))]) == 0
    np.testing.assert_allclose(read_volume(tmp_path / "out"), 1, atol=1e-6)
    assert (
        main(
            [
                "run",
                job(
                    model=toy("expanded", output_channels=3),
                    output={"path": str(tmp_path / "three")},
                ),
            ]
        )
        == 0
    )
    array = read_volume(tmp_path / "in")
    np.testing.assert_allclose(
        read_volume(tmp_path / "three"), np.repeat(array, 3, 0), rtol=0, atol=OF_RANGE
    )


@pytest.mark.parametrize("way", ["dots", "link", "spec"])
def test_the_input_is_never_written_over_however_it_is_named(job, tmp_path, capsys, way):
    before = read_volume(tmp_path / "in")
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    output = {"dots": "sub/../in", "link": "link", "spec": "in"}[way]
    sections = {"output": {"path": output, "dtype": "uint8", "value_range": [0, 510]}}
    if way == "spec":
        spec = {"driver": "neuroglancer_precomputed", "kvstore": f"file://{tmp_path}/in/"}
        sections["input"] = {"path": None, "spec": spec}
    assert main(["run", job(**sections)]) == 2
    assert "is the input" in capsys.readouterr().err
    np.testing.assert_array_equal(read_volume(tmp_path / "in"), before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_checks_ends_the_command_with_130(job, tmp_path, number):
    begun = tmp_path / "begun"
    with subprocess.Popen(
        [sys.executable, "-m", "beam_inference", "run", job(model=toy("sleeps"))],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TOY_NETWORK_LOG": str(begun)},
        # A shell starts what it puts into the background with SIGINT ignored, and that is
        # inherited.
        # no threads here
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        while not begun.exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert err == "interrupted\n"


def test_a_reader_that_goes_away_changes_nothing(job):
    path = job()
    assert main(["run", path]) == 0
    for command, code in ((f"verify {path}", 0), (f"plan {path}", None)):
        line = f"set -o pipefail; {sys.executable} -m beam_inference {command} | true"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert "defect" not in done.stderr
        if code is not None:
            assert done.returncode == code


def test_set_and_state(job, tmp_path):
    assert (
        main(["run", job(), "--set", "output.path=elsewhere", "--set", "job.state_path=notes"]) == 0
    )
    assert (tmp_path / "elsewhere" / "info").exists()
    assert (tmp_path / "notes" / "job.json").exists()
    assert not (tmp_path / "out").exists()


def test_flags_only_entry(job, tmp_path):
    assert (
        run_with_flags([f"--job={job()}", "--runner=DirectRunner", "--labels=airflow-version=v3"])
        == 0
    )
    assert (tmp_path / "out" / "info").exists()


def test_plan_submits_nothing(job, capsys, tmp_path):
    assert main(["plan", job()]) == 0
    out = capsys.readouterr().out
    for word in ("18 of 16×32×32 voxels", "recompute (this job)", "crop", "receipts", "memory"):
        assert word in out
    assert not (tmp_path / "out").exists()


def test_plan_of_a_billion_chunks_takes_seconds_and_little_memory(tmp_path):
    """A volume of 1.6e13 voxels, of which one block exists."""
    url = write_volume(tmp_path / "small", np.zeros((8, 8, 8), np.uint8))
    info = json.loads((tmp_path / "small" / "info").read_text())
    info["scales"][0]["size"] = [32_000, 32_000, 16_000]
    (tmp_path / "small" / "info").write_text(json.dumps(info))
    (folder,) = (path for path in (tmp_path / "small").iterdir() if path.is_dir())
    (block,) = folder.iterdir()
    block.rename(folder / "0-32_0-32_0-32")
    path = write_job(tmp_path / "job.yaml", job_values(url, tmp_path / "out"))
    code = """
import sys
from beam_inference.cli.main import main
assert main(["plan", sys.argv[1]]) == 0
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=110,  # of seconds: one look at each block would take hours
    )
    assert "1,000,000,000 of 16×32×32 voxels" in done.stdout
    assert int(done.stdout.split()[-1]) * 1024 < 500e6


def test_a_flag_before_the_job_is_explained(job, capsys):
    assert main(["run", "--runner", "DirectRunner", job()]) == 2
    assert "write flags with =" in capsys.readouterr().err


def test_schema_is_valid_json_and_knows_every_section(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {
        "input",
        "inputs",
        "output",
        "outputs",
        "model",
        "inference",
        "postprocess",
        "mask",
        "roi",
        "job",
        "steps",
        "storage",
        "volumes",
    }


def test_a_sick_worker_ends_the_launch_with_one_message_and_no_stack_trace(
    job, capsys, tmp_path, monkeypatch
):
    path = job()

    def write_to_full_disk(self, box, array, timeout):
        raise WorkerFault("cannot write: RESOURCE_EXHAUSTED: disk full")

    monkeypatch.setattr(Volume, "write", write_to_full_disk)
    assert main(["run", path]) == 1
    captured = capsys.readouterr()
    assert "the launch ended early: cannot write: RESOURCE_EXHAUSTED: disk full\n" in captured.out
    assert "18 chunks are missing; to do what is missing: beam-inference run" in captured.out
    assert "Traceback" not in captured.out + captured.err


def test_unit_of_a_float_volume(tmp_path, capsys):
    write_volume(tmp_path / "in", np.zeros((16, 16, 16), np.float32))
    path = write_job(tmp_path / "job.yaml", job_values("in", "out", model={"normalize": "unit"}))
    assert main(["run", str(path)]) == 2
    assert "unit needs an integer input" in capsys.readouterr().err


def test_a_voxel_size_that_another_scale_has_is_named(tmp_path, capsys):
    write_volume(tmp_path / "in", np.zeros((16, 16, 16), np.uint8), voxel_size_nm=(40.0, 4.0, 4.0))
    info = json.loads((tmp_path / "in" / "info").read_text())
    info["scales"].append(
        info["scales"][0] | {"key": "8_8_40", "resolution": [8, 8, 40], "size": [8, 8, 16]}
    )
    (tmp_path / "in" / "info").write_text(json.dumps(info))
    path = write_job(
        tmp_path / "job.yaml", job_values("in", "out", model={"voxel_size_nm": [40, 8, 8]})
    )
    assert main(["run", str(path)]) == 2
    assert "Scale 1 fits: write input.scale: 1." in capsys.readouterr().err


def test_wrong_words_on_the_command_line(capsys):
    for arguments in ([], ["plann"], ["plan"], ["status", "job.yaml", "--unknown"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.slow
def test_both_entries_as_programs(job, tmp_path):
    path = job()
    first = subprocess.run(
        [sys.executable, "-m", "beam_inference", "run", path], capture_output=True, text=True
    )
    assert (first.returncode, first.stderr) == (0, "")
    shutil.rmtree(tmp_path / "out")
    second = subprocess.run(
        [sys.executable, str(MAIN), f"--job={path}"], capture_output=True, text=True
    )
    assert (second.returncode, second.stderr) == (0, "")
    script = shutil.which("beam-inference", path=os.path.dirname(sys.executable))
    help_text = subprocess.run(
        [script, "run", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "130 interrupted" in help_text


def test_launcher_options():
    default = beam_options([])
    assert (place_of(default).threads_per_process, place_of(default).processes_per_host) == (2, 1)
    many = beam_options(["--direct_running_mode=multi_processing", "--direct_num_workers=3"])
    assert (place_of(many).threads_per_process, place_of(many).processes_per_host) == (1, 3)
    assert not place_of(beam_options(DATAFLOW)).shares_files
    threads = [[], ["--number_of_worker_harness_threads=5"]]
    assert [
        place_of(beam_options([*DATAFLOW, *flags])).threads_per_process for flags in threads
    ] == [2, 5]


def test_example_jobs_are_valid():
    from beam_inference.config.job import JobConfig
    from beam_inference.launch.cost import Prices

    examples = {
        example.name: yaml.safe_load(example.read_text()) for example in MAIN.parent.glob("*.yaml")
    }
    assert Prices.model_validate(examples.pop("prices.yaml"))
    assert examples
    for example in examples.values():
        assert JobConfig.model_validate(example)


def imported_by(*words):
    """The slow packages that a command imports."""
    code = """
import sys
from beam_inference.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print([name for name in ("apache_beam", "torch", "tensorstore", "numpy") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["plugins"]])
def test_help_imports_nothing_slow(words):
    assert imported_by(*words) == "[]"


def test_status_imports_neither_beam_nor_torch(job):
    path = job()
    assert main(["run", path]) == 0
    assert imported_by("status", path) == "['tensorstore', 'numpy']"


@pytest.mark.parametrize("where", ["factory", "network"])
def test_code_of_the_user_that_ends_the_program_does_not_end_the_job_well(
    where, job, tmp_path, capsys
):
    (tmp_path / "leaving.py").write_text(
        "import sys\n"
        "import torch\n"
        "class Leaving(torch.nn.Module):\n"
        "    def forward(self, batch):\n"
        "        sys.exit(0)\n"
        "def network():\n"
        "    return Leaving()\n"
        "def factory():\n"
        "    sys.exit(0)\n"
    )
    path = job(model={"path": f"{tmp_path}/leaving.py:{where}"})
    assert main(["run", path]) == 2
    message = capsys.readouterr().err
    assert re.search(
        r"the factory failed: SystemExit: 0|the network fails .*SystemExit\(0\)", message
    )
