"""Networks of nnU-Net folders: exact, or refused by name before anything runs."""

import json
import os
import pickle

import nnunet_folders as made
import numpy as np
import pytest
import torch

from beam_inference.errors import ModelContractError
from beam_inference.models.nnunet_network import make_network, read_model

pytest.importorskip("dynamic_network_architectures")


def batch(shape=made.PATCH, channels=1):
    """A patch of random numbers."""
    return torch.from_numpy(np.random.default_rng(0).normal(size=(1, channels, *shape))).float()


def answer(network, values):
    """What a network answers, as a NumPy array."""
    with torch.no_grad():
        return network.eval()(values).numpy()


def load_nnunet(folder, folds):
    """The network of a results folder."""
    return make_network(read_model(folder, folds))


def rewrite_plans(folder, change):
    """Change the configuration in a folder's plans."""
    content = json.loads((folder / "plans.json").read_text())
    change(content["configurations"]["3d_fullres"])
    (folder / "plans.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["PlainConvUNet", "ResidualEncoderUNet"])
def test_the_mean_of_folds(name, tmp_path):
    config = made.configuration(architecture=made.architecture(name))
    plans = made.plans(configurations={"3d_fullres": config})
    folder, networks = made.make_folder(tmp_path / "model", folds=(0, 1), made=plans)
    first, second = (answer(network, batch()) for network in networks)
    assert np.array_equal(answer(load_nnunet(folder, [0]), batch()), first)
    assert np.array_equal(answer(load_nnunet(folder, None), batch()), (first + second) / 2)


def test_weights_stay_in_the_file_until_they_are_used(tmp_path):
    folder, (network,) = made.make_folder(tmp_path / "model")
    model = read_model(folder, None)
    loaded = make_network(model)
    expected = answer(network, batch())
    file = folder / "fold_0" / "checkpoint_final.pth"
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    (first, *_) = model.checkpoints[0].weights.values()
    assert not first.any()
    assert np.array_equal(answer(loaded, batch()), expected)


def test_axes_in_another_order(tmp_path):
    plans = made.plans(transpose_forward=[2, 0, 1])
    folder, (network,) = made.make_folder(tmp_path / "model", made=plans)
    stored = batch((24, 24, 16))  # the network's z is the stored x
    expected = answer(network, stored.permute(0, 1, 4, 2, 3)).transpose(0, 1, 3, 4, 2)
    assert np.array_equal(answer(load_nnunet(folder, None), stored), expected)


def test_a_network_of_planes(tmp_path):
    config = made.configuration(
        patch_size=[24, 24], spacing=[1.0, 1.0], architecture=made.architecture(dims=2)
    )
    plans = made.plans(configurations={"2d": config})
    folder, (network,) = made.make_folder(tmp_path / "model", made=plans, name="2d")
    assert np.array_equal(
        answer(load_nnunet(folder, None), batch((24, 24))), answer(network, batch((24, 24)))
    )


def test_weights_saved_by_a_compiled_network(tmp_path):
    folder, (network,) = made.make_folder(tmp_path / "model")
    content = made.checkpoint(network)
    content["network_weights"] = {
        f"_orig_mod.{name}": value for name, value in network.state_dict().items()
    }
    torch.save(content, folder / "fold_0" / "checkpoint_final.pth")
    assert np.array_equal(answer(load_nnunet(folder, None), batch()), answer(network, batch()))


@pytest.mark.parametrize(
    "trainer", ["nnUNetTrainer", "nnUNetTrainerNoMirroring", "nnUNetTrainer_250epochs"]
)
def test_trainers_that_train_the_planned_network(trainer, tmp_path):
    folder, _ = made.make_folder(tmp_path / "model", trainer=trainer)
    assert read_model(folder, None).checkpoints[0].trainer == trainer


@pytest.mark.parametrize("trainer", ["MyTrainer", "nnUNetTrainerBN", "nnUNetTrainerV2_Own"])
def test_other_trainers_are_refused_by_name(trainer, tmp_path):
    folder, _ = made.make_folder(tmp_path / "model", trainer=trainer)
    with pytest.raises(ModelContractError, match=f"was trained by {trainer}, which is none"):
        load_nnunet(folder, None)


def test_a_cascade_is_refused_by_name(tmp_path):
    config = made.configuration(previous_stage="3d_lowres")
    plans = made.plans(configurations={"3d_cascade_fullres": config})
    folder, _ = made.make_folder(tmp_path / "model", made=plans, name="3d_cascade_fullres")
    with pytest.raises(ModelContractError, match="is the second stage of a cascade"):
        load_nnunet(folder, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os.system", "the network is a os.system"),
        ("my_package.unet.PlainConvUNet", "the network is a my_package"),
        ("dynamic_network_architectures.architectures.unet.AbstractUNet", "AbstractUNet; only"),
    ],
)
def test_other_classes_are_refused_by_name(name, message, tmp_path):
    folder, _ = made.make_folder(tmp_path / "model")
    rewrite_plans(folder, lambda config: config["architecture"].update(network_class_name=name))
    with pytest.raises(ModelContractError, match=message):
        load_nnunet(folder, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nonlin": "os.system"}, "nonlin is 'os.system'; only these classes of torch.nn"),
        ({"norm_op": "torch.nn.Module"}, "norm_op is 'torch.nn.Module'"),
        ({"n_stages": 10**9}, "n_stages must be a number up to 16"),
        ({"features_per_stage": [4, 8, 10**9]}, "numbers up to 16,384 are expected"),
        ({"unheard_of": 1}, "cannot be made of its arguments: .*unheard_of"),
        ({"features_per_stage": [4, 8, 16]}, "do not fit the network"),
    ],
)
def test_arguments_are_refused_by_name(arguments, message, tmp_path):
    folder, _ = made.make_folder(tmp_path / "model")
    rewrite_plans(folder, lambda config: config["architecture"]["arch_kwargs"].update(arguments))
    with pytest.raises(ModelContractError, match=message):
        load_nnunet(folder, None)


