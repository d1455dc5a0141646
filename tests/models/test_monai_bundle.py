"""How MONAI bundles are run, as keys of a job file; what is refused; nothing of them runs."""

import json

import monai_bundles as made
import numpy as np
import pytest
import torch
import yaml

from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.launch.package_trial import try_package
from beam_inference.models.hashes import model_sha256
from beam_inference.models.loading import load_network
from beam_inference.models.monai_bundle import KIND


def recipe(folder):
    """The recipe of a bundle."""
    return KIND.read(folder, None).describe()


def bundle(tmp_path, *transforms, after=(), **changes):
    """The recipe of a bundle with other transforms."""
    content = made.config(list(transforms), list(after), **changes)
    return recipe(made.make_bundle(tmp_path / "bundle", content))


def transform(name, **arguments):
    """A transform of a configuration."""
    key = "pred" if name in ("Activationsd", "AsDiscreted") else "image"
    return {"_target_": name, "keys": key, **arguments}


def test_the_settings_of_a_segmentation(tmp_path):
    described = recipe(made.make_bundle(tmp_path / "b"))
    assert described.values == {
        "model.input_channels": 1,
        "model.output_channels": 2,
        "model.normalize": [
            {"scale": pytest.approx(1 / 221), "offset": pytest.approx(57 / 221)},
            {"clip": [0.0, 1.0]},
        ],
        "inference.patch_shape": [16, 20, 24],
        "inference.patch_overlap": [8, 10, 12],
        "inference.lattice": "stride",
        "inference.blend": "constant",
        "input.fill": "constant",
        "input.fill_value": 0.0,
        "input.fill_units": "network",
        "postprocess": [{"operator": "softmax"}, {"operator": "argmax"}],
        "output.dtype": "uint8",
    }
    assert all(setting.reason for setting in described.settings)
    assert described.voxel_size == (2.0, 1.0, 1.5)
    assert described.facts["licence"] == "Apache-2.0"
    assert described.facts["channels of the output"] == "background, spleen"
    assert any("orientation RAS" in caution for caution in described.cautions)


def test_the_same_in_yaml(tmp_path):
    folder = made.make_bundle(tmp_path / "b")
    expected = recipe(folder).values
    (folder / "configs" / "inference.json").unlink()
    (folder / "configs" / "inference.yaml").write_text(yaml.safe_dump(made.config()))
    assert recipe(folder).values == expected


def test_the_network_takes_x_y_z(tmp_path):
    folder = made.make_bundle(tmp_path / "b")
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 1, 8, 10, 12))).float()
    loaded = load_network(Network(path=str(folder), output_channels=2))
    with torch.no_grad():
        expected = made.make_network()(values.permute(0, 1, 4, 3, 2)).permute(0, 1, 4, 3, 2)
        assert torch.equal(loaded.network.eval()(values), expected)


def test_the_network_runs_as_the_tool_runs_it(tmp_path):
    """Where MONAI is installed its own inferer is asked; elsewhere the network runs at least."""
    for number, inferer in enumerate(
        ({}, {"mode": "gaussian", "overlap": 0.25}, {"overlap": [0.5, 0.25, 0.625]})
    ):
        folder = made.make_bundle(tmp_path / str(number), made.config(inferer=inferer))
        result = try_package(str(folder), None)
        assert result.is_passed, result.comparison
        assert result.image_shape == (1, 21, 26, 32)
        assert result.difference is None or result.difference < 1e-6


def test_gaussian_windows(tmp_path):
    inferer = {"mode": "gaussian", "sigma_scale": 0.25, "padding_mode": "replicate"}
    values = bundle(tmp_path, inferer=inferer).values
    assert values["inference.blend"] == {"gaussian": 0.25, "floor": "monai"}
    assert values["input.fill"] == "edge"
    assert "input.fill_value" not in values


