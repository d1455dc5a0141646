"""Outputs of other voxels than the network's: against whole arrays, and for any chunk shape."""

import json

import numpy as np
import pytest
from fakes.networks import NumpyNetwork, position_dependent
from helpers import (
    do_and_read,
    job_values,
    oracle,
    toy,
    write_job,
    write_levels,
    write_volume,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chunks import cut_out, infer_once, random_volume
from oracles.plans import triples
from scipy import ndimage

from beam_inference import prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import Resample
from beam_inference.conversion.find_source import find_source
from beam_inference.conversion.options import ResamplingOptions
from beam_inference.conversion.resampled import resample_source
from beam_inference.errors import AlignmentError, ConfigError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.exact_sums import largest_rounding
from beam_inference.geometry.plan import make_plan
from beam_inference.geometry.resampling import Resampling
from beam_inference.geometry.seam_sums import merge_sums, seam_boxes, split_sums
from beam_inference.job.place import THIS_PROCESS
from beam_inference.launch.planned_job import plan_job
from beam_inference.volumes.opening import open_volume

BOUND = 64.0


@st.composite
def resampled_plans(draw):
    """Small plans whose output has finer or coarser voxels, by every strategy."""
    start = (3, -2, 7)
    shape = draw(triples(1, 14))
    volume = BoundingBox(start, zyx.add(start, shape))
    target_start = draw(triples(-6, 6))
    target = BoundingBox(target_start, zyx.add(target_start, draw(triples(1, 14))))
    orders = draw(st.tuples(*[st.sampled_from([0, 1, 3])] * 3))
    to_output = Resampling(volume, target, orders)
    roi_start = zyx.triple(
        draw(st.integers(a, b - 1)) for a, b in zip(target.start, target.stop, strict=True)
    )
    roi = BoundingBox(
        roi_start,
        zyx.triple(
            draw(st.integers(a + 1, b)) for a, b in zip(roi_start, target.stop, strict=True)
        ),
    )
    patch = draw(triples(1, 6))
    block = draw(triples(1, 3))
    return make_plan(
        volume=volume,
        roi=to_output.source_box(roi),
        context=draw(triples(0, 3)),
        patch_shape=patch,
        patch_overlap=zyx.triple(draw(st.integers(0, p - 1)) for p in patch),
        chunk_shape=zyx.multiply(block, draw(triples(1, 4))),
        crop_margin=draw(triples(0, 2)),
        strategy="exchange",
        chunk_crop_margin=(0, 0, 0),
        block_shape=block,
        halo=draw(st.just((0, 0, 0)) | triples(0, 4)),
        lattice=draw(st.sampled_from(["stride", "spread", "pad"])),
        written=roi,
        to_output=to_output,
    )


@settings(deadline=None, max_examples=15)
@given(resampled_plans(), st.randoms())
def test_both_strategies_give_the_bits_of_the_whole_and_the_values_of_the_oracle(plan, random):
    check_plan(plan, random)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(deadline=None, max_examples=300)
@given(resampled_plans(), st.randoms())
def test_they_do_so_for_many_plans(plan, random):
    check_plan(plan, random)


def check_plan(plan, random):
    """Compute all chunks by both strategies, and compare them with the oracle."""
    array = random_volume(plan.volume.shape)
    network = NumpyNetwork(position_dependent)
    exchange = plan.exchange

    def sums_of(work):
        cutout = cut_out(array, plan, work.input_box)
        return infer_once(cutout, work, network, 2, bound=BOUND).core

    def finish(values, box, core):
        finished = plan.finished_box(core)
        values = plan.to_output.resample(values, box, finished)
        return values[(slice(None), *core.slices_in(finished))]

    parts = {}
    works = []
    for index in random.sample(range(plan.chunks.count), plan.chunks.count):
        work = exchange.owned_work(index)
        if work is None:
            assert not exchange.receivers(index)
            continue
        works.append(work)
        assert exchange.private_box(index) is None
        for receiver, arrays in split_sums(exchange, index, sums_of(work)):
            parts[receiver, index] = [part.copy() for part in arrays]
    roi = plan.chunks.roi
    result = np.full((2, *roi.shape), np.nan, np.float32)
    for index in range(plan.chunks.count):
        core = plan.chunks.core_box(index)
        mine = [(c, parts.pop((index, c), [])) for c in exchange.contributors(index)]
        [(box, values)] = merge_sums(exchange, index, mine, 2)
        work = plan.work(index)
        assert box == work.core_box
        alone = sums_of(work)
        assert values.tobytes() == alone.tobytes()
        result[(slice(None), *core.slices_in(roi))] = finish(values, box, core)
    assert not parts, "every part has a reader"
    assert plan.totals.patch_count == sum(work.patch_count for work in works)
    needed = plan.to_output.source_box(plan.finished_box(roi))
    assert plan.totals.patch_count == np.prod([len(r) for r in plan.lattice.touching(needed)])
    pairs = [(c, r) for c in range(plan.chunks.count) for r in exchange.receivers(c)]
    assert plan.totals.seam_voxels == sum(
        box.size for pair in pairs for box in seam_boxes(exchange, *pair)
    )
    boxes = [plan.finished_box(plan.chunks.core_box(i)) for i in range(plan.chunks.count)]
    for axis in range(3):
        assert plan.totals.extremes.resampled[axis] == max(box.shape[axis] for box in boxes)

    def predict_patch(box):
        margin = plan.crop_margin
        predicted = position_dependent(cut_out(array, plan, box.grow(margin))[None])[0]
        inner = (slice(m, n - m) for m, n in zip(margin, predicted.shape[1:], strict=True))
        return predicted[(slice(None), *inner)]

    expected, _ = oracle(plan.lattice, predict_patch, 2)
    box = plan.to_output.source_box(roi)
    blended = expected[(slice(None), *box.slices_in(plan.lattice.domain))]
    whole = plan.to_output.resample(blended.astype(np.float32), box, roi)
    scale = np.abs(expected).max()
    allowed = largest_rounding(BOUND, plan.lattice.most_patches) + 1e-6 * scale
    # weights of a cubic spline add up to 3 in magnitude on an axis, at most
    spread = 3.0 ** sum(order == 3 for order in plan.to_output.orders)
    assert np.abs(result - whole).max() <= spread * allowed


STORED = np.random.default_rng(1).integers(1, 256, (14, 30, 44), dtype=np.uint8)
START = (4, -6, 10)
SIZE = (20.0, 10.0, 10.0)
TWICE = {"resample": {"voxel_size_nm": [40, 20, 20]}}
WAYS = [([8, 16, 16], "recompute"), ([16, 32, 48], "exchange"), ([8, 8, 24], "exchange")]
BACK = {"block_shape": [8, 8, 8], "voxel_size_nm": "input"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    return write_volume(folder / "in", STORED, START, voxel_size_nm=SIZE, block_shape=(8, 16, 16))


def values_of(url, out, way=WAYS[0], **sections):
    chunk_shape, strategy = way
    inference = {"patch_shape": [4, 8, 8], "patch_overlap": [2, 4, 4], "strategy": strategy}
    inference |= {"chunk_shape": chunk_shape, "threads": 1}
    model = toy("position", output_channels=2, normalize="unit")
    postprocess = sections.pop("postprocess", [])
    roi = sections.pop("roi", None)
    values = job_values(
        url,
        out,
        inference=inference | sections.get("inference", {}),
        model=model | sections.get("model", {}),
        input=TWICE | sections.get("input", {}),
        output=BACK | sections.get("output", {}),
    )
    return values | {"postprocess": postprocess} | ({} if roi is None else {"roi": roi})


def outputs(url, folder, **sections):
    """What a job gives in several ways of cutting it, which must have the same bits."""
    found = [
        do_and_read(values_of(url, folder / f"out{number}", way, **sections), folder)
        for number, way in enumerate(WAYS)
    ]
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    return found[0]


def at_network_voxels(url, folder, **sections):
    """What the same job gives at the network's voxels: the blended values."""
    section = sections.pop("output", {}) | {"voxel_size_nm": "network", "resample": None}
    path = folder / "coarse"
    return do_and_read(values_of(url, path, output=section, **sections), folder), f"file://{path}"


@pytest.mark.parametrize(
    "order", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)]
)
def test_twice_the_voxel_size_and_back(stored, tmp_path, order):
    output = {} if order == 1 else {"resample": {"order": order}}
    found = outputs(stored, tmp_path, output=output)
    volume = open_volume(f"file://{tmp_path}/out0")
    assert volume.bounds == BoundingBox(START, zyx.add(START, STORED.shape))
    assert volume.voxel_size_nm == SIZE
    coarse, _ = at_network_voxels(stored, tmp_path)
    assert coarse.shape == (2, 7, 15, 22)
    for channel, blended in zip(found, coarse.astype(np.float64), strict=True):
        whole = ndimage.zoom(blended, 2, order=order, mode="nearest", grid_mode=True)
        np.testing.assert_allclose(channel, whole, rtol=0, atol=1e-5 * np.ptp(blended))


