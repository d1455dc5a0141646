"""2-D networks over planes of 3-D patches, against whole arrays and for any chunk shape."""

import numpy as np
import pytest
import torch
from helpers import do_job, job_values, oracle, plan_of, read_volume, toy, write_volume
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.chunks import cut_out

from beam_inference import predict, prepare
from beam_inference.config.job_file import parse_job
from beam_inference.config.planes import PlaneSum
from beam_inference.engines.per_shape import per_shape
from beam_inference.errors import ConfigError, ModelContractError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.exact_sums import largest_rounding

SHAPE = (17, 22, 25)
THREE = ["yx", "zx", "zy"]
FLOWS = {
    "sum": [
        {"zx": 0, "zy": 0},
        {"yx": 0, "zy": 1},
        {"yx": 1, "zx": 1},
        {"yx": 2, "zx": 2, "zy": 2},
    ]
}
"""As of Cellpose: flows along z, y, x, each of two planes; of three, whether there is a cell."""
COMBINED = {"mean": "mean", "vote": "vote", "sum": FLOWS}


def weigh(batch, channels=3):
    """A function of planes (N, C, Y, X) in which each section and each place counts otherwise."""
    weights = np.arange(1, batch.shape[1] + 1, dtype=np.float32)
    ramp = np.linspace(1, 2, batch.shape[2] * batch.shape[3], dtype=np.float32)
    one = np.einsum("nchw,c->nhw", batch, weights) * ramp.reshape(batch.shape[2:])
    return np.stack([np.sin(one * (n + 1)) for n in range(channels)], 1)


def answers_of(array, plane, network, sections=1, cut=(0, 0, 0)):
    """The network's answers (K, Z, Y, X) for every section of an array (C, Z, Y, X) along a plane.

    Args:
        array: values, with the sections around those that are answered for.
        plane: letters of its axes.
        network: of one batch (1, C, rows, columns), which answers as many voxels.
        sections: neighbouring ones that are channels.
        cut: voxels beyond what is answered for, on each side, ZYX.
    """
    normal = next(n for n, axis in enumerate("zyx") if axis not in plane)
    rows, columns = ("zyx".index(axis) for axis in plane)
    turned = np.transpose(array, (0, 1 + normal, 1 + rows, 1 + columns))
    around = sections // 2
    found = []
    for k in range(cut[normal], turned.shape[1] - cut[normal]):
        seen = turned[:, k - around : k + around + 1].reshape(-1, *turned.shape[2:])
        answer = network(seen[None])[0]
        inner = (slice(cut[a], answer.shape[1 + n] - cut[a]) for n, a in enumerate((rows, columns)))
        found.append(answer[(slice(None), *inner)])
    return np.transpose(np.stack(found, 1), (0, *(1 + np.argsort([normal, rows, columns]))))


