"""Jobs by each window and lattice: the same bits for every chunk shape and strategy."""

import numpy as np
import pytest
from helpers import POSITION, job_values, read_volume, write_job, write_volume

from beam_inference import prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError

IMAGE = np.random.default_rng(4).integers(0, 256, (30, 41, 37), dtype=np.uint8)
MONAI = {"gaussian": 0.125, "floor": "monai"}
NNUNET = {"gaussian": 0.125, "floor": "nnunet"}
WAYS = [
    {"chunk_shape": [16, 16, 16], "strategy": "exchange"},
    {"chunk_shape": [32, 48, 16], "strategy": "recompute"},
    {"chunk_shape": [16, 32, 48], "strategy": "exchange"},
]


def values_of(tmp_path, name, **inference):
    shapes = {"patch_shape": [9, 18, 16], "patch_overlap": [4, 9, 5], "batch_size": 2}
    return job_values(
        tmp_path / "in",
        tmp_path / name,
        model=POSITION,
        output={"block_shape": [16, 16, 16]},
        inference=shapes | inference,
    )


@pytest.mark.parametrize(
    ("lattice", "blend"),
    [("spread", NNUNET), ("stride", MONAI), ("pad", "constant"), ("spread", {"gaussian": 0.3})],
)
def test_chunks_and_strategies_change_no_bit(tmp_path, lattice, blend):
    write_volume(tmp_path / "in", IMAGE)
    results = []
    for number, way in enumerate(WAYS):
        values = values_of(tmp_path, f"out{number}", lattice=lattice, blend=blend, **way)
        assert main(["run", str(write_job(tmp_path / f"{number}.yaml", values))]) == 0
        results.append(read_volume(tmp_path / f"out{number}"))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_what_was_the_only_way_is_not_in_the_fingerprint_and_other_ways_are(tmp_path):
    write_volume(tmp_path / "in", IMAGE)

    def fingerprint(number, **keys):
        values = values_of(tmp_path, f"out{number}", strategy="recompute", **keys)
        return prepare(parse_job(values, tmp_path)).read_job().fingerprint

    others = [{"lattice": "spread"}, {"blend": "constant"}, {"blend": MONAI}, {"blend": NNUNET}]
    default = fingerprint(0)
    assert fingerprint(1, lattice="stride", blend="bump") == default
    prints = {default, *(fingerprint(number, **keys) for number, keys in enumerate(others, 2))}
    assert len(prints) == 1 + len(others)


def test_a_plan_tells_what_is_not_as_usual(tmp_path, capsys):
    write_volume(tmp_path / "in", IMAGE)
    values = values_of(tmp_path, "out", lattice="spread", blend=MONAI)
    assert main(["plan", str(write_job(tmp_path / "job.yaml", values))]) == 0
    assert "lattice spread, blend gaussian 0.125, floor monai" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lattice": "even"}, "inference.lattice: input should be 'stride', 'spread' or 'pad'"),
        ({"blend": "gaussian"}, "inference.blend: input should be 'bump' or 'constant'"),
        ({"blend": {"gaussian": 0}}, "inference.blend.gaussian: .*greater than 0"),
        ({"blend": {"gaussian": 2}}, "inference.blend.gaussian: .*less than or equal to 1"),
        ({"blend": {"gaussian": 0.125, "floor": 0.1}}, "inference.blend.floor: input should be "),
        ({"blend": {"sigma": 0.125}}, "inference.blend"),
    ],
)
def test_what_there_is_not_is_refused(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        parse_job(values_of(tmp_path, "out", **keys), tmp_path)
