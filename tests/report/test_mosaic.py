"""The picture of finished chunks: which are drawn, and that what is drawn is what was written."""

import numpy as np
import pytest
from helpers import job_values, toy, write_job

from beam_inference.cli.main import main
from beam_inference.geometry.sampling import spread


def test_chunks_are_spread_through_their_order():
    assert spread([3, 5, 9], 4) == [3, 5, 9]
    assert spread(list(range(100)), 4) == [0, 33, 66, 99]
    assert spread([4, 7], 1) == [4]


@pytest.mark.parametrize(
    "channels", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3]
)
def test_the_finished_chunks_of_a_job_are_drawn(volume_in, tmp_path, capsys, channels):
    from matplotlib.image import imread

    model = toy(
        "three" if channels == 3 else "position" if channels == 2 else "same",
        output_channels=channels,
    )
    job = str(
        write_job(tmp_path / "job.yaml", job_values(volume_in, tmp_path / "out", model=model))
    )
    assert main(["mosaic", job, "--to", str(tmp_path / "m.png")]) == 2
    assert "holds no job" in capsys.readouterr().err
    assert main(["run", job]) == 0
    assert main(["mosaic", job, "--to", str(tmp_path / "m.png"), "--count", "5"]) == 0
    assert "5 of 18 finished chunks" in capsys.readouterr().out
    picture = imread(tmp_path / "m.png")[..., :3]
    assert picture.shape[1] > 1000
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 100, "voxels are to be seen"
    assert (picture.std(axis=2).max() > 0.1) == (channels == 3), "three channels are colours"


def test_a_folder_that_is_not_there_is_said(job, tmp_path, capsys):
    assert main(["mosaic", job(), "--to", str(tmp_path)]) == 2
    assert "write a name that ends with" in capsys.readouterr().err
    assert main(["mosaic", job(), "--to", str(tmp_path / "nowhere" / "m.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err
