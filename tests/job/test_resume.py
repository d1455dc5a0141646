"""Test second launches: receipts, quarantine, state folders, and outputs that changed."""

import json
import re
import shutil

import numpy as np
import pytest
from helpers import OF_RANGE, TOYS, job_values, read_volume, toy, truncated, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError, WorkerFault
from beam_inference.job.ownership import Claim, claim_output, owner_of
from beam_inference.job.resolved_job import NUMERICS
from beam_inference.job.state import State
from beam_inference.launch.job_files import load_job
from beam_inference.launch.prepare import prepare


@pytest.fixture(params=["recompute", pytest.param("exchange", marks=pytest.mark.slow)])
def job(request, volume_in, tmp_path):
    """A seam mode: a launch with exchange leaves one folder more than one with recompute."""

    def make(**sections):
        sections["inference"] = {"seams": request.param} | sections.get("inference", {})
        return str(
            write_job(tmp_path / "job.yaml", job_values(volume_in, tmp_path / "out", **sections))
        )

    return make


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
    other = job(model={"normalize": {"scale": 2.0}})
    assert main(["run", other]) == 2
    assert "belongs to another job" in capsys.readouterr().err
    (tmp_path / "out/_beam_inference/owners.json").unlink()
    assert main(["run", other]) == 0
    assert "(18 by this launch)" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.parametrize("job", ["recompute", "exchange"], indirect=True)
