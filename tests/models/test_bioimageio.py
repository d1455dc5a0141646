"""How bioimage.io packages are run, as keys of a job file; their own examples; what is refused."""

import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import bioimageio_packages as made
import numpy as np
import pytest
import torch

from beam_inference.config.network import Network
from beam_inference.errors import ConfigError, ModelContractError
from beam_inference.launch.new_job import describe_package
from beam_inference.launch.package_trial import try_package
from beam_inference.models.bioimageio import KIND
from beam_inference.models.hashes import model_sha256
from beam_inference.models.loading import load_network

PACKAGES = Path(__file__).parents[3] / "shared" / "data" / "bioimageio"


def recipe(folder):
    """The recipe of a package."""
    return KIND.read(folder, None).describe()


def normalized(tmp_path, *operations, dims=2, **keys):
    """What becomes of preprocessing."""
    content = made.described(dims, operations, **keys)
    return recipe(made.make_package(tmp_path / "p", content, dims=dims)).values["model.normalize"]


def with_space(**changes):
    """A description whose axes of space are changed."""
    content = made.described()
    for axis in content["outputs"][0]["axes"][2:]:
        axis.update(changes)
    return content


def in_source(tmp_path, **changes):
    """A package whose network is made by code that writes a file when it runs."""
    return made.make_source_package(tmp_path / "package", tmp_path / "planted", **changes)


@pytest.mark.parametrize("name", ["unet2d_nuclei_broad", "upsample_test_model"])
def test_packages_of_others_pass_their_own_test(name):
    check_package(PACKAGES / name)


def test_a_coarser_output_passes_its_own_test_and_no_job():
    folder = PACKAGES / "unet2d_diff_output_shape"
    check_package(folder)
    assert recipe(folder).obstacle.startswith("its output has 1/2 of the input's voxels along y")


@pytest.mark.parametrize("name", ["v0_4_0", "v0_4_9"])
def test_the_former_format_of_the_same_package_passes_its_own_test(name, tmp_path):
    if not PACKAGES.exists():
        pytest.skip(f"{PACKAGES} is absent")
    source = PACKAGES / "unet2d_nuclei_broad"
    for file in ("weights.pt", "test_input.npy", "test_output.npy"):
        shutil.copy(source / file, tmp_path)
    shutil.copy(source / f"{name}.bioimageio.yaml", tmp_path / "rdf.yaml")
    check_package(tmp_path)
    first = recipe(tmp_path).values
    second = recipe(source).values
    assert first == second


def check_package(folder):
    """Run a package's own test, with what it carries trusted."""
    if not folder.exists():
        pytest.skip(f"{folder} is absent")
    result = try_package(str(folder), None, is_trusted=True)
    assert result.image == "the package's own example"
    assert result.is_passed, result.comparison


def test_the_settings_of_a_network_of_planes(tmp_path):
    described = recipe(made.make_package(tmp_path / "p"))
    assert described.values == {
        "model.input_channels": 1,
        "model.output_channels": 2,
        "model.dims": 2,
        "model.normalize": "none",
        "model.crop_margin": [0, 4, 4],
        "inference.patch_shape": [1, 504, 504],
        "inference.patch_overlap": [0, 0, 0],
        "output.dtype": "float32",
        "input.fill": "symmetric",
    }
    assert all(setting.reason for setting in described.settings)
    assert described.facts["licence"] == "MIT"
    assert described.obstacle is None


def test_both_formats_say_the_same(tmp_path):
    for dims in (2, 3):
        new = made.make_package(tmp_path / f"new{dims}", dims=dims)
        old = made.make_package(tmp_path / f"old{dims}", made.described_04(dims), dims=dims)
        assert recipe(old).values == recipe(new).values
        assert try_package(str(old), None).is_passed


