"""Inputs that are resampled on the fly, against volumes that were resampled before."""

import gc
import json

import numpy as np
import pytest
from helpers import job_values, read_volume, toy, write_job, write_levels, write_volume
from scipy import ndimage

from beam_inference import prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import Origin
from beam_inference.job.parts import open_input
from beam_inference.job.place import THIS_PROCESS
from beam_inference.launch.cost import job_totals
from beam_inference.launch.job_files import load_job
from beam_inference.launch.planned_job import plan_job
from beam_inference.view.layers import view_of
from beam_inference.volumes.opening import open_volume
from beam_inference.worker.worker import Worker

STORED = np.random.default_rng(1).integers(1, 256, (12, 30, 44), dtype=np.uint8)
START = (4, -6, 10)
SIZE = (40.0, 10.0, 10.0)
RESAMPLED = {"voxel_size_nm": [20, 20, 8], "order": 3}
BOX = BoundingBox((8, -3, 13), (32, 12, 68))  # x begins at 12.5, which counts as 13
MASKED = np.random.default_rng(2).random((6, 9, 20)) < 0.8


@pytest.fixture
def stored(tmp_path):
    """A volume of voxels of 40 × 10 × 10 nm that begins elsewhere than at 0."""
    write_volume(tmp_path / "in", STORED, START, voxel_size_nm=SIZE, block_shape=(8, 16, 16))
    return tmp_path / "in"


def resampled_whole(order=3):
    """What scipy makes of the whole volume."""
    factors = [n / m for n, m in zip(BOX.shape, STORED.shape, strict=True)]
    return ndimage.zoom(
        STORED.astype(np.float64), factors, order=order, mode="nearest", grid_mode=True
    )


def parsed(tmp_path, source, name="out", **sections):
    return parse_job(job_values(source, tmp_path / name, **sections), tmp_path)


def result(config, path):
    """The output of a job, without Beam: in both stages where there are two."""
    launch = prepare(config)
    worker = Worker(launch)
    job = launch.read_job()
    chunks = range(job.plan.chunks.count)
    if job.plan.exchange is None:
        records = worker.infer_chunks(chunks)
    else:
        assert {record.outcome for record in worker.sum_chunks(chunks)} <= {"summed"}
        records = worker.merge_seams(chunks)
    assert {record.outcome for record in records} == {"done"}
    return read_volume(path)


@pytest.mark.parametrize("order", [0, 1, 3])
def test_a_volume_reads_as_scipy_resamples_it(tmp_path, stored, order):
    config = parsed(tmp_path, stored, input={"resample": RESAMPLED | {"order": order}})
    volume = open_input(config)
    assert (volume.bounds, volume.dtype, volume.values_dtype) == (BOX, np.float32, np.uint8)
    assert volume.voxel_size_nm == (20.0, 20.0, 8.0)
    assert volume.origin == Origin(rest=(0.0, 0.0, -0.5))
    whole = volume.read(BOX)
    np.testing.assert_allclose(whole[0], resampled_whole(order), rtol=0, atol=255e-5)
    for box in (BoundingBox((9, 0, 20), (10, 7, 63)), BoundingBox((31, 11, 67), (32, 12, 68))):
        part = whole[(slice(None), *box.slices_in(BOX))]
        np.testing.assert_array_equal(volume.read(box), part)


def test_a_volume_of_the_size_that_is_wanted_is_read_as_it_is(tmp_path, stored):
    as_it_is = {"voxel_size_nm": [40.1, 10, 9.99]}
    volume = open_input(parsed(tmp_path, stored, input={"resample": as_it_is}))
    assert (volume.resampling, volume.dtype) == (None, np.uint8)
    np.testing.assert_array_equal(volume.read(volume.bounds)[0], STORED)
    clipped = open_input(
        parsed(tmp_path, stored, input={"resample": as_it_is | {"clip": [50, 99.5]}})
    )
    expected = STORED.astype(np.float32).clip(50, 99.5)
    np.testing.assert_array_equal(clipped.read(clipped.bounds)[0], expected)


