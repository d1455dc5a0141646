"""What nnU-Net's plans and dataset files say, old ones and new, whole and damaged."""

import json

import nnunet_folders as made
import pytest

from beam_inference.errors import ModelContractError
from beam_inference.models.nnunet_plans import (
    check_order,
    is_results_folder,
    list_checkpoints,
    read_dataset,
    read_plans,
    select_configuration,
    stored_order,
)


def write(folder, name, content):
    """Write a JSON file, and return its folder."""
    (folder / name).write_text(json.dumps(content))
    return folder


def checkpoints(folder, *folds):
    """Empty files where checkpoints of folds lie."""
    for fold in folds:
        (folder / f"fold_{fold}").mkdir(parents=True)
        (folder / f"fold_{fold}" / "checkpoint_final.pth").touch()
    return folder


def test_all_numbered_folds_by_default_in_their_order(tmp_path):
    folder = checkpoints(tmp_path, 10, 2, 0, "all")
    (folder / "fold_3").mkdir()  # not finished
    assert list_checkpoints(folder, None) == [
        f"fold_{fold}/checkpoint_final.pth" for fold in (0, 2, 10)
    ]
    assert list_checkpoints(folder, ["all"]) == ["fold_all/checkpoint_final.pth"]
    assert list_checkpoints(folder, [2, 0]) == [
        f"fold_{fold}/checkpoint_final.pth" for fold in (2, 0)
    ]


def test_the_fold_of_all_data_where_there_is_no_other(tmp_path):
    assert list_checkpoints(checkpoints(tmp_path, "all"), None) == ["fold_all/checkpoint_final.pth"]


def test_folds_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ModelContractError, match=r"of fold 1, 3; there is one of: 0\. Write"):
        list_checkpoints(checkpoints(tmp_path, 0), [0, 1, 3])


def test_folders_are_known_by_their_files(tmp_path):
    checkpoints(tmp_path / "model", 0)
    write(tmp_path / "model", "plans.json", {})
    assert not is_results_folder(tmp_path / "model")
    write(tmp_path / "model", "dataset.json", {})
    assert is_results_folder(tmp_path / "model")
    assert not is_results_folder(tmp_path)


def test_classes_are_in_the_order_of_labels(tmp_path):
    labels = {"fibre": 2, "background": 0, "ignore": 3, "vessel": 1}
    dataset = read_dataset(write(tmp_path, "dataset.json", made.dataset(labels=labels)))
    assert dataset.classes == ["background", "vessel", "fibre"]
    assert not dataset.has_regions


def test_regions_are_in_the_order_of_the_file(tmp_path):
    labels = {"background": 0, "whole": [1, 2], "core": 2}
    content = made.dataset(labels=labels, regions_class_order=[1, 2])
    dataset = read_dataset(write(tmp_path, "dataset.json", content))
    assert dataset.classes == ["whole", "core"]
    assert dataset.has_regions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": {"background": 0, "a": 2}}, "expected labels from 0 on without gaps"),
        ({"labels": {"background": 0}}, "labels"),
        ({"labels": {"background": 0, "a": [1, 2]}}, "regions_class_order must have 1 entries"),
        (
            {"labels": {"background": 0, "a": [1, 2]}, "regions_class_order": [1, 2]},
            "regions_class_order must have 1 entries",
        ),
        ({"labels": {"background": 0, "a": "one"}}, "is not as nnU-Net writes it: labels"),
    ],
)
def test_labels_that_nobody_trains_with(changes, message, tmp_path):
    with pytest.raises(ModelContractError, match=message):
        read_dataset(write(tmp_path, "dataset.json", made.dataset(**changes)))


def test_a_configuration_inherits(tmp_path):
    small = {"inherits_from": "3d_fullres", "patch_size": [8, 8, 8]}
    content = made.plans(configurations={"3d_fullres": made.configuration(), "3d_small": small})
    plans = read_plans(write(tmp_path, "plans.json", content))
    configuration = select_configuration(plans, "3d_small", tmp_path / "plans.json")
    assert configuration.patch_size == [8, 8, 8]
    assert configuration.spacing == [2.0, 1.0, 1.0]


def test_configurations_that_inherit_from_each_other_are_refused(tmp_path):
    loop = {"a": {"inherits_from": "b", **made.configuration()}, "b": {"inherits_from": "a"}}
    plans = read_plans(write(tmp_path, "plans.json", made.plans(configurations=loop)))
    with pytest.raises(ModelContractError, match="a inherits from itself, or over more than 16"):
        select_configuration(plans, "a", tmp_path / "plans.json")