@pytest.mark.parametrize("channels", [1, 2])
def test_channels_of_the_former_format_that_follow_the_inputs(tmp_path, channels):
    content = made.described_04(2)
    content["inputs"][0]["shape"]["min"][1] = channels
    shape = content["outputs"][0]["shape"]
    shape["scale"][1] = 1.0
    shape["offset"][1] = 0.5
    values = recipe(made.make_package(tmp_path / "p", content, channels=channels)).values
    assert values["model.input_channels"] == channels
    assert values["model.output_channels"] == channels + 1


@pytest.mark.parametrize("offset", [0.0, 0.2, -3.0])
@pytest.mark.parametrize("read", [describe_package, try_package])
def test_an_output_of_no_channels_is_refused(read, offset, tmp_path):
    content = made.described_04()
    content["outputs"][0]["shape"]["offset"][1] = offset
    folder = made.make_package(tmp_path / "p", content)
    with pytest.raises(ModelContractError, match=rf"answer has the size {2 * offset:.0f} along it"):
        read(str(folder), None)


def test_an_input_axis_that_follows_another_leaves_something(tmp_path):
    content = made.described()
    content["inputs"][0]["axes"][3]["size"] = {"tensor_id": "raw", "axis_id": "y", "offset": -16}
    with pytest.raises(ModelContractError, match="its axis x follows, raw has the size 0 along it"):
        recipe(made.make_package(tmp_path / "p", content))


@pytest.mark.parametrize("names", [[], None])
@pytest.mark.parametrize("end", ["inputs", "outputs"])
def test_channels_without_names_are_refused(end, names, tmp_path):
    content = made.described()
    axis = content[end][0]["axes"][1]
    axis["channel_names"] = names
    if names is None:
        del axis["channel_names"]
    with pytest.raises(ModelContractError, match="an axis of channels has no channel_names"):
        recipe(made.make_package(tmp_path / "p", content))


@pytest.mark.parametrize(
    ("end", "name"),
    [("inputs", "min"), ("inputs", "step"), ("outputs", "scale"), ("outputs", "offset")],
)
@pytest.mark.parametrize("is_longer", [False, True])
def test_lists_of_another_number_of_axes_are_refused(end, name, is_longer, tmp_path):
    content = made.described_04()
    numbers = content[end][0]["shape"][name]
    content[end][0]["shape"][name] = [numbers[0], *numbers] if is_longer else numbers[1:]
    with pytest.raises(ModelContractError, match="shape or halo has another number of axes"):
        recipe(made.make_package(tmp_path / "p", content))


def test_a_volume_of_three_dimensions(tmp_path):
    values = recipe(made.make_package(tmp_path / "p", dims=3)).values
    assert values["inference.patch_shape"] == [24, 120, 120]
    assert values["model.crop_margin"] == [4, 4, 4]
    assert "model.dims" not in values


def test_without_a_halo_patches_overlap(tmp_path):
    content = made.described()
    for axis in content["outputs"][0]["axes"][2:]:
        del axis["halo"]
    values = recipe(made.make_package(tmp_path / "p", content)).values
    assert values["inference.patch_shape"] == [1, 512, 512]
    assert values["inference.patch_overlap"] == [0, 128, 128]
    assert "model.crop_margin" not in values


def test_convolutions_without_padding_are_a_crop_margin(tmp_path):
    content = with_space(halo=0)
    for axis in content["outputs"][0]["axes"][2:]:
        axis["size"]["offset"] = -4
    values = recipe(made.make_package(tmp_path / "p", content)).values
    assert values["model.crop_margin"] == [0, 2, 2]
    assert values["inference.patch_shape"] == [1, 508, 508]


def test_a_finer_output(tmp_path):
    values = recipe(made.make_package(tmp_path / "p", with_space(scale=0.5, halo=3))).values
    assert values["model.output_scale"] == [1, 2, 2]
    assert values["model.crop_margin"] == [0, 4, 4]  # a multiple of the scale
    assert values["inference.patch_shape"] == [1, 1016, 1016]


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"scale": 2.0}, "its output has 1/2 of the input's voxels"),
        ({"scale": 1.5}, "its output has 2/3 of the input's voxels"),
        ({"halo": 256}, "its halo leaves nothing"),
        ({"size": {"tensor_id": "raw", "axis_id": "x", "offset": 2}, "id": "x"}, None),
    ],
)
def test_what_no_job_does_is_told(changes, obstacle, tmp_path):
    content = made.described()
    content["outputs"][0]["axes"][3].update(changes)
    if obstacle is None:
        obstacle = "its output has 2 voxels more than its input along x"
    assert obstacle in recipe(made.make_package(tmp_path / "p", content)).obstacle


