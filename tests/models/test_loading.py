import json
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import toy_networks
from extension import extension_in_this_process
from helpers import job_values

from beam_inference.config.factories import load_object
from beam_inference.config.inference import Inference
from beam_inference.config.job_file import parse_job
from beam_inference.config.network import Network
from beam_inference.engines.choice import describe_engine
from beam_inference.engines.devices import find_accelerator
from beam_inference.engines.loading import load_predictor
from beam_inference.engines.torch_forward import torch_predictor
from beam_inference.errors import ConfigError, DeviceOutOfMemory, ModelContractError, WorkerFault
from beam_inference.models.hashes import model_sha256
from beam_inference.models.local_files import file_sha256
from beam_inference.models.trust import Trust

TOYS = Path(toy_networks.__file__)
BATCH = np.random.default_rng(0).random((2, 1, 4, 6, 8), np.float32)


def config(model, inference=None, folder="/"):
    return parse_job(job_values("in", "out", model=model, inference=inference or {}), Path(folder))


def predict(model, inference=None, batch=BATCH, **options):
    job = config(model, inference)
    predictor = load_predictor(job.model, job.inference, **options)
    with predictor.device.session():
        return predictor.device.download(predictor.predict(predictor.device.upload(batch)))()


def toy(name, **keys):
    return {"path": f"{TOYS}:{name}", "output_channels": 2, **keys}


def expected(module, batch=BATCH):
    with torch.inference_mode():
        return module.eval()(torch.from_numpy(batch)).numpy()


def test_identity():
    np.testing.assert_array_equal(predict({"path": "identity"}), BATCH)
    sigmoid = predict({"path": "identity", "activation": "sigmoid"})
    np.testing.assert_allclose(sigmoid, 1 / (1 + np.exp(-BATCH)), rtol=1e-6)


def test_a_factory_in_a_file_or_a_module(monkeypatch):
    monkeypatch.syspath_prepend(str(TOYS.parent))
    for path in (f"{TOYS}:conv", "toy_networks:conv"):
        np.testing.assert_array_equal(
            predict({"path": path, "output_channels": 2}), expected(toy_networks.conv())
        )


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_activations(activation):
    logits = torch.from_numpy(expected(toy_networks.conv()))
    wanted = logits.sigmoid() if activation == "sigmoid" else logits.softmax(1)
    np.testing.assert_array_equal(predict(toy("conv", activation=activation)), wanted.numpy())


NNUNET_CHECKPOINT = {
    "optimizer_state": None,
    "grad_scaler_state": {"scale": 65536.0},
    "logging": {"ema_fg_dice": [np.float64(0.5), np.float32(0.25)], "lrs": [0.01]},
    "_best_ema": np.float64(0.5),
    "current_epoch": np.int64(3),
    "init_args": {"configuration": "3d_fullres", "fold": 0},
    "trainer_name": "nnUNetTrainer",
    "inference_allowed_mirroring_axes": (0, 1, 2),
    "done": np.bool_(True),
}
"""What nnU-Net saves beside the weights: numbers of NumPy's among it."""


@pytest.fixture
def trained():
    torch.manual_seed(5)
    return torch.nn.Conv3d(1, 2, 3, padding=1)


@pytest.mark.parametrize(
    "kind",
    [
        "state_dict",
        "nested",
        "model",
        "nnU-Net",
        "data_parallel",
        "compiled",
        "compiled data_parallel",
        "Lightning",
        "Lightning compiled",
        "safetensors",
        "safetensors named .pth",
    ],
)
def test_weights_in_every_form(tmp_path, trained, kind):
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pth")
    state = trained.state_dict()
    if kind.startswith("safetensors"):
        safetensors.torch.save_file(state, path)
    elif kind == "nested":
        torch.save({"state_dict": state, "epoch": 3}, path)
    elif kind == "model":
        torch.save({"model": state, "args": {"lr": 0.1}}, path)
    elif kind == "nnU-Net":
        torch.save(NNUNET_CHECKPOINT | {"network_weights": state}, path)
    elif kind.startswith("Lightning"):
        prefix = "net.0." + "_orig_mod." * ("compiled" in kind)
        held = {f"{prefix}{key}": value for key, value in state.items()}
        torch.save({"state_dict": held, "hyper_parameters": {"lr": 0.1}}, path)
    elif "data_parallel" in kind or "compiled" in kind:
        prefix = "_orig_mod." * ("compiled" in kind) + "module." * ("data_parallel" in kind)
        torch.save({f"{prefix}{key}": value for key, value in state.items()}, path)
    else:
        torch.save(state, path)
    np.testing.assert_array_equal(predict(toy("conv", weights=str(path))), expected(trained))


