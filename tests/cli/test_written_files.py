"""Files beside the output: none of anybody else's is replaced."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import write_volume

from beam_inference.cli.main import main
from beam_inference.cli.written_files import check_page, check_result, replace_file
from beam_inference.errors import ConfigError, WorkerFault

PAGE = '<!DOCTYPE html><meta name="generator" content="beam-inference">'


@pytest.mark.parametrize("content", [None, "", PAGE, PAGE + "\n<title"])
def test_a_page_of_ours_is_replaced(tmp_path, content):
    if content is not None:
        (tmp_path / "a.html").write_text(content)
    check_page("--page", str(tmp_path / "a.html"))


@pytest.mark.parametrize("content", [" ", "<!DOCTYPE html>", "{}"])
def test_another_page_is_not(tmp_path, content):
    (tmp_path / "a.html").write_text(content)
    with pytest.raises(ConfigError, match="--page .*a.html: another file lies there"):
        check_page("--page", str(tmp_path / "a.html"))


@pytest.mark.parametrize("content", [None, "", '{\n "output": "a"}', '{\n "output":'])
def test_a_result_of_ours_is_replaced(tmp_path, content):
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    check_result("--to", str(tmp_path / "a.json"), "output")


@pytest.mark.parametrize("content", ["a", "{}", "[]", "[" * 10_000, '{"scales": []}'], ids=len)
def test_another_result_is_not(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match="--to .*a.json: another file lies there"):
        check_result("--to", str(tmp_path / "a.json"), "output")


def test_names_and_folders_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="write a name that ends with .html"):
        check_page("--page", str(tmp_path / "page"))
    with pytest.raises(ConfigError, match="there is no folder"):
        check_result("--to", str(tmp_path / "absent" / "a.json"), "output")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigError, match="another file lies there"):
        check_page("--page", str(tmp_path / "folder.html"))


def test_a_folder_that_may_not_be_written_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(
        ConfigError, match="--page .*a.html: this user may not write into the folder"
    ):
        check_page("--page", str(tmp_path / "a.html"))


@pytest.fixture
def labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = np.ones((8, 8, 8), np.uint64)
    write_volume(tmp_path / "objects", ids)
    write_volume(tmp_path / "labels", ids)
    write_volume(tmp_path / "em", np.ones((8, 8, 8), np.uint8))
    return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "objects", "labels", "--to", "objects/info"],
        ["evaluate", "objects", "labels", "--page", "objects/info"],
        ["levels", "em", "--to", "em/info"],
        ["levels", "em", "--to", "em/info", "--overwrite"],
        ["levels", "em", "--to", "objects/info", "--overwrite"],
        ["levels", "em", "--to", "em/new.json"],
        ["evaluate", "objects", "labels", "--to", "labels/new.json"],
        ["evaluate", "objects", "labels", "--page", "objects/new.html"],
    ],
)
def test_metadata_of_a_volume_are_not_replaced(labels, tmp_path, words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.count("error: ") == 1
    assert labels == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_what_evaluate_wrote_is_written_again(labels, tmp_path):
    words = ["evaluate", "objects", "labels", "--to", "a.json", "--page", "a.html"]
    assert main(words) == 0
    first = (tmp_path / "a.json").read_bytes()
    assert main(words) == 0
    assert (tmp_path / "a.json").read_bytes() == first
    assert "output" in json.loads(first)


def test_levels_that_are_cut_off_are_counted_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_volume(tmp_path / "em", np.arange(512, dtype=np.uint16).reshape(8, 8, 8))
    words = ["levels", "em", "--to", "levels.json"]
    assert main(words) == 0
    first = (tmp_path / "levels.json").read_bytes()
    for torn in (b"", first[:20]):
        (tmp_path / "levels.json").write_bytes(torn)
        assert main([*words, "--overwrite"]) == 0
        assert (tmp_path / "levels.json").read_bytes() == first


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    with replace_file(str(tmp_path / "a.png")) as draft:
        assert draft.suffix == ".png"
        draft.write_text("whole")

    def write_half():
        with replace_file(str(tmp_path / "a.png")) as draft:
            draft.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WorkerFault, match=r"cannot write .*a\.png: No space left"):
        write_half()
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_text() == "whole"


def test_a_read_only_disk_is_told(tmp_path, monkeypatch):
    """There the kernel refuses to remove a file before it looks whether the file is there."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    def write():
        with replace_file(str(tmp_path / "a.png")) as draft:
            monkeypatch.setattr(Path, "unlink", refuse)
            refuse(draft)

    with pytest.raises(WorkerFault, match=r"cannot write .*a\.png: Read-only file system"):
        write()