def test_chosen_chunks_are_not_called_a_complete_job(job, tmp_path, capsys):
    (tmp_path / "chunks").write_text("5\n")
    path = job()
    assert main(["run", path, "--chunks", str(tmp_path / "chunks"), "--set", "job.attempts=2"]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 chunks done" in out
    assert "complete:" not in out
    assert f"17 others of the job are not: beam-inference run {path} --set job.attempts=2\n" in out
    assert main(["verify", path]) == 1


def test_a_destination_that_became_unwritable_is_found_before_the_first_chunk(
    job, tmp_path, capsys
):
    path = job(job={"state_path": "state"})
    assert main(["run", path]) == 0
    shutil.rmtree(tmp_path / "state" / "launches")
    (tmp_path / "state" / "launches").write_text("a file where a folder should be")
    assert main(["run", path]) == 2
    assert "the state folder cannot be used" in capsys.readouterr().err


def test_verify_looks_where_the_job_file_says_and_only_at_the_job_that_was_run(
    job, tmp_path, capsys
):
    path = job()
    assert main(["run", path]) == 0
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    copied = ["--set", f"output.path={tmp_path / 'copy'}"]
    assert main(["verify", path, "--deep", *copied]) == 0
    for block in (tmp_path / "copy" / "10_10_10").iterdir():
        block.write_bytes(bytes(block.stat().st_size))
    assert main(["verify", path, "--deep", *copied]) == 1
    assert main(["verify", path, "--deep"]) == 0
    capsys.readouterr()
    assert main(["verify", path, "--set", "inference.patch_overlap=[2,8,4]"]) == 2
    assert "geometry.patch_overlap" in capsys.readouterr().err


def test_a_state_elsewhere_is_no_way_round_the_state_beside_the_output(job, capsys):
    assert main(["run", job()]) == 0
    assert (
        main(["run", job(model={"normalize": {"scale": 2.0}}, job={"state_path": "elsewhere"})])
        == 2
    )
    assert "belongs to another job" in capsys.readouterr().err


@pytest.mark.parametrize("job", ["recompute", "exchange"], indirect=True)
def test_two_jobs_with_states_elsewhere_do_not_share_an_output(job, tmp_path, capsys):
    first = job(job={"state_path": "one"})
    assert main(["run", first]) == 0
    other = {"model": {"normalize": {"scale": 2.0}}}
    assert main(["run", job(**other, job={"state_path": "two"})]) == 2
    error = capsys.readouterr().err
    assert f"whose state is in file://{tmp_path}/one" in error
    assert main(["run", job(**other)]) == 2
    assert not (tmp_path / "two").exists()
    # It is taken over; the first one does not go on then.
    assert main(["run", job(**other, job={"state_path": "two"}), "--overwrite"]) == 0
    assert main(["run", job(job={"state_path": "one"})]) == 2


def test_a_volume_that_a_command_has_made_is_not_overwritten(job, tmp_path, capsys):
    path = job()
    assert main(["run", path]) == 0
    (tmp_path / "out").rename(tmp_path / "first")
    words = ["convert", str(tmp_path / "first"), str(tmp_path / "out"), "--block-shape", "16,16,16"]
    assert main(words) == 0
    before = {each: each.read_bytes() for each in (tmp_path / "out").rglob("*") if each.is_file()}
    assert main(["run", path, "--set", "model.normalize={scale: 2.0}"]) == 2
    assert "convert, which has made the voxels of this output" in capsys.readouterr().err
    found = {each: each.read_bytes() for each in (tmp_path / "out").rglob("*") if each.is_file()}
    assert found == before
    assert main(["run", path, "--set", "model.normalize={scale: 2.0}", "--overwrite"]) == 0
    assert main(["run", path, "--set", "model.normalize={scale: 2.0}"]) == 0


def test_a_command_that_begins_while_the_network_is_tried_keeps_its_volume(job, tmp_path):
    """The launch has found no output, and is about to claim it."""
    resolved = prepare(load_job(job(output={"path": str(tmp_path / "other")}))).read_job()
    url = (tmp_path / "out").as_uri()
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    owner = owner_of(resolved, State(f"{url}/_beam_inference"))
    with pytest.raises(StateError, match="convert, which has made the voxels"):
        claim_output(url, owner, Storage(), replace=False)
    assert not (tmp_path / "out" / "_beam_inference" / "owners.json").exists()


@pytest.mark.parametrize("command", ["convert", "components"])
def test_no_command_begins_where_a_job_is_about_to_write(job, tmp_path, command, capsys):
    """The job has claimed its output, and not created it yet."""
    resolved = prepare(load_job(job(output={"path": str(tmp_path / "other")}))).read_job()
    url = (tmp_path / "out").as_uri()
    claim_output(
        url, owner_of(resolved, State((tmp_path / "elsewhere").as_uri())), Storage(), replace=False
    )
    words = [command, str(tmp_path / "in"), str(tmp_path / "out")]
    words += ["--threshold", "100"] if command == "components" else []
    assert main(words) == 2
    assert "belongs to a job" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").rglob("*.json")] == ["owners.json"]
    assert main([*words, "--overwrite"]) == 0
    assert not (tmp_path / "out" / "_beam_inference" / "owners.json").exists()


def test_a_launch_whose_output_a_command_has_taken_over_writes_nothing_more(job, tmp_path):
    launch = prepare(load_job(job()))
    resolved = launch.read_job()
    claim = Claim(resolved, launch.state(), (tmp_path / "out").as_uri())
    claim.check()
    words = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--overwrite"]
    assert main(words) == 0
    with pytest.raises(WorkerFault, match="does not name its job any more"):
        claim.check()


def test_the_same_job_may_write_an_output_with_another_state(job, capsys):
    assert main(["run", job(job={"state_path": "one"})]) == 0
    assert main(["run", job(job={"state_path": "two"})]) == 0
    assert "(18 by this launch)" in capsys.readouterr().out


@pytest.fixture
def cubic_job(tmp_path):
    """A job over a cubic zarr array, whose metadata may turn its axes without a trace."""
    array = np.random.default_rng(1).integers(1, 250, (24, 24, 24), np.uint8)
    for name in ("in", "further"):
        write_volume(tmp_path / name, array, block_shape=(8, 8, 8), format="zarr2")
    values = job_values(
        tmp_path / "in", tmp_path / "out", model={"input_channels": 2, "output_channels": 2}
    )
    values["inputs"] = [{"path": str(tmp_path / "further")}]
    values["inference"]["chunk_shape"] = [16, 16, 16]
    return str(write_job(tmp_path / "job.yaml", values))


def turn_axes(folder):
    file = folder / ".zattrs"
    values = json.loads(file.read_text())
    values["_ARRAY_DIMENSIONS"] = values["_ARRAY_DIMENSIONS"][::-1]
    file.write_text(json.dumps(values))


def turn_blocks(folder):
    file = folder / ".zarray"
    values = json.loads(file.read_text())
    values["order"] = {"C": "F", "F": "C"}[values["order"]]
    file.write_text(json.dumps(values))


@pytest.mark.parametrize("change", [turn_axes, turn_blocks])
@pytest.mark.parametrize("folder", ["in", "further"])
def test_an_input_whose_axes_are_exchanged_is_another_one(
    cubic_job, tmp_path, capsys, change, folder
):
    assert main(["run", cubic_job, "--chunks", "0-3"]) == 0
    change(tmp_path / folder)
    assert main(["run", cubic_job]) == 2
    assert "axes, or bytes, are stored in another order" in capsys.readouterr().err
    change(tmp_path / folder)
    assert main(["run", cubic_job]) == 0


def turn_bytes_of_zarr2(folder):
    values = json.loads((folder / ".zarray").read_text())
    values["dtype"] = {"<u2": ">u2", ">u2": "<u2"}[values["dtype"]]
    (folder / ".zarray").write_text(json.dumps(values))


def turn_bytes_of_zarr3(folder):
    values = json.loads((folder / "zarr.json").read_text())
    (codec,) = [
        each for each in values["codecs"][0]["configuration"]["codecs"] if each["name"] == "bytes"
    ]
    turned = {"little": "big", "big": "little"}[codec["configuration"]["endian"]]
    codec["configuration"]["endian"] = turned
    (folder / "zarr.json").write_text(json.dumps(values))


@pytest.mark.parametrize("change", [turn_bytes_of_zarr2, turn_bytes_of_zarr3])
def test_an_input_whose_bytes_are_exchanged_is_another_one(change, tmp_path, capsys):
    array = np.random.default_rng(1).integers(1, 250, (24, 24, 24)).astype(np.uint16)
    shards = {"shard_shape": (16, 16, 16)} if change is turn_bytes_of_zarr3 else {}
    format = "zarr3" if shards else "zarr2"
    write_volume(tmp_path / "in", array, block_shape=(8, 8, 8), format=format, **shards)
    values = job_values(tmp_path / "in", tmp_path / "out")
    values["inference"]["chunk_shape"] = [16, 16, 16]
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", job, "--chunks", "0-3"]) == 0
    change(tmp_path / "in")
    assert main(["run", job]) == 2
    assert "axes, or bytes, are stored in another order" in capsys.readouterr().err
    change(tmp_path / "in")
    assert main(["run", job]) == 0


def test_a_mask_that_lies_elsewhere_is_another_one(job, tmp_path, capsys):
    """Its voxel size says where its voxels are, and is stated beside them."""
    size = {"voxel_size_nm": (20, 20, 20)}
    write_volume(tmp_path / "mask", np.ones((20, 40, 40), np.uint8), format="zarr2", **size)
    path = job(mask={"path": str(tmp_path / "mask")}, output={"voxel_size_nm": [10, 10, 10]})
    assert main(["run", path, "--chunks", "0-3"]) == 0
    info = tmp_path / "mask" / ".zattrs"
    content = info.read_text()
    info.write_text(content.replace("20 nm", "40 nm"))
    assert info.read_text() != content
    assert main(["run", path]) == 2
    assert "mask is" in (error := capsys.readouterr().err)
    assert "when the job of" in error
    info.write_text(content)
    assert main(["run", path]) == 0


@pytest.mark.parametrize(("command", "verified"), [(["prepare", "--shards=2"], 1), (["run"], 0)])
def test_a_state_says_nothing_of_an_output_that_another_state_made_anew(
    job, tmp_path, capsys, command, verified
):
    """The job is the same, and the first state has its receipts still."""
    path = job()
    first, second = ([path, f"--set=job.state_path={tmp_path / name}"] for name in ("one", "two"))
    assert main(["run", *first]) == 0
    shutil.rmtree(tmp_path / "out")
    assert main([*command, *second]) == 0
    capsys.readouterr()
    for word in ("status", "verify"):
        assert main([word, *first]) == 2
        assert "does not name this job with its state" in capsys.readouterr().err
    assert main(["verify", *second]) == verified
    assert main(["run", *first, "--overwrite"]) == 0
    assert main(["verify", *first]) == 0
    assert main(["verify", *second]) == verified


def test_a_state_may_be_moved(job, tmp_path):
    assert main(["run", job(job={"state_path": "one"})]) == 0
    (tmp_path / "one").rename(tmp_path / "two")
    assert main(["verify", job(job={"state_path": "two"})]) == 0
    assert main(["run", job(job={"state_path": "two"})]) == 0
    owners = json.loads((tmp_path / "out/_beam_inference/owners.json").read_text())["owners"]
    assert [each["state_url"] for each in owners] == [(tmp_path / "two").as_uri()]


def test_a_state_of_a_former_version_has_no_name(job, tmp_path):
    path = job(job={"state_path": "one"})
    assert main(["run", path]) == 0
    (tmp_path / "one/id").unlink()
    file = tmp_path / "out/_beam_inference/owners.json"
    owners = json.loads(file.read_text())
    del owners["owners"][0]["state_id"]
    file.write_text(json.dumps(owners))
    assert main(["verify", path]) == 0
    assert main(["run", path]) == 0
    assert main(["verify", path]) == 0


def test_a_damaged_owner_is_named(job, tmp_path, capsys):
    path = job()
    assert main(["run", path]) == 0
    (tmp_path / "out/_beam_inference/owners.json").write_text('{"fingerprint": "')
    assert main(["run", path]) == 2
    assert "owners.json cannot be understood" in capsys.readouterr().err


def test_with_resume_false_the_printed_command_resumes(job, tmp_path, capsys):
    block = next((tmp_path / "in").rglob("2-34_*_3-35"))
    block.write_bytes(block.read_bytes()[:50])
    assert main(["run", job(job={"resume": False})]) == 3
    line = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("to do them again: ")
    )
    words = line.removeprefix("to do them again: beam-inference ").split()
    assert main(words) == 3


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
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=0, atol=OF_RANGE
    )


