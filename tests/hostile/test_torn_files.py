"""Plant a torn file of every kind between two launches.

Each is noticed, and either mended by the next launch or refused by name; in the end the output has
the bytes of an undisturbed run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers import files_of, job_values, write_job, write_levels, write_volume

from beam_inference.cli.main import main
from beam_inference.job.crew_records import SignOfLife
from beam_inference.job.state import State
from beam_inference.launch.job_files import load_job
from beam_inference.launch.prepare import prepare
from beam_inference.worker.worker import Worker

Tear = Callable[[bytes], bytes]
TEARS: dict[str, Tear] = {
    "cut": lambda content: content[: len(content) // 2],
    "tail": lambda content: content + b'"}]',
    "empty": lambda content: b"",
}


@pytest.fixture(
    params=["cut", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tail", "empty"))]
)
def tear(request: pytest.FixtureRequest) -> Tear:
    """How a file is torn."""
    return TEARS[request.param]


def _tear_all(folder: Path, pattern: str, tear: Tear) -> list[Path]:
    """Tear every third file of a folder."""
    torn = sorted(path for path in folder.rglob(pattern) if path.is_file())[::3]
    assert torn
    for path in torn:
        path.write_bytes(tear(path.read_bytes()))
    return torn


def _undisturbed(path: str, output: Path) -> dict[str, bytes]:
    """The files of an undisturbed run, whose output and state are then removed."""
    assert main(["run", path]) == 0
    files = files_of(output)
    shutil.rmtree(output)
    return files


@dataclass(frozen=True)
class CompleteJob:
    """A job that was run undisturbed, in a place that tests may damage.

    Attributes:
        path: of the job file.
        output: where the volume lies, with its state.
        files: of the undisturbed output.
    """

    path: str
    output: Path
    files: dict[str, bytes]

    @property
    def state(self) -> Path:
        """The state folder."""
        return self.output / "_beam_inference"


@pytest.fixture(scope="module")
def complete_jobs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], CompleteJob]:
    """A function that puts back a complete job, of a seam mode; each is run once for all tests."""
    folder = tmp_path_factory.mktemp("complete")
    array = np.random.default_rng(0).integers(0, 256, (40, 70, 50), dtype=np.uint8)
    write_volume(folder / "in", array, (3, -5, 2))

    def put_back(seams: str) -> CompleteJob:
        output = folder / seams
        kept = folder / f"{seams}, kept"
        values = job_values(folder / "in", output, inference={"seams": seams})
        path = str(write_job(folder / f"{seams}.yaml", values))
        if not kept.exists():
            assert main(["run", path]) == 0
            shutil.copytree(output, kept)
        shutil.rmtree(output, ignore_errors=True)
        # a thread of an earlier launch may still remove its sign of life there
        shutil.copytree(kept, output, dirs_exist_ok=True)
        return CompleteJob(path, output, files_of(output))

    return put_back


@pytest.fixture
def complete(complete_jobs: Callable[[str], CompleteJob]) -> CompleteJob:
    """A complete job with seams by exchange."""
    return complete_jobs("exchange")


@pytest.mark.parametrize("folder", ["sums", "seams"])
def test_first_stage_receipts_and_seam_files(
    complete: CompleteJob, tear: Tear, folder: str
) -> None:
    path = complete.path
    shutil.rmtree(complete.output)
    worker = Worker(prepare(load_job(path)))
    list(worker.sum_chunks(range(worker.job.plan.chunks.count)))
    _tear_all(complete.state / folder, "*", tear)
    assert main(["run", path]) == 0
    assert main(["verify", path, "--deep"]) == 0
    assert files_of(complete.output) == complete.files


@pytest.mark.parametrize("seams", [pytest.param("recompute", marks=pytest.mark.slow), "exchange"])
def test_receipts(complete_jobs: Callable[[str], CompleteJob], tear: Tear, seams: str) -> None:
    done = complete_jobs(seams)
    _tear_all(done.state / "receipts", "*.json", tear)
    assert main(["verify", done.path]) == 1
    assert main(["run", done.path]) == 0
    assert main(["verify", done.path, "--deep"]) == 0
    assert files_of(done.output) == done.files


@pytest.mark.parametrize(
    "pattern",
    [
        "claims/*/infer/*/000000000000.json",
        pytest.param("claims/*/length.json", marks=pytest.mark.slow),
        pytest.param("workers/*.json", marks=pytest.mark.slow),
    ],
)
def test_claims_and_signs_of_life(
    complete_jobs: Callable[[str], CompleteJob],
    tear: Tear,
    pattern: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They prove nothing: torn ones cost time, and a claim that nobody renews is taken over."""
    done = complete_jobs("recompute")
    for receipt in sorted((done.state / "receipts").rglob("*.json"))[:4]:
        receipt.unlink()
    crew = State(f"file://{done.state}").of(prepare(load_job(done.path)).read_job()).crew()
    length = crew.agree_on_length(1)
    assert crew.claim("infer", length, 0, "dead-1")
    crew.give_sign("dead-1", SIGN)
    _tear_all(done.state, pattern, tear)
    assert main(["run", done.path, "--set", "job.timeouts.claim=0.3"]) == 0
    if "length" not in pattern:  # else stretches differ, and nobody looks for the other's claim
        assert "has given no sign of life: its chunks from 0 are done here" in caplog.text
    assert main(["verify", done.path, "--deep"]) == 0
    assert files_of(done.output) == done.files
    left = [path for name in ("claims", "workers") for path in (done.state / name).rglob("*.json")]
    assert left == []


SIGN = SignOfLife(
    beat=1,
    launch="dead",
    host="node-1",
    pid=1,
    engine="torch",
    device="cpu",
    versions="1",
    chunks=0,
    seconds=1,
)


