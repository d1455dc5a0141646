"""Test that chunks computed again have the output's bits, and that a changed bit is found."""

import json
from dataclasses import replace

import numpy as np
import pytest
from fakes.receipts import FURTHER_INPUT
from helpers import POSITION, job_values, read_volume, toy, write_job, write_volume

from beam_inference import load_job, verify
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.engines.trial import TOLERANCES, ChannelDistances
from beam_inference.errors import StateError
from beam_inference.job.parts import output_spec
from beam_inference.job.records import Part
from beam_inference.job.seals import open_record, seal_record
from beam_inference.launch.prepare import prepare
from beam_inference.launch.recomputation import find_difference, recompute_chunks
from beam_inference.volumes.outputs import open_output
from beam_inference.worker.worker import Worker

SMOOTH = {"operator": "smooth", "sigma": [0.5, 1, 1]}
MASK = np.zeros((40, 70, 50), np.uint8)
MASK[:20, :40, 20:] = 1


def computed(tmp_path, volume_in, **sections):
    """A job that is done, without Beam; and the values of its job file."""
    values = job_values(volume_in, tmp_path / "out", **{"model": POSITION})
    for section, keys in sections.items():
        values[section] = values.get(section, {}) | keys if isinstance(keys, dict) else keys
    write_job(tmp_path / "job.yaml", values)
    worker = Worker(prepare(parse_job(values, tmp_path)))
    chunks = range(worker.job.plan.chunks.count)
    if worker.job.plan.exchange is None:
        list(worker.infer_chunks(chunks))
    else:
        list(worker.sum_chunks(chunks))
        list(worker.merge_seams(chunks))
    return worker


def change_a_voxel(worker, chunk, by=1.0):
    """Change a voxel of the output, and the chunk's receipt as if it had been written so."""
    output = open_output(output_spec(worker.job))
    (receipt,) = worker.state.read_receipts([chunk])
    box = receipt.parts[0].box
    array = output.read(box).copy()
    array[0, 1, 2, 3] += by
    output.write(box, array)
    parts = [Part.of(box, array), *receipt.parts[1:]]
    worker.state.write_receipt(receipt.model_copy(update={"parts": parts}))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"inference": {"seams": "exchange"}},
        {"inference": {"seams": "exchange"}, "output": {"dtype": "uint8", "value_range": [0, 4]}},
        {"inference": {"seams": "crop"}, "output": {"dtype": "uint16", "value_range": [0, 4]}},
        {"postprocess": [SMOOTH], "roi": {"start": [5, 10, 4], "stop": [37, 60, 50]}},
        {
            "postprocess": [SMOOTH, {"operator": "threshold", "at": 0.8}],
            "output": {"dtype": "uint8"},
        },
        {"mask": {"path": "mask", "fill_value": 7}, "inference": {"seams": "exchange"}},
        {"mask": {"path": "mask"}},
        {
            "output": {"dtype": "uint8", "value_range": [0, 4], "encoding": "jpeg"},
            "postprocess": [{"operator": "select", "channels": [1]}],
        },
        {
            "output": {"format": "ome_zarr", "dtype": "int8", "value_range": [0, 4]},
            "roi": {"start": [5, 3, 4], "stop": [43, 65, 52]},
        },
    ],
    ids=lambda sections: "-".join(sections) or "default",
)
def test_chunks_computed_again_have_the_bits_of_the_output(sections, volume_in, tmp_path):
    write_volume(tmp_path / "mask", MASK, (3, -5, 2))
    worker = computed(tmp_path, volume_in, **sections)
    before = sorted(path for path in (tmp_path / "out").rglob("*"))
    found = recompute_chunks(worker.job, worker.state, 1)
    assert found.chunks == list(range(worker.job.plan.chunks.count))
    assert (found.different, found.undecided) == ([], [])
    assert sorted(path for path in (tmp_path / "out").rglob("*")) == before


