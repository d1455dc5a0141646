"""Packages of networks: found in folders and zip files, or refused by name."""

import json
import shutil
import zipfile
from pathlib import Path

import nnunet_folders as made
import numpy as np
import pytest
import torch

from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.models.hashes import NetworkFiles, model_sha256
from beam_inference.models.loading import load_network
from beam_inference.models.package_files import find_file, local_file, read_array, read_json
from beam_inference.models.packages import open_package

pytest.importorskip("dynamic_network_architectures")


def pack(folder, archive):
    """Pack a folder as users do, with its own name on top."""
    return Path(shutil.make_archive(str(archive), "zip", folder.parent, folder.name))


def answer(path, batch, **keys):
    """What the network of a package answers to a batch."""
    network = load_network(Network(path=str(path), **keys)).network
    with torch.no_grad():
        return network(batch).numpy()


@pytest.fixture
def batch():
    """A patch of random numbers."""
    return torch.from_numpy(np.random.default_rng(0).normal(size=(1, 1, *made.PATCH))).float()


def test_a_folder_and_its_zip_file_are_one_network(tmp_path, batch):
    folder, (network,) = made.make_folder(tmp_path / "model")
    with torch.no_grad():
        expected = network(batch).numpy()
    assert np.array_equal(answer(folder, batch), expected)
    assert np.array_equal(answer(f"file://{folder}", batch), expected)
    assert np.array_equal(answer(pack(folder, tmp_path / "packed"), batch), expected)


def test_the_folder_above_will_do(tmp_path, batch):
    """People name the folder of a dataset, which holds that of one trained network."""
    folder, (network,) = made.make_folder(tmp_path / "results" / "Dataset001" / "trained")
    with torch.no_grad():
        expected = network(batch).numpy()
    assert np.array_equal(answer(tmp_path / "results", batch), expected)
    assert model_sha256(Network(path=str(tmp_path / "results"))) == model_sha256(
        Network(path=str(folder))
    )


def test_folders_are_looked_into_two_levels_down_and_no_further(tmp_path):
    deep, _ = made.make_folder(tmp_path / "a" / "b" / "c")
    with open_package(tmp_path / "a") as package:
        assert package.root == deep
    with pytest.raises(ModelContractError, match="holds none of the packages"):
        load_network(Network(path=str(tmp_path)))


def test_a_folder_of_many_folders_is_not_searched(tmp_path):
    for number in range(300):
        (tmp_path / str(number)).mkdir()
    with pytest.raises(ModelContractError, match="holds 300 folders, of which none is looked into"):
        load_network(Network(path=str(tmp_path)))


def test_packers_may_compress_and_write_entries_for_folders(tmp_path, batch):
    folder, (network,) = made.make_folder(tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.comment = b"packed by hand"
        for path in sorted([folder, *folder.rglob("*")]):
            info = zipfile.ZipInfo.from_file(path, path.relative_to(tmp_path))
            info.extra = b"UT\x05\x00\x01\x00\x00\x00\x00"  # of Unix packers: times
            info.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(info, b"" if path.is_dir() else path.read_bytes())
    with torch.no_grad():
        assert np.array_equal(answer(tmp_path / "a.zip", batch), network(batch).numpy())


def test_several_networks_are_refused(tmp_path):
    made.make_folder(tmp_path / "a")
    made.make_folder(tmp_path / "b")
    with pytest.raises(ModelContractError, match=r"holds several networks: .*/a, .*/b\. Name"):
        load_network(Network(path=str(tmp_path)))


def test_a_folder_of_nothing_known_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelContractError, match=r"an nnU-Net results folder \(plans\.json"):
        load_network(Network(path=str(tmp_path / "model")))


def test_a_file_that_is_no_zip_is_refused(tmp_path):
    (tmp_path / "model.zip").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(ModelContractError, match="is no zip file"):
        load_network(Network(path=str(tmp_path / "model.zip")))


def test_folds_of_what_has_none_are_refused(tmp_path):
    with pytest.raises(ModelContractError, match=r"model\.folds is for packages"):
        load_network(Network(path=str(tmp_path / "a.ts"), folds=[0]))