def test_the_number_of_shards(
    complete: CompleteJob, tear: Tear, capsys: pytest.CaptureFixture[str]
) -> None:
    path = complete.path
    shutil.rmtree(complete.output)
    assert main(["prepare", path, "--shards=2"]) == 0
    _tear_all(complete.state, "shards.json", tear)
    capsys.readouterr()
    assert main(["run", path, "--shard=0/2"]) == 2
    assert "shards.json is damaged" in capsys.readouterr().err
    assert main(["prepare", path, "--shards=2", "--resplit"]) == 0
    for shard in ("0/2", "1/2"):
        assert main(["run", path, f"--shard={shard}"]) == 0
    ends = _tear_all(complete.state / "shards", "0*.json", tear)
    assert main(["finish", path]) == 0
    assert len(ends) == 1  # such a note is an economy: only that it is there counts
    assert files_of(complete.output) == complete.files


@pytest.mark.parametrize("name", ["job.json", "owners.json"])
def test_descriptions_of_the_job_are_refused_by_name(
    complete: CompleteJob, tear: Tear, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _tear_all(complete.state, name, tear)
    capsys.readouterr()
    assert main(["run", complete.path]) == 2
    assert f"{name} cannot be understood" in capsys.readouterr().err
    assert main(["run", complete.path, "--overwrite"]) == 0
    assert files_of(complete.output) == complete.files


@pytest.mark.slow
@pytest.mark.parametrize(
    "output",
    [
        {"format": "precomputed"},
        {"format": "zarr3"},
        {"format": "zarr3", "shard_shape": [32, 32, 32]},
        {"format": "precomputed", "shard_shape": [32, 32, 32]},
    ],
    ids=["blocks", "zarr blocks", "zarr shards", "precomputed shards"],
)
def test_blocks_and_shards(
    tmp_path: Path, tear: Tear, output: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    array = np.random.default_rng(0).integers(1, 256, (40, 64, 48), dtype=np.uint8)
    write_volume(tmp_path / "in", array)
    values = job_values(tmp_path / "in", tmp_path / "out", output=output)
    if "shard_shape" in output:
        values["inference"]["chunk_shape"] = [32, 32, 32]
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", path]) == 0
    files = files_of(tmp_path / "out")
    blocks = sorted(
        name for name in files if not name.endswith(("info", ".json", ".zarray", ".zattrs"))
    )
    torn = tmp_path / "out" / blocks[0]
    torn.write_bytes(tear(torn.read_bytes()))
    capsys.readouterr()
    if main(["verify", path, "--deep"]) == 0:
        # What follows a shard's index or a compressed block changes no voxel.
        assert tear is TEARS["tail"]
    else:
        assert "wrong: chunk" in capsys.readouterr().out
    assert main(["run", path, "--overwrite"]) == 0
    assert main(["verify", path, "--deep"]) == 0
    assert files_of(tmp_path / "out") == files


@pytest.mark.slow
@pytest.mark.parametrize(
    "format",
    [
        "precomputed",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("zarr3", "zarr2", "n5")),
        "ome_zarr",
    ],
)
def test_metadata_are_refused_by_name(
    tmp_path: Path, tear: Tear, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    array = np.random.default_rng(0).integers(1, 256, (32, 32, 32), dtype=np.uint8)
    write_volume(tmp_path / "in", array)
    values = job_values(tmp_path / "in", tmp_path / "out", output={"format": format})
    path = str(write_job(tmp_path / "job.yaml", values))
    files = _undisturbed(path, tmp_path / "out")
    assert main(["run", path]) == 0
    (name,) = {"info", "zarr.json", ".zarray", "attributes.json"}.intersection(files)
    metadata = tmp_path / "out" / name
    metadata.write_bytes(tear(metadata.read_bytes()))
    capsys.readouterr()
    assert main(["run", path]) == 2
    assert "out" in capsys.readouterr().err
    assert main(["verify", path]) in (0, 1, 2)
    shutil.rmtree(tmp_path / "out")
    assert main(["run", path]) == 0
    assert files_of(tmp_path / "out") == files


@pytest.mark.slow
def test_levels_are_refused_by_name(
    job: Callable[..., str], tmp_path: Path, tear: Tear, capsys: pytest.CaptureFixture[str]
) -> None:
    levels = write_levels(f"file://{tmp_path}/in", tmp_path)
    path = job(model={"normalize": {"levels": str(levels)}})
    assert main(["run", path]) == 0
    files = files_of(tmp_path / "out")
    shutil.rmtree(tmp_path / "out/_beam_inference/receipts")
    content = levels.read_bytes()
    levels.write_bytes(tear(content))
    capsys.readouterr()
    assert main(["run", path]) == 2
    assert "levels.json" in capsys.readouterr().err
    levels.write_bytes(content)
    assert main(["run", path]) == 0
    assert files_of(tmp_path / "out") == files


@pytest.mark.slow
def test_records_of_stages(tmp_path: Path, tear: Tear, capsys: pytest.CaptureFixture[str]) -> None:
    array = np.random.default_rng(0).integers(1, 256, (96, 96, 96), dtype=np.uint8)
    write_volume(tmp_path / "in", array)
    command = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--block-shape=16,16,16"]
    assert main(command) == 0
    files = files_of(tmp_path / "out")
    _tear_all(tmp_path / "out/_beam_inference/convert", "0*.json", tear)
    assert main(command) == 0
    assert files_of(tmp_path / "out") == files
    _tear_all(tmp_path / "out/_beam_inference/convert", "job.json", tear)
    capsys.readouterr()
    assert main(command) == 2
    assert "convert/job.json is damaged: it does not say what was" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert files_of(tmp_path / "out") == files
