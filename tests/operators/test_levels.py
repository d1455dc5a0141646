"""Normalisation by a volume's levels, against NumPy on the whole volume."""

import json

import numpy as np
import pytest
from helpers import job_values, read_volume, write_job, write_levels, write_volume

from beam_inference import prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.config.normalize import Sections
from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError
from beam_inference.launch.job_files import load_job
from beam_inference.operators import levels
from beam_inference.operators.levels import by_section
from beam_inference.volumes.opening import open_volume
from beam_inference.worker.worker import Worker

INPUT = (np.random.default_rng(3).gamma(2, 20, (40, 48, 50)).clip(0, 255)).astype(np.uint8)
INPUT += np.arange(40, dtype=np.uint8)[:, None, None]
INPUT[7] = 90  # a blank section
START = (3, -5, 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A volume and its levels: the volume's URL, and the file."""
    folder = tmp_path_factory.mktemp("levels")
    url = write_volume(folder / "in", INPUT, START, block_shape=(16, 16, 16))
    return url, write_levels(url, folder)


def done(values, folder):
    """Do a job without Beam."""
    launch = prepare(parse_job(values, folder))
    assert {
        record.outcome
        for record in Worker(launch).infer_chunks(range(launch.read_job().plan.chunks.count))
    } == {"done"}


def by_hand(array, normalize):
    """What a normalisation makes of a volume, by NumPy, in float64, on the whole of it."""
    axis = (1, 2) if normalize.get("by") == "section" else None
    if "to" in normalize:
        zero = array.mean(axis=axis, keepdims=True)
        unit = array.std(axis=axis, keepdims=True)
        unit = np.where(unit, unit, 1)
        clip = normalize.get("clip", (-np.inf, np.inf))
    else:
        quantiles = (normalize["low"], normalize["high"])
        zero, one = np.quantile(
            array, quantiles, axis=axis, method="inverted_cdf", keepdims=True
        ).astype(int)
        unit = np.maximum(one - zero, 1)
        clip = (0, 1)
    return np.clip((array.astype(float) - zero) / unit, *clip)


FORMS = [
    {"low": 0.02, "high": 0.98},
    {"low": 0.02, "high": 0.98, "by": "section"},
    {"to": "standard"},
    {"to": "standard", "clip": [-1.5, 2]},
    {"to": "standard", "by": "section"},
    {"to": "standard", "by": "section", "clip": [-1.5, 2]},
]


@pytest.mark.parametrize(
    ("form", "fill"),
    [(form, "reflect") for form in FORMS] + [(FORMS[1], "constant"), (FORMS[5], "constant")],
    ids=str,
)
def test_what_is_made_of_levels_is_the_same_for_all_chunk_shapes(made, tmp_path, form, fill):
    url, to = made
    outputs = []
    for number, chunk_shape in enumerate([[16, 16, 32], [48, 48, 64]]):
        values = job_values(
            url,
            tmp_path / f"out{number}",
            input={"fill": fill},
            model={"normalize": {"levels": str(to), **form}, "crop_margin": [2, 3, 3]},
            inference={"chunk_shape": chunk_shape},
        )
        done(values, tmp_path)
        assert main(["verify", str(write_job(tmp_path / "job.yaml", values)), "--deep"]) == 0
        prepare(parse_job(values, tmp_path))  # it may be resumed: the same fingerprint
        outputs.append(read_volume(tmp_path / f"out{number}"))
    assert outputs[0].tobytes() == outputs[1].tobytes()
    np.testing.assert_allclose(outputs[0][0], by_hand(INPUT, form), atol=4e-6)


@pytest.mark.parametrize("form", FORMS[2::2], ids=str)
def test_16_bits_far_from_zero_are_standardised_to_a_hundredth_of_a_grey_value(tmp_path, form):
    array = (60_000 + np.random.default_rng(1).normal(0, 300, (20, 30, 30))).astype(np.uint16)
    url = write_volume(tmp_path / "in", array)
    write_levels(url, tmp_path)
    done(
        job_values(url, tmp_path / "out", model={"normalize": {"levels": "levels.json", **form}}),
        tmp_path,
    )
    np.testing.assert_allclose(
        read_volume(tmp_path / "out")[0], by_hand(array, form), atol=0.01 / 300
    )


def test_a_section_of_one_value_is_zero_also_outside_the_volume():
    sections = Sections(start=5, levels=[(90.0, 90.0), (10.0, 12.0)], clip=(-3.0, 3.0))
    array = np.array([[[[0, 90, 255]], [[10, 12, 255]]]], np.uint8)
    found = by_section(array, np.array([5, 6]), sections)
    assert found.tolist() == [[[[0, 0, 0]], [[0, 1, 3]]]]
    assert not np.signbit(found).any()
    assert (
        by_section(array, np.array([6, 6]), sections.model_copy(update={"clip": None})).max()
        == 122.5
    )


def brighter(text):
    """The levels of other values."""
    told = json.loads(text)
    for key in ("volume", "section_moments"):
        told[key] = (np.array(told[key]) + 1).tolist()
    told["sections"][30] = [value + 1 for value in told["sections"][30]]
    told["mean"] += 1
    return json.dumps(told)


@pytest.mark.parametrize("form", FORMS[:3] + FORMS[4:5], ids=str)
def test_other_levels_are_another_job_but_without_them_it_goes_on(
    made, tmp_path, capsys, caplog, form
):
    url = made[0]
    to = tmp_path / "levels.json"
    original = made[1].read_text()
    to.write_text(original)
    values = job_values(url, tmp_path / "out", model={"normalize": {"levels": str(to), **form}})
    path = str(write_job(tmp_path / "job.yaml", values))
    launch = prepare(parse_job(values, tmp_path))
    count = launch.read_job().plan.chunks.count
    some = list(Worker(launch).infer_chunks(range(count // 2)))
    to.write_text(brighter(original))
    assert main(["run", path]) == 2
    told = capsys.readouterr().err
    assert (
        "  model.normalize.levels["
        if form.get("by") == "section"
        else "  model.normalize: {'scale'"
    ) in told
    assert " here, " in told
    assert "levels.json was made again from other values after the job began" in told
    to.unlink()
    assert main(["verify", path]) == 1
    resumed = prepare(parse_job(values, tmp_path))
    assert "does not exist; this job continues with the values it began with" in caplog.text
    assert resumed.read_job().fingerprint == launch.read_job().fingerprint
    outcomes = [record.outcome for record in Worker(resumed).infer_chunks(range(count))]
    assert (outcomes.count("skipped"), outcomes.count("done")) == (len(some), count - len(some))
    np.testing.assert_allclose(read_volume(tmp_path / "out")[0], by_hand(INPUT, form), atol=4e-6)
    to.write_text(original)
    prepare(parse_job(values, tmp_path))
    assert main(["verify", path, "--deep"]) == 0


def test_what_is_asked_of_levels_stays_the_same(made, tmp_path, capsys):
    url = made[0]
    to = tmp_path / "levels.json"
    to.write_text(made[1].read_text())

    def job(**form):
        values = job_values(
            url, tmp_path / "out", model={"normalize": {"levels": "levels.json", **form}}
        )
        return str(write_job(tmp_path / "job.yaml", values))

    prepare(load_job(job(low=0.02)))
    for command in ("verify", "run"):
        assert main([command, job(low=0.05)]) == 2
        told = capsys.readouterr().err
        assert "It began with model.normalize: {'levels': 'file://" in told
        assert "'low': 0.02" in told
    to.unlink()
    assert main(["run", job(low=0.05)]) == 2
    assert "levels.json does not exist" in capsys.readouterr().err
    assert main(["run", job(low=0.02), "--overwrite"]) == 2, (
        "a job that begins has nothing to go on with"
    )
    prepare(load_job(job(low=0.02)))


@pytest.mark.parametrize(
    ("normalize", "message"),
    [
        ({"levels": "nowhere.json"}, "beam-inference levels INPUT --to FILE"),
        ({"levels": "job.yaml"}, "is not a file that beam-inference levels has written"),
        ({"levels": "levels.json", "low": 0.03}, "must be two of the quantiles"),
        ({"levels": "levels.json", "low": 0.99, "high": 0.01}, "low < high"),
        (
            {"levels": "levels.json", "lows": 0.01},
            "model.normalize.lows: unknown key; did you mean 'low'",
        ),
        (
            {"levels": "levels.json", "to": "standard", "low": 0.01},
            "model.normalize.low: unknown key; known keys: lev",
        ),
        (
            {"levels": "levels.json", "clip": [-3, 3]},
            "model.normalize.clip: unknown key; known keys: levels, by, low",
        ),
        (
            {"levels": "levels.json", "to": "contrast"},
            "model.normalize.to: input should be 'standard'",
        ),
        (
            {"levels": "levels.json", "to": "standard", "clip": [3, -3]},
            "model.normalize.clip: clip [3.0, -3.0] must",
        ),
        (
            {"scale": 1, "clip": [1, 1]},
            "model.normalize.clip: clip [1.0, 1.0] must be [low, high] with low < high",
        ),
        (
            {"levels": "old.json", "to": "standard", "by": "section"},
            "Make it again: beam-inference levels INPUT --to",
        ),
        (
            {"levels": "short.json"},
            "has written: Value error, it does not hold mean and std",
        ),
        (
            {"levels": "shorter.json"},
            "has written: Value error, it does not hold a value for",
        ),
        (
            {"start": 0, "levels": [[0, 1]]},
            "has levels for the sections 0 … 0; the input has 3 … 42",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(made, tmp_path, capsys, normalize, message):
    url, to = made
    told = json.loads(to.read_text())
    for name, keys in {
        "levels": {},
        "old": {"section_moments": None},
        "short": {"section_moments": [[1, 1]]},
        "shorter": {"sections": [[1]] * 40},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(told | keys))
    values = job_values(url, tmp_path / "out", model={"normalize": normalize})
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_levels_of_another_volume_are_refused(made, tmp_path, capsys):
    write_volume(tmp_path / "other", INPUT.astype(np.uint16), START)
    values = job_values(
        tmp_path / "other", tmp_path / "out", model={"normalize": {"levels": str(made[1])}}
    )
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    assert "uint8 with the sections 3 … 42; the input is uint16" in capsys.readouterr().err


def test_a_flat_volume_has_no_contrast_but_flat_sections_are_zero(tmp_path):
    url = write_volume(tmp_path / "in", np.full((4, 8, 8), 7, np.uint8))
    write_levels(url, tmp_path)

    def found(**form):
        values = job_values(url, "out", model={"normalize": {"levels": "levels.json", **form}})
        wanted = parse_job(values, tmp_path).model.normalize
        of_volume = levels.levels_of_volume(open_volume(url), wanted.levels, Storage())
        return levels.normalization_from_levels(wanted, of_volume)

    with pytest.raises(ConfigError, match="one value at both quantiles, 7"):
        found()
    with pytest.raises(ConfigError, match="has one value throughout, 7"):
        found(to="standard")
    assert found(by="section") == Sections(start=0, levels=[(7.0, 8.0)] * 4)
    assert found(by="section", to="standard") == Sections(
        start=0, levels=[(7.0, 7.0)] * 4, clip=None
    )
    done(
        job_values(
            url,
            "out",
            model={"normalize": {"levels": "levels.json", "by": "section", "to": "standard"}},
        ),
        tmp_path,
    )
    assert not read_volume(tmp_path / "out").any()


HUGE = 10**400


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ({"to": "standard"}, {"std": 5e-324}),
        ({"to": "standard"}, {"std": -1.0}),
        ({"to": "standard"}, {"mean": 1e300}),
        ({"to": "standard", "by": "section"}, {"section_moments": [[0.0, -1.0]] * 40}),
        ({}, {"volume": [HUGE] * 19}),
        ({}, {"volume": [0.0] * 9 + [5e-324] * 10}),
        ({}, {"volume": list(range(19, 0, -1))}),
        ({"by": "section"}, {"sections": [[HUGE] * 19] * 40}),
        ({"by": "section"}, {"sections": [list(range(19, 0, -1))] * 40}),
    ],
    ids=lambda value: " ".join(value) or "contrast",
)
def test_levels_that_no_volume_has_are_refused(made, tmp_path, form, changes):
    url, path = made
    (tmp_path / "levels.json").write_text(json.dumps(json.loads(path.read_text()) | changes))
    model = {"normalize": {"levels": "levels.json", **form}}
    with pytest.raises(ConfigError):
        prepare(parse_job(job_values(url, "out", model=model), tmp_path))
    assert not (tmp_path / "out").exists()
