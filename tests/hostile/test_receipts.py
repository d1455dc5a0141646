"""Plant receipts that must not be believed between two launches of a job.

Each is noticed and named by `verify` and `status`, which say 1; `run` does its chunk again, and
afterwards all three agree that the job is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import files_of, job_values, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.job.seals import open_record


def _without_seal(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Damage of a receipt as a version before seals wrote it, which only its content can show."""

    def damage(text: bytes) -> bytes:
        values = json.loads(open_record(text))
        change(values)
        return json.dumps(values).encode()

    return damage


def _with_seal(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Damage of a receipt whose seal is left as it was."""

    def damage(text: bytes) -> bytes:
        values = json.loads(text)
        change(values)
        return json.dumps(values, separators=(",", ":")).encode()

    return damage


def _set(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda values: values.update({key: value})


def _shift_box(values: dict[str, Any]) -> None:
    values["parts"][0]["box"]["start"][0] += 1


def _spoil_statistics(values: dict[str, Any]) -> None:
    values["parts"][0]["channels"][0]["mean"] = float("nan")


def _spoil_checksum(values: dict[str, Any]) -> None:
    values["parts"][0]["crc32"] ^= 1


ROWS: dict[int, Callable[[bytes], bytes]] = {
    313: lambda text: text[:40],
    320: lambda text: b"",
    323: lambda text: bytes(range(256)),
    325: _without_seal(_set("foreign", 1)),
    330: _without_seal(_set("chunk", 17)),
    335: _with_seal(_spoil_checksum),
    339: _without_seal(_shift_box),
    344: _without_seal(_set("parts", [])),
    348: _without_seal(_set("fingerprint", "f" * 64)),
    366: _without_seal(_set("chunk", "9" * 10_000_000)),
    369: lambda text: b"[" * 100_000 + b"]" * 100_000,
    374: _with_seal(_spoil_statistics),
    378: lambda text: re.sub(rb'"chunk":\d+', b'"chunk":1e400', open_record(text)),
    0: lambda text: text + b"}",  # the torn file of row 469
    1: _without_seal(lambda values: values.update(parts=values["parts"] * 20_000)),
}
"""Rows of HOSTILE.md, and how each damages a receipt; the last were found later."""


@dataclass(frozen=True)
class Seen:
    """What the commands said of a complete job whose first receipts were damaged.

    Attributes:
        before: exit codes of status and verify.
        named: output of verify.
        run: exit code of run.
        run_output: output of run.
        after: exit codes of status, verify and verify --deep.
        same_bytes: whether the output has the bytes that it had.
        left: names of the chunks that have a receipt in the end.
    """

    before: tuple[int, int]
    named: str
    run: int
    run_output: str
    after: tuple[int, int, int]
    same_bytes: bool
    left: list[str]


def _launch_again(folder: Path, mode: str) -> Seen:
    array = np.random.default_rng(0).integers(0, 256, (40, 70, 50), dtype=np.uint8)
    write_volume(folder / "in", array, (3, -5, 2))
    values = job_values(folder / "in", folder / "out", inference={"seams": mode})
    job = str(write_job(folder / "job.yaml", values))
    assert main(["run", job]) == 0
    before = files_of(folder / "out")
    receipts = sorted((folder / "out/_beam_inference/receipts").rglob("*.json"))
    for path, damage in zip(receipts, ROWS.values(), strict=False):
        path.write_bytes(damage(path.read_bytes()))
    status = main(["status", job])
    with redirect_stdout(StringIO()) as named:
        codes = (status, main(["verify", job, "--json"]))
    with redirect_stdout(StringIO()) as run_output:
        run = main(["run", job])
    after = (main(["status", job]), main(["verify", job]), main(["verify", job, "--deep"]))
    left = sorted(path.stem for path in (folder / "out/_beam_inference/receipts").rglob("*.json"))
    same = files_of(folder / "out") == before
    return Seen(codes, named.getvalue(), run, run_output.getvalue(), after, same, left)


@pytest.fixture(
    scope="module", params=[pytest.param("recompute", marks=pytest.mark.slow), "exchange"]
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What was seen in a seam mode."""
    return _launch_again(tmp_path_factory.mktemp("receipts"), request.param)


@pytest.mark.parametrize(("place", "row"), list(enumerate(ROWS)))
def test_a_receipt_that_cannot_be_believed_is_named(seen: Seen, place: int, row: int) -> None:
    named = json.loads(seen.named)["wrong"]
    assert sum(f"{place:012d}.json" in line for line in named) == 1


def test_run_status_and_verify_agree(seen: Seen) -> None:
    assert seen.before == (1, 1)
    assert seen.run == 0
    assert f"({len(ROWS)} by this launch)" in seen.run_output
    assert seen.after == (0, 0, 0)
    assert seen.same_bytes
    assert seen.left == [f"{chunk:012d}" for chunk in range(18)]


@pytest.mark.parametrize("damage", [ROWS[313], ROWS[348]], ids=["453", "456"])
def test_damaged_and_missing_receipts_are_done_again(
    job: Callable[..., str], tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = job()
    assert main(["run", path]) == 0
    receipts = sorted((tmp_path / "out/_beam_inference/receipts").rglob("*.json"))
    receipts[3].write_bytes(damage(receipts[3].read_bytes()))
    receipts[7].unlink()
    assert main(["run", path]) == 0
    assert main(["verify", path, "--deep"]) == 0


def test_receipts_in_folders_of_their_own_do_not_count(
    job: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job()
    assert main(["run", path]) == 0
    before = files_of(tmp_path / "out")
    receipts = sorted((tmp_path / "out/_beam_inference/receipts").rglob("*.json"))
    folder = receipts[3].parent / f"{receipts[3].stem}.d"
    folder.mkdir()
    (folder / receipts[4].name).write_bytes(receipts[4].read_bytes())
    for named in receipts[5:7]:
        named.rename(folder / named.name)
    capsys.readouterr()
    assert main(["status", path]) == 0
    assert "16 of 18 chunks done" in capsys.readouterr().out
    assert main(["verify", path]) == 1
    assert "missing: 2 chunks: 5, 6" in capsys.readouterr().out
    assert main(["run", path]) == 0
    assert "(2 by this launch)" in capsys.readouterr().out
    assert main(["verify", path, "--deep"]) == 0
    assert files_of(tmp_path / "out") == before
