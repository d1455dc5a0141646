"""Test the short pipeline by which a launch asks a worker about its network."""

import time

import pytest
from apache_beam.options.pipeline_options import GoogleCloudOptions, WorkerOptions
from helpers import DATAFLOW, job_values, toy, write_job

from beam_inference.beam.flags import beam_options
from beam_inference.errors import AskedToStop, ModelContractError, RunnerError
from beam_inference.job.place import Place
from beam_inference.job.state import State
from beam_inference.launch.ask_worker import ask_worker, options_for_one_worker
from beam_inference.launch.job_files import load_job
from beam_inference.launch.network_question import NetworkQuestion
from beam_inference.launch.prepare import prepare

ELSEWHERE = Place(is_this_machine=False)


@pytest.fixture
def config(volume_in, tmp_path):
    """A job that leaves its device open, with a network that counts its calls."""

    def make(network="position", **keys):
        model = toy(network, output_channels=2, **keys)
        inference = {"device": "auto", "engine": "torch"}
        values = job_values(volume_in, tmp_path / "out", model=model, inference=inference)
        return load_job(write_job(tmp_path / "job.yaml", values))

    return make


def ask(question, **keys):
    return ask_worker(question, beam_options(()), **keys)


def test_the_answer_of_a_pipeline_becomes_the_job(config, tmp_path, capsys):
    job = prepare(config(), ELSEWHERE, ask_worker=ask).read_job()
    assert job.config.inference.device == "cpu"
    assert job.prediction_bound is not None
    told = capsys.readouterr().err
    assert "device: cpu, engine: torch, batch_size: 2" in told
    assert not list((tmp_path / "out/_beam_inference/launches").glob("*.answer"))


def test_a_mistake_leaves_no_folder_behind(config, tmp_path):
    with pytest.raises(ModelContractError, match="output_channels"):
        prepare(config("expanded"), ELSEWHERE, ask_worker=ask)
    assert not (tmp_path / "out").exists()


def test_what_a_launch_that_died_has_left_is_ignored(config, tmp_path):
    left = tmp_path / "out/_beam_inference/launches/0123456789ab.answer"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    job = prepare(config(), ELSEWHERE, ask_worker=ask).read_job()
    assert job.config.inference.device == "cpu"
    assert [note.launch for note in State(f"file://{tmp_path}/out/_beam_inference").read_launches()]
    assert left.exists()


def test_folders_that_were_there_stay(config, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelContractError, match="output_channels"):
        prepare(config("expanded"), ELSEWHERE, ask_worker=ask)
    assert not list((tmp_path / "out").iterdir())


def test_a_pipeline_without_an_answer_is_told_and_creates_nothing(config, tmp_path):
    def ask_wrongly(question: NetworkQuestion):
        object.__setattr__(question, "versions", "beam-inference 0.0.1")
        return ask(question)

    with pytest.raises(RunnerError, match="could not be tried on a worker: the launch was made"):
        prepare(config(), ELSEWHERE, ask_worker=ask_wrongly)
    assert not (tmp_path / "out").exists()


def test_a_launch_whose_time_is_over_waits_for_no_worker(config, tmp_path):
    with pytest.raises(AskedToStop):
        prepare(
            config(),
            ELSEWHERE,
            ask_worker=lambda question: ask(question, deadline=time.monotonic()),
        )
    assert not (tmp_path / "out").exists()


def test_the_options_of_the_job_itself_stay_as_they_are():
    options = beam_options([*DATAFLOW, "--job_name=mine", "--num_workers=8", "--max_num_workers=9"])
    own = options_for_one_worker(options)
    assert own.view_as(GoogleCloudOptions).job_name == "mine-trial"
    assert own.view_as(WorkerOptions).max_num_workers == 1
    assert own.view_as(WorkerOptions).num_workers == 1
    assert options.view_as(GoogleCloudOptions).job_name == "mine"
    assert options.view_as(WorkerOptions).max_num_workers == 9
