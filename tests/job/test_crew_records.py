"""Claims of workers, and how silence is measured."""

import json

import pytest
from fakes.gcs import GcsStandIn
from fakes.receipts import resolved

from beam_inference.config.storage import Storage
from beam_inference.errors import WorkerFault
from beam_inference.job.crew_records import FoundClaim, SignOfLife, SilenceWatch
from beam_inference.job.state import State


def sign(beat):
    return SignOfLife(
        beat=beat,
        launch="a",
        host="host",
        pid=1,
        engine="torch",
        device="cpu",
        versions="1",
        chunks=3,
        seconds=1.5,
    )


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def crew(folder):
    return State(f"file://{folder}").of(resolved()).crew()


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_one_worker_has_a_stretch_until_it_gives_it_back(crew, folder):
    assert crew.claim("infer", 4, 0, "a")
    assert not crew.claim("infer", 4, 0, "b")
    assert crew.claim("sums", 4, 0, "b")
    assert crew.claimed_numbers("infer", 4, 0, 9) == {0}
    crew.release("infer", 4, 0, "b")
    assert not crew.claim("infer", 4, 0, "b")
    crew.release("infer", 4, 0, "a")
    crew.release("sums", 4, 0, "b")
    assert crew.claimed_numbers("infer", 4, 0, 9) == set()
    assert files(folder) == []


def test_a_claim_whose_answer_was_lost_is_still_its_workers(crew):
    assert crew.claim("infer", 4, 0, "a")
    assert crew.claim("infer", 4, 0, "a")


def test_of_several_that_take_a_claim_over_one_has_it(crew, folder):
    crew.claim("infer", 4, 7, "a")
    found = crew.find_claim("infer", 4, 7)
    assert found.worker == "a"
    assert crew.take_over("infer", 4, 7, found, "b")
    assert not crew.take_over("infer", 4, 7, found, "c")
    crew.release("infer", 4, 7, "a")  # it was slow, and not dead
    assert crew.find_claim("infer", 4, 7).worker == "b"
    crew.give_sign("a-1", sign(1))
    crew.forget_all()
    assert files(folder) == []


@pytest.mark.parametrize("text", ["{", '{"worker": "../../receipts"}', '{"worker": 3}', "\xff"])
def test_a_damaged_claim_belongs_to_nobody_that_gives_signs(crew, folder, text):
    crew.claim("infer", 4, 0, "a")
    next(folder.rglob("claims/*/infer/4/*.json")).write_text(text)
    found = crew.find_claim("infer", 4, 0)
    assert found.worker == ""
    assert crew.take_over("infer", 4, 0, found, "b")


def test_the_first_launch_says_how_many_chunks_are_claimed_at_once(crew, folder):
    assert crew.agree_on_length(6) == 6
    assert crew.agree_on_length(30) == 6
    next(folder.rglob("length.json")).write_text("{}")
    assert crew.agree_on_length(30) == 30


def test_on_an_object_store_the_generation_decides():
    with GcsStandIn(["bucket"]) as gcs:
        url = "gs://bucket/state"
        crew = (
            State(url, Storage.model_validate({"gcs": {"endpoint": gcs.url}})).of(resolved()).crew()
        )
        assert crew.claim("infer", 4, 0, "a")
        assert not crew.claim("infer", 4, 0, "b")
        found = crew.find_claim("infer", 4, 0)
        assert crew.take_over("infer", 4, 0, found, "b")
        crew.release("infer", 4, 0, "b")
        assert crew.find_claim("infer", 4, 0) is None


def test_signs_of_life_are_those_of_present_launches(crew, folder):
    crew.give_sign("a-1", sign(1))
    crew.give_sign("b-1", sign(1))
    (folder / "workers/c-1.json").write_text("{")
    assert crew.read_signs().keys() == {"a-1", "b-1"}
    assert crew.read_signs()["a-1"].chunks_per_second == 2
    crew.forget_launch("a")
    crew.remove_sign("b-1")
    assert crew.read_signs() == {}


def test_a_worker_is_silent_once_its_sign_has_not_changed_for_long():
    now = [1000.0]
    watch = SilenceWatch(60, lambda: now[0])
    assert not watch.is_silent("a", b"1")
    now[0] += 59
    assert not watch.is_silent("a", b"1")
    assert not watch.is_silent("a", b"2")
    now[0] += 59
    assert not watch.is_silent("a", b"2")
    now[0] += 1
    assert watch.is_silent("a", b"2")
    assert not watch.is_silent("a", b"3")
    now[0] += 60
    assert watch.is_silent("a", b"")


def test_many_workers_that_were_killed_at_once_are_silent_at_once():
    now = [1000.0]
    watch = SilenceWatch(60, lambda: now[0])
    watch.begin(lambda: {"a": b"1", "b": b"1"})
    assert not watch.is_silent("a", b"1")
    now[0] += 30
    watch.begin(lambda: pytest.fail("it has begun"))
    assert not watch.is_silent("unknown", b"")
    assert not watch.is_silent("new", b"1")
    now[0] += 30
    assert watch.is_silent("b", b"1")
    assert watch.is_silent("unknown", b"")
    assert not watch.is_silent("never seen before", b"5")
    assert watch.is_silent("that never gave a sign", b"")
    assert not watch.is_silent("new", b"1")


def test_no_link_is_followed_where_claims_are_written(crew, folder, tmp_path):
    outside = tmp_path / "outside"
    (outside / "1").mkdir(parents=True)
    (outside / "1" / "000000000003.json").write_text("precious")
    claims = folder / "claims"
    claims.mkdir(parents=True)
    key = resolved().records_key[:16]
    (claims / key).mkdir()
    (claims / key / "infer").symlink_to(outside)
    for action in (
        lambda: crew.claim("infer", 1, 3, "one-1"),
        lambda: crew.take_over("infer", 1, 3, FoundClaim("", b""), "one-1"),
    ):
        with pytest.raises(WorkerFault, match="infer is a link"):
            action()
    assert files(outside) == ["000000000003.json"]
    assert (outside / "1" / "000000000003.json").read_text() == "precious"


def test_one_worker_does_what_is_done_once(crew):
    assert crew.begin_once("scales")
    assert not crew.begin_once("scales")
    crew.wait_for_end("scales", 0.0)
    crew.end_once("scales")
    crew.wait_for_end("scales", 60.0)


@pytest.mark.parametrize(
    "changes",
    [{"chunks": 10**400}, {"chunks": -1}, {"beat": -1}, {"pid": 2**63}, {"seconds": 1e300}],
    ids=str,
)
def test_a_sign_of_figures_that_no_worker_writes_is_none(crew, folder, changes):
    crew.give_sign("a-1", sign(1))
    assert crew.read_signs().keys() == {"a-1"}
    (file,) = (folder / "workers").iterdir()
    file.write_text(json.dumps(sign(1).model_dump() | changes))
    assert crew.read_signs() == {}


def test_a_sign_is_on_one_line_and_its_rate_is_finite(crew, folder):
    crew.give_sign("a-1", sign(1))
    (file,) = (folder / "workers").iterdir()
    file.write_text(json.dumps(sign(1).model_dump() | {"host": "a\nERROR b", "seconds": 5e-324}))
    assert crew.read_signs()["a-1"].host == "a ERROR b"
    assert crew.read_signs()["a-1"].chunks_per_second is None
