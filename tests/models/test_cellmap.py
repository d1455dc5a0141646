"""How CellMap's packages are run, as keys of a job file."""

import pickle

import cellmap_packages as made
import numpy as np
import pytest
import torch
from helpers import read_volume, write_volume

from beam_inference.cli.main import main
from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.launch.package_trial import try_package
from beam_inference.models.cellmap import KIND
from beam_inference.models.loading import load_network


def recipe(folder):
    """The recipe of a package."""
    return KIND.read(folder, None).describe()


def test_a_finer_output_without_padding(tmp_path):
    described = recipe(made.make_package(tmp_path / "p"))
    assert described.values == {
        "model.input_channels": 1,
        "model.output_channels": 2,
        "model.output_scale": [2, 2, 2],
        "model.crop_margin": [4, 4, 4],
        "inference.patch_shape": [32, 32, 32],
        "inference.patch_overlap": [0, 0, 0],
        "input.fill": "symmetric",
        "output.dtype": "float32",
    }
    assert described.voxel_size == pytest.approx((1.6e-5, 1.6e-5, 1.6e-5))
    assert described.facts["channels of the output"] == "mito, er"
    assert any("does not say how images are normalised" in each for each in described.cautions)
    assert any("only the voxel sizes" in each for each in described.cautions)
    assert not any("spatial_dims" in each for each in described.cautions)
    assert try_package(str(tmp_path / "p"), None).lowest < 0


def test_the_job_gives_what_the_network_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made.make_package(tmp_path / "p")
    image = np.random.default_rng(0).integers(0, 256, (24, 20, 28), dtype=np.uint8)
    write_volume(tmp_path / "em", image, voxel_size_nm=(16, 16, 16))
    assert main(["init", "--model", "p", "--input", "em"]) == 0
    assert main(["run", "job.yaml"]) == 0
    padded = np.pad(image.astype(np.float32), 2, mode="symmetric")
    with torch.no_grad():
        expected = made.make_network()(torch.from_numpy(padded)[None, None])[0].numpy()
    result = read_volume(tmp_path / "prediction")
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() < 1e-4 * np.ptp(expected)


def test_a_network_of_one_size(tmp_path):
    content = made.described(
        input_shape=[32, 32], output_shape=[32, 32], input_voxel_size=[4, 4], out_channels=1
    )
    for key in ("inference_input_shape", "inference_output_shape", "output_voxel_size"):
        del content[key]
    network = torch.nn.Conv2d(1, 1, 3, padding=1).eval()
    described = recipe(made.make_package(tmp_path / "p", content, network))
    assert described.values["model.dims"] == 2
    assert any("spatial_dims: 3, and its shapes have 2 numbers" in s for s in described.cautions)
    assert described.values["inference.patch_shape"] == [1, 32, 32]
    assert described.values["inference.patch_overlap"] == [0, 8, 8]
    assert described.voxel_size == pytest.approx((None, 4e-6, 4e-6))
    assert try_package(str(tmp_path / "p"), None).is_passed


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"output_voxel_size": [32, 32, 32]}, r"\[0.5, 0.5, 0.5\] of the input's voxels"),
        ({"output_voxel_size": [10, 10, 10]}, r"\[1.6, 1.6, 1.6\] of the input's voxels"),
        ({"inference_output_shape": [48, 48, 48]}, "does not lie in the middle"),
        ({"inference_output_shape": [33, 33, 33]}, "does not lie in the middle"),
        ({"input_voxel_size": [32, 16, 16]}, r"by its voxel sizes, \[4, 2, 2\] times finer"),
    ],
)
def test_what_no_job_does_is_told(changes, obstacle, tmp_path):
    folder = made.make_package(tmp_path / "p", made.described(**changes))
    with pytest.raises(ModelContractError, match=obstacle):
        try_package(str(folder), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_channels": 0}, "is not as CellMap writes it: out_channels"),
        ({"input_shape": "large"}, "is not as CellMap writes it: input_shape"),
        ({"input_shape": [8, 8]}, "have other numbers of axes"),
        ({"input_voxel_size": [8, 8, -1]}, "input_voxel_size"),
        ({"input_voxel_size": [8, 8, 1e303]}, "input_voxel_size.2: Input should be less than"),
        (
            {"input_voxel_size": [16, 16, 16], "output_voxel_size": [1e-320, 16, 16]},
            "is not as CellMap writes it: output_voxel_size.0",
        ),
    ],
)
def test_metadata_that_make_no_sense_are_refused(changes, message, tmp_path):
    folder = made.make_package(tmp_path / "p", made.described(**changes))
    with pytest.raises(ModelContractError, match=message):
        recipe(folder)


class _Planted:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickled_network_is_not_loaded_before_it_is_trusted(tmp_path):
    folder = made.make_package(tmp_path / "p")
    (folder / "model.ts").unlink()
    (folder / "model.pt").write_bytes(pickle.dumps(_Planted(tmp_path / "planted")))
    with pytest.raises(ModelContractError, match="pickled Python, which could run any code"):
        load_network(Network(path=str(folder), output_channels=2))
    assert not (tmp_path / "planted").exists()


def test_other_forms_of_the_network(tmp_path):
    folder = made.make_package(tmp_path / "p")
    (folder / "model.ts").unlink()
    program = torch.export.export(made.make_network(), (torch.zeros(1, 1, 20, 20, 20),))
    torch.export.save(program, folder / "model.pt2")
    assert load_network(Network(path=str(folder), output_channels=2)).kind == "export"
    (folder / "model.pt2").rename(folder / "model.onnx")
    assert recipe(folder).network_file == "model.onnx"


def test_an_exported_program_is_tried(tmp_path):
    content = made.described(
        input_shape=[20, 20, 20], output_shape=[18, 18, 18], input_voxel_size=[8, 8, 8]
    )
    for key in ("inference_input_shape", "inference_output_shape", "output_voxel_size"):
        del content[key]
    network = torch.nn.Conv3d(1, 2, 3).eval()
    folder = made.make_package(tmp_path / "p", content, network)
    with_script = try_package(str(folder), None)
    (folder / "model.ts").unlink()
    program = torch.export.export(network, (torch.zeros(1, 1, 20, 20, 20),))
    torch.export.save(program, folder / "model.pt2")
    exported = try_package(str(folder), None)
    assert exported.is_passed
    assert exported.lowest == pytest.approx(with_script.lowest, rel=1e-5)
    assert exported.highest == pytest.approx(with_script.highest, rel=1e-5)