HOLDER = """
import torch

class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.{name} = torch.nn.Conv3d(1, 1, 1)
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return self.{name}(batch) + self.weight
"""


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
@pytest.mark.parametrize("name", ["module", "_orig_mod"])
def test_a_network_may_have_an_attribute_of_a_wrappers_name(tmp_path, name, wrapper, suffix):
    (tmp_path / "net.py").write_text(HOLDER.format(name=name))
    torch.manual_seed(0)
    network = load_object(f"{tmp_path}/net.py:Holder")()
    state = {f"{wrapper}{key}": value for key, value in network.state_dict().items()}
    path = tmp_path / f"w.{suffix}"
    save = safetensors.torch.save_file if suffix == "safetensors" else torch.save
    save(state, path)
    model = {"path": f"{tmp_path}/net.py:Holder", "weights": str(path)}
    np.testing.assert_allclose(predict(model), expected(network), rtol=0, atol=1e-5)


@pytest.mark.parametrize("names", [["net.weight", "net.bias", "loss.weight"], ["", "net.bias"]])
def test_names_are_kept_where_the_networks_own_would_not_be_left(tmp_path, names):
    torch.save(dict.fromkeys(names, torch.ones(1)), tmp_path / "w.pt")
    with pytest.raises(ModelContractError, match=f"do not fit the network: .*{names[1]}"):
        predict(toy("conv", weights=str(tmp_path / "w.pt")))


TIED = """
import torch

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv3d(1, 1, 1)
        self.second = torch.nn.Conv3d(1, 1, 1)
        self.second.weight = self.first.weight

    def forward(self, batch):
        return self.second(self.first(batch))
"""


def test_weights_that_a_network_has_twice(tmp_path):
    """Safetensors holds each tensor once, and tells of what the other name stands for."""
    (tmp_path / "net.py").write_text(TIED)
    network = load_object(f"{tmp_path}/net.py:Tied")()
    safetensors.torch.save_model(network, str(tmp_path / "w.safetensors"))
    model = {"path": f"{tmp_path}/net.py:Tied", "weights": str(tmp_path / "w.safetensors")}
    np.testing.assert_allclose(predict(model), expected(network), rtol=0, atol=1e-5)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    torch.save(toy_networks.flat().state_dict(), tmp_path / "w.pt")
    with pytest.raises(ModelContractError, match="do not fit the network"):
        predict(toy("conv", weights=str(tmp_path / "w.pt")))


def test_complex_weights_do_not_lose_their_imaginary_parts(tmp_path, trained):
    state = {name: tensor.to(torch.complex64) for name, tensor in trained.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ModelContractError, match="weight has complex numbers"):
        predict(toy("conv", weights=str(tmp_path / "w.pt")))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_weights_that_are_no_floating_numbers_are_refused(tmp_path, trained, dtype):
    state = {name: tensor.to(dtype) for name, tensor in trained.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ModelContractError, match="the network's are of a floating type"):
        predict(toy("conv", weights=str(tmp_path / "w.pt")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({1: torch.ones(1)}, "not a state dict: .* found a mapping with the keys 1$"),
        ({"weights": {}, "epoch": 1}, "keys 'weights', 'epoch'$"),
        ({str(n): n for n in range(20)}, "'9', …$"),
        ([torch.ones(1)], "found a list"),
        ({"a": torch.ones(1), "b": {}}, "found tensors, and under 'b' a dict$"),
    ],
)
def test_what_is_no_state_dict_is_told_with_what_it_is(tmp_path, content, message):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(ModelContractError, match=message):
        predict(toy("conv", weights=str(tmp_path / "w.pt")))


class ChangesFloats:
    """Pickled as the type of float64, with a state that makes it big-endian."""

    def __reduce__(self):
        return (np.dtype, ("f8",), (3, ">", None, None, None, -1, -1, 0))


class CutOff:
    """Pickled as a number of NumPy of which some bytes are absent."""

    def __reduce__(self):
        return (np.float64(1).__reduce__()[0], (np.dtype("f8"), b"123"))