def test_a_member_that_is_damaged_is_named(tmp_path):
    folder, _ = made.make_folder(tmp_path / "model")
    archive = pack(folder, tmp_path / "packed")
    content = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as packed:
        info = packed.getinfo("model/fold_0/checkpoint_final.pth")
    content[info.header_offset + 2000] ^= 0xFF
    archive.write_bytes(content)
    with pytest.raises(ModelContractError, match=r"checkpoint_final\.pth"):
        load_network(Network(path=str(archive)))


def test_two_members_of_one_name_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr("plans.json", "{}")
        with pytest.warns(UserWarning, match="Duplicate name"):
            packed.writestr("plans.json", "{}")
    with pytest.raises(ModelContractError, match="two of its members have one name"):
        load_network(Network(path=str(tmp_path / "a.zip")))


def test_a_name_that_leads_elsewhere_writes_nothing_there(tmp_path):
    folder, _ = made.make_folder(tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        for name in ("plans.json", "dataset.json"):
            packed.write(folder / name, name)
        checkpoint = folder / "fold_0" / "checkpoint_final.pth"
        packed.write(checkpoint, "fold_0/../../../escaped/checkpoint_final.pth")
        packed.write(checkpoint, "fold_0/checkpoint_final.pth")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ModelContractError, match="is not a plain path"):
        load_network(Network(path=str(tmp_path / "a.zip")))
    assert set(tmp_path.rglob("*")) == before


def test_the_hash_is_of_what_determines_the_network(tmp_path):
    folder, _ = made.make_folder(tmp_path / "model", folds=(0, 1))
    network = Network(path=str(folder))
    before = model_sha256(network)
    (folder / "fold_0" / "progress.png").write_bytes(b"anything")
    assert model_sha256(network) == before
    first = model_sha256(Network(path=str(folder), folds=[0]))
    assert first not in (before, model_sha256(Network(path=str(folder), folds=[1])))
    plans = json.loads((folder / "plans.json").read_text())
    (folder / "plans.json").write_text(json.dumps(plans | {"plans_name": "other"}))
    assert model_sha256(network) != before
    assert model_sha256(Network(path=str(folder), folds=[0])) != first


def test_another_hash_than_the_job_says_is_refused(tmp_path):
    folder, _ = made.make_folder(tmp_path / "model")
    digest = model_sha256(Network(path=str(folder)))
    assert model_sha256(Network(path=str(folder), sha256=digest)) == digest
    with pytest.raises(ModelContractError, match=r"the job says model\.sha256"):
        model_sha256(Network(path=str(folder), sha256="0" * 64))


def test_changes_of_files_are_noticed(tmp_path):
    folder, _ = made.make_folder(tmp_path / "model", folds=(0, 1))
    files = NetworkFiles.of(Network(path=str(folder)))
    assert files is not None
    assert files == NetworkFiles.of(Network(path=str(folder)))
    (folder / "fold_1" / "checkpoint_final.pth").touch()
    assert files != NetworkFiles.of(Network(path=str(folder)))


def test_text_that_is_too_large_or_no_object(tmp_path):
    (tmp_path / "large.json").write_text(f'{{"a": "{"x" * (1 << 24)}"}}')
    with pytest.raises(ModelContractError, match="is larger than"):
        read_json(tmp_path / "large.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ModelContractError, match=r"expected a JSON object, found \[1\]"):
        read_json(tmp_path / "list.json")


def test_a_file_of_a_folder_is_not_copied(tmp_path):
    folder, _ = made.make_folder(tmp_path / "model")
    with open_package(folder) as package, local_file(package.root / "plans.json") as path:
        assert path == folder / "plans.json"


def test_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(ModelContractError, match="weights names a*, and there is no such file"):
        find_file(tmp_path, "a" * 300, "weights")


def test_an_array_whose_header_is_no_python(tmp_path):
    header = b"{'descr': (\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(ModelContractError, match="is no array of NumPy"):
        read_array(tmp_path / "a.npy")
