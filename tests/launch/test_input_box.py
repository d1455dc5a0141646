"""Jobs that read a box of their input, against NumPy on the box alone."""

import json

import numpy as np
import pytest
from helpers import do_and_read, job_values, read_volume, write_job, write_levels, write_volume

from beam_inference import predict, prepare
from beam_inference.cli.main import main
from beam_inference.errors import ConfigError
from beam_inference.launch.job_files import load_job
from beam_inference.volumes.opening import open_volume

SHAPE = (30, 50, 44)
START = (5, 11, 3)
STOP = (26, 41, 37)
BOX = (slice(None), *map(slice, START, STOP))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two channels with a background of zeros: the array, its URL, and the file with its levels."""
    folder = tmp_path_factory.mktemp("box")
    array = np.zeros((2, *SHAPE), np.int16)
    box = array[BOX]
    box[...] = np.random.default_rng(3).normal(400, 90, box.shape)
    box[:, 4:9, 10:20, 3:] = 0  # a hole
    return array, write_volume(folder / "in", array, block_shape=(16, 16, 16)), levels_of(folder)


def levels_of(folder):
    return write_levels(f"file://{folder}/in", folder)


MODEL = {"input_channels": 2, "output_channels": 2}
LATTICE = {"patch_shape": [12, 16, 16], "patch_overlap": [6, 8, 8], "lattice": "spread"}
WAYS = [([16, 16, 16], "recompute"), ([32, 16, 48], "exchange"), ([16, 16, 16], "exchange")]


def values_of(url, out, box, way=WAYS[0], **sections):
    chunk_shape, strategy = way
    inference = LATTICE | {"chunk_shape": chunk_shape, "strategy": strategy}
    sections["inference"] = inference | sections.get("inference", {})
    sections["model"] = MODEL | sections.get("model", {})
    sections["input"] = {"box": box} | sections.get("input", {})
    return job_values(url, out, **sections)


def outputs(url, folder, box, **sections):
    """What a job gives in three ways of cutting it, which must have the same bits."""
    found = [
        do_and_read(values_of(url, folder / f"out{number}", box, way, **sections), folder)
        for number, way in enumerate(WAYS)
    ]
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    return found[0]


def test_z_scores_of_what_is_not_zero_and_background_elsewhere(made, tmp_path):
    array, url, levels = made
    steps = [{"standard": {"levels": str(levels), "of": "nonzero_box"}}]
    found = outputs(url, tmp_path, {"levels": str(levels)}, model={"normalize": steps})
    box = array[BOX].astype(np.float64)
    expected = np.zeros(array.shape)
    expected[BOX] = (box - box.mean(axis=(1, 2, 3), keepdims=True)) / box.std(
        axis=(1, 2, 3), keepdims=True
    )
    assert found.shape == array.shape
    np.testing.assert_allclose(found, expected, atol=5e-6)
    outside = found.copy()
    outside[BOX] = 0
    assert not outside.any()


SMOOTHING = """
import torch

def smoothing():
    '''The mean of neighbours, whose padding shows where patches end.'''
    network = torch.nn.Conv3d(2, 2, 5, padding=2, bias=False)
    torch.nn.init.constant_(network.weight, 0.008)
    return network
