"""Chunks are computed again by what the output tells alone, and nothing of a stranger's is run."""

import json
import pickle
import shutil
import warnings

import cellmap_packages
import numpy as np
import pytest
import torch
from fakes.receipts import FURTHER_INPUT
from helpers import POSITION, job_values, read_volume, write_volume
from nnunet_folders import make_folder

from beam_inference.cli.main import main
from beam_inference.config.formats import OutputSpec
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError, ModelContractError, StateError, UserError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.resolved_job import NUMERICS
from beam_inference.launch.prepare import prepare
from beam_inference.launch.reproduction import Consent, reproduce
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.outputs import create_output
from beam_inference.volumes.provenance import change_provenance, read_provenance
from beam_inference.worker.worker import Worker

FORMATS = ("precomputed", "zarr2", "zarr3", "n5", "ome_zarr", "ome_zarr_0.4")
CODE = Consent(code=True)
SHARDS = {"block_shape": [8, 16, 16], "shard_shape": [16, 32, 32]}
OWN = "def halved(values):\n    return values / 2\n"
PLANTED = "from pathlib import Path\nPath({path!r}).write_text('run')\n"


@pytest.fixture
def volume(tmp_path):
    """A volume of random voxels that begins at 0."""
    array = np.random.default_rng(0).integers(0, 256, (24, 40, 40), dtype=np.uint8)
    write_volume(tmp_path / "in", array)
    return tmp_path / "in"


def compute(tmp_path, volume, *, postprocess=(), chunks=None, **sections):
    """Do a job without Beam, and take away whatever is not the output itself."""
    sections["model"] = POSITION | sections.get("model", {})
    values = job_values(volume, tmp_path / "out", **sections)
    values["postprocess"] = list(postprocess)
    worker = Worker(prepare(parse_job(values, tmp_path)))
    chunks = range(worker.job.plan.chunks.count) if chunks is None else chunks
    if worker.job.plan.exchange is None:
        list(worker.infer_chunks(chunks))
    else:
        list(worker.sum_chunks(chunks))
        list(worker.merge_seams(chunks))
    shutil.rmtree(tmp_path / "out/_beam_inference")
    return worker.job


def change_record(tmp_path, change):
    """Change the only record of the output as anybody can who writes there."""

    def changed(entries):
        copy = json.loads(json.dumps(entries))
        change(copy[0])
        return copy

    change_provenance(f"file://{tmp_path}/out", LOCAL, changed)


def files_of(tmp_path):
    return {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "strategy", [pytest.param("recompute", marks=pytest.mark.slow), "exchange"]
)
@pytest.mark.parametrize("format", FORMATS)
def test_every_chunk_has_the_bits_of_the_output(format, strategy, volume, tmp_path):
    compute(tmp_path, volume, output={"format": format}, inference={"strategy": strategy})
    before = files_of(tmp_path)
    (result,) = reproduce(str(tmp_path / "out"), 1, consent=CODE)
    found = result.recomputation
    assert (found.different, found.undecided, result.cautions) == ([], [], [])
    assert len(found.chunks) == 8
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    "sections",
    [
        {"output": {"format": "precomputed", **SHARDS}, "inference": {"chunk_shape": [16, 32, 32]}},
        {"output": {"format": "zarr3", **SHARDS}},
        {"inference": {"seams": "crop"}, "output": {"dtype": "uint8", "value_range": [0, 4]}},
        {"inference": {"lattice": "spread", "blend": {"gaussian": 0.125, "floor": "monai"}}},
        {"postprocess": [{"operator": "smooth", "sigma": [0.5, 1, 1]}]},
        {"roi": {"start": [4, 8, 4], "stop": [20, 40, 36]}},
        {"mask": {"path": "mask", "fill_value": 7}},
        {"output": {"format": "ome_zarr", "pyramid": True}},
        {"model": {"normalize": [{"clip": [3, 200]}, {"standard": {"by": "patch"}}]}},
        {
            "output": {"dtype": "uint8", "value_range": [0, 4], "encoding": "jpeg"},
            "postprocess": [{"operator": "select", "channels": [1]}],
        },
    ],
    ids="-".join,
)
def test_every_kind_of_job_is_told_completely(sections, volume, tmp_path):
    write_volume(tmp_path / "mask", np.eye(24, dtype=np.uint8)[:, :, None].repeat(40, 2))
    compute(tmp_path, volume, **sections)
    (result,) = reproduce(str(tmp_path / "out"), 1, consent=CODE)
    assert (result.recomputation.different, result.recomputation.undecided) == ([], [])


