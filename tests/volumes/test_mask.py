"""Masks of input and output, against NumPy on the whole volume, for several chunk shapes."""

import json
import shutil
from dataclasses import fields
from datetime import UTC, datetime
from itertools import product

import numpy as np
import pytest
import zarr
from helpers import job_values, read_volume, toy, write_job, write_volume
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as hypothesis_arrays

from beam_inference import prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.engines.trial import SETTLING_CALLS
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import NO_REST
from beam_inference.geometry.zyx import ceil_div
from beam_inference.job.place import Place
from beam_inference.job.status import job_status
from beam_inference.job.verification import verify
from beam_inference.launch.checks import check_paths
from beam_inference.volumes import mask as masks
from beam_inference.volumes.mask import KeptValues, Mask
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.volume import Volume
from beam_inference.worker.output_mask import open_output_mask
from beam_inference.worker.postprocessing import Postprocessing
from beam_inference.worker.worker import Worker

CHANNELS = 2
INPUT = np.random.default_rng(1).integers(1, 256, (CHANNELS, 40, 48, 50), dtype=np.uint8)
WANTED = np.zeros((20, 12, 25), np.uint8)
WANTED[3:9, 2:7, 4:8] = 7
MODEL = {"input_channels": CHANNELS, "output_channels": CHANNELS}
AS_STORED = {"dtype": "uint8", "value_range": [0, 255]}


def mask_volume(tmp_path):
    """Half the resolution along z and x, a quarter along y."""
    return write_volume(
        tmp_path / "mask", WANTED, voxel_size_nm=(20.0, 40.0, 20.0), block_shape=(8, 8, 8)
    )


def at_full_resolution(inverse=False):
    wanted = WANTED.repeat(2, 0).repeat(4, 1).repeat(2, 2) != 0
    return ~wanted if inverse else wanted


def launched(tmp_path, name, source, mask=None, /, **sections):
    """A launch of a job; ``mask`` is the output's."""
    values = job_values(source, tmp_path / name, **sections)
    return prepare(parse_job(values if mask is None else values | {"mask": mask}, tmp_path))


def result(tmp_path, name, source, mask=None, /, **sections):
    """The output of a job, without Beam: in both stages where there are two."""
    launch = launched(tmp_path, name, source, mask, **sections)
    worker = Worker(launch)
    job = launch.read_job()
    chunks = range(job.plan.chunks.count)
    if job.plan.exchange is not None:
        assert {record.outcome for record in worker.sum_chunks(chunks)} <= {"summed"}
        records = worker.merge_seams(chunks)
    else:
        records = worker.infer_chunks(chunks)
    assert {record.outcome for record in records} == {"done"}
    return read_volume(tmp_path / name)


@pytest.mark.parametrize("seams", ["recompute", "exchange"])
@pytest.mark.parametrize("inverse", [False, True])
def test_outside_a_mask_stands_its_fill_value(tmp_path, seams, inverse):
    mask = {"path": mask_volume(tmp_path), "inverse": inverse, "fill_value": 9}
    write_volume(tmp_path / "in", INPUT)
    expected = np.where(at_full_resolution(inverse), INPUT, 9)
    for chunk_shape in ([16, 16, 16], [48, 48, 64]):
        inference = {"seams": seams, "patch_overlap": [0, 0, 0], "chunk_shape": chunk_shape}
        sections = {"model": MODEL, "output": AS_STORED, "inference": inference}
        found = result(tmp_path, f"out{chunk_shape[0]}", tmp_path / "in", mask, **sections)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("seams", ["recompute", "exchange", "crop"])
