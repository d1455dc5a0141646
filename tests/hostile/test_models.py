"""Networks and weights that were cut off, damaged or made to do harm, as ``run`` is given them.

The numbers in the ids are those of the list of hostile cases.
"""

from __future__ import annotations

import http.server
import io
import json
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import toy_networks
from helpers import job_values, toy, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.config.network import Network
from beam_inference.engines.loading import load_predictor
from beam_inference.errors import ModelContractError, WorkerFault
from beam_inference.models.fetch import local_model
from beam_inference.models.loading import load_network
from beam_inference.models.weights import load_checkpoint, load_weights

SHAPE = (8, 16, 16)
ZIP_END = 22
"""Bytes of the record that ends a zip archive."""


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.fixture
def volume(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)
    write_volume(tmp_path / "in", array)
    return tmp_path / "in"


@pytest.fixture
def write(volume, tmp_path):
    """A function that writes a job of one patch with a network, and returns its path."""

    def make(model, **inference):
        inference = {"patch_overlap": [0, 0, 0], "chunk_shape": [16, 16, 16], **inference}
        sections = {"model": model, "inference": {**inference, "batch_size": 1}}
        return str(
            write_job(tmp_path / "job.yaml", job_values(volume, tmp_path / "out", **sections))
        )

    return make


@pytest.fixture
def planted(tmp_path):
    """A path that hostile code would make."""
    return tmp_path / "planted"


@pytest.fixture
def refuse(write, tmp_path, planted, capfd):
    """A function that runs a job, checks that it ends in one message, and returns it."""

    def check(model, **inference):
        code = main(["run", write(model, **inference)])
        told = capfd.readouterr().err
        assert code == 2, told
        assert not planted.exists(), "planted code ran"
        assert not (tmp_path / "out").exists()
        assert told.count("error: ") == 1
        assert "Traceback" not in told
        assert "not foreseen" not in told
        assert len(told) < 2000
        return told

    return check


@pytest.fixture
def complete(write):
    """A function that runs a job to its end."""

    def check(model, **inference):
        assert main(["run", write(model, **inference)]) == 0

    return check


def of_file(path, **keys):
    return {"path": str(path), "output_channels": 2, **keys}


def with_weights(path, **keys):
    return toy("conv", output_channels=2, weights=str(path), **keys)


# ------------------------------------------------------------------------------------- pickles


@pytest.mark.parametrize(
    ("save", "name"),
    [
        pytest.param(torch.save, "net.pt", id="180"),
        pytest.param(lambda bomb, path: path.write_bytes(pickle.dumps(bomb)), "net.pt", id="181"),
        pytest.param(torch.save, "w.pt", id="182"),
        pytest.param(lambda bomb, path: path.write_bytes(pickle.dumps(bomb)), "w.pt", id="183"),
        pytest.param(torch.save, "w.safetensors", id="184"),
    ],
)
def test_pickled_code(save, name, tmp_path, planted, refuse):
    path = tmp_path / name
    save(Bomb(planted), path)
    refuse(of_file(path) if name == "net.pt" else with_weights(path))


# --------------------------------------------------------------------------------- safetensors


@pytest.fixture
def tensors(tmp_path):
    """A sound file of weights, and its header and data."""
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file(toy_networks.conv().state_dict(), path)
    content = path.read_bytes()
    length = struct.unpack_from("<Q", content)[0]
    return path, json.loads(content[8 : 8 + length]), content[8 + length :]


