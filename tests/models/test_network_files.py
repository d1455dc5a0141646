"""Test which files determine a network, and that a change of them is noticed."""

import os
import shutil

import pytest

from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.models.hashes import NetworkFiles, model_sha256
from beam_inference.models.openvino_file import check_network


@pytest.fixture
def files(tmp_path):
    (tmp_path / "network.xml").write_text("<net></net>")
    (tmp_path / "network.bin").write_bytes(b"weights")
    model = Network(
        path=str(tmp_path / "network.xml"), weights=str(tmp_path / "network.bin"), output_channels=1
    )
    return NetworkFiles.of(model)


def test_branches_of_branches_are_refused_from_some_depth_on(tmp_path):
    """OpenVINO 2026.4 took a second for sixteen, and sixteen times as long for four more."""
    path = tmp_path / "network.xml"

    def write(depth):
        before = "<layers><layer><then_body>" * depth
        after = "</then_body></layer></layers>" * depth
        path.write_text(f"<net>{before}<layers><layer><output/></layer></layers>{after}</net>")

    write(13)
    check_network(path)
    write(15)
    with pytest.raises(ModelContractError, match="nested 45 deep and more"):
        check_network(path)


@pytest.mark.parametrize("kind", ["RandomUniform", "Multinomial"])
def test_networks_of_openvino_that_draw_random_numbers_are_refused(tmp_path, kind):
    path = tmp_path / "network.xml"
    path.write_text(f'<net><layers><layer id="0" type="{kind}" version="opset8"/></layers></net>')
    with pytest.raises(ModelContractError, match=f"by {kind}.*in evaluation mode"):
        check_network(path)


def test_files_that_nobody_touched_are_unchanged(files):
    assert files.sha256 == model_sha256(files.model)
    assert files.are_unchanged()


@pytest.mark.parametrize("name", ["network.xml", "network.bin"])
@pytest.mark.parametrize("how", ["written again", "replaced", "of another time"])
def test_a_change_is_noticed_even_if_the_content_is_the_same(files, tmp_path, name, how):
    path = tmp_path / name
    if how == "written again":
        os.utime(path, (1, 1))
        path.write_bytes(path.read_bytes())
    elif how == "replaced":
        shutil.copy2(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
    else:
        os.utime(path, (1, 1))
    assert not files.are_unchanged()


@pytest.mark.parametrize("path", ["identity", "network.py:make", "package.module:make"])
def test_code_and_the_identity_are_no_files(path):
    assert NetworkFiles.of(Network(path=path, output_channels=1)) is None