@pytest.mark.parametrize(
    "value", [np.arange(3), np.datetime64("2020-01-01"), np.array([print], object), CutOff()]
)
def test_only_plain_numbers_of_numpy_are_read_beside_weights(tmp_path, trained, value):
    torch.save({"model": trained.state_dict(), "other": value}, tmp_path / "w.pt")
    with pytest.raises(ModelContractError, match="holds more than tensors"):
        predict(toy("conv", weights=str(tmp_path / "w.pt")))


@pytest.mark.parametrize("length", [0, 4, 20, 100])
def test_safetensors_that_were_cut_off_are_not_told_to_be_code(tmp_path, trained, length):
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file(trained.state_dict(), path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelContractError, match="they are damaged, or not safetensors|is empty"):
        predict(toy("conv", weights=str(path)))


def test_an_index_of_shards_is_told(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelContractError, match="an index of several files is not read here"):
        predict(toy("conv", weights=str(path)))


def test_a_checkpoint_cannot_change_the_types_that_we_compute_with(tmp_path, trained):
    torch.save({"model": trained.state_dict(), "other": ChangesFloats()}, tmp_path / "w.pt")
    predict(toy("conv", weights=str(tmp_path / "w.pt")))
    assert np.dtype("f8").isnative
    assert np.array([1.0]).tobytes() == struct.pack("=d", 1)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_pickled_code_is_never_run_unless_allowed(tmp_path):
    torch.save({"weight": Bomb(tmp_path / "boom")}, tmp_path / "w.pt")
    with pytest.raises(ModelContractError, match="--allow_pickle"):
        predict(toy("conv", weights=str(tmp_path / "w.pt")))
    with pytest.raises(ModelContractError, match="not TorchScript but pickled Python"):
        predict({"path": str(tmp_path / "w.pt")})
    assert not (tmp_path / "boom").exists()


def test_pickled_code_in_an_exported_network_is_never_run_unless_allowed(tmp_path, exported):
    """torch.export keeps its sample inputs in a file that it would unpickle."""
    import io
    import zipfile

    model = exported(toy_networks.conv().eval())
    buffer = io.BytesIO()
    torch.save(Bomb(tmp_path / "boom"), buffer)
    with (
        zipfile.ZipFile(model["path"]) as archive,
        zipfile.ZipFile(tmp_path / "bad.pt2", "w") as bad,
    ):
        samples = [name for name in archive.namelist() if "sample_inputs" in name]
        assert samples
        for name in archive.namelist():
            bad.writestr(name, buffer.getvalue() if name in samples else archive.read(name))
    with pytest.raises(ModelContractError, match="cannot load|it calls __builtin__ getattr"):
        predict(model | {"path": str(tmp_path / "bad.pt2")})
    assert not (tmp_path / "boom").exists()
    with (
        zipfile.ZipFile(model["path"]) as archive,
        zipfile.ZipFile(tmp_path / "custom.pt2", "w") as bad,
    ):
        for name in archive.namelist():
            bad.writestr(name, archive.read(name))
        bad.writestr("net/data/constants/custom_obj_0", b"")
    with pytest.raises(ModelContractError, match="custom_obj_0 .* --allow_pickle"):
        predict(model | {"path": str(tmp_path / "custom.pt2")})


def test_weights_may_be_named_as_a_url(tmp_path, trained):
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    np.testing.assert_array_equal(
        predict(toy("conv", weights=f"file://{tmp_path}/w.pt")), expected(trained)
    )


def test_a_pickled_network_is_loaded_if_allowed(tmp_path, trained):
    torch.save(trained, tmp_path / "net.pt")
    found = predict({"path": str(tmp_path / "net.pt"), "output_channels": 2}, trust=Trust.PICKLES)
    np.testing.assert_array_equal(found, expected(trained))
    torch.save(trained.state_dict(), tmp_path / "state.pt")
    with pytest.raises(ModelContractError, match="not a network"):
        predict({"path": str(tmp_path / "state.pt")}, trust=Trust.PICKLES)


