"""Jobs that change the inside of an object alone, against NumPy and SciPy on whole arrays."""

import json
import shutil

import numpy as np
import pytest
from fakes.gcs import GcsStandIn
from helpers import do_and_read, do_job, job_values, write_job, write_levels, write_volume
from scipy import ndimage
from skimage.transform import resize

from beam_inference import predict, prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError
from beam_inference.job.place import Place
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.launch.job_files import load_job
from beam_inference.launch.planned_job import plan_job
from beam_inference.operators import level_counts
from beam_inference.operators.level_stages import plan_level_stages
from beam_inference.training.config import parse_training
from beam_inference.volumes.opening import open_volume

SHAPE = (30, 40, 44)
START = (3, -5, 2)
MODEL = {"input_channels": 2, "output_channels": 2}
LATTICE = {"patch_shape": [12, 16, 16], "patch_overlap": [6, 8, 8], "lattice": "spread"}
WAYS = [([16, 16, 16], "recompute"), ([32, 16, 48], "exchange"), ([16, 16, 16], "exchange")]


def make_object(dtype="int16"):
    """Two channels of one object, with zeros around it, and holes in it that many chunks share."""
    generator = np.random.default_rng(5)
    z, y, x = np.ogrid[:30, :40, :44]
    distance = ((z - 15) / 13) ** 2 + ((y - 20) / 17) ** 2 + ((x - 22) / 19) ** 2
    array = generator.normal(400, 90, (2, *SHAPE)).clip(1, 999).astype(dtype)
    array[:, distance > 1] = 0
    array[:, 8:23, 12:28, 12:32] = 0  # a hole
    array[:, 0:12, 19, 22] = 0  # a tunnel into it ...
    array[1, 4, 19, 22] = 7  # ... that one channel closes
    array[0, 12:20, 5:9, 20:25] = 0  # zeros of one channel alone
    return array


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The array, its URL, and the file with its levels, which were counted in many pieces."""
    folder = tmp_path_factory.mktemp("object")
    array = make_object()
    url = write_volume(folder / "in", array, START, block_shape=(16, 16, 16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(level_counts, "CHUNK_VOXELS", 1)
        return array, url, write_levels(url, folder, finds_object=True)


def inside_of(array):
    """Where the object is, as nnU-Net finds it."""
    return ndimage.binary_fill_holes((array != 0).any(axis=0))


def standardized(array):
    """What nnU-Net's z-score makes of each channel, in float64."""
    values = array.astype(np.float64)
    mask = inside_of(array)
    for channel in values:
        channel[mask] = (channel[mask] - channel[mask].mean()) / max(channel[mask].std(), 1e-8)
    return values


def of_object(levels, key="standard", **keys):
    return {key: {"levels": str(levels), "of": "object"} | keys}


def values_of(url, out, steps, way=WAYS[0], **sections):
    chunk_shape, strategy = way
    inference = LATTICE | {"chunk_shape": chunk_shape, "strategy": strategy}
    sections["inference"] = inference | sections.get("inference", {})
    sections["model"] = MODEL | {"normalize": steps} | sections.get("model", {})
    return job_values(url, out, **sections)


def outputs(url, folder, steps, **sections):
    """What a job gives in three ways of cutting it, which must have the same bits."""
    found = [
        do_and_read(values_of(url, folder / f"out{number}", steps, way, **sections), folder)
        for number, way in enumerate(WAYS)
    ]
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    return found[0]


def test_z_scores_of_the_inside_alone(made, tmp_path):
    array, url, levels = made
    found = outputs(url, tmp_path, [of_object(levels)])
    expected = standardized(array)
    assert (expected[:, 15, 20, 20] < -1).all()  # a hole is inside
    np.testing.assert_allclose(found, expected, atol=5e-6)
    assert not found[:, ~inside_of(array)].any()


