"""Packages of networks from strangers: what they bring only computes, and says what it means."""

import warnings
from pathlib import Path

import bioimageio_packages
import cellmap_packages
import monai_bundles
import nnunet_folders
import numpy as np
import pytest
import torch

from beam_inference.errors import ModelContractError
from beam_inference.launch.package_trial import try_package
from beam_inference.models.packages import Recipe, open_package


class Saves(torch.nn.Module):
    """Writes a file, as PyTorch's operators can."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        torch.save(batch, self.path)
        return batch


class SavesAtOnce(torch.nn.Module):
    """Writes a file as it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.training = False

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return (self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        torch.save(state, self.path)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


class Prints(torch.nn.Module):
    """Writes to the terminal, past whatever cleans text."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        print("\x1b[2J")
        return batch


@pytest.mark.parametrize("kind", [Saves, SavesAtOnce, Prints])
def test_torchscript_of_a_package_does_nothing_but_compute(
    kind: type[torch.nn.Module], tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    network = Prints() if kind is Prints else kind(str(trace))
    folder = cellmap_packages.make_package(tmp_path / "package", network=network)
    trace.unlink(missing_ok=True)  # scripting may have made it
    with open_package(folder) as package:
        with pytest.raises(ModelContractError, match="pass --trust_model"):
            package.network.load(is_trusted=False)
        assert not trace.exists()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is an old form
            assert package.network.load(is_trusted=True) is not None


def describe(folder: Path) -> Recipe:
    with open_package(folder) as package:
        return package.network.describe()


def change_scaling(**changes: object) -> list[dict[str, object]]:
    """The transforms of a bundle, of which the one that scales says more."""
    return [
        each | changes if each["_target_"] == "ScaleIntensityRanged" else each
        for each in monai_bundles.TRANSFORMS
    ]


@pytest.mark.parametrize(
    ("disabled", "is_scaled"), [("False", True), (False, True), ("true", False), (True, False)]
)
def test_what_a_bundle_disables_is_what_monai_takes_for_it(
    disabled: object, is_scaled: bool, tmp_path: Path
) -> None:
    content = monai_bundles.config(change_scaling(_disabled_=disabled))
    normalize = describe(monai_bundles.make_bundle(tmp_path, content)).values["model.normalize"]
    assert (normalize != "none") == is_scaled


def test_what_a_bundle_does_to_labels_is_not_done_to_results(tmp_path: Path) -> None:
    after = [{"_target_": "AsDiscreted", "keys": ["label", "pred"], "argmax": [True, False]}]
    folder = monai_bundles.make_bundle(tmp_path, monai_bundles.config(after=after))
    assert "postprocess" not in describe(folder).values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (monai_bundles.config(change_scaling(keys="label")), "changes 'label', where image is"),
        (
            monai_bundles.config(after=[{"_target_": "Activationsd", "keys": "label"}]),
            "changes 'label', where pred is",
        ),
        (monai_bundles.config([monai_bundles.TRANSFORMS[3]] * 2), "follows another one"),
        (monai_bundles.config(inferer={"roi_size": [True, 8, 8]}), "expected three numbers"),
        (monai_bundles.config(inferer={"mode": ["constant"]}), "expected constant or gaussian"),
        (monai_bundles.config(inferer={"padding_mode": ["x"]}), "has the padding_mode"),
    ],
)
def test_a_bundle_that_means_something_else_is_refused(
    content: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelContractError, match=message):
        describe(monai_bundles.make_bundle(tmp_path, content))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("plans.json", '"spacing": [2.0', '"spacing": [1e999'),
        ("plans.json", '"spacing": [2.0', '"inherits_from": ["a"], "spacing": [2.0'),
        ("plans.json", '"n_conv_per_stage": [1', '"n_conv_per_stage": [9999'),
        ("plans.json", '"n_stages"', f'"deep": {"[" * 400}{"]" * 400}, "n_stages"'),
    ],
)
def test_plans_out_of_bounds_are_refused(name: str, old: str, new: str, tmp_path: Path) -> None:
    folder, _ = nnunet_folders.make_folder(tmp_path / "nnunet")
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    with pytest.raises(ModelContractError), open_package(folder) as package:
        package.network.load(is_trusted=False)


@pytest.mark.parametrize(
    "changes",
    [{"network_weights": {3: torch.zeros(1)}}, {"inference_allowed_mirroring_axes": ([0],)}],
)
def test_an_odd_checkpoint_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    folder, _ = nnunet_folders.make_folder(tmp_path / "nnunet")
    file = folder / "fold_0/checkpoint_final.pth"
    torch.save(torch.load(file, weights_only=False) | changes, file)
    with pytest.raises(ModelContractError), open_package(folder) as package:
        package.network.load(is_trusted=False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("halo: 4", "halo: 4\n    scale: .inf"),
        ("tensor_id: raw", "tensor_id: raw\n      offset: 9000000"),
        ("postprocessing: []", "postprocessing: [{id: binarize, kwargs: {threshold: []}}]"),
        (
            "preprocessing: []",
            "preprocessing: [{id: fixed_zero_mean_unit_variance, kwargs: {mean: 0, std: 0}}]",
        ),
        (
            "preprocessing: []",
            "preprocessing: [{id: scale_range, kwargs: {min_percentile: 9, max_percentile: 1}}]",
        ),
    ],
)
def test_a_description_out_of_bounds_is_refused(old: str, new: str, tmp_path: Path) -> None:
    folder = bioimageio_packages.make_package(tmp_path)
    file = folder / "bioimageio.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ModelContractError):
        describe(folder)


@pytest.mark.parametrize("shape", [(1, 1, 1 << 25, 1 << 25), (1, 1, 0, 8)])
def test_an_example_of_any_size_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = bioimageio_packages.make_package(tmp_path)
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with (folder / "test_input.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ModelContractError, match=r"test_input\.npy is"):
        try_package(str(folder), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_channels": 5}, "returns 2 channels, and the package says 5"),
        ({"in_channels": 3}, "fails on an array of shape"),
        ({"inference_input_shape": [9000, 9000, 9000]}, "are more than the"),
        ({"output_voxel_size": [8, 8]}, "other numbers of axes"),
        ({"input_voxel_size": [1e999, 1, 1]}, "input_voxel_size"),
    ],
)
def test_a_network_that_is_not_its_packages_fails_the_test(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    content = cellmap_packages.described(**changes)
    if "inference_input_shape" in changes:
        content["inference_output_shape"] = [18000 - 8] * 3
    folder = cellmap_packages.make_package(tmp_path, content)
    with pytest.raises(ModelContractError, match=message):
        try_package(str(folder), None)