"""


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"inference": {"blend": {"gaussian": 0.125, "floor": "nnunet"}}},
        {"model": {"crop_margin": [2, 2, 2]}, "input": {"fill": "constant"}},
        {"postprocess": [{"operator": "smooth", "sigma": [0.5, 1, 0.5]}]},
        {"inference": {"patch_shape": [24, 16, 40], "patch_overlap": [0, 0, 0]}},
    ],
    ids=str,
)
def test_a_box_is_what_the_box_alone_would_be(made, tmp_path, sections):
    array, url, _ = made
    (tmp_path / "nets.py").write_text(SMOOTHING)
    sections = dict(sections)
    postprocess = sections.pop("postprocess", None)
    sections["model"] = {"path": "nets.py:smoothing"} | sections.get("model", {})
    alone = write_volume(tmp_path / "alone", array[BOX], START, block_shape=(16, 16, 16))
    box = {"start": START, "stop": STOP}

    def with_operators(values):
        return values if postprocess is None else values | {"postprocess": postprocess}

    found = [
        do_and_read(
            with_operators(values_of(url, tmp_path / f"{n}", box, way, **sections)), tmp_path
        )
        for n, way in enumerate(WAYS)
    ]
    values = with_operators(values_of(alone, tmp_path / "of alone", None, **sections))
    expected = np.zeros_like(found[0])
    expected[BOX] = do_and_read(values, tmp_path)
    for each in found:
        assert each.tobytes() == expected.tobytes()


def test_an_roi_may_be_a_part_of_the_box(made, tmp_path):
    array, url, _ = made
    box = {"start": START, "stop": STOP}
    roi = {"start": [9, 13, 7], "stop": [25, 40, 36]}
    found = do_and_read(
        values_of(
            url,
            tmp_path / "out",
            box,
            roi=roi,
            output={"bounds": {"start": [0, 0, 0], "stop": list(SHAPE)}},
            inference={"patch_shape": [8, 8, 8], "patch_overlap": [2, 2, 2]},
        ),
        tmp_path,
    )
    expected = np.zeros(array.shape)
    part = (slice(None), *map(slice, roi["start"], roi["stop"]))
    expected[part] = array[part]
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_a_format_that_starts_at_zero_holds_the_whole_volume(made, tmp_path):
    array, url, levels = made
    output = {"format": "zarr3", "block_shape": [8, 16, 16]}
    box = {"levels": str(levels)}
    found = do_and_read(values_of(url, tmp_path / "out", box, WAYS[1], output=output), tmp_path)
    np.testing.assert_allclose(found, array, atol=1e-3)


def test_integers_and_labels_are_zero_elsewhere(made, tmp_path):
    array, url, levels = made
    box = {"levels": str(levels)}
    argmax = {"postprocess": [{"operator": "argmax", "background": 400.0}]}
    values = values_of(url, tmp_path / "labels", box, output={"dtype": "uint8"}) | argmax
    labels = do_and_read(values, tmp_path)
    inside = array[BOX]
    expected = np.where(inside.max(axis=0) >= 400, inside.argmax(axis=0) + 1, 0)
    agree = labels[0][BOX[1:]] == expected
    assert agree.mean() > 0.99  # but for ties
    labels[BOX] = 0
    assert not labels.any()
    shifted = do_and_read(
        values_of(
            url, tmp_path / "u8", box, output={"dtype": "uint8", "value_range": [-1000, 1000]}
        ),
        tmp_path,
    )
    assert shifted[BOX].min() > 100
    shifted[BOX] = 0
    assert not shifted.any()


def test_the_box_is_planned_run_checked_and_kept(made, tmp_path, capsys):
    _, url, levels = made
    to = tmp_path / "levels.json"
    to.write_text(levels.read_text())
    values = values_of(url, tmp_path / "out", {"levels": "levels.json"})
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["plan", path]) == 0
    told = capsys.readouterr().out
    assert "[5, 11, 3 to 26, 41, 37)" in told
    assert "[0, 0, 0 to 30, 48, 44)" in told
    assert main(["run", path]) == 0
    assert main(["status", path]) == 0
    assert main(["verify", path, "--deep", "--recompute=1"]) == 0
    changed = json.loads(to.read_text())
    changed["nonzero"]["start"] = [4, 11, 3]
    to.write_text(json.dumps(changed))
    assert main(["run", path]) == 2
    assert "input.box" in capsys.readouterr().err
    to.unlink()
    assert main(["run", path]) == 0
    assert main(["verify", path]) == 0


FINER = {"voxel_size_nm": [10, 7, 13], "order": 3}


def limits(array):
    """The lowest and highest value of each channel."""
    return [[int(channel.min()), int(channel.max())] for channel in array]


@pytest.mark.parametrize("of", ["volume", "nonzero_box"])
def test_what_is_resampled_may_be_kept_within_values_that_occur(made, tmp_path, of):
    array, url, levels = made
    values = array[BOX] if of == "nonzero_box" else array
    box = {"start": START, "stop": STOP}

    def resampled(name, clip):
        source = {"resample": FINER | clip}
        return do_and_read(values_of(url, tmp_path / name, box, input=source), tmp_path)

    found = resampled("levels", {"clip": {"levels": str(levels), "of": of}})
    np.testing.assert_array_equal(found, resampled("pairs", {"clip": limits(values)}))
    unclipped = resampled("none", {})
    low, high = np.array(limits(values)).T[..., None, None, None]
    expected = unclipped.clip(low, high)
    assert (unclipped != expected).any(axis=(1, 2, 3)).all()
    np.testing.assert_array_equal(found, expected)


def test_a_job_continues_without_the_levels_of_its_limits(tmp_path):
    array = np.random.default_rng(0).integers(3, 200, (20, 24, 24), dtype=np.uint8)
    url = write_volume(tmp_path / "in", array)
    to = levels_of(tmp_path)
    source = {"resample": {"voxel_size_nm": [10, 12, 12], "order": 3, "clip": {"levels": str(to)}}}
    job = write_job(
        tmp_path / "job.yaml",
        job_values(
            url,
            tmp_path / "out",
            input=source,
            inference={"patch_shape": [8, 8, 8], "patch_overlap": [2, 2, 2]},
        ),
    )
    assert main(["run", str(job), "--sample", "0.3"]) == 0
    to.unlink()
    assert main(["run", str(job)]) == 0
    assert main(["verify", str(job), "--deep"]) == 0
    assert load_launched_limits(tmp_path) == [[3, 199]]


def load_launched_limits(folder):
    """The limits that the first launch recorded."""
    record = json.loads((folder / "out" / "_beam_inference" / "job.json").read_text())
    return record["config"]["input"]["resample"]["clip"]


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        ([[1, 2], [3, 4], [5, 6]], "limits of 3 channels, and .* 2: write one pair for each"),
        ([[1, 2], [4, 3]], "must be .low, high. with low < high"),
        ({"levels": "absent.json"}, "absent.json"),
        ({"levels": "levels.json", "of": "elsewhere"}, "of"),
    ],
)
def test_limits_that_are_none_are_refused(made, tmp_path, clip, message):
    _, url, levels = made
    (tmp_path / "levels.json").write_bytes(levels.read_bytes())
    values = values_of(url, tmp_path / "out", None, input={"resample": FINER | {"clip": clip}})
    with pytest.raises(ConfigError, match=message):
        do_and_read(values, tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_pyramid_holds_the_background_too(tmp_path):
    array = np.zeros((40, 80, 80), np.uint8)
    array[10:14, 20:30, 22:31] = 200
    url = write_volume(tmp_path / "in", array, block_shape=(16, 16, 16))
    levels = write_levels(url, tmp_path)
    values = job_values(
        url,
        tmp_path / "out",
        input={"box": {"levels": str(levels)}},
        output={"dtype": "uint8", "value_range": [0, 255], "pyramid": {"factor": [2, 2, 2]}},
    )
    path = str(write_job(tmp_path / "job.yaml", values))
    for _ in range(2):  # and once more, when it exists
        assert main(["run", path]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out")[0], array)
    coarse = open_volume(f"file://{tmp_path}/out", scale=1)
    means = array.reshape(20, 2, 40, 2, 40, 2).mean(axis=(1, 3, 5))
    np.testing.assert_allclose(coarse.read(coarse.bounds)[0], means, atol=1)


@pytest.mark.parametrize(
    ("box", "message"),
    [
        ({"levels": "nowhere.json"}, "input.box.levels: .*beam-inference levels INPUT --to FILE"),
        ({"levels": "old.json"}, "made by an earlier version, without the box"),
        ({"levels": "blank.json"}, "is zero throughout: there is no box"),
        ({"levels": "far.json"}, "is not a file that beam-inference levels has written"),
        ({"levels": "empty.json"}, "the box of what is not zero has no voxels"),
        ({"start": [0, 0, 0], "stop": [31, 9, 9]}, r"is not inside the input .*\[0, 0, 0 to 30, 9"),
        ({"start": [0, 0, 0], "stop": [0, 9, 9]}, "input.box: stop .* must lie beyond start"),
        ({"start": [0, 0, 0]}, "input.box.stop: missing"),
        ({"level": "levels.json"}, "input.box.level: unknown key"),
    ],
    ids=str,
)
def test_a_box_that_is_none_is_refused(made, tmp_path, box, message):
    _, url, levels = made
    told = json.loads(levels.read_text())
    for name, keys in {
        "old": {"channels": None, "nonzero": None, "without_zeros": None},
        "blank": {"nonzero": None},
        "far": {"nonzero": told["nonzero"] | {"stop": [10**30] * 3}},
        "empty": {"nonzero": told["nonzero"] | {"stop": told["nonzero"]["start"]}},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(told | keys))
    path = write_job(tmp_path / "job.yaml", values_of(url, tmp_path / "out", box))
    with pytest.raises(ConfigError, match=message):
        prepare(load_job(str(path)))
    assert not (tmp_path / "out").exists()


def test_predict_takes_the_box_as_an_array(made):
    array = made[0]
    found = predict(array[BOX], lambda batch: batch, patch_shape=(21, 30, 34), output_channels=2)
    np.testing.assert_allclose(found, array[BOX], atol=1e-3)