def test_what_is_not_zero_in_each_channel_alone(made, tmp_path):
    """As MONAI's NormalizeIntensity with nonzero, and its network pads."""
    array, url, levels = made
    steps = [{"standard": {"levels": str(levels), "of": "nonzero"}}]
    fill = {"fill": "constant", "fill_value": 0}
    patch = {"patch_shape": [32, 16, 16], "patch_overlap": [0, 8, 8]}
    found = outputs(url, tmp_path, steps, input=fill, inference=patch)
    expected = array.astype(np.float64)
    for channel in expected:
        there = channel != 0
        channel[there] = (channel[there] - channel[there].mean()) / channel[there].std()
    np.testing.assert_allclose(found, expected, atol=5e-6)
    assert not found[array == 0].any()
    standard = prepare(
        parse_job(values_of(url, tmp_path / "out0", steps, input=fill, inference=patch), tmp_path)
    )
    (step,) = standard.read_job().config.model.normalize
    same = predict(
        array,
        lambda batch: batch,
        patch_shape=(32, 16, 16),
        patch_overlap=(0, 8, 8),
        lattice="spread",
        output_channels=2,
        normalize=[step.model_dump(exclude_none=True)],
        fill="constant",
    )
    np.testing.assert_allclose(same, found, atol=1e-6)


def test_the_box_of_what_is_not_zero_has_the_same_inside(made, tmp_path):
    array, url, levels = made
    found = outputs(
        url,
        tmp_path,
        [of_object(levels)],
        input={
            "box": {"levels": str(levels)},
            "fill": "constant",
            "fill_value": 0,
            "fill_units": "network",
        },
        inference={"patch_shape": [28, 16, 16], "patch_overlap": [0, 8, 8]},
    )
    np.testing.assert_allclose(found, standardized(array), atol=5e-6)


def test_steps_before_and_after_it(made, tmp_path):
    array, url, levels = made
    steps = [
        {"scale": 0.5},
        of_object(levels, "rescale", low=0.01, high=0.99) | {"channels": [1]},
        of_object(levels, ddof=1) | {"channels": [0]},
        of_object(levels, eps=0.5) | {"channels": [1]},
        {"clip": {"levels": str(levels), "of": "nonzero_box", "low": 0, "high": 1}},
        {"scale": 3, "offset": 1},
    ]
    found = outputs(url, tmp_path, steps)
    mask = inside_of(array)
    values = array / 2
    inside = values[:, mask]
    low, high = np.quantile(inside[1], [0.01, 0.99], method="inverted_cdf")
    inside[1] = (inside[1] - low) / (high - low)
    inside[0] = (inside[0] - inside[0].mean()) / inside[0].std(ddof=1)
    inside[1] = (inside[1] - inside[1].mean()) / (inside[1].std() + 0.5)
    values[:, mask] = inside
    np.testing.assert_allclose(found, values * 3 + 1, atol=2e-5)


@pytest.mark.parametrize("order", [0, 1, 3])
def test_what_is_resampled_is_as_if_that_came_after(made, tmp_path, order):
    """As nnU-Net does it: resampled are normalised values, and kept within those that occur."""
    array, url, levels = made
    steps = [
        of_object(levels),
        {"clip": {"levels": str(levels), "of": "nonzero_box", "low": 0, "high": 1}},
    ]
    box = {"levels": str(levels)}
    found = outputs(
        url,
        tmp_path,
        steps,
        input={"box": box, "resample": {"voxel_size_nm": [10, 7, 13], "order": order}},
    )
    there = np.argwhere(array.any(axis=0))
    places = tuple(map(slice, there.min(axis=0), there.max(axis=0) + 1))
    normalized = standardized(array)[:, *places]
    expected = np.stack(
        [
            resize(each, found.shape[1:], order, mode="edge", anti_aliasing=False, clip=True)
            for each in normalized
        ]
    )
    assert found.shape != normalized.shape
    extent = np.ptp(expected)
    np.testing.assert_allclose(found, expected, atol=1e-5 * extent)