def safetensors_bytes(header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_185_sound_safetensors(tensors, complete):
    complete(with_weights(tensors[0]))


def changed(header, **keys):
    name = next(name for name in header if name != "__metadata__")
    return header | {name: header[name] | keys}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda h, d: safetensors_bytes(h, d, 1 << 63), id="186"),
        pytest.param(lambda h, d: safetensors_bytes(h, d, 10**6), id="187"),
        pytest.param(lambda h, d: safetensors_bytes(h, d, len(json.dumps(h)) + 9), id="188"),
        pytest.param(lambda h, d: safetensors_bytes(h, d, 20), id="190"),
        pytest.param(lambda h, d: safetensors_bytes(h, d[: len(d) // 2]), id="191"),
        pytest.param(lambda h, d: safetensors_bytes(b"{no json at all", d), id="192"),
        pytest.param(
            lambda h, d: safetensors_bytes(changed(h, data_offsets=[0, 10**9]), d), id="193"
        ),
        pytest.param(lambda h, d: safetensors_bytes(changed(h, dtype="F12"), d), id="194"),
        pytest.param(lambda h, d: b"", id="195"),
        pytest.param(lambda h, d: safetensors_bytes(h, d)[:8], id="196"),
    ],
)
def test_safetensors(make, tensors, tmp_path, refuse):
    path, header, data = tensors
    path.write_bytes(make(header, data))
    refuse(with_weights(path))


def test_197_weights_of_nan(tmp_path, refuse):
    state = {
        name: torch.full_like(t, np.nan) for name, t in toy_networks.conv().state_dict().items()
    }
    torch.save(state, tmp_path / "w.pt")
    assert "NaN" in refuse(with_weights(tmp_path / "w.pt"))


# --------------------------------------------------------------------------------- TorchScript


@pytest.fixture
def script(tmp_path):
    """A TorchScript file."""
    path = tmp_path / "net.ts"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3, padding=1))).save(str(path))
    return path


def overwritten(content, at):
    return content[:at] + bytes(range(100)) + content[at + 100 :]


def without_directory(content):
    start = content.index(b"PK\x01\x02")
    return content[:start] + bytes(len(content) - start - ZIP_END) + content[-ZIP_END:]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[: len(content) // 2], id="198"),
        # 199 was accepted: PyTorch compares no checksums
        pytest.param(lambda content: overwritten(content, content.index(b"FB") + 80), id="199"),
        pytest.param(lambda content: b"", id="201"),
        pytest.param(lambda content: content[-ZIP_END:], id="202"),
        pytest.param(without_directory, id="203"),
    ],
)
def test_damaged_torchscript(damage, script, refuse):
    script.write_bytes(damage(script.read_bytes()))
    refuse(of_file(script))