def test_voxel_sizes(tmp_path):
    content = made.described(3)
    for axis, size in zip(content["inputs"][0]["axes"][2:], (40, 4, 4), strict=True):
        axis.update(unit="nanometer", scale=size)
    for axis, size in zip(content["outputs"][0]["axes"][2:], (40, 4, 4), strict=True):
        axis.update(unit="nanometer", scale=size)
    described = recipe(made.make_package(tmp_path / "p", content, dims=3))
    assert described.has_unit
    assert described.voxel_size == pytest.approx((4e-5, 4e-6, 4e-6))


def test_padding_that_the_package_states(tmp_path):
    content = made.described()
    content["inputs"][0]["pad"] = {"mode": "constant", "value": 1.5}
    values = recipe(made.make_package(tmp_path / "p", content)).values
    assert values["input.fill"] == "constant"
    assert values["input.fill_value"] == 1.5
    assert values["input.fill_units"] == "network"


def op(name, **kwargs):
    """An operation in format 0.5."""
    return {"id": name, "kwargs": kwargs}


SECTION = {"levels": "levels.json", "eps": 1e-6, "floor": 0.0, "by": "section"}


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([op("ensure_dtype", dtype="float32")], "none"),
        ([op("zero_mean_unit_variance", axes=["y", "x"])], [{"standard": SECTION}]),
        (
            [op("zero_mean_unit_variance", axes=["y", "x"], eps=10.0), op("clip", min=-3, max=3)],
            [{"standard": SECTION | {"eps": 10.0}}, {"clip": [-3.0, 3.0]}],
        ),
        (
            [op("scale_range", axes=["y", "x"]), op("scale_linear", gain=2.0)],
            [{"rescale": SECTION | {"low": 0.0, "high": 1.0}}, {"scale": 2.0, "offset": 0.0}],
        ),
        (
            [op("zero_mean_unit_variance", axes=["batch", "y", "x"], eps=1e-5)],
            [{"standard": {"levels": "levels.json", "eps": 1e-5, "floor": 0.0}}],
        ),
        (
            [
                op("scale_range", min_percentile=1, max_percentile=99.8),
                op("clip", min=0, max=1),
            ],
            [
                {
                    "rescale": {
                        "levels": "levels.json",
                        "low": 0.01,
                        "high": 0.998,
                        "eps": 1e-6,
                        "floor": 0.0,
                    }
                },
                {"clip": [0.0, 1.0]},
            ],
        ),
        (
            [op("clip", min_percentile=1, max_percentile=99), op("scale_linear", gain=2.0)],
            [
                {"clip": {"levels": "levels.json", "low": 0.01, "high": 0.99}},
                {"scale": 2.0, "offset": 0.0},
            ],
        ),
        (
            [op("fixed_zero_mean_unit_variance", mean=100.0, std=20.0)],
            [{"standard": {"mean": 100.0, "std": 20.0}}],
        ),
        (
            [op("scale_linear", gain=[2.0], offset=[-1.0], axis="channel")],
            [{"scale": 2.0, "offset": -1.0}],
        ),
    ],
)
def test_preprocessing(operations, expected, tmp_path):
    assert normalized(tmp_path, *operations) == expected


def test_a_volume_is_one_sample(tmp_path):
    operation = op("zero_mean_unit_variance", axes=["z", "y", "x"])
    step = {"standard": {"levels": "levels.json", "eps": 1e-6, "floor": 0.0}}
    assert normalized(tmp_path, operation, dims=3) == [step]