@pytest.mark.parametrize(
    ("transforms", "normalize"),
    [
        ([], "none"),
        (
            [transform("ScaleIntensityRanged", a_min=0, a_max=10)],
            [{"scale": 0.1, "offset": 0.0}],
        ),
        (
            [transform("monai.transforms.NormalizeIntensityd", subtrahend=5.0, divisor=2.0)],
            [{"standard": {"mean": 5.0, "std": 2.0}}],
        ),
        (
            [transform("NormalizeIntensityd", nonzero=False)],
            [{"standard": {"levels": "levels.json", "floor": 0.0}}],
        ),
        (
            [transform("NormalizeIntensityd", nonzero=True, channel_wise=True)],
            [{"standard": {"levels": "levels.json", "floor": 0.0, "of": "nonzero"}}],
        ),
        (
            [transform("NormalizeIntensityd", nonzero=True, subtrahend=5.0, divisor=2.0)],
            [{"standard": {"mean": 5.0, "std": 2.0, "of": "nonzero"}}],
        ),
        (
            [transform("ScaleIntensityd", minv=-1.0, maxv=1.0)],
            [
                {"rescale": {"levels": "levels.json", "low": 0.0, "high": 1.0, "floor": 0.0}},
                {"scale": 2.0, "offset": -1.0},
            ],
        ),
        (
            [
                transform(
                    "ScaleIntensityRangePercentilesd",
                    lower=1,
                    upper=99,
                    b_min=0.0,
                    b_max=1.0,
                    clip=True,
                )
            ],
            [
                {"rescale": {"levels": "levels.json", "low": 0.01, "high": 0.99, "floor": 0.0}},
                {"clip": [0.0, 1.0]},
            ],
        ),
        ([transform("CastToTyped", dtype="$torch.float32")], "none"),
        ([transform("RandFlipd", _disabled_=True)], "none"),
    ],
)
def test_preprocessing(transforms, normalize, tmp_path):
    described = bundle(tmp_path, *transforms)
    assert described.values["model.normalize"] == normalize
    assert described.needs_levels == ("levels" in str(normalize))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transforms": [transform("CropForegroundd")]}, "CropForegroundd is none of the transf"),
        (
            {"transforms": [transform("ScaleIntensityRanged", a_min="$-57", a_max=1)]},
            r"preprocessing\.0\.a_min is the expression \$-57, which is Python code",
        ),
        (
            {"transforms": [transform("Lambdad", func="$lambda x: x")]},
            r"preprocessing\.0\.func is the expression",
        ),
        ({"transforms": "$[1, 2]"}, "transforms is the expression"),
        ({"preprocessing": "$make()"}, "preprocessing is the expression"),
        ({"preprocessing": "%other.json#a"}, "is the macro"),
        ({"preprocessing": "@a", "a": "@b", "b": "@a"}, "refers to itself"),
        ({"preprocessing": "@absent"}, "refers to @absent, which is not there"),
        (
            {"transforms": [transform("Spacingd", pixdim={"_target_": "os.system"})]},
            "is a component, 'os.system'",
        ),
        ({"after": [transform("KeepLargestConnectedComponentd")]}, "KeepLargestConn.* is none of"),
        (
            {"after": [transform("AsDiscreted", argmax=True), transform("Activationsd")]},
            "follows one that makes labels",
        ),
        ({"after": [transform("Activationsd", softmax=True, sigmoid=True)]}, "sigmoid and softmax"),
        ({"after": [transform("AsDiscreted", threshold=True)]}, "a threshold, true|True"),
        ({"inferer": {"_target_": "SimpleInferer"}}, "SimpleInferer is not known here"),
        ({"inferer": {"roi_size": [96, 96]}}, r"has roi_size \[96, 96\]"),
        ({"inferer": {"roi_size": "$[96]"}}, r"inferer\.roi_size is the expression"),
        ({"inferer": {"overlap": 1.5}}, "has the overlap 1.5"),
        ({"inferer": {"mode": "other"}}, "has the mode 'other'"),
        ({"inferer": {"process_fn": 1}}, "has the argument process_fn, which is not known"),
        ({"network": made.NETWORK | {"spatial_dims": 2}}, "the network has 2 axes of space"),
        (
            {"after": [{"_target_": "Invertd", "keys": "pred", "post_func": "$lambda x: 1 - x"}]},
            "postprocessing.0 has the argument post_func, which may change values",
        ),
        (
            {"after": [{"_target_": "SaveImaged", "keys": "pred", "scale": 255}]},
            "postprocessing.0 has the argument scale",
        ),
        (
            {"transforms": [transform("LoadImaged", reverse_indexing=True)]},
            "preprocessing.0 has the argument reverse_indexing",
        ),
        (
            {"transforms": [transform("LoadImaged", reader="$__import__('mine').Reader")]},
            "preprocessing.0.reader is .*; only MONAI's own readers",
        ),
        ({"inferer": {"_mode_": "callable"}}, "inferer has _mode_: 'callable'"),
        (
            {"transforms": [transform("ToTensord", dtype="$torch.uint8")]},
            r"makes '\$torch\.uint8' of the values",
        ),
    ],
)
def test_what_is_not_known_is_named(changes, message, tmp_path):
    content = made.config(**changes)
    with pytest.raises(ModelContractError, match=message):
        recipe(made.make_bundle(tmp_path / "b", content))


