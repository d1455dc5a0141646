import re
import threading
import time
from datetime import UTC, datetime

import pytest
import tenacity
from fakes.receipts import resolved

from beam_inference.errors import StateError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER
from beam_inference.job.records import (
    ChannelStatistics,
    DamagedRecord,
    LaunchSummary,
    Part,
    QuarantineRecord,
    Receipt,
)
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.runs import missing_runs
from beam_inference.job.state import State, StopRequest
from beam_inference.volumes.kvstores import open_kvstore

CHANNEL = ChannelStatistics(min=0, max=1, mean=0.5, zeros=1, nans=0)


def receipt(chunk, job=None, **changes):
    job = job or resolved()
    values = {
        "chunk": chunk,
        "parts": [
            Part(
                box=(
                    job.plan.chunks.core_box(chunk)
                    if chunk < job.plan.chunks.count
                    else BoundingBox((0,) * 3, (1,) * 3)
                ),
                crc32=7,
                channels=[CHANNEL],
            )
        ],
        "batch_size": 1,
        "uniform_patches": 0,
        "seconds": {},
        "attempts": {},
        "finished_at": datetime(2026, 1, 1, tzinfo=UTC),
        "worker": "host:1",
        "launch": "a",
        "fingerprint": job.fingerprint,
    }
    return Receipt(**values | changes)


def quarantine(chunk, job=None):
    job = job or resolved()
    box = job.plan.chunks.core_box(chunk)
    return QuarantineRecord(
        chunk=chunk,
        box=box,
        input_box=box,
        stage="read",
        cause="corrupt",
        attempts=3,
        launch="a",
        fingerprint=job.fingerprint,
    )


@pytest.fixture
def state(tmp_path):
    return State(f"file://{tmp_path}/state").of(resolved())


def receipts_folder(tmp_path):
    return tmp_path / "state/receipts" / resolved().fingerprint[:16] / "000000000"


def test_the_resolved_job_is_written_once(state):
    assert state.load_job() is None
    first = resolved()
    second = resolved(inference={"batch_size": 5})
    assert state.create_job(first) == first
    assert state.create_job(second) == first
    assert state.load_job().fingerprint == first.fingerprint


def test_receipts_are_listed_by_range_across_folders(state):
    chunks = [0, 3, CHUNKS_PER_FOLDER - 1, CHUNKS_PER_FOLDER, 3 * CHUNKS_PER_FOLDER + 5]
    for chunk in chunks:
        state.write_receipt(receipt(chunk))
    assert list(state.receipt_indices(0, 10**7)) == chunks
    assert list(state.receipt_indices(1, CHUNKS_PER_FOLDER)) == chunks[1:3]
    assert state.read_receipts(range(4)) == [receipt(0), receipt(3)]
    assert state.read_receipts([4]) == []
    assert list(missing_runs((0, 5), state, 8)) == [(1, 2, 4)]


def test_a_receipt_supersedes_a_quarantine_record(state):
    state.write_quarantine(quarantine(2))
    state.write_quarantine(quarantine(5))
    assert [r.chunk for r in state.read_quarantined(0, 64)] == [2, 5]
    state.write_receipt(receipt(2))
    assert [r.chunk for r in state.read_quarantined(0, 64)] == [5]


def test_a_writer_that_was_killed_leaves_no_receipt(state, tmp_path):
    state.write_receipt(receipt(1))
    folder = receipts_folder(tmp_path)
    (folder / "000000000002.json.__lock").write_text("torn")
    assert list(state.receipt_indices(0, 100)) == [1]


