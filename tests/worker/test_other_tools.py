"""Predictions are those of nnU-Net and MONAI, by their formulas; tests/interop runs the tools."""

import numpy as np
from fakes.networks import position_dependent
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.other_tools import slide_as_monai, slide_as_nnunet

from beam_inference import predict
from beam_inference.geometry.exact_sums import largest_rounding

images = st.tuples(*[st.integers(2, 24)] * 3).map(
    lambda shape: np.random.default_rng(1).random(shape, np.float32)
)
MOST = 64.0
"""More than the largest prediction."""


def check(result, expected):
    # Seven digits of float32 weights and products, and the rounding of at most 64 terms.
    allowed = 4e-7 * np.abs(expected).max() + largest_rounding(MOST, 64)
    assert np.abs(result - expected).max() <= allowed


@settings(deadline=None, max_examples=40)
@given(images, st.tuples(*[st.sampled_from([2, 4, 6, 8, 10])] * 3))
def test_predictions_are_nnunets(image, patch):
    result = predict(
        image,
        position_dependent,
        patch_shape=patch,
        patch_overlap=[p // 2 for p in patch],
        lattice="spread",
        blend={"gaussian": 0.125, "floor": "nnunet"},
        fill="constant",
        output_channels=2,
        prediction_bound=MOST,
    )
    check(result, slide_as_nnunet(image, patch, position_dependent))


@settings(deadline=None, max_examples=40)
@given(
    images,
    st.tuples(*[st.integers(2, 11)] * 3),
    st.sampled_from([0, 0.25, 0.5, 0.625]),
    st.sampled_from(["gaussian", "constant"]),
    st.sampled_from(["constant", "edge", "reflect", "symmetric"]),
)
def test_predictions_are_monais(image, patch, overlap, mode, fill):
    result = predict(
        image,
        position_dependent,
        patch_shape=patch,
        patch_overlap=[p - max(1, int(p * (1 - overlap))) for p in patch],
        blend={"gaussian": 0.125, "floor": "monai"} if mode == "gaussian" else "constant",
        fill=fill,
        output_channels=2,
        prediction_bound=MOST,
    )
    check(result, slide_as_monai(image, patch, overlap, mode, fill, position_dependent))