POST = {"_target_": "PostProcessing", "transform": "$f"}


def change_list(key, **changes):
    """A list of transforms with further arguments."""
    return {key: {"_target_": "Compose", "transforms": []} | changes}


def evaluator(**changes):
    """An evaluator as bundles have it."""
    return {
        "_target_": "SupervisedEvaluator",
        "device": "@device",
        "val_data_loader": "@dataloader",
        "network": "@network",
        "inferer": "@inferer",
        "postprocessing": "@postprocessing",
        "val_handlers": "@handlers",
        "amp": True,
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "$torch.nn.Sequential(@network_def, torch.nn.Softmax(1))"}, "another network"),
        ({"evaluator": {"network": "$torch.nn.Sequential(@network)"}}, "evaluator.network is"),
        ({"evaluator": {"postprocessing": "$@postprocessing2"}}, "evaluator.postprocessing is"),
        ({"evaluator": {"prepare_batch": "$lambda b: b * 2"}}, "evaluator.prepare_batch is"),
        ({"evaluator": {"iteration_update": "$f"}}, "evaluator.iteration_update is"),
        ({"evaluator": "$monai.engines.SupervisedEvaluator(net=1)"}, "evaluator is the expression"),
        (
            {"evaluator": evaluator(_target_="EnsembleEvaluator")},
            "evaluator is a EnsembleEvaluator",
        ),
        ({"evaluator": evaluator(_target_="x.SupervisedEvaluator")}, "only SupervisedEvaluator of"),
        ({"evaluator": evaluator(mode="train")}, "evaluator.mode is 'train'"),
        ({"evaluator": evaluator(mode=None)}, "evaluator.mode is None"),
        ({"evaluator": evaluator(decollate=False)}, "evaluator.decollate is False"),
        ({"evaluator": evaluator(inferer=None)}, "evaluator.inferer is null, and so MONAI would"),
        ({"evaluator": evaluator(postprocessing=None)}, "evaluator.postprocessing is null"),
        ({"evaluator": evaluator(postprocessing=[])}, r"evaluator.postprocessing is \[\]"),
        (
            {"evaluator": {"_target_": "SupervisedEvaluator"}},
            "val_data_loader|network is not given",
        ),
        ({"evaluator": evaluator(to_kwargs={"dtype": "$torch.half"})}, "evaluator.to_kwargs is"),
        ({"evaluator": evaluator(new=1)}, "evaluator.new is 1, which may change values"),
        (
            {"evaluator": evaluator(val_handlers=[{"_target_": "PostProcessing"}])},
            "val_handlers.0 is",
        ),
        (
            {
                "evaluator": evaluator(val_handlers="@mine"),
                "mine": [{"_target_": "StatsHandler"}, {"_target_": "scripts.Handler"}],
            },
            "evaluator.val_handlers.1 is 'scripts.Handler'",
        ),
        ({"evaluator": evaluator(val_handlers=["@pp"]), "pp": POST}, "val_handlers.0 is 'PostP"),
        ({"evaluator": evaluator(), "handlers": ["@pp"], "pp": POST}, "val_handlers.0 is 'PostP"),
        ({"evaluator": evaluator(val_handlers="@h#a"), "h": {"a": [POST]}}, "val_handlers.0 is"),
        ({"evaluator": evaluator(val_handlers=POST)}, "val_handlers.0 is 'PostProcessing'"),
        ({"evaluator": evaluator(val_handlers="$f(@handlers)")}, "val_handlers is the expression"),
        ({"evaluator": evaluator(val_handlers=[{"_target_": "TrtHandler"}])}, "0 is 'TrtHandler'"),
        ({"evaluator": "@other", "other": evaluator(mode="train")}, "evaluator.mode is 'train'"),
        ({"evaluator": "%other"}, "evaluator is the macro"),
        ({"dataset": "@d", "d": {"_target_": "Dataset", "transform": "@t"}}, "transform is '@t'"),
        ({"network": {"_target_": "torch.jit.load", "f": "a.ts"}}, "network is {.*; only @network"),
        (
            {"network_def": {"_target_": "torch.jit.load", "f": "models/other.ts"}},
            "network_def.f is models/other.ts: MONAI would load",
        ),
        ({"run": ["$@evaluator2.run()"]}, r"run.0 is '\$@evaluator2.run\(\)', which may change"),
        ({"run": "$@validate#evaluator.run()"}, "run.0 is"),
        ({"initialize": ["$import os", "$@network.load_state_dict(1)"]}, "initialize.1 is"),
        ({"evaluating": [{"_target_": "f"}]}, "evaluating.0 is"),
        ({"dataset": {"_target_": "Dataset", "transform": None}}, "dataset.transform is null"),
        ({"dataset": {"_target_": "Dataset"}}, "dataset.transform is not given"),
        ({"dataset": {"_target_": "GridPatchDataset"}}, "dataset is a GridPatchDataset"),
        ({"dataloader": {"dataset": "@other"}}, "dataloader.dataset is '@other'"),
        ({"dataloader": {"collate_fn": "$f"}}, "dataloader.collate_fn is '\\$f'"),
        (
            change_list("postprocessing", _mode_="callable"),
            "postprocessing has the argument _mode_",
        ),
        (change_list("preprocessing", overrides={}), "preprocessing has the argument overrides"),
    ],
)
def test_other_parts_that_would_run_are_named(changes, message, tmp_path):
    content = made.config() | changes
    with pytest.raises(ModelContractError, match=message):
        recipe(made.make_bundle(tmp_path / "b", content))


