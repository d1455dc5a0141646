"""Several volumes as channels: against one volume that holds all of them, and by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    TOYS,
    do_job,
    job_values,
    read_volume,
    toy,
    truncated,
    write_job,
    write_levels,
    write_volume,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import ndimage

from beam_inference import predict, prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import FurtherResample
from beam_inference.errors import ConfigError, VolumeError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.parts import open_input
from beam_inference.job.place import THIS_PROCESS
from beam_inference.launch.cost import job_totals
from beam_inference.launch.job_files import load_job
from beam_inference.launch.planned_job import plan_job
from beam_inference.operators.level_stages import plan_level_stages
from beam_inference.view.layers import view_of
from beam_inference.volumes.further_input import fit_to_input
from beam_inference.volumes.input_volume import as_input
from beam_inference.volumes.opening import open_volume
from beam_inference.worker.worker import Worker

SHAPE = (11, 25, 22)
START = (2, -4, 7)
T1 = np.random.default_rng(0).integers(0, 200, SHAPE, dtype=np.uint8)
T2 = np.random.default_rng(1).integers(0, 999, (2, *SHAPE), dtype=np.uint16)
SECOND = {"input_channels": 3, "output_channels": 2, "prediction_bound": 65536}


@pytest.fixture
def modalities(tmp_path):
    """Two volumes of the same voxels, of one channel and of two."""
    write_volume(tmp_path / "t1", T1, START, block_shape=(4, 8, 8))
    write_volume(tmp_path / "t2", T2, START, block_shape=(8, 8, 16))
    return tmp_path


def values_of(folder, name="out", inputs=({"path": "t2"},), **sections):
    """A job over both, whose network weighs each channel otherwise."""
    model = toy("mixture", **SECOND) | sections.pop("model", {})
    inference = {"patch_shape": [4, 8, 8], "patch_overlap": [1, 3, 2], "threads": 1}
    values = job_values(
        folder / "t1",
        folder / name,
        model=model,
        inference=inference | {"chunk_shape": [4, 8, 8]} | sections.pop("inference", {}),
        output={"block_shape": [4, 8, 8]},
        **sections,
    )
    return values | {"inputs": list(inputs)}


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.differing_executors])
@given(st.data())
def test_each_voxel_has_the_value_at_its_middle(tmp_path_factory, data):
    """Of volumes of any voxel size that end anywhere within a voxel, by scipy on the whole."""
    folder = tmp_path_factory.mktemp("volumes")
    sizes = st.tuples(*[st.sampled_from([4.0, 6.0, 10.0, 13.0])] * 3)
    size = data.draw(sizes)
    own = data.draw(sizes)
    start = data.draw(st.tuples(*[st.integers(-3, 3)] * 3))
    shape = data.draw(st.tuples(*[st.integers(3, 9)] * 3))
    order = data.draw(st.sampled_from([0, 1, 3]))
    first = open_volume(
        write_volume(folder / "a", np.zeros(shape, np.uint8), start, voxel_size_nm=size)
    )
    # the least whole voxels that cover the same space
    begin = tuple(int(np.floor(s * a / b)) for s, a, b in zip(start, size, own, strict=True))
    stop = tuple(
        max(b0 + 1, int(np.ceil((s + n) * a / b)))
        for b0, s, n, a, b in zip(begin, start, shape, size, own, strict=True)
    )
    array = np.random.default_rng(0).integers(0, 256, np.subtract(stop, begin), dtype=np.uint8)
    second = open_volume(write_volume(folder / "b", array, begin, voxel_size_nm=own))
    volume = fit_to_input(
        second, "inputs.0", FurtherResample(order=order), as_input(first, None, None), (1, 1, 1)
    )
    assert volume.bounds == first.bounds
    found = volume.read(volume.bounds)[0]
    places = np.meshgrid(
        *(
            np.round((np.arange(s, s + n) + 0.5) * a / b - 0.5 - b0, 9)  # half way is half way
            for s, n, a, b, b0 in zip(start, shape, size, own, begin, strict=True)
        ),
        indexing="ij",
    )
    if order == 0:
        nearest = [
            np.clip(np.floor(p + 0.5).astype(int), 0, n - 1)
            for p, n in zip(places, array.shape, strict=True)
        ]
        np.testing.assert_array_equal(found, array[tuple(nearest)])
    else:
        clipped = [np.clip(p, 0, n - 1) for p, n in zip(places, array.shape, strict=True)]
        expected = ndimage.map_coordinates(
            array.astype(float), clipped if order == 1 else places, order=order, mode="nearest"
        )
        np.testing.assert_allclose(found, expected, atol=2e-3 if order == 3 else 1e-4)
    pairs = [data.draw(st.tuples(*[st.integers(0, n - 1)] * 2)) for n in shape]
    part = [(min(pair), max(pair) + 1) for pair in pairs]
    box = BoundingBox(*(tuple(s + p[k] for s, p in zip(start, part, strict=True)) for k in (0, 1)))
    np.testing.assert_array_equal(volume.read(box)[0], found[box.slices_in(volume.bounds)])


@pytest.mark.slow
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.differing_executors])
@given(
    chunk=st.tuples(*[st.sampled_from([1, 2, 4])] * 3),
    fill=st.sampled_from(["reflect", "symmetric", "edge"]),
    margin=st.tuples(*[st.integers(0, 2)] * 3),
    lattice=st.sampled_from(["stride", "spread", "pad"]),
    masked=st.booleans(),
)
def test_jobs_have_the_bits_of_one_volume_with_all_channels(
    tmp_path_factory, chunk, fill, margin, lattice, masked
):
    """In both strategies; and those of ``predict``, without chunks."""
    folder = tmp_path_factory.mktemp("job")
    write_volume(folder / "t1", T1, START, block_shape=(4, 8, 8))
    write_volume(folder / "t2", T2, START, block_shape=(8, 8, 16))
    kept = T1 > 20
    write_volume(folder / "mask", kept.astype(np.uint8), START)
    image = np.concatenate([T1[None], T2])
    mask = {"mask": {"path": f"{folder}/mask", "fill_value": 5}} if masked else {}
    if masked:
        image = np.where(kept, image, 5).astype(np.uint16)
    for strategy in ("recompute", "exchange"):
        values = values_of(
            folder,
            strategy,
            model={"crop_margin": margin},
            input={"fill": fill, **mask},
            inference={
                "lattice": lattice,
                "strategy": strategy,
                "chunk_shape": [4 * chunk[0], 8 * chunk[1], 8 * chunk[2]],
            },
        )
        do_job(values, folder)
    found = read_volume(folder / "recompute")
    np.testing.assert_array_equal(found, read_volume(folder / "exchange"))
    alone = predict(
        image,
        f"{TOYS}:mixture",
        patch_shape=(4, 8, 8),
        patch_overlap=(1, 3, 2),
        crop_margin=margin,
        lattice=lattice,
        output_channels=2,
        prediction_bound=65536,
        fill=fill,
        batch_size=2,
        device="cpu",
        threads=1,
    )
    np.testing.assert_array_equal(found, alone)


def test_each_volume_has_its_own_fill_channels_and_voxels(modalities):
    """Read by hand: the second volume is coarser, and reaches half a voxel beyond the first."""
    coarse = np.random.default_rng(3).random((2, 11, 13, 11), np.float32)
    write_volume(modalities / "t3", coarse, (2, -2, 3), voxel_size_nm=(10, 20, 20))
    # it lies at -40 to 220 and at 60 to 280 nm, the first at -40 to 210 and at 70 to 290
    values = values_of(
        modalities,
        model={"path": "identity", "input_channels": 3, "output_channels": 3},
        input={"fill": "constant", "fill_value": 7},
        inputs=[
            {"path": "t2", "channel": 1, "fill_value": 3},
            {"path": "t3", "channel": [0], "fill": "edge", "resample": {"order": 0}},
        ],
    )
    config = parse_job(values, modalities)
    volume = open_input(config)
    assert volume.all_channels == 3
    assert volume.cutout_dtype == np.float32
    box = BoundingBox((1, -6, 5), (14, 23, 31))
    found = volume.cutout(box, "constant", 7)
    inside = BoundingBox(START, (13, 21, 29)).slices_in(box)
    np.testing.assert_array_equal(found[0][inside], T1)
    np.testing.assert_array_equal(found[1][inside], T2[1])
    outside = np.ones(box.shape, bool)
    outside[inside] = False
    assert set(found[0][outside]) == {7}
    assert set(found[1][outside]) == {3}
    y = (np.arange(-4, 21) * 10 + 5 + 40) // 20
    x = np.minimum((np.arange(7, 29) * 10 + 5 - 60) // 20, 10)
    expected = coarse[0][:, y][:, :, x]
    np.testing.assert_array_equal(found[2][inside], expected)
    width = [(s.start, n - s.stop) for s, n in zip(inside, box.shape, strict=True)]
    np.testing.assert_array_equal(found[2], np.pad(expected, width, mode="edge"))


def test_the_input_is_resampled_and_the_others_with_it(modalities):
    """Volumes of the same voxels are as one volume of all channels, also at another voxel size."""
    write_volume(modalities / "all", np.concatenate([T1[None], T2]), START)
    resample = {"voxel_size_nm": [20, 13, 10], "order": 3}
    box = {"start": [3, -2, 8], "stop": [12, 20, 27]}
    both = open_input(
        parse_job(
            values_of(modalities, input={"resample": resample, "box": box, "fill": "edge"}),
            modalities,
        )
    )
    one = {"path": "all", "resample": resample, "box": box}
    single = open_input(parse_job(values_of(modalities, inputs=(), input=one), modalities))
    assert both.bounds == single.bounds
    wanted = both.bounds.grow((2, 1, 3))
    np.testing.assert_allclose(
        both.cutout(wanted, "edge", 0), single.cutout(wanted, "edge", 0), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("shape", "start", "size"),
    [
        ((12, 25, 22), START, (10, 10, 10)),
        ((10, 25, 22), START, (10, 10, 10)),
        (SHAPE, (3, -4, 7), (10, 10, 10)),
        (SHAPE, START, (10, 10, 12)),
        ((11, 25, 12), (2, -4, 4), (10, 10, 20)),
    ],
)
def test_a_volume_over_another_box_is_refused_by_name(modalities, shape, start, size):
    write_volume(modalities / "t3", np.zeros(shape, np.uint8), start, voxel_size_nm=size)
    values = values_of(modalities, inputs=[{"path": "t3"}], model={"input_channels": 2})
    with pytest.raises(ConfigError, match=r"inputs\.0\.path: .*t3 covers .* same box"):
        prepare(parse_job(values, modalities))
    assert not (modalities / "out").exists()


def test_a_smaller_volume_serves_a_box_of_the_input(modalities):
    write_volume(modalities / "t3", T2[:, 2:9, 5:20, 3:18], (4, 1, 10))
    box = {"start": [5, 1, 11], "stop": [11, 16, 25]}
    values = values_of(modalities, inputs=[{"path": "t3"}], input={"box": box})
    volume = open_input(parse_job(values, modalities))
    inside = BoundingBox((5, 1, 11), (11, 16, 25)).slices_in(BoundingBox(START, (13, 21, 29)))
    np.testing.assert_array_equal(
        volume.cutout(volume.bounds, "edge", 0),
        np.concatenate([T1[None], T2])[(slice(None), *inside)],
    )


@pytest.mark.parametrize("name", ["t1", "t2"])
def test_a_damaged_block_of_any_volume_quarantines_its_chunks_by_its_name(modalities, name):
    worker = Worker(prepare(parse_job(values_of(modalities), modalities)))
    block = min(modalities.glob(f"{name}/*/*_*"))
    with truncated(block):
        outcomes = [
            each.outcome for each in worker.infer_chunks(range(worker.job.plan.chunks.count))
        ]
    assert {"done", "quarantined"} == set(outcomes)
    causes = [record.cause for record in worker.state.read_quarantined(0, 1000)]
    assert len(causes) == outcomes.count("quarantined")
    assert all(f"of file://{modalities}/{name}" in cause for cause in causes)


@pytest.mark.slow
def test_the_command_line_knows_all_volumes(modalities, capsys):
    values = values_of(modalities, inference={"strategy": "exchange", "batch_size": 1})
    job = str(write_job(modalities / "job.yaml", values))
    assert main(["plan", job]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "1 channel(s) of uint8 inputs.0 file://" in told
    assert "t2, 2 channel(s) of uint16" in told
    assert main(["run", job]) == 0
    assert main(["run", job]) == 0  # nothing is left to do
    assert main(["verify", job, "--recompute", "1"]) == 0
    assert main(["report", job, "--to", str(modalities / "report.html")]) == 0
    assert [each.name for each in view_of(load_job(job), (), patches=False).shown] == [
        "input",
        "inputs.0",
        "output",
    ]
    capsys.readouterr()
    assert main(["show", str(modalities / "out")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "needs input.path t1" in told
    assert "needs inputs.0.path t2" in told
    (modalities / "t2").rename(modalities / "moved")
    out = str(modalities / "out")
    assert main(["reproduce", out, "--sample", "1"]) == 2
    moved = ["--file", f"inputs.0.path={modalities}/moved", "--file", f"model.path={TOYS}:mixture"]
    assert main(["reproduce", out, "--sample", "1", *moved]) == 0


def test_one_pass_reads_and_remembers_all_volumes(modalities):
    planned = plan_job(parse_job(values_of(modalities), modalities))
    alone = plan_job(
        parse_job(values_of(modalities, inputs=(), model={"input_channels": 1}), modalities)
    )
    voxels = planned.plan.totals.input_voxels
    assert job_totals(alone).read_bytes == voxels
    assert job_totals(planned).read_bytes == voxels * (1 + 2 * 2)
    assert job_totals(planned).calls == job_totals(alone).calls
    bytes_of = {
        name: [job.memory(THIS_PROCESS, io_depth=depth).host_bytes for depth in (1, 2)]
        for name, job in (("two", planned), ("one", alone))
    }
    z, y, x = planned.plan.totals.extremes.input
    grown = {name: second - first for name, (first, second) in bytes_of.items()}
    threads = THIS_PROCESS.threads_per_process
    # a cutout more for each thread: three channels of uint16 in place of one of uint8, and two of
    # the second volume beside it while it is read
    assert grown["two"] - grown["one"] == threads * int(z * y * x) * (3 * 2 - 1 + 2 * 2)
    job = prepare(planned.config).read_job()
    assert len(job.cached_input_bytes(1)) == 2


def test_the_fingerprint_tells_of_each_volume(modalities):
    def fingerprint(name, *inputs, **sections):
        model = {"input_channels": 1 + sum(len(each.get("channel", [0, 0])) for each in inputs)}
        values = values_of(modalities, name, inputs, model=model, **sections)
        return prepare(parse_job(values, modalities)).read_job().fingerprint

    write_volume(modalities / "t3", T2, START)
    both = [{"path": "t2"}, {"path": "t3"}]
    first = fingerprint("a", *both)
    assert fingerprint("b", *both) == first
    others = [
        fingerprint("c", *both[::-1]),
        fingerprint("d", both[0], both[1] | {"fill": "edge"}),
        fingerprint("e", both[0], both[1] | {"channel": [1, 0]}),
        fingerprint("f", *both, input={"fill": "edge"}),
    ]
    assert len({first, *others}) == 5


def test_a_volume_that_was_exchanged_is_noticed(modalities):
    launch = prepare(parse_job(values_of(modalities), modalities))
    (modalities / "t2").rename(modalities / "before")
    write_volume(modalities / "t2", T2.astype(np.uint8), START)
    with pytest.raises(WorkerFault, match="t2 is .* of uint8, and was .* of uint16"):
        Worker(launch)


def test_levels_are_of_each_volume(modalities):
    for name in ("t1", "t2"):
        (modalities / f"of-{name}").mkdir()
        write_levels(f"file://{modalities}/{name}", modalities / f"of-{name}")
    steps = [
        {"standard": {"levels": "of-t1/levels.json"}, "channels": [0]},
        {"standard": {"levels": "of-t2/levels.json"}, "channels": [1, 2]},
    ]
    values = values_of(modalities, model={"normalize": steps})
    planned = plan_job(parse_job(values, modalities))
    first, second = (step.standard.mean for step in planned.settings.normalize)
    np.testing.assert_allclose([*first, *second], [T1.mean(), *T2.mean((1, 2, 3))])
    wrong = [{"standard": {"levels": "of-t1/levels.json"}}]
    with pytest.raises(ConfigError, match=r"input and inputs are 0; 1, 2"):
        plan_job(parse_job(values_of(modalities, model={"normalize": wrong}), modalities))


def count_together(*urls, to):
    """Write levels of several volumes together, without Beam."""
    first, *beside = (str(url) for url in urls)
    stages = plan_level_stages(
        first, str(to), scale=0, channel=None, storage=Storage(), beside=beside
    )
    for stage in stages:
        for index in range(stage.count):
            stage.make_worker()(index)
    return json.loads(Path(str(to).removeprefix("file://")).read_text())


def test_levels_of_all_volumes_together_are_those_of_one_with_all_channels(tmp_path):
    """The box of what is not zero, too, is that of all: as of nnU-Net's cases."""
    first = T1.copy()
    first[:4] = 0
    second = T2.copy()
    second[:, :, :, 15:] = 0
    second[:, :2] = 0
    write_volume(tmp_path / "t1", first, START, block_shape=(4, 8, 8))
    write_volume(tmp_path / "t2", second, START, block_shape=(8, 8, 16))
    write_volume(tmp_path / "all", np.concatenate([first[None], second]), START)
    place = f"file://{tmp_path}"
    both = count_together(f"{place}/t1", f"{place}/t2", to=f"{place}/both.json")
    one = count_together(f"{place}/all", to=f"{place}/one.json")
    assert {**both, "input": None} == {**one, "input": None}

    def planned(levels, *inputs, path):
        box = {"levels": levels}
        resample = {"voxel_size_nm": [20, 10, 10], "order": 3, "clip": box}
        values = values_of(
            tmp_path,
            inputs=inputs,
            input={"path": path, "box": box, "resample": resample, "fill": "edge"},
            model={"normalize": [{"standard": box | {"of": "nonzero_box"}}]},
        )
        return plan_job(parse_job(values, tmp_path))

    several = planned("both.json", {"path": "t2"}, path="t1")
    single = planned("one.json", path="all")
    assert several.settings.normalize == single.settings.normalize
    assert several.input.bounds == single.input.bounds
    assert [len(each.limits) for each in several.input.volumes] == [1, 2]
    wanted = single.input.bounds.grow((1, 2, 3))
    np.testing.assert_allclose(
        several.input.cutout(wanted, "edge", 0), single.input.cutout(wanted, "edge", 0), atol=1e-3
    )


