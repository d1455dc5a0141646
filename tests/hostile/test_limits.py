"""Requests beyond what a machine holds, clocks that are wrong, and codecs that nobody reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from helpers import write_job
from hostile.conftest import run_words

from beam_inference.environment import available_memory
from beam_inference.job.seals import open_record


@pytest.mark.parametrize("threads", [10**6, 1024])
def test_more_threads_than_a_machine_bears_are_refused(refused, job, tmp_path, threads):  # 371
    assert "threads" in refused(["run", job(inference={"threads": threads})])
    assert not (tmp_path / "out").exists()


def test_some_more_threads_than_cores_are_taken(job):
    assert run_words(["run", job(inference={"threads": 16})]) == 0


def write_with_operator(job, operator):
    path = Path(job())
    values = yaml.safe_load(path.read_text()) | {"postprocess": [operator]}
    return write_job(path, values)


OPERATORS = {
    379: {"operator": "smooth", "sigma": [1e9, 1e9, 1e9]},
    "379: one axis": {"operator": "smooth", "sigma": [0.0, 0.0, 1e9]},
    "379: beyond integers": {"operator": "smooth", "sigma": [1e300, 0.0, 0.0]},
    "379: of one's own": {
        "operator": "own",
        "function": "numpy:sqrt",
        "output_channels": 1,
        "halo": [0, 10**9, 0],
    },
}


@pytest.mark.parametrize("row", OPERATORS)
def test_operators_that_look_further_than_the_volume_are_refused(refused, job, tmp_path, row):
    message = refused(["run", write_with_operator(job, OPERATORS[row])])
    assert "postprocess.0" in message
    assert not (tmp_path / "out").exists()


def test_operators_may_look_further_than_a_small_volume(job):
    smooth = {"operator": "smooth", "sigma": [20.0, 1.0, 1.0]}
    assert run_words(["run", write_with_operator(job, smooth)]) == 0


def test_a_patch_larger_than_free_memory_is_refused_before_it_is_read(refused, job, tmp_path):
    side = (available_memory() or 2**40) // (4 * 16 * 16)
    message = refused(["run", job(inference={"patch_shape": [16, 16, side]})])
    assert "GiB" in message
    assert "inference.patch_shape" in message or "inference.chunk_shape" in message
    assert not (tmp_path / "out").exists()


GREEDY = """
import numpy as np

def make():
    def network(batch):
        np.ones(2**46, np.uint8)
        return batch
    return network
"""


def test_a_network_that_takes_all_memory_is_refused_at_the_trial(refused, job, tmp_path):
    (tmp_path / "greedy.py").write_text(GREEDY)
    model = {"path": f"{tmp_path}/greedy.py:make"}
    message = refused(["run", job(model=model, inference={"engine": "numpy"})])
    assert "out of memory for one patch" in message
    assert not (tmp_path / "out").exists()


@pytest.fixture
def finished_job(job):
    path = job()
    assert run_words(["run", path]) == 0
    return path


MOMENTS = {
    "the year 2199": "2199-06-01T00:00:00Z",
    "1970": "1970-01-01T00:00:00Z",
    "the last moment": "9999-12-31T23:59:59Z",
    "the first moment": "0001-01-01T00:00:00Z",
    "no time zone": "2026-01-01T00:00:00",
    "beyond all time": "9999-12-31T23:59:59-12:00",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * (n > 0)) for n, each in enumerate(MOMENTS)],
)
def test_receipts_of_wrong_clocks_break_nothing(finished_job, tmp_path, capsys, name):  # 383
    receipts = sorted((tmp_path / "out" / "_beam_inference" / "receipts").rglob("*.json"))
    for receipt in receipts[:2]:
        values = json.loads(open_record(receipt.read_bytes()))
        values["finished_at"] = MOMENTS[name]
        values["seconds"] = dict.fromkeys(values["seconds"], -1.0)
        receipt.write_text(json.dumps(values))
    understood = name not in ("no time zone", "beyond all time")
    capsys.readouterr()
    assert run_words(["status", finished_job]) == (0 if understood else 1)
    assert run_words(["report", finished_job, "--to", tmp_path / "report.html"]) == 0
    assert run_words(["verify", finished_job]) == (0 if understood else 1)
    assert "not foreseen" not in "".join(capsys.readouterr())


def write_precomputed(folder, encoding):
    folder.mkdir()
    scale = {
        "chunk_sizes": [[16, 16, 16]],
        "encoding": encoding,
        "key": "1",
        "resolution": [1, 1, 1],
        "size": [32, 32, 32],
        "voxel_offset": [0, 0, 0],
    }
    info = {
        "@type": "neuroglancer_multiscale_volume",
        "type": "image",
        "data_type": "float32" if encoding == "fpzip" else "uint8",
        "num_channels": 1,
        "scales": [scale],
    }
    (folder / "info").write_text(json.dumps(info))


@pytest.mark.parametrize("encoding", ["fpzip", "crackle", "kempressed", "\x1b[2J", ""])
def test_encodings_that_cannot_be_read_are_named(refused, job, tmp_path, encoding):
    write_precomputed(tmp_path / "coded", encoding)
    for words in (
        ["convert", tmp_path / "coded", tmp_path / "copy"],
        ["plan", job(input={"path": str(tmp_path / "coded")})],
    ):
        message = refused(words)
        assert "encoded with" in message
        assert "Copy the volume" in message
        assert "FAILED_PRECONDITION" not in message
        if encoding.isalpha():
            assert encoding in message


def test_codecs_that_cannot_be_read_are_named(refused, tmp_path):  # 319
    folder = tmp_path / "zarr"
    folder.mkdir()
    array = {
        "zarr_format": 2,
        "shape": [4, 4, 4],
        "chunks": [4, 4, 4],
        "dtype": "|u1",
        "compressor": {"id": "crackle"},
        "fill_value": 0,
        "filters": None,
        "order": "C",
    }
    (folder / ".zarray").write_text(json.dumps(array))
    assert "encoded with crackle" in refused(["convert", folder, tmp_path / "copy"])
