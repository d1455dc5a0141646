"""One process doing chunks: retries, quarantine, receipts, and faults of the process itself."""

from pathlib import Path

import numpy as np
import pytest
import tenacity
from fakes.networks import NotingDevice, NumpyNetwork, ScarceDevice
from helpers import OF_RANGE, job_values, read_volume, write_volume

from beam_inference.config.job_file import parse_job
from beam_inference.engines.protocol import AS_COMPUTED
from beam_inference.errors import (
    ModelContractError,
    NonFiniteError,
    TransientReadError,
    WorkerFault,
)
from beam_inference.job.messages import Launch
from beam_inference.job.state import State
from beam_inference.job.verification import verify
from beam_inference.launch.prepare import prepare
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.volume import TransientWriteError, Volume
from beam_inference.worker.chunk_inference import ChunkInference
from beam_inference.worker.process_health import SICK_AFTER
from beam_inference.worker.worker import Worker

TOYS = Path(__file__).parents[1] / "toy_networks.py"


@pytest.fixture
def launch(volume_in, tmp_path):
    def make(**sections) -> Launch:
        values = job_values(volume_in, tmp_path / "out", **sections)
        return prepare(parse_job(values, tmp_path))

    return make


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """Retries without their pauses."""
    monkeypatch.setattr(tenacity.nap.time, "sleep", lambda seconds: None)


def everything(worker):
    return range(worker.job.plan.chunks.count)


def outcomes(worker, indices=None):
    return {
        r.chunk: r.outcome
        for r in worker.infer_chunks(everything(worker) if indices is None else indices)
    }


def test_a_launch_whose_output_was_taken_over_writes_nothing_more(volume_in, tmp_path):
    def values(**model):
        return parse_job(job_values(volume_in, tmp_path / "out", model=model), tmp_path)

    model = {"path": "identity", "output_channels": 1}
    earlier = Worker(prepare(values(**model, normalize={"scale": 0.5})))
    assert outcomes(earlier, [0, 1]) == {0: "done", 1: "done"}
    later = Worker(prepare(values(**model), overwrite=True))
    outcomes(later)
    with pytest.raises(WorkerFault, match="writes nothing more: .* belongs to another job"):
        outcomes(earlier, [2])
    report = verify(later.job, later.state, {"output": open_volume(f"file://{tmp_path}/out")})
    assert report.complete


def fails_on(chunks, times, error, call):
    """``call``, but for these numbers of the calls' order the first ``times`` attempts raise."""
    left = {}

    def wrapped(*arguments):
        key = str(arguments[1:2])
        number = left.setdefault("order", {}).setdefault(key, len(left.get("order", {})))
        if number in chunks and left.get(key, 0) < times:
            left[key] = left.get(key, 0) + 1
            raise error
        return call(*arguments)

    return wrapped


class FaultyInference(ChunkInference):
    """Inference of an opened job that fails where a function of a chunk's work raises."""

    def __init__(self, opened, check):
        super().__init__(
            opened.predictor,
            opened.normalize,
            opened.job.config.model.output_channels,
            opened.batch_size,
            256.0,
        )
        self.check = check

    def infer(self, cutout, work, encoding=AS_COMPUTED, waiting=tuple):
        self.check(work.index)
        return super().infer(cutout, work, encoding, waiting)


def worker_that_fails(launch, check):
    """A worker that calls ``check`` with a chunk's index before each inference."""
    return Worker(launch, make_inference=lambda opened: FaultyInference(opened, check))


def is_complete(worker, output):
    return verify(worker.job, worker.state, {"output": open_volume(f"file://{output}")}).complete


