"""The strategy of ``seams: exact`` is chosen by what it costs, and changes no bit."""

import json
import logging
import sys

import numpy as np
import pytest
from helpers import job_values, plan_of, read_volume, toy, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.chunk_shape import AUTO_MEMORY_BYTES
from beam_inference.job.place import THIS_PROCESS, Place
from beam_inference.launch import planned_job
from beam_inference.launch.planned_job import plan_job
from beam_inference.launch.prepare import prepare
from beam_inference.launch.strategy import (
    NOMINAL_VOXELS_PER_SECOND,
    SEAM_BYTES_PER_SECOND,
    SECOND_STAGE_SECONDS,
    cheaper_strategy,
)


@pytest.fixture
def values(tmp_path):
    """A job that leaves the strategy; its neighbouring chunks share many patches."""
    array = np.random.default_rng(0).integers(0, 256, (32, 64, 64), dtype=np.uint8)
    write_volume(tmp_path / "in", array)
    values = job_values(
        tmp_path / "in",
        tmp_path / "out",
        model=toy("same", normalize="unit", activation="sigmoid"),
        inference={"patch_overlap": [4, 8, 8], "chunk_shape": [16, 16, 16]},
    )
    values["inference"].pop("seams", None)
    return values


def plans(chunk):
    box = BoundingBox((0, 0, 0), (64, 64, 64))
    return [
        plan_of(box, (16, 16, 16), (8, 8, 8), chunk, strategy=strategy)
        for strategy in ("exchange", "recompute")
    ]


def test_the_break_even():
    exchange, recompute = plans((16, 16, 16))
    saved = recompute.totals.patch_count - exchange.totals.patch_count
    moved = 2 * 3 * 4 * exchange.totals.seam_voxels / SEAM_BYTES_PER_SECOND
    even = (moved + SECOND_STAGE_SECONDS) / saved
    assert cheaper_strategy(exchange, recompute, 3, 1.01 * even) == "exchange"
    assert cheaper_strategy(exchange, recompute, 3, 0.99 * even) == "recompute"


def test_where_chunks_share_nothing_there_is_one_stage():
    assert cheaper_strategy(*plans((64, 64, 64)), 1, 1e9) == "recompute"


@pytest.mark.parametrize(("rate", "strategy"), [(1.0, "exchange"), (1e15, "recompute")])
def test_the_plan_goes_by_a_nominal_speed(values, tmp_path, monkeypatch, rate, strategy):
    monkeypatch.setitem(NOMINAL_VOXELS_PER_SECOND, "cpu", rate)
    job = plan_job(parse_job(values, tmp_path))
    assert job.plan.strategy == strategy


def test_a_launch_goes_by_its_network_and_keeps_the_choice(values, tmp_path, monkeypatch, caplog):
    given = []

    def choose(exchange, recompute, channels, seconds_per_patch):
        given.append((exchange.strategy, recompute.strategy, channels, seconds_per_patch))
        return "exchange"

    monkeypatch.setattr(sys.modules[prepare.__module__], "cheaper_strategy", choose)
    caplog.set_level(logging.INFO)
    launch = prepare(parse_job(values, tmp_path))
    assert launch.read_job().plan.strategy == "exchange"
    assert "inference.strategy: auto is exchange" in caplog.text
    (call,) = given
    assert call[:3] == ("exchange", "recompute", 1)
    assert 0 < call[3] < 10
    again = prepare(parse_job(values, tmp_path))
    assert (again.read_job().plan.strategy, len(given)) == ("exchange", 1)


def test_another_launch_may_choose_another_strategy(values, tmp_path, capsys):
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", path, "--sample", "0.3", "--set", "inference.strategy=exchange"]) == 0
    assert main(["run", path, "--set", "inference.strategy=recompute"]) == 0
    assert main(["verify", path, "--deep", "--recompute", "0.2"]) == 0
    whole = read_volume(tmp_path / "out")
    for name in ("exchange", "recompute"):
        words = ["--set", f"inference.seams={name}", "--set", f"output.path={tmp_path / name}"]
        assert main(["run", path, *words]) == 0
        np.testing.assert_array_equal(read_volume(tmp_path / name), whole)
    capsys.readouterr()


def test_former_seam_modes_are_read_as_strategies(values, tmp_path):
    for former in ("exchange", "recompute"):
        values["inference"]["seams"] = former
        inference = parse_job(values, tmp_path).inference
        assert (inference.seams, inference.strategy) == ("exact", former)
    values["inference"]["strategy"] = "exchange"
    with pytest.raises(ConfigError, match="strategy: recompute, but strategy says exchange"):
        parse_job(values, tmp_path)
    values["inference"] |= {"seams": "crop"}
    with pytest.raises(ConfigError, match="only with seams: exact"):
        parse_job(values, tmp_path)


def test_values_beyond_the_bound_are_told_of(values, tmp_path, capsys):
    values["model"] = toy("same", prediction_bound=16)
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", path]) == 0
    assert "patches have values beyond what sums are exact for" in capsys.readouterr().out
    assert main(["verify", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["patches_beyond_bound"] > 0
    values["model"]["prediction_bound"] = 255
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", path]) == 2
    assert "engine.sum_step" in capsys.readouterr().err
    assert main(["run", path, "--overwrite"]) == 0
    assert "patches have values beyond" not in capsys.readouterr().out


def test_a_network_without_a_bound_is_refused_where_it_cannot_be_tried(values, tmp_path):
    values["model"] = {"path": "identity"}
    elsewhere = Place(is_this_machine=False)
    values["inference"] |= {"device": "cpu", "engine": "torch", "batch_size": 1, "threads": 1}
    with pytest.raises(ConfigError, match="nothing says how large the network's values are"):
        prepare(parse_job(values, tmp_path), elsewhere)
    values["model"]["prediction_bound"] = 255
    assert prepare(parse_job(values, tmp_path), elsewhere).read_job().prediction_bound == 256


@pytest.mark.parametrize("unfit", [["exchange"], ["recompute"], ["exchange", "recompute"]])
def test_auto_takes_a_strategy_by_which_a_block_fits(values, tmp_path, monkeypatch, unfit):
    find = planned_job.best_plan_for

    def best_plan_for(job, strategy, *rest):
        return None if strategy in unfit else find(job, strategy, *rest)

    monkeypatch.setattr(planned_job, "best_plan_for", best_plan_for)
    values["inference"]["chunk_shape"] = "auto"
    config = parse_job(values, tmp_path)
    if len(unfit) == 2:
        with pytest.raises(ConfigError, match="not one block fits the 2 GiB"):
            plan_job(config, THIS_PROCESS, 1, None)
        return
    job = plan_job(config, THIS_PROCESS, 1, None)
    assert job.settings.strategy not in unfit
    assert job.plan == find(job, job.settings.strategy, THIS_PROCESS, AUTO_MEMORY_BYTES, 1)
