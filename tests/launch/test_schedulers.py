import pytest

from beam_inference.errors import ConfigError
from beam_inference.job.shards import Shard
from beam_inference.launch.schedulers import shard_of_scheduler


def slurm(number, first, last, step, count):
    values = {"ID": number, "MIN": first, "MAX": last, "STEP": step, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("environment", "shard"),
    [
        (slurm(0, 0, 6, 1, 7), Shard(0, 7)),
        (slurm(6, 0, 6, 1, 7), Shard(6, 7)),
        (slurm(7, 1, 7, 1, 7), Shard(6, 7)),
        (slurm(18, 10, 22, 4, 4), Shard(2, 4)),
        (slurm(5, 5, 5, 1, 1), Shard(0, 1)),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ARRAY_SIZE": "8"}, Shard(3, 8)),
        ({"BATCH_TASK_INDEX": "3", "BATCH_TASK_COUNT": "4"}, Shard(3, 4)),
    ],
)
def test_what_schedulers_say(environment, shard):
    assert shard_of_scheduler({"HOME": "/", **environment}) == shard


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "is no task of an array"),
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": ""}, "is no task of an array"),
        ({"JOB_COMPLETION_INDEX": "3"}, "not how many there are"),
        ({"BATCH_TASK_INDEX": "3"}, "BATCH_TASK_COUNT is ''"),
        ({"BATCH_TASK_INDEX": "4", "BATCH_TASK_COUNT": "4"}, "shard 4 of 4, which there is not"),
        ({"BATCH_TASK_INDEX": "-1", "BATCH_TASK_COUNT": "4"}, "BATCH_TASK_INDEX is '-1'"),
        (slurm(3, 1, 9, 1, 3), "do not lie 1 apart"),
        (slurm(3, 1, 9, 0, 3), "do not lie 0 apart"),
        (
            {"BATCH_TASK_INDEX": "0", "BATCH_TASK_COUNT": "4"} | slurm(0, 0, 6, 1, 7),
            "are both set",
        ),
    ],
)
def test_what_does_not_tell_the_shard(environment, message):
    with pytest.raises(ConfigError, match=message):
        shard_of_scheduler(environment)