def test_another_job_on_the_same_output_is_refused_saying_what_differs(job, capsys, tmp_path):
    assert main(["run", job()]) == 0
    before = read_volume(tmp_path / "out")
    assert main(["run", job(inference={"patch_overlap": [2, 8, 4]})]) == 2
    err = capsys.readouterr().err
    assert "geometry.patch_overlap: [2, 8, 4] here, [2, 8, 8] there" in err
    assert main(["run", job(model={"normalize": {"scale": 2.0}}), "--overwrite"]) == 0
    np.testing.assert_allclose(read_volume(tmp_path / "out"), 2 * before, rtol=0, atol=OF_RANGE)


def test_quarantine_within_and_above_the_bound(job, capsys, tmp_path):
    block = next((tmp_path / "in").rglob("2-34_*_3-35"))
    with truncated(block):
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
    assert main(["run", path, "--chunks", str(file)]) == 0
    assert f"{len(quarantined)} of {len(quarantined)} chunks done" in capsys.readouterr().out
    assert main(["verify", path, "--deep"]) == 0
    assert not list((tmp_path / "out/_beam_inference").glob("quarantine.jsonl"))
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=0, atol=OF_RANGE
    )


def test_verify_of_what_was_never_run(job, capsys):
    assert main(["verify", job()]) == 2
    assert "nothing to verify" in capsys.readouterr().err