def test_outside_its_mask_the_input_has_the_fill_value(tmp_path, seams):
    write_volume(tmp_path / "in", INPUT)
    for chunk_shape, inverse in (([16, 16, 32], False), ([48, 48, 64], True)):
        mask = {"path": mask_volume(tmp_path), "inverse": inverse, "fill_value": 9}
        inference = {"seams": seams, "patch_overlap": [0, 0, 0], "chunk_shape": chunk_shape}
        sections = {
            "model": MODEL,
            "inference": inference,
            "output": AS_STORED,
            "input": {"mask": mask},
        }
        found = result(tmp_path, f"o{chunk_shape[0]}", tmp_path / "in", **sections)
        np.testing.assert_array_equal(found, np.where(at_full_resolution(inverse), INPUT, 9))


@pytest.mark.parametrize(
    "seams", ["recompute", "exchange", pytest.param("crop", marks=pytest.mark.slow)]
)
def test_the_bits_are_those_of_a_volume_that_was_masked_before(tmp_path, seams):
    """With overlaps, margins, reflection, a contrast, an offset, and another mask behind it."""
    array = np.random.default_rng(3).integers(1, 256, (14, 27, 25), dtype=np.uint8)
    start = (3, -5, 2)
    where = np.random.default_rng(4).random((10, 40, 12)) < 0.7
    mask = write_volume(
        tmp_path / "mask", where.astype(np.uint16), (1, -7, 0), voxel_size_nm=(30.0, 10.0, 40.0)
    )
    there = [np.arange(a, a + n) for a, n in zip(start, array.shape, strict=True)]
    kept = where[np.ix_(there[0] // 3 - 1, there[1] + 7, there[2] // 4)]
    output_mask = {"path": mask_volume(tmp_path / "other"), "inverse": True, "fill_value": 1}
    write_volume(tmp_path / "in", array, start)
    write_volume(tmp_path / "masked", np.where(kept, array, 77).astype(np.uint8), start)
    found = []
    for shape in ([16, 16, 16], [16, 32, 32]):
        sections = {
            "model": toy("valid", crop_margin=[1, 1, 1], normalize={"scale": 0.01, "offset": -1}),
            "inference": {"seams": seams, "chunk_shape": shape},
        }
        masked_here = {"input": {"mask": {"path": mask, "fill_value": 77}}}
        name = f"a{shape[1]}"
        found.append(
            result(tmp_path, name, tmp_path / "in", output_mask, **sections, **masked_here)
        )
        before = result(tmp_path, f"b{shape[1]}", tmp_path / "masked", output_mask, **sections)
        np.testing.assert_array_equal(found[-1], before)
    if seams == "recompute":
        np.testing.assert_array_equal(*found)
    assert np.ptp(found[0]) > 1


@pytest.mark.parametrize("seams", ["recompute", "exchange"])
def test_masked_chunks_are_neither_read_nor_computed_nor_stored(tmp_path, seams, monkeypatch):
    monkeypatch.setenv("TOY_NETWORK_LOG", str(tmp_path / "calls"))
    write_volume(
        tmp_path / "in", np.random.default_rng(2).integers(1, 255, INPUT.shape[1:], dtype=np.uint8)
    )
    inference = {"seams": seams, "chunk_shape": [16, 16, 16]}
    values = job_values(
        tmp_path / "in",
        tmp_path / "out",
        model=toy("counted", prediction_bound=256),
        inference=inference,
        output=AS_STORED,
    ) | {"mask": {"path": mask_volume(tmp_path)}}
    job = str(write_job(tmp_path / "job.yaml", values))
    # no patch that touches what is wanted reaches so far along x
    for block in (tmp_path / "in").rglob("32-50_*"):
        block.write_bytes(b"damaged")
    assert main(["run", job]) == 0
    assert main(["verify", job, "--deep"]) == 0
    calls = len((tmp_path / "calls").read_text().splitlines())
    # A first launch tries the network as the run did.
    elsewhere = values | {"output": values["output"] | {"path": str(tmp_path / "elsewhere")}}
    plan = prepare(parse_job(elsewhere, tmp_path)).read_job().plan
    tried = len((tmp_path / "calls").read_text().splitlines()) - calls
    grid = plan.chunks
    wanted = [
        i
        for i in range(grid.count)
        if at_full_resolution()[grid.core_box(i).slices_in(grid.roi)].any()
    ]
    blocks = [
        p
        for p in (tmp_path / "out").rglob("*_*")
        if p.is_file() and "_beam_inference" not in p.parts
    ]
    assert len(blocks) == len(wanted) < grid.count
    works = [
        plan.work(i) if seams == "recompute" else plan.exchange.owned_work(i)
        for i in range(grid.count)
        if (i in wanted if seams == "recompute" else set(plan.exchange.receivers(i)) & set(wanted))
    ]
    assert calls - tried - SETTLING_CALLS == sum(ceil_div(work.patch_count, 2) for work in works)
    assert not read_volume(tmp_path / "out")[0][~at_full_resolution()].any()


def test_nothing_is_read_of_an_input_where_its_mask_keeps_nothing(tmp_path):
    write_volume(tmp_path / "in", INPUT)
    for block in (tmp_path / "in").rglob("32-50_*"):
        block.write_bytes(b"damaged")
    inference = {"chunk_shape": [16, 16, 16], "patch_overlap": [0, 0, 0]}
    found = result(
        tmp_path,
        "out",
        tmp_path / "in",
        model=MODEL,
        inference=inference,
        input={"mask": {"path": mask_volume(tmp_path), "fill_value": 3}},
    )
    np.testing.assert_array_equal(found, np.where(at_full_resolution(), INPUT, 3))


def test_a_job_with_masked_chunks_knows_what_is_left_of_its_first_stage(tmp_path):
    write_volume(tmp_path / "in", INPUT)
    sections = {"model": MODEL, "inference": {"seams": "exchange", "chunk_shape": [16, 16, 16]}}
    launch = launched(tmp_path, "out", tmp_path / "in", {"path": mask_volume(tmp_path)}, **sections)
    job = launch.read_job()
    worker = Worker(launch)
    plan = job.plan
    state = launch.state()
    wanted = [
        i
        for i in range(plan.chunks.count)
        if at_full_resolution()[plan.chunks.core_box(i).slices_in(plan.chunks.roi)].any()
    ]
    computed = [i for i in range(plan.chunks.count) if {*plan.exchange.receivers(i)} & {*wanted}]
    assert len(computed) < plan.totals.owners
    half = plan.chunks.count // 2
    list(worker.sum_chunks(range(half)))
    assert job_status(job, state, datetime.now(UTC)).left == sum(
        map(bool, map(plan.exchange.receivers, range(half, 2 * half)))
    )
    records = list(worker.sum_chunks(range(half, plan.chunks.count)))
    assert [record.chunk for record in records] == [i for i in computed if i >= half]
    status = job_status(job, state, datetime.now(UTC))
    assert (status.left, status.summed, status.done) == (plan.chunks.count, plan.totals.owners, 0)
    # nothing is done twice
    assert not list(Worker(launch).sum_chunks(range(plan.chunks.count)))
    assert {record.outcome for record in worker.merge_seams(range(plan.chunks.count))} == {"done"}
    assert verify(job, state).complete
    assert job_status(job, state, datetime.now(UTC)).left == 0


def test_a_chunks_mask_is_read_once(tmp_path):
    write_volume(tmp_path / "in", INPUT)
    mask = mask_volume(tmp_path)
    job = launched(
        tmp_path, "out", tmp_path / "in", {"path": mask, "fill_value": 9}, model=MODEL
    ).read_job()
    mask = open_output_mask(job, NO_REST)
    postprocessing = Postprocessing(job, mask, [[]])
    box = BoundingBox((0, 0, 0), (16, 32, 32))
    assert not mask.excludes(box)
    shutil.rmtree(tmp_path / "mask")
    values = INPUT[(slice(None), *box.slices_in(box))].copy()
    expected = np.where(at_full_resolution()[box.slices_in(box)], values, 9)
    np.testing.assert_array_equal(postprocessing.finish(values, box, box)[0], expected)
    assert not mask.excludes(box)


@pytest.mark.parametrize(
    ("mask", "told"), [({}, "nothing is kept"), ({"inverse": True}, "everything is kept")]
)
@pytest.mark.parametrize("key", ["input.mask", "mask"])
def test_a_mask_beside_all_that_it_masks_is_told(tmp_path, caplog, mask, told, key):
    write_volume(tmp_path / "in", INPUT)
    for start, is_told in ((999, True), (49, False)):
        caplog.clear()
        path = write_volume(tmp_path / f"mask{start}", WANTED, (0, 0, start))
        section = {"path": path, **mask}
        masks = (section,) if key == "mask" else ()
        sections = {} if masks else {"input": {"mask": section}}
        launched(tmp_path, f"out{start}", tmp_path / "in", *masks, model=MODEL, **sections)
        assert (f"so {told}" in caplog.text) == is_told
        assert (f"{key} " in caplog.text) == is_told


def test_masks_that_say_nothing_of_this_volume_are_refused(tmp_path):
    write_volume(tmp_path / "in", INPUT)
    several = write_volume(tmp_path / "several", INPUT)
    url = write_volume(tmp_path / "z", WANTED, format="zarr2")
    (tmp_path / "z" / ".zattrs").write_text(json.dumps({"_ARRAY_DIMENSIONS": list("czyx")}))
    for key in ("mask", "input.mask"):

        def launch(key=key, output="out", **mask):
            sections = {"input": {"mask": mask}} if key == "input.mask" else {}
            launched(
                *(tmp_path, output, tmp_path / "in", None if sections else mask),
                **{"model": MODEL, "output": AS_STORED, **sections},
            )

        with pytest.raises(ConfigError, match=f"{key}.path .* has 2 channels; a mask has one"):
            launch(path=several)
        with pytest.raises(VolumeError, match=f"{key}: no volume at"):
            launch(path=str(tmp_path / "nowhere"))
        with pytest.raises(ConfigError, match=f"{key}.fill_value 300"):
            launch(path=mask_volume(tmp_path), fill_value=300)
        with pytest.raises(ConfigError, match=f"{key}.path .* does not say its voxel size"):
            launch(path=url)
        with pytest.raises(ConfigError, match=rf"is {key}, a mask: choose another place"):
            launch(output="mask", path=mask_volume(tmp_path))
        with pytest.raises(ConfigError, match="holds credentials"):
            launch(path="https://user:secret@host/mask")
        with pytest.raises(
            ConfigError, match=rf"{key}.invers: unknown key; did you mean 'inverse'"
        ):
            launch(path="mask", invers=True)
    with pytest.raises(
        ConfigError, match=r"mask.fill_value 1e.300 is not a value of the volume's dtype float32"
    ):
        launched(
            tmp_path,
            "out",
            tmp_path / "in",
            {"path": mask_volume(tmp_path), "fill_value": 1e300},
            model=MODEL,
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["zarr2", "zarr3", "ome_zarr"])
def test_a_mask_may_be_of_truth_values(tmp_path, format, caplog):
    """Masks of NumPy, scikit-image and napari are zarr arrays of bool."""
    write_volume(tmp_path / "in", INPUT[0])
    url = write_volume(tmp_path / "mask", WANTED, voxel_size_nm=(20.0, 40.0, 20.0), format=format)
    bytes_of = result(tmp_path, "bytes", tmp_path / "in", {"path": url})
    array = tmp_path / "mask" / ("0" if format == "ome_zarr" else "")
    wanted = WANTED != 0
    attributes = dict(zarr.open_array(str(array)).attrs)
    metadata = json.loads((array / "zarr.json").read_text()) if format != "zarr2" else {}
    shape = {"chunks": (8, 8, 8), "shape": wanted.shape, "overwrite": True}
    names = metadata.get("dimension_names")
    zarr.create_array(
        str(array),
        dtype=bool,
        zarr_format=2 if format == "zarr2" else 3,
        dimension_names=names,
        **shape,
    )
    stored = zarr.open_array(str(array), mode="r+")
    stored.attrs.update(attributes)
    stored[:] = wanted
    assert np.array_equal(result(tmp_path, "truth", tmp_path / "in", {"path": url}), bytes_of)
    with pytest.raises(VolumeError, match="holds bool; expected integers"):
        open_volume(url)
    path = str(
        write_job(tmp_path / "job.yaml", job_values("in", "new") | {"mask": {"path": "mask"}})
    )
    assert main(["view", path, "--link"]) == 0  # which Neuroglancer would not show
    assert "mask is not shown" in caplog.text
    assert "holds bool" in caplog.text


def test_masks_that_remote_workers_do_not_see_are_refused(tmp_path):
    values = job_values("gs://bucket/in", "gs://bucket/out")
    place = Place(is_this_machine=False, shares_files=False)
    for key, job in (
        ("mask.path", values | {"mask": {"path": "m"}}),
        ("input.mask.path", values | {"input": values["input"] | {"mask": {"path": "m"}}}),
    ):
        with pytest.raises(ConfigError, match=f"^{key} file://{tmp_path}/m is on this machine"):
            check_paths(parse_job(job, tmp_path), place)
        remote = parse_job(job, "gs://bucket")
        assert "gs://bucket/m" in remote.model_dump_json()
        check_paths(remote, place)


def test_a_mask_needs_the_voxel_size_of_what_it_masks(tmp_path):
    write_volume(tmp_path / "in", INPUT[0], format="zarr2")
    (tmp_path / "in" / ".zattrs").write_text("{}")
    mask = {"path": mask_volume(tmp_path)}
    for output_mask, sections in ((mask, {}), (None, {"input": {"mask": mask}})):
        with pytest.raises(ConfigError, match="so the position of the mask is unknown"):
            launched(tmp_path, "out", tmp_path / "in", output_mask, **sections)
    model = {"path": "identity", "voxel_size_nm": [10, 10, 10]}
    found = result(tmp_path, "out", tmp_path / "in", None, input={"mask": mask}, model=model)
    assert not found[0][~at_full_resolution()].any()


def test_a_plan_tells_of_masks_and_counts_them_in_memory(tmp_path, capsys):
    write_volume(tmp_path / "in", INPUT[0])
    path = str(write_job(tmp_path / "job.yaml", job_values("in", "out")))
    mask_volume(tmp_path)
    needed = []
    for flags in (
        [],
        ["--set=mask.path=mask"],
        ["--set=mask.path=mask", "--set=input.mask={path: mask, inverse: true}"],
    ):
        assert main(["plan", path, *flags, "--json"]) == 0
        needed.append(json.loads(capsys.readouterr().out)["host_bytes_per_worker"])
    # all blocks of the mask, and what is looked up, on each of two threads
    piece = (2 + 1) * 24 * 16 * 32 + 3 * 2**22
    assert needed[2] - needed[1] == needed[1] - needed[0] == 2 * piece + WANTED.size
    assert main(["plan", path, *flags]) == 0
    told = capsys.readouterr().out.replace("\n", "")
    assert "input mask" in told
    assert "output mask" in told


def test_the_masks_are_part_of_the_fingerprint(tmp_path):
    write_volume(tmp_path / "in", INPUT)
    prints = set()
    for number, mask in enumerate([None, {}, {"inverse": True}, {"fill_value": 1}]):
        of_input = None if mask is None else {"path": mask_volume(tmp_path), **mask}
        for output_mask in (None, of_input):
            launch = launched(
                tmp_path,
                f"o{len(prints)}-{number}",
                tmp_path / "in",
                output_mask,
                model=MODEL,
                input={"mask": of_input},
            )
            prints.add(launch.read_job().fingerprint)
    assert len(prints) == 7


RULES = [
    ({"above": 60}, lambda v: v > 60),
    ({"below": 200.5}, lambda v: v < 200.5),
    ({"above": 60, "below": 200}, lambda v: (v > 60) & (v < 200)),
    ({"equals": 7}, lambda v: v == 7),
    ({"equals": [9, 7, 200, 7.0]}, lambda v: np.isin(v, [7, 9, 200])),
]


@pytest.mark.parametrize(("rule", "holds"), RULES)
@pytest.mark.parametrize("inverse", [False, True])
def test_a_mask_keeps_where_it_has_the_values_asked_for(tmp_path, rule, holds, inverse):
    """As a mask of input and of output, by both strategies, also beyond the mask: there is zero."""
    values = np.random.default_rng(6).choice(np.array([0, 7, 9, 60, 61, 199, 200, 255]), (9, 10, 8))
    path = write_volume(tmp_path / "mask", values.astype(np.uint8), voxel_size_nm=(40, 40, 40))
    write_volume(tmp_path / "in", INPUT)
    whole = np.zeros(INPUT.shape[1:], np.uint8)
    whole[:36, :40, :32] = values.repeat(4, 0).repeat(4, 1).repeat(4, 2)
    kept = holds(whole) != inverse
    mask = {"path": path, "inverse": inverse, "fill_value": 5, **rule}
    for seams, of in (("exchange", "output"), ("recompute", "output"), ("recompute", "input")):
        sections = {
            "model": MODEL,
            "output": AS_STORED,
            "inference": {"seams": seams, "patch_overlap": [0, 0, 0], "chunk_shape": [16, 16, 32]},
            **({"input": {"mask": mask}} if of == "input" else {}),
        }
        output_mask = mask if of == "output" else None
        found = result(tmp_path, f"{seams}-{of}", tmp_path / "in", output_mask, **sections)
        np.testing.assert_array_equal(found, np.where(kept, INPUT, 5))


@given(
    hypothesis_arrays(
        st.sampled_from([np.uint8, np.int16, np.uint64, np.float32]), st.tuples(st.integers(1, 9))
    ),
    st.one_of(st.none(), st.integers(-3, 300), st.floats(-3, 300)),
    st.one_of(st.none(), st.integers(-3, 300), st.floats(-3, 300)),
)
def test_values_are_compared_as_numbers_whatever_their_dtype(values, above, below):
    """Also with numbers that the dtype does not have."""
    expected = [
        (above is None or value > above) and (below is None or value < below)
        if (above, below) != (None, None)
        else value != 0
        for value in values.tolist()
    ]
    kept = KeptValues(above, below).holds(values)
    if values.dtype != np.float32:  # float32 compares with the nearest float32
        np.testing.assert_array_equal(kept, expected)
    assert not KeptValues(equals=[above or 0]).holds(np.full(1, np.nan, np.float32)).any()


def test_large_labels_are_told_apart():
    labels = np.array([2**63, 2**63 + 1], np.uint64)
    assert KeptValues(equals=[2**63 + 1]).holds(labels).tolist() == [False, True]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"equals": 3, "above": 1}, "equals lists the values"),
        ({"above": 3, "below": 3}, "no value is above 3 and below 3"),
        ({"equals": []}, "at least 1 item"),
        ({"equals": "seven"}, "equals"),
        ({"above": [1, 2]}, "above"),
        ({"above": 10**400}, "numbers that a volume can hold"),
        ({"equals": [1, -(10**30)]}, "numbers that a volume can hold"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path, rule, message):
    values = job_values(tmp_path / "in", tmp_path / "out") | {"mask": {"path": "m", **rule}}
    with pytest.raises(ConfigError, match=message):
        parse_job(values, tmp_path)


