"""How nnU-Net runs a network, as keys of a job file."""

import nnunet_folders as made
import pytest

from beam_inference.errors import ModelContractError
from beam_inference.models.nnunet import KIND
from beam_inference.models.packages import OwnResampling

pytest.importorskip("dynamic_network_architectures")

OF_BOX = {"levels": "levels.json", "of": "nonzero_box"}


def recipe(tmp_path, **keys):
    """The recipe of a folder."""
    folder, _ = made.make_folder(tmp_path / "model", **keys)
    return KIND.read(folder, None).describe()


def plans_with(**changes):
    """Plans whose configuration has other values."""
    return made.plans(configurations={"3d_fullres": made.configuration(**changes)})


def test_the_settings_of_a_ct_network(tmp_path):
    described = recipe(tmp_path, folds=(0, 1), mirror_axes=(0, 2))
    assert described.values == {
        "input.box": {"levels": "levels.json"},
        "input.fill": "constant",
        "input.fill_value": 0,
        "input.fill_units": "network",
        "model.input_channels": 1,
        "model.output_channels": 3,
        "model.normalize": [{"clip": [10.0, 220.0]}, {"standard": {"mean": 100.0, "std": 40.0}}],
        "inference.patch_shape": [16, 24, 24],
        "inference.patch_overlap": [8, 12, 12],
        "inference.lattice": "spread",
        "inference.blend": {"gaussian": 0.125, "floor": "nnunet"},
        "inference.augment": {"mirror": ["z", "x"]},
        "model.channels": [{}, {}, {}],
        "postprocess": [{"operator": "argmax"}],
        "output.dtype": "uint8",
    }
    assert all(setting.reason for setting in described.settings)
    assert described.voxel_size == (2.0, 1.0, 1.0)
    assert described.has_unit
    assert described.needs_levels
    assert described.resampling == OwnResampling(
        order=3, separate_z="auto", clip=[10.0, 220.0], order_back=1, separate_z_back="auto"
    )
    assert described.facts["folds"] == "0, 1"
    assert described.facts["licence"] == "CC BY 4.0"
    assert described.cautions == []


def test_two_channels_of_ct(tmp_path):
    other = made.CT_PROPERTIES | {"mean": 50.0, "std": 0.0}
    plans = made.plans(
        configurations={
            "3d_fullres": made.configuration(normalization_schemes=["CTNormalization"] * 2)
        },
        foreground_intensity_properties_per_channel={"0": made.CT_PROPERTIES, "1": other},
    )
    described = made.dataset(channel_names={"0": "CT", "1": "CT, later"})
    assert recipe(tmp_path, made=plans, described=described).values["model.normalize"] == [
        {"clip": [[10.0, 220.0], [10.0, 220.0]]},
        {"standard": {"mean": [100.0, 50.0], "std": [40.0, 1e-8]}},
    ]


def test_channels_without_statistics_are_named(tmp_path):
    with pytest.raises(ModelContractError, match=r"per_channel\.0, which is absent"):
        recipe(tmp_path, made=made.plans(foreground_intensity_properties_per_channel={}))


def test_values_are_counted_once(tmp_path):
    _, (network,) = made.make_folder(tmp_path / "model")
    count = sum(parameter.numel() for parameter in network.parameters())
    assert KIND.read(tmp_path / "model", None).describe().facts["values of a fold"] == f"{count:,}"


def test_without_mirroring(tmp_path):
    described = recipe(tmp_path, mirror_axes=None).values
    assert "inference.augment" not in described
    assert "model.channels" not in described


def test_axes_in_another_order(tmp_path):
    plans = made.plans(
        transpose_forward=[2, 0, 1],
        configurations={"3d_fullres": made.configuration(spacing=[3.0, 2.0, 1.0])},
    )
    described = recipe(tmp_path, made=plans, mirror_axes=(0,))
    assert described.values["inference.patch_shape"] == [24, 24, 16]
    assert described.values["inference.augment"] == {"mirror": ["x"]}
    assert described.voxel_size == (2.0, 1.0, 3.0)


def test_regions(tmp_path):
    labels = {"background": 0, "whole": [1, 2], "core": [2]}
    described = made.dataset(labels=labels, regions_class_order=[1, 2])
    found = recipe(tmp_path, described=described).values
    assert found["model.output_channels"] == 2
    assert found["postprocess"] == [
        {"operator": "sigmoid"},
        {"operator": "regions", "labels": [1, 2], "above": 0.5},
    ]


def test_large_labels_of_regions(tmp_path):
    labels = {"background": 0, "whole": [1, 300], "core": 300}
    described = made.dataset(labels=labels, regions_class_order=[1, 300])
    assert recipe(tmp_path, described=described).values["output.dtype"] == "uint16"


@pytest.mark.parametrize(
    ("scheme", "normalize"),
    [
        ("ZScoreNormalization", [{"standard": OF_BOX}]),
        ("RescaleTo01Normalization", [{"rescale": OF_BOX}]),
        ("NoNormalization", "none"),
        ("RGBTo01Normalization", [{"scale": 1 / 255}]),
    ],
)
def test_normalisations(scheme, normalize, tmp_path):
    described = recipe(tmp_path, made=plans_with(normalization_schemes=[scheme]))
    assert described.values["model.normalize"] == normalize
    assert described.resampling.clip == OF_BOX


