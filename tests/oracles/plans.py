"""Small plans, drawn at random."""

from helpers import plan_of
from hypothesis import strategies as st

from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.plan import InferencePlan
from beam_inference.geometry.zyx import Zyx


def cube(start: int, stop: int) -> BoundingBox:
    """The box from start to stop on each axis."""
    return BoundingBox((start,) * 3, (stop,) * 3)


def triples(smallest: int, largest: int) -> st.SearchStrategy[Zyx]:
    """Three integers within bounds, one per axis."""
    number = st.integers(smallest, largest)
    return st.tuples(number, number, number)


@st.composite
def plans(draw: st.DrawFn) -> InferencePlan:
    """Small plans of every seam mode, with margins, context and blocks."""
    shape = draw(triples(1, 14))
    volume = BoundingBox((5, -4, 0), zyx.add((5, -4, 0), shape))
    start = zyx.triple(
        draw(st.integers(a, b - 1)) for a, b in zip(volume.start, volume.stop, strict=True)
    )
    stop = zyx.triple(draw(st.integers(a + 1, b)) for a, b in zip(start, volume.stop, strict=True))
    patch = draw(triples(1, 6))
    overlap = zyx.triple(draw(st.integers(0, p - 1)) for p in patch)
    return plan_of(
        BoundingBox(start, stop),
        patch,
        overlap,
        draw(triples(1, 8)),
        volume=volume,
        context=draw(triples(0, 4)),
        crop_margin=draw(triples(0, 3)),
        strategy=draw(st.sampled_from(["recompute", "exchange", "crop"])),
        chunk_crop_margin=draw(triples(0, 5)),
        block_shape=draw(triples(1, 4)),
        halo=draw(st.just((0, 0, 0)) | triples(0, 5)),
        input_block_shape=draw(triples(1, 4)),
    )
