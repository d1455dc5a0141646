"""Small plans, drawn at random."""

from helpers import plan_of
from hypothesis import strategies as st

from beam_inference.geometry.bounding_box import BoundingBox


def cube(start, stop):
    """The box from start to stop on each axis."""
    return BoundingBox((start,) * 3, (stop,) * 3)


@st.composite
def plans(draw):
    """Small plans of every seam mode, with margins, context and blocks."""
    shape = draw(st.tuples(*[st.integers(1, 14)] * 3))
    volume = BoundingBox((5, -4, 0), tuple(a + n for a, n in zip((5, -4, 0), shape, strict=True)))
    start = tuple(
        draw(st.integers(a, b - 1)) for a, b in zip(volume.start, volume.stop, strict=True)
    )
    stop = tuple(draw(st.integers(a + 1, b)) for a, b in zip(start, volume.stop, strict=True))
    patch = draw(st.tuples(*[st.integers(1, 6)] * 3))
    overlap = tuple(draw(st.integers(0, p - 1)) for p in patch)
    return plan_of(
        BoundingBox(start, stop),
        patch,
        overlap,
        draw(st.tuples(*[st.integers(1, 8)] * 3)),
        volume=volume,
        context=draw(st.tuples(*[st.integers(0, 4)] * 3)),
        crop_margin=draw(st.tuples(*[st.integers(0, 3)] * 3)),
        seams=draw(st.sampled_from(["recompute", "exchange", "crop"])),
        chunk_crop_margin=draw(st.tuples(*[st.integers(0, 5)] * 3)),
        block_shape=draw(st.tuples(*[st.integers(1, 4)] * 3)),
        input_block_shape=draw(st.tuples(*[st.integers(1, 4)] * 3)),
    )