def test_receipts_in_folders_of_their_own_are_not_listed(state, tmp_path):
    state.write_receipt(receipt(1))
    folder = receipts_folder(tmp_path)
    text = (folder / "000000000001.json").read_bytes()
    for place in ("000000000001.d/000000000002.json", "000000000001.d/000000000001.json"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_bytes(text)
    assert list(state.receipt_indices(0, 100)) == [1]
    assert state.count_receipts(0, 100) == 1


def part(**changes):
    """The part of chunk 1, with what cannot be."""
    values = {"box": resolved().plan.chunks.core_box(1), "crc32": 7, "channels": [CHANNEL]}
    return {"parts": [Part.model_construct(**values | changes)]}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"batch_size": -1}, id="batch"),
        pytest.param({"uniform_patches": -1}, id="patches"),
        pytest.param({"patches_beyond_bound": 10**400}, id="bound"),
        pytest.param({"seconds": {"read": 1e308}}, id="seconds"),
        pytest.param({"attempts": {"read": -1}}, id="attempts"),
        pytest.param(part(crc32=-1), id="crc32"),
        pytest.param(part(channels=[]), id="no channels"),
        pytest.param(part(channels=[CHANNEL] * 2), id="more channels"),
    ],
)
def test_a_receipt_of_figures_that_no_launch_writes_is_damaged(state, changes):
    state.write_receipt(receipt(1).model_copy(update=changes))
    [damaged] = state.scan_receipts([1])
    assert isinstance(damaged, DamagedRecord)


def test_receipts_are_read_in_their_order_however_few_at_a_time(state, monkeypatch):
    monkeypatch.setattr("beam_inference.job.chunk_records._READS_AT_A_TIME", 5)
    for chunk in range(0, 64, 2):
        state.write_receipt(receipt(chunk))
    assert [each.chunk for each in state.scan_receipts(range(64))] == [*range(0, 64, 2)]


def test_a_record_of_gigabytes_that_takes_no_room_on_the_disk(state, tmp_path):
    state.write_receipt(receipt(1))
    with (receipts_folder(tmp_path) / "000000000001.json").open("r+b") as file:
        file.truncate(3 << 30)
    [damaged] = state.scan_receipts([1])
    assert "it has 3,221,225,472 bytes, more than any record" in damaged.message
    state.remove_damaged_receipt(damaged)
    assert not list(state.scan_receipts([1]))
    with (tmp_path / "state" / "shards.json").open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(WorkerFault, match="it has 3,221,225,472 bytes, more than anything"):
        state.read_shard_count()


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{}", b"[]", b"\xff", b""])
def test_a_damaged_fault(state, tmp_path, text):
    state.write_fault("cannot be opened\nERROR by itself")
    assert state.read_fault() == "cannot be opened ERROR by itself"
    (tmp_path / "state" / "fault.json").write_bytes(text)
    assert state.read_fault() == "its fault.json is damaged"


def test_a_damaged_receipt_is_named(state, tmp_path):
    state.write_receipt(receipt(1))
    path = receipts_folder(tmp_path) / "000000000001.json"
    path.write_text(path.read_text()[:40])
    assert state.read_receipts(range(10)) == []
    [damaged] = state.scan_receipts(range(10))
    assert damaged.chunk == 1
    assert re.search(
        "000000000001.json cannot be believed .* does its chunk again", damaged.message
    )


def test_a_damaged_receipt_is_not_removed_once_its_chunk_was_done_again(state, tmp_path):
    """Else the last of two workers that have seen it would take the first one's receipt away."""
    state.write_receipt(receipt(3))
    [path] = tmp_path.rglob("*3.json")
    path.write_text("{")
    [damaged] = state.scan_receipts([3])
    state.write_receipt(receipt(3))
    state.remove_damaged_receipt(damaged)
    assert [each.chunk for each in state.read_receipts([3])] == [3]
    path.write_text("{")
    [damaged] = state.scan_receipts([3])
    state.remove_damaged_receipt(damaged)
    assert not list(state.scan_receipts([3]))
    state.remove_damaged_receipt(damaged)


def test_a_damaged_job_is_named(state, tmp_path):
    state.create_job(resolved())
    (tmp_path / "state/job.json").write_text("{}")
    with pytest.raises(StateError, match="--overwrite"):
        state.load_job()


def test_a_job_whose_numbers_were_changed_is_not_believed(state, tmp_path):
    """What a launch has decided is known from there alone: a flipped bit would go unseen."""
    state.create_job(resolved())
    path = tmp_path / "state/job.json"
    text = path.read_text()
    assert '"batch_size": 2' in text
    path.write_text(text.replace('"batch_size": 2', '"batch_size": 3'))
    with pytest.raises(StateError, match="does not fit its seal"):
        state.load_job()


