"""bioimage.io packages: how ``bioimageio.core`` runs the network, as keys of a job file.

What it does was read in ``bioimageio.core`` 0.11.0: ``block_meta.py`` and ``proc_ops.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import describe_error, shorten_text
from beam_inference.models.bioimageio_spec import (
    FORMS,
    Architecture,
    Axis,
    Description,
    Tensor,
    Weights,
    description_file,
    read_description,
)
from beam_inference.models.bioimageio_steps import Postprocessing, postprocess, preprocess
from beam_inference.models.package_files import check_sha256, find_file, local_file, read_array
from beam_inference.models.packages import (
    Folds,
    NotCompared,
    PackageKind,
    Recipe,
    Sample,
    Setting,
)

if TYPE_CHECKING:
    import torch

_TARGETS = {2: (1, 512, 512), 3: (32, 128, 128)}
"""About what a network is given where it takes any size, ZYX, by its dimensions."""

_NM = {"nanometer": 1e-6, "micrometer": 1e-3, "millimeter": 1.0, "centimeter": 10.0}
"""Millimetres of a unit; other units are not those of microscopes."""


def _is_root(folder: Traversable) -> bool:
    return description_file(folder) is not None


def _list_files(root: Traversable, folds: Folds | None) -> list[str]:
    return _read(root, folds).list_files()


def _read(root: Traversable, folds: Folds | None) -> _Model:
    if folds is not None:
        raise ModelContractError(f"{root}: a bioimage.io package has no folds: remove model.folds")
    return _Model(read_description(root))


@dataclass(frozen=True)
class _Model:
    """A bioimage.io package that was read."""

    description: Description

    @cached_property
    def weights(self) -> Weights:
        """The weights that are used: the first form of which a file is in the package."""
        for weights in self.description.weights:
            if "://" not in weights.source:
                return weights
        forms = [weights.form for weights in self.description.weights]
        elsewhere = f"; those of {', '.join(forms)} are on the internet" if forms else ""
        raise ModelContractError(
            f"{self.description.file}: it has no weights that can be run here: "
            f"{', '.join(FORMS)} are known, as files of the package; it has "
            f"{', '.join(self.description.other_forms) or 'no others'}{elsewhere}. Fetch the "
            "package as a zip file from bioimage.io: it holds all files."
        )

    @property
    def dims(self) -> int:
        """Number of the network's axes of space."""
        return len(_space(self.description.input))

    def list_files(self) -> list[str]:
        names = [self.description.file.name, self.weights.source]
        architecture = self.weights.architecture
        if self.weights.form == "pytorch_state_dict" and architecture is not None:
            names += [architecture.source] if architecture.source is not None else []
        for name in names:
            find_file(self.description.root, name, "weights")
        return names

    def load(self, *, is_trusted: bool) -> torch.nn.Module:
        weights = self.weights
        if weights.form == "onnx":
            raise ModelContractError(
                f"{self.description.file}: its weights are ONNX, which a job runs by their file: "
                f"write model.path: {self.description.root / weights.source} (unpack a zip file "
                "first)"
            )
        file = find_file(self.description.root, weights.source, f"weights.{weights.form}.source")
        check_sha256(file, weights.sha256)
        if weights.form == "torchscript":
            from beam_inference.models.packed_torchscript import load_packed

            with local_file(file) as path:
                return load_packed(path, allow_pickle=is_trusted)
        network = self._make_network(is_trusted=is_trusted)
        from beam_inference.models.weights import load_weights

        with local_file(file) as path:
            load_weights(network, path, allow_pickle=is_trusted)
        return network

    def _make_network(self, *, is_trusted: bool) -> torch.nn.Module:
        import torch

        architecture = self.weights.architecture
        if architecture is None:
            raise ModelContractError(
                f"{self.description.file}: pytorch_state_dict has no architecture"
            )
        what = architecture.source or f"{architecture.module}.{architecture.name}"
        if not is_trusted:
            raise ModelContractError(
                f"{self.description.file}: the network is made by code, {shorten_text(what)}, "
                "which is not run unless you say so. If you trust it, pass --trust_model."
            )
        make = _import(self.description, architecture)
        try:
            network = make(**architecture.arguments)
        except Exception as error:
            raise ModelContractError(
                f"{self.description.file}: {shorten_text(what)} cannot make the network: "
                f"{describe_error(error)}"
            ) from None
        if not isinstance(network, torch.nn.Module):
            raise ModelContractError(
                f"{self.description.file}: {shorten_text(what)} made a {type(network).__name__}, "
                "not a torch module"
            )
        return network

    def describe(self) -> Recipe:
        model = self.description
        _check_axes(model)
        before = preprocess(model, is_plane=self.dims == 2)
        after = postprocess(model)
        sizes = _Sizes.of(model)
        is_onnx = self.weights.form == "onnx"
        return Recipe(
            title=f"bioimage.io, {shorten_text(model.name)}",
            facts={**model.facts, "weights": self.weights.form},
            settings=[
                Setting("model.input_channels", model.input.channels, "the input's channel axis"),
                Setting("model.output_channels", model.output.channels, "the output's"),
                *([Setting("model.dims", 2, "the input has y and x, and no z")] * (self.dims == 2)),
                Setting("model.normalize", before.value, before.reason),
                *_activation_settings(after),
                *([] if sizes.obstacle else sizes.settings()),
                Setting("output.dtype", after.dtype, "as the package's own tool gives it"),
                *_padding_settings(model.input),
            ],
            voxel_size=_voxel_size(model.input),
            has_unit=all(axis.unit in _NM for axis in _space(model.input)),
            needs_levels="levels" in str(before.value),
            cautions=[] if sizes.obstacle else [*sizes.cautions(), *self._trust_cautions()],
            obstacle=sizes.obstacle,
            network_file=self.weights.source if is_onnx else None,
            network_sha256=self.weights.sha256 if is_onnx else None,
        )

    def _trust_cautions(self) -> list[str]:
        if self.weights.form != "pytorch_state_dict":
            return []
        return ["The network is made by Python source: look at it, and run with --trust_model."]

    def sample(self) -> Sample | None:
        model = self.description
        arrays = []
        for tensor in (model.input, model.output):
            if tensor.test_file is None:
                return None
            file = find_file(model.root, tensor.test_file, f"the test tensor of {tensor.name}")
            check_sha256(file, tensor.test_sha256)
            arrays.append(_to_volume(read_array(file), tensor, file))
        tolerance = model.tolerance_of(self.weights.form)
        return Sample(
            arrays[0],
            arrays[1],
            absolute=tolerance.absolute,
            relative=tolerance.relative,
            mismatches=tolerance.mismatches * 1e-6,
        )

    def predict_by_tool(self, image: NDArray[np.float32]) -> NDArray[np.float32]:  # noqa: ARG002
        raise NotCompared("the package has no test tensors of its own")


