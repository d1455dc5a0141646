"""Quantiles against NumPy on the whole volume, and the contrasts that a job makes of them."""

import json

import numpy as np
import pytest
from helpers import job_values, read_volume, write_job, write_volume
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from beam_inference import levels, prepare
from beam_inference.bounding_box import BoundingBox
from beam_inference.cli import main
from beam_inference.errors import ConfigError
from beam_inference.job_file import parse_job
from beam_inference.levels import QUANTILES, CountValues, SumCounts, chunks_to_count, counted, values_at
from beam_inference.normalize_config import Sections
from beam_inference.outputs import OutputSpec, create_output, open_output
from beam_inference.storage import Storage
from beam_inference.volumes import open_volume
from beam_inference.worker import Worker

INPUT = (np.random.default_rng(3).gamma(2, 20, (40, 48, 50)).clip(0, 255)).astype(np.uint8)
INPUT += np.arange(40, dtype=np.uint8)[:, None, None]
INPUT[7] = 90  # a blank section
START = (3, -5, 2)


@given(
    st.sampled_from(["uint8", "int8", "uint16", "int16"]).flatmap(
        lambda dtype: hnp.arrays(dtype, st.tuples(st.integers(1, 2), *[st.integers(1, 4)] * 3))
    )
)
def test_values_at_quantiles_are_numpys(array):
    for section, counts in zip(array.swapaxes(0, 1), counted(array), strict=True):
        expected = np.quantile(section, QUANTILES, method="inverted_cdf")
        assert values_at(QUANTILES, counts, array.dtype) == expected.tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A volume and its levels: the volume's URL, and the file."""
    folder = tmp_path_factory.mktemp("levels")
    url, to = write_volume(folder / "in", INPUT, START, block_shape=(16, 16, 16)), folder / "levels.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "CHUNK_VOXELS", 20_000)  # several chunks on every axis
        assert main(["levels", str(folder / "in"), "--to", str(to), "--direct_num_workers=2"]) == 0
    return url, to


def done(values, folder):
    """Do a job without Beam."""
    launch = prepare(parse_job(values, folder))
    assert {record.outcome for record in Worker(launch).do(range(launch.resolved().plan.chunks.count))} == {"done"}


def test_the_levels_of_a_volume(made):
    _, to = made
    told = json.loads(to.read_text())
    assert (told["dtype"], told["start"], told["quantiles"]) == ("uint8", 3, list(QUANTILES))
    assert told["volume"] == np.quantile(INPUT, QUANTILES, method="inverted_cdf").tolist()
    assert told["sections"] == [np.quantile(z, QUANTILES, method="inverted_cdf").tolist() for z in INPUT]
    assert (told["mean"], told["std"]) == (pytest.approx(INPUT.mean()), pytest.approx(INPUT.std()))
    assert not list(to.parent.glob("levels.json.parts/counts/*"))
    before = to.read_text()
    assert main(["levels", str(to.parent / "in"), "--to", str(to)]) == 0  # nothing is left to do
    assert to.read_text() == before


def stretched_by_hand(by):
    low, high = (
        np.quantile(INPUT, q, axis=(1, 2) if by == "section" else None, method="inverted_cdf", keepdims=True)
        for q in (0.02, 0.98)
    )
    return np.clip((INPUT.astype(float) - low) / np.maximum(high - low, 1), 0, 1)


@pytest.mark.parametrize("by", ["volume", "section"])
@pytest.mark.parametrize("fill", ["reflect", "constant"])
def test_a_contrast_is_the_same_for_all_chunk_shapes(made, tmp_path, by, fill):
    url, to = made
    outputs = []
    for number, chunk_shape in enumerate([[16, 16, 32], [48, 48, 64]]):
        normalize = {"levels": str(to), "low": 0.02, "high": 0.98, "by": by}
        values = job_values(
            url,
            tmp_path / f"out{number}",
            input={"fill": fill},
            model={"normalize": normalize, "crop_margin": [2, 3, 3]},
            inference={"chunk_shape": chunk_shape},
        )
        done(values, tmp_path)
        assert main(["verify", str(write_job(tmp_path / "job.yaml", values)), "--deep"]) == 0
        prepare(parse_job(values, tmp_path))  # it may be resumed: the same fingerprint
        outputs.append(read_volume(tmp_path / f"out{number}"))
    np.testing.assert_array_equal(*outputs)
    np.testing.assert_allclose(outputs[0][0], stretched_by_hand(by), atol=1e-6)


