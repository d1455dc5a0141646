"""Hostile job files and overrides: refused with one message, at once, and nothing is created."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml
from hostile.conftest import run_words

LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
RAW = {
    6: LAUGHS + "x: *a9\n",
    7: LAUGHS + "model: {path: identity, normalize: *a9}\n",
    8: LAUGHS + "model: {path: *a9}\n",
    9: "input: &i {path: a, mask: *i}\n",
    10: "input: &i [*i]\n",
    11: "input: !!python/object/apply:os.system ['touch PWNED_yaml']\n",
    12: "input: !!python/name:os.system\n",
    15: "input: " + "[" * 20_000,
    16: "input: " + "[" * 900 + "]" * 900,
    17: "? [a, b]\n: 1\n",
    18: "? {a: b}\n: 1\n",
    19: "input: {path: 'a\x00b'}\n",
    20: bytes(range(256)),
    22: "",
    23: "42\n",
    24: "- a\n- b\n",
    25: "input: {path: a}\n---\ninput: {path: b}\n",
    26: "inference: {batch_size: " + "9" * 5000 + "}\n",
    "26: hexadecimal": "inference: {batch_size: 0x" + "f" * 5000 + "}\n",
    "26: a date that is none": "inference: {batch_size: 2001-99-99}\n",
    "26: a tag that does not fit": "inference: {batch_size: !!int a}\n",
    401: LAUGHS.replace("lol, lol", ", ".join(["lol"] * 9)) + "input: *a9\n",
}


@pytest.mark.parametrize("row", RAW)
def test_texts_that_are_no_job_are_refused_at_once(refused, tmp_path, monkeypatch, row):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    text = RAW[row]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    start = time.process_time()
    message = refused(["plan", path])
    assert time.process_time() - start < 20
    assert str(path) in message
    assert list(tmp_path.iterdir()) == [path]


def test_duplicate_keys_are_refused(refused, job):  # 13, 14
    path = Path(job())
    text = path.read_text()
    path.write_text(text + "model: {path: identity}\n")
    assert "'model' is given twice" in refused(["plan", path])
    path.write_text(text + "mask: {<<: {path: a}, <<: {path: b}}\n")
    refused(["plan", path])


def test_a_good_job_is_planned_also_in_other_encodings(job, capsys):  # 5, 21
    path = Path(job())
    assert run_words(["plan", path]) == 0
    path.write_bytes(path.read_text().encode("utf-16"))
    assert run_words(["plan", path]) in (0, 2)
    assert "not foreseen" not in capsys.readouterr().err


def inside(key, value):
    """Sections of a job with one value at a key such as ``inference.batch_size``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


NAN = float("nan")
INF = float("inf")
VALUES = {
    27: inside("inference.patch_shape", [2**63, 16, 16]),
    31: inside("inference.patch_overlap", [-1, 0, 0]),
    32: inside("inference.patch_overlap", [8, 16, 16]),
    33: inside("output.block_shape", [0, 16, 16]),
    34: {"output": {"dtype": "uint8", "value_range": [NAN, 1.0]}},
    35: {"output": {"dtype": "uint8", "value_range": [0.0, INF]}},
    36: {"output": {"dtype": "uint8", "value_range": [1.0, 0.0]}},
    37: inside("model.normalize", {"scale": NAN}),
    38: inside("model.normalize", {"scale": INF}),
    40: {"postprocess": [{"operator": "threshold", "at": NAN}]},
    "40: infinite": {"postprocess": [{"operator": "threshold", "at": INF}]},
    41: {"postprocess": [{"operator": "smooth", "sigma": [INF, 0.0, 0.0]}]},
    42: {"postprocess": [{"operator": "smooth", "sigma": [NAN, 0.0, 0.0]}]},
    43: {"postprocess": [{"operator": "smooth", "sigma": [-1.0, 0.0, 0.0]}]},
    44: inside("model.voxel_size_nm", [NAN, 1.0, 1.0]),
    "44: infinite": inside("model.voxel_size_nm", [INF, 1.0, 1.0]),
    45: inside("model.voxel_size_nm", [0.0, 1.0, 1.0]),
    46: inside("input", {"fill": "constant", "fill_value": NAN}),
    47: inside("input", {"fill": "constant", "fill_value": 300.0}),
    48: inside("input.scale", NAN),
    49: inside("input.scale", [NAN, 1.0, 1.0]),
    "49: infinite": inside("input.scale", [INF, 1.0, 1.0]),
    "quantiles": inside("model.normalize", {"levels": "levels.json", "low": NAN}),
    "more quantiles": inside("model.normalize", {"levels": "levels.json", "high": INF}),
    51: {"roi": {"start": [10, 0, 0], "stop": [5, 5, 5]}},
    53: {"roi": {"start": [2**40 - 8, 0, 0], "stop": [2**40, 5, 5]}},
    57: inside("job.attempts", 0),
    60: {"output": {"pyramid": {"factor": [0, 2, 2]}}},
    61: {"output": {"pyramid": {"levels": 2**41}}},
    "path of 5000 characters": inside("input.path", "/tmp/" + "p" * 5000),
    "output path of 5000 characters": inside("output.path", "/tmp/" + "p" * 5000),
    "state path of 5000 characters": inside("job.state_path", "/tmp/" + "p" * 5000),
    "model path of 5000 characters": inside("model.path", "/tmp/" + "p" * 5000 + ".pt"),
    "model factory of 5000 characters": inside("model.path", "p" * 5000 + ".py:make"),
    "mask path of 5000 characters": inside("mask.path", "/tmp/" + "p" * 5000),
}


def sections_of(row):
    return {name: value for name, value in VALUES[row].items() if name != "postprocess"}