@pytest.mark.parametrize(
    ("path", "others"),
    [
        ("@checkpoint", {"checkpoint": "$@bundle_root + '/models/best.pt'"}),
        (
            "$@checkpoint",
            {"checkpoint": "$@folder + '/best.pt'", "folder": "$@bundle_root+'/models'"},
        ),
        ("$os.path.join(@bundle_root, 'models', @name + '.pt')", {"name": "best"}),
        ("$str(Path(@bundle_root) / 'models' / 'best.pt')", {}),
    ],
)
def test_weights_are_found_behind_references(path, others, tmp_path):
    parts = {"loader": {"_target_": "CheckpointLoader", "load_path": path}} | others
    with pytest.raises(ModelContractError, match=r"loads models/best\.pt; only models/model"):
        recipe(made.make_bundle(tmp_path / "a", made.config() | parts))
    right = json.loads(json.dumps(parts).replace("best", "model"))
    recipe(made.make_bundle(tmp_path / "b", made.config() | right))


@pytest.mark.parametrize(
    ("path", "others"),
    [
        ("$@bundle_root + '/models/model.pt'.replace('model', 'best')", {}),
        ("$@a + @a", {"a": "$@b + @b", "b": "$@a"}),
        ("@a0", {f"a{n}": f"$@a{n + 1} + @a{n + 1}" for n in range(40)} | {"a40": "x"}),
        ("@a", {"a": 5}),
    ],
)
def test_weights_that_an_expression_names_are_refused(path, others, tmp_path):
    parts = {"loader": {"_target_": "CheckpointLoader", "load_path": path}} | others
    with pytest.raises(ModelContractError, match="loads .*; only models/model"):
        recipe(made.make_bundle(tmp_path / "a", made.config() | parts))


def loading(*names):
    """A part that loads weights, as bundles have it."""
    paths = [f"$@bundle_root + '/models/{name}'" for name in names]
    return {"checkpointloader": {"_target_": "CheckpointLoader", "load_path": paths}}


