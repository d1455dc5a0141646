"""What killed writers leave beside local files is removed, and nothing else is."""

import fcntl
import os
import subprocess
import sys
import time

import pytest
from chaos.clocks import Clocks, build_library

from beam_inference.volumes.conditional_writes import create_key
from beam_inference.volumes.drafts import file_of_draft, sweep_drafts, sweep_drafts_of_file
from beam_inference.volumes.kvstores import open_kvstore

LONG_AGO = time.time() - 7200

DRAFTS = [
    "0-8_0-8_0-8_a6635d290de952fb.__lock",
    "000000000012.json_a6635d290de952fb.__lock",
    f"job.json.{'0123abcd' * 4}.draft",
]


def write(path, content=b"half a bl", moment=LONG_AGO):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (moment, moment))
    return path


@pytest.mark.parametrize("name", DRAFTS)
def test_an_old_draft_is_removed_wherever_it_lies(tmp_path, name):
    draft = write(tmp_path / "a" / "b" / name)
    assert sweep_drafts(f"file://{tmp_path}") == 1
    assert not draft.exists()


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_that_may_still_be_written_stays(tmp_path, name):
    draft = write(tmp_path / name, moment=time.time())
    assert sweep_drafts(f"file://{tmp_path}") == 0
    assert draft.exists()


@pytest.mark.parametrize("name", [*DRAFTS, "zarr.json.guard"])
def test_what_another_process_has_locked_stays(tmp_path, name):
    path = write(tmp_path / name, b"")
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sweep_drafts(f"file://{tmp_path}") == 0
    assert path.exists()


@pytest.mark.parametrize("name", ["zarr.json.guard", "owners.json.guard", "info.guard"])
def test_a_guard_is_removed_as_soon_as_nobody_holds_it(tmp_path, name):
    write(tmp_path / name, b"", time.time())
    assert sweep_drafts(f"file://{tmp_path}") == 1


@pytest.mark.parametrize(
    "name",
    [
        "0-8_0-8_0-8",
        "job.json",
        "notes.draft",
        "castle.guard",
        "package-lock.json",
        "a.__lock",
        "x_a6635d290de952fb.__lock.txt",
        "_a6635d290de952fb",
    ],
)
def test_other_files_stay(tmp_path, name):
    path = write(tmp_path / name)
    assert sweep_drafts(f"file://{tmp_path}") == 0
    assert path.exists()


def test_a_guard_with_a_content_is_not_ours(tmp_path):
    write(tmp_path / "zarr.json.guard", b"mine")
    assert sweep_drafts(f"file://{tmp_path}") == 0


def test_links_are_neither_followed_nor_removed(tmp_path):
    draft = write(tmp_path / "elsewhere" / DRAFTS[0])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "out" / DRAFTS[1]).symlink_to(draft)
    assert sweep_drafts(f"file://{tmp_path}/out") == 0
    assert draft.exists()


def test_a_pipe_of_such_a_name_does_not_hang_the_sweep(tmp_path):
    os.mkfifo(tmp_path / DRAFTS[0])
    assert sweep_drafts(f"file://{tmp_path}") in (0, 1)


@pytest.mark.parametrize("url", ["gs://bucket/volume", "memory://volume"])
def test_object_stores_have_no_drafts(url):
    assert sweep_drafts(url) == sweep_drafts_of_file(url) == 0


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("0-8_0-8_0-8_a6635d290de952fb.__lock", "0-8_0-8_0-8"),
        (f"job.json.{'0123abcd' * 4}.draft", "job.json"),
        ("info.guard", "info"),
        ("info.__lock", "info"),
        ("info", None),
        ("notes.guard", None),
        (".__lock", None),
    ],
)
def test_the_file_of_a_draft(name, file):
    assert file_of_draft(name) == file


def test_a_folder_that_is_gone_has_no_drafts(tmp_path):
    assert sweep_drafts(f"file://{tmp_path}/gone") == 0


def test_of_one_file_only_its_own_drafts_are_removed(tmp_path):
    own = write(tmp_path / "levels.json_a6635d290de952fb.__lock")
    others = [
        write(tmp_path / "other.json_a6635d290de952fb.__lock"),
        write(tmp_path / "below" / "levels.json_a6635d290de952fb.__lock"),
        write(tmp_path / "levels.json"),
        write(tmp_path / "levels.json.bak"),
    ]
    assert sweep_drafts_of_file(f"file://{tmp_path}/levels.json") == 1
    assert not own.exists()
    assert all(path.exists() for path in others)


def test_a_sound_write_is_not_disturbed_by_sweeps(tmp_path):
    url = f"file://{tmp_path}"
    for number in range(50):
        assert create_key(open_kvstore(url), f"{number}.json", url, "{}")
        sweep_drafts(url)
    assert len(list(tmp_path.iterdir())) == 50


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [-7200, 7200])
def test_what_is_old_is_told_by_the_clock_that_stamps_files(tmp_path, seconds):
    """A machine whose clock is wrong takes no draft of another for old."""
    library = build_library(tmp_path / "clocks")
    if library is None:
        pytest.skip("there is no compiler")
    old = write(tmp_path / "out" / DRAFTS[0], moment=time.time() - 4000)
    young = write(tmp_path / "out" / DRAFTS[1], moment=time.time())
    clocks = Clocks(tmp_path / "clocks", library)
    variables = clocks.make()
    clocks.set_all(seconds)
    code = "\n".join(
        [
            "import time",
            "from beam_inference.volumes.drafts import sweep_drafts",
            f"print(time.time(), sweep_drafts('file://{tmp_path}/out'))",
        ]
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    seen, removed = ended.stdout.split()
    assert abs(float(seen) - time.time() - seconds) < 60
    assert removed == "1"
    assert young.exists()
    assert not old.exists()
