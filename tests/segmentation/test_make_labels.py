"""Test components and segment as functions: results, refusals, and scales in every format."""

import cc3d
import numpy as np
import pytest
from helpers import write_volume

from beam_inference.cli.main import main
from beam_inference.config.formats import installed_formats
from beam_inference.errors import ConfigError, StateError
from beam_inference.segmentation.make_labels import components, segment
from beam_inference.volumes.opening import open_volume

MULTISCALE = [each.name for each in installed_formats() if each.is_multiscale]
LIMITS = {"threshold": 150.0, "low": 60.0, "high": 250.0}


def read(url):
    volume = open_volume(url)
    return volume.read(volume.bounds)[0]


@pytest.fixture
def image(tmp_path):
    """A volume's path, and its voxels."""
    values = np.random.default_rng(0).integers(0, 256, (20, 24, 28)).astype(np.uint8)
    write_volume(tmp_path / "image", values, block_shape=(8, 8, 8))
    return str(tmp_path / "image"), values


def test_components_returns_a_result_and_prints_nothing(image, tmp_path, capsys):
    path, values = image
    shape = (16, 16, 16)
    result = components(path, str(tmp_path / "out"), threshold=200, chunk_shape=shape)
    expected = cc3d.connected_components(values >= 200, connectivity=6)
    np.testing.assert_array_equal(read(result.url), expected)
    assert (result.exit_code, result.objects, result.pyramid) == (0, expected.max(), None)
    assert result.table_url == f"{result.url}/components"
    assert result.outcome.done == result.outcome.chunks
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("threshold", [2**53 + 1, 2**63 + 1, 2**64 - 1])
def test_a_threshold_of_large_integers_is_exact(threshold, tmp_path):
    values = np.full((4, 4, 8), threshold - 1, np.uint64)
    values[:, :, 5:] = threshold
    path = write_volume(tmp_path / "in", values, block_shape=(4, 4, 4))
    target = str(tmp_path / "out")
    assert main(["components", path, target, f"--threshold={threshold}"]) == 0
    np.testing.assert_array_equal(read(target), values == threshold)


@pytest.mark.parametrize("shape", [(1, 9, 1), (17, 1, 1), (9, 1, 10)])
def test_labels_beyond_63_bits_in_chunks_of_few_voxels(shape, tmp_path):
    values = np.full(shape, 2**63, np.uint64)
    values[0, 0, 0] = 0
    path = write_volume(tmp_path / "in", values, block_shape=(8, 8, 8))
    target = str(tmp_path / "out")
    flags = ["--multilabel", "--chunk_shape=8x8x8", "--block_shape=8x8x8"]
    assert main(["components", path, target, *flags]) == 0
    np.testing.assert_array_equal(read(target), values > 0)


@pytest.mark.slow
def test_segment_with_coarser_scales_then_components_in_its_place(image, tmp_path):
    path, values = image
    write_volume(tmp_path / "affinities", np.stack([values] * 3), block_shape=(8, 8, 8))
    target = str(tmp_path / "out")
    result = segment(str(tmp_path / "affinities"), target, **LIMITS, pyramid=True)
    labels = read(result.url)
    assert result.exit_code == 0
    assert result.objects == len(np.unique(labels[labels > 0]))
    assert len(result.pyramid.scales) == 2
    whole = {name: int(value) for name, value in LIMITS.items()}
    assert segment(str(tmp_path / "affinities"), target, **whole, pyramid=True).exit_code == 0
    with pytest.raises(StateError, match="holds records of segment"):
        components(path, target, threshold=200)
    anew = components(path, target, threshold=200, overwrite=True)
    assert anew.objects == read(anew.url).max()
    assert not (tmp_path / "out" / "segments" / "000000.csv").exists()


def test_scales_need_a_format_that_holds_them(image, tmp_path):
    with pytest.raises(ConfigError, match="--pyramid: zarr3 holds one scale"):
        components(image[0], str(tmp_path / "out"), threshold=1, format="zarr3", pyramid=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("format", MULTISCALE)
def test_a_pyramid_of_labels_in_every_format_that_holds_one(tmp_path, format):
    array = (np.indices((32, 64, 64)).sum(axis=0) % 20 < 15).astype(np.uint8)
    url = write_volume(tmp_path / "in", array, block_shape=(16, 16, 16))
    target = f"file://{tmp_path}/out"
    flags = ["--threshold=1", f"--format={format}", "--pyramid", "--block_shape=16x16x16"]
    assert main(["components", url, target, *flags, "--chunk_shape=32x32x32"]) == 0
    coarser = open_volume(target, scale=1)
    assert coarser.bounds.shape[2] == 32
    assert coarser.read(coarser.bounds).any()