def _import(model: Description, architecture: Architecture) -> Any:
    """What makes a network that is trusted."""
    from beam_inference.config.factories import load_object

    try:
        if architecture.source is None:
            return load_object(f"{architecture.module}:{architecture.name}")
        file = find_file(model.root, architecture.source, "architecture.source")
        check_sha256(file, architecture.sha256)
        with local_file(file) as path:
            return load_object(f"{path}:{architecture.name}")
    except ModelContractError:
        raise
    except Exception as error:
        raise ModelContractError(
            f"{model.file}: cannot import {shorten_text(architecture.name)}: "
            f"{describe_error(error)}"
        ) from None


def _space(tensor: Tensor) -> list[Axis]:
    return [axis for axis in tensor.axes if axis.name in ("z", "y", "x")]


_ORDERS = (["batch", "channel", "z", "y", "x"], ["batch", "channel", "y", "x"])


def _check_axes(model: Description) -> None:
    for tensor in (model.input, model.output):
        names = [axis.name for axis in tensor.axes]
        if names not in _ORDERS:
            raise ModelContractError(
                f"{model.file}: {shorten_text(tensor.name)} has the axes "
                f"{shorten_text(', '.join(names))}; expected batch, channel, z, y, x, or without z"
            )
    if len(model.input.axes) != len(model.output.axes):
        raise ModelContractError(
            f"{model.file}: the input has {len(_space(model.input))} axes of space, the output "
            f"{len(_space(model.output))}; a job needs as many"
        )


