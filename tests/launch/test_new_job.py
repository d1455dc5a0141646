"""Job files that init writes: complete, explained, and planned as they are."""

import json
import shlex
from pathlib import Path

import nnunet_folders as made
import numpy as np
import pytest
from helpers import write_volume

from beam_inference.cli.main import main
from beam_inference.config.volumes import ResampleBack, VolumeSource
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.launch.job_files import load_job
from beam_inference.launch.new_job import describe_package, make_job
from beam_inference.launch.planned_job import plan_job
from beam_inference.volumes.opening import open_source

pytest.importorskip("dynamic_network_architectures")

FITTING = (2e6, 1e6, 1e6)
"""The voxel size of the training data, ZYX, in nanometres."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A place with a results folder and a volume that fits it."""
    made.make_folder(tmp_path / "model", folds=(0, 1))
    write_image(tmp_path / "em", FITTING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_image(path, voxel_size_nm, shape=(20, 60, 50)):
    """Write a volume of random values."""
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return write_volume(path, array, voxel_size_nm=voxel_size_nm)


def remake(folder, **keys):
    """Make the results folder again, with other plans."""
    (folder / "other").mkdir()
    made.make_folder(folder / "other" / "model", **keys)
    return str(folder / "other" / "model")


def follow(printed):
    """Run what init says is next; the names of the commands."""
    commands = [shlex.split(line)[1:] for line in printed.partition("next:\n")[2].splitlines()]
    for words in commands:
        assert main(words) == 0, words
    return [words[0] for words in commands]


def comment_before(text, key):
    """The last line before a key."""
    lines = text.splitlines()
    return next(
        lines[number - 1].strip()
        for number, line in enumerate(lines)
        if line.strip().startswith(f"{key}:")
    )


def test_the_job_is_complete_explained_and_can_be_planned(folder, capsys):
    assert main(["init", "--model", "model", "--input", "em", "--to", "job.yaml"]) == 0
    assert follow(capsys.readouterr().out) == ["levels", "plan", "run"]
    text = (folder / "job.yaml").read_text()
    for key in ("path", "sha256", "voxel_size_nm", "normalize", "lattice", "blend", "augment"):
        assert comment_before(text, key).startswith("# "), key
    job = load_job("job.yaml")
    assert job.inference.patch_shape == made.PATCH
    assert job.model.voxel_size_nm == FITTING
    assert job.output.format == "precomputed"
    assert plan_job(job).plan.chunks.count >= 1
    assert main(["verify", "job.yaml", "--deep"]) == 0


@pytest.mark.slow
def test_it_is_what_the_job_then_computes(folder):
    assert main(["init", "--model", "model", "--input", "em", "--folds", "1"]) == 0
    assert load_job("job.yaml").model.folds == [1]
    assert main(["levels", "em", "--to", "levels.json"]) == 0
    assert main(["run", "job.yaml"]) == 0
    assert main(["verify", "job.yaml", "--deep", "--recompute", "0.01"]) == 0
    (folder / "model" / "fold_0" / "checkpoint_final.pth").write_bytes(b"not used")
    assert main(["run", "job.yaml"]) == 0


def test_a_file_that_is_there_is_left_alone(folder, capsys):
    (folder / "job.yaml").write_text("mine")
    assert main(["init", "--model", "model", "--input", "em"]) == 2
    assert "job.yaml exists, and is left alone" in capsys.readouterr().err
    assert (folder / "job.yaml").read_text() == "mine"


def test_paths_inside_the_folder_of_the_job_are_relative(folder):
    (folder / "jobs").mkdir()
    assert main(["init", "--model", "model", "--input", "em", "--to", "jobs/job.yaml"]) == 0
    text = (folder / "jobs" / "job.yaml").read_text()
    assert f"path: {folder}/em\n" in text
    assert load_job("jobs/job.yaml").input.path == (folder / "em").as_uri()
    assert load_job("jobs/job.yaml").output.path == (folder / "prediction").as_uri()


def test_the_scale_that_fits_is_chosen(folder):
    assert main(["pyramid", "em", "--factor=1x2x2", "--levels=1"]) == 0
    coarse = made.plans(configurations={"3d_fullres": made.configuration(spacing=[2.0, 2.0, 2.0])})
    package = describe_package(remake(folder, made=coarse), None)
    new = make_job(package, "em", "out", folder)
    assert new.scale == 1
    assert new.config.input.scale == 1
    assert new.config.model.voxel_size_nm == (2e6, 2e6, 2e6)
    assert main(["levels", "em", "--to", "levels.json", "--scale", "1"]) == 0
    assert plan_job(new.config).input.bounds.shape == (20, 30, 25)


@pytest.mark.slow
def test_another_voxel_size_is_resampled_and_back(folder, capsys):
    write_image(folder / "fine", (1e6, 1e6, 1e6), (40, 60, 50))
    assert main(["init", "--model", "model", "--input", "fine", "--to", "job.yaml"]) == 0
    assert follow(capsys.readouterr().out) == ["levels", "plan", "run"]
    config = load_job("job.yaml")
    assert config.input.resample.order == 3
    assert config.input.resample.clip == (10.0, 220.0)
    assert plan_job(config).plan.volume.shape == (20, 60, 50)
    labels = open_source(VolumeSource((folder / "prediction").as_uri()))
    assert labels.bounds.shape == (40, 60, 50)
    assert labels.dtype == np.uint8


def test_the_coarsest_scale_that_is_fine_enough_is_resampled(folder):
    write_image(folder / "fine", (5e5, 5e5, 5e5), (80, 60, 50))
    assert main(["pyramid", "fine", "--factor=2x1x1", "--levels=1"]) == 0
    new = make_job(describe_package("model", None), "fine", "out", folder)
    assert new.scale == new.config.input.scale == 1
    assert new.config.output.voxel_size_nm == "input"
    assert new.config.output.how_resampled == ResampleBack(order=1, separate_z=False)


def test_thick_sections_come_back_as_they_went(folder):
    write_image(folder / "thick", (5e6, 1e6, 1e6))
    new = make_job(describe_package("model", None), "thick", "out", folder)
    assert new.config.input.resample.separate_z == "auto"
    assert new.config.output.how_resampled.separate_z


def test_a_way_to_resample_that_is_not_known_is_told(folder):
    write_image(folder / "fine", (5e5, 5e5, 5e5))
    other = made.configuration(resampling_fn_data="resample_torch_fornnunet")
    model = remake(folder, made=made.plans(configurations={"3d_fullres": other}))
    with pytest.raises(ConfigError, match=r"trained at .* \[2000000, 1000000, 1000000\] nm .*"):
        make_job(describe_package(model, None), "fine", "out", folder)


def test_a_network_that_keeps_the_voxels_of_its_images_takes_any(folder):
    write_image(folder / "fine", (5e5, 5e5, 5e5))
    own = made.configuration(resampling_fn_data="no_resampling_data_or_seg_to_shape")
    model = remake(folder, made=made.plans(configurations={"3d_fullres": own}))
    new = make_job(describe_package(model, None), "fine", "out", folder)
    assert new.config.model.voxel_size_nm is None
    assert new.config.input.resample is None


def test_each_channel_has_its_own_normalisation(folder):
    array = np.random.default_rng(0).integers(0, 256, (3, 20, 60, 50), dtype=np.uint8)
    write_volume(folder / "channels", array, voxel_size_nm=FITTING)
    schemes = ["ZScoreNormalization", "CTNormalization", "ZScoreNormalization"]
    config = made.configuration(normalization_schemes=schemes, use_mask_for_norm=[False] * 3)
    plans = made.plans(
        configurations={"3d_fullres": config},
        foreground_intensity_properties_per_channel={"1": made.CT_PROPERTIES},
    )
    names = {"channel_names": {"0": "T1", "1": "CT", "2": "T2"}}
    model = remake(folder, made=plans, described=made.dataset(**names))
    new = make_job(describe_package(model, None), "channels", "out", folder)
    kinds = [(type(step).__name__, step.channels) for step in new.config.model.normalize]
    assert kinds == [
        ("LevelsStandardStep", [0, 2]),
        ("ClipStep", [1]),
        ("StandardStep", [1]),
    ]


@pytest.mark.slow
def test_modalities_are_volumes_in_the_order_of_the_channels(folder, capsys):
    write_image(folder / "ct", FITTING)
    config = made.configuration(
        normalization_schemes=["ZScoreNormalization"] * 2, use_mask_for_norm=[False] * 2
    )
    names = {"channel_names": {"0": "T1", "1": "CT"}}
    plans = made.plans(configurations={"3d_fullres": config})
    model = remake(folder, made=plans, described=made.dataset(**names))
    volumes = ["em", "ct"]
    assert main(["init", "--model", model, "--input", *volumes, "--to", "both.yaml"]) == 0
    assert follow(capsys.readouterr().out) == ["levels", "plan", "run"]
    assert "T1, CT" in comment_before((folder / "both.yaml").read_text(), "inputs")
    job = load_job("both.yaml")
    assert [Path(each.path).name for each in (job.input, *job.inputs)] == volumes
    assert job.model.input_channels == 2


@pytest.mark.parametrize(
    "voxel_size_nm", [FITTING, (2e6, 8e5, 1e6)], ids=["the same voxels", "finer voxels"]
)
@pytest.mark.slow
def test_what_is_normalised_inside_the_object_alone_is_run(folder, capsys, voxel_size_nm):
    config = made.configuration(
        normalization_schemes=["ZScoreNormalization"], use_mask_for_norm=[True]
    )
    model = remake(folder, made=made.plans(configurations={"3d_fullres": config}))
    array = np.random.default_rng(0).integers(1, 256, (20, 50, 40), dtype=np.uint8)
    array[8:12, 20:30, 20:30] = 0
    write_volume(folder / "t1", np.pad(array, 4), voxel_size_nm=voxel_size_nm)
    assert main(["init", "--model", model, "--input", "t1", "--to", "t1.yaml"]) == 0
    assert follow(capsys.readouterr().out) == ["levels", "plan", "run"]
    assert (folder / "levels.json.holes" / "index.json").is_file()
    (step, _) = load_job("t1.yaml").model.normalize
    assert step.standard.of == "object"
    assert main(["verify", "t1.yaml", "--deep", "--recompute", "1"]) == 0


def test_a_unit_that_is_not_said_is_told(folder):
    package = describe_package(
        remake(folder, made=made.plans(image_reader_writer="Tiff3DIO")), None
    )
    new = make_job(package, "em", "out", folder)
    assert new.config.model.voxel_size_nm is None
    assert any("a unit that the package does not say" in caution for caution in new.cautions)


def test_a_volume_smaller_than_a_patch_is_padded_as_by_nnunet(folder):
    write_image(folder / "small", FITTING, (10, 60, 50))
    new = make_job(describe_package("model", None), "small", "out", folder)
    assert (new.config.input.fill, new.config.input.fill_value) == ("constant", 0)
    assert new.config.input.fill_units == "network"


def test_planes(folder):
    config = made.configuration(
        patch_size=[24, 24], spacing=[1.0, 1.0], architecture=made.architecture(dims=2)
    )
    plans = made.plans(configurations={"2d": config})
    model = remake(folder, made=plans, name="2d", mirror_axes=(0, 1))
    new = make_job(describe_package(model, None), "em", "out", folder)
    assert new.config.model.dims == 2
    assert new.config.inference.patch_shape == (1, 24, 24)
    assert new.config.model.voxel_size_nm == FITTING
    assert main(["levels", "em", "--to", "levels.json"]) == 0
    assert plan_job(new.config).plan.lattice.patch_shape == (1, 24, 24)


def test_what_is_no_package_is_told(folder, capsys):
    (folder / "net.ts").write_bytes(b"")
    assert main(["init", "--model", "net.ts", "--input", "em"]) == 2
    assert "neither a folder nor a zip file" in capsys.readouterr().err
    assert main(["init", "--model", "absent", "--input", "em"]) == 2
    assert "There is no such file" in capsys.readouterr().err
    assert not (folder / "job.yaml").exists()


def test_what_a_package_asks_for_and_no_job_can_do_names_the_package(folder):
    properties = made.CT_PROPERTIES | {"percentile_99_5": 5.0}
    plans = made.plans(foreground_intensity_properties_per_channel={"0": properties})
    package = describe_package(remake(folder, made=plans), None)
    with pytest.raises(ConfigError, match=r"would run .*model over em into out is not a valid job"):
        make_job(package, "em", "out", folder)


def test_what_is_no_volume_is_told(folder):
    with pytest.raises(VolumeError, match="no volume lies at absent"):
        make_job(describe_package("model", None), "absent", "out", folder)


def test_names_from_the_package_cannot_leave_their_comments(folder):
    """What a package says reaches the job file as comments and values alone."""
    hostile = made.dataset(name="x\noutput: {path: /etc}", licence="\x1b[31mred")
    model = remake(folder, described=hostile)
    (folder / "other" / "a\nmodel: 1").symlink_to(model)
    text = make_job(
        describe_package(str(folder / "other" / "a\nmodel: 1"), None), "em", "out", folder
    ).text
    assert "\x1b" not in text
    assert len([line for line in text.splitlines() if line.startswith("model:")]) == 1


def test_show_says_what_it_is(folder, capsys):
    assert main(["model", "show", "model"]) == 0
    shown = capsys.readouterr().out
    for word in ("nnU-Net, 3d_fullres", "CC BY 4.0", "PlainConvUNet", "spread", "[2, 1, 1]"):
        assert word in shown, word
    assert main(["model", "show", "model", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["facts"]["folds"] == "0, 1"
    assert len(values["sha256"]) == 64


def test_test_runs_the_network(folder, capsys):
    assert main(["model", "test", "model", "--folds", "0", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["image_shape"] == [1, 21, 32, 32]
    assert values["lowest"] < values["highest"]
    assert values["passed"]