def test_a_job_of_a_version_without_seals_is_read(state, tmp_path):
    job = state.create_job(resolved())
    (tmp_path / "state/job.json").write_text(job.model_dump_json(indent=1))
    assert state.load_job() == job


def test_launch_notes_and_clearing(state):
    assert not state.has_stop_request("a")
    state.request_stop("a")
    assert state.has_stop_request("a")
    assert not state.has_stop_request("b")
    summary = LaunchSummary(done=1, skipped=2, quarantined=3)
    state.write_summary("a", summary)
    assert state.read_summary("a") == summary
    state.write_receipt(receipt(1))
    state.clear()
    assert list(state.receipt_indices(0, 100)) == []
    assert state.read_summary("a") is None


def test_clearing_deletes_only_what_the_state_has_written(state, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "data.txt").write_text("somebody's")
    state.create_job(resolved())
    state.write_receipt(receipt(1))
    state.write_quarantine_file([quarantine(2)])
    state.clear()
    assert [p for p in (tmp_path / "state").rglob("*") if p.is_file()] == [
        tmp_path / "state" / "data.txt"
    ]


def test_receipts_of_another_job_in_the_same_folder_do_not_count(state):
    other = resolved(model={"activation": "sigmoid"})
    state.of(other).write_receipt(receipt(1, other))
    assert list(state.receipt_indices(0, 100)) == []
    assert list(state.of(other).receipt_indices(0, 100)) == [1]
    with pytest.raises(ValueError, match="use state.of"):
        list(State(state.url).receipt_indices(0, 100))


class Failed:
    """A request that fails when its result is asked for, as TensorStore's do."""

    def __init__(self, message):
        self._message = message

    def result(self, timeout=None):
        raise ValueError(self._message)


class Flaky:
    """A key-value store of which the first two requests of each kind fail."""

    def __init__(self, store, message):
        self._store = store
        self._message = message
        self._failed = {}

    def spec(self):
        return self._store.spec()

    def __getattr__(self, name):
        def request(*arguments, **options):
            self._failed[name] = self._failed.get(name, 0) + 1
            if self._failed[name] <= 2:
                return Failed(self._message)
            return getattr(self._store, name)(*arguments, **options)

        return request


def over_flaky_store(state, message):
    """The state folder, with its records of the same job, over a store that fails at first."""
    store = Flaky(open_kvstore(state.url), message)
    return State(state.url, job=resolved(), store=store)


def test_passing_trouble_with_the_folder_is_tried_again(state, monkeypatch):
    monkeypatch.setattr(tenacity.nap.time, "sleep", lambda seconds: None)
    state = over_flaky_store(state, "UNAVAILABLE: 503")
    state.write_receipt(receipt(1))
    assert list(state.receipt_indices(0, 100)) == [1]
    assert state.read_receipts([1]) == [receipt(1)]


def test_lasting_trouble_is_the_workers_fault_unless_a_stop_request_is_read(state):
    state = over_flaky_store(state, "PERMISSION_DENIED: 403")
    with pytest.raises(WorkerFault, match="cannot write .* PERMISSION_DENIED"):
        state.write_receipt(receipt(1))
    assert not state.has_stop_request("a")


def test_the_quarantine_file_is_written_and_removed(state, tmp_path):
    state.write_quarantine_file([quarantine(2), quarantine(5)])
    assert len((tmp_path / "state/quarantine.jsonl").read_text().splitlines()) == 2
    state.write_quarantine_file([])
    assert not (tmp_path / "state/quarantine.jsonl").exists()


