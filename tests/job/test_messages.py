"""What a launch tells its workers."""

from dataclasses import replace

import pytest

from beam_inference.errors import WorkerFault
from beam_inference.job.messages import Launch, check_versions, own_versions
from beam_inference.models.trust import Trust


def test_a_worker_with_other_versions_refuses_to_work():
    launch = Launch(
        job="{}",
        state_url="file:///nowhere",
        id="launch",
        honour_receipts=True,
        trust=Trust.NOTHING,
        threads_per_process=1,
        contract_checked=True,
    )
    check_versions(launch.versions)
    assert own_versions().startswith("beam-inference ")
    other = replace(launch, versions="beam-inference 0.0.1, apache-beam 2.50.0")
    with pytest.raises(WorkerFault, match=r"made with beam-inference 0\.0\.1, .* this worker on"):
        check_versions(other.versions)
