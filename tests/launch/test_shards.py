import signal

import numpy as np
import pytest
from helpers import POSITION, job_values, launch_of, read_volume, write_job

from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError, StateError
from beam_inference.job.shards import Shard
from beam_inference.launch.run_job import run_job
from beam_inference.launch.shards import finish_job, prepare_shards
from beam_inference.worker.worker import Worker


@pytest.fixture
def path(volume_in, tmp_path):
    """A job of 18 chunks whose network notices any error of geometry."""

    def write(**sections):
        values = job_values(volume_in, tmp_path / "out", **{"model": POSITION, **sections})
        return str(write_job(tmp_path / "job.yaml", values))

    return write


@pytest.fixture
def undisturbed(volume_in, tmp_path):
    list(Worker(launch_of(volume_in, tmp_path / "whole", "recompute")).infer_chunks(range(18)))
    return read_volume(tmp_path / "whole")


@pytest.mark.parametrize("seams", [pytest.param("recompute", marks=pytest.mark.slow), "exchange"])
def test_shards_in_any_order_give_the_bytes_of_one_run(path, undisturbed, tmp_path, seams, capsys):
    job = path(inference={"seams": seams}, output={"pyramid": {}})
    assert main(["prepare", job, "--shards", "2"]) == 0
    assert main(["run", job, "--shard=1/2"]) == 0
    assert "share done, job not complete" in capsys.readouterr().out
    assert main(["finish", job]) == 2
    assert "1 of 2 shards have not come to their end: 0/2" in capsys.readouterr().err
    assert main(["status", job]) == 0
    assert "1 of 2 shards have come to their end" in capsys.readouterr().out
    assert main(["run", job, "--shard=0/2"]) == 0
    assert main(["finish", job, "--deep"]) == main(["finish", job]) == 0
    assert "(0 by this launch)" in capsys.readouterr().out, "what is done is not done again"
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), undisturbed)
    assert not list((tmp_path / "out" / "_beam_inference").glob("seams/**/*.json"))


def test_a_shard_that_is_done_says_so_without_a_pipeline(path, tmp_path, capsys):
    job = path()
    assert main(["prepare", job, "--shards", "20"]) == 0
    for index in (3, 3):
        assert main(["run", job, "--shard", f"{index}/20"]) == 0
    assert "1 of 1 chunks done" in capsys.readouterr().out
    assert main(["run", job, "--shard", "0/20", "--json"]) == 0, "it has no chunk"
    assert '"shard": "0/20"' in capsys.readouterr().out


def test_another_number_of_shards_is_refused(path, capsys):
    job = path()
    assert main(["run", job, "--shard", "0/7"]) == 2
    assert "prepare JOB.YAML --shards 7" in capsys.readouterr().err
    assert main(["prepare", job, "--shards", "7"]) == main(["prepare", job, "--shards", "7"]) == 0
    assert main(["run", job, "--shard", "0/8"]) == 2
    assert "was prepared for 7 shards" in capsys.readouterr().err
    assert main(["prepare", job, "--shards", "8"]) == 2
    assert "pass --resplit" in capsys.readouterr().err
    assert main(["prepare", job, "--shards", "1000000000"]) == 2
    assert "from 1 to 1,000,000" in capsys.readouterr().err
    assert main(["prepare", job, "--shards", "8", "--resplit"]) == 0
    assert main(["run", job, "--shard", "0/7"]) == 2


def test_choices_that_contradict_each_other_are_refused(path, tmp_path):
    config = parse_job(job_values(tmp_path / "in", tmp_path / "out"), tmp_path)
    for keys in ({"overwrite": True}, {"sample": (0.5, 0)}, {"chunks": ["3"]}):
        with pytest.raises(ConfigError, match="--shard"):
            run_job(config, shard=Shard(0, 7), **keys)
    with pytest.raises(StateError, match="nothing to finish"):
        finish_job(config)
    with pytest.raises(ConfigError, match=r"job\.resume is false"):
        prepare_shards(
            parse_job(
                job_values(tmp_path / "in", tmp_path / "out", job={"resume": False}), tmp_path
            ),
            7,
        )
    assert run_job(config).exit_code == 0
    with pytest.raises(StateError, match="says of no shards"):
        finish_job(config)


@pytest.mark.parametrize("word", ["7/7", "-1/7", "1/0", "1", "a/b", "1/7/9", "", "٣/٧"])
def test_what_is_no_shard(path, word, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", path(), f"--shard={word}"])
    assert ended.value.code == 2
    assert "is not a shard I/N" in capsys.readouterr().err


def test_a_damaged_record_of_the_shards_is_told(path, tmp_path, capsys):
    job = path()
    assert main(["prepare", job, "--shards", "7"]) == 0
    (tmp_path / "out" / "_beam_inference" / "shards.json").write_text('{"shards": "many"}')
    for command in (
        ["run", job, "--shard", "0/7"],
        ["finish", job],
        ["prepare", job, "--shards=7"],
    ):
        assert main(command) == 2
        assert "shards.json is damaged" in capsys.readouterr().err
    assert main(["prepare", job, "--shards", "7", "--resplit"]) == 0


def test_a_shard_whose_time_is_over_ends_with_75(path, tmp_path, capsys):
    job = path()
    assert main(["prepare", job, "--shards", "1"]) == 0
    config = parse_job(job_values(tmp_path / "in", tmp_path / "out", model=POSITION), tmp_path)
    outcome = run_job(config, shard=Shard(0, 1), stop_after=1e-9)
    assert outcome.exit_code == 75
    assert outcome.missing > 0
    assert main(["finish", job]) == 2
    assert main(["run", job, "--shard", "0/1"]) == 0
    assert main(["finish", job]) == 0


@pytest.mark.parametrize(
    ("number", "flags", "code"),
    [
        (signal.SIGUSR1, ["--stop_after=1h"], 75),
        (signal.SIGTERM, ["--stop_after=1h"], 75),
        (signal.SIGUSR1, [], 130),
        (signal.SIGINT, ["--stop_after=1h"], 130),
    ],
)
def test_signals_end_a_launch_before_its_pipeline(path, tmp_path, number, flags, code):
    # The signal may reach another thread first, and its handler run later than kill() returns.
    network = tmp_path / "network.py"
    network.write_text(
        "import os, time\n"
        "def make():\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    for _ in range(600):\n"
        "        time.sleep(0.1)\n"
    )
    assert main(["run", path(model={"path": f"{network}:make"}), *flags]) == code


@pytest.mark.parametrize("word", ["3h50", "50", "-1h", "0s", "1h 5m", "", "5m3h", "9999999d"])
def test_what_is_no_time(path, word, capsys):
    with pytest.raises(SystemExit):
        main(["run", path(), f"--stop_after={word}"])
    assert "is not a time such as 3h50m" in capsys.readouterr().err