@dataclass(frozen=True, slots=True)
class _Size:
    """One axis of space, in voxels.

    Attributes:
        name: of the axis.
        given: what the network is given.
        ratio: the output's voxels for each of the input's.
        lost: voxels of the output that convolutions without padding take, both sides together.
        halo: voxels of the output that are cropped on each side.
        is_free: whether the network takes other sizes, too.
    """

    name: str
    given: int
    ratio: Fraction
    lost: int
    halo: int
    is_free: bool

    @property
    def obstacle(self) -> str | None:
        """Why a job cannot run it, in a clause."""
        if self.ratio < 1 or self.ratio.denominator != 1:
            return f"its output has {self.ratio} of the input's voxels along {self.name}"
        if self.lost < 0:
            return f"its output has {-self.lost} voxels more than its input along {self.name}"
        if self.lost % 2:
            return (
                f"its output has {self.lost} voxels less than its input along {self.name}, which "
                "is not the same number on both sides"
            )
        if self.patch <= 0:
            return f"its halo leaves nothing of the output along {self.name}"
        return None

    @property
    def margin(self) -> int:
        """``model.crop_margin``."""
        return self.halo + self.lost // 2

    @property
    def patch(self) -> int:
        """``inference.patch_shape``."""
        return int(self.given * self.ratio) - 2 * self.margin

    @property
    def scale(self) -> int:
        """``model.output_scale``."""
        return int(self.ratio)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """All axes of space, Z, Y, X."""

    sizes: Sequence[_Size]

    @classmethod
    def of(cls, model: Description) -> _Sizes:
        inputs = _space(model.input)
        targets = _TARGETS[len(inputs)][3 - len(inputs) :]
        sizes = [
            _size(axis, model.output.axis(axis.name), target)
            for axis, target in zip(inputs, targets, strict=True)
        ]
        plane = _Size("z", 1, Fraction(1), 0, 0, is_free=False)
        return cls([plane] * (3 - len(sizes)) + sizes)

    @property
    def obstacle(self) -> str | None:
        """Why a job cannot run it, in a clause."""
        obstacles = [size.obstacle for size in self.sizes if size.obstacle is not None]
        if obstacles:
            return f"{obstacles[0]}, which no job does yet"
        if any(size.lost and size.halo for size in self.sizes):
            return "it has a halo, and its output is smaller than its input: no job crops twice yet"
        return None

    def settings(self) -> list[Setting]:
        margins = [size.margin for size in self.sizes]
        patch = [size.patch for size in self.sizes]
        settings = []
        if any(size.scale > 1 for size in self.sizes):
            scale = [size.scale for size in self.sizes]
            settings.append(Setting("model.output_scale", scale, "the output is finer"))
        if any(margins):
            settings.append(Setting("model.crop_margin", margins, "the output's halo"))
        given = ", ".join(str(size.given) for size in self.sizes)
        kind = "one of the sizes" if any(size.is_free for size in self.sizes) else "the size"
        settings.append(
            Setting("inference.patch_shape", patch, f"of [{given}], {kind} that the package takes")
        )
        if any(margins):
            overlap = [0, 0, 0]
            reason = "bioimageio.core lays blocks side by side, without their halo"
        else:
            overlap = [size.scale * (size.patch // size.scale // 4) for size in self.sizes]
            reason = "the package states no halo: without an overlap there would be seams"
        return [*settings, Setting("inference.patch_overlap", overlap, reason)]

    def cautions(self) -> list[str]:
        if any(size.margin for size in self.sizes):
            return [
                "bioimageio.core is exact across its blocks where the halo covers all that the "
                "network sees; so is this job. Elsewhere both have seams, in other places: give "
                "patch_overlap a value then. If the network pools or strides, the last block of an "
                "axis, which is moved back, may begin between its steps, and answers otherwise "
                "there: inference.lattice: pad counts all patches from the first voxel on."
            ]
        return [
            "bioimageio.core predicts an image without a halo as a whole, or in blocks with seams; "
            "this job blends overlapping patches, and differs near their borders."
        ]


def _size(given: Axis, output: Axis, target: int) -> _Size:
    size = given.least
    if given.step and size < target:
        size += (target - size) // given.step * given.step
    ratio = output.ratio
    lost = -output.least
    if not ratio:  # both sizes are stated as numbers
        whole = Fraction(output.least, given.least)
        ratio = whole if whole.denominator == 1 and whole > 1 else Fraction(1)
        lost = int(given.least * ratio) - output.least
        if output.least * 2 <= given.least:
            ratio = whole
            lost = 0
    scale = max(1, int(ratio))
    halo = -(-output.halo // scale) * scale
    return _Size(given.name, size, ratio, lost, halo, is_free=bool(given.step))


def _activation_settings(after: Postprocessing) -> list[Setting]:
    settings = []
    if after.activation != "none":
        settings.append(Setting("model.activation", after.activation, after.reason))
    if after.operators:
        settings.append(Setting("postprocess", list(after.operators), after.reason))
    return settings


def _padding_settings(tensor: Tensor) -> list[Setting]:
    mode, value = tensor.padding or ("symmetric", 0.0)
    reason = "bioimageio.core pads so" if tensor.padding is None else "the package"
    settings = [Setting("input.fill", mode, reason)]
    if mode == "constant":
        settings += [
            Setting("input.fill_value", value, "the package"),
            Setting("input.fill_units", "network", "bioimageio.core pads what is normalised"),
        ]
    return settings


def _voxel_size(tensor: Tensor) -> tuple[float | None, float | None, float | None]:
    """Voxel size of the training data, in millimetres if a unit is stated; None if none is said."""
    sizes: list[float | None] = []
    for axis in _space(tensor):
        is_said = axis.unit is not None or axis.size != 1
        sizes.append(axis.size * _NM.get(axis.unit or "", 1.0) if is_said else None)
    z, y, x = [None] * (3 - len(sizes)) + sizes
    return (z, y, x)


def _to_volume(array: NDArray[Any], tensor: Tensor, file: Traversable) -> NDArray[Any]:
    """An example (C, Z, Y, X) or (C, 1, Y, X) of one with the tensor's axes."""
    is_one = array.ndim == len(tensor.axes) and array.shape[0] == 1 and array.size > 0
    if not is_one or array.dtype.kind not in "iufb":
        raise ModelContractError(
            f"{file} is an array of shape {list(array.shape)} and dtype {array.dtype}: expected "
            f"one of numbers with the axes {', '.join(axis.name for axis in tensor.axes)}"
        )
    values: NDArray[Any] = array[0] if array.ndim == 5 else array[0][:, None]
    return values


KIND = PackageKind(
    title="a bioimage.io package",
    contents="bioimageio.yaml or rdf.yaml, and weights",
    is_root=_is_root,
    list_files=_list_files,
    read=_read,
)