def test_values_are_clipped_before_and_after(tmp_path, stored):
    clip = RESAMPLED | {"clip": [50, 180]}
    found = open_input(parsed(tmp_path, stored, input={"resample": clip})).read(BOX)
    assert (found.min(), found.max()) == (50, 180)
    before = STORED.clip(50, 180)
    write_volume(tmp_path / "before", before, START, voxel_size_nm=SIZE)
    volume = open_input(parsed(tmp_path, tmp_path / "before", input={"resample": RESAMPLED}))
    expected = volume.read(BOX)
    assert expected.max() > 181  # the spline goes beyond
    np.testing.assert_array_equal(found, expected.clip(50, 180))


def test_a_launched_volume_lies_where_the_job_took_it_to_lie(tmp_path, stored):
    volume = open_input(parsed(tmp_path, stored, input={"resample": RESAMPLED}))
    moved = volume.start_at((0, 100, 7))
    assert moved.bounds == BoundingBox((0, 100, 7), (24, 115, 62))
    np.testing.assert_array_equal(moved.read(moved.bounds), volume.read(BOX))
    as_it_is = open_input(parsed(tmp_path, stored))
    moved = as_it_is.start_at((0, 100, 7))
    np.testing.assert_array_equal(moved.read(moved.bounds), as_it_is.read(as_it_is.bounds))


def test_voxels_to_look_at_are_the_nearest(tmp_path, stored):
    volume = open_input(
        parsed(tmp_path, stored, input={"resample": {"voxel_size_nm": [20, 20, 8], "order": 0}})
    )
    wanted = [slice(9, 32, 7), slice(-3, 12, 2), slice(13, 68, 5)]
    found = volume.begin_sampling(1, wanted).result()
    places = [
        slice(part.start - start, None, part.step)
        for part, start in zip(wanted, BOX.start, strict=True)
    ]
    np.testing.assert_array_equal(found, volume.read(BOX)[(slice(None), *places)])


@pytest.mark.parametrize("seams", ["recompute", "exchange", "crop"])
def test_the_bits_are_those_of_a_volume_that_was_resampled_before(tmp_path, stored, seams):
    """With overlaps, margins, reflection and masks, in chunks of several shapes."""
    mask = write_volume(
        tmp_path / "mask", MASKED.astype(np.uint8), (2, -2, 2), voxel_size_nm=(80.0, 40.0, 32.0)
    )
    volume = open_input(parsed(tmp_path, stored, input={"resample": RESAMPLED}))
    before = volume.read(BOX)
    write_volume(tmp_path / "before", before, BOX.start, voxel_size_nm=(20.0, 20.0, 8.0))
    found = []
    for shape in ([16, 16, 16], [16, 32, 32], [32, 16, 64]):
        sections = {
            "model": toy("valid", crop_margin=[1, 1, 1], normalize={"scale": 0.01, "offset": -1}),
            "inference": {"seams": seams, "chunk_shape": shape},
        }
        results = []
        masked = {"mask": {"path": mask, "fill_value": 77}}
        for source, keys in ((stored, {"resample": RESAMPLED}), (tmp_path / "before", {})):
            path = tmp_path / f"{source.name}{shape}"
            config = parsed(tmp_path, source, path.name, input=keys | masked, **sections)
            results.append(result(config, path))
        np.testing.assert_array_equal(*results)
        found.append(results[0])
    assert np.ptp(found[0]) > 1
    if seams != "crop":
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.slow
def test_a_job_at_twice_the_voxel_size(tmp_path, capsys):
    """The command line, from the plan to the viewer."""
    write_volume(tmp_path / "in", STORED, (0, 0, 0), voxel_size_nm=SIZE)
    values = job_values(
        tmp_path / "in",
        tmp_path / "out",
        input={"resample": {"order": 1}},
        model={"voxel_size_nm": [40, 20, 20], "normalize": "unit"},
        inference={"chunk_shape": [16, 16, 16], "patch_overlap": [0, 0, 0]},
    )
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["plan", job]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "input [0, 0, 0 to 12, 15, 22), 1 channel(s) of float32 resampled from" in told
    assert "voxels of 40 × 10 × 10 nm, to voxels of 40 × 20 × 20 nm" in told
    assert main(["run", job]) == 0
    out = open_volume(str(tmp_path / "out"))
    assert out.voxel_size_nm == (40.0, 20.0, 20.0)
    halves = STORED.reshape(12, 15, 2, 22, 2).mean((2, 4)) / 255
    np.testing.assert_allclose(out.read(out.bounds)[0], halves, rtol=0, atol=1e-6)
    assert main(["run", job]) == 0  # nothing is left to do
    assert main(["verify", job, "--recompute", "1"]) == 0
    assert main(["mosaic", job, "--to", str(tmp_path / "mosaic.png")]) == 0
    assert main(["report", job, "--to", str(tmp_path / "report.html")]) == 0
    assert "different input" not in (tmp_path / "report.html").read_text()
    shown = view_of(load_job(job), (), patches=True)
    assert shown.voxel_size_nm == (40.0, 20.0, 20.0)
    assert shown.shown[0].volume.bounds.shape == STORED.shape  # as it is stored
    recorded = json.loads((tmp_path / "out" / "_beam_inference" / "job.json").read_text())
    assert recorded["resampling"]["orders"] == [1, 1, 1]
    assert recorded["input_dtype"] == "uint8"


