"""State folders that earlier versions wrote are gone on with, or refused with the reason.

``written_by_7b7144c`` holds, for each seam mode, a job and its output as that version left it: one
block of the input could not be read, so six of eight chunks are done and two are in quarantine.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from fakes.gcs import GcsStandIn
from helpers import write_volume

from beam_inference.cli.main import main
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError
from beam_inference.launch.job_files import load_job
from beam_inference.launch.run_job import run_job
from beam_inference.volumes.opening import open_volume

WRITTEN = Path(__file__).parent / "written_by_7b7144c"


def put_folder(gcs, folder, name):
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            gcs.put("bucket", f"{name}/{path.relative_to(folder)}", path.read_bytes())


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The volume that the jobs read, whole, on a stand-in for Google's store."""
    array = np.random.default_rng(0).integers(0, 256, (24, 64, 64), dtype=np.uint8)
    write_volume(tmp_path / "in", array, (3, -5, 2), block_shape=(16, 16, 16))
    with GcsStandIn(["bucket"]) as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        put_folder(gcs, tmp_path / "in", "in")
        yield gcs


def read(gcs, url):
    volume = open_volume(url, storage=Storage.model_validate({"gcs": {"endpoint": gcs.url}}))
    return volume.read(volume.bounds)


@pytest.mark.parametrize("seams", [pytest.param("recompute", marks=pytest.mark.slow), "exchange"])
def test_a_job_of_7b7144c_is_refused_with_the_reason_and_begun_anew(seams, bucket, tmp_path):
    """Its patches were added up in an order of their own: other bits."""
    path = tmp_path / "job.yaml"
    shutil.copy(WRITTEN / seams / "job.yaml", path)
    put_folder(bucket, WRITTEN / seams / "out", "out")
    assert main(["status", str(path)]) == 0
    before = read(bucket, "gs://bucket/out")
    with pytest.raises(StateError, match="(?s)version 4 of the rules .* version 5, .* --overwrite"):
        run_job(load_job(path))
    np.testing.assert_array_equal(read(bucket, "gs://bucket/out"), before)

    outcome = run_job(load_job(path), overwrite=True)
    assert (outcome.exit_code, outcome.done, outcome.missing_of_job) == (0, 8, 0)
    anew = run_job(load_job(path, ["output.path=gs://bucket/anew"]))
    assert anew.exit_code == 0
    np.testing.assert_array_equal(read(bucket, "gs://bucket/out"), read(bucket, "gs://bucket/anew"))
