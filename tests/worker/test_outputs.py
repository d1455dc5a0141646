"""Jobs with several outputs, in one pass: against single jobs, and against NumPy on the whole."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from helpers import (
    TOYS,
    job_values,
    read_volume,
    toy,
    truncated,
    window_of,
    write_job,
    write_volume,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.chunks import cut_out
from scipy.ndimage import gaussian_filter1d
from toy_networks import ConvHeads, Heads

from beam_inference import prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.errors import (
    AlignmentError,
    ConfigError,
    ModelContractError,
    StateError,
    VolumeError,
)
from beam_inference.job.verification import verify
from beam_inference.worker.worker import Worker

HEADS = [
    {"key": 0, "channels": 2},
    {"key": 1, "activation": "sigmoid"},
]
SHAPE = (20, 40, 44)


@pytest.fixture
def source(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)
    return write_volume(tmp_path / "in", array)


def values_of(source, target, heads=HEADS, outputs=None, network="heads", **sections):
    model = toy(network, heads=heads, normalize="unit", **sections.pop("model", {}))
    values = job_values(source, target, model=model, **sections)
    return values | {"outputs": outputs or {}}


def do_all(launch):
    """All chunks, without Beam: in both stages where there are two."""
    worker = Worker(launch)
    job = launch.read_job()
    chunks = range(job.plan.chunks.count)
    records = []
    if job.plan.exchange is not None:
        records += worker.sum_chunks(chunks)
        records += worker.merge_seams(chunks)
    else:
        records += worker.infer_chunks(chunks)
    assert {record.outcome for record in records} <= {"done", "summed"}
    return job


def run(values, folder):
    return do_all(prepare(parse_job(values, folder)))


@pytest.mark.parametrize(
    ("seams", "network"),
    [("recompute", "heads"), ("exchange", "heads_by_name"), ("crop", "heads")],
)
def test_each_head_has_the_bits_of_a_job_with_that_head_alone(source, tmp_path, seams, network):
    names = {"heads": (0, 1), "heads_by_name": ("places", "waves")}[network]
    heads = [{**head, "key": key} for head, key in zip(HEADS, names, strict=True)]
    inference = {"seams": seams}
    # by seams: crop an operator's halo changes the lattices of chunks, of all outputs
    smooth = [{"operator": "smooth", "sigma": [0, 0.5, 0.5]}] if seams != "crop" else []
    outputs = {
        "waves": {
            "path": f"{tmp_path}/waves",
            "head": names[1],
            "dtype": "uint8",
            "block_shape": [16, 32, 32],
        },
        "labels": {
            "path": f"{tmp_path}/labels",
            "head": names[0],
            "dtype": "uint8",
            "format": "zarr3",
            "block_shape": [8, 16, 16],
            "postprocess": [*smooth, {"operator": "argmax"}],
        },
        "all": {"path": f"{tmp_path}/all", "block_shape": [16, 16, 16]},
    }
    values = values_of(
        source,
        tmp_path / "places",
        heads,
        outputs,
        network,
        inference=inference,
        output={"head": names[0]},
    )
    run(values, tmp_path)
    singles = {
        "places": (heads[:1], {"head": names[0]}, []),
        "waves": (heads[1:], outputs["waves"], []),
        "labels": (heads[:1], outputs["labels"], outputs["labels"]["postprocess"]),
    }
    for name, (some, output, postprocess) in singles.items():
        keys = {key: value for key, value in output.items() if key not in ("path", "postprocess")}
        target = tmp_path / f"{name}-alone"
        single = values_of(source, target, some, None, network, inference=inference, output=keys)
        run(single | {"postprocess": postprocess}, tmp_path)
        np.testing.assert_array_equal(read_volume(tmp_path / name), read_volume(target), name)
    both = read_volume(tmp_path / "all")
    np.testing.assert_array_equal(both[:2], read_volume(tmp_path / "places"))
    job = prepare(parse_job(values, tmp_path)).read_job()
    assert job.sum_bounds == (64.0, 1.0)  # of the head with an activation: 1, whatever the other


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.differing_executors])
@given(
    chunk=st.tuples(*[st.sampled_from([1, 2, 3])] * 3),
    blocks=st.lists(st.tuples(*[st.sampled_from([4, 8])] * 3), min_size=2, max_size=2),
    overlap=st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 5)),
    blend=st.sampled_from(["bump", "constant", {"gaussian": 0.2, "floor": "monai"}]),
    lattice=st.sampled_from(["stride", "spread", "pad"]),
    masked=st.booleans(),
    halo=st.booleans(),
)
def test_outputs_are_those_of_the_whole_volume_whatever_the_chunks(
    tmp_path_factory, chunk, blocks, overlap, blend, lattice, masked, halo
):
    """Against the predictions of all patches, added up in float64 without chunks."""
    folder = tmp_path_factory.mktemp("job")
    array = np.random.default_rng(0).integers(0, 256, (9, 22, 19), dtype=np.uint8)
    source = write_volume(folder / "in", array)
    write_volume(folder / "mask", (array > 99).astype(np.uint8))
    found = []
    for seams in ("recompute", "exchange"):
        out = folder / seams
        outputs = {
            "waves": {
                "path": f"{out}-waves",
                "head": 1,
                "block_shape": list(blocks[1]),
                "postprocess": [{"operator": "smooth", "sigma": [0, 0, 0.4]}] if halo else [],
            },
        }
        values = values_of(
            source,
            out,
            outputs=outputs,
            output={"head": 0, "block_shape": list(blocks[0])},
            inference={
                "seams": seams,
                "chunk_shape": [8 * n for n in chunk],
                "patch_shape": [6, 10, 10],
                "patch_overlap": list(overlap),
                "blend": blend,
                "lattice": lattice,
            },
        )
        mask = {"mask": {"path": f"{folder}/mask", "fill_value": 3}} if masked else {}
        job = run(values | mask, folder)
        found.append((read_volume(out), read_volume(f"{out}-waves")))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    expected = whole_volume(array, job)
    expected = expected[(slice(None), *job.plan.volume.slices_in(job.plan.lattice.domain))]
    if halo:
        expected[2:] = gaussian_filter1d(expected[2:], 0.4, axis=3, mode="nearest", truncate=4)
    if masked:
        expected[:, array <= 99] = 3
    np.testing.assert_allclose(found[0][0], expected[:2], atol=1e-4)  # of 64
    np.testing.assert_allclose(found[0][1], expected[2:], atol=1e-5)


def whole_volume(array, job):
    """Both heads over the domain of a whole volume, blended in float64."""
    plan = job.plan
    lattice = plan.lattice
    total = np.zeros((3, *lattice.domain.shape))
    weights = np.zeros(lattice.domain.shape)
    window = window_of(lattice.patch_shape, job.config.inference.window)
    for index in np.ndindex(*(axis.count for axis in lattice.axes)):
        box = lattice.patch_box(index)
        patch = cut_out(array, plan, box).astype(np.float32) / 255
        with torch.inference_mode():
            places, waves, _ = Heads()(torch.from_numpy(patch[None]))
        answer = np.concatenate([places[0], torch.sigmoid(waves)[0]]).astype(np.float64)
        where = box.slices_in(lattice.domain)
        total[(slice(None), *where)] += answer * window
        weights[where] += window
    return total / weights


@pytest.mark.parametrize("seams", ["recompute", "exchange"])
def test_every_patch_is_computed_once_for_all_outputs(source, tmp_path, seams, monkeypatch):
    calls = []
    for outputs in (0, 2):
        log = tmp_path / f"calls{outputs}"
        monkeypatch.setenv("TOY_NETWORK_LOG", str(log))
        further = {
            f"n{n}": {"path": f"{tmp_path}/{outputs}-{n}", "head": n} for n in range(outputs)
        }
        heads = [{**head, "prediction_bound": 64} for head in HEADS]
        values = values_of(
            source,
            tmp_path / f"out{outputs}",
            heads,
            further,
            inference={"seams": seams},
        )
        launch = prepare(parse_job(values, tmp_path))
        log.unlink()
        do_all(launch)
        calls.append(len(log.read_text().splitlines()))
    assert calls[0] == calls[1] > 0


@pytest.mark.slow
def test_a_job_goes_on_where_it_stopped_and_every_output_is_verified(source, tmp_path):
    outputs = {"waves": {"path": f"{tmp_path}/waves", "head": 1, "pyramid": True}}
    values = values_of(
        source,
        tmp_path / "out",
        outputs=outputs,
        output={"head": 0},
        inference={"seams": "exchange"},
    )
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", path]) == 0
    assert main(["verify", path, "--deep"]) == 0
    assert main(["verify", path, "--recompute", "1"]) == 0
    assert main(["status", path]) == 0
    assert main(["view", path, "--link"]) == 0
    assert main(["report", path, "--to", str(tmp_path / "report.html")]) == 0
    assert len(json.loads((tmp_path / "waves/info").read_text())["scales"]) > 1
    for name in ("out", "waves"):
        assert main(["show", str(tmp_path / name)]) == 0
        assert main(["reproduce", str(tmp_path / name), "--sample", "1", "--trust_code"]) == 0
    first = read_volume(tmp_path / "waves"), read_volume(tmp_path / "out")
    # a damaged block of the further output is found, and its chunk done again
    scale = (
        tmp_path / "waves" / json.loads((tmp_path / "waves/info").read_text())["scales"][0]["key"]
    )
    block = sorted(scale.iterdir())[0]
    with truncated(block):
        assert main(["verify", path, "--deep"]) != 0
        assert main(["verify", path, "--recompute", "1"]) != 0
    # without a receipt for one chunk both outputs are written again, to the same bits
    receipts = sorted((tmp_path / "out/_beam_inference/receipts").rglob("*.json"))
    receipts[0].unlink()
    shutil.copy(block, tmp_path / "kept")
    block.unlink()
    assert main(["run", path]) == 0
    assert main(["verify", path, "--deep"]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "waves"), first[0])
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), first[1])


def test_a_receipt_without_an_output_does_not_count(source, tmp_path):
    outputs = {"waves": {"path": f"{tmp_path}/waves", "head": 1}}
    values = values_of(source, tmp_path / "out", outputs=outputs, inference={"seams": "recompute"})
    launch = prepare(parse_job(values, tmp_path))
    job = do_all(launch)
    file = sorted((tmp_path / "out/_beam_inference/receipts").rglob("*.json"))[0]
    record = json.loads(file.read_text())
    del record["seal"]
    for parts in ({}, {"outputs.waves": []}, {"outputs.other": record["parts"]}):
        file.write_text(json.dumps(record | {"further_parts": parts}))
        report = verify(job, launch.state())
        assert not report.complete
        assert "its receipt names" in report.wrong[0]
    shutil.rmtree(tmp_path / "waves")
    file.write_text(json.dumps(record))
    with pytest.raises(StateError, match="there is no output at .*waves"):
        prepare(parse_job(values, tmp_path))


def test_outputs_are_part_of_the_fingerprint_and_their_places_are_not(source, tmp_path):
    def fingerprint(number, outputs, heads=HEADS, **output):
        values = values_of(source, tmp_path / f"o{number}", heads, outputs, output=output)
        return prepare(parse_job(values, tmp_path)).read_job().fingerprint

    def further(place, **keys):
        return {"a": {"path": f"{tmp_path}/{place}", **keys}}

    prints = [
        fingerprint(1, {}),
        fingerprint(2, further("w2", head=1)),
        fingerprint(3, further("w3", head=0)),
        fingerprint(4, further("w4", head=1, dtype="uint8")),
        fingerprint(5, {}, head=0),
        fingerprint(6, {}, heads=[HEADS[0], {**HEADS[1], "prediction_bound": 8}]),
        fingerprint(7, further("w7", head=0, postprocess=[{"operator": "sigmoid"}])),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(8, further("w8", head=1)) == prints[1]


def test_a_job_without_heads_may_have_several_outputs(source, tmp_path):
    values = job_values(source, tmp_path / "out", model=toy("three", output_channels=3))
    outputs = {
        "labels": {
            "path": f"{tmp_path}/labels",
            "dtype": "uint8",
            "block_shape": [16, 16, 16],
            "postprocess": [{"operator": "argmax"}],
        }
    }
    mask = write_volume(tmp_path / "mask", np.eye(40, dtype=np.uint8)[None].repeat(20, 0))
    run(values | {"outputs": outputs, "mask": {"path": mask, "fill_value": 2}}, tmp_path)
    found = read_volume(tmp_path / "out")
    kept = np.zeros(SHAPE, bool)
    kept[:, :, :40] = np.eye(40, dtype=bool)
    expected = np.where(kept, found.argmax(0), 2)
    np.testing.assert_array_equal(read_volume(tmp_path / "labels")[0], expected)
    assert (found[:, ~kept] == 2).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"outputs": {"a": {"path": "out"}}}, ConfigError, "outputs.a.path .*out is output"),
        ({"outputs": {"a": {"path": "out/a"}}}, ConfigError, "outputs.a.path .* is output"),
        ({"outputs": {"a": {"path": "in"}}}, ConfigError, "outputs.a.path .* is the input"),
        ({"outputs": {"a": {"path": "a", "head": 7}}}, ConfigError, "outputs.a.head: 7 is not"),
        ({"outputs": {"a": {"path": "a", "hed": 7}}}, ConfigError, "outputs.a.hed: unknown key"),
        ({"outputs": {"a b": {"path": "a"}}}, ConfigError, "outputs.a b"),
        (
            {"outputs": {"a": {"path": "a", "head": 0, "dtype": "uint8"}}},
            ConfigError,
            "outputs.a.value_range is needed",
        ),
        (
            {"outputs": {"a": {"path": "a", "bounds": {"start": [0, 0, 0], "stop": [9, 9, 9]}}}},
            ConfigError,
            "bounds is that of output, which all volumes have",
        ),
        (
            {"outputs": {"a": {"path": "a", "block_shape": [16, 24, 16]}}},
            AlignmentError,
            "not a multiple",
        ),
        (
            {
                "outputs": {
                    "a": {"path": "a", "postprocess": [{"operator": "smooth", "sigma": [1, 0, 0]}]}
                },
                "seams": "crop",
            },
            ConfigError,
            "operators that look beyond a voxel move the seams",
        ),
        ({"outputs": {"a": {"path": "other"}}}, VolumeError, "outputs.a: the volume .* bounds"),
        ({"heads": [{"key": 9}]}, ModelContractError, "returns no 9, .* a tuple of 3 arrays"),
        ({"heads": [{"key": "w"}]}, ModelContractError, "returns no 'w'"),
        ({"heads": [{"key": 0}]}, ModelContractError, r"the head 0 .* shape \[.*2, 8, 16, 16\]"),
        (
            {"heads": [{"key": 0, "channels": 2}, {"key": 2}]},
            ModelContractError,
            r"head 2 of the network has \[8, 16, 8\] voxels, and the head 0 has \[8, 16, 16\]",
        ),
        ({"heads": [{"key": 0}, {"key": 0}]}, ConfigError, "names one twice"),
        ({"heads": [{"key": -1}]}, ConfigError, "heads.0.key"),
        ({"heads": []}, ConfigError, "heads"),
        ({"heads": [{"key": 0, "channels": "x"}]}, ConfigError, "heads.0.channels"),
        ({"activation": "sigmoid"}, ConfigError, "activation: sigmoid does not go with heads"),
        ({"prediction_bound": 3}, ConfigError, "prediction_bound does not go with heads"),
        ({"output_channels": 7}, ConfigError, "3 channels together, output_channels says 7"),
        ({"path": "identity"}, ConfigError, "identity needs as many"),
        ({"path": f"{TOYS}:same"}, ModelContractError, "returns one Tensor, no tuple"),
    ],
)
def test_mistakes_end_in_one_message_before_anything_is_created(
    source, tmp_path, change, error, message
):
    write_volume(tmp_path / "other", np.zeros((9, 9, 9), np.float32), block_shape=(16, 16, 16))
    (tmp_path / "other").rename(tmp_path / "kept")
    heads = change.pop("heads", HEADS)
    outputs = change.pop("outputs", None)
    if outputs == {"a": {"path": "other"}}:
        (tmp_path / "kept").rename(tmp_path / "other")
        outputs["a"] |= {"head": 1, "block_shape": [16, 16, 16]}
    inference = {"seams": change.pop("seams", "exact")}
    values = values_of(source, tmp_path / "out", heads, outputs, model=change, inference=inference)
    with pytest.raises(error, match=message):
        prepare(parse_job(values, tmp_path))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "a").exists()


def save_network(network, kind, folder):
    """Save a network as a file of a kind; the model section of a job that names it."""
    example = torch.zeros(2, 1, 8, 16, 16)
    if kind == "torchscript":
        torch.jit.script(network).save(str(folder / "n.pt"))
        return {"path": "n.pt"}
    if kind == "export":
        shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
        program = torch.export.export(network, (example,), dynamic_shapes=shapes)
        torch.export.save(program, folder / "n.pt2")
        return {"path": "n.pt2"}
    if kind in ("onnx", "xml"):
        names = ["first", "second"]
        program = torch.onnx.export(
            network, (example,), dynamo=True, verbose=False, output_names=names
        )
        program.save(folder / "n.onnx", external_data=False)
    if kind == "xml":
        import openvino

        openvino.save_model(
            openvino.convert_model(folder / "n.onnx"), folder / "n.xml", compress_to_fp16=False
        )
    return {"path": f"n.{kind}"} if kind in ("onnx", "xml") else None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchscript", "export", "module", "onnx", "xml"])
@pytest.mark.parametrize("engine", ["torch", "openvino", "onnxruntime"])
def test_the_engines_give_the_heads_that_pytorch_gives(source, tmp_path, kind, engine):
    network = ConvHeads().eval()
    heads = [{"key": 1, "channels": 1}, {"key": 0, "channels": 2, "activation": "softmax"}]
    model = toy("conv_heads")
    if kind in ("onnx", "xml") and engine == "torch":
        pytest.skip("PyTorch reads neither")
    if kind == "xml" and engine != "openvino":
        pytest.skip("of OpenVINO's own")
    if kind == "torchscript" and engine == "onnxruntime":
        pytest.skip("TorchScript cannot be exported to ONNX")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = save_network(network, kind, tmp_path) or model
    if kind == "onnx":
        heads[0]["key"] = "second"
    outputs = {"classes": {"path": f"{tmp_path}/classes", "head": 0}}
    output = {"head": heads[0]["key"]}
    inference = {"engine": engine, "chunk_shape": [32, 48, 48]}
    values = job_values(source, tmp_path / "out", output=output, inference=inference)
    values |= {"model": {**model, "heads": heads, "normalize": "unit"}, "outputs": outputs}
    run(values, tmp_path)
    plain = values_of(
        source,
        tmp_path / "o2",
        [{**heads[0], "key": 1}, heads[1]],
        None,
        "conv_heads",
        inference={"chunk_shape": [32, 48, 48]},
    )
    run(plain, tmp_path)
    expected = read_volume(tmp_path / "o2")
    np.testing.assert_allclose(read_volume(tmp_path / "out"), expected[:1], atol=1e-4)
    np.testing.assert_allclose(read_volume(tmp_path / "classes"), expected[1:], atol=1e-5)