@pytest.mark.parametrize("value", [-1, 256, 0.5])
def test_a_value_that_the_mask_cannot_have_is_refused(tmp_path, value):
    write_volume(tmp_path / "in", INPUT)
    mask = {"path": mask_volume(tmp_path), "equals": [7, value]}
    with pytest.raises(ConfigError, match=rf"mask.equals: {value} is not a value of .* uint8"):
        launched(tmp_path, "out", tmp_path / "in", mask, model=MODEL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rule", [{"above": 255}, {"above": 999, "inverse": True}, {"below": 0}])
def test_a_range_that_no_value_of_the_mask_is_in_is_refused(tmp_path, rule):
    write_volume(tmp_path / "in", INPUT)
    mask = {"path": mask_volume(tmp_path), **rule}
    with pytest.raises(ConfigError, match=r"no value of .*, which has uint8, is"):
        launched(tmp_path, "out", tmp_path / "in", mask, model=MODEL)
    assert not (tmp_path / "out").exists()


def test_the_values_of_a_mask_are_part_of_the_fingerprint(tmp_path):
    write_volume(tmp_path / "in", INPUT)
    path = mask_volume(tmp_path)
    rules = [{}, {"above": 0}, {"below": 8}, {"equals": 7}, {"equals": [7.0]}, {"equals": [7, 8]}]
    prints = [
        launched(tmp_path, f"o{number}", tmp_path / "in", {"path": path, **rule}, model=MODEL)
        .read_job()
        .fingerprint
        for number, rule in enumerate(rules)
    ]
    assert prints[3] == prints[4]
    assert len(set(prints)) == len(rules) - 1


boxes = st.builds(
    lambda start, shape: BoundingBox(
        start, tuple(a + n for a, n in zip(start, shape, strict=True))
    ),
    st.tuples(*[st.integers(-6, 40)] * 3),
    st.tuples(*[st.integers(1, 9)] * 3),
)


@given(
    boxes,
    st.tuples(*[st.sampled_from([0.25, 0.5, 1.0, 1.7, 3.0])] * 3),
    st.tuples(*[st.sampled_from([0.0, 0.25, -0.5, 1 / 3, 0.1])] * 3),
    st.booleans(),
    st.sampled_from([1, 600, 2000]),
    st.sampled_from([7, 40, 10**6]),
)
def test_a_voxel_is_looked_up_where_its_centre_lies(
    tmp_path_factory, box, per_voxel, begins, inverse, bytes, voxels
):
    """However large the pieces are that a mask is looked up in."""
    folder = tmp_path_factory.getbasetemp()
    volume = open_volume(
        f"file://{folder}/mask" if (folder / "mask").exists() else mask_volume(folder)
    )
    expected = np.zeros(box.shape, bool)
    for position in np.ndindex(*box.shape):
        place = [
            int(np.floor(round((s + p + 0.5) * r + b, 6)))
            for s, p, r, b in zip(box.start, position, per_voxel, begins, strict=True)
        ]
        inside = (
            all(0 <= p < n for p, n in zip(place, WANTED.shape, strict=True))
            and WANTED[tuple(place)] != 0
        )
        expected[position] = inside != inverse
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "PIECE_BYTES", bytes)
        patch.setattr(masks, "PIECE_VOXELS", voxels)
        mask = Mask(volume, per_voxel, inverse, 3, begins=begins)
        array = np.ones((2, *box.shape), np.float32)
        mask.fill(array, box)
        assert mask.keeps_any(box) == expected.any()
    np.testing.assert_array_equal(array, np.broadcast_to(np.where(expected, 1, 3), array.shape))


