import json
import sys
from pathlib import Path

import numpy as np
import pytest

from beam_inference.cli.main import main
from beam_inference.demo import mni
from beam_inference.volumes.opening import open_volume


def dice(found, expected):
    return 2 * (found & expected).sum() / (found.sum() + expected.sum())


@pytest.mark.slow
def test_the_demo_gives_a_verified_result_a_figure_and_the_dice_it_claims(tmp_path, capsys):
    pytest.importorskip("nilearn")
    pytest.importorskip("matplotlib")
    assert main(["demo", str(tmp_path / "demo")]) == 0
    out = capsys.readouterr().out
    assert "every chunk reads back as it was written" in out
    figure = tmp_path / "demo" / "tissue.png"
    assert str(figure) in out
    assert figure.stat().st_size > 100_000

    volume = open_volume(f"file://{tmp_path}/demo/tissue")
    label = volume.read(volume.bounds).argmax(0)
    grey, white = mni.load_tissue_maps()
    truth = ((1 - grey - white).clip(0), grey, white)
    claimed = json.loads(
        (Path(__file__).parents[2] / "examples" / "tissue" / "dice.json").read_text()
    )
    band = slice(claimed["held_out"]["start"], claimed["held_out"]["stop"])
    expected = np.stack(truth).argmax(0)
    for number, name in ((1, "grey matter"), (2, "white matter")):
        found = dice(label[:, band] == number, expected[:, band] == number)
        assert found == pytest.approx(claimed["dice"][name], abs=0.01)


def test_without_its_extra_the_demo_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "nilearn", None)
    assert main(["demo", str(tmp_path / "demo")]) == 2
    assert "pip install 'beam-inference[demo]'" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