def test_204_a_bomb_named_as_torchscript_is(tmp_path, refuse):
    with zipfile.ZipFile(tmp_path / "net.ts", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/constants.pkl", bytes(20 << 20))
    refuse(of_file(tmp_path / "net.ts"))


# -------------------------------------------------------------------------------- torch.export


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The members of a sound .pt2 file."""
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    example = (torch.zeros(1, 1, *SHAPE),)
    torch.export.save(torch.export.export(toy_networks.conv().eval(), example), path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_zip(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def payloads(key, **payload):
    return json.dumps(
        {"config": {key: {"is_param": False, "tensor_meta": None, **payload}}}
    ).encode()


WEIGHTS = "net/data/weights/model_weights_config.json"
CONSTANTS = "net/data/constants/model_constants_config.json"


def opaque(members, bomb):
    return members | {
        "net/data/constants/opaque_obj_0": pickle.dumps(bomb),
        CONSTANTS: payloads("a", path_name="opaque_obj_0", use_pickle=True),
    }


def custom(members, bomb):
    return members | {
        "net/data/constants/custom_obj_0": pickle.dumps(bomb),
        CONSTANTS: payloads("a", path_name="custom_obj_0", use_pickle=True),
    }


def pickled_weight(members, bomb):
    config = json.loads(members[WEIGHTS])
    config["config"]["weight"]["use_pickle"] = True
    return members | {
        WEIGHTS: json.dumps(config).encode(),
        "net/data/weights/weight_0": saved(bomb),
    }


def pickled_inputs(members, bomb):
    return members | {"net/data/sample_inputs/model.pt": saved(((bomb,), {}))}


def compiled(members, bomb):
    return members | {"net/data/aotinductor/model/model.so": b"\x7fELF"}


def evaluated_size(members, bomb):
    """A size as an expression: sympy evaluates it as Python."""
    return in_program(
        members,
        lambda p: p["graph_module"]["graph"]["sym_int_values"].update(
            {"a": {"as_expr": {"expr_str": f"__import__('pathlib').Path('{bomb.path}').touch()"}}}
        ),
    )


def called(members, bomb):
    """A node that calls any function of Python that PyTorch's modules have."""

    def change(program):
        node = program["graph_module"]["graph"]["nodes"][0]
        node["target"] = "torch.os.mkdir"
        node["inputs"] = [{"name": "", "arg": {"as_string": str(bomb.path)}, "kind": 1}]

    return in_program(members, change)


def guarded(members, bomb):
    """A condition on the input: PyTorch makes Python code of it."""
    guard = f"__import__('pathlib').Path('{bomb.path}').touch() is None"
    return in_program(members, lambda p: p.update(guards_code=[guard]))


def named(members, bomb):
    """A name that is source code."""
    content = members["net/models/model.json"].decode()
    name = json.dumps(f"x=__import__('pathlib').Path('{bomb.path}').touch()")
    return members | {"net/models/model.json": content.replace('"conv3d"', name).encode()}


def reads_a_file(members, bomb):
    def change(program):
        program["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.aten.from_file.default"

    return in_program(members, change)


def in_program(members, change):
    program = json.loads(members["net/models/model.json"])
    change(program)
    return members | {"net/models/model.json": json.dumps(program).encode()}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(opaque, id="210"),
        pytest.param(custom, id="212"),
        pytest.param(pickled_weight, id="217"),
        pytest.param(compiled, id="227"),
        pickled_inputs,
        evaluated_size,
        called,
        guarded,
        named,
        reads_a_file,
        lambda members, bomb: members | {"net/data/weights/../evil": b""},
        lambda members, bomb: members | {"net/unknown": b""},
        lambda members, bomb: members | {"other/data/weights/weight_9": b""},
        lambda members, bomb: members | {WEIGHTS: b"[" * 10**5},
        lambda members, bomb: members | {"net/models/model.json": b"\xff"},
    ],
)
def test_exported_networks_with_code(change, program, tmp_path, planted, refuse):
    members = change(program, Bomb(planted))
    refuse(of_file(write_zip(tmp_path / "net.pt2", members)))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[: len(content) // 2], id="231"),
        pytest.param(lambda content: b"nothing of the kind\n" * 50, id="233"),
        lambda content: b"",
        lambda content: content + content,
        lambda content: overwritten(content, 100),
    ],
)
def test_damaged_exported_networks(damage, program, tmp_path, refuse):
    path = write_zip(tmp_path / "net.pt2", program)
    path.write_bytes(damage(path.read_bytes()))
    refuse(of_file(path))


class Sparse(torch.nn.Module):
    """Makes a dense tensor of an index that nothing holds against its bounds."""

    def __init__(self):
        super().__init__()
        self.conv = toy_networks.conv()
        self.register_buffer("index", torch.tensor([[1]]))

    def forward(self, batch):
        sparse = torch.ops.aten._sparse_coo_tensor_unsafe(self.index, torch.ones(1), [4])
        return self.conv(batch) + torch.ops.aten._to_dense(sparse)[0]


class Counting(torch.nn.Module):
    """Adds to its result how many batches it has seen."""

    def __init__(self):
        super().__init__()
        self.conv = toy_networks.conv()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch):
        self.seen.add_(1)
        return self.conv(batch) + self.seen


def export(module, path):
    torch.export.save(torch.export.export(module.eval(), (torch.zeros(1, 1, *SHAPE),)), path)
    return of_file(path)


def test_operators_that_do_not_check_bounds(tmp_path, refuse):
    told = refuse(export(Sparse(), tmp_path / "net.pt2"))
    assert "_sparse_coo_tensor_unsafe" in told


def odd_tensors():
    sparse = torch.ops.aten._sparse_coo_tensor_unsafe(  # its index lies far outside of it
        torch.tensor([[10**9], [0], [0], [0], [0]]), torch.ones(1), [2, 1, 3, 3, 3]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch will have no quantised tensors one day
        quantised = torch.quantize_per_tensor(torch.ones(2, 1, 3, 3, 3), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(1, 3, 3, 3), torch.ones(1, 2, 3, 3)])
    return {"a sparse tensor": sparse, "a quantised tensor": quantised, "a nested tensor": nested}


