"""Packages of networks from strangers: what they bring only computes, and says what it means."""

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import bioimageio_packages
import cellmap_packages
import monai_bundles
import nnunet_folders
import numpy as np
import pytest
import torch

from beam_inference.errors import ModelContractError
from beam_inference.launch.new_job import describe_package
from beam_inference.launch.package_trial import try_package
from beam_inference.models.packages import Recipe, open_package


class Saves(torch.nn.Module):
    """Writes a file, as PyTorch's operators can."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        torch.save(batch, self.path)
        return batch


class SavesAtOnce(torch.nn.Module):
    """Writes a file as it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.training = False

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return (self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        torch.save(state, self.path)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


class Prints(torch.nn.Module):
    """Writes to the terminal, past whatever cleans text."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        print("\x1b[2J")
        return batch


@pytest.mark.parametrize("kind", [Saves, SavesAtOnce, Prints])
def test_torchscript_of_a_package_does_nothing_but_compute(
    kind: type[torch.nn.Module], tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    network = Prints() if kind is Prints else kind(str(trace))
    folder = cellmap_packages.make_package(tmp_path / "package", network=network)
    trace.unlink(missing_ok=True)  # scripting may have made it
    with open_package(folder) as package:
        with pytest.raises(ModelContractError, match="pass --trust_model"):
            package.network.load(is_trusted=False)
        assert not trace.exists()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is an old form
            assert package.network.load(is_trusted=True) is not None


def describe(folder: Path) -> Recipe:
    with open_package(folder) as package:
        return package.network.describe()


def change_scaling(**changes: object) -> list[dict[str, object]]:
    """The transforms of a bundle, of which the one that scales says more."""
    return [
        each | changes if each["_target_"] == "ScaleIntensityRanged" else each
        for each in monai_bundles.TRANSFORMS
    ]


@pytest.mark.parametrize(
    ("disabled", "is_scaled"), [("False", True), (False, True), ("true", False), (True, False)]
)
def test_what_a_bundle_disables_is_what_monai_takes_for_it(
    disabled: object, is_scaled: bool, tmp_path: Path
) -> None:
    content = monai_bundles.config(change_scaling(_disabled_=disabled))
    normalize = describe(monai_bundles.make_bundle(tmp_path, content)).values["model.normalize"]
    assert (normalize != "none") == is_scaled


def test_what_a_bundle_does_to_labels_is_not_done_to_results(tmp_path: Path) -> None:
    after = [{"_target_": "AsDiscreted", "keys": ["label", "pred"], "argmax": [True, False]}]
    folder = monai_bundles.make_bundle(tmp_path, monai_bundles.config(after=after))
    assert "postprocess" not in describe(folder).values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (monai_bundles.config(change_scaling(keys="label")), "changes 'label', where image is"),
        (
            monai_bundles.config(after=[{"_target_": "Activationsd", "keys": "label"}]),
            "changes 'label', where pred is",
        ),
        (monai_bundles.config([monai_bundles.TRANSFORMS[3]] * 2), "follows another one"),
        (monai_bundles.config(inferer={"roi_size": [True, 8, 8]}), "expected three numbers"),
        (monai_bundles.config(inferer={"mode": ["constant"]}), "expected constant or gaussian"),
        (monai_bundles.config(inferer={"padding_mode": ["x"]}), "has the padding_mode"),
    ],
)
def test_a_bundle_that_means_something_else_is_refused(
    content: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelContractError, match=message):
        describe(monai_bundles.make_bundle(tmp_path, content))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("plans.json", '"spacing": [2.0', '"spacing": [1e999'),
        ("plans.json", '"spacing": [2.0', '"inherits_from": ["a"], "spacing": [2.0'),
        ("plans.json", '"n_conv_per_stage": [1', '"n_conv_per_stage": [9999'),
        ("plans.json", '"n_stages"', f'"deep": {"[" * 400}{"]" * 400}, "n_stages"'),
    ],
)
def test_plans_out_of_bounds_are_refused(name: str, old: str, new: str, tmp_path: Path) -> None:
    folder, _ = nnunet_folders.make_folder(tmp_path / "nnunet")
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    with pytest.raises(ModelContractError), open_package(folder) as package:
        package.network.load(is_trusted=False)


@pytest.mark.parametrize(
    "changes",
    [{"network_weights": {3: torch.zeros(1)}}, {"inference_allowed_mirroring_axes": ([0],)}],
)
def test_an_odd_checkpoint_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    folder, _ = nnunet_folders.make_folder(tmp_path / "nnunet")
    file = folder / "fold_0/checkpoint_final.pth"
    torch.save(torch.load(file, weights_only=False) | changes, file)
    with pytest.raises(ModelContractError), open_package(folder) as package:
        package.network.load(is_trusted=False)


@pytest.mark.parametrize("stride", ["xxx", [0, [0]], [1, 1, 1.0], [0, 0, 0]])
def test_strides_that_are_none_fail_the_test(stride: object, tmp_path: Path) -> None:
    """It was called a defect of beam-inference."""
    folder, _ = nnunet_folders.make_folder(tmp_path / "nnunet")
    plans = folder / "plans.json"
    content = json.loads(plans.read_text())
    network = content["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
    network["strides"][0] = stride
    plans.write_text(json.dumps(content))
    with pytest.raises(ModelContractError, match="the network fails on an array of shape"):
        try_package(str(folder), [0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("halo: 4", "halo: 4\n    scale: .inf"),
        ("tensor_id: raw", "tensor_id: raw\n      offset: 9000000"),
        ("postprocessing: []", "postprocessing: [{id: binarize, kwargs: {threshold: []}}]"),
        (
            "preprocessing: []",
            "preprocessing: [{id: fixed_zero_mean_unit_variance, kwargs: {mean: 0, std: 0}}]",
        ),
        (
            "preprocessing: []",
            "preprocessing: [{id: scale_range, kwargs: {min_percentile: 9, max_percentile: 1}}]",
        ),
    ],
)
def test_a_description_out_of_bounds_is_refused(old: str, new: str, tmp_path: Path) -> None:
    folder = bioimageio_packages.make_package(tmp_path)
    file = folder / "bioimageio.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ModelContractError):
        describe(folder)


@pytest.mark.parametrize("shape", [(1, 1, 1 << 25, 1 << 25), (1, 1, 0, 8)])
def test_an_example_of_any_size_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = bioimageio_packages.make_package(tmp_path)
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with (folder / "test_input.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ModelContractError, match=r"test_input\.npy is"):
        try_package(str(folder), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_channels": 5}, "returns 2 channels, and the package says 5"),
        ({"in_channels": 3}, r"fails on an array of shape .*: RuntimeError: Given groups=1"),
        ({"inference_input_shape": [9000, 9000, 9000]}, "are more than the"),
        ({"output_voxel_size": [8, 8]}, "other numbers of axes"),
        ({"input_voxel_size": [1e999, 1, 1]}, "input_voxel_size"),
    ],
)
def test_a_network_that_is_not_its_packages_fails_the_test(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    content = cellmap_packages.described(**changes)
    if "inference_input_shape" in changes:
        content["inference_output_shape"] = [18000 - 8] * 3
    folder = cellmap_packages.make_package(tmp_path, content)
    with pytest.raises(ModelContractError, match=message):
        try_package(str(folder), None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("net.pt", "expected a name with the suffix .onnx"),
        ("evil.py:network", "expected a name with the suffix .onnx"),
        ("../outside.onnx", "expected the plain path of a file in the package"),
        ("absent.onnx", "there is no such file"),
    ],
)
def test_what_a_package_calls_onnx_is_taken_for_nothing_else(
    source: str, message: str, tmp_path: Path
) -> None:
    """A job would take the file for what its name says: a program, or a factory."""
    trace = tmp_path / "trace"
    description = bioimageio_packages.described(weights={"onnx": {"source": source}})
    folder = bioimageio_packages.make_package(tmp_path / "package", description)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is an old form
        torch.jit.save(torch.jit.script(SavesAtOnce(str(trace))), folder / "net.pt")
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')\ndef network():\n    pass\n")
    (folder / "evil.py:network").touch()
    (tmp_path / "outside.onnx").touch()
    trace.unlink(missing_ok=True)  # scripting may have made it
    for use in (describe_package, try_package):
        with pytest.raises(ModelContractError, match=message):
            use(str(folder), None)
    assert not trace.exists()


@pytest.mark.parametrize("use", [describe_package, try_package])
def test_a_package_whose_onnx_file_is_another_one_is_refused(
    use: Callable[[str, None], object], tmp_path: Path
) -> None:
    """A job names that file in place of the package, so nothing else would compare the hash."""
    weights = {"onnx": {"source": "net.onnx", "sha256": "0" * 64}}
    description = bioimageio_packages.described(weights=weights)
    folder = bioimageio_packages.make_package(tmp_path / "package", description)
    (folder / "net.onnx").write_bytes(b"of another network")
    with pytest.raises(
        ModelContractError, match=r"net\.onnx has the sha256 .*, the package says 0"
    ):
        use(str(folder), None)


def rewrite(path: Path, change: Callable[[str, bytes], tuple[str, bytes]]) -> None:
    """Change names and contents of the members of an archive."""
    with zipfile.ZipFile(path) as archive:
        members = [change(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)


def load_torchscript(folder: Path) -> torch.nn.Module:
    with open_package(folder) as package:
        return package.network.load(is_trusted=False)


def test_a_method_that_runs_at_once_is_found_whatever_the_case_of_its_file(tmp_path: Path) -> None:
    """PyTorch finds the members of an archive whatever the case of their names."""
    trace = tmp_path / "trace"
    folder = cellmap_packages.make_package(tmp_path / "package", network=SavesAtOnce(str(trace)))
    rewrite(folder / "model.ts", lambda name, content: (name.replace(".py", ".PY"), content))
    trace.unlink(missing_ok=True)  # scripting may have made it
    with pytest.raises(ModelContractError, match="__setstate__"):
        load_torchscript(folder)
    assert not trace.exists()


class ReadsBeyond(torch.nn.Module):
    """Calls an operator with fewer statistics than there are channels."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        one = torch.ones(1)
        wide = torch.ones([1, 1000, 4])
        answer = torch._native_batch_norm_legit(wide, one, one, one, one, False, 0.1, 1e-5)
        return batch + answer[0].sum()


class Unsafe(torch.nn.Module):
    """Makes a sparse tensor whose indices nobody checks."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        indices = torch.ones([1, 1], dtype=torch.int64) * 1000000
        sparse = torch.ops.aten._sparse_coo_tensor_unsafe(indices, torch.ones(1), [4])
        return batch + sparse.to_dense().sum()


class Draws(torch.nn.Module):
    """Sets the seed of the whole process."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return batch


class Leaks(torch.nn.Module):
    """Answers what the process had in its memory."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * 0 + batch.new_empty(batch.shape)


class Counts(torch.nn.Module):
    """Answers otherwise after fifty batches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return batch + float(self.count > 50)


class CountsInPlace(torch.nn.Module):
    """Adds to a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.total.add_(1)
        return batch + self.total


class Keeps(torch.nn.Module):
    """Has a tensor, a list and a dictionary of its own."""

    items: list[torch.Tensor]
    table: dict[str, torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.items = [torch.zeros(1)]
        self.table = {"a": torch.zeros(1)}


class KeepsByView(Keeps):
    """Adds to an item of its tensor."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.total[0].add_(1)
        return batch + self.total[0]


class KeepsByIndex(Keeps):
    """Sets an item of its tensor."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.total[0] = self.total[0] + 1
        return batch + self.total[0]


class KeepsByList(Keeps):
    """Adds to its tensor in a list."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        several: list[torch.Tensor] = []
        several.append(self.total)
        several[0].add_(1)
        return batch + self.total[0]


class KeepsInLoop(Keeps):
    """Adds to what a variable of a loop was one round before."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        first = batch.clone()
        second = batch.clone()
        for _ in range(3):
            first.add_(1)
            first = second
            second = self.total
        return batch + self.total[0]


class KeepsInBranch(Keeps):
    """Adds to one of two tensors."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        chosen = self.total if bool(batch.mean() > 0.5) else batch.clone()
        chosen.add_(1)
        return batch + self.total[0]


class KeepsByFunction(Keeps):
    """Gives its tensor to a function that adds to what it is given."""

    def grow(self, values: torch.Tensor) -> torch.Tensor:
        values += 1
        return values

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.grow(self.total)[0]


class KeepsByOut(Keeps):
    """Names its tensor as the place of a result."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        torch.add(self.total, torch.ones([2]), out=self.total)
        return batch + self.total[0]


class KeepsAppending(Keeps):
    """Has a list that grows."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.items.append(self.items[-1] + 1)
        return batch + self.items[-1]


class KeepsInTable(Keeps):
    """Has a dictionary whose values change."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.table["a"] = self.table["a"] + 1
        return batch + self.table["a"]


class ChangesItsOwnCopies(Keeps):
    """Changes in place what it has made of the batch, and keeps nothing."""

    def grow(self, values: torch.Tensor) -> torch.Tensor:
        values += 1
        return values

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        several = [batch + self.total[0], batch * 2]
        several.append(batch.clone())
        for each in several:
            self.grow(each)[0] *= 2
        padded = batch.new_zeros(batch.shape)
        padded[:, :, 1:] = several[0][:, :, 1:]
        return padded + self.items[0] + self.table["a"]


@pytest.mark.parametrize(
    ("network", "name"),
    [
        (KeepsByView(), "total"),
        (KeepsByIndex(), "total"),
        (KeepsByList(), "total"),
        (KeepsInLoop(), "total"),
        (KeepsInBranch(), "total"),
        (KeepsByFunction(), "total"),
        (KeepsByOut(), "total"),
        (KeepsAppending(), "items"),
        (KeepsInTable(), "table"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torchscript_of_a_package_keeps_nothing_by_another_name(
    network: torch.nn.Module, name: str, tmp_path: Path
) -> None:
    folder = cellmap_packages.make_package(tmp_path, network=network)
    with pytest.raises(ModelContractError, match=f"keeps '{name}' from one batch to the next"):
        load_torchscript(folder)


def test_torchscript_of_a_package_may_change_its_own_copies(tmp_path: Path) -> None:
    network = ChangesItsOwnCopies()
    loaded = load_torchscript(cellmap_packages.make_package(tmp_path, network=network))
    batch = torch.rand(1, 1, 4, 6, 8)
    torch.testing.assert_close(loaded(batch), network(batch))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (ReadsBeyond(), "calls aten::_native_batch_norm_legit"),
        (Unsafe(), "calls aten::_sparse_coo_tensor_unsafe"),
        (Draws(), "calls aten::manual_seed"),
        (Leaks(), "calls aten::new_empty"),
        (Counts(), "keeps 'count' from one batch to the next"),
        (CountsInPlace(), "keeps 'total' from one batch to the next"),
    ],
)
def test_torchscript_of_a_package_stays_within_its_tensors(
    network: torch.nn.Module, message: str, tmp_path: Path
) -> None:
    folder = cellmap_packages.make_package(tmp_path, network=network)
    with pytest.raises(ModelContractError, match=message):
        load_torchscript(folder)


class Plain(torch.nn.Module):
    """Has one tensor."""

    def __init__(self, value: object = None) -> None:
        super().__init__()
        self.value = value

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


def test_torchscript_of_a_package_holds_no_object_of_pytorch_s_own(tmp_path: Path) -> None:
    """Such an object is made of the file's numbers by code of its own, as the file is loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantised tensors are an old form
        weight = torch.quantize_per_tensor(torch.zeros(1, 1, 3, 3), 0.1, 0, torch.qint8)
        packed = torch.ops.quantized.conv2d_prepack(weight, None, [1, 1], [0, 0], [1, 1], 1)
        folder = cellmap_packages.make_package(tmp_path, network=Plain(packed))
    with pytest.raises(ModelContractError, match="neither tensors nor its own"):
        load_torchscript(folder)


DEEP = 300_000
"""Levels at which a parser's stack ends."""

PICKLED = b"\x80\x02" + b"]" * 1000 + b"a" * 999 + b"."
"""A pickle of fewer levels, which takes less time to follow: they are refused as well."""


@pytest.mark.parametrize(
    ("suffix", "old", "new"),
    [
        (".py", b"return batch", b"return " + b"(" * DEEP + b"batch" + b")" * DEEP),
        (".py", b"return batch", b"return " + b"-" * DEEP + b"batch"),
        (".py", b"return batch", b"return batch" + b"+batch" * DEEP),
        ("data.pkl", None, PICKLED),
        ("constants.pkl", None, PICKLED[:2] + b"(" + PICKLED[2:-1] + b"t."),
    ],
)
def test_what_would_end_the_process_is_refused(
    suffix: str, old: bytes | None, new: bytes, tmp_path: Path
) -> None:
    """PyTorch's parsers follow values inside values until their stack ends."""
    folder = cellmap_packages.make_package(tmp_path, network=Plain())

    def change(name: str, content: bytes) -> tuple[str, bytes]:
        if not name.endswith(suffix):
            return name, content
        assert old is None or old in content
        return name, new if old is None else content.replace(old, new)

    rewrite(folder / "model.ts", change)
    with pytest.raises(ModelContractError, match="on more than"):
        load_torchscript(folder)


class Weighs(torch.nn.Module):
    """Has weights, and fails for batches of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(300))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.weight


NUMBER = b"M\x2c\x01"  # 300: of a storage, and of the tensor in it
LARGER = b"J\x00\x00\x10\x00"
KEYS = (pickle.encode_long(n * ((1 << 61) - 1)) for n in range(1, 200_000))
ITEMS = (b"\x8a" + bytes([len(key)]) + key + b"N" for key in KEYS)
ONE_HASH = b"\x80\x02}(" + b"".join(ITEMS) + b"u."
"""A mapping whose keys have one hash: to make it takes minutes."""


@pytest.mark.parametrize(
    ("suffix", "old", "new", "message"),
    [
        ("data.pkl", NUMBER, LARGER, "4,194,304 bytes by what it says, and 1,200 in the archive"),
        ("data.pkl", b"cpu", b"cpu", ""),
        ("data.pkl", b"FloatStorage", b"QInt8Storage", "values of an unknown type"),
        ("data.pkl", b"q\x00", b"r\xff\xff\xff\x3f", "numbers one 1,073,741,823"),
        pytest.param("data.pkl", None, ONE_HASH, "keys other than texts", id="one hash"),
        ("debug_pkl", None, PICKLED, "on more than"),
    ],
)
def test_pickles_of_torchscript_stay_within_their_archive(
    suffix: str, old: bytes | None, new: bytes, message: str, tmp_path: Path
) -> None:
    """PyTorch believes them: tensors would be read from the memory behind what lies there."""
    folder = cellmap_packages.make_package(tmp_path, network=Weighs())

    def change(name: str, content: bytes) -> tuple[str, bytes]:
        if not name.endswith(suffix):
            return name, content
        return name, new if old is None else content.replace(old, new)

    rewrite(folder / "model.ts", change)
    if not message:
        load_torchscript(folder)
        return
    with pytest.raises(ModelContractError, match=message):
        load_torchscript(folder)


def test_inputs_that_pytorch_leaves_out_of_its_traces_are_none_that_it_reads(
    tmp_path: Path,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is an old form
        traced = torch.jit.trace(Weighs(), torch.zeros(1, 300))
    load_torchscript(cellmap_packages.make_package(tmp_path, network=traced))


def in_module(name: str) -> list[dict[str, object]]:
    """The transforms of a bundle, of classes that it brings itself."""
    return [each | {"_target_": f"{name}.{each['_target_']}"} for each in monai_bundles.TRANSFORMS]


OWN_INFERER = {"_target_": "scripts.mine.SlidingWindowInferer"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (monai_bundles.config(in_module("scripts.mine")), "mine.LoadImaged, which is not MONAI's"),
        (monai_bundles.config(inferer=OWN_INFERER), "which is not MONAI's"),
        (
            monai_bundles.config([{"_target_": "EnsureTyped", "keys": "image", "dtype": "int8"}]),
            "makes 'int8' of the values",
        ),
        (monai_bundles.config(dataset={"transform": "@other"}), "dataset.transform is '@other'"),
        (monai_bundles.config(evaluator={"inferer": OWN_INFERER}), "evaluator.inferer is"),
        (monai_bundles.config(**{"+preprocessing": {"transforms": []}}), "changes another part"),
    ],
)
def test_a_bundle_of_which_its_tool_runs_something_else_is_refused(
    content: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelContractError, match=message):
        describe(monai_bundles.make_bundle(tmp_path, content))


def test_a_bundle_may_name_its_parts_in_full(tmp_path: Path) -> None:
    transforms = in_module("monai.transforms")
    parts = {"inferer": "@inferer", "network": "@network", "postprocessing": "@postprocessing"}
    content = monai_bundles.config(
        transforms, evaluator=parts, dataset={"transform": "@preprocessing"}
    )
    named = describe(monai_bundles.make_bundle(tmp_path / "named", content))
    plain = describe(monai_bundles.make_bundle(tmp_path / "plain", monai_bundles.config()))
    assert named.settings == plain.settings
