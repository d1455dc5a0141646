"""Test the folder in which trials and conversions are kept."""

import os
import shutil
import stat
import threading
from pathlib import Path

import nnunet_folders
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.cli.main import main
from beam_inference.config.inference import Inference
from beam_inference.config.network import Network
from beam_inference.engines.cache import Cache, Contents, cache_place, user_cache
from beam_inference.engines.loading import load_predictor

KEY = {"network": "abc", "shape": [1, 2], "more": {"x": None}}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "some" / "cache"


@pytest.fixture
def cache(folder):
    return Cache(folder)


def entry_of(folder):
    (path,) = folder.iterdir()
    return path


def test_what_was_kept_serves_for_the_same_key_only(cache, folder):
    assert cache.read("trial", KEY) is None
    assert not folder.exists()
    cache.write("trial", KEY, b"content\n\0")
    assert cache.read("trial", KEY) == b"content\n\0"
    assert cache.read("trial", {"shape": (1, 2), "network": "abc", "more": {"x": None}}) is not None
    assert cache.read("conversion", KEY) is None
    assert cache.read("trial", KEY | {"network": "abd"}) is None
    cache.write("trial", KEY, b"other")
    assert cache.read("trial", KEY) == b"other"


def test_folder_and_entries_are_of_this_user_alone(cache, folder):
    cache.write("trial", KEY, b"content")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry_of(folder).stat().st_mode) == 0o600


@given(place=st.integers(0), flip=st.integers(1, 255), cut=st.booleans())
def test_damaged_content_is_as_if_it_were_not_there(tmp_path_factory, place, flip, cut):
    folder = tmp_path_factory.mktemp("damaged") / "cache"
    cache = Cache(folder)
    cache.write("trial", KEY, b"content")
    path = entry_of(folder)
    damaged = bytearray(path.read_bytes())
    place %= len(damaged)
    damaged[place] ^= flip
    path.write_bytes(damaged[:place] if cut else damaged)
    # a change of the header may leave it the same JSON
    assert cache.read("trial", KEY) in (None, b"content")
    cache.write("trial", KEY, b"anew")
    assert cache.read("trial", KEY) == b"anew"


def test_an_entry_under_the_name_of_another_is_not_believed(cache, folder):
    cache.write("trial", KEY, b"content")
    path = entry_of(folder)
    cache.write("trial", KEY | {"network": "abd"}, b"other")
    (other,) = set(folder.iterdir()) - {path}
    other.replace(path)
    assert cache.read("trial", KEY) is None


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o602])
def test_an_entry_that_others_may_use_is_not_believed(cache, folder, mode):
    cache.write("trial", KEY, b"content")
    entry_of(folder).chmod(mode)
    assert cache.read("trial", KEY) is None


@pytest.mark.parametrize("make", ["symlink", "pipe", "folder"])
def test_what_is_no_file_is_not_read(cache, folder, tmp_path, make):
    cache.write("trial", KEY, b"content")
    path = entry_of(folder)
    path.replace(tmp_path / "elsewhere")
    if make == "symlink":
        path.symlink_to(tmp_path / "elsewhere")
    elif make == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(mode=0o700)
    assert cache.read("trial", KEY) is None


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_folder_that_others_may_use_is_left_alone(cache, folder, mode):
    cache.write("trial", KEY, b"content")
    folder.chmod(mode)
    assert cache.read("trial", KEY) is None
    cache.write("trial", {}, b"more")
    assert cache.contents() == Contents(0, 0)
    folder.chmod(0o700)
    assert cache.contents().entries == 1


def test_a_link_to_a_folder_is_left_alone(tmp_path):
    Cache(tmp_path / "real").write("trial", KEY, b"content")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert Cache(tmp_path / "link").read("trial", KEY) is None