def test_chunks_are_done_with_receipts_that_hold(launch, tmp_path):
    worker = Worker(launch())
    assert set(outcomes(worker).values()) == {"done"}
    array = read_volume(tmp_path / "in")
    np.testing.assert_allclose(read_volume(tmp_path / "out"), array, rtol=0, atol=OF_RANGE)
    [receipt] = worker.state.read_receipts([3])
    box = worker.job.plan.chunks.core_box(3)
    written = read_volume(tmp_path / "out")[(slice(None), *box.slices_in(worker.job.plan.volume))]
    ((statistics,),) = [part.channels for part in receipt.parts]
    assert (statistics.min, statistics.max) == (written.min(), written.max())
    assert statistics.mean == pytest.approx(written.mean())
    assert statistics.zeros == (written == 0).sum()
    assert receipt.attempts == {"read": 1, "infer": 1, "write": 1}
    assert set(receipt.seconds) == {"read", "infer", "write"}
    assert is_complete(worker, tmp_path / "out")


def test_another_worker_of_a_launch_reports_done_chunks_and_another_launch_skips_them(
    launch,
):
    first = launch()
    outcomes(Worker(first), [0, 1])
    assert outcomes(Worker(first), [0, 1, 2]) == {0: "done", 1: "done", 2: "done"}
    assert outcomes(Worker(launch()), [0, 1, 3]) == {0: "skipped", 1: "skipped", 3: "done"}


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("cutout", TransientReadError("ABORTED")),
        ("write", TransientWriteError("UNAVAILABLE")),
    ],
)
def test_every_third_chunk_fails_twice_in_the_stores_and_nobody_notices(
    launch, monkeypatch, tmp_path, target, error
):
    worker = Worker(launch())
    chunks = set(range(0, 100, 3))
    monkeypatch.setattr(Volume, target, fails_on(chunks, 2, error, getattr(Volume, target)))
    assert set(outcomes(worker).values()) == {"done"}
    stage = "read" if target == "cutout" else "write"
    receipts = worker.state.read_receipts(everything(worker))
    attempts = [receipt.attempts[stage] for receipt in receipts]
    assert attempts.count(3) == len(attempts[::3])
    assert attempts.count(1) == len(attempts) - attempts.count(3)
    monkeypatch.undo()
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=0, atol=OF_RANGE
    )


def test_every_third_chunk_fails_twice_in_the_network_and_nobody_notices(launch, tmp_path):
    calls = {}

    def flaky(index):
        calls[index] = calls.get(index, 0) + 1
        if index % 3 == 0 and calls[index] <= 2:
            raise RuntimeError("a passing trouble")

    worker = worker_that_fails(launch(), flaky)
    assert set(outcomes(worker).values()) == {"done"}
    assert all(calls[index] == (3 if index % 3 == 0 else 1) for index in everything(worker))
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=0, atol=OF_RANGE
    )


def test_attempts_used_up_quarantine_the_chunk_with_its_cause(launch, monkeypatch):
    worker = Worker(launch(job={"attempts": 2}))
    monkeypatch.setattr(
        Volume, "cutout", fails_on({1}, 99, TransientReadError("UNAVAILABLE: gone"), Volume.cutout)
    )
    assert list(outcomes(worker).values()).count("quarantined") == 1
    (record,) = worker.state.read_quarantined(0, 1000)
    assert (record.stage, record.attempts, record.cause) == ("read", 2, "UNAVAILABLE: gone")
    assert record.box == worker.job.plan.chunks.core_box(record.chunk)


def test_a_truncated_block_quarantines_exactly_the_chunks_that_read_it(
    launch, tmp_path, monkeypatch
):
    worker = Worker(launch())
    block = next((tmp_path / "in").rglob("2-34_*_3-35"))
    block.write_bytes(block.read_bytes()[:50])
    x, y, z = (tuple(map(int, part.split("-"))) for part in block.name.split("_"))
    plan = worker.job.plan
    readers = {
        index
        for index in everything(worker)
        if all(
            a < stop and b > start
            for (start, stop), a, b in zip(
                (z, y, x),
                plan.work(index).input_box.start,
                plan.work(index).input_box.stop,
                strict=True,
            )
        )
    }
    found = outcomes(worker)
    assert {index for index, outcome in found.items() if outcome == "quarantined"} == readers
    assert 0 < len(readers) < len(found)
    record = next(worker.state.read_quarantined(0, 1000))
    assert record.attempts == 1, "a corrupt block is not tried again"
    assert "FAILED_PRECONDITION" in record.cause


