"""2-D networks: neighbouring sections as channels, against whole arrays and for any chunk shape."""

import numpy as np
import pytest
from helpers import do_job, job_values, oracle, plan_of, read_volume, toy, write_volume
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chunks import cut_out

from beam_inference import predict, prepare
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError, ModelContractError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.exact_sums import largest_rounding

SHAPE = (12, 24, 29)


def weigh(batch):
    """A function of planes (N, C, Y, X) in which each section and each place counts otherwise."""
    weights = np.arange(1, batch.shape[1] + 1, dtype=np.float32)
    ramp = np.linspace(1, 2, batch.shape[2] * batch.shape[3], dtype=np.float32)
    return np.einsum("nchw,c->nhw", batch, weights)[:, None] * ramp.reshape(batch.shape[2:])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_neighbouring_sections_are_channels_in_order(data):
    shape = data.draw(st.tuples(*[st.integers(1, 9)] * 3))
    patch = (1, *data.draw(st.tuples(*[st.integers(1, 7)] * 2)))
    overlap = (0, *(data.draw(st.integers(0, p - 1)) for p in patch[1:]))
    sections = data.draw(st.sampled_from([1, 3, 5]))
    margin = (0, *data.draw(st.tuples(*[st.integers(0, 2)] * 2)))
    channels = data.draw(st.integers(1, 2))
    is_cropped = data.draw(st.booleans())
    fill = data.draw(st.sampled_from(["reflect", "symmetric", "edge"]))
    array = np.random.default_rng(1).random((channels, *shape), np.float32)
    inner = tuple(slice(m, m + p) for m, p in zip(margin[1:], patch[1:], strict=True))
    calls = []

    def network(batch):
        calls.append(batch.shape)
        answer = weigh(batch)
        return answer[:, :, *inner] if is_cropped else answer

    result = predict(
        array,
        network,
        patch_shape=patch,
        patch_overlap=overlap,
        crop_margin=margin,
        dims=2,
        sections=sections,
        prediction_bound=256,
        fill=fill,
    )
    size = tuple(p + 2 * m for p, m in zip(patch[1:], margin[1:], strict=True))
    assert set(calls) == {(1, channels * sections, *size)}

    whole = (sections // 2, *margin[1:])
    plan = plan_of(BoundingBox((0, 0, 0), shape), patch, overlap, shape, crop_margin=whole)

    def predict_patch(box):
        seen = [cut_out(each, plan, box.grow(whole), fill)[0] for each in array]
        answer = weigh(np.concatenate(seen)[None])[0]
        return answer[:, None, *inner]

    expected, _ = oracle(plan.lattice, predict_patch, 1)
    expected = expected[(slice(None), *plan.chunks.roi.slices_in(plan.lattice.domain))]
    allowed = largest_rounding(256.0, plan.lattice.most_patches) + 4e-7 * np.abs(expected).max()
    assert np.abs(result - expected).max() <= allowed


def test_jobs_of_any_chunk_shape_and_strategy_have_the_same_bits(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)
    source = write_volume(tmp_path / "in", image, block_shape=(4, 16, 16))
    model = {"dims": 2, "sections": 5, "normalize": "unit", "output_channels": 2}
    inference = {"patch_shape": [1, 12, 10], "patch_overlap": [0, 4, 6], "batch_size": 3}
    found = []
    for number, (chunk, strategy) in enumerate(
        [([2, 8, 16], "recompute"), ([4, 16, 8], "exchange"), ([12, 24, 32], "recompute")]
    ):
        values = job_values(
            source,
            tmp_path / f"out{number}",
            model=toy("stack", **model),
            input={"path": source, "fill": "edge"},
            output={
                "path": str(tmp_path / f"out{number}"),
                "dtype": "float32",
                "block_shape": [2, 8, 8],
            },
            inference={**inference, "chunk_shape": chunk, "strategy": strategy, "threads": 1},
        )
        job = do_job(values, tmp_path)
        assert job.plan.crop_margin == (2, 0, 0)
        assert (job.plan.exchange is not None) == (strategy == "exchange")
        found.append(read_volume(tmp_path / f"out{number}"))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    alone = predict(
        image, toy("stack")["path"], **inference, **model, fill="edge", device="cpu", threads=1
    )
    np.testing.assert_array_equal(found[0], alone)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sections": 3, "dims": 3}, "write dims: 2, or remove sections"),
        ({"sections": 4}, "has no middle one"),
        ({"sections": 0}, "sections"),
        ({"sections": 257}, "sections"),
        ({"sections": 3, "crop_margin": (1, 0, 0)}, "crop_margin on z"),
    ],
)
def test_mistakes_are_named(keys, message):
    keys = {"dims": 2, "patch_shape": (1, 8, 8), **keys}
    with pytest.raises(ConfigError, match=message):
        predict(np.zeros(SHAPE, np.float32), weigh, **keys)


def test_a_network_of_other_channels_is_told_so_at_launch(tmp_path):
    source = write_volume(tmp_path / "in", np.zeros(SHAPE, np.uint8))
    values = job_values(
        source,
        tmp_path / "out",
        model=toy("stack", dims=2, sections=3, output_channels=2),
        inference={"patch_shape": [1, 8, 8], "patch_overlap": [0, 0, 0]},
    )
    with pytest.raises(ModelContractError, match=r"expected input.* 5 channels.*model\.sections"):
        prepare(parse_job(values, tmp_path))
    assert not (tmp_path / "out").exists()