def test_the_object_is_what_several_volumes_show_together(made, tmp_path):
    array = made[0]
    first, second = array[0].astype(np.float32), array[1]
    urls = [
        write_volume(tmp_path / "t1", first, START, block_shape=(16, 16, 8)),
        write_volume(tmp_path / "t2", second, START, block_shape=(8, 16, 16)),
    ]
    assert inside_of(array).sum() > inside_of(array[:1]).sum() + 3000
    together = tmp_path / "together.json"
    for stage in plan_level_stages(
        urls[0],
        together.as_uri(),
        scale=0,
        channel=None,
        storage=parse_job(values_of(urls[0], "out", "none"), tmp_path).storage,
        beside=urls[1:],
        finds_object=True,
    ):
        for index in range(stage.count):
            stage.make_worker()(index)
    inputs = {"inputs": [{"path": urls[1]}]}
    found = [
        do_and_read(
            values_of(urls[0], tmp_path / f"out{number}", [of_object(together)], way) | inputs,
            tmp_path,
        )
        for number, way in enumerate(WAYS)
    ]
    np.testing.assert_allclose(found[0], standardized(array), atol=5e-6)
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    alone = write_levels(urls[0], tmp_path, finds_object=True)
    for steps in ([of_object(alone) | {"channels": [0]}], [of_object(alone)]):
        values = values_of(urls[0], tmp_path / "refused", steps) | inputs
        with pytest.raises(ConfigError, match=r"count all volumes together \(beam-inf.*--object"):
            plan_job(parse_job(values, tmp_path))


@pytest.fixture
def job(made, tmp_path):
    """A job file and its levels, in a folder of its own."""
    _, url, levels = made
    shutil.copy(levels, tmp_path / "levels.json")
    shutil.copytree(f"{levels}.holes", tmp_path / "levels.json.holes")
    values = values_of(url, tmp_path / "out", [of_object("levels.json")])
    return write_job(tmp_path / "job.yaml", values)


def test_a_job_goes_on_without_its_levels_but_not_without_its_holes(job, tmp_path, capsys):
    assert main(["run", str(job), "--sample", "0.3"]) == 0
    record = json.loads((tmp_path / "out" / "_beam_inference" / "job.json").read_text())
    (step,) = record["config"]["model"]["normalize"]
    assert step["standard"]["of"] == "object"
    assert step["standard"]["holes"]["path"] == (tmp_path / "levels.json.holes").as_uri()
    (tmp_path / "levels.json").unlink()
    (tmp_path / "levels.json.holes").rename(tmp_path / "away")
    assert main(["run", str(job)]) == 2
    assert "belongs beside the levels file that the job was made by" in capsys.readouterr().err
    (tmp_path / "away").rename(tmp_path / "levels.json.holes")
    assert main(["run", str(job)]) == 0
    assert main(["verify", str(job), "--deep", "--recompute=1"]) == 0
    capsys.readouterr()
    assert main(["show", str(tmp_path / "out")]) == 0
    assert "levels.json.holes, sha256" in capsys.readouterr().out
    (tmp_path / "levels.json.holes").rename(tmp_path / "away")
    assert main(["reproduce", str(tmp_path / "out")]) == 2
    assert (
        main(["reproduce", str(tmp_path / "out"), f"--file=model.normalize={tmp_path}/away"]) == 0
    )


def test_levels_and_holes_in_an_object_store(made, tmp_path, monkeypatch):
    array, _, _ = made
    write_volume(tmp_path / "in", array, START, block_shape=(16, 16, 16))
    with GcsStandIn(["data"], fail_rate=0.05, latency=0.002, seed=1) as gcs:
        for path in (tmp_path / "in").rglob("*"):
            if path.is_file():
                gcs.put("data", str(path.relative_to(tmp_path)), path.read_bytes())
        values = values_of("in", "out", [of_object("levels.json")])
        gcs.put("data", "job.yaml", json.dumps(values).encode())
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        monkeypatch.setattr(level_counts, "CHUNK_VOXELS", 1)
        for command in (
            ["levels", "gs://data/in", "--object", "--to", "gs://data/levels.json"],
            ["run", "gs://data/job.yaml"],
            ["verify", "gs://data/job.yaml", "--deep"],
        ):
            assert main(command) == 0, command
        assert len(gcs.names("data", "levels.json.holes/")) > 2
        assert sum(gcs.failures.values()) > 5
        storage = Storage.model_validate({"gcs": {"endpoint": gcs.url}})
        volume = open_volume("gs://data/out", storage=storage)
        found = volume.read(volume.bounds)
    np.testing.assert_allclose(found, standardized(array), atol=5e-6)


