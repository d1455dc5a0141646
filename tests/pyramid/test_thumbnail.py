"""The picture of a whole volume: which level is drawn, and how values become pixels."""

from fractions import Fraction

import numpy as np
import pytest
from helpers import write_volume

from beam_inference.cli.main import main
from beam_inference.pyramid.thumbnail import _pixels


def drawn(path):
    image = pytest.importorskip("matplotlib.image")
    return np.rint(image.imread(path)[..., :3] * 255).astype(int)


@pytest.fixture
def draw(tmp_path):
    def made(array, *words, format="precomputed", labels=False):
        write_volume(tmp_path / "v", array, (2, 3, 4), block_shape=(64, 64, 64), format=format)
        if labels:
            info = tmp_path / "v" / "info"
            info.write_text(info.read_text().replace('"image"', '"segmentation"'))
        assert (
            main(["thumbnail", str(tmp_path / "v"), "--to", str(tmp_path / "t.png"), *words]) == 0
        )
        return drawn(tmp_path / "t.png")

    return made


def test_bytes_are_drawn_as_they_are_planes_side_by_side(draw):
    array = np.random.default_rng(0).integers(0, 256, (6, 20, 30), dtype=np.uint8)
    picture = draw(array, "--planes=3")
    for row, plane in enumerate((0, 2, 5)):
        grey = np.repeat(array[plane][..., None], 3, axis=-1)
        np.testing.assert_array_equal(picture[21 * row : 21 * row + 20], grey)
    assert picture.shape == (62, 30, 3)


def test_other_values_are_scaled_from_the_least_to_the_greatest(draw):
    array = np.linspace(-3, 5, 2 * 8 * 8).reshape(2, 8, 8).astype(np.float32)
    picture = draw(array)
    np.testing.assert_array_equal(picture[:8, :8, 0], np.rint((array[0] + 3) / 8 * 255))
    assert (picture.min(), picture.max()) == (0, 255)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([2**63, 2**63 + 2, 2**63 + 5], np.uint64),
        ([-(2**63), 0, 2**63 - 1], np.int64),
        ([-128, -1, 127], np.int8),
        ([-1.7e308, 0, 1.7e308], np.float64),
        ([np.nan, -np.inf, 7, np.inf], np.float64),
        ([np.nan, np.nan], np.float64),
        ([1, 2, np.inf], np.float32),
    ],
)
def test_extreme_values_are_scaled_exactly(values, dtype):
    array = np.array(values, dtype).reshape(1, 1, 1, -1)
    exact = [Fraction(v.item()) if np.isfinite(v) else None for v in array.ravel()]
    finite = [v for v in exact if v is not None]
    span = max(finite, default=0) - min(finite, default=0)
    expected = [
        (255 if stored > 0 and span else 0)
        if value is None
        else round(255 * (value - min(finite)) / (span or 1))
        for value, stored in zip(exact, array.ravel(), strict=True)
    ]
    assert _pixels(array, labels=False)[0, 0, :, 0].tolist() == expected


def test_three_channels_are_colours(draw):
    array = np.random.default_rng(0).integers(0, 256, (3, 1, 9, 7), dtype=np.uint8)
    np.testing.assert_array_equal(draw(array), np.moveaxis(array[:, 0], 0, -1))


def test_labels_have_colours_and_the_background_is_black(draw):
    array = np.array([[[0, 1, 2], [2**63, 1, 0]]], np.uint64)
    picture = draw(array, labels=True)[:, :, :]
    assert not picture[0, 0].any()
    assert len({tuple(picture[at]) for at in ((0, 0), (0, 1), (0, 2), (1, 0))}) == 4
    assert tuple(picture[0, 1]) == tuple(picture[1, 1])


@pytest.mark.slow
def test_a_coarse_level_is_drawn_and_asked_for(tmp_path, capsys):
    array = np.random.default_rng(0).integers(0, 256, (1, 8, 2100), dtype=np.uint8)
    write_volume(tmp_path / "v", array, block_shape=(64, 64, 64))
    assert main(["thumbnail", str(tmp_path / "v"), "--to", str(tmp_path / "t.png")]) == 2
    assert "Make coarser ones first: beam-inference pyramid" in capsys.readouterr().err
    assert main(["pyramid", str(tmp_path / "v"), "--levels=4"]) == 0
    assert main(["thumbnail", str(tmp_path / "v"), "--to", str(tmp_path / "t.png")]) == 0
    assert "scale 3, 1×263 pixels" in capsys.readouterr().out
    assert drawn(tmp_path / "t.png").shape == (1, 263, 3)
    assert main(["thumbnail", str(tmp_path / "nowhere"), "--to", str(tmp_path / "t.png")]) == 2
    assert main(["thumbnail", str(tmp_path / "v"), "--to", str(tmp_path / "t.txt")]) == 2