class Adding(torch.nn.Module):
    """Adds a buffer to its result."""

    def __init__(self):
        super().__init__()
        self.conv = toy_networks.conv()
        self.register_buffer("shift", torch.zeros(2, 1, 1, 1, 1))

    def forward(self, batch):
        return self.conv(batch) + self.shift.sum()


@pytest.mark.filterwarnings("ignore")  # of PyTorch, about prototypes
@pytest.mark.parametrize("kind", odd_tensors())
@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_whose_indices_are_believed(kind, legacy, tmp_path, refuse):
    module = Adding() if legacy else toy_networks.conv()
    state = {
        **module.state_dict(keep_vars=True),
        "shift" if legacy else "weight": odd_tensors()[kind],
    }
    torch.save(state, tmp_path / "w.pt")
    if legacy:
        exported = tmp_path / "sound.pt2"
        export(module, exported)
        with zipfile.ZipFile(exported) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        root = exported.stem
        members[f"{root}/data/weights/model.pt"] = (tmp_path / "w.pt").read_bytes()
        model = of_file(write_zip(tmp_path / "net.pt2", members))
    else:
        model = with_weights(tmp_path / "w.pt")
    assert kind in refuse(model)


def test_exported_networks_that_change_themselves(tmp_path, refuse):
    assert "order in which patches" in refuse(export(Counting(), tmp_path / "net.pt2"))


@pytest.mark.parametrize("guard", ["\n L['x'] ", "L['absent'].size()[0] <= 1 / 0", "L['x'] ** 2"])
def test_guards_that_make_no_python(guard, program, tmp_path, refuse):
    members = in_program(program, lambda p: p.update(guards_code=[guard]))
    refuse(of_file(write_zip(tmp_path / "net.pt2", members)))


@pytest.mark.parametrize("end", ["?.onnx", "#.onnx"])
def test_file_urls_with_a_part_that_names_no_file(end, tmp_path, refuse):
    (tmp_path / "net").touch()
    told = refuse(of_file(f"file://{tmp_path}/net{end}"), engine="onnxruntime")
    assert "%3F" in told


@pytest.mark.parametrize("absent", ["net/models/model.json", WEIGHTS, "net/archive_version"])
def test_exported_networks_that_lack_something(absent, program, tmp_path, refuse):
    members = {name: content for name, content in program.items() if name != absent}
    refuse(of_file(write_zip(tmp_path / "net.pt2", members)))


def test_236_a_sound_exported_network(program, tmp_path, complete):
    complete(of_file(write_zip(tmp_path / "net.pt2", program)))


# ---------------------------------------------------------------------------------------- ONNX


@pytest.fixture
def onnx_model():
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    shapes = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, channels, *SHAPE])
        for name, channels in (("x", 1), ("y", 2))
    ]
    values = np.random.default_rng(0).random((2, 1, 3, 3, 3), np.float32)
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 6)
    graph = onnx.helper.make_graph(
        [node], "net", shapes[:1], shapes[1:], [onnx.numpy_helper.from_array(values, "w")]
    )
    opset = onnx.helper.make_opsetid("", 17)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8)


def with_external_data(model, folder, location):
    """The model's bytes with its weights in another file, the value before its key."""
    tensor = model.graph.initializer[0]
    (folder / location).write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = 1
    entry = tensor.external_data.add()
    entry.key = "location"
    entry.value = location
    usual = entry.SerializeToString()
    key = b"\x0a\x08location"
    assert usual.startswith(key)
    content = model.SerializeToString()
    assert usual in content
    return content.replace(usual, usual.removeprefix(key) + key)


ENGINES = ["onnxruntime", "openvino"]


def test_239_a_sound_onnx_file(onnx_model, tmp_path, complete):
    (tmp_path / "net.onnx").write_bytes(onnx_model.SerializeToString())
    complete(of_file(tmp_path / "net.onnx"), engine="auto")