def test_operations_of_the_former_format(tmp_path):
    operations = [
        {"name": "scale_linear", "kwargs": {"gain": 0.5, "offset": 1, "axes": "yx"}},
        {
            "name": "zero_mean_unit_variance",
            "kwargs": {"mode": "fixed", "axes": "yx", "mean": 3.0, "std": 2.0, "eps": 0.1},
        },
    ]
    package = made.make_package(tmp_path / "p", made.described_04(2, operations))
    assert recipe(package).values["model.normalize"] == [
        {"scale": 0.5, "offset": 1.0},
        {"standard": {"mean": 3.0, "std": 2.1}},
    ]


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([op("zero_mean_unit_variance", axes=["x"])], "takes values over the axes x"),
        ([op("scale_range", reference_tensor="answer")], "takes values of another tensor"),
        *(
            ([before, op("scale_range")], "scale_range .* after an operation that changes it")
            for before in (
                op("zero_mean_unit_variance", axes=["y", "x"]),
                op("scale_linear", gain=2.0),
                op("clip", min=20.0, max=200.0),
            )
        ),
        ([op("sigmoid")], "sigmoid of the input is none of those that are known here"),
        ([op("ensure_dtype", dtype="uint8")], "makes uint8 of the values"),
        ([op("custom", source="evil.py")], "custom of the input is none of"),
        ([op("clip", min=2, max=1)], "has the limits 2 and 1"),
        ([op("fixed_zero_mean_unit_variance", mean=1.0, std=1e-320)], "divides by .*e-320"),
        (
            [op("fixed_zero_mean_unit_variance", mean=[1.0], std=[2.0], axis="y")],
            "changes values along the axis y",
        ),
        ([op("scale_linear", gain="big")], "is not as the scale_linear of a model writes it"),
    ],
)
def test_preprocessing_that_is_not_known_is_named(operations, message, tmp_path):
    with pytest.raises(ModelContractError, match=message):
        normalized(tmp_path, *operations)


@pytest.mark.parametrize("data", [{"type": "uint8"}, [{"type": "uint8"}], {"values": [0, 1, 2]}])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_dtype_that_the_format_makes_in_the_end(data, side, tmp_path):
    content = made.described(2, [], [op("sigmoid"), op("scale_linear", gain=255.0)])
    content[side][0]["data"] = data
    with pytest.raises(ModelContractError, match="ensure_dtype of the .* makes uint8 of the value"):
        recipe(made.make_package(tmp_path / "p", content))
    content[side][0]["data"] = {"type": "float64"}
    recipe(made.make_package(tmp_path / "q", content))


def test_values_of_several_channels_together_are_refused(tmp_path):
    content = made.described(2, [op("zero_mean_unit_variance")], channels=2)
    with pytest.raises(ModelContractError, match="takes values of all channels together"):
        recipe(made.make_package(tmp_path / "p", content, channels=2))


def test_values_of_each_channel_of_a_section_are_refused(tmp_path):
    operations = [op("zero_mean_unit_variance", axes=["y", "x"])]
    content = made.described(2, operations, channels=2)
    with pytest.raises(ModelContractError, match="takes values of each channel of a section"):
        recipe(made.make_package(tmp_path / "p", content, channels=2))


