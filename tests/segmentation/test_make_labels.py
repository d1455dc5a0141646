"""Test outputs of labels in every format, with coarser scales where the format has them."""

import numpy as np
import pytest
from helpers import write_volume

from beam_inference.cli.main import main
from beam_inference.config.formats import installed_formats
from beam_inference.volumes.opening import open_volume

MULTISCALE = [each.name for each in installed_formats() if each.is_multiscale]


@pytest.mark.parametrize("format", MULTISCALE)
def test_a_pyramid_of_labels_in_every_format_that_holds_one(tmp_path, format):
    array = (np.indices((32, 64, 64)).sum(axis=0) % 20 < 15).astype(np.uint8)
    url = write_volume(tmp_path / "in", array, block_shape=(16, 16, 16))
    target = f"file://{tmp_path}/out"
    flags = ["--threshold=1", f"--format={format}", "--pyramid", "--block_shape=16x16x16"]
    assert main(["components", url, target, *flags, "--chunk_shape=32x32x32"]) == 0
    coarser = open_volume(target, scale=1)
    assert coarser.bounds.shape[2] == 32
    assert coarser.read(coarser.bounds).any()