@pytest.mark.parametrize("size", [1e303, 1e-320, -1.0, float("nan")])
def test_voxels_of_no_size(tmp_path, size):
    content = made.plans(
        configurations={"3d_fullres": made.configuration(spacing=[size, 1.0, 1.0])}
    )
    plans = read_plans(write(tmp_path, "plans.json", content))
    with pytest.raises(ModelContractError, match="plans.json is not as nnU-Net writes it: .*spaci"):
        select_configuration(plans, "3d_fullres", tmp_path / "plans.json")


def test_a_configuration_that_is_not_there(tmp_path):
    plans = read_plans(write(tmp_path, "plans.json", made.plans()))
    with pytest.raises(ModelContractError, match="has no configuration 2d; it has 3d_fullres"):
        select_configuration(plans, "2d", tmp_path / "plans.json")


def test_plans_before_architectures_were_written_down(tmp_path):
    former = made.configuration(
        UNet_class_name="PlainConvUNet",
        UNet_base_num_features=32,
        unet_max_num_features=64,
        n_conv_per_stage_encoder=[2, 2, 2],
        n_conv_per_stage_decoder=[2, 2],
        conv_kernel_sizes=[[3, 3, 3]] * 3,
        pool_op_kernel_sizes=[[1, 1, 1], [2, 2, 2], [2, 2, 2]],
    )
    del former["architecture"]
    content = made.plans(configurations={"3d_fullres": former})
    plans = read_plans(write(tmp_path, "plans.json", content))
    configuration = select_configuration(plans, "3d_fullres", tmp_path / "plans.json")
    arguments = configuration.architecture.arch_kwargs
    assert arguments["features_per_stage"] == [32, 64, 64]
    assert arguments["strides"] == [[1, 1, 1], [2, 2, 2], [2, 2, 2]]
    assert configuration.architecture.network_class_name.endswith("unet.PlainConvUNet")


def test_axes_go_back_to_the_stored_order(tmp_path):
    content = made.plans(transpose_forward=[2, 0, 1])
    plans = read_plans(write(tmp_path, "plans.json", content))
    # the network's axes are the stored x, z, y
    assert stored_order(["x", "z", "y"], plans, None) == ("z", "y", "x")
    other = read_plans(write(tmp_path, "plans.json", made.plans(transpose_forward=[0, 0, 1])))
    with pytest.raises(ModelContractError, match="must list 0, 1 and 2 once each"):
        check_order(other, tmp_path / "plans.json")


def test_axes_that_do_not_go_back_are_refused(tmp_path):
    content = made.plans(transpose_forward=[2, 0, 1], transpose_backward=[2, 0, 1])
    plans = read_plans(write(tmp_path, "plans.json", content))
    with pytest.raises(ModelContractError, match=r"which is \[1, 2, 0\], found \[2, 0, 1\]"):
        check_order(plans, tmp_path / "plans.json")


@pytest.mark.parametrize("key", ["channel_names", "modality"])
def test_channels_are_in_the_order_of_their_numbers(key, tmp_path):
    names = {str(number): f"c{number}" for number in (1, 0, 10, *range(2, 10))}
    content = made.dataset() | {"channel_names": {}, key: names}
    dataset = read_dataset(write(tmp_path, "dataset.json", content))
    assert dataset.channels == [f"c{number}" for number in range(11)]


@pytest.mark.parametrize("names", [{"1": "a", "2": "b"}, {"0": "a", "x": "b"}, {"00": "a"}])
def test_channels_without_their_numbers_are_refused(names, tmp_path):
    path = write(tmp_path, "dataset.json", made.dataset(channel_names=names))
    with pytest.raises(ModelContractError, match="the numbers of the channels, from 0 on"):
        read_dataset(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"configurations": []}, "is not as nnU-Net writes it: configurations"),
        ({"transpose_forward": [0, 1]}, "is not as nnU-Net writes it: transpose_forward"),
        (
            {"foreground_intensity_properties_per_channel": {"0": {"mean": "high"}}},
            "is not as nnU-Net writes it: foreground_intensity_properties_per_channel",
        ),
    ],
)
def test_damaged_plans_are_named(changes, message, tmp_path):
    with pytest.raises(ModelContractError, match=message):
        read_plans(write(tmp_path, "plans.json", made.plans(**changes)))