def test_weights_that_are_others_are_refused_or_told(tmp_path):
    with pytest.raises(
        ModelContractError, match="inference.json loads models/model_tuned.pt; only"
    ):
        recipe(made.make_bundle(tmp_path / "a", made.config() | loading("model_tuned.pt")))
    folder = made.make_bundle(tmp_path / "b", made.config() | loading("model.pt"))
    assert not any("model.pt" in caution for caution in recipe(folder).cautions)
    (folder / "models/model.pt").write_bytes(b"")
    assert any("loads models/model.pt, and" in caution for caution in recipe(folder).cautions)


def test_a_network_of_other_code_is_told(tmp_path):
    network = made.NETWORK | {"_target_": "scripts.nets.Mine"}
    (caution,) = [
        each
        for each in recipe(made.make_bundle(tmp_path, made.config(network=network))).cautions
        if "scripts" in each
    ]
    assert "makes the network by scripts.nets.Mine, whose code is not looked at" in caution
    assert "models/model.ts is run" in caution


def test_other_words_for_the_same_parts(tmp_path):
    parts = {"network": "$@network", "inferer": "@inferer", "prepare_batch": None}
    for number, network in enumerate(
        ("@network_def", "$@network_def", "$@network_def.to( @device)")
    ):
        content = made.config() | {"network": network, "evaluator": parts}
        recipe(made.make_bundle(tmp_path / str(number), content))


def test_words_of_the_parser_are_read(tmp_path):
    parts = {"_mode_": "default", "_disabled_": False, "_requires_": "$None", "roi_size": "$@roi"}
    scaling = transform("CastToTyped") | {"_mode_": "default"}
    content = made.config([scaling], inferer=parts) | {"roi": made.ROI}
    folder = made.make_bundle(tmp_path / "b", content)
    assert recipe(folder).values["inference.patch_shape"] == made.ROI[::-1]


@pytest.mark.parametrize(
    "whole",
    [
        evaluator(),
        evaluator(_target_="monai.engines.SupervisedEvaluator", network="@network_def"),
        evaluator(mode="$monai.utils.ForwardMode.EVAL", val_handlers=None, to_kwargs={}),
    ],
)
def test_a_whole_bundle_is_read(whole, tmp_path):
    """Bundles of the model zoo have these parts."""
    content = made.config() | {
        "dataset": {"_target_": "Dataset", "data": "$[1]", "transform": "@preprocessing"},
        "dataloader": {
            "_target_": "DataLoader",
            "dataset": "@dataset",
            "collate_fn": "$monai.data.utils.list_data_collate",
        },
        "checkpoint": {"_target_": "CheckpointLoader", "load_path": "models/model.pt"},
        "initialize": ["$import torch", "$monai.utils.set_determinism(seed=1)"],
        "run": ["$setattr(torch.backends.cudnn, 'benchmark', True)", "$@evaluator.run()"],
        "evaluating": "$@checkpoint(@evaluator)",
        "handlers": [
            {"_target_": "CheckpointLoader", "load_path": "$@bundle_root + '/models/model.pt'"},
            {"_target_": "ignite.handlers.Timer"},
            None,
        ],
        "evaluator": whole,
    }
    recipe(made.make_bundle(tmp_path / "b", content))


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({}, "metadata.json is not as MONAI writes it: network_data_format"),
        ({"network_data_format": {"inputs": {}, "outputs": {}}}, "inputs"),
    ],
)
def test_metadata_of_something_else(described, message, tmp_path):
    folder = made.make_bundle(tmp_path / "b")
    (folder / "configs" / "metadata.json").write_text(json.dumps(described))
    with pytest.raises(ModelContractError, match=message):
        recipe(folder)


def test_a_bundle_without_weights_is_told(tmp_path):
    folder = made.make_bundle(tmp_path / "b")
    (folder / "models" / "model.ts").unlink()
    with pytest.raises(ModelContractError, match=r"has none of models/model\.ts, models/model\.pt"):
        load_network(Network(path=str(folder)))


