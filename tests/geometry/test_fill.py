import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.fill import fill_outside, source_box

VOLUME = BoundingBox((2, -3, 5), (7, 1, 6))  # 5 × 4 × 1 voxels


def padded(array, pad, fill):
    """NumPy's own padding of the whole volume; it repeats reflections as often as it must."""
    if fill == "constant":
        return np.pad(array, pad, constant_values=9)
    return np.pad(array, pad, mode=fill)


@given(
    st.tuples(*[st.integers(-15, 15)] * 3),
    st.tuples(*[st.integers(1, 20)] * 3),
    st.tuples(*[st.integers(2, 7)] * 3),
    st.sampled_from(["reflect", "symmetric", "edge", "constant"]),
)
def test_any_box_around_the_volume_equals_the_padded_volume(start, shape, volume_shape, fill):
    volume = BoundingBox(
        (1, 2, -3), tuple(a + n for a, n in zip((1, 2, -3), volume_shape, strict=True))
    )
    array = np.random.default_rng(0).integers(0, 256, volume.shape, dtype=np.uint8)
    box = BoundingBox(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    frame = volume.grow((40, 40, 40))
    expected = padded(array, 40, fill)[box.slices_in(frame)]

    source = source_box(box, volume, fill)
    assert volume.contains(source)
    found = fill_outside(array[source.slices_in(volume)][None], source, box, volume, fill, 9)
    np.testing.assert_array_equal(found[0], expected)
    assert found.dtype == np.uint8


@pytest.mark.parametrize("fill", ["reflect", "symmetric", "edge"])
def test_the_one_voxel_of_an_axis_is_repeated(fill):
    array = np.arange(20, dtype=np.int16).reshape(5, 4, 1)
    box = BoundingBox((2, -3, 0), (7, 1, 12))
    source = source_box(box, VOLUME, fill)
    assert source == VOLUME
    found = fill_outside(array[None], source, box, VOLUME, fill, 0)
    np.testing.assert_array_equal(found[0], np.broadcast_to(array, (5, 4, 12)))


def test_inside_the_volume_nothing_is_copied():
    box = BoundingBox((3, -2, 5), (5, 0, 6))
    array = np.zeros((1, *box.shape))
    assert (
        fill_outside(array, source_box(box, VOLUME, "reflect"), box, VOLUME, "reflect", 0) is array
    )