def test_other_levels_are_another_job(made, tmp_path, capsys):
    url, to = made
    original = to.read_text()
    to = tmp_path / "levels.json"
    for by in ("volume", "section"):
        to.write_text(original)
        values = job_values(url, tmp_path / by, model={"normalize": {"levels": str(to), "by": by}})
        done(values, tmp_path)
        told = json.loads(original)
        told["volume"] = [value + 1 for value in told["volume"]]
        told["sections"][0] = [value + 1 for value in told["sections"][0]]
        to.write_text(json.dumps(told))
        assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
        assert "model.normalize" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("normalize", "message"),
    [
        ({"levels": "nowhere.json"}, "beam-inference levels INPUT --to FILE"),
        ({"levels": "job.yaml"}, "is no file of beam-inference levels"),
        ({"levels": "levels.json", "low": 0.03}, "must be two of the quantiles"),
        ({"levels": "levels.json", "low": 0.99, "high": 0.01}, "low < high"),
        ({"levels": "levels.json", "lows": 0.01}, "model.normalize.lows: unknown key; did you mean 'low'"),
        ({"start": 0, "levels": [[0, 1]]}, "has levels for the sections 0 … 0; the input has 3 … 42"),
    ],
)
def test_what_cannot_be_used_is_refused(made, tmp_path, capsys, normalize, message):
    url, to = made
    (tmp_path / "levels.json").write_bytes(to.read_bytes())
    values = job_values(url, tmp_path / "out", model={"normalize": normalize})
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_levels_of_another_volume_are_refused(made, tmp_path, capsys):
    write_volume(tmp_path / "other", INPUT.astype(np.uint16), START)
    values = job_values(tmp_path / "other", tmp_path / "out", model={"normalize": {"levels": str(made[1])}})
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    assert "uint8 with the sections 3 … 42; the input is uint16" in capsys.readouterr().err


def test_floats_cannot_be_counted(tmp_path, capsys):
    write_volume(tmp_path / "in", INPUT.astype(np.float32))
    assert main(["levels", str(tmp_path / "in"), "--to", str(tmp_path / "levels.json")]) == 2
    assert "holds float32" in capsys.readouterr().err
    assert not (tmp_path / "levels.json.parts").exists()


def test_a_flat_volume_has_no_contrast_but_flat_sections_are_zero(tmp_path):
    url = write_volume(tmp_path / "in", np.full((4, 8, 8), 7, np.uint8))
    assert main(["levels", str(tmp_path / "in"), "--to", str(tmp_path / "levels.json")]) == 0
    values = job_values(url, "out", model={"normalize": {"levels": "levels.json"}})
    contrast = parse_job(values, tmp_path).model.normalize
    with pytest.raises(ConfigError, match="one value at both quantiles, 7"):
        levels.decided(contrast, open_volume(url), Storage())
    by_section = contrast.model_copy(update={"by": "section"})
    assert levels.decided(by_section, open_volume(url), Storage()) == Sections(start=0, levels=[(7.0, 8.0)] * 4)


def test_what_is_gone_is_counted_again_and_so_is_what_was_changed(tmp_path):
    url, to = write_volume(tmp_path / "in", INPUT[:3], block_shape=(16, 16, 16)), tmp_path / "levels.json"
    assert main(["levels", url, "--to", str(to)]) == 0
    first = to.read_text()
    to.unlink()
    assert main(["levels", url, "--to", str(to)]) == 0
    assert to.read_text() == first
    open_output(spec_at(url)).write(BoundingBox((0, 0, 0), (3, 48, 50)), np.full((1, 3, 48, 50), 9, np.uint8))
    assert main(["levels", url, "--to", str(to), "--overwrite"]) == 0
    assert json.loads(to.read_text())["volume"] == [9] * len(QUANTILES)


def spec_at(url):
    return OutputSpec(url, "precomputed", "uint8", 1, BoundingBox((0, 0, 0), (3, 48, 50)), (16, 16, 16), (10.0,) * 3)


def test_a_sum_that_is_done_twice_is_the_same(tmp_path):
    url = write_volume(tmp_path / "in", INPUT[:3])
    counting = CountValues(url, 0, None, Storage(), f"file://{tmp_path}/counts", chunks_to_count(open_volume(url)))
    for index in range(counting.count):
        counting.opened()(index)
    do = SumCounts(counting, (f"file://{tmp_path}", "levels.json")).opened()
    do(0)
    first = (tmp_path / "levels.json").read_text()
    do(0)
    assert (tmp_path / "levels.json").read_text() == first


def test_of_shards_blocks_are_counted(tmp_path):
    box = BoundingBox((0, 0, 0), (64, 64, 64))
    spec = OutputSpec(
        f"file://{tmp_path}/v", "zarr3", "uint8", 1, box, (16, 16, 16), (10.0,) * 3, shard_shape=(64,) * 3
    )
    create_output(spec).write(box, np.ones((1, 64, 64, 64), np.uint8))
    assert chunks_to_count(open_volume(spec.url)).chunk_shape[0] == 16