def test_workers_elsewhere_must_reach_the_holes(job):
    with pytest.raises(ConfigError, match="the holes of the object, file:///.* which remote work"):
        plan_job(load_job(str(job)), Place(shares_files=False))


def test_where_the_holes_lie_is_no_part_of_the_fingerprint_but_which_they_are(job, tmp_path):
    here = prepare(load_job(str(job))).read_job()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("levels.json", "levels.json.holes"):
        (tmp_path / name).rename(elsewhere / name)
    values = load_job(str(job)).model_dump(mode="json", exclude_unset=True)
    steps = [of_object(elsewhere / "levels.json")]
    config = {key: values[key] for key in ("input", "output", "inference")}
    config["model"] = MODEL | {"path": "identity", "normalize": steps}
    there = prepare(parse_job(config, tmp_path)).read_job()
    assert there.fingerprint == here.fingerprint
    (step,) = here.config.model.normalize
    other = step.standard.holes.model_copy(update={"sha256": "0" * 64})
    moments = step.standard.model_copy(update={"holes": other})
    model = here.config.model.model_copy(
        update={"normalize": (step.model_copy(update={"standard": moments}),)}
    )
    config = here.config.model_copy(update={"model": model})
    values = {name: getattr(here, name) for name in ResolvedJob.model_fields}
    (difference,) = here.differences(ResolvedJob(**values | {"config": config}))
    assert difference.startswith("model.normalize")


def test_other_holes_than_those_of_the_levels_are_refused(job, tmp_path, capsys):
    index = tmp_path / "levels.json.holes" / "index.json"
    index.write_text(index.read_text().replace('"pieces"', ' "pieces"'))
    assert main(["run", str(job)]) == 2
    assert "it is damaged, or of other levels" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_torn_piece_is_a_fault_of_the_chunks_that_need_it(job, tmp_path, capsys):
    first = min((tmp_path / "levels.json.holes").glob("*.bits"))
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    assert main(["run", str(job)]) == 3
    told = capsys.readouterr()
    assert "is damaged, so which zeros in" in told.out + told.err
    first.write_bytes(whole)
    assert main(["run", str(job)]) == 0
    assert main(["verify", str(job), "--deep"]) == 0


def test_holes_of_another_volume_are_refused(made, tmp_path):
    _, _, levels = made
    other = write_volume(tmp_path / "other", make_object()[:, 1:], START)
    with pytest.raises(ConfigError, match="the levels are of another volume"):
        do_job(values_of(other, tmp_path / "out", [of_object(levels)]), tmp_path)
    assert not (tmp_path / "out").exists()


OBJECT = {"levels": "levels.json", "of": "object"}
NONZERO = {"levels": "levels.json", "of": "nonzero"}
HOLES = {"path": "holes", "sha256": "0" * 64}
MASK = {"path": "mask", "fill_value": 4}