def test_everything_may_be_moved_together(volume, tmp_path):
    write_volume(tmp_path / "lab/in", read_volume(volume)[0])
    (tmp_path / "lab/own.py").write_text(OWN)
    own = {"operator": "own", "function": "own.py:halved", "output_channels": 2}
    compute(tmp_path / "lab", tmp_path / "lab/in", postprocess=[own])
    (tmp_path / "lab").rename(tmp_path / "moved")
    (result,) = reproduce(str(tmp_path / "moved/out"), 1, consent=CODE)
    assert result.recomputation.different == []


def test_a_changed_bit_is_found(volume, tmp_path, capsys):
    job = compute(tmp_path, volume)
    block = max((tmp_path / "out").glob("10_10_10/*"), key=lambda path: path.stat().st_size)
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 1
    block.write_bytes(content)
    command = ["reproduce", str(tmp_path / "out"), "--trust_code", "--sample", "1", "--seed", "7"]
    assert main(command) == 1
    told = capsys.readouterr().out
    assert job.fingerprint in told
    assert "8 chunks computed again (--sample 1 --seed 7), 1 of them with other bits" in told
    assert main([*command, "--json"]) == 1
    (values,) = json.loads(capsys.readouterr().out)
    assert len(values["different"]) == 1
    assert values["chunks"] == list(range(8))


def test_what_was_never_computed_is_told_to_be_empty(volume, tmp_path):
    compute(tmp_path, volume, chunks=[0])
    (result,) = reproduce(str(tmp_path / "out"), 1, consent=CODE)
    assert len(result.recomputation.different) == 7
    assert "the output is zero throughout" in result.recomputation.different[0]


def test_each_job_of_a_shared_output_is_computed(volume, tmp_path):
    bounds = {"start": [0, 0, 0], "stop": [24, 40, 40]}
    for start, stop in ((0, 16), (16, 24)):
        roi = {"start": [start, 0, 0], "stop": [stop, 40, 40]}
        compute(tmp_path, volume, output={"bounds": bounds}, roi=roi)
    results = reproduce(str(tmp_path / "out"), 1, consent=CODE)
    assert [len(result.recomputation.chunks) for result in results] == [4, 4]
    assert not any(result.recomputation.different for result in results)