@pytest.mark.parametrize(
    ("operations", "activation", "operators", "dtype"),
    [
        ([], "none", [], "float32"),
        ([op("sigmoid"), op("ensure_dtype", dtype="float32")], "sigmoid", [], "float32"),
        ([op("softmax")], "softmax", [], "float32"),
        (
            [op("scale_linear", gain=2.0, offset=1.0), op("sigmoid")],
            "none",
            [{"operator": "affine", "scale": 2.0, "offset": 1.0}, {"operator": "sigmoid"}],
            "float32",
        ),
        (
            [op("fixed_zero_mean_unit_variance", mean=1.0, std=2.0), op("clip", min=0)],
            "none",
            [
                {"operator": "affine", "scale": 0.5, "offset": -0.5},
                {"operator": "clip", "low": 0.0},
            ],
            "float32",
        ),
        (
            [op("sigmoid"), op("binarize", threshold=0.5), op("ensure_dtype", dtype="uint8")],
            "sigmoid",
            [{"operator": "threshold", "at": float(np.nextafter(np.float32(0.5), np.inf))}],
            "uint8",
        ),
    ],
)
def test_postprocessing(operations, activation, operators, dtype, tmp_path):
    content = made.described(2, (), operations)
    values = recipe(made.make_package(tmp_path / "p", content)).values
    assert values.get("model.activation", "none") == activation
    assert values.get("postprocess", []) == operators
    assert values["output.dtype"] == dtype


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (op("scale_mean_variance", reference_tensor="raw"), "scale_mean_variance of the output"),
        (op("stardist_postprocessing"), "stardist_postprocessing of the output is none of"),
        (op("binarize", threshold=[0.1, 0.2], axis="channel"), "other than one threshold"),
        (op("softmax", axis="x"), "goes along the axis x"),
        (op("clip", min_percentile=1), "takes percentiles of the result"),
        (op("zero_mean_unit_variance"), "zero_mean_unit_variance of the output is none of"),
    ],
)
def test_postprocessing_that_is_not_known_is_named(operation, message, tmp_path):
    with pytest.raises(ModelContractError, match=message):
        recipe(made.make_package(tmp_path / "p", made.described(2, (), [operation])))


def test_what_is_computed_of_the_example(tmp_path):
    """Each operation against NumPy, with the statistics of the example itself."""

    def standardise(image):
        mean = image.mean((2, 3), keepdims=True)
        return (image - mean) / (image.std((2, 3), keepdims=True) + 1e-6)

    folder = made.make_package(
        tmp_path / "p",
        made.described(2, [op("zero_mean_unit_variance", axes=["y", "x"])], [op("sigmoid")]),
        before=standardise,
        after=lambda answer: 1 / (1 + np.exp(-answer)),
    )
    assert try_package(str(folder), None).is_passed

    def stretch(image):
        low, high = (np.quantile(image, q, method="inverted_cdf") for q in (0.01, 0.998))
        return np.clip((image - low) / (high - low + 1e-6), 0, 1)

    folder = made.make_package(
        tmp_path / "q",
        made.described(
            3,
            [op("scale_range", min_percentile=1, max_percentile=99.8), op("clip", min=0, max=1)],
            [op("softmax"), op("scale_linear", gain=2.0)],
        ),
        dims=3,
        before=stretch,
        after=lambda answer: 2 * np.exp(answer) / np.exp(answer).sum(1, keepdims=True),
    )
    assert try_package(str(folder), None).is_passed


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_quantiles_of_each_section_are_known_of_an_example(dtype, tmp_path):
    def stretch(image):
        low, high = (np.quantile(image, q, method="inverted_cdf") for q in (0.01, 0.998))
        return (image - low) / (high - low + 1e-6)

    steps = [op("scale_range", min_percentile=1, max_percentile=99.8)]
    folder = made.make_package(tmp_path / "q", made.described(2, steps), dims=2, before=stretch)
    np.save(folder / "test_input.npy", np.load(folder / "test_input.npy").astype(dtype))
    assert try_package(str(folder), None).is_passed


def test_an_example_that_is_another_is_noticed(tmp_path):
    folder = made.make_package(tmp_path / "p")
    array = np.load(folder / "test_output.npy")
    array[0, 0, :3] += 0.1
    np.save(folder / "test_output.npy", array)
    result = try_package(str(folder), None)
    assert not result.is_passed
    tolerance = [{"absolute_tolerance": 0.2}]
    config = {"bioimageio": {"reproducibility_tolerance": tolerance}}
    made.write_description(folder, made.described(config=config))
    assert try_package(str(folder), None).is_passed
    tolerance[0]["weights_formats"] = ["onnx"]
    made.write_description(folder, made.described(config=config))
    assert not try_package(str(folder), None).is_passed