def test_what_to_do_next_never_deletes_what_was_done(job, tmp_path, capsys):
    from beam_inference.cli.main import run_with_flags

    path = job()
    block = next((tmp_path / "in").glob("*/*_*-*_*"))
    with truncated(block):
        assert run_with_flags([f"--job={path}", "--overwrite=true", "--resume="]) == 3
        (told,) = [
            line
            for line in capsys.readouterr().out.splitlines()
            if line.startswith("to do them again")
        ]
        assert "--overwrite" not in told
    assert main(["run", path]) == 0
    assert not (tmp_path / "out" / "_beam_inference" / "quarantine.jsonl").exists()


def test_verify_refuses_a_job_file_that_now_asks_for_another_engine(job, capsys):
    assert main(["run", job()]) == 0
    for keys in ({"engine": "compile"}, {"precision": "bfloat16"}):
        assert main(["verify", job(inference=keys)]) == 2
        assert f"belongs to another job: inference.{next(iter(keys))} is" in capsys.readouterr().err
    assert main(["verify", job()]) == 0


def test_what_an_earlier_version_began_is_verified_and_not_gone_on_with(job, capsys, monkeypatch):
    path = job(model=toy("same"))
    with monkeypatch.context() as earlier:
        earlier.setattr("beam_inference.launch.prepare.NUMERICS", 1)
        assert main(["run", path]) == 0
    assert main(["verify", path, "--deep"]) == 0
    assert main(["status", path]) == 0
    capsys.readouterr()
    assert main(["run", path]) == 2
    assert "version 1 of the rules" in (told := capsys.readouterr().err)
    assert f"follows version {NUMERICS}" in told
    assert main(["run", path, "--overwrite"]) == 0