SAME_BYTES = [
    {
        "job": {
            "attempts": 9,
            "max_failed_chunks": 4,
            "resume": False,
            "run_length": 2,
            "state_path": "elsewhere",
        }
    },
    {"output": {"path": "elsewhere"}},
]
OTHER_BYTES = [
    {"input": {"path": "other"}},
    {"input": {"scale": 1}},
    {"input": {"fill": "constant", "fill_value": 3}},
    {"output": {"dtype": "uint8", "value_range": [0, 1]}},
    {"output": {"format": "zarr3"}},
    {"model": {"activation": "sigmoid"}},
    {"model": {"normalize": "unit"}},
    {"model": {"crop_margin": [1, 1, 1]}},
    {"inference": {"patch_shape": [8, 16, 12]}},
    {"inference": {"patch_overlap": [2, 8, 6]}},
    {"inference": {"batch_size": 3}},
    {"inference": {"seams": "crop"}},
]


@pytest.mark.parametrize("sections", SAME_BYTES)
def test_the_fingerprint_ignores_what_cannot_change_bytes(sections):
    assert resolved(**sections).fingerprint == resolved().fingerprint


@pytest.mark.parametrize("sections", OTHER_BYTES)
def test_the_fingerprint_holds_what_changes_bytes_and_the_difference_is_named(sections):
    other = resolved(**sections)
    assert other.fingerprint != resolved().fingerprint
    key = next(iter(next(iter(sections.values()))))
    assert any(key in line for line in other.differences(resolved()))


def test_the_fingerprint_holds_which_function_of_a_file_makes_the_network():
    one, two = (resolved(model={"path": f"nets.py:{name}"}) for name in ("one", "two"))
    moved = resolved(model={"path": "elsewhere/nets.py:one"})
    assert one.fingerprint == moved.fingerprint != two.fingerprint


def test_the_fingerprint_holds_model_engine_and_geometry():
    base = resolved()
    for change in (
        {"model_sha256": "x"},
        {"engine": {"engine": "torch"}},
        {"input_dtype": "uint16"},
    ):
        other = ResolvedJob.model_validate(base.model_dump() | change)
        assert other.fingerprint != base.fingerprint
    assert resolved((32, 16, 16)).fingerprint != base.fingerprint


def test_the_resolved_job_survives_json_and_pickling():
    import pickle

    job = resolved(roi={"start": [0, 0, 0], "stop": [64, 64, 64], "context": [4, 4, 4]})
    for copy in (
        ResolvedJob.model_validate_json(job.model_dump_json()),
        pickle.loads(pickle.dumps(job)),
    ):
        assert copy.fingerprint == job.fingerprint
        assert copy.plan == job.plan


def test_what_launches_have_left(tmp_path):
    state = State(f"file://{tmp_path}")
    assert state.read_launches() == []
    for launch in ("b", "a", "c"):
        state.note_start(launch)
    state.write_summary("b", LaunchSummary(done=3, skipped=2, quarantined=1))
    state.write_chunks("a", [1, 2])
    state.request_stop("c")
    (tmp_path / "launches" / "d.started").write_text("")
    notes = state.read_launches()
    assert [note.launch for note in notes] == [
        "b",
        "a",
        "c",
    ], "in the order of their start, without a torn one"
    assert [note.summary and note.summary.done for note in notes] == [3, None, None]
    assert [note.stopped for note in notes] == [False, False, True]
    assert all(note.node and note.started <= datetime.now(UTC) for note in notes)


def test_a_request_to_stop_is_looked_up_beside_the_work(tmp_path, monkeypatch):
    """The first call waits for its answer, so that a stopped launch begins nothing."""
    state = State(f"file://{tmp_path}")
    state.request_stop("a")
    assert StopRequest(state, "a")()
    asked = threading.Event()
    answered = threading.Event()
    looks = []

    def look(launch):
        looks.append(launch)
        if len(looks) > 1:
            asked.set()
            assert answered.wait(10)
        return len(looks) > 1

    monkeypatch.setattr(state, "has_stop_request", look)
    request = StopRequest(state, "b")
    assert not request()
    assert not request(), "at most once a second"
    assert looks == ["b"]
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 2)
    assert not request(), "the answer is not waited for"
    assert asked.wait(10)
    assert not request()
    answered.set()
    deadline = time.perf_counter() + 10
    while not request():
        assert time.perf_counter() < deadline
    assert looks == ["b", "b"]