def quiet(make):
    """torch.jit is deprecated but its files are everywhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return make()


def test_torchscript(tmp_path, trained):
    quiet(lambda: torch.jit.script(trained).save(str(tmp_path / "net.ts")))
    found = predict({"path": str(tmp_path / "net.ts"), "output_channels": 2})
    np.testing.assert_array_equal(found, expected(trained))


def test_batch_norm_modes_of_a_module():
    module = toy_networks.batch_norm()
    folded = predict(toy("batch_norm"))
    np.testing.assert_allclose(folded, expected(module), atol=1e-6)
    assert (folded != expected(module)).any(), "BatchNorm is in the convolution's weights"
    found = predict(toy("batch_norm", batch_norm="batch"), {"batch_size": 1}, BATCH[:1])
    module[1].train()  # batch statistics; dropout stays off
    with torch.inference_mode():
        np.testing.assert_allclose(found, module(torch.from_numpy(BATCH[:1])).numpy(), atol=1e-6)


def test_batch_norm_modes_of_a_scripted_network(tmp_path):
    module = toy_networks.batch_norm().eval()
    quiet(lambda: torch.jit.script(module).save(str(tmp_path / "net.ts")))
    for mode in ("running", "batch"):
        model = {"path": str(tmp_path / "net.ts"), "output_channels": 2, "batch_norm": mode}
        found = predict(model, {"batch_size": 1}, BATCH[:1])
        np.testing.assert_allclose(
            found,
            predict(toy("batch_norm", batch_norm=mode), {"batch_size": 1}, BATCH[:1]),
            atol=1e-6,
        )


def test_a_traced_network_has_its_batch_norm_mode_fixed(tmp_path):
    quiet(
        lambda: torch.jit.trace(toy_networks.batch_norm().eval(), torch.from_numpy(BATCH)).save(
            str(tmp_path / "n.ts")
        )
    )
    model = {"path": str(tmp_path / "n.ts"), "output_channels": 2}
    np.testing.assert_allclose(predict(model), predict(toy("batch_norm")), atol=1e-6)
    with pytest.raises(ModelContractError, match="traced with BatchNorm using running statistics"):
        predict(model | {"batch_norm": "batch"}, {"batch_size": 1})


@pytest.fixture
def exported(tmp_path):
    def export(module, batch=2, dynamic=False):
        path = tmp_path / "net.pt2"
        shapes = ({0: torch.export.Dim("batch", min=1, max=64)},) if dynamic else None
        example = torch.from_numpy(BATCH[:1]).repeat(batch, 1, 1, 1, 1)
        torch.export.save(torch.export.export(module, (example,), dynamic_shapes=shapes), path)
        return {"path": str(path), "output_channels": 2}

    return export


def test_an_exported_network(exported):
    np.testing.assert_array_equal(
        predict(exported(toy_networks.conv().eval())), expected(toy_networks.conv())
    )


def test_an_exported_network_of_pytorch_before_2_8(tmp_path, exported):
    """All members lie side by side, and tensors are in files of torch.save."""
    import io
    import zipfile

    model = exported(toy_networks.conv().eval())
    state = {key: torch.nn.Parameter(t) for key, t in toy_networks.conv().state_dict().items()}
    parts = {
        "state_dict": state,
        "constants": {},
        "example_inputs": ((torch.from_numpy(BATCH),), {}),
    }
    with (
        zipfile.ZipFile(model["path"]) as archive,
        zipfile.ZipFile(tmp_path / "old.pt2", "w") as old,
    ):
        program = archive.read("net/models/model.json")
        old.writestr("serialized_exported_program.json", program)
        old.writestr("version", "8.20")
        for name, value in parts.items():
            buffer = io.BytesIO()
            torch.save(value, buffer)
            old.writestr(f"serialized_{name}.pt", buffer.getvalue())
    found = predict(model | {"path": str(tmp_path / "old.pt2")})
    np.testing.assert_array_equal(found, expected(toy_networks.conv()))


def test_an_exported_network_has_its_batch_fixed_unless_dynamic(exported):
    with pytest.raises(
        ModelContractError,
        match="takes batches of exactly 2; the job says inference.batch_size: 3",
    ):
        predict(exported(toy_networks.conv().eval()), {"batch_size": 3})
    model = exported(toy_networks.conv().eval(), dynamic=True)
    np.testing.assert_array_equal(
        predict(model, {"batch_size": 3}, BATCH[[0, 1, 0]]).shape, (3, 2, 4, 6, 8)
    )


def test_an_exported_network_has_its_batch_norm_mode_fixed(exported):
    model = exported(toy_networks.batch_norm().eval(), batch=1)
    np.testing.assert_allclose(
        predict(model, {"batch_size": 1}, BATCH[:1]),
        predict(toy("batch_norm"), {"batch_size": 1}, BATCH[:1]),
        atol=1e-6,
    )
    with pytest.raises(
        ModelContractError, match="using running statistics, which cannot be changed"
    ):
        predict(model | {"batch_norm": "batch"}, {"batch_size": 1})


def test_a_batch_norm_mode_that_cannot_be_had_is_refused(tmp_path, exported, monkeypatch):
    one = {"batch_size": 1}
    with pytest.raises(
        ModelContractError, match="no BatchNorm layer whose statistics could be chosen"
    ):
        predict(toy("conv", batch_norm="batch"), one)
    with pytest.raises(ModelContractError, match="has BatchNorm using no statistics"):
        predict(exported(toy_networks.conv().eval(), batch=1) | {"batch_norm": "batch"}, one)
    with pytest.raises(ModelContractError, match="without stored statistics"):
        predict(toy("batch_norm_without_statistics"))
    frozen = quiet(lambda: torch.jit.freeze(torch.jit.script(toy_networks.batch_norm().eval())))
    quiet(lambda: frozen.save(str(tmp_path / "frozen.ts")))
    with pytest.raises(ModelContractError, match="BatchNorm"):
        predict(
            {"path": str(tmp_path / "frozen.ts"), "output_channels": 2, "batch_norm": "batch"}, one
        )


def test_two_dimensional_networks_see_no_z_axis():
    batch = BATCH[:, :, :1]
    found = predict(
        toy("flat", dims=2), {"patch_shape": [1, 6, 8], "patch_overlap": [0, 0, 0]}, batch
    )
    np.testing.assert_array_equal(found[:, :, 0], expected(toy_networks.flat(), batch[:, :, 0]))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_runs_the_network_in_it_and_returns_float32(precision):
    found = predict(toy("conv"), {"precision": precision})
    exact = predict(toy("conv"))
    assert found.dtype == np.float32
    assert 0 < np.abs(found - exact).max() < 0.05


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"path": "/nope/net.pt"}, "there is no file /nope/net.pt"),
        ({"path": "/nope/net.onnx"}, "there is no file"),
        ({"path": "gs://bucket/net.pt"}, "copy it to a local file"),
        ({"path": "no_such_module:net"}, "there is no Python module no_such_module"),
        ({"path": f"{TOYS}:nope"}, "has no function nope"),
        ({"path": f"{TOYS}:raises"}, "the factory failed: RuntimeError: the factory is broken"),
        ({"path": f"{TOYS}:not_a_module"}, "returned a int, not a torch module"),
        (
            {"path": f"{TOYS}:conv", "weights": "/nope/w.pt", "output_channels": 2},
            "model.weights: there is no file",
        ),
        ({"path": str(TOYS)}, "expected identity, a TorchScript file"),
    ],
)
def test_models_that_cannot_be_loaded(model, message):
    with pytest.raises(ModelContractError, match=message):
        predict(model)


@pytest.mark.parametrize("name", ["net.ts", "net.pt2"])
def test_a_folder_with_the_name_of_a_file(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ModelContractError, match=f"{name} is a folder.* must not be named "):
        predict({"path": str(tmp_path / name)})


def test_a_module_beside_a_factory_that_python_does_not_look_for(tmp_path):
    (tmp_path / "network.py").write_text("import layers_of_nobody\ndef network(): ...\n")
    (tmp_path / "layers_of_nobody.py").write_text("")
    with pytest.raises(ModelContractError, match="It lies beside that file, in .* PYTHONPATH"):
        predict({"path": f"{tmp_path}/network.py:network"})
    (tmp_path / "layers_of_nobody.py").unlink()
    with pytest.raises(ModelContractError, match="No module named 'layers_of_nobody'$"):
        predict({"path": f"{tmp_path}/network.py:network"})


def test_files_that_are_not_what_their_name_says(tmp_path):
    for name, message in (
        ("a.pt", "no file that PyTorch has saved, or damaged"),
        ("a.pt2", "cannot load the torch.export file"),
    ):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(ModelContractError, match=message):
            predict({"path": str(tmp_path / name)})
    (tmp_path / "w.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelContractError, match="no file that PyTorch has saved, or damaged"):
        predict(toy("conv", weights=str(tmp_path / "w.pt")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_asked_for_and_absent_is_an_error():
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        predict(toy("conv"), {"device": "cuda"})
    assert find_accelerator() is None


def test_the_hash_is_of_the_weights_and_is_checked(tmp_path, trained):
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    model = toy("conv", weights=str(tmp_path / "w.pt"))
    digest = model_sha256(config(model).model)
    assert model_sha256(config(model | {"sha256": digest.split("+")[-1]}).model) == digest
    with pytest.raises(ModelContractError, match="another file, or was changed or damaged"):
        model_sha256(config(model | {"sha256": "0" * 64}).model)
    assert model_sha256(config({"path": "identity"}).model) == "identity"


def test_a_launcher_knows_what_a_worker_will_say(tmp_path, trained):
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    for model in ({"path": "identity"}, toy("conv", weights=str(tmp_path / "w.pt"))):
        job = config(model)
        assert (
            describe_engine(job.model, job.inference)
            == load_predictor(job.model, job.inference).description
        )


def test_parameters_that_no_weights_file_states_describe_the_engine():
    def parameters(name):
        job = config(toy(name))
        return load_predictor(job.model, job.inference).description["parameters"]

    assert parameters("conv") == parameters("conv") != parameters("batch_norm")
    with pytest.raises(ModelContractError, match="other parameters at every call"):
        parameters("random")
    job = config(toy("conv"))
    with pytest.raises(ConfigError, match="has no weights beside it"):
        describe_engine(job.model, job.inference)


class Shifted(torch.nn.Module):
    """A network with a buffer that it does not save."""

    def __init__(self, shift):
        super().__init__()
        self.conv = torch.nn.Conv3d(1, 2, 1)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, batch):
        return self.conv(batch) + self.shift


@pytest.mark.parametrize("with_weights", [False, True])
def test_buffers_that_no_file_of_weights_holds(with_weights, tmp_path, monkeypatch):
    torch.manual_seed(0)
    torch.save(Shifted(torch.ones(1)).state_dict(), tmp_path / "w.pt")
    keys = {"weights": str(tmp_path / "w.pt")} if with_weights else {}
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "from test_loading import Shifted\n"
        "def seeded(shift):\n"
        "    torch.manual_seed(0)\n"
        "    return Shifted(shift)\n"
        "def fixed(): return seeded(torch.ones(1))\n"
        "def random():\n"
        "    torch.seed()\n"
        "    return seeded(torch.rand(1))\n"
    )
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model = {"path": f"{tmp_path}/net.py:fixed", "output_channels": 2, **keys}
    predict(model)
    with pytest.raises(ModelContractError, match="other parameters at every call"):
        predict(model | {"path": f"{tmp_path}/net.py:random"})


@pytest.mark.parametrize(
    ("error", "translated"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceOutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), DeviceOutOfMemory),
        (torch.AcceleratorError("CUDA error: out of memory"), DeviceOutOfMemory),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), WorkerFault),
        (RuntimeError("shapes do not match"), RuntimeError),
    ],
)
def test_torchs_device_errors_are_translated(error, translated):
    def fail(batch):
        raise error

    predictor = torch_predictor(fail, torch.device("cpu"))
    with predictor.device.session(), pytest.raises(translated):
        predictor.predict(torch.zeros(1, 1, 2, 2, 2))


@pytest.mark.gpu
def test_a_cuda_device_gives_the_cpus_values_in_float32():
    on_cpu = predict(toy("conv"))
    on_gpu = predict(toy("conv"), {"device": find_accelerator()})
    np.testing.assert_allclose(on_gpu, on_cpu, atol=1e-5)


BUNDLE = """
import numpy as np
from beam_inference.models.loading import ModelLoader