def test_the_bits_are_those_of_the_command_that_resamples_afterwards(stored, tmp_path):
    argmax = [{"operator": "argmax"}]
    model = toy("conv", prediction_bound=4)
    labels = {"dtype": "uint8"}
    found = outputs(stored, tmp_path, output=labels, model=model, postprocess=argmax)
    _, coarse = at_network_voxels(stored, tmp_path, model=model)
    how = ResamplingOptions(how=Resample(), like=stored, postprocess="[{operator: argmax}]")
    source = resample_source(find_source(coarse, None, 0, Storage()), coarse, how, Storage())
    np.testing.assert_array_equal(found, source.open()(source.info.bounds))
    assert {*np.unique(found)} == {0, 1}


CASES = [
    {"postprocess": [{"operator": "smooth", "sigma": [0.5, 1, 0.7]}]},
    {"roi": {"start": [5, -2, 12], "stop": [17, 22, 47]}, "output": {"format": "ome_zarr"}},
    {"output": {"voxel_size_nm": [33, 12, 7]}},
    {"output": {"voxel_size_nm": [33, 12, 7], "resample": {"order": 3, "separate_z": True}}},
    {
        "model": toy("finer", output_scale=[2, 2, 2], crop_margin=[2, 2, 2]),
        "input": {"fill": "symmetric", "resample": None},
        "inference": {"patch_shape": [8, 8, 8], "patch_overlap": [4, 4, 4]},
    },
    {"inference": {"lattice": "spread", "blend": {"gaussian": 0.125, "floor": "nnunet"}}},
    {"inference": {"patch_shape": [16, 24, 32], "patch_overlap": [0, 0, 0]}},
    {"output": {"dtype": "uint8", "value_range": [-8, 8]}},
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_chunk_shape_and_strategy_gives_the_same_bits(stored, tmp_path, case):
    found = outputs(stored, tmp_path, **case)
    assert np.unique(found).size > 50


def test_patches_of_the_whole_lie_over_the_whole_input(stored, tmp_path):
    """Of nearest voxels, the outermost of the network need not be those of the output."""
    coarse = {"voxel_size_nm": [50, 10, 10], "resample": {"order": 0}}
    values = values_of(stored, tmp_path / "out", input={"resample": None}, output=coarse)
    plan = plan_job(parse_job(values, tmp_path)).plan
    assert plan.to_output.source_box(plan.to_output.target) != plan.volume
    assert plan.lattice.domain == plan.volume


@pytest.mark.slow
def test_an_roi_with_its_context_is_the_part_of_the_whole(stored, tmp_path):
    whole = outputs(stored, tmp_path / "whole", inference={"patch_overlap": [0, 0, 0]})
    roi = {"start": [12, 2, 26], "stop": [18, 24, 54]}  # from patch to patch
    found = outputs(
        stored,
        tmp_path / "part",
        inference={"patch_overlap": [0, 0, 0]},
        roi=roi | {"context": [4, 8, 8]},
    )
    part = BoundingBox(zyx.triple(roi["start"]), zyx.triple(roi["stop"]))
    bounds = BoundingBox(START, zyx.add(START, STORED.shape))
    assert found.shape == (2, *part.shape)
    assert np.isfinite(found).all()
    assert whole[(slice(None), *part.slices_in(bounds))].shape == found.shape


@pytest.mark.slow
def test_a_box_is_put_back_into_the_whole_volume(tmp_path):
    array = np.zeros((20, 40, 44), np.uint8)
    box = (slice(3, 17), slice(5, 35), slice(0, 44))
    array[box] = STORED
    url = write_volume(tmp_path / "in", array, voxel_size_nm=SIZE, block_shape=(8, 16, 16))
    alone = write_volume(tmp_path / "alone", STORED, (3, 5, 0), voxel_size_nm=SIZE)
    levels = write_levels(url, tmp_path)
    section = {"box": {"levels": str(levels)}}
    found = outputs(url, tmp_path, input=section, output={"format": "zarr3"})
    expected = np.zeros((2, *array.shape), np.float32)
    expected[(slice(None), *box)] = do_and_read(values_of(alone, tmp_path / "of alone"), tmp_path)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_mask_of_the_output_is_counted_in_its_voxels(stored, tmp_path):
    kept = np.zeros(STORED.shape, np.uint8)
    kept[2:9, 11:23, 5:30] = 1
    write_volume(tmp_path / "mask", kept, START, voxel_size_nm=SIZE)
    mask = {"path": str(tmp_path / "mask"), "fill_value": -3}
    whole = outputs(stored, tmp_path)
    for number, way in enumerate(WAYS):
        values = values_of(stored, tmp_path / f"masked{number}", way) | {"mask": mask}
        found = do_and_read(values, tmp_path)
        np.testing.assert_array_equal(found, np.where(kept, whole, np.float32(-3)))


@pytest.mark.slow
def test_several_outputs_have_the_same_voxels(stored, tmp_path):
    values = values_of(stored, tmp_path / "out")
    values["outputs"] = {
        "labels": {
            "path": str(tmp_path / "labels"),
            "dtype": "uint8",
            "postprocess": [{"operator": "argmax"}],
        }
    }
    found = do_and_read(values, tmp_path)
    labels = open_volume(f"file://{tmp_path}/labels")
    assert labels.voxel_size_nm == SIZE
    np.testing.assert_array_equal(labels.read(labels.bounds)[0], found.argmax(axis=0))


def test_voxels_that_are_the_networks_change_no_fingerprint(stored, tmp_path):
    plain = values_of(stored, tmp_path / "a", input={"resample": None})
    plain["output"].pop("voxel_size_nm")
    said = values_of(stored, tmp_path / "b", input={"resample": None})
    sized = values_of(stored, tmp_path / "c", input={"resample": None})
    sized["output"]["voxel_size_nm"] = list(SIZE)
    jobs = [prepare(parse_job(each, tmp_path)).read_job() for each in (plain, said, sized)]
    assert len({job.fingerprint for job in jobs}) == 1
    assert [job.to_output for job in jobs] == [None] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_such_a_job_is_planned_run_seen_and_proved(stored, tmp_path, capsys):
    values = values_of(stored, tmp_path / "out", WAYS[2])
    values["output"]["pyramid"] = True
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["plan", path]) == 0
    told = capsys.readouterr().out
    assert "the network's answers are resampled to the output's voxels" in told
    assert "of 20 × 10 × 10 nm, by splines of the orders 1, 1, 1" in told
    assert main(["run", path, "--sample", "0.3"]) == 0
    assert main(["run", path]) == 0
    assert main(["verify", path, "--deep", "--recompute=1"]) == 0
    assert main(["status", path]) == 0
    assert main(["view", path, "--link"]) == 0
    assert main(["report", path, "--to", str(tmp_path / "report.html")]) == 0
    assert main(["mosaic", path, "--to", str(tmp_path / "mosaic.png")]) == 0
    assert main(["reproduce", str(tmp_path / "out"), "--sample", "1", "--trust_code"]) == 0
    capsys.readouterr()
    values["output"]["resample"] = {"order": 3}
    write_job(tmp_path / "job.yaml", values)
    assert main(["run", path]) == 2
    assert "output.resampled" in capsys.readouterr().err
    assert main(["verify", path]) == 2
    assert "output.resample is " in capsys.readouterr().err


