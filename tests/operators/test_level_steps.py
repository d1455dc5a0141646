"""Steps of a normalisation made of levels, and of each patch, against NumPy on whole arrays."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers import do_and_read, job_values, read_volume, write_job, write_levels, write_volume

from beam_inference import predict, prepare
from beam_inference.cli.main import main
from beam_inference.config.network import Network
from beam_inference.errors import ConfigError
from beam_inference.launch.job_files import load_job
from beam_inference.operators.distributions import QUANTILES
from beam_inference.operators.level_steps import definite_steps
from beam_inference.operators.levels import Levels
from beam_inference.operators.normalize_steps import StepwiseNormalization


def background(dtype):
    """Two channels, one far from zero, in a corner of a volume of zeros."""
    array = np.zeros((2, 20, 24, 28), np.float32)
    noise = np.random.default_rng(1).gamma(2, 300, (2, 15, 18, 20))
    array[:, 3:18, 4:22, 5:25] = noise + np.array([0, 4000]).reshape(2, 1, 1, 1)
    return array.astype(dtype)


@pytest.fixture(scope="module", params=["float32", "int16"])
def made(request, tmp_path_factory):
    """A volume of two channels: its array, its URL, and the file with its levels."""
    folder = tmp_path_factory.mktemp("levels")
    array = background(request.param)
    url = write_volume(folder / "in", array, block_shape=(8, 8, 8), format="zarr3")
    return array, url, write_levels(url, folder)


def quantile(array, share):
    """Of each channel, (C, 1, 1, 1)."""
    flat = array.reshape(len(array), -1)
    found = np.quantile(flat, share, axis=1, method="inverted_cdf")
    return found.reshape(-1, 1, 1, 1)


def by_hand(array, steps):
    """What steps make of the whole volume: each after the one before, in float64."""
    there = np.argwhere((array != 0).any(axis=0))
    box = (slice(None), *map(slice, there.min(axis=0), there.max(axis=0) + 1))
    values = array.astype(np.float64)
    for step in steps:
        ((key, told),) = [each for each in step.items() if each[0] != "offset"]
        of = told.get("of") if isinstance(told, dict) else None
        if of == "nonzero":
            values = np.stack([nonzero_by_hand(channel, key, told) for channel in values])
            continue
        part = values[box] if of else values
        axes = (1, 2, 3)
        if key == "clip":
            values = np.clip(values, quantile(part, told["low"]), quantile(part, told["high"]))
        elif key == "rescale":
            low, high = (quantile(part, told.get(*pair)) for pair in (("low", 0), ("high", 1)))
            values = (values - low) / (np.maximum(high - low, 1e-8) + told.get("eps", 0))
        elif key == "standard":
            std = part.std(axis=axes, keepdims=True, ddof=told.get("ddof", 0))
            divisor = np.maximum(std, told.get("floor", 1e-8)) + told.get("eps", 0)
            values = (values - part.mean(axis=axes, keepdims=True)) / divisor
        else:
            values = values * told + step["offset"]
    return values


def nonzero_by_hand(channel, key, told):
    """What a step makes of a channel, whose zeros it leaves alone."""
    there = channel[channel != 0]
    if key == "rescale":
        zero, one = np.quantile(there, [told["low"], told["high"]], method="inverted_cdf")
        divisor = one - zero
    else:
        zero, divisor = there.mean(), there.std(ddof=told.get("ddof", 0))
    return np.where(channel != 0, (channel - zero) / (divisor + told.get("eps", 0)), 0)


BOX = {"of": "nonzero_box"}
NONZERO = {"of": "nonzero"}
STEPS = [
    [{"standard": {}}],
    [{"standard": BOX | {"ddof": 1, "eps": 0.5}}],
    [{"rescale": {}}],
    [{"rescale": BOX | {"low": 0.01, "high": 0.99, "eps": 1e-6}}],
    [{"clip": BOX | {"low": 0.005, "high": 0.995}}, {"standard": BOX}],
    [{"standard": NONZERO | {"ddof": 1}}],
    [
        {"scale": 0.5, "offset": 0},
        {"rescale": NONZERO | {"low": 0.01, "high": 0.99, "eps": 0.1}},
        {"clip": BOX | {"low": 0.0, "high": 1.0}},
        {"scale": 2, "offset": 1},
    ],
    [{"scale": -0.5, "offset": 3}, {"standard": BOX | {"floor": 1e4}}, {"scale": 2, "offset": 1}],
    [
        {"scale": 0.5, "offset": 3},
        {"clip": {"low": 0.1, "high": 0.999}},
        {"clip": {"low": 0.02, "high": 0.98}},
        {"scale": 2, "offset": -1},
        {"standard": {"ddof": 1}},
        {"rescale": {"low": 0.05, "high": 0.95}},
    ],
]


def with_levels(steps, levels):
    """Steps that name a levels file wherever they need one."""
    return [
        {k: {"levels": str(levels)} | v if isinstance(v, dict) else v for k, v in step.items()}
        for step in steps
    ]


def network(steps):
    return Network.model_validate(
        {"path": "identity", "input_channels": 2, "output_channels": 2, "normalize": steps}
    )


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_steps_take_the_values_as_the_steps_before_have_left_them(made, steps):
    array, _, levels = made
    found = definite_steps(
        network(with_levels(steps, levels)).normalize,
        2,
        cache(lambda path: Levels.model_validate_json(Path(path).read_text())),
    )
    values = StepwiseNormalization(found)(array[None].astype(np.float32))[0]
    np.testing.assert_allclose(values, by_hand(array, steps), rtol=3e-6, atol=2e-5)


def outputs(url, folder, steps, **sections):
    """What a job gives in three ways of cutting it into chunks."""
    ways = [([8, 16, 8], "recompute"), ([24, 24, 32], "recompute"), ([16, 8, 16], "exchange")]
    return [
        do_and_read(
            job_values(
                url,
                folder / f"out{number}",
                model={"input_channels": 2, "output_channels": 2, "normalize": steps}
                | sections.get("model", {}),
                inference={"chunk_shape": chunk_shape, "strategy": strategy}
                | sections.get("inference", {}),
                output={"block_shape": [8, 8, 8]},
                input=sections.get("input", {}),
            ),
            folder,
        )
        for number, (chunk_shape, strategy) in enumerate(ways)
    ]


def test_channels_have_steps_of_their_own(made, tmp_path):
    array, url, levels = made
    steps = [
        {"clip": [0, 500], "channels": [0]},
        {"standard": {"mean": [80], "std": 70}, "channels": [0]},
        {"standard": {"levels": str(levels)} | BOX, "channels": [1]},
        {"scale": [2, 3], "channels": [1, 0]},
    ]
    first, *others = outputs(url, tmp_path, steps)
    assert {each.tobytes() for each in others} == {first.tobytes()}
    clipped = (array[0].clip(0, 500).astype(float) - 80) / 70
    np.testing.assert_allclose(first[0], 3 * clipped, atol=4e-5)
    np.testing.assert_allclose(first[1], 2 * by_hand(array, [{"standard": BOX}])[1], atol=4e-5)


@pytest.mark.parametrize("steps", [STEPS[1], STEPS[4]], ids=str)
def test_steps_of_levels_have_no_seams(made, tmp_path, steps):
    array, url, levels = made
    first, *others = outputs(url, tmp_path, with_levels(steps, levels))
    assert {each.tobytes() for each in others} == {first.tobytes()}
    np.testing.assert_allclose(first, by_hand(array, steps), rtol=5e-6, atol=4e-5)


PATCH = {"standard": {"by": "patch", "eps": 0.25, "ddof": 1}}


def test_a_patch_is_standardised_by_itself_whatever_chunk_it_is_in(made, tmp_path):
    array, url, _ = made
    keys = {
        "model": {"crop_margin": [1, 2, 2]},
        "inference": {"patch_shape": [8, 12, 10], "patch_overlap": [0, 0, 0], "lattice": "pad"},
        "input": {"fill": "symmetric"},
    }
    first, *others = outputs(url, tmp_path, [{"scale": 0.5}, PATCH], **keys)
    assert {each.tobytes() for each in others} == {first.tobytes()}
    padded = np.pad(array, ((0, 0), (1, 5), (2, 2), (2, 4)), "symmetric") * 0.5
    expected = np.zeros((2, 24, 24, 30))
    for z in range(0, 24, 8):
        for y in range(0, 24, 12):
            for x in range(0, 30, 10):
                patch = padded[:, z : z + 10, y : y + 16, x : x + 14]
                std = patch.std(axis=(1, 2, 3), ddof=1, keepdims=True)
                values = (patch - patch.mean(axis=(1, 2, 3), keepdims=True)) / (std + 0.25)
                expected[:, z : z + 8, y : y + 12, x : x + 10] = values[:, 1:-1, 2:-2, 2:-2]
    np.testing.assert_allclose(first, expected[:, :20, :, :28], rtol=3e-6, atol=2e-5)


@pytest.mark.parametrize("far", [0, 60_000])
def test_numpy_and_torch_standardise_a_patch_to_a_part_in_a_million(far):
    import torch

    normalize = StepwiseNormalization(network([PATCH]).normalize)
    batch = (np.random.default_rng(1).normal(far, 300, (3, 2, 9, 40, 40))).astype(np.float32)
    batch[2, 1] = 7.3  # one value throughout
    wide = batch.astype(np.float64)
    std = wide.std(axis=(2, 3, 4), ddof=1, keepdims=True)
    expected = (wide - wide.mean(axis=(2, 3, 4), keepdims=True)) / (std + 0.25)
    for found in (normalize(batch.copy()), normalize(torch.from_numpy(batch.copy())).numpy()):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        alone = normalize(batch[1:2].copy())  # a patch's place in the batch changes nothing
        np.testing.assert_array_equal(alone[0], normalize(batch.copy())[1])


def test_predict_takes_steps_of_patches_but_none_of_levels(made):
    array, _, levels = made
    keys = {"patch_shape": (20, 24, 28), "output_channels": 2}
    found = predict(array, lambda batch: batch, normalize=[PATCH], **keys)
    expected = (array - array.mean(axis=(1, 2, 3), keepdims=True)) / (
        array.std(axis=(1, 2, 3), ddof=1, keepdims=True) + 0.25
    )
    np.testing.assert_allclose(found, expected, rtol=3e-6, atol=1e-5)
    with pytest.raises(ConfigError, match="levels belong to a volume"):
        predict(array, lambda batch: batch, normalize=with_levels(STEPS[0], levels), **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"number": 0}, r"has written: channels\.1\.number: Input should be greater than 0"),
        ({"number": 10**400}, "has written: "),
        (
            {"std": -1},
            r"has written: channels\.1\.std: Input should be greater than or equal to 0",
        ),
        (
            {"mean": float("nan")},
            r"has written: channels\.1\.mean: Input should be a finite number",
        ),
        (
            {"upto": [[1, 1e300, 1e308]] * len(QUANTILES), "mean": -1e308},
            r"has written: channels\.1\.mean: Input should be greater than or equal to -4",
        ),
        (
            {"upto": [[1, -1e308, 0.0]] * 9 + [[1, 1e308, 0.0]] * (len(QUANTILES) - 9)},
            "holds sums that are too large",
        ),
        ({"values": list(range(len(QUANTILES), 0, -1))}, "its values at quantiles do not ascend"),
    ],
    ids=str,
)
def test_levels_that_make_no_sense_are_refused(made, tmp_path, keys, message):
    _, url, levels = made
    told = json.loads(levels.read_text())
    told["channels"][1] |= keys
    (tmp_path / "levels.json").write_text(json.dumps(told))
    steps = with_levels([{"clip": {"low": 0.1, "high": 0.999}}, {"standard": {}}], "levels.json")
    model = {"input_channels": 2, "output_channels": 2, "normalize": steps}
    path = write_job(tmp_path / "job.yaml", job_values(url, tmp_path / "out", model=model))
    with pytest.raises(ConfigError, match=message):
        prepare(load_job(str(path)))


def test_a_job_goes_on_without_the_levels_that_it_began_with(made, tmp_path, capsys):
    _, url, levels = made
    to = tmp_path / "levels.json"
    to.write_text(levels.read_text())

    def job(steps):
        model = {"input_channels": 2, "output_channels": 2, "normalize": steps}
        values = job_values(url, tmp_path / "out", model=model)
        return str(write_job(tmp_path / "job.yaml", values))

    path = job(with_levels(STEPS[4], "levels.json"))
    assert main(["run", path]) == 0
    first = read_volume(tmp_path / "out")
    told = json.loads(to.read_text())
    told["nonzero"]["channels"][1]["mean"] += 1
    to.write_text(json.dumps(told))
    assert main(["run", path]) == 2
    assert "levels.json was made again from other values after the job" in capsys.readouterr().err
    to.unlink()
    assert main(["run", path]) == 0
    assert main(["verify", path, "--recompute=1"]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), first)
    other = job(with_levels(STEPS[1], "levels.json"))
    assert main(["verify", other]) == 2
    assert "It began with model.normalize: [{'clip': {'levels': 'file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"clip": [0, 9]}, {"standard": {}}], "a clip to fixed numbers changes both"),
        (
            [{"clip": BOX}, {"standard": {}}],
            "values were clipped to quantiles of other levels",
        ),
        ([PATCH, {"standard": {"levels": "levels.json"}}], "depends on each patch"),
        ([PATCH, {"rescale": {}}], "not known, because a step before it depends on each"),
        ([{"scale": -1}, {"rescale": {}}], "not known, because a scale before it is negative"),
        ([{"clip": {"low": 0.3}}], "must be two of the quantiles that .*levels.json holds"),
        ([{"clip": {"low": 0.0, "high": 0.001}}], "one value at both quantiles, 0 and 0.001"),
        ([{"rescale": {"low": 0.0, "high": 0.001, "floor": 0}}], "would divide by 0"),
        ([{"standard": {"levels": "old.json"}}], "made by an earlier version, without levels of"),
        ([{"standard": {"levels": "one.json"}}], "levels of 1 channels, and the input has 2"),
        ([{"standard": BOX | {"levels": "blank.json"}}], "there is no nonzero_box"),
        ([{"scale": 2, "channels": [2]}], r"channels \[2\] must be different ones of 0 … 1"),
        ([{"scale": 2, "channels": [1, 1]}], "must be different ones"),
        ([{"scale": 2, "channels": []}], "normalize.0.channels"),
        ([{"scale": [2, 3], "channels": [1]}], r"scale lists 2 values, but channels says \[1\]"),
        ([{"standard": {"levels": "levels.json", "epsilon": 1}}], "normalize.0.standard.epsilon"),
        ([{"standard": {"by": "patch", "eps": -1}}], "normalize.0.standard.eps: .*greater"),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(made, tmp_path, steps, message):
    _, url, levels = made
    told = json.loads(levels.read_text())
    for name, keys in {
        "levels": {},
        "old": {"channels": None, "nonzero": None, "without_zeros": None},
        "one": {"channels": told["channels"][:1], "nonzero": None, "without_zeros": None},
        "blank": {"nonzero": None},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(told | keys))
    steps = [step if step is PATCH else with_levels([step], "levels.json")[0] for step in steps]
    model = {"input_channels": 2, "output_channels": 2, "normalize": steps}
    path = write_job(tmp_path / "job.yaml", job_values(url, tmp_path / "out", model=model))
    with pytest.raises(ConfigError, match=message):
        prepare(load_job(str(path)))
    assert not (tmp_path / "out").exists()
