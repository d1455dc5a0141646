"""OME-Zarr volumes are valid by the models of their specification (requirements.txt)."""

import json
import os
import subprocess
from itertools import product
from pathlib import Path

import pytest

from beam_inference.config.formats import OutputSpec
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.outputs import create_output

PYTHON = os.environ.get("IGNEOUS_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None, reason="IGNEOUS_PYTHON names no Python with the models: make igneous-test"
    ),
]


def test_groups_are_valid_by_the_models(tmp_path):
    expected = {}
    for format, channels, labels in product(["ome_zarr", "ome_zarr_0.4"], [1, 3], [False, True]):
        folder = tmp_path / f"{format}-{channels}-{labels}"
        box = BoundingBox((4, 0, 8), (20, 20, 20))
        sizes = (40.0, 8.0, 8.0)
        url = f"file://{folder}"
        create_output(
            OutputSpec(url, format, "uint32", channels, box, (8, 8, 8), sizes, labels=labels)
        )
        names = "zyx" if channels == 1 else "czyx"
        expected[folder] = {"axes": list(names), "units": ["nanometer"] * 3}
    script = Path(__file__).with_name("ome_models.py")
    told = subprocess.run([PYTHON, script, *expected], capture_output=True, text=True, env={})
    assert told.returncode == 0, told.stderr
    assert [json.loads(line) for line in told.stdout.splitlines()] == list(expected.values())
