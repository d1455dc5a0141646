"""The command line as a user meets it: messages, exit codes, and what is left behind."""

import json
import os
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
from helpers import job_values, read_volume, write_job, write_volume

from beam_inference.cli import main, run_with_flags
from beam_inference.runner import beam_options, place_of

TOYS = Path(__file__).parent / "toy_networks.py"
MAIN = Path(__file__).parents[1] / "templates" / "main.py"


@pytest.fixture
def job(volume_in, tmp_path):
    """Writes a job file over the small random volume; its path."""

    def make(**sections):
        return str(write_job(tmp_path / "job.yaml", job_values(volume_in, tmp_path / "out", **sections)))

    return make


def toy(name, **keys):
    return {"path": f"{TOYS}:{name}", **keys}


def test_run_then_verify_then_run_again(job, capsys, tmp_path):
    path = job()
    assert main(["run", path]) == 0
    out = capsys.readouterr().out
    assert "18 of 18 chunks done" in out
    assert "(18 by this launch)" in out
    assert f"complete: file://{tmp_path}/out" in out
    np.testing.assert_allclose(read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=1e-6)
    assert main(["verify", path]) == 0
    assert main(["verify", path, "--deep"]) == 0
    assert "every chunk reads back as it was written" in capsys.readouterr().out
    assert main(["run", path]) == 0
    assert "(0 by this launch)" in capsys.readouterr().out


def test_the_output_has_the_inputs_place_and_voxel_size(job, tmp_path):
    assert main(["run", job()]) == 0
    source, output = (json.loads((tmp_path / name / "info").read_text())["scales"][0] for name in ("in", "out"))
    for key in ("voxel_offset", "size", "resolution"):
        assert source[key] == output[key]


def test_an_roi_in_bounds_and_a_second_one_beside_it(job, tmp_path):
    bounds = {"start": [3, -5, 2], "stop": [43, 65, 52]}
    first = {"start": [3, -5, 2], "stop": [19, 27, 52]}
    second = {"start": [19, -5, 2], "stop": [35, 27, 52]}
    for number, roi in enumerate((first, second)):
        path = job(roi=roi, output={"bounds": bounds}, job={"state_path": f"state{number}"})
        assert main(["run", path]) == 0
    result, array = read_volume(tmp_path / "out"), read_volume(tmp_path / "in")
    np.testing.assert_allclose(result[:, :32, :32], array[:, :32, :32], rtol=1e-6)
    assert not result[:, 32:].any()


@pytest.mark.parametrize("format", ["zarr3", "zarr2"])
def test_zarr_outputs(job, tmp_path, format):
    roi = {"start": [16, 0, 16], "stop": [32, 32, 52]}
    assert main(["run", job(roi=roi, output={"format": format, "dtype": "uint8", "value_range": [0, 255]})]) == 0
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
    assert main(["run", job(model=toy("expanded", output_channels=3), output={"path": str(tmp_path / "three")})]) == 0
    array = read_volume(tmp_path / "in")
    np.testing.assert_allclose(read_volume(tmp_path / "three"), np.repeat(array, 3, 0), rtol=1e-6)


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


def test_two_functions_of_one_file_are_two_networks(job, capsys):
    assert main(["run", job(model=toy("same"))]) == 0
    assert (
        main(
            [
                "run",
                job(model=toy("counted")),
                "--set",
                f"model.path={TOYS}:position",
                "--set",
                "model.output_channels=2",
            ]
        )
        == 2
    )
    assert main(["run", job(model=toy("expanded"))]) == 2


def test_overwrite_deletes_nothing_that_is_not_its_own(job, tmp_path):
    assert main(["run", job(job={"state_path": "."})]) == 0
    assert main(["run", job(job={"state_path": "."}), "--overwrite"]) == 0
    assert (tmp_path / "job.yaml").exists()
    assert (tmp_path / "in" / "info").exists()