def test_241_external_data(onnx_model, tmp_path, refuse):
    import onnx

    onnx.save(
        onnx_model,
        tmp_path / "net.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    assert "keeps its weights in another file" in refuse(
        of_file(tmp_path / "net.onnx"), engine="onnxruntime"
    )


@pytest.mark.parametrize("engine", ENGINES)  # 243 246
@pytest.mark.parametrize("location", ["w.bin", "../outside.bin"])  # 248 251
def test_243_to_251_external_data_with_fields_in_another_order(
    location, engine, onnx_model, tmp_path, refuse
):
    folder = tmp_path / "models"
    folder.mkdir()
    content = with_external_data(onnx_model, folder, location)
    (folder / "net.onnx").write_bytes(content)
    assert "another file" in refuse(of_file(folder / "net.onnx"), engine=engine)


def test_337_weights_cannot_be_exchanged_between_two_launches(onnx_model, tmp_path, refuse):
    (tmp_path / "net.onnx").write_bytes(with_external_data(onnx_model, tmp_path, "w.bin"))
    refuse(of_file(tmp_path / "net.onnx"), engine="onnxruntime")


@pytest.mark.parametrize(
    ("share", "engine"),
    [
        pytest.param(2, "onnxruntime", id="253"),
        pytest.param(2, "openvino", id="255"),
        pytest.param(10**9, "auto", id="256"),
    ],
)
def test_truncated_onnx(share, engine, onnx_model, tmp_path, refuse):
    content = onnx_model.SerializeToString()
    (tmp_path / "net.onnx").write_bytes(content[: len(content) // share])
    refuse(of_file(tmp_path / "net.onnx"), engine=engine)


# ------------------------------------------------------------------------------------ OpenVINO


@pytest.fixture(scope="module")
def saved_network(tmp_path_factory):
    openvino = pytest.importorskip("openvino")
    folder = tmp_path_factory.mktemp("openvino")
    program = torch.export.export(toy_networks.conv().eval(), (torch.zeros(1, 1, *SHAPE),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, which OpenVINO uses in an old way
        network = openvino.convert_model(program)
    openvino.save_model(network, folder / "net.xml", compress_to_fp16=False)
    return folder


@pytest.fixture
def xml(saved_network, tmp_path):
    for path in saved_network.iterdir():
        shutil.copy(path, tmp_path)
    return tmp_path / "net.xml"


def test_258_a_sound_xml_file(xml, complete):
    complete(of_file(xml), engine="openvino")


ENTITY = b'<!DOCTYPE net [<!ENTITY e SYSTEM "file:///etc/passwd">]><net'


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text.replace(b'offset="0"', b'offset="99999999"'), id="260"),
        pytest.param(lambda text: text.replace(b' size="', b' size="1000000000000000'), id="261"),
        pytest.param(lambda text: text.replace(b"<net", ENTITY, 1), id="265"),
        pytest.param(lambda text: text[: len(text) // 2], id="267"),
        pytest.param(lambda text: b"no XML", id="269"),
        lambda text: b"",
        lambda text: b"<nets/>",
        lambda text: b"\n" + text,
    ],
)
def test_damaged_xml(damage, xml, refuse):
    xml.write_bytes(damage(xml.read_bytes()))
    refuse(of_file(xml), engine="openvino")


def test_270_and_272_a_bin_file_that_is_empty_or_absent(xml, refuse):
    xml.with_suffix(".bin").write_bytes(b"")
    refuse(of_file(xml), engine="openvino")
    xml.with_suffix(".bin").unlink()
    refuse(of_file(xml), engine="openvino")


def test_a_percent_sign_does_not_hide_weights_in_another_file(onnx_model, tmp_path, refuse):
    path = with_external_data(onnx_model, tmp_path, "w.bin")
    hidden = str(path).replace(".onnx", "%2Eonnx")
    refuse(of_file(f"file://{hidden}"), engine="onnxruntime")


def test_the_weights_of_an_xml_file_are_always_named(xml, refuse):
    hidden = str(xml).replace(".xml", "%2Exml")
    assert "model.weights" in refuse(of_file(f"file://{hidden}"), engine="openvino")


def test_an_onnx_file_named_xml_does_not_bring_weights_that_are_not_hashed(
    onnx_model, tmp_path, refuse
):
    (tmp_path / "net.xml").write_bytes(with_external_data(onnx_model, tmp_path, "w.bin"))
    (tmp_path / "net.bin").write_bytes(b"")
    refuse(of_file(tmp_path / "net.xml"), engine="openvino")


def test_an_xml_file_named_onnx_does_not_bring_weights_that_are_not_hashed(xml, refuse):
    path = xml.rename(xml.with_suffix(".onnx"))
    refuse(of_file(path), engine="openvino")


# ------------------------------------------------------- files that change while they are used


PATCH = [16, 16, 16]


def predictor_of(path, **keys):
    model = of_file(path, **keys)
    inference = {"engine": "openvino", "device": "cpu", "batch_size": 1, "patch_shape": PATCH}
    values = job_values("in", "out", model=model, inference=inference)
    job = parse_job(values, Path("/"))
    return load_predictor(job.model, job.inference)


def answer(predictor, batch):
    with predictor.device.session():
        return predictor.device.download(predictor.predict(torch.from_numpy(batch)))().copy()


def test_weights_that_are_written_again_do_not_change_a_loaded_network(tmp_path):
    openvino = pytest.importorskip("openvino")
    shape = [1, 1, *PATCH]
    patch = openvino.opset13.parameter(shape, np.float32)
    constant = openvino.opset13.constant(np.full(shape, 3, np.float32))
    total = openvino.opset13.add(patch, constant)
    openvino.save_model(openvino.Model([total], [patch]), tmp_path / "net.xml", False)
    weights = tmp_path / "net.bin"
    predictor = predictor_of(tmp_path / "net.xml", weights=str(weights), output_channels=1)
    batch = np.zeros(shape, np.float32)
    assert answer(predictor, batch).max() == 3
    with weights.open("r+b") as file:  # in place, as copies are written
        file.write(np.full(shape, 7, np.float32).tobytes())
    assert answer(predictor, batch).max() == 3
    with pytest.raises(WorkerFault, match="changed since they were loaded"):
        answer(predictor, np.zeros((2, *shape[1:]), np.float32))


def test_safetensors_that_are_written_again_do_not_change_a_loaded_network(tmp_path):
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(1, 1000)}, path)
    with torch.device("meta"):
        network = torch.nn.Linear(1000, 1, bias=False)
    load_weights(network, path, allow_pickle=False, replace=True)
    with path.open("r+b") as file:  # in place, as copies are written
        file.seek(-4000, 2)
        file.write(bytes(4000))
    assert (network.weight == 1).all()


def with_attributes():
    tensor = torch.zeros(4, 4)
    tensor.to = 3
    return tensor


@pytest.mark.parametrize(
    "weight",
    [
        lambda: torch.zeros(1, dtype=torch.float16).expand(1 << 40),
        lambda: torch.zeros(4, 4, device="meta"),
        lambda: torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        with_attributes,
    ],
    ids=["takes all memory", "has no values", "is no number", "has attributes"],
)
def test_weights_that_replace_those_of_a_network_are_numbers_of_its_shape(weight, tmp_path):
    torch.save({"weight": weight()}, tmp_path / "state.pt")
    with torch.device("meta"):
        network = torch.nn.Linear(4, 4, bias=False)
    with pytest.raises(ModelContractError):
        load_weights(network, tmp_path / "state.pt", allow_pickle=False, replace=True)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_key_that_takes_for_ever_to_hash(legacy, tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"a": 1}, path, _use_new_zipfile_serialization=not legacy)
    bomb = b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"}h\x00K\x01s."
    if legacy:
        start = path.read_bytes()
        path.write_bytes(start.replace(pickle.dumps({"a": 1}, 2), bomb))
        assert path.stat().st_size > len(start)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("state/data.pkl", bomb)
            archive.writestr("state/version", "3")
    with pytest.raises(ModelContractError, match="keys other than texts"):
        load_checkpoint(path, allow_pickle=False)