@pytest.mark.parametrize("key", ["input", "output"])
@pytest.mark.parametrize("shift", [0.0, 8.0, 12.0])
def test_parts_of_a_voxel_count_where_a_mask_is_looked_up(tmp_path, key, shift):
    """Of a resampled input, which begins between voxels, and of a mask that does so itself."""
    array = np.random.default_rng(1).integers(1, 256, (24, 16, 16), np.uint8)
    write_volume(tmp_path / "in", array, (2, 0, 0), voxel_size_nm=(8.0, 8.0, 8.0))
    wanted = (np.arange(40) % 8 >= 4).astype(np.uint8)
    write_volume(
        tmp_path / "mask",
        np.broadcast_to(wanted[:, None, None], (40, 16, 16)),
        format="ome_zarr",
        voxel_size_nm=(8.0, 8.0, 8.0),
    )
    file = tmp_path / "mask" / "zarr.json"
    group = json.loads(file.read_text())
    [dataset] = group["attributes"]["ome"]["multiscales"][0]["datasets"]
    dataset["coordinateTransformations"][1:] = [
        {"type": "translation", "translation": [shift, 0, 0]}
    ]
    file.write_text(json.dumps(group))
    mask = {"path": str(tmp_path / "mask")}
    sections = {
        "input": {"resample": {"voxel_size_nm": [32, 8, 8], "order": 0}},
        "output": AS_STORED,
        "inference": {"patch_shape": [4, 16, 16], "patch_overlap": [0, 0, 0]},
    }
    if key == "input":
        sections["input"]["mask"] = mask
    found = result(tmp_path, "out", tmp_path / "in", mask if key == "output" else None, **sections)
    centres = 16 + 32 * (np.arange(6) + 0.5)
    kept = wanted[np.floor((centres - shift) / 8).astype(int)] != 0
    np.testing.assert_array_equal(found[0, :, 0, 0] != 0, kept)


