"""What a worker decides of a job that leaves it open, against what a launch here decides."""

from dataclasses import replace

import pytest
from helpers import job_values, toy, write_job

from beam_inference.errors import (
    ConfigError,
    EngineError,
    ModelContractError,
    StateError,
    WorkerFault,
)
from beam_inference.job.place import Place
from beam_inference.job.state import State
from beam_inference.launch.job_files import load_job
from beam_inference.launch.network_question import (
    WorkerChoice,
    WorkerRefusal,
    answer_question,
    read_answer,
    record_answer,
)
from beam_inference.launch.prepare import prepare

ELSEWHERE = Place(is_this_machine=False)
OPEN = {"device": "auto", "chunk_shape": "auto"}
MEASURED = {"working_set_bytes", "patch_seconds", "versions"}
"""What two trials need not agree on."""


class Worker:
    """Answers questions in this process, and counts them."""

    def __init__(self):
        self.questions = []

    def __call__(self, question):
        self.questions.append(question)
        answer = answer_question(question)
        if isinstance(answer, WorkerRefusal):
            raise answer.error
        return answer


@pytest.fixture
def open_job(volume_in, tmp_path):
    """Writes a job file that leaves open what a worker can decide; returns its path."""

    def make(name="conv", output="out", channels=2, inference=(), **sections):
        values = job_values(
            volume_in,
            tmp_path / output,
            model=toy(name, output_channels=channels, normalize="unit"),
            inference=OPEN | dict(inference),
            **sections,
        )
        return write_job(tmp_path / f"{output}.yaml", values)

    return make