def combine(answers, how):
    """What becomes of the answers of planes, by their names, in float64."""
    arrays = [each.astype(np.float64) for each in answers.values()]
    if how == "mean":
        return np.mean(arrays, 0)
    if how == "vote":
        winners = np.stack([each.argmax(0) for each in arrays])
        return np.stack([(winners == c).mean(0) for c in range(len(arrays[0]))])
    return np.stack(
        [sum(answers[plane][c].astype(float) for plane, c in terms.items()) for terms in how["sum"]]
    )


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_patches_are_combined_and_then_blended(data):
    """Against the predictions of all patches, section by section, added up in float64."""
    shape = data.draw(st.tuples(*[st.integers(1, 8)] * 3))
    patch = data.draw(st.tuples(*[st.integers(1, 6)] * 3))
    overlap = tuple(data.draw(st.integers(0, p - 1)) for p in patch)
    how = data.draw(st.sampled_from(list(COMBINED.values())))
    names = ["yx", "xy", "zx", "xz", "zy", "yz"]
    planes = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    planes = THREE if how == FLOWS else planes
    sections = data.draw(st.sampled_from([1, 3]))
    seen_axes = {axis for plane in planes for axis in plane}
    margin = tuple(data.draw(st.integers(0, 2)) if axis in seen_axes else 0 for axis in "zyx")
    channels = data.draw(st.integers(1, 2))
    batch_size = data.draw(st.sampled_from([1, 2]))
    array = np.random.default_rng(1).random((channels, *shape), np.float32)
    calls = []

    def network(batch):
        calls.append(batch.shape)
        answer = weigh(batch)
        batch *= -1  # a network may change what it is given
        return answer

    result = predict(
        array,
        network,
        patch_shape=patch,
        patch_overlap=overlap,
        crop_margin=margin,
        output_channels=4 if how == FLOWS else 3,
        dims=2,
        sections=sections,
        planes=planes,
        combine_planes=how,
        prediction_bound=4,
        fill="symmetric",
        batch_size=batch_size,
    )
    normals = [next(n for n, axis in enumerate("zyx") if axis not in plane) for plane in planes]
    around = tuple(sections // 2 if n in normals else 0 for n in range(3))
    whole = tuple(map(max, zip(margin, around, strict=True)))
    plan = plan_of(BoundingBox((0, 0, 0), shape), patch, overlap, shape, crop_margin=whole)
    assert {(n, c) for n, c, *_ in calls} == {(batch_size, channels * sections)}

    def predict_patch(box):
        answers = {}
        for plane, normal in zip(planes, normals, strict=True):
            cut = [*margin]
            cut[normal] = sections // 2
            grown = box.grow(tuple(cut))
            seen = np.concatenate([cut_out(each, plan, grown, "symmetric") for each in array])
            answers[plane] = answers_of(seen, plane, weigh, sections, cut)
        return combine(answers, how)

    expected, _ = oracle(plan.lattice, predict_patch, len(result))
    expected = expected[(slice(None), *plan.chunks.roi.slices_in(plan.lattice.domain))]
    np.testing.assert_allclose(
        result, expected, atol=largest_rounding(4.0, plan.lattice.most_patches) + 2e-6
    )


@pytest.mark.parametrize("how", COMBINED)
def test_a_network_that_sees_no_farther_than_its_margin_gives_that_of_whole_sections(how):
    """Without any patches: the network on every whole section of the volume along each plane."""
    torch.manual_seed(0)
    network = torch.nn.Conv2d(1, 3, 3)
    array = np.random.default_rng(2).random((1, *SHAPE), np.float32)
    calls = []

    def valid(batch):
        calls.append(len(batch))
        with torch.inference_mode():
            return network(torch.from_numpy(np.ascontiguousarray(batch))).numpy()

    result = predict(
        array,
        valid,
        patch_shape=(8, 9, 11),
        patch_overlap=(2, 3, 4),
        crop_margin=(1, 1, 1),
        output_channels=4 if how == "sum" else 3,
        dims=2,
        planes=THREE,
        combine_planes=COMBINED[how],
        fill="edge",
        prediction_bound=2,
        batch_size=2,
    )
    patches = 3 * 4 * 3
    assert calls == [2] * ((8 + 9 + 11) * patches // 2)  # each section of each patch, once
    answers = {}
    for plane in THREE:
        width = [(0, 0), *((int(axis in plane),) * 2 for axis in "zyx")]
        answers[plane] = answers_of(np.pad(array, width, mode="edge"), plane, valid)
    expected = combine(answers, COMBINED[how])
    np.testing.assert_allclose(result, expected, atol=4e-6)


def planes_job(source, out, **keys):
    """Values of a job with a 2-D network over planes."""
    model = toy("flat", dims=2, planes=THREE, normalize="unit", output_channels=2)
    inference = {"patch_shape": [6, 8, 10], "patch_overlap": [2, 4, 3], "threads": 1}
    return job_values(
        source,
        out,
        model=model | keys.pop("model", {}),
        inference=inference | keys.pop("inference", {}),
        output={"block_shape": [2, 4, 4]},
        **keys,
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.differing_executors])
@given(
    chunk=st.tuples(*[st.sampled_from([1, 2, 4])] * 3),
    how=st.sampled_from(["mean", "vote", {"sum": [{"yx": 0, "zx": 1}, {"zy": 1, "yx": 1}]}]),
    activation=st.sampled_from(["none", "softmax"]),
    augment=st.sampled_from(["none", {"mirror": ["z", "x"]}]),
    lattice=st.sampled_from(["stride", "spread", "pad"]),
    batch_size=st.integers(1, 3),
)
def test_jobs_have_the_same_bits_in_both_strategies_and_without_chunks(
    tmp_path_factory, chunk, how, activation, augment, lattice, batch_size
):
    folder = tmp_path_factory.mktemp("job")
    image = np.random.default_rng(0).integers(0, 256, (9, 17, 13), dtype=np.uint8)
    source = write_volume(folder / "in", image, block_shape=(4, 8, 8))
    model = {"combine_planes": how, "activation": activation}
    if augment != "none":
        model["channels"] = [{}, {}]
    inference = {"lattice": lattice, "augment": augment, "batch_size": batch_size}
    for strategy in ("recompute", "exchange"):
        chunks = {"chunk_shape": [2 * chunk[0], 4 * chunk[1], 4 * chunk[2]], "strategy": strategy}
        values = planes_job(source, folder / strategy, model=model, inference=inference | chunks)
        job = do_job(values, folder)
    found = read_volume(folder / "recompute")
    np.testing.assert_array_equal(found, read_volume(folder / "exchange"))
    alone = predict(
        image,
        toy("flat")["path"],
        patch_shape=(6, 8, 10),
        patch_overlap=(2, 4, 3),
        output_channels=2,
        dims=2,
        planes=THREE,
        normalize="unit",
        device="cpu",
        threads=1,
        combine_planes=how,
        activation=activation,
        lattice=lattice,
        augment=augment,
        batch_size=batch_size,
        prediction_bound=job.prediction_bound,
    )
    np.testing.assert_array_equal(found, alone)


def test_the_bound_of_a_sum_of_shares_is_that_of_its_terms(tmp_path):
    source = write_volume(tmp_path / "in", np.full(SHAPE, 200, np.uint8))
    terms = {"sum": [{"yx": 0, "zx": 0, "zy": 0}, {"yx": 1}]}
    values = planes_job(
        source, tmp_path / "out", model={"activation": "softmax", "combine_planes": terms}
    )
    job = do_job(values, tmp_path)
    assert job.prediction_bound == 4.0
    assert job.config.output_interval == (0.0, 3.0)
    found = read_volume(tmp_path / "out")
    assert found[0].max() > 1
    assert found[1].max() < 1


@pytest.mark.slow
def test_an_engine_of_fixed_shapes_has_one_network_for_each_plane(tmp_path):
    pytest.importorskip("openvino")
    image = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)
    source = write_volume(tmp_path / "in", image)
    found = {}
    for engine, chunk in (("openvino", 8), ("openvino", 16), ("torch", 16)):
        inference = {"engine": engine, "chunk_shape": [chunk] * 3}
        do_job(planes_job(source, tmp_path / f"{engine}{chunk}", inference=inference), tmp_path)
        found[engine, chunk] = read_volume(tmp_path / f"{engine}{chunk}")
    np.testing.assert_array_equal(found["openvino", 8], found["openvino", 16])
    np.testing.assert_allclose(found["openvino", 16], found["torch", 16], atol=2e-6)


