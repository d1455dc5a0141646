"""Steps of a normalisation by section, against NumPy on whole arrays."""

import json

import numpy as np
import pytest
import torch
import yaml
from helpers import do_and_read, job_values, read_volume, write_job, write_levels, write_volume

from beam_inference import predict, prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.parts import cutout, open_input
from beam_inference.launch.job_files import load_job

BLANK = 9
"""A section of one value."""


def sections(dtype, channels=1):
    """Sections whose brightness and contrast differ, from section -3 on."""
    generator = np.random.default_rng(5)
    shape = (channels, 20, 24, 28)
    bright = generator.uniform(40, 160, 20).reshape(-1, 1, 1)
    spread = generator.uniform(2, 30, 20).reshape(-1, 1, 1)
    values = (bright + spread * generator.normal(size=shape)).clip(0, 255).astype(dtype)
    values[:, BLANK] = 77
    return values


@pytest.fixture(params=["uint8", "int16", "float32"])
def made(request, tmp_path):
    """A volume: its array, its URL, and the file with its levels."""
    return write(tmp_path, sections(request.param))


def write(folder, array):
    url = write_volume(folder / "in", array, (-3, 5, 2), block_shape=(8, 8, 8))
    return array, url, write_levels(url, folder)


def by_hand(array, steps):
    """What steps make of the volume: each after the one before, in float64."""
    values = array.astype(np.float64)
    for step in steps:
        ((key, told),) = [each for each in step.items() if each[0] not in ("offset", "channels")]
        if key == "scale":
            values = values * told + step["offset"]
            continue
        flat = values.transpose(1, 0, 2, 3).reshape(values.shape[1], -1)
        low, high = (
            np.quantile(flat, told.get(*pair), axis=1, method="inverted_cdf").reshape(-1, 1, 1)
            for pair in (("low", 0.0), ("high", 1.0))
        )
        if key == "clip":
            values = values.clip(low, high)
            continue
        zero, number = (low, high - low)
        if key == "standard":
            zero = flat.mean(axis=1).reshape(-1, 1, 1)
            number = flat.std(axis=1, ddof=told.get("ddof", 0)).reshape(-1, 1, 1)
        number = np.where(flat.std(axis=1).reshape(-1, 1, 1) == 0, 0, number)
        divisor = np.maximum(number, told.get("floor", 1e-8)) + told.get("eps", 0)
        values = np.where(number == 0, 0, (values - zero) / divisor)
    return values


def with_levels(steps, path):
    return [
        {
            key: {"levels": str(path), "by": "section"} | told if isinstance(told, dict) else told
            for key, told in step.items()
        }
        for step in steps
    ]


def outputs(url, folder, steps, channels=1, **sections_of_job):
    """What a job gives in three ways of cutting it into chunks, of the same bytes."""
    ways = [([8, 16, 8], "recompute"), ([24, 24, 32], "recompute"), ([16, 8, 16], "exchange")]
    first, *others = [
        do_and_read(
            job_values(
                url,
                folder / f"out{number}",
                model={
                    "input_channels": channels,
                    "output_channels": channels,
                    "normalize": steps,
                },
                inference={"chunk_shape": chunk_shape, "strategy": strategy},
                output={"block_shape": [8, 8, 8]},
                **sections_of_job,
            ),
            folder,
        )
        for number, (chunk_shape, strategy) in enumerate(ways)
    ]
    assert {each.tobytes() for each in others} == {first.tobytes()}
    return first


STANDARD = [
    [{"standard": {}}],
    [{"standard": {"ddof": 1, "eps": 0.5}}],
    [{"scale": -0.5, "offset": 3}, {"standard": {"floor": 4.0}}, {"scale": 2, "offset": 1}],
]
QUANTILES = [
    [{"rescale": {}}],
    [{"rescale": {"low": 0.01, "high": 0.99, "eps": 1e-3}}],
    [{"clip": {"low": 0.05, "high": 0.95}}, {"rescale": {}}, {"scale": 2, "offset": -1}],
    [
        {"scale": 0.5, "offset": 3},
        {"rescale": {"low": 0.02, "high": 0.98}},
        {"clip": {"low": 0.05, "high": 0.95}},
        {"rescale": {}},
    ],
]