def test_a_state_folder_of_another_output_is_refused(job, tmp_path, capsys):
    state = {"state_path": "state"}
    assert main(["run", job(job=state)]) == 0
    shutil.copytree(tmp_path / "out", tmp_path / "out2")
    other = job(job=state, output={"path": "out2"})
    assert main(["run", other]) == 2
    assert "is the state of a job that writes" in capsys.readouterr().err
    assert main(["verify", other]) == 2


def test_an_output_that_was_emptied_is_noticed_at_resume(job, tmp_path, capsys):
    path = job()
    assert main(["run", path]) == 0
    shutil.rmtree(tmp_path / "out" / "10_10_10")
    assert main(["run", path]) == 2
    assert "says that chunk 0 is done, but in" in capsys.readouterr().err


def test_receipts_of_another_job_do_not_count_even_without_its_job_file(job, tmp_path, capsys):
    assert main(["run", job()]) == 0
    (tmp_path / "out/_beam_inference/job.json").unlink()
    assert main(["run", job(model={"normalize": {"scale": 2.0}})]) == 0
    assert "(18 by this launch)" in capsys.readouterr().out.splitlines()[-2]


def test_chosen_chunks_are_not_called_a_complete_job(job, tmp_path, capsys):
    (tmp_path / "chunks").write_text("5\n")
    path = job()
    assert main(["run", path, "--chunks", str(tmp_path / "chunks"), "--set", "job.attempts=2"]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 chunks done" in out
    assert "complete:" not in out
    assert f"17 others of the job are not: beam-inference run {path} --set job.attempts=2\n" in out
    assert main(["verify", path]) == 1


def test_a_destination_that_became_unwritable_is_found_before_the_first_chunk(job, tmp_path, capsys):
    path = job(job={"state_path": "state"})
    assert main(["run", path]) == 0
    shutil.rmtree(tmp_path / "state" / "launches")
    (tmp_path / "state" / "launches").write_text("a file where a folder should be")
    assert main(["run", path]) == 2
    assert "the state folder cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_checks_ends_the_command_with_130(job, number):
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom beam_inference.cli import main\nprint('up', flush=True)\nsys.exit(main())",
            "run",
            job(model=toy("sleeps")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    time.sleep(3)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "interrupted\n"


def test_set_and_state(job, tmp_path):
    assert main(["run", job(), "--set", "output.path=elsewhere", "--set", "job.state_path=notes"]) == 0
    assert (tmp_path / "elsewhere" / "info").exists()
    assert (tmp_path / "notes" / "job.json").exists()
    assert not (tmp_path / "out").exists()


def test_flags_only_entry(job, tmp_path):
    assert run_with_flags([f"--job={job()}", "--runner=DirectRunner", "--labels=airflow-version=v3"]) == 0
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
    path = write_job(tmp_path / "job.yaml", job_values(url, tmp_path / "out"))
    code = """
import sys
from beam_inference.cli import main
assert main(["plan", sys.argv[1]]) == 0
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "1,000,000,000 of 16×32×32 voxels" in done.stdout
    assert int(done.stdout.split()[-1]) * 1024 < 500e6
    assert time.monotonic() - start < 30


def test_a_flag_before_the_job_is_told_of(job, capsys):
    assert main(["run", "--runner", "DirectRunner", job()]) == 2
    assert "write flags with =" in capsys.readouterr().err


def test_schema_is_valid_json_and_knows_every_section(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {"input", "output", "model", "inference", "roi", "job"}


def test_resume_false_refuses_receipts_and_overwrite_deletes_them(job, capsys):
    path = job()
    assert main(["run", path]) == 0
    assert main(["run", path, "--set", "job.resume=false"]) == 2
    assert "Pass --overwrite" in capsys.readouterr().err
    assert main(["run", path, "--set", "job.resume=false", "--overwrite"]) == 0
    assert "(18 by this launch)" in capsys.readouterr().out


def test_receipts_of_an_output_that_is_gone_are_not_taken_for_completeness(job, capsys, tmp_path):
    path = job(job={"state_path": "state"})
    assert main(["run", path]) == 0
    shutil.rmtree(tmp_path / "out")
    assert main(["run", path]) == 2
    assert "there is no output at" in capsys.readouterr().err
    assert main(["run", path, "--overwrite"]) == 0
    np.testing.assert_allclose(read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=1e-6)


def test_another_job_on_the_same_output_is_refused_saying_what_differs(job, capsys, tmp_path):
    assert main(["run", job()]) == 0
    before = read_volume(tmp_path / "out")
    assert main(["run", job(inference={"patch_overlap": [2, 8, 4]})]) == 2
    err = capsys.readouterr().err
    assert "geometry.patch_overlap: [2, 8, 4] here, [2, 8, 8] there" in err
    assert main(["run", job(model={"normalize": {"scale": 2.0}}), "--overwrite"]) == 0
    np.testing.assert_allclose(read_volume(tmp_path / "out"), 2 * before, rtol=1e-6)


def test_quarantine_within_and_above_the_bound(job, capsys, tmp_path):
    block = next((tmp_path / "in").rglob("2-34_*_3-35"))
    whole = block.read_bytes()
    block.write_bytes(whole[:50])
    path = job()
    assert main(["run", path]) == 3
    out = capsys.readouterr().out
    file = tmp_path / "out/_beam_inference/quarantine.jsonl"
    assert f"--chunks {file}" in out
    quarantined = [json.loads(line)["chunk"] for line in file.read_text().splitlines()]
    assert main(["verify", path]) == 1
    assert "not complete" in capsys.readouterr().out
    assert main(["run", path, "--set", f"job.max_failed_chunks={len(quarantined)}"]) == 3
    assert main(["run", path, "--set", f"job.max_failed_chunks={len(quarantined) - 1}"]) == 1
    block.write_bytes(whole)
    assert main(["run", path, "--chunks", str(file)]) == 0
    assert f"{len(quarantined)} of {len(quarantined)} chunks done" in capsys.readouterr().out
    assert main(["verify", path, "--deep"]) == 0
    assert not list((tmp_path / "out/_beam_inference").glob("quarantine.jsonl"))
    np.testing.assert_allclose(read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=1e-6)


def test_a_sick_worker_ends_the_launch_with_one_message_and_no_stack_trace(job, capsys, tmp_path, monkeypatch):
    from beam_inference.errors import WorkerFault
    from beam_inference.worker import Worker

    def sick(self, index, core):
        raise WorkerFault("cannot write: RESOURCE_EXHAUSTED: disk full")

    monkeypatch.setattr(Worker, "_write", sick)
    assert main(["run", job()]) == 1
    captured = capsys.readouterr()
    assert "the launch ended early: cannot write: RESOURCE_EXHAUSTED: disk full\n" in captured.out
    assert "18 chunks are missing; to do what is missing: beam-inference run" in captured.out
    assert "Traceback" not in captured.out + captured.err


def test_verify_of_what_was_never_run(job, capsys):
    assert main(["verify", job()]) == 2
    assert "nothing to verify" in capsys.readouterr().err


def hidden_blocks(volume):
    for block in list(volume.rglob("*-*_*")):
        block.rename(block.with_name(block.name + ".gz"))


# What a user can get wrong: sections of the job, what to do to the volume before, more arguments, and the message.
MISTAKES = {
    "unknown key": ({"inference": {"patch_shap": [1, 1, 1]}}, None, [], "did you mean 'patch_shape'"),
    "missing section": ({"model": None}, None, [], "model: missing"),
    "wrong type": ({"inference": {"batch_size": "four"}}, None, [], "inference.batch_size"),
    "overlap too large": ({"inference": {"patch_overlap": [8, 0, 0]}}, None, [], "must be smaller than patch_shape"),
    "input absent": ({"input": {"path": "nowhere"}}, None, [], "does not exist"),
    "input is no volume": ({}, lambda v: (v / "info").unlink(), [], "no volume at"),
    "input damaged": ({}, lambda v: (v / "info").write_text("{"), [], "not valid JSON"),
    "compressed blocks": ({}, hidden_blocks, [], "would read every voxel as zero"),
    "scale absent": ({"input": {"scale": 2}}, None, [], "has the scales 0 … 0"),
    "channel absent": ({"input": {"channel": 4}}, None, [], "has the channels 0 … 0"),
    "channels differ": ({"model": {"input_channels": 2, "output_channels": 2}}, None, [], "has 1 channels"),
    "fill value out of range": (
        {"input": {"fill": "constant", "fill_value": 300}},
        None,
        [],
        "not a value of the input",
    ),
    "roi outside": ({"roi": {"start": [0, 0, 0], "stop": [4, 4, 4]}}, None, [], "The part inside is"),
    "roi empty": ({"roi": {"start": [4, 4, 4], "stop": [4, 5, 5]}}, None, [], "must lie beyond start"),
    "chunk no multiple of block": ({"inference": {"chunk_shape": [20, 32, 32]}}, None, [], "Nearest on z: 16 or 32"),
    "roi cuts blocks": (
        {
            "roi": {"start": [5, -5, 2], "stop": [21, 27, 52]},
            "output": {"bounds": {"start": [3, -5, 2], "stop": [43, 65, 52]}},
        },
        None,
        [],
        "Nearest starts on z: 3 or 19",
    ),
    "zarr cannot start below zero": ({"output": {"format": "zarr3"}}, None, [], "a zarr array has no offset"),
    "output is the input": ({"output": {"path": "in"}}, None, [], "is the input"),
    "output over http": ({"output": {"path": "http://localhost:1/v"}}, None, [], "HTTP is read-only"),
    "output not writable": ({"output": {"path": "/proc/nowhere/out"}}, None, [], "cannot"),
    "output scheme unknown": ({"output": {"path": "ftp://host/out"}}, None, [], "unsupported URL scheme"),
    "voxel size": ({"model": {"voxel_size_nm": [40, 4, 4]}}, None, [], "No scale of the input fits"),
    "unit of floats": ({"model": {"normalize": "unity"}}, None, [], "is not one of none, unit"),
    "model absent": ({"model": {"path": "nope.pt"}}, None, [], "there is no file"),
    "module absent": ({"model": {"path": "nope.nope:net"}}, None, [], "there is no Python module"),
    "factory fails": ({"model": toy("raises")}, None, [], "the factory is broken"),
    "model hash": ({"model": toy("conv", output_channels=2, sha256="0" * 64)}, None, [], "changed or damaged"),
    "output channels": ({"model": toy("conv", output_channels=5)}, None, [], "returns an array of shape"),
    "network returns a tuple": ({"model": toy("pair")}, None, [], "returns a tuple"),
    "network returns nan": ({"model": toy("not_a_number")}, None, [], "NaN or infinite"),
    "network fails": ({"model": toy("flat", output_channels=2)}, None, [], "fails on an input of shape"),
    "value range needed": ({"output": {"dtype": "uint8"}}, None, [], "value_range is needed"),
    "unknown flag": ({}, None, ["--direct_num_worker=2"], "did you mean --direct_num_workers"),
    "bad flag value": ({}, None, ["--direct_num_workers=two"], "invalid int value"),
    "bad override": ({}, None, ["--set", "inference"], "takes key.key=value"),
    "chunks file absent": ({}, None, ["--chunks", "/nowhere/chunks"], "does not exist"),
    "state not writable": ({"job": {"state_path": "in/info/state"}}, None, [], "cannot"),
    "negative workers": ({}, None, ["--direct_num_workers=-1"], "must be 0"),
    "no endpoint": ({}, None, ["--runner=PortableRunner"], "needs --job_endpoint"),
    "batch norm that is not there": (
        {"model": toy("conv", output_channels=2, batch_norm="batch"), "inference": {"batch_size": 1}},
        None,
        [],
        "no BatchNorm layer",
    ),
    "chunks and overwrite": ({}, None, ["--chunks", "c", "--overwrite"], "give one of them"),
    "auto device on a remote runner": (
        {"inference": {"device": "auto"}},
        None,
        ["--runner=FlinkRunner"],
        "is not known before the launch on a remote runner",
    ),
    "local paths on dataflow": ({}, None, ["--runner=DataflowRunner"], "which remote workers do not see"),
    "unknown runner": ({}, None, ["--runner=NoSuchRunner"], "unknown runner"),
}
if not torch.cuda.is_available():
    MISTAKES["cuda absent"] = ({"model": toy("same"), "inference": {"device": "cuda"}}, None, [], "sees no CUDA device")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_one_clear_message_exit_code_2_and_touches_nothing(name, job, capfd, tmp_path, volume_in):
    sections, damage, arguments, message = MISTAKES[name]
    if damage:
        damage(volume_in)
    before = sorted(tmp_path.rglob("*"))
    path = job(**sections)
    assert main(["run", path, *arguments]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert sorted(p for p in tmp_path.rglob("*") if p != Path(path)) == before


def test_there_are_at_least_25_such_cases():
    assert len(MISTAKES) >= 25


def test_unit_of_a_float_volume(tmp_path, capsys):
    write_volume(tmp_path / "in", np.zeros((16, 16, 16), np.float32))
    path = write_job(tmp_path / "job.yaml", job_values("in", "out", model={"normalize": "unit"}))
    assert main(["run", str(path)]) == 2
    assert "unit needs an integer input" in capsys.readouterr().err


def test_a_voxel_size_that_another_scale_has_is_named(tmp_path, capsys):
    write_volume(tmp_path / "in", np.zeros((16, 16, 16), np.uint8), voxel_size_nm=(40.0, 4.0, 4.0))
    info = json.loads((tmp_path / "in" / "info").read_text())
    info["scales"].append(info["scales"][0] | {"key": "8_8_40", "resolution": [8, 8, 40], "size": [8, 8, 16]})
    (tmp_path / "in" / "info").write_text(json.dumps(info))
    path = write_job(tmp_path / "job.yaml", job_values("in", "out", model={"voxel_size_nm": [40, 8, 8]}))
    assert main(["run", str(path)]) == 2
    assert "Scale 1 fits: write input.scale: 1." in capsys.readouterr().err


def test_wrong_words_on_the_command_line(capsys):
    for arguments in ([], ["plann"], ["plan"], ["plan", "job.yaml", "--unknown"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_both_entries_as_programs(job, tmp_path):
    path = job()
    first = subprocess.run([sys.executable, "-m", "beam_inference", "run", path], capture_output=True, text=True)
    assert (first.returncode, first.stderr) == (0, "")
    shutil.rmtree(tmp_path / "out")
    second = subprocess.run([sys.executable, str(MAIN), f"--job={path}"], capture_output=True, text=True)
    assert (second.returncode, second.stderr) == (0, "")
    script = shutil.which("beam-inference", path=os.path.dirname(sys.executable))
    help_text = subprocess.run([script, "run", "--help"], capture_output=True, text=True, check=True).stdout
    assert "130 interrupted" in help_text


def test_launcher_options():
    default = beam_options([])
    assert (place_of(default).threads_per_process, place_of(default).processes_per_host) == (2, 1)
    many = beam_options(["--direct_running_mode=multi_processing", "--direct_num_workers=3"])
    assert (place_of(many).threads_per_process, place_of(many).processes_per_host) == (1, 3)
    assert not place_of(beam_options(["--runner=DataflowRunner"])).shares_files


def test_example_jobs_are_valid():
    from beam_inference.config import JobConfig

    examples = sorted((MAIN.parent).glob("*.yaml"))
    assert examples
    for example in examples:
        assert JobConfig.model_validate(yaml.safe_load(example.read_text()))
