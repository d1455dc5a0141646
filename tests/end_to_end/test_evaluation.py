"""Evaluations that are killed, and on other runners: the scores of one that is left alone."""

import json
import sys

import numpy as np
import pytest
from clusters.programs import job_server_flags
from helpers import killed_in_each, write_volume
from skimage.metrics import adapted_rand_error, variation_of_information

from beam_inference.cli.main import main

SHAPE = (48, 56, 64)
FLAGS = ["--ignore=0", "--cell_shape=8x8x8", "--chunk_shape=8x8x16", "--json"]
RUNNERS = {
    "processes": ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
    "threads": ["--direct_running_mode=multi_threading", "--direct_num_workers=3"],
}


def blobs(seed, side, most):
    coarse = np.random.default_rng(seed).integers(0, most, [-(-n // side) for n in SHAPE])
    labels = coarse.repeat(side, 0).repeat(side, 1).repeat(side, 2)
    return labels[tuple(slice(n) for n in SHAPE)].astype(np.uint32)


@pytest.fixture
def volumes(tmp_path):
    """Words of the command, and its scores by scikit-image."""
    truth = blobs(1, 6, 9)
    segments = blobs(2, 5, 40)
    options = {"block_shape": (16, 16, 16)}
    paths = [
        write_volume(tmp_path / "objects", segments, **options),
        write_volume(tmp_path / "labels", truth, **options),
    ]
    split, merge = variation_of_information(truth, segments, ignore_labels=[0])
    error, _, _ = adapted_rand_error(truth, segments, ignore_labels=[0])
    return ["evaluate", *paths, *FLAGS], (split + merge, error)


def paths_in(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def judge(words, capsys, *flags):
    assert main([*words, *flags]) == 0
    return json.loads(capsys.readouterr().out)


def check_scores(found, expected):
    objects = found["objects"]
    scores = (objects["variation_of_information"], objects["adapted_rand_error"])
    assert scores == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_in_every_stage_and_given_again(volumes, tmp_path, capsys):
    words, expected = volumes
    whole = judge(words, capsys)
    check_scores(whole, expected)
    stages = ["count", "sum", "rank"]
    before = paths_in(tmp_path)
    command = [sys.executable, "-m", "beam_inference", *words]
    assert list(killed_in_each(command, tmp_path / "objects", "evaluate", stages)) == stages
    assert len(paths_in(tmp_path) - before) > len(stages)
    assert judge(words, capsys) == whole
    assert paths_in(tmp_path) == before


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", RUNNERS.values(), ids=RUNNERS.keys())
def test_no_score_depends_on_how_beam_runs_here(volumes, capsys, flags):
    words, expected = volumes
    found = judge(words, capsys, *flags)
    check_scores(found, expected)
    assert found == judge(words, capsys)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dask_gives_the_same_scores(volumes, capsys, dask_cluster):
    words, expected = volumes
    found = judge(words, capsys, *dask_cluster)
    check_scores(found, expected)
    assert found == judge(words, capsys)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["Prism", "Flink"])
def test_a_portable_runner_gives_the_same_scores(volumes, capsys, engine, tmp_path_factory):
    words, expected = volumes
    flags = job_server_flags(engine, tmp_path_factory.mktemp("server"))
    found = judge(words, capsys, f"--runner={engine}Runner", *flags)
    check_scores(found, expected)
    assert found == judge(words, capsys)
