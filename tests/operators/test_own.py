"""Functions of users that are told where their values are, and that return labels."""

import numpy as np
import pytest
from helpers import job_values, read_volume, write_volume

from beam_inference import prepare
from beam_inference.config.job_file import parse_job
from beam_inference.config.operators import ArrayPlace, validate_operator
from beam_inference.errors import ConfigError, ModelContractError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.operators.postprocess import build_functions
from beam_inference.worker.worker import Worker

IMAGE = np.random.default_rng(1).integers(0, 256, (20, 40, 44), dtype=np.uint8)
START = (4, -6, 10)
SIZE = (40.0, 8.0, 10.0)
FUNCTIONS = """
import numpy as np

def distances(values, box, voxel_size_nm):
    '''Nanometres from the origin, where values are large, after a mean over z.'''
    padded = np.pad(values, [(0, 0), (1, 1), (0, 0), (0, 0)], mode="edge")
    mean = (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3
    axes = [
        (np.arange(a, b) * size) ** 2
        for a, b, size in zip(box.start, box.stop, voxel_size_nm)
    ]
    z, y, x = np.meshgrid(*axes, indexing="ij")
    return np.where(mean > 100, np.sqrt(z + y + x), 0).astype(np.float32)

def octants(values, box):
    z, y, x = np.meshgrid(*(np.arange(a, b) for a, b in zip(box.start, box.stop)), indexing="ij")
    return (1 + 4 * (z > 9) + 2 * (y > 8) + (x > 30))[None]

def halves(values):
    return values / 2

def plain(values):
    return values
"""
LABELS = {"operator": "own", "function": "mine.py:octants", "output_channels": 1, "labels": 8}


@pytest.fixture
def folder(tmp_path):
    write_volume(tmp_path / "in", IMAGE, START, voxel_size_nm=SIZE, block_shape=(8, 16, 16))
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


def outputs(folder, own, **output):
    """What a job on the identity gives in several ways of cutting it, which must be the same."""
    found = []
    for number, (chunk, strategy) in enumerate(
        [([16, 32, 32], "recompute"), ([16, 16, 48], "exchange")]
    ):
        values = job_values(
            folder / "in",
            folder / f"out{number}",
            output=output,
            inference={"chunk_shape": chunk, "strategy": strategy, "threads": 1},
        )
        launch = prepare(parse_job(values | {"postprocess": [own]}, folder))
        worker = Worker(launch)
        chunks = range(worker.job.plan.chunks.count)
        if strategy == "recompute":
            assert {each.outcome for each in worker.infer_chunks(chunks)} == {"done"}
        else:
            assert {each.outcome for each in worker.sum_chunks(chunks)} == {"summed"}
            assert {each.outcome for each in worker.merge_seams(chunks)} == {"done"}
        found.append(read_volume(folder / f"out{number}"))
    assert found[0].tobytes() == found[1].tobytes()
    return found[0]


def places(shape):
    """The coordinates of each voxel on each axis."""
    axes = [np.arange(start, start + n) for start, n in zip(START, shape, strict=True)]
    return np.meshgrid(*axes, indexing="ij")


def test_a_function_is_told_where_its_values_are(folder):
    own = {
        "operator": "own",
        "function": "mine.py:distances",
        "output_channels": 1,
        "halo": [1, 0, 0],
    }
    found = outputs(folder, own)[0]
    squares = [(place * size) ** 2 for place, size in zip(places(IMAGE.shape), SIZE, strict=True)]
    expected = np.sqrt(np.sum(squares, axis=0))
    padded = np.pad(IMAGE.astype(np.float64), [(1, 1), (0, 0), (0, 0)], mode="edge")
    mean = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
    is_clear = np.abs(mean - 100) > 0.01
    np.testing.assert_allclose(
        found[is_clear], np.where(mean > 100, expected, 0)[is_clear], rtol=1e-6
    )
    assert 0.1 < (found > 0).mean() < 0.95


def test_a_function_may_return_labels(folder):
    found = outputs(folder, LABELS, dtype="uint8")[0]
    z, y, x = places(IMAGE.shape)
    np.testing.assert_array_equal(found, 1 + 4 * (z > 9) + 2 * (y > 8) + (x > 30))


@pytest.mark.parametrize(
    ("own", "dtype", "message"),
    [
        (LABELS, "float32", "postprocess gives whole numbers"),
        (LABELS | {"labels": 256}, "uint8", "labels up to 256, which uint8 does not hold"),
        (LABELS | {"labels": 2**24 + 1}, "uint32", "labels"),
        (LABELS | {"labels": None}, "uint32", "own with labels make"),
    ],
)
def test_labels_that_cannot_be_written_are_refused(folder, own, dtype, message):
    values = job_values(folder / "in", folder / "out", output={"dtype": dtype})
    with pytest.raises(ConfigError, match=message):
        parse_job(values | {"postprocess": [own]}, folder)


@pytest.mark.parametrize(
    ("function", "value"), [("halves", 3), ("plain", 9), ("plain", -1), ("plain", np.nan)]
)
def test_what_is_no_label_is_refused_with_its_value(folder, function, value):
    own = LABELS | {"function": f"{folder}/mine.py:{function}"}
    (run,) = build_functions([validate_operator(own)])
    place = ArrayPlace(BoundingBox((0, 0, 0), (1, 1, 2)), SIZE)
    values = np.array([[[[4, value]]]], np.float32)
    with pytest.raises(ModelContractError, match="labels: 8 expects whole numbers from 0 to 8"):
        run(values, place)