@pytest.mark.parametrize("row", VALUES)
def test_values_that_cannot_be_are_refused(refused, job, tmp_path, row):
    path = Path(job(**sections_of(row)))
    if "postprocess" in VALUES[row]:
        values = yaml.safe_load(path.read_text()) | {"postprocess": VALUES[row]["postprocess"]}
        path.write_text(yaml.safe_dump(values))
    refused(["run", path])
    assert not (tmp_path / "out").exists()


# What is large and yet makes sense: it is clipped to the volume, or bears on nothing.
SOUND = {
    28: inside("inference.chunk_shape", [2**40, 2**40, 2**40]),
    55: {"roi": {"start": [3, -5, 2], "stop": [19, 27, 34], "context": [2**39, 2**39, 2**39]}},
    59: inside("job.attempts", 2**40),
}


@pytest.mark.parametrize("row", SOUND)
def test_large_values_that_make_sense_are_planned(job, row):
    assert run_words(["plan", job(**SOUND[row])]) == 0


@pytest.mark.parametrize("batch_size", [2**40, 10**9])
def test_batches_too_large_for_memory_are_planned_and_not_run(refused, job, batch_size):
    path = job(inference={"batch_size": batch_size})  # 29, 30, 345, 347
    assert run_words(["plan", path]) == 0
    assert "GiB" in refused(["run", path])


def test_a_chunk_and_a_context_beyond_the_volume_are_clipped(job, tmp_path):  # 381, 384
    assert run_words(["run", job(**SOUND[28])]) == 0
    assert run_words(["run", job(**SOUND[55], output={"path": str(tmp_path / "other")})]) == 0


def test_values_that_overflow_in_the_network_are_refused(refused, job):  # 39, 372
    path = job(model={"normalize": {"scale": 1e308}})
    assert run_words(["plan", path]) == 0
    refused(["run", path])


def test_an_output_or_state_inside_the_input_leaves_it_untouched(job, tmp_path):  # 62, 63, 388
    source = tmp_path / "in"
    before = {file: file.read_bytes() for file in source.rglob("*") if file.is_file()}
    assert run_words(["run", job(job={"state_path": str(source / "state")})]) == 0
    assert run_words(["run", job(output={"path": str(source / "inside")})]) == 0
    assert all(file.read_bytes() == content for file, content in before.items())


@pytest.mark.parametrize("way", ["in", "in/../in", "link"])
def test_an_output_that_is_the_input_is_refused(refused, job, tmp_path, way):  # 64, 65, 66
    (tmp_path / "link").symlink_to(tmp_path / "in")
    refused(["run", job(output={"path": f"{tmp_path}/{way}", "dtype": "float32"})])


OVERRIDES = {
    67: "foo",
    68: "=1",
    69: "inference=3",
    70: "inference..x=1",
    71: "input.path.x=1",
    73: "a.b.c.d=1",
    74: "inference.batch_size=",
    76: "inference.batch_size=[",
    78: 'inference.batch_size=!!python/object/apply:os.system ["touch PWNED_set"]',
    79: "inference.batch_size={a: 1, a: 2}",
    82: "__class__.__init__=1",
    84: "inference.batch_size=.nan",
    85: "inference.batch_size=" + "9" * 49,
    "85: 5000 digits": "inference.batch_size=" + "9" * 5000,
    "85: nested": "inference.batch_size=" + "[" * 2000,
    87: "input.path=",
    89: r"input.path=\0",
    "89: a NUL": "input.path=\0",
    "89: quoted": r'input.path="\0"',
    92: "postprocess.0.operator=threshold",
    94: "input=null",
    95: "input=[]",
    98: "inference.batch_size=1e3",
    "98: with a point": "inference.batch_size=1.0e+3",
    "escapes": "inference.batch_size=\x1b[2J\x07\x9b",
    "escapes in a key": "inference.\x1b[2J=1",
    "direction of writing": "inference.batch_size=\u202eabc",
    "half a character": "inference.batch_size=\udcff",
}


@pytest.mark.parametrize("row", OVERRIDES)
def test_overrides_that_make_no_job_are_refused(refused, job, tmp_path, monkeypatch, row):
    monkeypatch.chdir(tmp_path)
    refused(["plan", job(), "--set", OVERRIDES[row]])
    assert not list(tmp_path.glob("PWNED*"))  # 102


@pytest.mark.parametrize("words", [["--set", "--"], ["--set=--"], ["--set"], ["--set="]])
def test_overrides_without_a_key_are_refused(refused, job, words):  # 97
    assert "--set" in refused(["plan", job(), *words])


@pytest.mark.parametrize("text", ["0x2", "1_0"])
def test_other_ways_to_write_a_number_are_understood(job, text):  # 99, 100
    assert run_words(["plan", job(), "--set", f"inference.batch_size={text}"]) == 0


def test_plan_reads_no_network(job, capsys):  # 91
    words = ["--set", "model.path=../../../../etc/passwd"]
    assert run_words(["plan", job(), *words]) in (0, 2)
    assert "root:" not in "".join(capsys.readouterr())


def test_a_message_lists_a_bounded_number_of_faults(refused, job):
    path = Path(job())
    path.write_text(path.read_text() + "".join(f"key{n}: {n}\n" for n in range(1000)))
    message = refused(["plan", path])
    assert "key0: unknown key" in message
    assert "more" in message.splitlines()[-1]


def test_as_many_values_as_a_job_needs_are_read(job):
    levels = [[0.0, float(n + 1)] for n in range(3000)]
    normalize = {"start": -1000, "levels": levels}
    assert run_words(["plan", job(model={"normalize": normalize})]) == 0
    path = Path(job())
    path.write_text(json.dumps(yaml.safe_load(path.read_text())))
    assert run_words(["plan", path]) == 0