def test_those_used_longest_ago_go_first(folder):
    size = 10_000
    cache = Cache(folder, most_bytes=3 * size + 2000)
    for number in range(3):
        cache.write("conversion", {"number": number}, bytes(size))
    for number, path in enumerate(sorted(folder.iterdir(), key=lambda each: each.stat().st_ino)):
        os.utime(path, (number, number))
    names = {number for number in range(3) if cache.read("conversion", {"number": number})}
    assert names == {0, 1, 2}
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    assert cache.read("conversion", {"number": 1})  # used just now
    cache.write("conversion", {"number": 3}, bytes(size))
    cache.write("conversion", {"number": 4}, bytes(size))
    left = {number for number in range(5) if cache.read("conversion", {"number": number})}
    assert left == {1, 3, 4}
    assert cache.contents().bytes <= 3 * size + 2000


def test_what_is_larger_than_the_bound_is_not_kept(folder):
    cache = Cache(folder, most_bytes=1000)
    cache.write("trial", KEY, b"content")
    cache.write("trial", {}, bytes(1000))
    assert cache.read("trial", KEY) == b"content"
    assert cache.read("trial", {}) is None


def test_a_cache_that_cannot_be_written_fails_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    for cache in (Cache(tmp_path / "file" / "cache"), Cache(tmp_path / "file"), Cache(None)):
        cache.write("trial", KEY, b"content")
        assert cache.read("trial", KEY) is None
        assert cache.clear() == cache.contents() == Contents(0, 0)


def test_several_may_write_and_read_one_entry_at_once(cache):
    seen = []

    def write(content):
        for _ in range(50):
            cache.write("trial", KEY, content)
            seen.append(cache.read("trial", KEY))

    threads = [threading.Thread(target=write, args=(bytes([n]) * 5000,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {bytes([n]) * 5000 for n in (1, 2, 3)}
    assert cache.contents().entries == 1


def test_drafts_of_killed_processes_are_removed_once_they_are_old(cache, folder):
    cache.write("trial", KEY, b"content")
    for name, age in (("young", None), ("old", 1)):
        draft = folder / f".draft-{name}"
        draft.write_bytes(b"")
        if age is not None:
            os.utime(draft, (age, age))
    cache.write("trial", {}, b"content")
    assert {path.name for path in folder.glob(".draft-*")} == {".draft-young"}


def test_only_what_was_kept_is_cleared(cache, folder):
    cache.write("trial", KEY, b"content")
    (folder / "of somebody else").write_text("")
    size = cache.contents().bytes
    assert cache.clear() == Contents(1, size)
    assert [path.name for path in folder.iterdir()] == ["of somebody else"]


def test_the_place_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_place() == tmp_path / "beam-inference"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_place() == Path(tmp_path, ".cache", "beam-inference")


def test_the_command_shows_and_clears(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    user_cache().write("trial", KEY, bytes(2**20))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/beam-inference: 1 files, 1.0 MiB;")
    assert main(["cache", "clear", "--json"]) == 0
    assert '"entries": 1' in capsys.readouterr().out
    assert main(["cache", "--json"]) == 0
    assert '"bytes": 0' in capsys.readouterr().out


@pytest.mark.slow
def test_other_folds_of_one_zip_file_are_another_network(tmp_path, monkeypatch):
    """Hash and shapes are the same, so the conversion of one could be taken for the other's."""
    pytest.importorskip("dynamic_network_architectures")
    pytest.importorskip("openvino")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, _ = nnunet_folders.make_folder(tmp_path / "model", folds=(0, 1))
    path = shutil.make_archive(str(tmp_path / "model"), "zip", folder)
    keys = {"patch_shape": nnunet_folders.PATCH, "chunk_shape": nnunet_folders.PATCH}
    settings = {**keys, "device": "cpu", "engine": "openvino", "batch_size": 1, "threads": 1}
    inference = Inference.model_validate(settings)
    batch = np.random.default_rng(0).normal(size=(1, 1, *nnunet_folders.PATCH)).astype(np.float32)

    def answer_of(fold):
        model = Network(path=path, folds=[fold], output_channels=3)
        predictor = load_predictor(model, inference)
        with predictor.device.session():
            answer = predictor.predict(predictor.device.upload(batch))
            return np.array(predictor.device.download(answer)())

    answer_of(0)  # PyTorch and OpenVINO set variables of the environment, which are in the key
    assert not np.allclose(answer_of(0), answer_of(1), atol=1e-3)