def test_a_batch_that_the_device_had_no_memory_for_is_the_jobs_no_more(
    job, tmp_path, capsys, monkeypatch
):
    """The first launch settles for what fits; a later one on a smaller device says so."""
    some = tmp_path / "some"
    asked = {"batch_size": 8}
    some.write_text("0\n")
    monkeypatch.setenv("TOY_DEVICE_PATCHES", "3")
    assert main(["run", job(model=toy("cramped"), inference=asked), "--chunks", str(some)]) == 0
    record = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    assert (record["requested_batch_size"], record["config"]["inference"]["batch_size"]) == (8, 2)
    assert main(["run", job(model=toy("cramped"), inference={"batch_size": 4})]) == 2
    assert "engine.batch_size: 4 here, 2 there" in capsys.readouterr().err

    report = [
        "report",
        job(model=toy("cramped"), inference=asked),
        "--to",
        str(tmp_path / "report.html"),
    ]
    assert main(report) == 0
    assert "out of memory" not in (tmp_path / "report.html").read_text()
    monkeypatch.setenv("TOY_DEVICE_PATCHES", "1")
    assert main(["run", job(model=toy("cramped"), inference=asked)]) == 0
    assert json.loads((tmp_path / "out/_beam_inference/job.json").read_text()) == record
    assert main(["verify", job(model=toy("cramped"), inference=asked), "--deep"]) == 0
    assert main(["verify", job(model=toy("cramped"), inference={"batch_size": 2})]) == 0
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=0, atol=OF_RANGE
    )
    assert main(report) == 0
    assert re.search(
        r"[1-9]\d* of the chunks .* fewer patches", (tmp_path / "report.html").read_text()
    )


@pytest.mark.parametrize("precision", ["bfloat16", "tf32"])
def test_another_precision_is_another_job_also_where_the_engine_is_chosen(
    precision, volume_in, tmp_path, capsys
):
    """OpenVINO, which the first launch has chosen, does not know these precisions."""
    pytest.importorskip("openvino")
    values = job_values(
        volume_in,
        tmp_path / "out",
        model=toy("conv", output_channels=2),
        inference={"device": "cpu"},
    )
    del values["inference"]["engine"]
    path = str(write_job(tmp_path / "job.yaml", values))
    launch = prepare(load_job(path))
    assert launch.read_job().config.inference.engine == "openvino"
    job_file = str(tmp_path / "job.yaml")
    assert main(["run", job_file, "--set", f"inference.precision={precision}"]) == 2
    error = capsys.readouterr().err
    if precision == "bfloat16":
        assert "inference.precision is float32 there, here bfloat16" in error
    else:
        assert "precision: tf32 exists only on CUDA devices" in error
