"""What several of these tests need."""

import pytest
from fakes.flink_rest import FlinkStandIn


@pytest.fixture
def flink():
    """A stand-in for a Flink cluster."""
    with FlinkStandIn() as stand_in:
        yield stand_in