def test_the_memory_of_resampling_is_counted(stored, tmp_path):
    for way in WAYS[:2]:
        fine = plan_job(parse_job(values_of(stored, tmp_path / "out", way), tmp_path))
        coarse = values_of(stored, tmp_path / "out", way, output={"voxel_size_nm": "network"})
        shapes = fine.memory(THIS_PROCESS).shapes
        assert shapes.resampled == tuple(map(min, way[0], STORED.shape))
        assert plan_job(parse_job(coarse, tmp_path)).memory(THIS_PROCESS).shapes.resampled is None
        computing = fine.memory(THIS_PROCESS)
        voxels = np.prod(shapes.core)
        finished = np.prod(shapes.resampled)
        assert computing.host_bytes > (voxels + 3 * finished) * 4 * 2


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"output": {"voxel_size_nm": "inputs"}}, ConfigError, "output.voxel_size_nm"),
        ({"output": {"voxel_size_nm": [1e-30, 1, 1]}}, ConfigError, "cannot be made into voxels"),
        (
            {"output": {"voxel_size_nm": "network", "resample": {"order": 3}}},
            ConfigError,
            "resample has no effect as long as the output has the network's voxels",
        ),
        (
            {"roi": {"start": [4, -6, 10], "stop": [19, 24, 54]}},
            AlignmentError,
            r"in voxels of \[20.0, 10.0, 10.0\] nm, the output's",
        ),
    ],
)
def test_what_cannot_be_is_refused(stored, tmp_path, sections, error, message):
    with pytest.raises(error, match=message):
        plan_job(parse_job(values_of(stored, tmp_path / "out", **sections), tmp_path))


def test_a_further_output_has_no_voxels_of_its_own(stored, tmp_path):
    values = values_of(stored, tmp_path / "out")
    values["outputs"] = {"other": {"path": str(tmp_path / "o"), "voxel_size_nm": [1, 1, 1]}}
    with pytest.raises(ConfigError, match="voxel_size_nm is that of output, which all volumes"):
        parse_job(values, tmp_path)


def test_a_size_needs_an_input_that_says_its_own(tmp_path):
    write_volume(tmp_path / "in", STORED, format="zarr3")
    attributes = json.loads((tmp_path / "in" / "zarr.json").read_text())
    attributes.pop("dimension_units", None)
    attributes["attributes"] = {}
    (tmp_path / "in" / "zarr.json").write_text(json.dumps(attributes))
    values = values_of(
        tmp_path / "in",
        tmp_path / "out",
        input={"resample": None},
        output={"voxel_size_nm": [9, 9, 9]},
    )
    with pytest.raises(ConfigError, match=r"output.voxel_size_nm: the input .* does not say"):
        plan_job(parse_job(values, tmp_path))