def test_the_fingerprint_tells_how_voxels_are_made(tmp_path, stored):
    def fingerprint(name, **keys):
        config = parsed(tmp_path, stored, name, input={"resample": RESAMPLED | keys})
        return prepare(config).read_job().fingerprint

    first = fingerprint("a")
    assert fingerprint("b", voxel_size_nm=[20, 20, 8.001]) == first  # as many voxels
    changes = ({"order": 1}, {"clip": [0, 9]}, {"separate_z": True})
    others = {fingerprint(f"c{number}", **keys) for number, keys in enumerate(changes)}
    assert len(others | {first}) == 4


def test_reading_and_memory_are_of_stored_voxels(tmp_path, stored):
    """At a sixteenth of the voxels one chunk reads all that is stored."""
    resample = {"voxel_size_nm": [40, 40, 40]}
    planned = plan_job(parsed(tmp_path, stored, input={"resample": resample}))
    assert (planned.plan.volume.shape, planned.plan.chunks.count) == ((12, 8, 11), 1)
    totals = job_totals(planned)
    assert totals.read_bytes == planned.input.decoded_bytes((12, 8, 11)) == STORED.size
    # wherever the chunk may lie on blocks of 8 × 16 × 16
    assert totals.read_requests - totals.receipts == round(19 / 8 * 45 / 16 * 59 / 16)
    job = prepare(planned.config).read_job()
    assert job.cached_input_bytes(1) == [2 * 16 * 32 * 48]  # all blocks, for two cutouts
    settings = planned.config.job.model_copy(update={"cached_cutouts": 5})
    other = prepare(planned.config.model_copy(update={"job": settings})).read_job()
    assert other.cached_input_bytes(1) == [5 * 16 * 32 * 48]
    assert other.fingerprint == job.fingerprint
    projections = [planned.memory(THIS_PROCESS, io_depth=depth).host_bytes for depth in (1, 2)]
    # stored values and a float32 of each, one for a step along an axis and one for its result
    assert projections[1] - projections[0] > STORED.size * 9


def test_a_launch_elsewhere_finds_the_volume_as_the_job_took_it(tmp_path, stored):
    launch = prepare(parsed(tmp_path, stored, input={"resample": RESAMPLED}))
    info = json.loads((stored / "info").read_text())
    info["scales"][0]["resolution"] = [12.0, 12.0, 40.0]
    (stored / "info").write_text(json.dumps(info))
    with pytest.raises(WorkerFault, match="it is another volume"):
        Worker(launch)