def test_nan_in_the_input_quarantines_the_chunks_that_see_it_and_only_those(tmp_path):
    array = np.ones((40, 64, 64), np.float32)
    array[:8, :8, :8] = np.nan
    write_volume(tmp_path / "in", array)
    worker = Worker(prepare(parse_job(job_values(tmp_path / "in", tmp_path / "out"), tmp_path)))
    found = outcomes(worker)
    assert found[0] == "quarantined"
    assert list(found.values()).count("done") > SICK_AFTER
    assert "512 NaN or infinite voxels" in next(worker.state.read_quarantined(0, 99)).cause


def test_a_network_that_returns_nan_for_some_chunks_quarantines_them(launch):
    def sometimes(index):
        if index % 4 == 1:
            raise NonFiniteError("NaN")

    worker = worker_that_fails(launch(), sometimes)
    found = outcomes(worker)
    assert {i for i, o in found.items() if o == "quarantined"} == {i for i in found if i % 4 == 1}
    assert "for finite input" in next(worker.state.read_quarantined(0, 99)).cause


def test_a_wrong_output_shape_is_the_chunks_fault_and_not_tried_again(launch):
    calls = []

    def sometimes(index):
        calls.append(index)
        if index == 5:
            raise ModelContractError("shape")

    worker = worker_that_fails(launch(), sometimes)
    assert outcomes(worker)[5] == "quarantined"
    assert calls.count(5) == 1


def test_a_process_whose_first_chunks_all_fail_with_a_broken_network_is_sick(launch):
    def broken(batch):
        raise RuntimeError("cuDNN says no")

    worker = Worker(launch(job={"attempts": 1}), predictor=NumpyNetwork(broken))
    with pytest.raises(
        WorkerFault, match="first 3 chunks of this process all failed .* cuDNN says no"
    ):
        outcomes(worker)


def test_bad_first_chunks_of_a_network_that_works_are_quarantined_and_the_rest_is_done(launch):
    """As of a volume that begins with empty sections, on which the network divides by zero."""

    def fails_at_the_start(index):
        if index < 6:
            raise NonFiniteError("NaN")

    worker = worker_that_fails(launch(), fails_at_the_start)
    found = outcomes(worker)
    assert {index for index, outcome in found.items() if outcome == "quarantined"} == set(range(6))
    assert len(found) == worker.job.plan.chunks.count


def test_a_lost_device_is_raised_at_once_and_nothing_is_quarantined(launch):
    def lost(index):
        raise WorkerFault("the device is lost")

    worker = worker_that_fails(launch(), lost)
    with pytest.raises(WorkerFault, match="device is lost"):
        outcomes(worker)
    assert list(worker.state.read_quarantined(0, 1000)) == []


def test_a_write_failure_is_never_the_chunks_fault(launch, monkeypatch):
    worker = Worker(launch(job={"attempts": 2, "io_depth": 1}))
    monkeypatch.setattr(
        Volume, "write", fails_on({1}, 99, TransientWriteError("UNAVAILABLE"), Volume.write)
    )
    with pytest.raises(WorkerFault, match="UNAVAILABLE"):
        outcomes(worker)
    assert list(worker.state.read_quarantined(0, 1000)) == []
    assert list(worker.state.receipt_indices(0, 1000)) == [0]


def test_a_stop_request_is_heard(launch):
    asked = launch()
    worker = Worker(asked)
    worker.state.request_stop(asked.id)
    assert outcomes(worker) == {}
    assert set(outcomes(Worker(launch())).values()) == {"done"}


def test_a_receipt_of_another_job_does_not_count(launch, tmp_path, caplog):
    worker = Worker(launch())
    outcomes(worker, [0])
    path = next((tmp_path / "out/_beam_inference/receipts").rglob("000000000000.json"))
    path.write_text(path.read_text().replace(worker.job.fingerprint, "0" * 64))
    assert outcomes(worker, [0]) == {0: "done"}
    assert "a receipt does not count, its chunk is done again" in caplog.text
    assert worker.state.read_receipts([0])[0].fingerprint == worker.job.fingerprint