def test_nothing_of_a_bundle_runs(tmp_path):
    """Wherever an expression or a class stands, it is data."""
    planted = tmp_path / "planted"
    code = f"$open({str(planted)!r}, 'w')"
    call = {"_target_": "builtins.open", "file": str(planted), "mode": "w"}
    for key in (*made.config(), "initialize", "run"):
        for value in (code, call, [code, call]):
            content = made.config() | {key: value}
            folder = made.make_bundle(tmp_path / "b", content)
            for use in (recipe, lambda path: load_network(Network(path=str(path)))):
                try:
                    use(folder)
                except ModelContractError:
                    continue
    assert not planted.exists()


def test_configuration_and_weights_are_the_identity(tmp_path):
    folder = made.make_bundle(tmp_path / "b")
    before = model_sha256(Network(path=str(folder)))
    (folder / "docs.md").write_text("anything")
    assert model_sha256(Network(path=str(folder))) == before
    made.make_bundle(folder, made.config(inferer={"overlap": 0.25}))
    assert model_sha256(Network(path=str(folder))) != before


def make_state(tmp_path, network=made.NETWORK, content=None):
    """A bundle with a state dict in place of TorchScript."""
    folder = made.make_bundle(tmp_path / "b", made.config(network=network))
    (folder / "models" / "model.ts").unlink()
    torch.save(content or {"model": {"w": torch.zeros(1)}}, folder / "models" / "model.pt")
    return folder


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"_target_": "os.system", "command": "touch x"}, "network_def is a os.system; only"),
        ({"_target_": "my_package.UNet"}, "network_def is a my_package.UNet; only"),
        ({"_target_": "FlexibleUNet", "pretrained": True}, "network_def is a FlexibleUNet; only"),
        ("$make_network()", "network_def is the expression"),
    ],
)
def test_networks_of_others_are_refused_by_name(network, message, tmp_path):
    with pytest.raises(ModelContractError, match=message):
        load_network(Network(path=str(make_state(tmp_path, network))))


class TestNetworksOfMonai:
    """What is made of MONAI's classes; skipped where it is not installed."""

    @pytest.fixture(autouse=True)
    def _monai(self):
        pytest.importorskip("monai")

    @pytest.mark.parametrize("wrapper", [None, "model", "state_dict"])
    def test_a_network_is_made_of_its_description(self, wrapper, tmp_path):
        from monai.networks.nets import UNet

        arguments = {key: value for key, value in made.NETWORK.items() if key != "_target_"}
        torch.manual_seed(1)
        network = UNet(**arguments).eval()
        state = network.state_dict()
        folder = make_state(tmp_path, content=state if wrapper is None else {wrapper: state})
        values = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 1, 8, 12, 16))).float()
        loaded = load_network(Network(path=str(folder), output_channels=2)).network.eval()
        with torch.no_grad():
            expected = network(values.permute(0, 1, 4, 3, 2)).permute(0, 1, 4, 3, 2)
            assert torch.equal(loaded(values), expected)
        result = try_package(str(folder), None)
        assert result.difference is not None
        assert result.difference < 1e-6

    def test_one_value_throughout_is_compared_with_the_tools(self, tmp_path):
        from monai.networks.nets import UNet

        arguments = {key: value for key, value in made.NETWORK.items() if key != "_target_"}
        state = UNet(**arguments).state_dict()
        folder = make_state(tmp_path, content={key: 0 * value for key, value in state.items()})
        result = try_package(str(folder), None)
        assert result.difference == 0
        assert "one value throughout" in result.comparison

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"unheard_of": 1}, "has no argument unheard_of"),
            ({"channels": [4, 10**9]}, "has channels: 1000000000; at most 16,384"),
            ({"channels": [4] * 100}, "has channels of 100 values"),
            ({"strides": []}, "cannot be made of its arguments"),
            ({"channels": [4, 16]}, "do not fit the network"),
        ],
    )
    def test_arguments_are_refused_by_name(self, changes, message, tmp_path):
        from monai.networks.nets import UNet

        arguments = {key: value for key, value in made.NETWORK.items() if key != "_target_"}
        state = UNet(**arguments).state_dict()
        folder = make_state(tmp_path, made.NETWORK | changes, state)
        with pytest.raises(ModelContractError, match=message):
            load_network(Network(path=str(folder)))