def test_volumes_of_other_voxels_are_not_counted_together(modalities):
    write_volume(
        modalities / "t3", np.zeros((11, 13, 11), np.uint8), (2, -2, 3), voxel_size_nm=(10, 20, 20)
    )
    with pytest.raises(ConfigError, match="t3 has other voxels than"):
        count_together(modalities / "t1", modalities / "t3", to=modalities / "levels.json")
    assert main(["levels", "t1", "t2", "--to", "levels.json", "--channel", "0"]) == 2


@pytest.mark.parametrize(
    ("sections", "inputs", "message"),
    [
        ({}, [{"path": "t2", "fill_value": 3}], r"inputs\.0: fill_value has no effect"),
        (
            {"input": {"fill": "constant", "fill_units": "network"}},
            [{"path": "t2", "fill": "edge"}],
            r"inputs\.0: fill and fill_value have no effect",
        ),
        ({"model": {"normalize": {"levels": "a.json"}}}, [{"path": "t2"}], "a list of steps"),
        ({"model": {"normalize": "unit"}}, [{"path": "t2"}], "uint8 and uint16"),
        ({}, [{"path": "t2", "scales": 1}], r"inputs\.0\.scales: unknown key; did you mean"),
        ({}, [{"path": "t2", "scale": -1}], r"inputs\.0\.scale: "),
        ({}, [{}], r"inputs\.0\.path: missing"),
        (
            {"input": {"fill": "constant", "fill_value": 9}},
            [{"path": "t2", "fill_value": -1}],
            r"inputs\.0\.fill_value -1",
        ),
        (
            {},
            [{"path": "t2", "resample": {"clip": [[0, 1]] * 3}}],
            r"inputs\.0\.resample\.clip has limits of 3 channels",
        ),
    ],
)
def test_mistakes_are_named(modalities, sections, inputs, message):
    with pytest.raises(ConfigError, match=message):
        plan_job(parse_job(values_of(modalities, inputs=inputs, **sections), modalities))


def test_no_volume_is_overwritten(modalities):
    with pytest.raises(ConfigError, match=r"is inputs\.0\.path: choose another place"):
        plan_job(parse_job(values_of(modalities, "t2"), modalities))


def test_channels_of_all_volumes_are_counted(modalities):
    values = values_of(modalities, model={"input_channels": 2})
    with pytest.raises(VolumeError, match="t2 2; together 3, the job says model.input_channels: 2"):
        plan_job(parse_job(values, modalities))


def test_a_job_file_may_set_keys_of_a_volume(modalities):
    job = write_job(modalities / "job.yaml", values_of(modalities))
    config = load_job(str(job), overrides=["inputs.0.channel=1"])
    assert config.inputs[0].channel == [1]
    record = json.loads(prepare(parse_job(values_of(modalities), modalities)).job)
    assert [each["dtype"] for each in record["further_inputs"]] == ["uint16"]
