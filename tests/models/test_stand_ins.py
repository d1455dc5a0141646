"""Test that what stands in place of a network is called what it is, not pickled code."""

import pytest
import torch

from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.models.loading import load_network
from beam_inference.models.onnx_file import check_self_contained
from beam_inference.models.openvino_file import check_network
from beam_inference.models.stand_ins import check_saved_by_torch
from beam_inference.models.weights import load_checkpoint

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n" % (b"0" * 64)

STAND_INS = {
    b"": "is empty",
    POINTER: "is a pointer of Git LFS",
    b"<!DOCTYPE html><html>404 not found</html>": "is a web page",
    b"\n  <html lang=en>": "is a web page",
}


@pytest.mark.parametrize("content", STAND_INS)
@pytest.mark.parametrize("suffix", ["ts", "pt", "pth", "pt2", "onnx", "xml", "checkpoint"])
def test_stand_ins_are_named(content, suffix, tmp_path):
    path = tmp_path / f"n.{suffix}"
    path.write_bytes(content)
    load = {
        "onnx": check_self_contained,
        "xml": check_network,
        "checkpoint": lambda path: load_checkpoint(path, allow_pickle=False),
    }.get(suffix, lambda path: load_network(Network(path=str(path))))
    with pytest.raises(ModelContractError, match=STAND_INS[content]) as caught:
        load(path)
    assert "allow_pickle" not in str(caught.value)


@pytest.mark.parametrize("is_old", [False, True])
def test_what_pytorch_saves(is_old, tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "w.pt", _use_new_zipfile_serialization=not is_old)
    check_saved_by_torch(tmp_path / "w.pt")
    (tmp_path / "w.pt").write_bytes(b"noise")
    with pytest.raises(ModelContractError, match="no file that PyTorch has saved, or damaged"):
        check_saved_by_torch(tmp_path / "w.pt")
