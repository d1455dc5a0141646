"""The files by which chunks exchange sums."""

import numpy as np
from helpers import launch_of

from beam_inference import arrays
from beam_inference.config.storage import Storage
from beam_inference.worker.seam_files import SeamFiles
from beam_inference.worker.worker import Worker


def test_sums_of_several_files_are_read_as_they_were_written(tmp_path):
    """Files end anywhere: within a box, and where one ends."""
    random = np.random.default_rng(0)
    files = SeamFiles(f"file://{tmp_path}", Storage(), "0" * 64, file_values=30)
    shapes = [(3, 2, 5), (1, 4, 4), (5, 1, 6)]
    said = {
        7: [random.random((2, *shape), np.float32) for shape in shapes],
        9: [random.random((2, 3, 3, 5), np.float32)],
    }
    for contributor, sums in said.items():
        # views, too
        files.write(12, contributor, [sums[0].swapaxes(2, 3).copy().swapaxes(2, 3), *sums[1:]])
    wanted = [(7, shapes), (9, [(3, 3, 5)])]
    found = files.read(12, wanted, 2)
    for read, sums in zip(found, said.values(), strict=True):
        for array, expected in zip(read, sums, strict=True):
            np.testing.assert_array_equal(array, expected)
    there = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert [path.stat().st_size - 4 for path in there] == [120] * 5 + [8 * (30 + 16 + 30) - 600] + [
        120
    ] * 3
    there[3].unlink()
    assert files.read(12, wanted, 2) is None
    files.forget(12)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_files_of_two_chunks_that_were_exchanged_are_not_believed(tmp_path):
    said = {4: np.ones((1, 2, 2, 2), np.float32), 5: np.full((1, 2, 2, 2), 2, np.float32)}
    files = SeamFiles(f"file://{tmp_path}", Storage(), "0" * 64)
    for receiver, sums in said.items():
        files.write(receiver, 7, [sums])
    one, other = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    assert files.read(4, [(7, [(2, 2, 2)])], 1) is None
    assert files.read(5, [(7, [(2, 2, 2)])], 1) is None


def test_files_of_another_job_are_not_believed(tmp_path):
    sums = np.ones((1, 2, 2, 2), np.float32)
    SeamFiles(f"file://{tmp_path}", Storage(), "0" * 64).write(4, 7, [sums])
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    other = SeamFiles(f"file://{tmp_path}", Storage(), "1" * 64)
    other.write(4, 7, [2 * sums])
    (own,) = (each for each in tmp_path.rglob("*") if each.is_file() and each != path)
    own.write_bytes(path.read_bytes())
    assert other.read(4, [(7, [(2, 2, 2)])], 1) is None


def test_the_second_stage_begins_with_what_the_first_one_needed_given_back(
    volume_in, tmp_path, monkeypatch
):
    """The projection of memory counts on this."""
    launch = launch_of(volume_in, tmp_path / "out")
    worker = Worker(launch)
    kept = []
    chunks = range(launch.read_job().plan.chunks.count)
    list(worker.sum_chunks(chunks))
    arrays.empty((2**20,), np.uint8)
    assert arrays.idle_bytes() > 0
    read = SeamFiles.read
    monkeypatch.setattr(
        SeamFiles, "read", lambda *arguments: kept.append(arrays.idle_bytes()) or read(*arguments)
    )
    assert {record.outcome for record in worker.merge_seams(chunks)} == {"done"}
    assert kept[0] == 0