def test_a_worker_with_another_engine_refuses_to_mix_results(launch):
    made = launch()
    other = made.job.replace('"engine_version":"1"', '"engine_version":"0"')
    with pytest.raises(WorkerFault, match="this worker's engine is"):
        Worker(Launch(**{**{f: getattr(made, f) for f in made.__dataclass_fields__}, "job": other}))


def test_integer_outputs_are_quantised(launch, tmp_path):
    outcomes(Worker(launch(output={"dtype": "uint8", "value_range": [0, 255]})))
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), read_volume(tmp_path / "in"))


def test_the_state_can_live_elsewhere(launch, tmp_path):
    made = launch(job={"state_path": "elsewhere"})
    outcomes(Worker(made), [0])
    assert list(
        State(f"file://{tmp_path}/elsewhere").of(Worker(made).job).receipt_indices(0, 99)
    ) == [0]
    [owners] = (tmp_path / "out" / "_beam_inference").glob("*.json")
    assert f"file://{tmp_path}/elsewhere" in owners.read_text()


def test_a_batch_that_was_too_much_is_halved_for_good_and_receipts_say_so(launch, tmp_path):
    """The device has no memory for four patches, and says so once."""
    network = NumpyNetwork(largest_batch=2)
    sizes = []

    def predict(batch, forward=network.predict):
        sizes.append(len(batch))
        return forward(batch)

    network.predict = predict
    worker = Worker(launch(inference={"batch_size": 4}), predictor=network)
    sizes.clear()  # calls before the first chunk
    assert set(outcomes(worker).values()) == {"done"}
    assert sizes[0] == 4
    assert set(sizes[1:]) == {2}
    assert {receipt.batch_size for receipt in worker.state.read_receipts(everything(worker))} == {2}
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=0, atol=OF_RANGE
    )
    assert is_complete(worker, tmp_path / "out")


@pytest.mark.parametrize("seams", ["recompute", "exchange"])
def test_cutouts_are_sent_to_the_device_by_the_thread_that_reads_them(launch, tmp_path, seams):
    device = NotingDevice()
    worker = Worker(launch(inference={"seams": seams}), predictor=NumpyNetwork(device=device))
    if seams == "exchange":
        list(worker.sum_chunks(everything(worker)))
        list(worker.merge_seams(everything(worker)))
    else:
        outcomes(worker)
    assert len(device.uploading_threads) > 3
    assert {name.partition("_")[0] for name in device.uploading_threads} == {"read"}
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=0, atol=OF_RANGE
    )
    assert is_complete(worker, tmp_path / "out")


@pytest.mark.parametrize("fails_at", ["upload", "predict", "download"])
def test_what_is_on_the_device_too_early_makes_room_before_a_batch_is_halved(
    launch, tmp_path, fails_at
):
    """A later batch finds no room, half of it would; what was sent ahead is given up first."""
    device = ScarceDevice(fails_at)

    def predict(batch):
        if len(batch) > 2:
            device.need_room("predict")
        return batch

    network = NumpyNetwork(predict, device=device)
    worker = Worker(launch(inference={"batch_size": 4}), predictor=network)
    device.calls = 0  # those before the first chunk
    assert set(outcomes(worker).values()) == {"done"}
    assert device.times_made_room == 1
    assert {receipt.batch_size for receipt in worker.state.read_receipts(everything(worker))} == {4}
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), rtol=0, atol=OF_RANGE
    )


@pytest.mark.parametrize("method", ["sum_chunks", "waiting_chunks", "merge_seams"])
def test_stages_of_an_exchange_are_refused_where_nothing_is_exchanged(launch, method):
    worker = Worker(launch(inference={"seams": "recompute"}))
    with pytest.raises(ValueError, match="chunks of this launch exchange nothing"):
        getattr(worker, method)([0])
