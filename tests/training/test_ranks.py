"""Ranks: what is told where another one has ended."""

import pytest
import torch
from torch import distributed

from beam_inference.errors import ConfigError
from beam_inference.training.ranks import LostRank, join_ranks, lost_ranks_told


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed"),
        distributed.DistBackendError("NCCL error"),
    ],
)
def test_errors_between_ranks_are_of_the_rank_that_ended(error):
    with pytest.raises(LostRank, match="its own message says why"), lost_ranks_told():
        raise error


def test_other_errors_stay():
    with pytest.raises(RuntimeError, match="size mismatch"), lost_ranks_told():
        raise RuntimeError("size mismatch")


def test_more_ranks_than_gpus_are_refused_before_any_waits_for_another(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(ConfigError, match="2 ranks on this machine, of whose GPUs PyTorch sees 1"),
        join_ranks(torch.device("cuda"), (1, 1, 1)),
    ):
        pass