@pytest.mark.parametrize("steps", STANDARD, ids=str)
def test_each_section_is_standardised_by_its_own_moments(made, tmp_path, steps):
    array, url, levels = made
    found = outputs(url, tmp_path, with_levels(steps, levels))
    np.testing.assert_allclose(found, by_hand(array, steps), rtol=3e-6, atol=4e-5)


@pytest.mark.parametrize("steps", QUANTILES, ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_each_section_is_rescaled_by_its_own_quantiles(tmp_path, dtype, steps):
    array, url, levels = write(tmp_path, sections(dtype))
    found = outputs(url, tmp_path, with_levels(steps, levels))
    np.testing.assert_allclose(found, by_hand(array, steps), rtol=3e-6, atol=4e-5)


def test_levels_of_sections_are_of_all_channels_together(tmp_path):
    array, url, levels = write(tmp_path, sections("uint8", channels=2))
    steps = [{"scale": 2, "offset": 1}, {"standard": {"ddof": 1}}]
    found = outputs(url, tmp_path, with_levels(steps, levels), channels=2)
    np.testing.assert_allclose(found, by_hand(array, steps), rtol=3e-6, atol=4e-5)
    steps = [{"standard": {}, "channels": [1]}]
    found = outputs(url, tmp_path / "one", with_levels(steps, levels), channels=2)
    np.testing.assert_allclose(found[0], array[0], atol=1e-4)
    # sums are exact to a share of the largest value, of all channels
    np.testing.assert_allclose(found[1], by_hand(array, steps)[1], atol=1e-4)


@pytest.mark.parametrize("fill", ["reflect", "symmetric", "edge"])
def test_sections_beyond_the_volume_are_those_that_they_come_from(tmp_path, fill):
    array, url, levels = write(tmp_path, sections("uint8"))
    steps = [{"standard": {}}]
    model = {"normalize": with_levels(steps, levels)}
    values = job_values(url, tmp_path / "out", model=model, input={"fill": fill})
    config = prepare(parse_job(values, tmp_path)).read_job().config
    found = cutout(config, open_input(config), BoundingBox((-6, 5, 2), (20, 29, 30)))
    expected = np.pad(by_hand(array, steps), ((0, 0), (3, 3), (0, 0), (0, 0)), fill)
    np.testing.assert_allclose(found, expected, rtol=3e-6, atol=4e-5)


def test_the_bytes_are_those_of_levels_by_section_without_steps(tmp_path):
    array, url, levels = write(tmp_path, sections("uint8"))
    named = {"levels": str(levels), "low": 0.01, "high": 0.99, "by": "section"}
    whole = outputs(url, tmp_path / "whole", named)
    steps = outputs(url, tmp_path / "steps", [{"rescale": named}, {"clip": [0, 1]}])
    assert whole.tobytes() == steps.tobytes()
    assert len(np.unique(array)) > 9


def test_a_job_goes_on_without_the_levels_that_it_began_with(made, tmp_path):
    _, url, levels = made
    values = job_values(
        url, tmp_path / "out", model={"normalize": [{"standard": {"levels": "a", "by": "section"}}]}
    )
    values["model"]["normalize"][0]["standard"]["levels"] = str(levels)
    path = write_job(tmp_path / "job.yaml", values)
    assert main(["run", str(path)]) == 0
    before = read_volume(tmp_path / "out")
    recorded = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    (step,) = recorded["config"]["model"]["normalize"]
    assert len(step["standard"]["mean"]) == 20
    record = tmp_path / "again.yaml"
    record.write_text(yaml.safe_dump(values | {"output": values["output"] | {"path": "again"}}))
    assert main(["run", str(record)]) == 0
    assert main(["verify", str(path), "--recompute", "1"]) == 0
    assert main(["reproduce", str(tmp_path / "out"), "--sample", "1"]) == 0
    assert read_volume(tmp_path / "again").tobytes() == before.tobytes()


SECTION = {"by": "section"}
OLD = {"levels": "old.json"}
NUMBERS = {"start": 0, "mean": [1.0], "std": [1.0]}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [{"standard": SECTION | {"of": "nonzero_box"}}],
            "is not known by section",
        ),
        ([{"clip": SECTION | {"low": 0.3}}], "must be two of the quantiles"),
        ([{"clip": SECTION}, {"standard": SECTION}], "not known here, because a clip before it"),
        ([{"scale": -1}, {"rescale": SECTION}], "because a scale before it is negative"),
        ([{"standard": {"by": "patch"}}, {"rescale": SECTION}], "depends on each patch"),
        ([{"standard": SECTION}, {"rescale": {}}], "because a step before it is by section"),
        ([{"standard": SECTION}, {"standard": {}}], "because a step before it is by section"),
        (
            [
                {"standard": {"start": -3, "mean": [0.0] * 20, "std": [1.0] * 20}},
                {"rescale": SECTION},
            ],
            "a step before it names numbers of sections",
        ),
        (
            [{"scale": [1, 2]}, {"standard": SECTION}],
            "have changed channels in different ways",
        ),
        ([{"standard": {"start": 0, "mean": [1.0], "std": [1.0]}}], "for the sections 0 … 0; the"),
        ([{"standard": {"start": 0, "mean": [1.0], "std": []}}], "mean is of 1 sections, and std"),
        (
            [{"standard": SECTION | {"levels": "old.json"}}],
            "made by an earlier version, without mean",
        ),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(tmp_path, steps, message):
    _, url, levels = write(tmp_path, sections("uint8", channels=2))
    told = json.loads(levels.read_text())
    for name, keys in {
        "levels": {},
        "old": {"section_moments": None},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(told | keys))
    named = [
        {
            key: {"levels": "levels.json"} | each
            if isinstance(each, dict) and "start" not in each and each != {"by": "patch"}
            else each
            for key, each in step.items()
        }
        for step in steps
    ]
    model = {"input_channels": 2, "output_channels": 2, "normalize": named}
    path = write_job(tmp_path / "job.yaml", job_values(url, tmp_path / "out", model=model))
    with pytest.raises(ConfigError, match=message):
        prepare(load_job(str(path)))
    assert not (tmp_path / "out").exists()