class TestAbsentAndOtherFiles:
    def test_an_input_that_was_moved_is_named(self, volume, tmp_path, capsys):
        compute(tmp_path, volume)
        volume.rename(tmp_path / "moved")
        command = ["reproduce", str(tmp_path / "out"), "--trust_code"]
        assert main(command) == 2
        assert "Name what was moved with --input" in capsys.readouterr().err
        assert main([*command, "--input", str(tmp_path / "moved")]) == 0

    def test_another_volume_in_its_place_is_refused(self, volume, tmp_path):
        compute(tmp_path, volume)
        write_volume(tmp_path / "other", np.zeros((24, 40, 40), np.uint16))
        with pytest.raises(StateError, match=r"input\.dtype: uint16 here, uint8 there"):
            reproduce(
                str(tmp_path / "out"),
                1,
                files={"input.path": str(tmp_path / "other")},
                consent=CODE,
            )

    def test_another_network_is_refused_by_its_hash(self, volume, tmp_path):
        factory = tmp_path / "net.py"
        factory.write_text("import torch\ndef make():\n    return torch.nn.Conv3d(1, 2, 1)\n")
        weights = tmp_path / "weights.pt"
        torch.manual_seed(0)
        torch.save(torch.nn.Conv3d(1, 2, 1).state_dict(), weights)
        model = {"path": "net.py:make", "weights": "weights.pt"}
        compute(tmp_path, volume, model=model)
        reproduce(str(tmp_path / "out"), 1, consent=CODE)
        torch.save(torch.nn.Conv3d(1, 2, 1).state_dict(), tmp_path / "others.pt")
        files = {"model.weights": str(tmp_path / "others.pt")}
        with pytest.raises(StateError, match=r"model\.sha256: .* here, .* there"):
            reproduce(str(tmp_path / "out"), 1, files=files, consent=CODE)
        weights.rename(tmp_path / "moved.pt")
        with pytest.raises(ModelContractError, match=r"weights\.pt. Name what was moved"):
            reproduce(str(tmp_path / "out"), 1, consent=CODE)
        files = {"model.weights": str(tmp_path / "moved.pt")}
        (result,) = reproduce(str(tmp_path / "out"), 1, files=files, consent=CODE)
        assert result.recomputation.different == []

    def test_a_place_that_was_left_out_is_asked_for(self, volume, tmp_path):
        home = tmp_path / "home/alice/em"
        home.parent.mkdir(parents=True)
        shutil.copytree(volume, home)
        compute(tmp_path, home)
        with pytest.raises(StateError, match=r"called em\. Say where it is: --file input.path"):
            reproduce(str(tmp_path / "out"), 1, consent=CODE)
        files = {"input.path": str(home)}
        (result,) = reproduce(str(tmp_path / "out"), 1, files=files, consent=CODE)
        assert result.recomputation.different == []

    def test_a_key_that_the_job_does_not_have_is_refused(self, volume, tmp_path):
        compute(tmp_path, volume)
        with pytest.raises(ConfigError, match=r"--file mask\.path: the record names no such file"):
            reproduce(str(tmp_path / "out"), 1, files={"mask.path": "x"}, consent=CODE)

    @pytest.mark.parametrize("word", ["mask.path", "=x", "mask.path="])
    def test_a_file_needs_key_and_path(self, word, tmp_path, capsys):
        assert main(["reproduce", str(tmp_path), "--file", word]) == 2
        assert "--file takes KEY=PATH" in capsys.readouterr().err


class TestOtherVersions:
    def test_another_version_is_told(self, volume, tmp_path):
        compute(tmp_path, volume)
        change_record(tmp_path, lambda entry: entry["job"]["versions"].update(numpy="1.0"))
        (result,) = reproduce(str(tmp_path / "out"), 1, consent=CODE)
        assert any("numpy 1.0 then" in caution for caution in result.cautions)
        assert result.recomputation.different == []

    def test_another_engine_leaves_its_last_bits_undecided(self, volume, tmp_path):
        compute(tmp_path, volume)
        engine = {"engine_version": "1.0"}
        change_record(tmp_path, lambda entry: entry["job"]["engine"].update(engine))
        (result,) = reproduce(str(tmp_path / "out"), 1, consent=CODE)
        assert "engine_version: " in result.cautions[0]
        assert result.recomputation.different == []

    def test_other_rules_of_sums_are_refused(self, volume, tmp_path):
        compute(tmp_path, volume)
        change_record(tmp_path, lambda entry: entry["job"].update(numerics=NUMERICS - 1))
        with pytest.raises(StateError, match="by rules of version 4"):
            reproduce(str(tmp_path / "out"), 1, consent=CODE)