@pytest.mark.parametrize("seams", [pytest.param("recompute", marks=pytest.mark.slow), "exchange"])
def test_a_changed_bit_with_a_receipt_that_fits_is_found(seams, volume_in, tmp_path, capsys):
    worker = computed(tmp_path, volume_in, inference={"seams": seams})
    change_a_voxel(worker, 2)
    job = str(tmp_path / "job.yaml")
    assert main(["verify", job, "--deep"]) == 0
    assert main(["verify", job, "--recompute", "1", "--seed", "5"]) == 1
    told = capsys.readouterr().out
    box = worker.job.plan.chunks.core_box(2)
    count = worker.job.plan.chunks.count
    assert f"{count} chunks computed again (--recompute 1 --seed 5), 1 of them with other" in told
    assert f"different: chunk 2 {box}: 1 of " in told
    assert "they differ by up to 1\n" in told
    assert main(["verify", job, "--recompute", "1", "--json"]) == 1
    values = json.loads(capsys.readouterr().out)["recomputed"]
    assert [line.split()[1] for line in values["different"]] == ["2"]
    assert values["chunks"] == list(range(count))


def test_the_draw_is_a_random_share_of_what_is_done_and_never_empty(volume_in, tmp_path):
    worker = computed(tmp_path, volume_in)
    for chunk in (0, 1):
        folder = tmp_path / "out/_beam_inference/receipts" / worker.job.fingerprint[:16]
        (folder / f"000000000/{chunk:012d}.json").unlink()
    config = load_job(tmp_path / "job.yaml")
    draws = [verify(config, recompute=1e-9).recomputation for _ in range(6)]
    assert all(draw.chunks for draw in draws)
    assert not {0, 1}.intersection(*(draw.chunks for draw in draws))
    assert len({tuple(draw.chunks) for draw in draws}) > 1
    again = verify(config, recompute=1e-9, seed=draws[0].seed).recomputation
    assert again == draws[0]


def test_nothing_done_leaves_nothing_to_compute(volume_in, tmp_path):
    values = job_values(volume_in, tmp_path / "out")
    launch = prepare(parse_job(values, tmp_path))
    assert recompute_chunks(launch.read_job(), launch.state(), 1).chunks == []


@pytest.mark.parametrize(("by", "is_undecided"), [(1e-6, True), (1e-3, False)])
def test_smaller_batches_explain_a_small_difference_only(by, is_undecided, volume_in, tmp_path):
    worker = computed(tmp_path, volume_in)
    change_a_voxel(worker, 1, by)
    (receipt,) = worker.state.read_receipts([1])
    worker.state.write_receipt(receipt.model_copy(update={"batch_size": 1}))
    found = recompute_chunks(worker.job, worker.state, 1)
    lines = found.undecided if is_undecided else found.different
    assert [line.split()[1] for line in lines] == ["1"]
    assert len(found.undecided) + len(found.different) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"numerics": 3}, "by rules of version 3"),
        ({"model_sha256": "0" * 64}, "the job was launched with 000000"),
        (
            {"engine": {"engine": "torch", "version": "1.0"}},
            "nothing can be recomputed here: .*1.0",
        ),
        (
            {"input_dtype": "uint16"},
            "nothing can be recomputed here: .* 1 of uint16, when the job began",
        ),
    ],
)
def test_what_would_give_other_bits_is_refused(changes, message, volume_in, tmp_path):
    worker = computed(tmp_path, volume_in)
    job = worker.job.model_copy(update=changes)
    for receipt in worker.state.read_receipts(range(2)):
        state = worker.state.of(job)
        state.write_receipt(receipt.model_copy(update={"fingerprint": job.fingerprint}))
    with pytest.raises(StateError, match=message):
        recompute_chunks(job, worker.state, 1)


@pytest.mark.parametrize("gone", ["in", "network.py"])
def test_an_input_or_network_that_is_gone_is_refused(gone, volume_in, tmp_path, capsys):
    (tmp_path / "network.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.ReLU()\n"
    )
    model = {"path": f"{tmp_path}/network.py:make", "output_channels": 1}
    computed(tmp_path, volume_in, model=model)
    (tmp_path / gone).rename(tmp_path / "elsewhere")
    assert main(["verify", str(tmp_path / "job.yaml")]) == 0
    assert main(["verify", str(tmp_path / "job.yaml"), "--recompute", "0.1"]) == 2
    assert gone in capsys.readouterr().err


