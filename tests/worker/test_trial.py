"""Test what a trial says of a network on a job's own input."""

import logging

import pytest
from helpers import job_values

from beam_inference.config.definite import EngineSettings, make_definite
from beam_inference.config.job_file import parse_job
from beam_inference.engines.identity import identity_predictor
from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.predictor import Predictor
from beam_inference.errors import DeviceOutOfMemory, ModelContractError
from beam_inference.job.place import THIS_PROCESS
from beam_inference.launch.planned_job import plan_job
from beam_inference.worker.trial import try_network


@pytest.mark.parametrize("partition", [[1, 1, 1], [1, 1, 2]])
def test_too_little_memory_for_a_comparison(partition, volume_in, tmp_path, caplog):
    """A network is divided because it does not fit undivided: that is told, and not refused."""

    def predict(batch):
        raise DeviceOutOfMemory("can't allocate 12 bytes")

    values = job_values(volume_in, tmp_path / "out")
    values["inference"] |= {"partition": partition, "engine": "torch", "device": "cpu"}
    planned = plan_job(parse_job(values, tmp_path), THIS_PROCESS, 1, None)
    engine = EngineSettings("torch", "contiguous", 1)
    config = make_definite(planned.config, planned.settings, engine)
    predictor = identity_predictor()
    reference = Predictor(NumpyDevice(), predict, predictor.description)
    arguments = predictor, config, planned.input, planned.plan, reference
    if partition == [1, 1, 1]:
        with pytest.raises(ModelContractError, match="out of memory for 1 patches a batch in PyT"):
            try_network(*arguments)
        return
    with caplog.at_level(logging.WARNING):
        assert try_network(*arguments).difference is None
    assert "was not compared" in caplog.text
    assert "can't allocate 12 bytes" in caplog.text