@pytest.mark.parametrize("engine", ["torch", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_worker_decides_what_a_launch_on_its_machine_does(open_job, engine):
    worker = Worker()
    inference = {"engine": engine}
    config = load_job(open_job(inference=inference))
    elsewhere = prepare(config, ELSEWHERE, ask_worker=worker).read_job()
    config = load_job(open_job(output="here", inference=inference), ["inference.threads=1"])
    here = prepare(config).read_job()
    assert len(worker.questions) == 1
    assert worker.questions[0].needs_bound, "the network has no activation"
    assert elsewhere.config.inference == here.config.inference
    changed = set(elsewhere.model_dump()) - {"config"} - MEASURED
    assert {key: getattr(elsewhere, key) for key in changed} == {
        key: getattr(here, key) for key in changed
    }
    assert elsewhere.patch_seconds > 0
    assert elsewhere.working_set_bytes > 0


def test_a_second_launch_asks_nobody(open_job):
    worker = Worker()
    path = open_job()
    first = prepare(load_job(path), ELSEWHERE, ask_worker=worker).read_job()
    second = prepare(load_job(path), ELSEWHERE, ask_worker=worker).read_job()
    without = prepare(load_job(path), ELSEWHERE).read_job()
    assert first.fingerprint == second.fingerprint == without.fingerprint
    assert len(worker.questions) == 1


def test_what_the_job_file_states_is_not_asked(open_job):
    worker = Worker()
    path = open_job(inference={"device": "cpu", "engine": "torch"}, job={})
    config = load_job(path, ["model.prediction_bound=8", f"model.weights={path}"])
    job = prepare(config, ELSEWHERE, ask_worker=worker).read_job()
    assert not worker.questions
    assert job.prediction_bound == 8


def test_a_bound_that_nothing_states_is_found_by_a_worker(open_job):
    worker = Worker()
    path = open_job("same", channels=1, inference={"device": "cpu", "engine": "torch"})
    job = prepare(load_job(path), ELSEWHERE, ask_worker=worker).read_job()
    assert len(worker.questions) == 1
    assert job.prediction_bound is not None


def test_bounds_of_heads_are_found_by_a_worker(open_job):
    path = open_job("conv_heads", inference={"device": "cpu", "engine": "torch"})
    heads = '[{"key": 0, "channels": 2}, {"key": 1, "channels": 1}]'
    changes = [f"model.heads={heads}", "model.output_channels=3", "output.head=0"]
    worker = Worker()
    job = prepare(load_job(path, changes), ELSEWHERE, ask_worker=worker).read_job()
    assert len(worker.questions) == 1
    assert len(job.head_bounds) == 2


@pytest.mark.parametrize(
    ("network", "error"), [("expanded", ModelContractError), ("raises", ModelContractError)]
)
def test_a_wrong_network_gives_the_message_of_a_launch_here(open_job, tmp_path, network, error):
    with pytest.raises(error) as here:
        prepare(load_job(open_job(network)))
    with pytest.raises(error) as elsewhere:
        prepare(load_job(open_job(network)), ELSEWHERE, ask_worker=Worker())
    assert str(elsewhere.value) == str(here.value)
    assert not (tmp_path / "out").exists()


def test_what_a_worker_lacks_is_told_of_the_worker(open_job, tmp_path, volume_in):
    questions = []

    def ask(question):
        questions.append(question)
        (volume_in / "info").rename(tmp_path / "info")  # this worker does not see the input
        answer = answer_question(question)
        assert isinstance(answer, WorkerRefusal)
        raise answer.error

    with pytest.raises(Exception, match=r"on the worker .*: no volume at") as refused:
        prepare(load_job(open_job()), ELSEWHERE, ask_worker=ask)
    assert type(refused.value).__name__ == "VolumeError"
    assert not (tmp_path / "out").exists()


def ask_for(path, *overrides):
    """The question that a launch asks."""
    worker = Worker()
    prepare(load_job(path, overrides), ELSEWHERE, ask_worker=worker)
    return worker.questions[0]


def test_a_worker_of_other_versions_does_not_answer(open_job):
    question = ask_for(open_job())
    with pytest.raises(WorkerFault, match="install the same versions on all workers"):
        answer_question(replace(question, versions="beam-inference 0.0.1"))
    with pytest.raises((WorkerFault, ModelContractError)):
        answer_question(replace(question, model_sha256="0" * 64))


def test_a_question_holds_the_choices_of_the_launcher(open_job):
    config = ask_for(open_job()).read_config()
    assert config.inference.threads == 1
    assert config.inference.chunk_shape != "auto"
    assert config.inference.device == "auto"


def test_an_answer_is_recorded_once_and_read_as_it_was(open_job, tmp_path):
    question = replace(ask_for(open_job()), launch="abc", state_url=f"file://{tmp_path}/state")
    state = State(question.state_url)
    assert read_answer(state, "abc") is None
    record_answer(question)
    answer = read_answer(state, "abc")
    assert isinstance(answer, WorkerChoice)
    file = tmp_path / "state" / "launches" / "abc.answer"
    before = file.stat().st_mtime_ns
    record_answer(question)
    assert file.stat().st_mtime_ns == before
    state.forget_question("abc")
    assert not file.exists()


def test_a_launch_that_was_stopped_gets_no_answer(open_job, tmp_path):
    question = replace(ask_for(open_job()), launch="abc", state_url=f"file://{tmp_path}/state")
    state = State(question.state_url)
    state.request_stop("abc")
    record_answer(question)
    assert read_answer(state, "abc") is None


@pytest.mark.parametrize("text", ['{"host":"h"}', "{}x", '{"host":"h","kind":"OSError"}'])
def test_an_answer_that_cannot_be_believed_is_told(tmp_path, text):
    (tmp_path / "launches").mkdir()
    (tmp_path / "launches" / "one.answer").write_text(text)
    with pytest.raises(StateError, match=r"launches/one.answer"):
        read_answer(State(f"file://{tmp_path}"), "one")


def test_an_error_comes_back_as_the_kind_it_was():
    error = WorkerRefusal(host="h", kind="EngineError", message="no such engine").error
    assert isinstance(error, EngineError)
    assert str(error) == "no such engine"


def test_integers_are_made_where_the_job_is_launched(open_job):
    inference = {"precision": "int8", "engine": "openvino", "batch_size": "auto"}
    with pytest.raises(ConfigError, match="the network is made and tried where you launch"):
        prepare(load_job(open_job(inference=inference)), ELSEWHERE, ask_worker=Worker())


def test_with_mixed_devices_each_launch_asks_for_itself(open_job):
    worker = Worker()
    path = open_job(inference={"mixed_devices": True})
    for _ in range(2):
        prepare(load_job(path), ELSEWHERE, ask_worker=worker)
    assert len(worker.questions) == 2
    with pytest.raises(ConfigError, match="inference.device: auto is not known"):
        prepare(load_job(path), ELSEWHERE)


@pytest.mark.parametrize(
    ("inference", "message"),
    [
        ({"engine": "auto"}, "inference.device: auto, inference.engine: auto are not known"),
        (
            {"device": "cpu", "engine": "auto"},
            "inference.engine: auto is not known before the launch",
        ),
        ({"device": "cuda", "engine": "fastest"}, "inference.engine: fastest is not known"),
        (
            {"device": "cuda", "batch_size": "auto"},
            "inference.batch_size: auto is not known .* determined by a trial",
        ),
    ],
)
def test_where_no_worker_can_be_asked_auto_is_refused(open_job, tmp_path, inference, message):
    with pytest.raises(ConfigError, match=message):
        prepare(load_job(open_job(inference=inference)), ELSEWHERE)
    assert not (tmp_path / "out").exists()