def test_differences_are_counted_and_placed():
    from beam_inference.geometry.bounding_box import BoundingBox

    box = BoundingBox((10, 20, 30), (12, 22, 32))
    ours = np.zeros((2, 2, 2, 2), np.float32)
    theirs = ours.copy()
    assert find_difference(ours, theirs, box, 0) is None
    theirs[1, 0, 1, 1] = -0.0
    theirs[1, 1, 1, 1] = 0.25
    fault = find_difference(ours, theirs, box, 0.1)
    assert fault.text == (
        "2 of 16 values are not those computed again, the first in channel 1 at [10, 21, 31]; "
        "they differ by up to 0.25"
    )
    assert not fault.is_rounding
    assert find_difference(ours + 1, ours + np.float32(1 + 1e-6), box, 0).is_rounding
    assert find_difference(ours, ours + np.float32(1e-6), box, 2e-6).is_rounding
    assert not find_difference(ours + np.float32(1e-6), ours, box, 1e-7).is_rounding
    steps = np.full(ours.shape, 7, np.uint8)
    assert find_difference(steps, steps + np.uint8(1), box, 0).is_rounding
    assert not find_difference(steps, steps + np.uint8(2), box, 9).is_rounding


def test_what_makes_no_sense_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["verify", "job.yaml", "--recompute", "0"])
    assert "a share above 0 and at most 1" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "job.yaml"), "--seed", "3"]) == 2
    assert (
        "--seed, --allow_pickle and --trust_model belong to --recompute" in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "openvino"])
@pytest.mark.parametrize("seams", ["recompute", "exchange", "crop"])
def test_a_job_of_a_pipeline_has_the_bits_of_its_chunks(seams, engine, volume_in, tmp_path):
    model = toy("residual_unet", output_channels=3, normalize="unit")
    values = job_values(
        volume_in, tmp_path / "out", model=model, inference={"seams": seams, "engine": engine}
    )
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", job, "--direct_num_workers=2"]) == 0
    assert main(["verify", job, "--recompute", "1"]) == 0


def test_numbers_other_than_the_levels_files_are_refused(volume_in, tmp_path, capsys):
    levels = str(tmp_path / "levels.json")
    assert main(["levels", str(volume_in), "--to", levels]) == 0
    model = {**POSITION, "normalize": {"levels": "levels.json", "to": "standard"}}
    worker = computed(tmp_path, volume_in, model=model)
    command = ["verify", str(tmp_path / "job.yaml"), "--recompute", "0.01"]
    assert main(command) == 0
    job = worker.job
    normalize = job.config.model.normalize.model_copy(update={"scale": 2.0})
    section = job.config.model.model_copy(update={"normalize": normalize})
    config = job.config.model_copy(update={"model": section})
    worker.state.replace_job(job.model_copy(update={"config": config}))
    capsys.readouterr()
    assert main(command) == 2
    assert "model.normalize: {" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["prediction_bound", "head_bounds"])
def test_a_bound_that_rounds_values_away_is_refused(key, volume_in, tmp_path, capsys):
    model = POSITION
    if key == "head_bounds":
        heads = [{"key": 0, "channels": 2}, {"key": 1, "channels": 1}]
        model = toy("heads", output_channels=3, heads=heads)
    worker = computed(
        tmp_path, volume_in, model=model, output={"head": 0} if "heads" in model else {}
    )
    command = ["verify", str(tmp_path / "job.yaml"), "--recompute", "0.01"]
    assert main(command) == 0
    bounds = {"prediction_bound": 2.0**30}
    if key == "head_bounds":
        bounds["head_bounds"] = [2.0**30, worker.job.head_bounds[1]]
    worker.state.replace_job(worker.job.model_copy(update=bounds))
    (tmp_path / "out" / "_beam_inference" / "owners.json").unlink()
    assert main(["run", str(tmp_path / "job.yaml")]) == 0  # which believes its state
    assert not read_volume(tmp_path / "out").any()
    capsys.readouterr()
    assert main(command) == 2
    assert "the recorded prediction_bound, 1.07374e+09, is far above" in capsys.readouterr().err


def test_a_bound_that_the_job_file_states_is_its_own_affair(volume_in, tmp_path):
    computed(tmp_path, volume_in, model={**POSITION, "prediction_bound": 2.0**20})
    assert main(["verify", str(tmp_path / "job.yaml"), "--recompute", "0.01"]) == 0


def test_a_mask_that_lay_elsewhere_is_refused(volume_in, tmp_path, capsys):
    """By another voxel size of the input, which was put back since."""
    write_volume(tmp_path / "mask", MASK, voxel_size_nm=(16, 16, 16))
    info = volume_in / "info"
    text = info.read_text()
    sizes = json.loads(text)
    sizes["scales"][0]["resolution"] = [16, 16, 16]
    info.write_text(json.dumps(sizes))
    computed(tmp_path, volume_in, mask={"path": "mask"})
    info.write_text(text)
    assert main(["verify", str(tmp_path / "job.yaml"), "--recompute", "0.01", "--deep"]) == 2
    assert "voxel_size_nm" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["encoding", "roi"])