class Uninitialised:
    """Is pickled as a tensor of whatever lies in the memory of the process that loads it."""

    def __reduce__(self):
        return torch.FloatTensor, (2, 1, 3, 3, 3)


@pytest.mark.parametrize("former", [False, True])
def test_weights_of_whatever_lies_in_memory(former, tmp_path, refuse):
    state = toy_networks.conv().state_dict() | {"weight": Uninitialised()}
    torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=not former)
    assert "it calls torch FloatTensor" in refuse(with_weights(tmp_path / "w.pt"))


def test_an_xml_file_keeps_nothing_from_one_batch_to_the_next(tmp_path, refuse):
    openvino = pytest.importorskip("openvino")
    operations = openvino.opset13
    shape = [1, 1, *PATCH]
    patch = operations.parameter(shape, np.float32)
    former = operations.read_value(operations.constant(np.zeros(shape, np.float32)), "sum")
    total = operations.add(patch, former)
    network = openvino.Model([total.output(0)], [operations.assign(total, "sum")], [patch])
    openvino.save_model(network, tmp_path / "net.xml", False)
    model = of_file(tmp_path / "net.xml") | {"output_channels": 1}
    assert "keeps sum from one batch to the next" in refuse(model, engine="openvino")


def test_files_that_are_exchanged_while_they_are_loaded(tmp_path, refuse):
    np.save(tmp_path / "w.npy", np.ones(1))
    (tmp_path / "net.py").write_text(
        "import numpy as np\n"
        "def network(weights_path):\n"
        "    weights = np.load(weights_path)\n"
        "    np.save(weights_path, weights + 1)  # as somebody else may do just then\n"
        "    return lambda batch: batch * weights\n"
    )
    model = {"path": f"{tmp_path}/net.py:network", "weights": str(tmp_path / "w.npy")}
    assert "changed while they were loaded" in refuse(model, engine="auto")