def load(path, *, allow_pickle):
    scale = np.load(path / "scale.npy")
    return lambda batch: batch * scale

LOADER = ModelLoader(load=load, gives="function", is_folder=True)
NO_LOADER = 3
"""


@pytest.fixture
def bundles(tmp_path):
    """A package that brings a kind of model that is a folder, and one that is no loader."""
    (tmp_path / "bundles.py").write_text(BUNDLE)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "bundles"\nversion = "1"\n'
        '[project.entry-points."beam_inference.models"]\n'
        'bundle = "bundles:LOADER"\nwrong = "bundles:NO_LOADER"\n'
    )
    with extension_in_this_process(tmp_path / "site", tmp_path):
        yield


@pytest.mark.usefixtures("bundles")
def test_a_kind_of_model_that_is_a_folder(tmp_path):
    folder = tmp_path / "net.bundle"
    folder.mkdir()
    np.save(folder / "scale.npy", np.float32(2))
    model = {"path": str(folder)}
    found = predict(model, {"engine": "numpy"})
    np.testing.assert_array_equal(found, 2 * BATCH)
    first = model_sha256(config(model).model)
    np.save(folder / "scale.npy", np.float32(3))
    assert model_sha256(config(model).model) != first
    with pytest.raises(ModelContractError, match="there is no folder"):
        predict({"path": str(tmp_path / "absent.bundle")}, {"engine": "numpy"})


def test_all_of_a_folder_is_hashed(tmp_path):
    folder = tmp_path / "net"
    folder.mkdir()
    (folder / "a").write_text("A")
    (folder / "b").write_text("B")
    (tmp_path / "elsewhere").mkdir()
    sound = file_sha256(folder)
    (folder / "b").unlink()
    (folder / "b").symlink_to("../elsewhere/b")  # of a file: its content counts
    (tmp_path / "elsewhere/b").write_text("B")
    assert file_sha256(folder) == sound
    (folder / "variables").symlink_to("../elsewhere")
    with pytest.raises(ModelContractError, match="'variables'.*no links to folders"):
        file_sha256(folder)
    (folder / "variables").unlink()
    (folder / "b").rename(folder / "a 559aead08264d5795d3909718cdd05ab\nb")
    with pytest.raises(ModelContractError, match="printable names"):
        file_sha256(folder)


@pytest.mark.usefixtures("bundles")
def test_what_is_installed_as_a_kind_of_model_and_is_none(tmp_path):
    with pytest.raises(ConfigError, match="is not a beam_inference.models.loading.ModelLoader"):
        predict({"path": str(tmp_path / "a.wrong")})
    with pytest.raises(ModelContractError, match=r"of an installed kind \(\.bundle, \.wrong\)"):
        predict({"path": str(TOYS)})


BY_TORCH = Inference(
    patch_shape=(4, 4, 4),
    patch_overlap=(0, 0, 0),
    chunk_shape=(4, 4, 4),
    device="cpu",
    engine="torch",
)
ODD_NETWORKS = """
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self, **buffers):
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 1)
        nn.init.ones_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x):
        return self.conv(x)