def test_forward_passes_for_larger_batches_are_dropped_where_memory_is_short():
    made = []

    def make(shape):
        made.append(shape)
        return lambda batch: batch * len(made)

    forward = per_shape(make, [(4, 1, 2, 3), (4, 1, 3, 2)])
    for size, rows, columns in ((4, 2, 3), (4, 3, 2), (2, 2, 3), (2, 3, 2), (2, 2, 3), (4, 2, 3)):
        forward(np.ones((size, 1, rows, columns)))
    assert made == [
        (4, 1, 2, 3),
        (4, 1, 3, 2),
        (2, 1, 2, 3),
        (2, 1, 3, 2),
        (4, 1, 2, 3),
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dims": 3}, "write dims: 2, or remove planes"),
        ({"planes": ["yx", "yx"]}, "names a plane twice"),
        ({"planes": ["yy"]}, "model.planes.0: input should be 'yx'"),
        ({"planes": ["zx"], "crop_margin": (0, 1, 0)}, "no crop_margin on y"),
        ({"planes": None, "combine_planes": "vote"}, "no effect without planes"),
        ({"combine_planes": "vote"}, "output_channels is 1"),
        ({"combine_planes": "median"}, "model.combine_planes: input should be 'mean' or 'vote'"),
        ({"combine_planes": FLOWS}, "describes 4 channels, output_channels says 1"),
        ({"combine_planes": {"sum": [{"yx": 0, "zx": 0}]}}, "names the planes yx, zx, and"),
        ({"combine_planes": {"sum": [{}]}}, "model.combine_planes.sum.0"),
        ({"combine_planes": {"sun": []}}, "unknown key; "),
        (
            {"combine_planes": "vote", "denormalize": True, "output_channels": 2},
            "does not go with denormalize",
        ),
    ],
)
def test_mistakes_are_named(keys, message):
    keys = {"dims": 2, "patch_shape": (4, 8, 8), "planes": THREE, **keys}
    with pytest.raises(ConfigError, match=message):
        predict(np.zeros(SHAPE, np.float32), weigh, **keys)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": {"output_scale": [1, 2, 1]}, "input": {"fill": "edge"}},
            "model.planes does not",
        ),
        ({"inference": {"precision": "int8", "engine": "openvino"}}, "int8 does not go with"),
        (
            {
                "model": {
                    "heads": [{"key": 0, "channels": 2}],
                    "output_channels": 2,
                    "combine_planes": "vote",
                }
            },
            "does not go with heads",
        ),
    ],
)
def test_what_does_not_go_with_planes_is_refused(tmp_path, sections, message):
    with pytest.raises(ConfigError, match=message):
        parse_job(planes_job("in", tmp_path / "out", **sections), tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"output_channels": 3}, "answers 2 channels for a section of a plane; expected 3"),
        (
            {"combine_planes": {"sum": [{"yx": 0, "zx": 0}, {"zy": 2}]}},
            "answers 2 channels for a section of a plane; expected at least 3",
        ),
        ({"crop_margin": [0, 0, 1], "path": "valid_plane"}, "the network returns an array of"),
    ],
)
def test_a_network_that_answers_otherwise_is_told_so_at_launch(tmp_path, keys, message):
    source = write_volume(tmp_path / "in", np.zeros(SHAPE, np.uint8))
    if "path" in keys:
        keys = keys | toy(keys["path"])
    values = planes_job(source, tmp_path / "out", model=keys)
    with pytest.raises(ModelContractError, match=message):
        prepare(parse_job(values, tmp_path))
    assert not (tmp_path / "out").exists()


def test_the_order_in_which_a_sum_names_planes_is_not_part_of_a_jobs_identity():
    first = PlaneSum.model_validate({"sum": [{"zy": 0, "yx": 1}]})
    assert list(first.sum[0]) == ["yx", "zy"]
    assert (first.most_terms, first.network_channels) == (2, 2)
