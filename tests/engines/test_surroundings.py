"""Test what a kept trial or conversion depends on beyond its network."""

import json

import pytest

from beam_inference.engines.surroundings import describe_processor, describe_surroundings


def test_it_is_the_same_twice_and_can_be_written(monkeypatch):
    monkeypatch.setenv("ANYTHING_ELSE", "1")
    first = describe_surroundings()
    monkeypatch.setenv("ANYTHING_ELSE", "2")
    assert json.loads(json.dumps(first)) == describe_surroundings()
    assert first["packages"]["torch"]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_X"])
def test_variables_that_libraries_look_at_count(monkeypatch, name):
    before = describe_surroundings()
    monkeypatch.setenv(name, "default")
    after = describe_surroundings()
    assert {key for key in before if before[key] != after[key]} == {"variables"}
    assert "default" not in json.dumps(after)


def test_model_and_features_of_the_processor_count(tmp_path):
    file = tmp_path / "cpuinfo"

    def describe(model="A", flags="avx avx2", mhz="100"):
        file.write_text(
            f"processor\t: 0\nmodel name\t: {model}\ncpu MHz\t: {mhz}\nflags\t: {flags}\n\n"
            "processor\t: 1\n"
        )
        return describe_processor(file)

    assert describe() == describe(mhz="200")
    assert describe()["model name"] == "A"
    assert describe() != describe(model="B")
    assert describe() != describe(flags="avx")
    assert describe_processor(tmp_path / "none") == describe_processor(tmp_path / "none")