def test_what_is_normalised_inside_the_object_alone(tmp_path):
    schemes = ["ZScoreNormalization", "CTNormalization", "ZScoreNormalization"]
    plans = made.plans(
        configurations={
            "3d_fullres": made.configuration(
                normalization_schemes=[*schemes, "ZScoreNormalization"],
                use_mask_for_norm=[True, True, False, True],
            )
        },
        foreground_intensity_properties_per_channel={"1": made.CT_PROPERTIES},
    )
    names = dict(enumerate(["T1", "CT", "T2", "FLAIR"]))
    described = recipe(tmp_path, made=plans, described=made.dataset(channel_names=names))
    assert described.values["model.normalize"] == [
        {"standard": {"levels": "levels.json", "of": "object"}, "channels": [0, 3]},
        {"clip": [10.0, 220.0], "channels": [1]},
        {"standard": {"mean": 100.0, "std": 40.0}, "channels": [1]},
        {"standard": OF_BOX, "channels": [2]},
        {"clip": OF_BOX | {"low": 0, "high": 1}},
    ]
    assert described.needs_object
    assert described.resampling.clip is None


def test_what_is_not_resampled_by_a_spline_is_kept_within_no_values(tmp_path):
    masked = {"normalization_schemes": ["ZScoreNormalization"], "use_mask_for_norm": [True]}
    for number, resampled in enumerate([made.resampling("data", order=1), {}]):
        found = recipe(tmp_path / str(number), made=plans_with(**masked, **resampled)).values
        (step, *clips) = found["model.normalize"]
        assert step == {"standard": {"levels": "levels.json", "of": "object"}}
        assert len(clips) == number


def test_a_scheme_is_missing(tmp_path):
    described = made.dataset(channel_names={"0": "T1", "1": "T2"})
    with pytest.raises(ModelContractError, match=r"1 entries, and dataset\.json 2 channels"):
        recipe(tmp_path, described=described)


@pytest.mark.parametrize(
    "changes",
    [
        {"resampling_fn_data": "resample_torch_fornnunet"},
        made.resampling("data", order=2),
        made.resampling("probabilities", order=1) | {"resampling_fn_probabilities": "own"},
        {"resampling_fn_data_kwargs": {"order": 3, "order_z": 1}},
    ],
)
def test_ways_to_resample_that_are_not_known(changes, tmp_path):
    assert recipe(tmp_path, made=plans_with(**changes)).resampling is None


def test_thick_sections_may_be_resampled_in_one_way(tmp_path):
    kwargs = {"order": 1, "order_z": 0, "force_separate_z": True}
    described = recipe(tmp_path, made=plans_with(resampling_fn_data_kwargs=kwargs))
    assert (described.resampling.order, described.resampling.separate_z) == (1, True)
    assert described.resampling.separate_z_back == "auto"


def test_whether_thick_sections_are_apart_if_that_is_not_said(tmp_path):
    """The function's own default, and what plans of today say, are two."""
    kwargs = {"order": 3, "order_z": 0}
    for said, separate in (({}, False), ({"force_separate_z": None}, "auto")):
        changes = {"resampling_fn_data_kwargs": kwargs | said}
        folder = tmp_path / str(separate)
        folder.mkdir()
        assert recipe(folder, made=plans_with(**changes)).resampling.separate_z == separate


@pytest.mark.parametrize("other", [{"separate_z_anisotropy_threshold": 5}, {"is_seg": True}])
def test_other_arguments_of_the_resampling_are_refused(other, tmp_path):
    changes = {"resampling_fn_data_kwargs": {"order": 3, "order_z": 0} | other}
    with pytest.raises(ModelContractError, match=f"resampling_fn_data_kwargs.{next(iter(other))}"):
        recipe(tmp_path, made=plans_with(**changes))


def test_images_that_are_not_resampled_have_any_voxel_size(tmp_path):
    own = plans_with(resampling_fn_data="no_resampling_data_or_seg_to_shape")
    assert recipe(tmp_path, made=own).voxel_size == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization_schemes": ["OwnNormalization"]}, "OwnNormalization is none of"),
        ({"preprocessor_name": "MyPreprocessor"}, "preprocessor_name is MyPreprocessor"),
    ],
)
def test_what_is_not_known_is_named(changes, message, tmp_path):
    with pytest.raises(ModelContractError, match=message):
        recipe(tmp_path, made=plans_with(**changes))


def test_another_label_manager_is_named(tmp_path):
    with pytest.raises(ModelContractError, match="label_manager is MyManager"):
        recipe(tmp_path, made=made.plans(label_manager="MyManager"))


def test_readers_without_a_unit(tmp_path):
    assert not recipe(tmp_path, made=made.plans(image_reader_writer="Tiff3DIO")).has_unit


def test_odd_patches_are_told(tmp_path):
    plans = plans_with(patch_size=[15, 24, 24])
    assert any("odd numbers (15)" in each for each in recipe(tmp_path, made=plans).cautions)
