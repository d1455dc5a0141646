"""What is loaded of a stranger's file is what was judged of it, whoever exchanges it meanwhile."""

import json
import warnings
import zipfile

import pytest
import torch
import toy_networks

from beam_inference.errors import ModelContractError
from beam_inference.models import exported_file, packed_torchscript
from beam_inference.models.own_copy import own_copy


def save_exported(path, code=""):
    """A program of torch.export; PyTorch runs ``code`` as it loads it."""
    example = (torch.zeros(2, 1, 8, 16, 16),)
    torch.export.save(torch.export.export(toy_networks.conv().eval(), example), path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (program,) = (name for name in members if name.endswith("models/model.json"))
    values = json.loads(members[program])
    values["guards_code"] = [code] if code else values.get("guards_code", [])
    members[program] = json.dumps(values).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def exchange_after(monkeypatch, module, function, path, other):
    """Replace a file by another one at the end of a function that judges it."""
    judge = getattr(module, function)

    def judge_and_exchange(*args):
        found = judge(*args)
        path.write_bytes(other.read_bytes())
        return found

    monkeypatch.setattr(module, function, judge_and_exchange)


def test_an_exported_program_that_is_exchanged_is_not_run(tmp_path, monkeypatch):
    path = save_exported(tmp_path / "net.pt2")
    planted = tmp_path / "planted"
    evil = save_exported(tmp_path / "evil.pt2", f"__import__('os').mkdir({str(planted)!r}) is None")
    with pytest.raises(ModelContractError):
        exported_file.load_file(evil, allow_pickle=False)
    exchange_after(monkeypatch, exported_file, "_check_members", path, evil)
    program = exported_file.load_file(path, allow_pickle=False)
    assert path.read_bytes() == evil.read_bytes()
    assert not planted.exists()
    batch = torch.rand(2, 1, 8, 16, 16)
    torch.testing.assert_close(program.module()(batch), toy_networks.conv()(batch))


def test_torchscript_that_is_exchanged_is_not_loaded(tmp_path, monkeypatch):
    path, other = tmp_path / "net.pt", tmp_path / "other.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(torch.nn.Conv3d(1, 2, 3)), path)
        torch.jit.save(torch.jit.script(torch.nn.Conv3d(1, 5, 3)), other)
    exchange_after(monkeypatch, packed_torchscript, "_find_more_than_computing", path, other)
    module = packed_torchscript.load_packed(path, allow_pickle=False)
    assert path.read_bytes() == other.read_bytes()
    assert module(torch.zeros(1, 1, 4, 4, 4)).shape[1] == 2


def test_messages_name_the_file_itself(tmp_path):
    (tmp_path / "net.pt2").write_text("no archive")
    with pytest.raises(ModelContractError, match=f"file {tmp_path}/net.pt2: it is not an archive"):
        exported_file.load_file(tmp_path / "net.pt2", allow_pickle=False)
    with (
        pytest.raises(ModelContractError, match=f"{tmp_path}/absent.pt2 cannot be copied"),
        own_copy(tmp_path / "absent.pt2"),
    ):
        pass