@pytest.mark.parametrize("key", ["input.mask", "mask"])
@pytest.mark.parametrize("change", ["voxel_size", "dtype"])
def test_a_worker_refuses_a_mask_that_is_another_one_since_the_launch(
    tmp_path, stored, key, change
):
    size = open_volume(stored.as_uri()).voxel_size_nm
    write_volume(tmp_path / "mask", np.ones((8, 8, 8), np.uint8), voxel_size_nm=size)
    mask = {"mask": {"path": str(tmp_path / "mask")}}
    launch = prepare(parsed(tmp_path, stored, **({"input": mask} if "." in key else mask)))
    gc.collect()  # a worker is another process, and knows nothing of the volume yet
    path = tmp_path / "mask" / "info"
    info = json.loads(path.read_text())
    (scale,) = info["scales"]
    if change == "voxel_size":
        scale["resolution"][1] *= 2
    else:
        info["data_type"] = "int8"
    path.write_text(json.dumps(info))
    with pytest.raises(WorkerFault, match=f"^{key}: the volume .* it is another volume"):
        Worker(launch)


def test_a_worker_refuses_an_input_that_holds_other_values_since_the_launch(tmp_path, stored):
    launch = prepare(parsed(tmp_path, stored))
    info = json.loads((stored / "info").read_text())
    assert info["data_type"] == "uint8"
    (stored / "info").write_text(json.dumps(info | {"data_type": "int8"}))
    with pytest.raises(WorkerFault, match=r"1 channel\(s\) of int8, and was .*, 1 of uint8"):
        Worker(launch)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"input": {"resample": {}}}, "write model.voxel_size_nm"),
        (
            {
                "input": {"resample": {"voxel_size_nm": [8, 8, 8]}},
                "model": {"voxel_size_nm": [8, 8, 9]},
            },
            "objects of another size",
        ),
        ({"input": {"resample": {"voxel_size_nm": [8, 8, 8], "clip": [3, 3]}}}, "low < high"),
        ({"input": {"resample": {"voxel_size_nm": [8, 8, 8], "order": 2}}}, "resample.order"),
        (
            {"input": {"resample": RESAMPLED}, "roi": {"start": [4, -6, 10], "stop": [5, 1, 12]}},
            r"in voxels of \[20.0, 20.0, 8.0\] nm",
        ),
        ({"model": {"voxel_size_nm": [40, 20, 20]}}, "write input.resample"),
        ({"input": {"resample": {"voxel_size_nm": [1e-300, 8, 8]}}}, "cannot be made into voxels"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, stored, sections, message):
    with pytest.raises(Exception, match=message) as caught:
        plan_job(parsed(tmp_path, stored, **sections))
    assert issubclass(caught.type, ConfigError) or "roi" in sections


def test_a_volume_without_a_voxel_size_cannot_be_resampled(tmp_path):
    write_volume(tmp_path / "in", STORED, format="zarr2")
    attributes = tmp_path / "in" / ".zattrs"
    attributes.unlink(missing_ok=True)
    config = parsed(tmp_path, tmp_path / "in", input={"resample": RESAMPLED})
    with pytest.raises(ConfigError, match="does not say its voxel size"):
        plan_job(config)


def test_levels_are_those_of_the_stored_volume(tmp_path, stored):
    levels = str(write_levels(f"file://{stored}", tmp_path))
    standard = {"normalize": {"levels": levels, "to": "standard"}}
    planned = plan_job(parsed(tmp_path, stored, input={"resample": RESAMPLED}, model=standard))
    assert planned.settings.normalize.scale == pytest.approx(1 / STORED.std())
    by_section = {"normalize": {"levels": levels, "by": "section"}}
    in_plane = {"voxel_size_nm": [40, 20, 20]}
    plan_job(parsed(tmp_path, stored, input={"resample": in_plane}, model=by_section))
    with pytest.raises(ConfigError, match="other sections"):
        plan_job(parsed(tmp_path, stored, input={"resample": RESAMPLED}, model=by_section))


def test_a_volume_smaller_than_half_a_voxel_of_the_networks_is_told(tmp_path, stored, caplog):
    """Nanometres were written for millimetres: the job was one voxel, and told of nothing."""
    huge = {"voxel_size_nm": [4e7, 1e7, 1e7]}
    open_input(parsed(tmp_path, stored, input={"resample": huge}))
    assert "is smaller than half a voxel of [40000000.0, 10000000.0, 10000000.0] nm" in caplog.text
    assert "becomes one of [480, 300, 440] nm" in caplog.text
    caplog.clear()
    open_input(parsed(tmp_path, stored, input={"resample": RESAMPLED}))
    assert "half a voxel" not in caplog.text