def test_a_mask_much_finer_than_the_output_is_read_in_whole_blocks_each_once(tmp_path, monkeypatch):
    fine = np.random.default_rng(5).random((64, 96, 80)) < 0.5
    volume = open_volume(
        write_volume(tmp_path / "fine", fine.astype(np.uint8), block_shape=(16, 16, 16))
    )
    monkeypatch.setattr(masks, "PIECE_BYTES", 2 * 16**3)
    boxes = []

    class RecordingVolume(Volume):
        def read(self, box):
            boxes.append(box)
            return super().read(box)

    recording = RecordingVolume(
        **{field.name: getattr(volume, field.name) for field in fields(Volume)}
    )
    mask = Mask(recording, (8.0, 8.0, 8.0), False, 0)
    box = BoundingBox((0, 0, 0), (8, 12, 10))
    array = np.ones((1, *box.shape), np.uint8)
    mask.fill(array, box)
    np.testing.assert_array_equal(array[0], fine[4::8, 4::8, 4::8])
    assert all(each.size <= 2 * 16**3 for each in boxes)
    blocks = [
        block
        for each in boxes
        for block in product(
            *(range(a // 16, (b - 1) // 16 + 1) for a, b in zip(each.start, each.stop, strict=True))
        )
    ]
    assert len(blocks) == len(set(blocks)) == 4 * 6 * 5


@pytest.mark.slow
def test_masks_finer_than_the_volume_fit_the_projection(tmp_path):
    """In a worker that has a process of its own; of a chunk each has 64 MiB."""
    from benchmarks.bench import worker_figures

    array = np.random.default_rng(0).integers(0, 256, (128, 128, 256), dtype=np.uint8)
    fine = write_volume(
        tmp_path / "fine",
        array.repeat(4, 0).repeat(4, 1).repeat(2, 2) & 1,
        voxel_size_nm=(2.5, 2.5, 5.0),
    )
    mask = {"path": fine, "fill_value": 1}
    source = write_volume(tmp_path / "in", array)
    values = job_values(
        source,
        tmp_path / "out",
        input={"mask": mask},
        output=AS_STORED,
        inference={"chunk_shape": [128, 128, 128]},
    )
    figures = worker_figures(tmp_path, values | {"mask": mask | {"inverse": True}})
    assert 0.3 < figures["peak_bytes"] / figures["projected_bytes"] <= 1, figures
    assert (read_volume(tmp_path / "out") == 1).all()
