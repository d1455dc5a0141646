"""Samples of chunks: consistent, nested, and of about the size that is asked for."""

import numpy as np
import pytest
from helpers import job_values, read_volume, toy, write_job

from beam_inference.cli.main import main
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.sampling import count_and_sample, sample_chunks


def grid(shape, start=(0, 0, 0), chunk=(4, 8, 16)):
    return ChunkGrid(
        BoundingBox(start, tuple(a + n for a, n in zip(start, shape, strict=True))), chunk
    )


def test_of_about_the_size_that_is_asked_for_and_evenly_spread():
    chunks = grid((400, 800, 1600))  # 10^6
    found = np.array(list(sample_chunks(chunks, 0.01, seed=0)))
    assert abs(len(found) - 10_000) < 400
    thirds = np.histogram(found, bins=3, range=(0, chunks.count))[0]
    assert abs(thirds - len(found) / 3).max() < 250
    assert list(sample_chunks(chunks, 1.0, seed=0)) == list(range(chunks.count))


def test_a_larger_share_holds_a_smaller_one_and_another_seed_is_another_sample():
    chunks = grid((80, 160, 320))
    small = set(sample_chunks(chunks, 0.05, 0))
    large = set(sample_chunks(chunks, 0.2, 0))
    assert small < large
    assert small != set(sample_chunks(chunks, 0.05, 1))


def test_it_stays_in_the_same_places_when_the_volume_grows():
    old = grid((80, 160, 320))
    new = grid((120, 160, 480))
    places = [
        {chunks.core_box(i).start for i in sample_chunks(chunks, 0.1, 7)} for chunks in (old, new)
    ]
    assert places[0] == {
        start for start in places[1] if old.roi.contains(BoundingBox(start, start))
    } & {old.core_box(i).start for i in range(old.count)}


@pytest.mark.parametrize("seams", [pytest.param("recompute", marks=pytest.mark.slow), "exchange"])
def test_a_sample_counts_when_the_whole_job_follows(volume_in, tmp_path, capsys, seams):
    values = job_values(
        volume_in,
        tmp_path / "out",
        model=toy("position", output_channels=2, normalize="unit"),
        inference={"seams": seams},
    )
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", job, "--sample", "0.3", "--seed", "5"]) == 0
    said = capsys.readouterr().out
    done = int(said.split(" chunks done")[0].split()[-1])
    assert 0 < done < 18
    assert "others of the job are not" in said
    assert "--sample" not in said.split("others of the job are not")[1]
    assert main(["run", job]) == 0
    assert f"({18 - done} by this launch)" in capsys.readouterr().out
    assert main(["verify", job, "--deep"]) == 0
    values["output"]["path"] = str(tmp_path / "whole")
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), read_volume(tmp_path / "whole"))


def test_a_sample_of_nothing_and_shares_that_are_none_are_refused(job, capsys):
    assert main(["run", job(), "--sample", "0.0000001"]) == 2
    assert "holds none of the 18 chunks" in capsys.readouterr().err
    assert main(["run", job(), "--sample", "0.5", "--chunks", "x"]) == 2
    assert "give one of them" in capsys.readouterr().err
    for words in (
        ["--sample=2"],
        ["--sample=0"],
        ["--sample=-1"],
        ["--sample=many"],
        ["--sample=0.3", "--seed=-1"],
    ):
        with pytest.raises(SystemExit) as exit:
            main(["run", job(), *words])
        assert exit.value.code == 2


def test_drawn_by_lot_each_as_likely_as_any_other():
    assert count_and_sample(iter(range(3)), 5) == (3, [0, 1, 2])
    assert count_and_sample([], 5) == (0, [])
    count, found = count_and_sample(iter(range(100_000)), 2000)
    assert count == 100_000
    assert len({*found}) == 2000
    tenths = np.histogram(found, bins=10, range=(0, 100_000))[0]
    assert abs(tenths - 200).max() < 60
