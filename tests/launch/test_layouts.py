"""How blocks of new outputs are encoded and packed where a job does not say, and what is kept."""

import json

import numpy as np
import pytest
from helpers import do_job, job_values, read_volume, write_job, write_volume

from beam_inference import prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.errors import VolumeError
from beam_inference.launch.planned_job import plan_job
from beam_inference.launch.resume import relocate_job

SHAPE = (40, 64, 72)
OPEN = {"shard_shape": "auto", "encoding": "auto"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    array = np.random.default_rng(5).integers(0, 9, SHAPE).astype(np.uint8)
    return write_volume(tmp_path_factory.mktemp("in"), array, block_shape=(16, 16, 16))


def planned(source, folder, **sections):
    output = OPEN | sections.pop("output", {})
    return plan_job(
        parse_job(job_values(source, folder / "out", output=output, **sections), folder)
    )


@pytest.mark.parametrize(
    ("chunk_shape", "shard_shape"),
    [
        ([32, 32, 32], (32, 32, 32)),
        ([64, 64, 64], (32, 32, 32)),  # of 8 blocks at most
        ([16, 32, 32], (16, 32, 32)),
        ([16, 16, 48], (16, 16, 16)),
        ("auto", (32, 32, 32)),
    ],
)
def test_shards_of_a_new_output_are_as_large_as_chunks_allow(
    tmp_path, source, chunk_shape, shard_shape
):
    job = planned(source, tmp_path, inference={"chunk_shape": chunk_shape})
    assert (job.output.shard_shape, job.output.encoding) == (shard_shape, "raw")
    assert job.config.output.write_shape == shard_shape


@pytest.mark.parametrize(
    ("start", "shard_shape"), [((0, 0, 32), (32, 32, 32)), ((16, 0, 0), (16, 32, 32))]
)
def test_shards_lie_where_a_part_of_a_volume_does(tmp_path, source, start, shard_shape):
    whole = {"start": [0, 0, 0], "stop": list(SHAPE)}
    job = planned(
        source,
        tmp_path,
        inference={"chunk_shape": [32, 32, 32]},
        roi={"start": list(start), "stop": list(SHAPE)},
        output={"bounds": whole},
    )
    assert job.output.shard_shape == shard_shape


@pytest.mark.parametrize("format", ["zarr3", "zarr2", "n5", "ome_zarr", "ome_zarr_0.4"])
def test_formats_that_pack_each_block_have_a_file_for_each(tmp_path, source, format):
    job = planned(source, tmp_path, output={"format": format})
    assert (job.output.shard_shape, job.output.encoding) == (None, "raw")


@pytest.mark.parametrize(
    ("dtype", "encoding"), [("uint8", "raw"), ("uint32", "compressed_segmentation")]
)
def test_labels_have_the_encoding_of_labels(tmp_path, source, dtype, encoding):
    labels = [{"operator": "threshold", "at": 0.5}]
    values = job_values(source, tmp_path / "out", output=OPEN | {"dtype": dtype})
    job = plan_job(parse_job(values | {"postprocess": labels}, tmp_path))
    assert job.output.encoding == encoding


def test_both_strategies_write_the_same_and_fewer_bytes(tmp_path, source):
    inference = {"chunk_shape": [32, 32, 32]}
    arrays = []
    for strategy in ("recompute", "exchange"):
        out = tmp_path / strategy
        keys = inference | {"strategy": strategy}
        job = do_job(job_values(source, out, output=OPEN, inference=keys), tmp_path)
        assert job.config.output.shard_shape == (32, 32, 32)
        arrays.append(read_volume(out))
        shards = list(out.rglob("*.shard"))
        assert len(shards) == job.plan.chunks.count
        assert sum(each.stat().st_size for each in shards) < arrays[0].nbytes / 2
        path = write_job(
            tmp_path / "job.yaml", job_values(source, out, output=OPEN, inference=keys)
        )
        assert main(["verify", str(path), "--deep"]) == 0
    np.testing.assert_array_equal(*arrays)
    plain = tmp_path / "plain"
    do_job(job_values(source, plain, inference=inference), tmp_path)
    np.testing.assert_array_equal(read_volume(plain), arrays[0])


def test_a_job_that_began_with_other_blocks_keeps_them(tmp_path, source, capsys):
    begun = prepare(parse_job(job_values(source, tmp_path / "out"), tmp_path))
    values = job_values(source, tmp_path / "out", output=OPEN)
    again = prepare(parse_job(values, tmp_path))
    assert again.read_job().fingerprint == begun.read_job().fingerprint
    assert again.read_job().config.output.shard_shape is None
    config = parse_job(values, tmp_path)
    earlier = again.read_job()
    assert relocate_job(config, earlier, "state").fingerprint == earlier.fingerprint
    assert main(["status", str(write_job(tmp_path / "job.yaml", values))]) == 0
    assert "0 of 18" in capsys.readouterr().out


def test_a_record_keeps_its_shards_when_chunks_of_the_job_file_do_not_say(tmp_path, source):
    values = job_values(source, tmp_path / "out", output=OPEN)
    first = prepare(parse_job(values, tmp_path)).read_job()
    assert first.config.output.shard_shape == (16, 32, 32)
    recorded = json.loads(first.model_dump_json())["config"]["output"]
    assert (recorded["shard_shape"], recorded["encoding"]) == ([16, 32, 32], "raw")
    stated = job_values(source, tmp_path / "out", output={"shard_shape": [16, 32, 32]})
    assert prepare(parse_job(stated, tmp_path)).read_job().fingerprint == first.fingerprint


@pytest.mark.parametrize("shard_shape", [None, (16, 16, 16), (32, 32, 64)])
def test_an_existing_volume_keeps_its_blocks(tmp_path, source, shard_shape):
    write_volume(
        tmp_path / "out",
        np.zeros(SHAPE, np.float32),
        block_shape=(16, 16, 16),
        shard_shape=shard_shape,
    )
    job = planned(source, tmp_path, inference={"chunk_shape": [32, 64, 64]})
    assert (job.output_exists, job.output.shard_shape) == (True, shard_shape)


def test_an_existing_volume_with_other_shards_than_asked_for_is_refused(tmp_path, source):
    write_volume(tmp_path / "out", np.zeros(SHAPE, np.float32), block_shape=(16, 16, 16))
    with pytest.raises(VolumeError, match=r"shard_shape is None, the job says \[16, 32, 32\]"):
        planned(source, tmp_path, output={"shard_shape": [16, 32, 32]})