class Extra(Scale):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, _):
        pass

class NoEval(Scale):
    def eval(self):
        raise RuntimeError("no eval")

class NoState(Scale):
    def state_dict(self, *_, **__):
        raise RuntimeError("no state")

def extra():
    return Extra()

def conjugate():
    return Scale(c=torch.ones(3, dtype=torch.complex64).conj())

def meta():
    return Scale(c=torch.ones(1, device="meta"))

def sparse():
    return Scale(c=torch.eye(3).to_sparse())

def lazy():
    return nn.LazyConv3d(1, 1)

def exported():
    return torch.export.export(Scale().eval(), (torch.zeros(1, 1, 4, 4, 4),)).module()

def no_eval():
    return NoEval()

def no_state():
    return NoState()
"""


@pytest.mark.parametrize("name", ["extra", "conjugate"])
def test_networks_that_keep_more_than_plain_tensors_are_loaded(name, tmp_path):
    (tmp_path / "odd.py").write_text(ODD_NETWORKS)
    model = Network(path=f"{tmp_path}/odd.py:{name}", output_channels=1)
    predictor = load_predictor(model, BY_TORCH)
    assert predictor.predict(torch.ones(1, 1, 4, 4, 4)).sum() == 64


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("meta", "c has no values"),
        ("sparse", "c is sparse or nested"),
        ("lazy", "weight has no shape yet"),
        ("exported", "Calling eval.* is not supported.* saved as a .pt2 file"),
        ("no_eval", "cannot be brought to its device in evaluation mode: RuntimeError: no eval"),
        ("no_state", "RuntimeError: no state"),
    ],
)
def test_networks_whose_parts_are_none_of_pytorch_s_are_refused(name, told, tmp_path):
    (tmp_path / "odd.py").write_text(ODD_NETWORKS)
    model = Network(path=f"{tmp_path}/odd.py:{name}", output_channels=1)
    with pytest.raises(ModelContractError, match=told):
        load_predictor(model, BY_TORCH)