@pytest.mark.parametrize(
    ("steps", "sections", "message"),
    [
        ([{"clip": OBJECT}], {}, "clip: of: object is not known"),
        ([{"clip": NONZERO}], {}, "clip: of: nonzero is not known"),
        ([{"clip": [0, 9]}, {"rescale": NONZERO}], {}, "which values of channel 0 are zero"),
        ([{"standard": NONZERO}, {"standard": NONZERO}], {}, "which values of channel 0 are zero"),
        ([{"standard": NONZERO | {"levels": "old.json"}}], {}, "of what is not zero in each chan"),
        ([{"standard": NONZERO | {"levels": "empty.json"}}], {}, "is zero throughout: it has no n"),
        (
            [{"standard": NONZERO}],
            {"input": {"resample": {"voxel_size_nm": [10, 7, 13]}}},
            "of: nonzero.*is resampled or clipped before",
        ),
        (
            [{"standard": {"mean": 1, "std": 2, "of": "nonzero", "holes": HOLES}}],
            {},
            "holes are zero, and of: nonzero leaves zeros",
        ),
        ([{"scale": 1, "offset": 2}, {"standard": OBJECT}], {}, "make 2 of the zeros there in cha"),
        (
            [{"standard": OBJECT}, {"standard": OBJECT | {"of": "volume"}}],
            {},
            r"a step before it has changed some voxels alone \(object\)",
        ),
        (
            [{"standard": OBJECT}, {"rescale": OBJECT | {"of": "volume", "low": 0.01}}],
            {},
            "of volume only the least and the greatest value are known",
        ),
        ([{"standard": OBJECT | {"levels": "plain.json"}}], {}, "made without looking for the obj"),
        (
            [
                {"standard": OBJECT, "channels": [0]},
                {"standard": OBJECT | {"levels": "full.json"}, "channels": [1]},
            ],
            {},
            "the inside of several objects",
        ),
        (
            [{"standard": OBJECT}],
            {"model": {"denormalize": True}},
            "cannot undo what is done",
        ),
        (
            [{"standard": OBJECT}],
            {"input": {"fill": "constant", "fill_value": 3}},
            "input.fill_value is 3, and model.normalize changes the inside of the object alone",
        ),
        (
            [{"standard": OBJECT}],
            {"input": {"resample": {"voxel_size_nm": [10, 7, 13], "clip": [5, 900]}}},
            "input.resample.clip of .* does not hold 0",
        ),
        ([{"standard": OBJECT}], {"input": {"mask": MASK}}, "input.mask.fill_value is 4"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(made, tmp_path, steps, sections, message):
    array, url, levels = made
    write_volume(tmp_path / "mask", (array[0] > 0).astype(np.uint8), START)
    shutil.copy(levels, tmp_path / "levels.json")
    shutil.copytree(f"{levels}.holes", tmp_path / "levels.json.holes")
    told = json.loads(levels.read_text())
    (tmp_path / "plain.json").write_text(json.dumps(told | {"object": None}))
    (tmp_path / "old.json").write_text(json.dumps(told | {"without_zeros": None}))
    empty = {"without_zeros": [told["without_zeros"][0], None]}
    (tmp_path / "empty.json").write_text(json.dumps(told | empty))
    full = told["object"] | {"holes_sha256": None}
    (tmp_path / "full.json").write_text(json.dumps(told | {"object": full}))
    values = values_of(url, tmp_path / "out", steps, **sections)
    with pytest.raises(ConfigError, match=message):
        prepare(parse_job(values, tmp_path))
    assert not (tmp_path / "out").exists()


def test_an_object_is_no_part_of_a_training(tmp_path):
    training = {
        "volumes": [{"image": "em", "labels": "labels"}],
        "output": "trained",
        "patch_shape": [4, 12, 12],
        "split": {"block_shape": [8, 24, 24], "validation": 0.2, "test": 0.1},
        "target": {"kind": "affinities"},
        "network": {"path": "networks.py:network"},
        "steps": 6,
        "batch_size": 2,
    }
    step = {"standard": {"mean": 1, "std": 2, "of": "object"}}
    parse_training(training, tmp_path)
    with pytest.raises(ConfigError, match="an object belongs to one volume"):
        parse_training(training | {"normalize": [step]}, tmp_path)


def test_a_mask_of_the_input_hides_the_object_too(made, tmp_path):
    array, url, levels = made
    kept = np.zeros(SHAPE, np.uint8)
    kept[:, :, :22] = 1
    write_volume(tmp_path / "mask", kept, START, block_shape=(16, 16, 16))
    mask = {"path": str(tmp_path / "mask"), "fill_value": 0}
    found = outputs(url, tmp_path, [of_object(levels)], input={"mask": mask})
    np.testing.assert_allclose(found, np.where(kept, standardized(array), 0), atol=5e-6)