def test_onnx_weights_are_named_by_their_file(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder = made.make_package(tmp_path / "p")
    example = (torch.zeros(1, 1, 24, 24),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(made.make_network(), example, dynamo=True, verbose=False)
    (folder / "weights.onnx").write_bytes(program.model_proto.SerializeToString())
    made.write_description(folder, made.described(weights={"onnx": {"source": "weights.onnx"}}))
    assert recipe(folder).network_file == "weights.onnx"
    assert try_package(str(folder), None).is_passed
    with pytest.raises(ModelContractError, match=r"write model\.path: .*weights\.onnx"):
        load_network(Network(path=str(folder)))


def test_source_is_not_run_before_it_is_trusted(tmp_path):
    folder = in_source(tmp_path)
    network = Network(path=str(folder), output_channels=2)
    recipe(folder)
    model_sha256(network)
    with pytest.raises(ModelContractError, match=r"made by code, network\.py.*--trust_model"):
        load_network(network)
    with pytest.raises(ModelContractError, match="--trust_model"):
        try_package(str(folder), None)
    assert not (tmp_path / "planted").exists()
    assert try_package(str(folder), None, is_trusted=True).is_passed
    assert (tmp_path / "planted").exists()


def test_source_is_part_of_the_network_s_identity(tmp_path):
    folder = in_source(tmp_path)
    network = Network(path=str(folder), output_channels=2)
    before = model_sha256(network)
    with (folder / "network.py").open("a") as file:
        file.write("# changed\n")
    assert model_sha256(network) != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, r"network\.py has the sha256"),
        ({"callable": "absent"}, "cannot import absent"),
        ({"kwargs": {"unheard_of": 1}}, "cannot make the network: .*unheard_of"),
        ({"source": "../network.py"}, "expected the plain path of a file in the package"),
        ({"source": "https://example.com/n.py"}, "expected the plain path of a file"),
    ],
)
def test_source_that_does_not_do_is_told(changes, message, tmp_path):
    folder = in_source(tmp_path, **changes)
    with pytest.raises(ModelContractError, match=message):
        try_package(str(folder), None, is_trusted=True)


def test_files_are_what_the_package_says(tmp_path):
    folder = made.make_package(tmp_path / "p")
    for place, file in (("weights", "weights.pt"), ("inputs", "test_input.npy")):
        content = made.described()
        right = made.sha256(folder / file)
        for digest in (right, right.replace(right[0], "0" if right[0] != "0" else "1")):
            if place == "weights":
                content["weights"]["torchscript"]["sha256"] = digest
            else:
                content["inputs"][0]["test_tensor"]["sha256"] = digest
            made.write_description(folder, content)
            if digest == right:
                assert try_package(str(folder), None).is_passed
            else:
                with pytest.raises(ModelContractError, match=f"{file} has the sha256"):
                    try_package(str(folder), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": "0.3.6"}, r"its format_version is 0\.3\.6; 0\.4 and 0\.5 are read"),
        ({"type": "dataset"}, "describes a dataset, not a model"),
        ({"weights": {}}, "weights"),
        ({"weights": {"keras_hdf5": {"source": "w.h5"}}}, "it has keras_hdf5"),
        (
            {"weights": {"torchscript": {"source": "https://example.com/w.pt"}}},
            "those of torchscript are on the internet",
        ),
        ({"weights": {"torchscript": {"source": "../w.pt"}}}, "expected the plain path"),
        ({"weights": {"torchscript": {"source": "absent.pt"}}}, "there is no such file"),
        ({"inputs": []}, "which is not there"),
        ({"outputs": [{"id": "raw", "axes": [{"type": "batch"}]}]}, "two tensors have one name"),
        ({"inputs": "raw"}, "is not as bioimage.io writes it: inputs"),
    ],
)
def test_descriptions_of_something_else_are_refused(changes, message, tmp_path):
    folder = made.make_package(tmp_path / "p", made.described(**changes))
    with pytest.raises(ModelContractError, match=message):
        load_network(Network(path=str(folder), output_channels=2))


