import numpy as np
import pytest
from fakes.receipts import replace_in_record
from helpers import job_values
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from beam_inference.config.job_file import parse_job
from beam_inference.job.parts import output_spec
from beam_inference.job.records import crc32
from beam_inference.job.verification import verify
from beam_inference.launch.prepare import prepare
from beam_inference.volumes.outputs import open_output
from beam_inference.worker.worker import Worker

in_both_seam_modes = pytest.mark.parametrize("done", ["recompute", "exchange"], indirect=True)


@pytest.fixture(params=["recompute", pytest.param("exchange", marks=pytest.mark.slow)])
def done(request, volume_in, tmp_path):
    values = job_values(volume_in, tmp_path / "out", inference={"seams": request.param})
    worker = Worker(prepare(parse_job(values, tmp_path)))
    chunks = range(worker.job.plan.chunks.count)
    if request.param == "exchange":
        list(worker.sum_chunks(chunks))
        list(worker.merge_seams(chunks))
    else:
        list(worker.infer_chunks(chunks))
    return worker


def receipts_folder(worker, tmp_path):
    return tmp_path / "out/_beam_inference/receipts" / worker.job.fingerprint[:16] / "000000000"


def check(worker, deep=False):
    outputs = {"output": open_output(output_spec(worker.job))} if deep else None
    return verify(worker.job, worker.state, outputs)


def test_all_is_there(done):
    seen = []
    outputs = {"output": open_output(output_spec(done.job))}
    report = verify(done.job, done.state, outputs, seen.append)
    assert report.complete
    assert report.receipts == report.chunks == done.job.plan.chunks.count
    assert seen[-1] == report.chunks


def test_a_missing_receipt_is_named(done, tmp_path):
    (receipts_folder(done, tmp_path) / "000000000003.json").unlink()
    report = check(done)
    assert not report.complete
    assert (report.missing_count, report.missing) == (1, [3])


@in_both_seam_modes
def test_a_changed_voxel_is_found_only_by_looking_deep(done):
    output = open_output(output_spec(done.job))
    box = done.job.plan.chunks.core_box(2)
    changed = output.read(box)
    changed[0, 0, 0, 0] += 1
    output.write(box, changed)
    assert check(done).complete
    report = check(done, deep=True)
    assert not report.complete
    assert len(report.wrong) == 1
    assert report.wrong[0].startswith("chunk 2 ")
    assert "CRC" in report.wrong[0]


@in_both_seam_modes
def test_a_truncated_or_missing_block_is_found(done, tmp_path):
    blocks = sorted((tmp_path / "out").rglob("*-*_*"))
    blocks[0].write_bytes(b"")
    blocks[-1].unlink()
    assert len(check(done, deep=True).wrong) == 2


def test_foreign_receipts_and_boxes_are_found(done, tmp_path):
    folder = receipts_folder(done, tmp_path)
    first = folder / "000000000000.json"
    replace_in_record(first, done.job.fingerprint, "f" * 64)
    second = folder / "000000000001.json"
    replace_in_record(second, '"stop":[', '"stop":[1')
    report = check(done)
    # what is written in the first stage of the exchange is a box of its own
    boxes = {
        "recompute": "[3, -5, 34 to 119, 27, 52)",
        "exchange": "[3, -5, 50 to 119, 27, 52), [3, -5, 34 to 119, 27, 50)",
    }[done.job.config.inference.strategy]
    assert [line.split(": ", 1)[1].partition(" (")[0] for line in report.wrong] == [
        f"its receipt belongs to another job, with fingerprint {'f' * 12}",
        f"its receipt names {boxes}",
    ]


@given(
    hnp.arrays(
        st.sampled_from([np.uint8, np.uint16, np.float32]),
        st.tuples(st.integers(1, 5), st.integers(1, 5)),
    )
)
def test_the_checksum_is_of_values_not_of_memory_layout(array):
    assert (
        crc32(array)
        == crc32(np.asfortranarray(array))
        == crc32(array.astype(array.dtype.newbyteorder(">")))
    )
