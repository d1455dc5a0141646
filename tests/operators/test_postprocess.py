"""Each operator against NumPy on the whole volume, for more than one chunk shape."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from helpers import job_values, plan_of, read_volume, write_job, write_volume
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage, special

from beam_inference import prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.config.operators import (
    ArrayPlace,
    channels_after,
    operator_bytes,
    total_halo,
    validate_operator,
)
from beam_inference.errors import ConfigError, ModelContractError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.place import THIS_PROCESS
from beam_inference.launch.checks import check_paths
from beam_inference.launch.decide import decide_value_range
from beam_inference.operators.postprocess import apply_functions, build_functions
from beam_inference.worker.worker import Worker

CHANNELS = 3
PLACE = ArrayPlace(BoundingBox((0, 0, 0), (1, 1, 1)), (1.0, 1.0, 1.0))
"""Where values are, for operators that do not ask."""

INPUT = np.random.default_rng(1).integers(0, 256, (CHANNELS, 40, 48, 50), dtype=np.uint8)
INPUT[:, 8:24, :20] = 0
MODEL = {"input_channels": CHANNELS, "output_channels": CHANNELS}


LABELLING = ("argmax", "regions", "threshold")


def parsed(operators, tmp_path, dtype="float32"):
    config = parse_job(
        job_values("in", "out", model=MODEL, output={"dtype": dtype}) | {"postprocess": operators},
        tmp_path,
    )
    return config.postprocess


def result(tmp_path, name, chunk_shape=(16, 32, 32), output=None, inference=None, **keys):
    """The output of a job on the identity, without Beam."""
    write_volume(tmp_path / "in", INPUT)
    values = job_values(
        tmp_path / "in",
        tmp_path / name,
        output=output or {},
        model=MODEL,
        inference={"chunk_shape": list(chunk_shape), **(inference or {})},
    )
    launch = prepare(parse_job(values | keys, tmp_path))
    worker = Worker(launch)
    outcomes = {
        record.outcome for record in worker.infer_chunks(range(launch.read_job().plan.chunks.count))
    }
    assert outcomes == {"done"}
    return read_volume(tmp_path / name)


def regions(array, labels):
    """Labels of the last channel that is above, 0 where none is."""
    found = np.zeros(array.shape[1:], np.uint16)
    for channel, label in zip(array, labels, strict=True):
        found[channel >= 100] = label
    return found


def smoothed(array, sigma):
    """A Gaussian cut off at four standard deviations, written out."""
    array = array.astype(np.float64)
    for axis, s in enumerate(sigma, 1):
        radius = int(np.ceil(4 * s))
        if radius:
            weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / s) ** 2)
            padded = np.pad(
                array, [(radius, radius) if a == axis else (0, 0) for a in range(4)], mode="edge"
            )
            pieces = [
                w * np.take(padded, range(k, k + array.shape[axis]), axis)
                for k, w in enumerate(weights / weights.sum())
            ]
            array = sum(pieces)
    return array


def test_smoothing_against_a_gaussian_written_out_and_without_seams(tmp_path):
    sigma = (0.6, 1.5, 2.0)
    operators = [{"operator": "smooth", "sigma": list(sigma)}]
    whole = result(tmp_path, "whole", (48, 64, 64), postprocess=operators)
    np.testing.assert_allclose(whole, smoothed(INPUT, sigma), atol=1e-3)
    for number, chunk_shape in enumerate([(16, 16, 16), (32, 16, 48)]):
        np.testing.assert_array_equal(
            result(tmp_path, f"o{number}", chunk_shape, postprocess=operators), whole
        )


def test_a_roi_is_smoothed_with_what_lies_around_it_in_the_domain(tmp_path):
    roi = {"start": [0, 16, 16], "stop": [16, 32, 32], "context": [0, 12, 12]}
    values = result(
        tmp_path,
        "out",
        (16, 16, 16),
        roi=roi,
        postprocess=[{"operator": "smooth", "sigma": [0, 1.5, 1.5]}],
    )
    np.testing.assert_allclose(
        values, smoothed(INPUT, (0, 1.5, 1.5))[:, :16, 16:32, 16:32], atol=1e-3
    )


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        (
            [{"operator": "threshold", "at": 99.5}, {"operator": "select", "channels": [2, 0]}],
            INPUT[[2, 0]] >= 100,
        ),
        (
            [{"operator": "argmax"}, {"operator": "clip", "low": 1, "high": 9}],
            INPUT.argmax(0).clip(1)[None],
        ),
        (
            [
                {"operator": "regions", "labels": [5, 9, 200], "above": 99.5},
                {"operator": "clip", "high": 100},
                {"operator": "select", "channels": [0]},
            ],
            regions(INPUT, [5, 9, 200]).clip(0, 100)[None],
        ),
    ],
    ids=["select", "clip", "both"],
)
def test_whole_numbers_stay_whole_when_some_are_chosen_or_cut(operators, expected, tmp_path):
    output = {"dtype": "uint16", "format": "zarr3"}
    values = result(tmp_path, "out", (48, 64, 64), postprocess=operators, output=output)
    np.testing.assert_array_equal(values, expected)


def test_whole_numbers_are_values_after_other_operators(tmp_path):
    operators = [{"operator": "threshold", "at": 99.5}, {"operator": "clip", "high": 0.5}]
    output = {"dtype": "uint8", "format": "zarr3"}
    values = result(tmp_path, "out", (48, 64, 64), postprocess=operators, output=output)
    np.testing.assert_array_equal(values, np.where(INPUT >= 100, 255, 0))


@pytest.mark.parametrize("seams", ["recompute", "exchange", "crop"])
def test_classes_and_channels(tmp_path, seams):
    for name, operators, expected, output in [
        ("argmax", [{"operator": "argmax"}], INPUT.argmax(0)[None], {"dtype": "uint8"}),
        (
            "vote",
            [{"operator": "argmax", "background": 199.5}],
            np.where(INPUT.max(0) >= 200, INPUT.argmax(0) + 1, 0)[None],
            {"dtype": "uint8"},
        ),
        (
            "threshold",
            [{"operator": "select", "channels": [2, 0]}, {"operator": "threshold", "at": 99.5}],
            INPUT[[2, 0]] >= 100,
            {"dtype": "uint16", "format": "zarr3"},
        ),
        (
            "labels",
            [{"operator": "argmax"}],
            INPUT.argmax(0)[None],
            {"dtype": "uint32", "encoding": "compressed_segmentation"},
        ),
        (
            "select",
            [{"operator": "select", "channels": [1]}],
            INPUT[[1]],
            {"dtype": "uint8", "value_range": [0, 255]},
        ),
    ]:
        # Values are whole numbers but for the rounding of sums, where last patches move back.
        inference = {"seams": seams, "patch_overlap": [0, 0, 0]}
        for chunk_shape in ((16, 16, 32), (32, 48, 64)):
            found = result(
                tmp_path,
                f"{name}{chunk_shape[0]}",
                chunk_shape,
                output,
                inference,
                postprocess=operators,
            )
            np.testing.assert_array_equal(found, expected)


def test_a_function_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine_for_a_test.py").write_text(
        "def ratio(values):\n    return values[:1] / (1 + values.sum(axis=0, keepdims=True))\n"
        "def wrong(values):\n    return values[0]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"operator": "own", "function": "mine_for_a_test:ratio", "output_channels": 1}
    expected = INPUT[:1] / (1 + INPUT.sum(axis=0, keepdims=True, dtype=np.float32))
    found = result(tmp_path, "out", inference={"patch_overlap": [0, 0, 0]}, postprocess=[own])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    wrong, absent = (
        (
            build_functions(parsed([own | {"function": f"mine_for_a_test:{name}"}], tmp_path)[:1])
            if name == "wrong"
            else name
        )
        for name in ("wrong", "absent")
    )
    with pytest.raises(ModelContractError, match=r"returned an array of shape \[40, 48, 50\]"):
        apply_functions(wrong, INPUT.astype(np.float32), PLACE)
    with pytest.raises(ModelContractError, match=f"cannot import mine_for_a_test:{absent}"):
        build_functions(parsed([own | {"function": f"mine_for_a_test:{absent}"}], tmp_path))


def test_a_vote_counts_channels_from_1_and_is_0_where_none_reaches_the_background(tmp_path):
    values = np.array(
        [[0.2, 0.5, 0.7, 0.7, 0.4999], [0.1, 0.3, 0.7, 0.8, 0.4999]], np.float32
    ).reshape(2, 1, 1, 5)
    vote = {"operator": "argmax", "background": 0.5}
    (operator,) = build_functions(parsed([vote], tmp_path, "uint8"))
    assert operator(values, PLACE).ravel().tolist() == [0, 1, 1, 2, 0]
    # one channel has a choice, too
    assert operator(values[:1], PLACE).ravel().tolist() == [0, 1, 1, 1, 0]
    values = job_values("in", "out", output={"dtype": "uint8"})
    assert parse_job(values | {"postprocess": [vote]}, tmp_path).output_channels == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"postprocess": [{"operator": "select", "channels": [3]}]},
            "select .3., but there are the channels 0 … 2",
        ),
        (
            {"postprocess": [{"operator": "argmax"}]},
            "gives whole numbers, .* write an integer output.dtype",
        ),
        (
            {"postprocess": [{"operator": "blur"}]},
            "postprocess.0.operator: 'blur' is not among .*: affine, argmax, clip, own, regions, ",
        ),
        (
            {
                "postprocess": [{"operator": "select", "channels": [0]}, {"operator": "argmax"}],
                "output": {"path": "out", "dtype": "uint8"},
            },
            "argmax of one channel",
        ),
        ({"postprocess": [{"operator": "clip"}]}, "clip needs low, high, or both"),
        (
            {"postprocess": [{"operator": "clip", "low": 1, "high": 1}]},
            "low 1 must be less than high 1",
        ),
        ({"postprocess": [{"operator": "affine", "scale": [1, 0, 1]}]}, "scale must not be 0"),
        ({"postprocess": [{"operator": "affine", "scale": 1e-50}]}, "scale must not be 0"),
        (
            {"postprocess": [{"operator": "affine", "offset": [1, 2]}]},
            "affine has a list offset of 2 numbers, but there are 3 channels",
        ),
        (
            {
                "postprocess": [
                    {"operator": "select", "channels": [1]},
                    {"operator": "softmax"},
                ]
            },
            "softmax of one channel is 1 everywhere",
        ),
        (
            {
                "postprocess": [{"operator": "regions", "labels": [1, 2], "above": 0.5}],
                "output": {"path": "out", "dtype": "uint8"},
            },
            "regions lists 2 labels, but there are 3 channels",
        ),
        (
            {
                "postprocess": [
                    {"operator": "softmax"},
                    {"operator": "regions", "labels": [1, 2, 3], "above": 1},
                ],
                "output": {"path": "out", "dtype": "uint8"},
            },
            "postprocess.1: regions above 1, .* the result would be 0 everywhere",
        ),
        (
            {
                "postprocess": [
                    {"operator": "sigmoid"},
                    {"operator": "affine", "scale": 2, "offset": -1},
                    {"operator": "clip", "low": 2},
                ]
            },
            "postprocess.2: clip to 2 … inf, but the values there are from -1 to 1: .* be 2 every",
        ),
        (
            {
                "postprocess": [{"operator": "affine", "scale": 2}],
                "output": {"path": "out", "dtype": "uint8"},
            },
            "value_range is needed to write uint8 without an activation",
        ),
        (
            {"output": {"path": "out", "dtype": "uint32"}},
            "is for labels, which argmax, regions, threshold or own with labels make",
        ),
        (
            {"postprocess": [{"operator": "own", "function": "os.path", "output_channels": 1}]},
            "not of the form package.module:function or file.py:function",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        parse_job(job_values("in", "out", model=MODEL) | keys, tmp_path)


SIGMOID = {"path": "n.ts", "activation": "sigmoid", "output_channels": CHANNELS}


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ([{"operator": "threshold", "at": 128}], "postprocess.0: threshold at 128, .* 0 everyw"),
        ([{"operator": "threshold", "at": 0}], "the result would be 1 everywhere"),
        (
            [
                {"operator": "select", "channels": [1]},
                {"operator": "smooth", "sigma": [0, 1, 1]},
                {"operator": "threshold", "at": 1.5},
            ],
            "postprocess.2: threshold at 1.5, but the values there are from 0 to 1",
        ),
        ([{"operator": "argmax"}, {"operator": "threshold", "at": 3}], "from 0 to 2"),
        ([{"operator": "argmax", "background": 128}], "argmax with background 128"),
    ],
)
def test_thresholds_that_no_value_can_reach_are_refused(operators, message, tmp_path):
    values = job_values("in", "out", model=SIGMOID, output={"dtype": "uint8"})
    with pytest.raises(ConfigError, match=message):
        parse_job(values | {"postprocess": operators}, tmp_path)


@pytest.mark.parametrize(
    "operators",
    [
        [{"operator": "threshold", "at": 1}],
        [{"operator": "argmax", "background": 0}, {"operator": "threshold", "at": 3}],
        [
            {"operator": "own", "function": "a.b:c", "output_channels": 1},
            {"operator": "threshold", "at": 128},
        ],
    ],
)
def test_thresholds_that_values_may_reach_are_accepted(operators, tmp_path):
    values = job_values("in", "out", model=SIGMOID, output={"dtype": "uint8"})
    parse_job(values | {"postprocess": operators}, tmp_path)


def test_a_threshold_that_the_tried_patch_does_not_reach_is_warned_of(tmp_path, caplog):
    write_volume(tmp_path / "in", INPUT)
    values = job_values(tmp_path / "in", tmp_path / "out", model=MODEL, output={"dtype": "uint8"})
    prepare(parse_job(values | {"postprocess": [{"operator": "threshold", "at": 999}]}, tmp_path))
    assert "middle of the ROI: postprocess.0: threshold at 999, but the values" in caplog.text


@pytest.mark.parametrize("runner", ["FnApiRunner", "BundleBasedDirectRunner"])
def test_chunks_exchange_what_operators_need_beyond_them(tmp_path, runner):
    write_volume(tmp_path / "in", INPUT)
    results = []
    for strategy in ("recompute", "exchange"):
        values = job_values(
            tmp_path / "in",
            tmp_path / strategy,
            model=MODEL,
            inference={"seams": strategy, "chunk_shape": [16, 16, 32]},
        ) | {"postprocess": [{"operator": "smooth", "sigma": [0, 1, 2]}]}
        path = str(write_job(tmp_path / "job.yaml", values))
        assert main(["run", path, f"--runner={runner}"]) == 0
        assert main(["verify", path, "--deep"]) == 0
        results.append(read_volume(tmp_path / strategy))
    assert list((tmp_path / "exchange").rglob("sums/*/*/*.json"))
    assert results[0].tobytes() == results[1].tobytes()


def test_operators_are_part_of_the_fingerprint(tmp_path):
    prints = set()
    for number, sigma in enumerate([1, 2]):
        write_volume(tmp_path / "in", INPUT)
        values = job_values(tmp_path / "in", tmp_path / f"o{number}", model=MODEL)
        job = values | {"postprocess": [{"operator": "smooth", "sigma": [0, 0, sigma]}]}
        prints.add(prepare(parse_job(job, tmp_path)).read_job().fingerprint)
    assert len(prints) == 2


def test_channels_of_the_result_are_those_of_the_last_operator(tmp_path):
    operators = parsed([{"operator": "select", "channels": [0, 0, 1, 2]}], tmp_path)
    assert channels_after(operators, 3) == 4


@given(
    st.tuples(*[st.integers(1, 3)] * 3),
    st.tuples(*[st.sampled_from([0.0, 0.3, 0.8, 1.7])] * 3),
    st.tuples(*[st.integers(0, 5)] * 3),
    st.tuples(*[st.integers(-7, 7)] * 3),
    st.sampled_from(["recompute", "crop"]),
    st.sampled_from(
        [
            [],
            [{"operator": "argmax"}],
            [{"operator": "select", "channels": [1]}],
            [{"operator": "threshold", "at": 0.5}],
            [{"operator": "softmax"}],
            [{"operator": "sigmoid"}],
            [{"operator": "affine", "scale": -0.7, "offset": 0.1}],
            [{"operator": "clip", "low": 0.3, "high": 0.6}],
            [
                {"operator": "select", "channels": [1, 0, 1]},
                {"operator": "regions", "labels": [2, 1, 3], "above": 0.5},
            ],
        ]
    ),
)
def test_the_chunk_shape_changes_no_bit(
    tmp_path_factory, blocks, sigma, context, start, seams, then
):
    """Chunks of a few blocks give what the whole domain gives at once."""
    operators = parsed(
        [{"operator": "smooth", "sigma": list(sigma)}, *then],
        tmp_path_factory.getbasetemp(),
        dtype="uint8" if then and then[-1]["operator"] in LABELLING else "float32",
    )
    volume = BoundingBox(start, tuple(a + n for a, n in zip(start, (21, 19, 23), strict=True)))
    roi = BoundingBox(tuple(a + 5 for a in start), tuple(b - 4 for b in volume.stop))
    plan = plan_of(
        roi,
        (6, 5, 7),
        (2, 1, 3),
        tuple(4 * n for n in blocks),
        volume=volume,
        context=context,
        strategy=seams,
        chunk_crop_margin=(1, 1, 1) if seams == "crop" else (0, 0, 0),
        block_shape=(4, 4, 4),
        halo=total_halo(operators),
    )
    domain = plan.lattice.domain
    values = np.random.default_rng(sum(start) + 99).random((2, *domain.shape), np.float32)
    whole = apply_functions(build_functions(operators), values, PLACE)[
        (slice(None), *roi.slices_in(domain))
    ]
    for index in range(plan.chunks.count):
        core = plan.chunks.core_box(index)
        box = plan.work(index).core_box
        part = apply_functions(
            build_functions(operators), values[(slice(None), *box.slices_in(domain))], PLACE
        )
        found = part[(slice(None), *core.slices_in(box))]
        np.testing.assert_array_equal(found, whole[(slice(None), *core.slices_in(roi))])


LOGITS = np.random.default_rng(3).normal(0, 20, (3, 4, 5, 6)).astype(np.float32)
LOGITS[:, 0, 0, :3] = [[1e4, -1e4, 0], [1e4, 0, 0], [-1e4, 1e4, 0]]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ({"operator": "softmax"}, special.softmax(LOGITS.astype(np.float64), axis=0)),
        ({"operator": "sigmoid"}, special.expit(LOGITS.astype(np.float64))),
        ({"operator": "affine", "scale": -0.5, "offset": 3}, 3 - LOGITS / 2),
        ({"operator": "affine", "offset": -1e300}, LOGITS + np.finfo(np.float32).min),
        (
            {"operator": "affine", "scale": [1, 2, 4], "offset": [0, -1, 2]},
            np.stack([LOGITS[0], 2 * LOGITS[1] - 1, 4 * LOGITS[2] + 2]),
        ),
        ({"operator": "clip", "low": -2, "high": 10}, LOGITS.clip(-2, 10)),
        ({"operator": "clip", "high": 10}, np.minimum(LOGITS, 10)),
        (
            {"operator": "regions", "labels": [5, 2, 7], "above": 0},
            np.select([LOGITS[2:] > 0, LOGITS[1:2] > 0, LOGITS[:1] > 0], [7, 2, 5], 0),
        ),
    ],
    ids=str,
)
def test_values_are_those_of_the_formula(tmp_path, operator, expected):
    given_values = LOGITS.copy()
    dtype = "uint8" if operator["operator"] in LABELLING else "float32"
    (function,) = build_functions(parsed([operator], tmp_path, dtype))
    np.testing.assert_allclose(function(given_values, PLACE), expected, rtol=2e-6, atol=1e-30)


@given(
    st.integers(2, 12),
    st.tuples(*[st.integers(1, 9)] * 3),
    st.sampled_from(["softmax", "sigmoid"]),
    st.integers(0, 99),
)
def test_the_bits_at_a_voxel_do_not_depend_on_the_voxels_around(channels, shape, operator, seed):
    """Vector instructions, and sums in groups, must not tell where an array ends."""
    (function,) = build_functions([validate_operator({"operator": operator})])
    values = np.random.default_rng(seed).normal(0, 9, (channels, *shape)).astype(np.float32)
    whole = function(values, PLACE)
    for voxel in [(0, 0, 0), tuple(n // 2 for n in shape), tuple(n - 1 for n in shape)]:
        part = (slice(None), *(slice(n, n + 1) for n in voxel))
        np.testing.assert_array_equal(function(values[part], PLACE), whole[part])
        part = (slice(None), *(slice(n, None) for n in voxel))
        np.testing.assert_array_equal(function(values[part], PLACE), whole[part])


@pytest.mark.parametrize(
    ("activation", "operators", "expected"),
    [
        ("none", [{"operator": "softmax"}], (0.0, 1.0)),
        ("none", [{"operator": "clip", "low": -1, "high": 3}], (-1.0, 3.0)),
        ("sigmoid", [{"operator": "affine", "scale": -2, "offset": 1}], (-1.0, 1.0)),
        (
            "sigmoid",
            [
                {"operator": "affine", "scale": [1, 2, 3], "offset": [0, 1, -4]},
                {"operator": "clip", "low": -2},
            ],
            (-2.0, 3.0),
        ),
    ],
)
def test_integers_hold_what_the_operators_can_give(tmp_path, activation, operators, expected):
    model = SIGMOID | {"activation": activation}
    values = job_values("in", "out", model=model, output={"dtype": "uint8"})
    config = parse_job(values | {"postprocess": operators}, tmp_path)
    assert decide_value_range(config) == expected


def test_probabilities_after_blending_are_written_in_integers(tmp_path):
    operators = [{"operator": "affine", "scale": 0.05, "offset": -6}, {"operator": "softmax"}]
    found = result(tmp_path, "out", postprocess=operators, output={"dtype": "uint8"})
    logits = INPUT.astype(np.float32) * np.float32(0.05) - 6
    expected = np.rint(special.softmax(logits.astype(np.float64), axis=0) * 255)
    assert np.abs(found.astype(int) - expected).max() <= 1
    assert (found != expected).mean() < 1e-3


def test_smoothing_is_that_of_scipy(tmp_path):
    (smooth,) = build_functions(parsed([{"operator": "smooth", "sigma": [1, 0, 2]}], tmp_path))
    values = INPUT.astype(np.float32)
    expected = ndimage.gaussian_filter(values, (0, 1, 0, 2), mode="nearest", truncate=4)
    np.testing.assert_array_equal(smooth(values, PLACE), expected)


@pytest.mark.parametrize("seams", ["recompute", "exchange"])
@pytest.mark.parametrize(
    ("body", "cause"),
    [("1 / 0", "ZeroDivisionError"), ("values * float('nan')", "NaN or infinite")],
)
def test_an_operator_that_fails_quarantines_its_chunk_alone(
    tmp_path, monkeypatch, capsys, seams, body, cause
):
    name = f"failing_{seams}_{len(body)}"
    (tmp_path / f"{name}.py").write_text(
        f"def some(values):\n    return {body} if values.mean() > 200 else values\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    array = np.random.default_rng(0).integers(0, 100, (16, 32, 64), dtype=np.uint8)
    array[:, :16, :16] = 250
    write_volume(tmp_path / "in", array)
    inference = {"seams": seams, "chunk_shape": [16, 16, 16], "patch_overlap": [0, 0, 0]}
    own = {"operator": "own", "function": f"{name}:some", "output_channels": 1}
    values = job_values(tmp_path / "in", tmp_path / "out", inference=inference) | {
        "postprocess": [own]
    }
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", job]) == 3
    said = capsys.readouterr().out
    assert "quarantined: chunk 0" in said
    assert cause in said
    found = read_volume(tmp_path / "out")[0]
    np.testing.assert_array_equal(found[:, 16:], array[:, 16:])
    np.testing.assert_array_equal(found[:, :, 16:], array[:, :, 16:])


def test_more_classes_than_a_dtype_holds_are_refused(tmp_path):
    model = {"input_channels": 256, "output_channels": 256}
    output = {"dtype": "uint8"}
    values = job_values("in", "out", model=model, output=output)
    parse_job(values | {"postprocess": [{"operator": "argmax"}]}, tmp_path)
    with pytest.raises(ConfigError, match="labels up to 256, which uint8 does not hold"):
        parse_job(values | {"postprocess": [{"operator": "argmax", "background": 0}]}, tmp_path)


@pytest.mark.parametrize(
    "operators",
    [
        [{"operator": "smooth", "sigma": [0.5, 1, 1]}],
        [{"operator": "select", "channels": [2]}],
        [{"operator": "threshold", "at": 0.5}],
        [{"operator": "argmax"}],
        [{"operator": "argmax", "background": 0.5}],
        [
            {"operator": "smooth", "sigma": [0, 1, 1]},
            {"operator": "select", "channels": [2, 1]},
            {"operator": "argmax"},
        ],
        [{"operator": "select", "channels": [1]}, {"operator": "threshold", "at": 0.5}],
        [{"operator": "softmax"}],
        [{"operator": "sigmoid"}],
        [{"operator": "affine", "scale": 2, "offset": [1, 2, 3]}],
        [{"operator": "clip", "low": 0.5}],
        [{"operator": "regions", "labels": [3, 1, 2], "above": 0.5}],
    ],
    ids=str,
)
def test_what_operators_hold_is_foretold(tmp_path, operators):
    labels = operators[-1]["operator"] in LABELLING
    listed = parsed(operators, tmp_path, "uint8" if labels else "float32")
    values = np.random.default_rng(0).random((3, 32, 64, 64), np.float32)
    functions = build_functions(listed)
    apply_functions(
        functions, values[:, :2, :2, :2].copy(), PLACE
    )  # what is made at the first call
    tracemalloc.start()
    try:
        found = apply_functions(functions, values, PLACE)
        assert np.isfinite(found).all()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    foretold = operator_bytes(listed, 3) * values[0].size
    assert 0.95 * peak <= foretold + 10**5 <= 1.2 * peak + 10**5


def test_no_operators_hold_nothing():
    assert operator_bytes([], 3) == 0


def test_a_function_in_a_file_beside_the_job(tmp_path):
    (tmp_path / "mine.py").write_text("def half(values):\n    return values / 2\n")
    own = {"operator": "own", "function": "mine.py:half", "output_channels": CHANNELS}
    inference = {"patch_overlap": [0, 0, 0]}
    found = result(tmp_path, "out", inference=inference, postprocess=[own])
    np.testing.assert_allclose(found, INPUT / np.float32(2), rtol=0, atol=1e-6 * 256)


def test_a_file_that_remote_workers_do_not_see_is_refused(tmp_path):
    own = {"operator": "own", "function": "mine.py:half", "output_channels": 1}
    values = job_values("gs://bucket/in", "gs://bucket/out") | {"postprocess": [own]}
    remote = replace(THIS_PROCESS, is_this_machine=False, shares_files=False)
    with pytest.raises(ConfigError, match=r"postprocess.0.function .*/mine.py is on this machine"):
        check_paths(parse_job(values, tmp_path), remote)