def test_two_tensors_of_one_name_are_refused_as_they_should_be(tmp_path):
    if not PACKAGES.exists():
        pytest.skip(f"{PACKAGES} is absent")
    invalid = "invalid_v0_4_0_duplicate_tensor_names.bioimageio.yaml"
    shutil.copy(PACKAGES / "unet2d_nuclei_broad" / invalid, tmp_path / "bioimageio.yaml")
    with pytest.raises(ModelContractError, match="two tensors have one name: data, data"):
        KIND.read(tmp_path, None)


CHANNEL = {"type": "channel", "channel_names": ["a"]}


@pytest.mark.parametrize(
    "axes",
    [
        [{"type": "batch"}, CHANNEL, {"type": "space", "id": "y", "size": 8}],
        [CHANNEL, {"type": "batch"}],
        [{"type": "batch"}, CHANNEL, {"type": "time", "size": 8}],
    ],
)
def test_other_axes_are_named(axes, tmp_path):
    content = made.described()
    content["inputs"][0]["axes"] = axes
    content["outputs"][0]["axes"] = axes
    folder = made.make_package(tmp_path / "p", content)
    with pytest.raises(ModelContractError, match="expected batch, channel, z, y, x"):
        recipe(folder)


def test_folds_are_refused(tmp_path):
    folder = made.make_package(tmp_path / "p")
    with pytest.raises(ModelContractError, match="has no folds"):
        load_network(Network(path=str(folder), folds=[0]))


@pytest.mark.parametrize(
    "text", ["a: [", "- 1", "!!python/object:os.system {}", "\x00", "a: &b [*b]"]
)
def test_yaml_that_is_none_is_refused(text, tmp_path):
    folder = made.make_package(tmp_path / "p")
    (folder / "bioimageio.yaml").write_text(text)
    with pytest.raises((ModelContractError, ConfigError)):
        load_network(Network(path=str(folder)))


def test_a_folder_and_its_zip_file_are_one_network(tmp_path):
    folder = made.make_package(tmp_path / "p")
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", folder)
    for path in (str(folder), packed):
        assert try_package(path, None).is_passed
        loaded = load_network(Network(path=path, output_channels=2))
        assert loaded.kind == "torchscript"


def test_the_name_of_the_description_may_have_a_beginning(tmp_path):
    folder = made.make_package(tmp_path / "p")
    (folder / "bioimageio.yaml").rename(folder / "net.bioimageio.yaml")
    assert try_package(str(folder), None).is_passed


def test_a_package_that_answers_no_numbers_does_not_pass(tmp_path, monkeypatch):
    folder = made.make_package(tmp_path / "p")
    test = try_package(str(folder), None)
    assert test.is_passed
    assert not replace(test, lowest=float("nan"), highest=float("nan"), difference=None).is_passed
    assert not replace(test, highest=float("inf"), difference=0.0).is_passed


def test_an_example_whose_result_is_not_finite_judges_nothing(tmp_path):
    folder = made.make_package(tmp_path / "p", after=lambda answer: np.full_like(answer, np.inf))
    with pytest.raises(ModelContractError, match="holds NaN or infinite values"):
        try_package(str(folder), None)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([op("scale_linear", gain=0.0)], [], r"its preprocessing \(.*scale"),
        ([], [op("scale_linear", gain=0.0)], r"its postprocessing \(.*scale"),
    ],
)
def test_numbers_that_no_job_can_use_are_told_of(before, after, message, tmp_path):
    content = made.described(preprocessing=before, postprocessing=after)
    folder = made.make_package(tmp_path / "p", content)
    with pytest.raises(ModelContractError, match=f"no job can do {message}"):
        try_package(str(folder), None)


def test_a_description_that_is_a_pipe_is_not_waited_for(tmp_path):
    folder = made.make_package(tmp_path / "p")
    (folder / "bioimageio.yaml").unlink()
    os.mkfifo(folder / "bioimageio.yaml")
    with pytest.raises(ModelContractError, match="is no file"):
        try_package(str(folder), None)