def test_quantiles_of_sections_are_not_known_of_floats(tmp_path):
    _, url, levels = write(tmp_path, sections("float32"))
    steps = [{"rescale": {"levels": str(levels), "by": "section"}}]
    path = write_job(
        tmp_path / "job.yaml", job_values(url, tmp_path / "out", model={"normalize": steps})
    )
    with pytest.raises(ConfigError, match="because .* has floats: standardise instead"):
        prepare(load_job(str(path)))


@pytest.mark.parametrize(
    "by", [{"levels": "a", "by": "section"}, {"start": 0, "mean": [1.0], "std": [1.0]}]
)
def test_it_cannot_be_undone_nor_done_to_an_array(tmp_path, by):
    _, url, _ = write(tmp_path, sections("uint8"))
    model = {"normalize": [{"standard": by}], "denormalize": True}
    path = write_job(tmp_path / "job.yaml", job_values(url, tmp_path / "out", model=model))
    with pytest.raises(ConfigError, match="denormalize cannot undo what is done by section"):
        load_job(str(path))
    with pytest.raises(ConfigError, match="levels belong to a volume"):
        predict(
            np.zeros((8, 8, 8), np.uint8),
            torch.nn.Identity(),
            patch_shape=(8, 8, 8),
            output_channels=1,
            normalize=[{"standard": by}],
        )