@pytest.fixture
def exchanged(tmp_path):
    """A network whose weights are behind a link; a function that loads others in between."""
    for name, value in (("a", 1.0), ("b", 0.5)):
        torch.save({"scale": torch.tensor([value])}, tmp_path / f"{name}.pt")
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Network(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = torch.nn.Parameter(torch.ones(1))\n"
        "    def forward(self, batch):\n"
        "        return batch * self.scale\n"
        "def network():\n"
        "    return Network()\n"
    )
    link = tmp_path / "w.pt"
    link.symlink_to("a.pt")

    def lead_to(name):
        (tmp_path / "draft").symlink_to(name)
        (tmp_path / "draft").replace(link)

    def load(*args, **kwargs):
        lead_to("b.pt")
        try:
            return load_predictor(*args, **kwargs)
        finally:
            lead_to("a.pt")

    model = {"path": f"{tmp_path}/net.py:network", "weights": str(link), "output_channels": 1}
    return model, load


@pytest.mark.parametrize("place", ["launch.engine_trial", "worker.open_job"])
def test_weights_that_are_exchanged_for_the_load_alone(
    exchanged, volume, tmp_path, monkeypatch, capsys, place
):
    model, load = exchanged
    monkeypatch.setattr(f"beam_inference.{place}.load_predictor", load)
    job = str(write_job(tmp_path / "job.yaml", job_values(volume, tmp_path / "out", model=model)))
    assert main(["run", job]) in (1, 2)
    assert "while they were loaded" in str(capsys.readouterr())
    assert main(["status", job]) != 0 or "complete" not in capsys.readouterr().out


# ----------------------------------------------------------------------------------- factories


