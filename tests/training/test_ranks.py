"""Ranks: what is told where another one has ended."""

import pytest
from torch import distributed

from beam_inference.training.ranks import LostRank, lost_ranks_told


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