def test_folds_of_two_networks_are_refused(tmp_path):
    folder, (network, _) = made.make_folder(tmp_path / "model", folds=(0, 1))
    other = made.checkpoint(network, trainer="nnUNetTrainer_250epochs")
    torch.save(other, folder / "fold_1" / "checkpoint_final.pth")
    with pytest.raises(ModelContractError, match="Folds of one network are expected"):
        load_nnunet(folder, None)


class _Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("key", ["optimizer_state", "trainer_name", "network_weights"])
def test_pickled_code_is_not_run(key, tmp_path):
    folder, (network,) = made.make_folder(tmp_path / "model")
    content = made.checkpoint(network) | {key: _Planted(tmp_path / "planted")}
    file = folder / "fold_0" / "checkpoint_final.pth"
    torch.save(content, file)
    with pytest.raises(ModelContractError, match=r"checkpoint_final\.pth"):
        load_nnunet(folder, None)
    file.write_bytes(pickle.dumps(content))
    with pytest.raises(ModelContractError, match=r"checkpoint_final\.pth"):
        load_nnunet(folder, None)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"network_weights": [1, 2]},
        {"trainer_name": None},
        {"init_args": {}},
        {"inference_allowed_mirroring_axes": (0, 3)},
        {"inference_allowed_mirroring_axes": "zyx"},
    ],
)
def test_checkpoints_of_something_else_name_their_keys(changes, tmp_path):
    folder, (network,) = made.make_folder(tmp_path / "model")
    torch.save(made.checkpoint(network) | changes, folder / "fold_0" / "checkpoint_final.pth")
    with pytest.raises(ModelContractError, match=r"is no checkpoint of nnU-Net v2: .*trainer_name"):
        load_nnunet(folder, None)


def test_quantised_weights_are_refused(tmp_path):
    folder, (network,) = made.make_folder(tmp_path / "model")
    content = made.checkpoint(network)
    name = next(iter(content["network_weights"]))
    content["network_weights"][name] = torch.zeros(4, 1, 3, 3, 3).to_sparse()
    torch.save(content, folder / "fold_0" / "checkpoint_final.pth")
    with pytest.raises(ModelContractError, match="expected dense tensors"):
        load_nnunet(folder, None)