class TestNothingOfAStrangerIsRun:
    """A planted file would leave a trace if it was run."""

    @pytest.fixture
    def planted(self, tmp_path):
        path = tmp_path / "trace"
        (tmp_path / "planted.py").write_text(PLANTED.format(path=str(path)) + OWN)
        return path

    @pytest.mark.parametrize(
        "change",
        [
            lambda job: job["config"]["model"].update(path="../planted.py:halved"),
            lambda job: job["config"]["model"].update(path="planted:halved"),
            lambda job: job["config"]["postprocess"].append(
                {"operator": "own", "function": "../planted.py:halved", "output_channels": 1}
            ),
            lambda job: job["config"]["postprocess"].append(
                {"operator": "own", "function": "planted:halved", "output_channels": 1}
            ),
            lambda job: job["config"]["model"].update(path="../net.ts"),
        ],
        ids=["factory", "module", "own-file", "own-module", "torchscript"],
    )
    def test_code_is_not_run_without_consent(
        self, change, volume, planted, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.syspath_prepend(tmp_path)
        compute(tmp_path, volume, model={"path": "identity", "output_channels": 1})
        change_record(tmp_path, lambda entry: change(entry["job"]))
        assert main(["reproduce", str(tmp_path / "out")]) == 2
        told = capsys.readouterr().err
        assert "the record names code" in told
        assert "--trust_code" in told
        assert main(["show", str(tmp_path / "out")]) == 0
        assert not planted.exists()

    @pytest.mark.parametrize("function", ["../planted.py:halved", "planted:halved"])
    def test_a_record_names_no_further_outputs_with_code(
        self, function, volume, planted, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.syspath_prepend(tmp_path)
        compute(tmp_path, volume, model={"path": "identity", "output_channels": 1})
        own = {"operator": "own", "function": function, "output_channels": 1}
        further = {"path": "../more", "dtype": "float32", "postprocess": [own]}
        change = {"outputs": {"more": further}}
        change_record(tmp_path, lambda entry: entry["job"]["config"].update(change))
        assert main(["reproduce", str(tmp_path / "out")]) == 2
        assert "names further outputs" in capsys.readouterr().err
        assert not planted.exists()

    def test_a_network_that_the_user_names_needs_no_leave(self, volume, tmp_path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.script(torch.nn.Conv3d(1, 2, 1)).save(tmp_path / "net.ts")
        compute(tmp_path, volume, model={"path": "net.ts"})
        with pytest.raises(ConfigError, match="the record names code"):
            reproduce(str(tmp_path / "out"), 1)
        files = {"model.path": str(tmp_path / "net.ts")}
        (result,) = reproduce(str(tmp_path / "out"), 1, files=files)
        assert result.recomputation.different == []

    def test_a_function_of_ones_own_needs_leave_also_in_a_named_file(self, volume, tmp_path):
        (tmp_path / "own.py").write_text(OWN)
        own = {"operator": "own", "function": "own.py:halved", "output_channels": 1}
        model = {"path": "identity", "output_channels": 1}
        compute(tmp_path, volume, model=model, postprocess=[own])
        (tmp_path / "own.py").rename(tmp_path / "moved.py")
        files = {"postprocess.0": str(tmp_path / "moved.py")}
        with pytest.raises(ConfigError, match="the record names code"):
            reproduce(str(tmp_path / "out"), 1, files=files)

    def test_pickled_code_is_not_run_by_consent_to_code_alone(self, volume, planted, tmp_path):
        class Planted:
            def __reduce__(self):
                return exec, (PLANTED.format(path=str(planted)),)

        (tmp_path / "net.py").write_text(
            "import torch\ndef make():\n    return torch.nn.Conv3d(1, 2, 1)\n"
        )
        torch.save(torch.nn.Conv3d(1, 2, 1).state_dict(), tmp_path / "weights.pt")
        compute(tmp_path, volume, model={"path": "net.py:make", "weights": "weights.pt"})
        (tmp_path / "weights.pt").write_bytes(pickle.dumps(Planted()))
        change_record(tmp_path, lambda entry: _with_hash_of(entry, tmp_path))
        with pytest.raises(UserError):
            reproduce(str(tmp_path / "out"), 1, consent=CODE)
        assert not planted.exists()

    def test_a_program_in_a_package_needs_leave(self, volume, tmp_path):
        sizes = {"input_shape": [8, 16, 16], "output_shape": [8, 16, 16]}
        described = cellmap_packages.described(
            **sizes,
            **{f"inference_{key}": size for key, size in sizes.items()},
            input_voxel_size=[10, 10, 10],
            output_voxel_size=[10, 10, 10],
            out_channels=1,
            channels_names=["a"],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            network = torch.jit.script(torch.nn.Conv3d(1, 1, 1))
            cellmap_packages.make_package(tmp_path / "package", described, network)
        compute(tmp_path, volume, model={"path": "package", "output_channels": 1})
        with pytest.raises(ConfigError, match="the record names code"):
            reproduce(str(tmp_path / "out"), 0.1)
        (result,) = reproduce(str(tmp_path / "out"), 0.1, consent=CODE)
        assert result.recomputation.different == []

    def test_a_package_of_a_network_runs_without_leave(self, volume, tmp_path):
        path, _ = make_folder(tmp_path / "nnunet")
        model = {"path": str(path), "input_channels": 1, "output_channels": 3}
        inference = {"patch_shape": [16, 24, 24], "patch_overlap": [8, 12, 12]}
        compute(tmp_path, volume, model=model, inference=inference)
        (entry,) = read_provenance(f"file://{tmp_path}/out")
        names = {needed["name"] for needed in entry["needs"]}
        assert {"plans.json", "dataset.json", "fold_0/checkpoint_final.pth"} <= names
        (result,) = reproduce(str(tmp_path / "out"), 0.1)
        assert result.recomputation.different == []


def _with_hash_of(entry, tmp_path):
    from beam_inference.models.local_files import file_sha256

    hashes = [file_sha256(tmp_path / name) for name in ("net.py", "weights.pt")]
    entry["job"]["model_sha256"] = "+".join(hashes)


NEEDS = [{"key": "model.path", "name": "trusted.onnx", "sha256": "f" * 64}]


class TestHostileRecords:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda entry: entry.update(record=2), "record: "),
            (lambda entry: entry.update(job=3), "job: "),
            (lambda entry: entry.pop("fingerprint"), "fingerprint: "),
            (lambda entry: entry["job"].update(unknown=1), "unknown: "),
            (lambda entry: entry["job"].update(further_inputs=[FURTHER_INPUT]), "1 further inputs"),
            (lambda entry: entry["job"].update(head_bounds=[1, 2]), "prediction bounds of 2"),
            (lambda entry: entry["job"].update(head_bounds=[0]), "head_bounds"),
            (lambda entry: entry["box"].update(stop=[999, 999, 999]), "does not fit itself"),
            (lambda entry: entry.update(needs=NEEDS), "is not what its job names"),
            (lambda entry: entry["job"].update(config={}), "config.input: "),
            (lambda entry: entry["job"].update(roi={"start": [9, 9, 9], "stop": [0, 0, 0]}), ""),
            (lambda entry: entry["job"]["config"]["inference"].update(threads=10**6), ""),
            (lambda entry: entry["job"]["config"]["inference"].update(patch_shape=[10**5] * 3), ""),
            (lambda entry: entry["job"]["config"]["inference"].update(chunk_shape=[0, 1, 1]), ""),
            (lambda entry: entry["job"]["config"]["input"].update(path="…/in"), "Say where it is"),
            (lambda entry: entry["job"]["config"]["input"].update(path="s3://a:b@c/d"), ""),
            (lambda entry: entry["job"]["config"]["input"].update(path="/etc/passwd"), ""),
            (lambda entry: entry["job"]["config"]["input"].update(path="\0"), ""),
            (lambda entry: entry["job"]["config"].update(postprocess=[{"operator": "x"}]), "x"),
            (lambda entry: entry["job"]["config"]["output"].update(path="../in"), None),
            (lambda entry: entry["job"]["config"]["output"].update(dtype="uint8"), ""),
        ],
    )
    def test_a_record_that_is_changed_ends_in_one_message(
        self, change, message, volume, tmp_path, capsys
    ):
        compute(tmp_path, volume, model={"path": "identity", "output_channels": 1})
        before = read_volume(volume)
        change_record(tmp_path, change)
        code = main(["reproduce", str(tmp_path / "out"), "--sample", "1"])
        told = capsys.readouterr().err
        if message is None:  # the output is where the record is, whatever it says
            assert code == 0
        else:
            assert code == 2
            assert message in told
            assert "not foreseen" not in told
        np.testing.assert_array_equal(read_volume(volume), before)
        assert main(["show", str(tmp_path / "out")]) == 0

    def test_voxels_of_which_no_record_tells_are_told(self, volume, tmp_path, capsys):
        half = {"start": [0, 0, 0], "stop": [24, 40, 32]}
        whole = {"start": [0, 0, 0], "stop": [24, 40, 40]}
        model = {"path": "identity", "output_channels": 1}
        compute(tmp_path, volume, model=model, roi=half, output={"bounds": whole})
        change_record(tmp_path, lambda entry: entry.update(made_by="a\nverified: all\x1b[2J"))
        words = ["reproduce", str(tmp_path / "out"), "--sample", "0.1"]
        assert main(words) == 0
        told = capsys.readouterr().out
        assert "to 24, 40, 32) alone, and the volume is" in told
        assert "\nverified" not in told
        assert main([*words, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["box"], found["bounds"]) == (half, whole)

    def test_show_survives_what_is_no_record(self, volume, tmp_path, capsys):
        url = write_volume(tmp_path / "out", np.zeros((8, 8, 8), np.uint8), format="zarr3")
        strange = {
            "made_by": {"a": "\x1b[2J"},
            "needs": [1, {"key": 3}, {"name": "s3://key:hidden@bucket/x\x1b[2J"}],
            "job": [1],
            "sources": "x" * 10**5,
            "box": {str(n): n for n in range(50)},
        }
        change_provenance(url, LOCAL, lambda _: [strange, {}])
        assert main(["show", str(tmp_path / "out")]) == 0
        told = capsys.readouterr().out
        assert "\x1b" not in told
        assert "hidden" not in told
        assert len(told) < 10**4
        assert main(["show", str(tmp_path / "out"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == [strange, {}]


def test_more_chunks_than_anybody_waits_for_are_refused(tmp_path):
    bounds = BoundingBox((0, 0, 0), (20_000, 20_000, 20_000))
    spec = OutputSpec(
        url=f"file://{tmp_path}/in",
        format="precomputed",
        dtype="uint8",
        channels=1,
        bounds=bounds,
        block_shape=(64, 64, 64),
        voxel_size_nm=(1.0, 1.0, 1.0),
    )
    box = BoundingBox((0, 0, 0), (64, 64, 64))
    create_output(spec).write(box, np.zeros((1, 64, 64, 64), np.uint8))
    inference = {"chunk_shape": [64, 64, 64], "patch_overlap": [0, 0, 0]}
    prepare(parse_job(job_values(tmp_path / "in", tmp_path / "out", inference=inference), tmp_path))
    with pytest.raises(ConfigError, match="--sample 0.5 of 30,664,297 chunks"):
        reproduce(str(tmp_path / "out"), 0.5)


class TestWithoutRecord:
    def test_a_volume_without_one_is_told(self, volume, capsys):
        for command in ("show", "reproduce"):
            assert main([command, str(volume)]) == 2
            assert "do not tell how it was made" in capsys.readouterr().err

    def test_what_no_job_has_made_is_told(self, volume, tmp_path, capsys):
        assert main(["convert", str(volume), str(tmp_path / "out"), "--format", "zarr3"]) == 0
        assert main(["reproduce", str(tmp_path / "out")]) == 2
        assert "was made by beam-inference convert" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["show", "reproduce"])
    def test_no_volume_is_told(self, command, tmp_path, capsys):
        assert main([command, str(tmp_path / "nothing")]) == 2
        assert "there is no volume at" in capsys.readouterr().err

    def test_a_web_server_cannot_be_reproduced_from(self, capsys):
        assert main(["reproduce", "http://127.0.0.1:1/out"]) == 2
        assert "which http(s):// does not allow" in capsys.readouterr().err