@pytest.mark.parametrize(
    ("source", "told"),
    [
        pytest.param("raise ValueError('<script>x</script>')", "<script>", id="273"),
        pytest.param("return network()", "RecursionError", id="275"),
        pytest.param("return None", "NoneType", id="276"),
        pytest.param("return (", "SyntaxError", id="278"),
        pytest.param("raise BaseException('odd')", "BaseException: odd", id="279"),
        pytest.param("import sys; sys.exit(0)", "SystemExit: 0", id="392"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise type('Odd', (BaseException,), {})()", "Odd"),
    ],
)
def test_factories(source, told, tmp_path, refuse):
    (tmp_path / "net.py").write_text(f"def network():\n    {source}\n")
    assert told in refuse(of_file(f"{tmp_path}/net.py:network"))


@pytest.mark.parametrize("error", ["SystemExit(0)", "BaseException('odd')", "GeneratorExit()"])
def test_networks_that_raise_more_than_errors(error, tmp_path, refuse):
    source = f"def network():\n    def run(batch):\n        raise {error}\n    return run\n"
    (tmp_path / "net.py").write_text(source)
    assert error.split("(")[0] in refuse(of_file(f"{tmp_path}/net.py:network"), engine="auto")


def test_a_network_that_raises_more_than_errors_as_it_is_prepared(tmp_path, write, capsys):
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def eval(self):\n"
        "        raise BaseException('odd')\n"
        "network = Odd\n"
    )
    assert main(["run", write(of_file(f"{tmp_path}/net.py:network"))]) == 1
    assert "ended the program (BaseException: odd)" in capsys.readouterr().err


def test_274_a_factory_that_is_interrupted(tmp_path, write):
    (tmp_path / "net.py").write_text("def network():\n    raise KeyboardInterrupt\n")
    assert main(["run", write(of_file(f"{tmp_path}/net.py:network"))]) == 130


def test_287_a_factory_in_a_folder_above(tmp_path, complete):
    (tmp_path / "a").mkdir()
    shutil.copy(toy_networks.__file__, tmp_path / "toys.py")
    complete(of_file(f"{tmp_path}/a/../toys.py:conv"))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("os:system", id="288"),
        pytest.param("os:path.join", id="290"),
        pytest.param("{folder}/absent.py:network", id="293"),
        pytest.param("{folder}", id="295"),
        pytest.param("/dev/zero", id="298"),
        pytest.param("https://localhost:1/net.ts?token=s3cret", id="300"),
    ],
)
def test_paths(path, tmp_path, refuse):
    told = refuse(of_file(path.format(folder=tmp_path)), engine="auto")
    assert "s3cret" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "ends",
    [
        pytest.param("os.kill(os.getpid(), 11)", id="282"),
        # 284: nothing in the process can notice it; what is done is in the state, and is nothing
        pytest.param("os._exit(0)", id="284"),
    ],
)
def test_a_factory_that_ends_the_process(ends, tmp_path, write, capsys):
    (tmp_path / "net.py").write_text(f"import os\ndef network():\n    {ends}\n")
    path = write(of_file(f"{tmp_path}/net.py:network"))
    command = [sys.executable, "-m", "beam_inference", "run", path]
    ended = subprocess.run(command, capture_output=True)
    assert ended.returncode in (-11, 0)
    assert main(["status", path]) != 0
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------- URLs


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A server that answers every request with the same file; its URL, and that file's folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "served").mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            return str(tmp_path / "served" / "file")

        def log_message(self, *_):
            pass

    handler = partial(Handler, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("..%2F..%2FPWNED_cache.ts", id="370"),
        pytest.param("..%2F..%2F..%2FPWNED_outside.ts", id="373"),
        pytest.param("{folder}PWNED_absolute.ts", id="376"),
        "%00.ts",
        "%0a%1b[31m.ts",
        "x" * 5000 + ".ts",
    ],
)
def test_urls_whose_last_part_is_a_path(name, served, script, tmp_path):
    script.rename(tmp_path / "served" / "file")
    name = name.format(folder=str(tmp_path).replace("/", "%2F") + "%2F")
    load_network(local_model(Network(path=f"{served}/{name}")))
    found = [path for path in tmp_path.rglob("*.ts") if path.is_file()]
    assert [path.parts[-4] for path in found] == ["temporary"]