def test_what_the_job_file_leaves_open_is_not_believed(key, volume_in, tmp_path, capsys):
    """It was left to other values by a job file that somebody else has run."""
    output = {"dtype": "uint8", "value_range": [0, 4]}
    sections = {"output": output, "postprocess": [{"operator": "select", "channels": [0]}]}
    other = {"output": {**output, "encoding": "jpeg"}}
    if key == "roi":
        other = {"roi": {"start": [3, -5, 2], "stop": [19, 65, 52]}}
    worker = computed(tmp_path, volume_in, **{**sections, **other})
    if key == "roi":
        worker.state.replace_job(worker.job.model_copy(update={"input_bounds": worker.job.roi}))
    values = job_values(volume_in, tmp_path / "out", model=POSITION)
    for section, keys in sections.items():
        values[section] = values.get(section, {}) | keys if isinstance(keys, dict) else keys
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["verify", path, "--recompute", "0.01"]) == 2
    told = capsys.readouterr().err
    assert ("lossy encoding jpeg" if key == "encoding" else "roi") in told


WAVES = """
import torch

class Waves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, batch):
        return torch.sin(2e5 * self.convolution(batch))

def make():
    torch.manual_seed(0)
    return Waves()
"""


def test_an_engine_that_does_not_answer_as_pytorch_confirms_nothing(
    volume_in, tmp_path, monkeypatch, capsys
):
    """It was recorded by somebody who had switched the comparison off."""
    pytest.importorskip("openvino")
    (tmp_path / "waves.py").write_text(WAVES)
    model = {"path": "waves.py:make", "output_channels": 1, "normalize": "unit"}
    with monkeypatch.context() as patch:
        patch.setitem(TOLERANCES, "float32", 1e9)
        patch.setattr(ChannelDistances, "worst", lambda *_: (0.0, 1.0))
        computed(tmp_path, volume_in, model=model, inference={"engine": "openvino"})
    values = job_values(volume_in, tmp_path / "out", model=model, inference={"engine": "auto"})
    path = str(write_job(tmp_path / "job.yaml", values))
    capsys.readouterr()
    assert main(["verify", path, "--recompute", "0.01"]) == 2
    assert "openvino in float32 differs from PyTorch" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "code"), [("repeat", 0), ("source", 2)])
def test_where_the_outputs_voxels_lie_is_found_anew(change, code, volume_in, tmp_path):
    """It is no part of the fingerprint, and somebody else's would give another volume."""
    model = {**POSITION, "voxel_size_nm": [20, 20, 20]}
    sections = {"input": {"resample": {"order": 1}}, "output": {"voxel_size_nm": "input"}}
    worker = computed(tmp_path, volume_in, model=model, **sections)
    to_output = worker.job.to_output
    if change == "repeat":
        changed = replace(to_output, repeat=(2, 2, 2))
    else:
        changed = replace(to_output, source=to_output.source.translate((1, 0, 0)))
    worker.state.replace_job(worker.job.model_copy(update={"to_output": changed}))
    assert main(["verify", str(tmp_path / "job.yaml"), "--recompute", "0.1"]) == code


@pytest.mark.parametrize(
    "changes",
    [
        {"input_block_shape": [0, 16, 16]},
        {"to_output": {"repeat": [0, 1, 1]}},
        {"further_inputs": [FURTHER_INPUT]},
        {"head_bounds": [1.0, 2.0]},
        {"prediction_bound": 0.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("command", ["status", "verify", "run"])
def test_numbers_in_the_record_that_cannot_be_are_told(
    command, changes, volume_in, tmp_path, capsys
):
    model = {**POSITION, "voxel_size_nm": [20, 20, 20]}
    sections = {"input": {"resample": {"order": 1}}, "output": {"voxel_size_nm": "input"}}
    computed(tmp_path, volume_in, model=model, **sections)
    record = tmp_path / "out" / "_beam_inference" / "job.json"
    values = json.loads(open_record(record.read_bytes()))
    for key, change in changes.items():
        values[key] = values[key] | change if isinstance(change, dict) else change
    record.write_text(seal_record(json.dumps(values)))
    capsys.readouterr()
    assert main([command, str(tmp_path / "job.yaml")]) == 2
    told = capsys.readouterr().err
    assert "job.json" in told
    assert "not foreseen" not in told
