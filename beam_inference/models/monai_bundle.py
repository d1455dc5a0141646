"""MONAI bundles: how MONAI runs the network, as keys of a job file.

What its sliding window does was read in MONAI 1.6.1, ``inferers``. MONAI's arrays have the axes X,
Y, Z; those of a job Z, Y, X.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

from pydantic import Field

from beam_inference.config.fields import Json
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import describe_error, shorten_text, shorten_value
from beam_inference.models.monai_checkpoints import list_checkpoints
from beam_inference.models.monai_config import (
    CONFIGS,
    METADATA,
    Component,
    Config,
    config_file,
    is_bundle,
    is_foreign,
    read_config,
    read_metadata,
)
from beam_inference.models.monai_parts import check_parts
from beam_inference.models.monai_steps import Preparation, finish, prepare
from beam_inference.models.package_files import ForeignModel, is_file, local_file, parse_foreign
from beam_inference.models.packages import (
    Folds,
    NotCompared,
    PackageKind,
    Recipe,
    Sample,
    Setting,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

_WEIGHTS = ("models/model.ts", "models/model.pt")
"""Files of a network: TorchScript, which is preferred, or a state dict."""

_NETWORKS = frozenset(
    {
        "AttentionUnet",
        "BasicUNet",
        "DynUNet",
        "HighResNet",
        "SegResNet",
        "UNETR",
        "UNet",
        "VNet",
    }
)
"""Classes of ``monai.networks.nets`` that a bundle may name: none fetches anything."""

_MOST = 1 << 14
_LONGEST = 64
_COUNTS = ("num_res_units", "blocks_down", "blocks_up", "repeat")
"""Arguments that say how many layers there are."""

_ORDER = (2, 1, 0)


class _Tensor(ForeignModel):
    num_channels: int = Field(ge=1, le=_MOST)
    channel_def: dict[str, Any] = Field({})


class _Formats(ForeignModel):
    inputs: dict[str, _Tensor] = Field(min_length=1)
    outputs: dict[str, _Tensor] = Field(min_length=1)


class _Metadata(ForeignModel):
    name: str = "a MONAI bundle"
    version: str = ""
    license: str = ""
    copyright: str = ""
    network_data_format: _Formats


def _list_files(root: Traversable, folds: Folds | None) -> list[str]:
    return _read(root, folds).list_files()


def _read(root: Traversable, folds: Folds | None) -> _Bundle:
    if folds is not None:
        raise ModelContractError(f"{root}: a MONAI bundle has no folds: remove model.folds")
    metadata = read_metadata(root)
    source = root / "configs" / "metadata.json"
    config = read_config(root)
    check_parts(config)
    return _Bundle(root, config, parse_foreign(metadata, _Metadata, source, "MONAI"))


@dataclass(frozen=True)
class _Bundle:
    """A bundle that was read."""

    root: Traversable
    config: Config
    metadata: _Metadata

    @property
    def input(self) -> _Tensor:
        return self._only("inputs", self.metadata.network_data_format.inputs)

    @property
    def output(self) -> _Tensor:
        return self._only("outputs", self.metadata.network_data_format.outputs)

    def _only(self, what: str, tensors: dict[str, _Tensor]) -> _Tensor:
        if len(tensors) != 1:
            raise ModelContractError(
                f"{self.root / 'configs' / 'metadata.json'}: the network has {len(tensors)} "
                f"{what} ({', '.join(map(shorten_text, tensors))}); networks with one are run here"
            )
        return next(iter(tensors.values()))

    @cached_property
    def weights(self) -> str:
        """Name of the file of the network."""
        others = [each for each in list_checkpoints(self.config) if each not in _WEIGHTS]
        if others:
            raise ModelContractError(
                f"{self.config.file} loads {shorten_text(others[0])}; only "
                f"{' and '.join(_WEIGHTS)} are known here, whose weights may be others. Rename the "
                "file, here and there."
            )
        for name in _WEIGHTS:
            folder, _, file = name.partition("/")
            if (self.root / folder / file).is_file():
                return name
        raise ModelContractError(f"{self.root} has none of {', '.join(_WEIGHTS)}")

    def list_files(self) -> list[str]:
        return [config_file(self.root) or CONFIGS[0], METADATA, self.weights]

    def load(self, *, is_trusted: bool) -> torch.nn.Module:
        from beam_inference.models.axis_order import Transposed

        folder, _, name = self.weights.partition("/")
        file = self.root / folder / name
        if name.endswith(".ts"):
            from beam_inference.models.packed_torchscript import load_packed

            with local_file(file) as path:
                network = load_packed(path, allow_pickle=is_trusted)
        else:
            from beam_inference.models.weights import load_weights

            network = _make_network(self.config)
            with local_file(file) as path:
                load_weights(network, path, allow_pickle=is_trusted, replace=True)
        return Transposed(network, _ORDER)

    def describe(self) -> Recipe:
        _check_dimensions(self.config)
        prepared = prepare(self.config, self.input.num_channels)
        operators = finish(self.config)
        gives_labels = bool(operators) and operators[-1]["operator"] in ("argmax", "threshold")
        names = ", ".join(str(name) for name in self.output.channel_def.values())
        return Recipe(
            title=f"MONAI bundle, {shorten_text(self.metadata.name)}",
            facts={
                "version": self.metadata.version or "not stated",
                "licence": self.metadata.license or "not stated",
                "copyright": self.metadata.copyright or "not stated",
                "channels of the output": names or "not named",
                "weights": self.weights,
            },
            settings=[
                Setting("model.input_channels", self.input.num_channels, METADATA),
                Setting("model.output_channels", self.output.num_channels, METADATA),
                Setting("model.normalize", prepared.normalize, prepared.reason),
                *_window_settings(self._inferer()),
                *([Setting("postprocess", operators, "the bundle")] if operators else []),
                Setting("output.dtype", "uint8" if gives_labels else "float32", "the bundle"),
            ],
            voxel_size=_zyx(prepared.voxel_size),
            has_unit=True,
            needs_levels="levels" in str(prepared.normalize),
            cautions=[*_cautions(prepared), *self._weight_cautions()],
        )

    def _weight_cautions(self) -> list[str]:
        cautions = []
        loaded = [each for each in list_checkpoints(self.config) if each != self.weights]
        if loaded and is_file(self.root / "models" / loaded[0].rpartition("/")[2]):
            cautions.append(
                f"{CONFIGS[0]} loads {loaded[0]}, and {self.weights} is taken here, which is meant "
                "to hold the same weights. Export it again if the other one was trained since."
            )
        described = self.config.values.get("network_def")
        if isinstance(described, dict) and is_foreign(described):
            cautions.append(
                f"{CONFIGS[0]} makes the network by {shorten_text(described['_target_'])}, whose "
                f"code is not looked at: {self.weights} is run, which is meant to be the same."
            )
        return cautions

    def _inferer(self) -> Component:
        inferer = self.config.own_component("inferer")
        if inferer is None:
            raise ModelContractError(f"{self.config.file} has no inferer")
        if inferer.name != "SlidingWindowInferer":
            raise inferer.refuse("is not known here; expected SlidingWindowInferer")
        return inferer

    def sample(self) -> Sample | None:
        return None

    def predict_by_tool(self, image: NDArray[np.float32]) -> NDArray[np.float32]:
        import torch

        try:
            from monai.inferers import SlidingWindowInferer
        except ImportError as error:
            raise NotCompared(f"its own tool is not installed here ({error})") from None
        arguments = {
            name: value
            for name, value in self._inferer().arguments.items()
            if name in ("roi_size", "overlap", "mode", "sigma_scale", "padding_mode", "cval")
        }
        network = self.load(is_trusted=False).eval().network
        inferer = SlidingWindowInferer(sw_batch_size=1, progress=False, **arguments)
        given = torch.from_numpy(image.transpose(0, 3, 2, 1).copy())[None]
        with torch.inference_mode():
            answer: NDArray[np.float32] = inferer(given, network)[0].numpy()
        return answer.transpose(0, 3, 2, 1)


def _make_network(config: Config) -> torch.nn.Module:
    """The network that a configuration describes, of a class of MONAI's."""
    described = config.component("network_def")
    if described is None:
        raise ModelContractError(f"{config.file} has no network_def, which models/model.pt needs")
    module = described.target.rpartition(".")[0]
    if described.name not in _NETWORKS or not (
        module == "" or module.startswith("monai.networks.nets")
    ):
        raise ModelContractError(
            f"{config.file}: network_def is a {shorten_text(described.target)}; only "
            f"{', '.join(sorted(_NETWORKS))} of monai.networks.nets are made here. Write a factory "
            "that makes it (file.py:function), and name the file as model.weights."
        )
    import torch

    try:
        from monai.networks import nets
    except ImportError as error:
        raise ModelContractError(
            f"a bundle with models/model.pt needs MONAI ({error}): pip install "
            "'beam-inference[monai]', here and on the workers"
        ) from None
    network_class = getattr(nets, described.name)
    known = inspect.signature(network_class).parameters
    for name, value in described.arguments.items():
        if name not in known:
            raise described.refuse(f"has no argument {shorten_text(name)}")
        _check_size(described, name, value)
    try:
        with torch.device("meta"):  # no memory, before the weights show how large it is
            network: torch.nn.Module = network_class(**described.arguments)
    except Exception as error:  # of the class, which is given whatever the bundle says
        raise ModelContractError(
            f"{config.file}: {described.name} cannot be made of its arguments: "
            f"{describe_error(error)}"
        ) from None
    return network


def _check_size(described: Component, name: str, value: object) -> None:
    """Refuse numbers and lists by which a network would take all memory."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_size(described, key, inner)
    elif isinstance(value, list):
        if len(value) > _LONGEST:
            raise described.refuse(f"has {name} of {len(value)} values")
        for inner in value:
            _check_size(described, name, inner)
    elif isinstance(value, int | float):
        most = _LONGEST if name in _COUNTS else _MOST
        if abs(value) <= most:
            return
        raise described.refuse(f"has {name}: {shorten_value(value)}; at most {most:,} are allowed")


def _check_dimensions(config: Config) -> None:
    network = config.component("network_def") if "network_def" in config.values else None
    dims = None if network is None else network.arguments.get("spatial_dims", 3)
    if dims not in (None, 3):
        raise ModelContractError(
            f"{config.file}: the network has {shorten_value(dims)} axes of space; bundles of "
            "volumes are run here. Write the job file by hand, with model.dims: 2."
        )


_WINDOW = (
    *("roi_size", "overlap", "mode", "sigma_scale", "padding_mode", "cval"),
    *("sw_batch_size", "sw_device", "device", "progress", "cache_roi_weight_map", "cpu_thresh"),
    *("buffer_steps", "buffer_dim", "with_coord"),
)


def _window_settings(inferer: Component) -> list[Setting]:
    inferer.check_arguments(dict.fromkeys(_WINDOW, ...) | {"with_coord": False})
    size = inferer.arguments.get("roi_size")
    sizes = [size] * 3 if isinstance(size, int) else size
    if (
        not isinstance(sizes, list)
        or len(sizes) != 3
        or not all(type(n) is int and 0 < n <= _MOST for n in sizes)
    ):
        raise inferer.refuse(f"has roi_size {shorten_value(size)}; expected three numbers")
    patch = sizes[::-1]
    overlaps = _overlaps(inferer)[::-1]
    steps = [int(n * (1 - overlap)) or 1 for n, overlap in zip(patch, overlaps, strict=True)]
    mode = inferer.arguments.get("mode", "constant")
    blends: Json = {"constant": "constant", "gaussian": _gaussian(inferer)}
    if not isinstance(mode, str) or mode not in blends:
        raise inferer.refuse(f"has the mode {shorten_value(mode)}; expected constant or gaussian")
    padding = inferer.arguments.get("padding_mode", "constant")
    fills = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
    if not isinstance(padding, str) or padding not in fills:
        raise inferer.refuse(f"has the padding_mode {shorten_value(padding)}")
    settings = [
        Setting("inference.patch_shape", patch, "the bundle's roi_size, in the order Z, Y, X"),
        Setting(
            "inference.patch_overlap",
            [n - step for n, step in zip(patch, steps, strict=True)],
            f"the bundle: an overlap of {', '.join(f'{each:g}' for each in overlaps)}",
        ),
        Setting("inference.lattice", "stride", "MONAI moves the last window back"),
        Setting("inference.blend", blends[mode], f"the bundle: mode {mode}"),
        Setting("input.fill", fills[padding], "for a volume that is smaller than a patch"),
    ]
    if padding == "constant":
        value = inferer.arguments.get("cval", 0.0)
        settings += [
            Setting("input.fill_value", value, "the bundle's cval"),
            Setting("input.fill_units", "network", "MONAI pads what is normalised"),
        ]
    return settings


def _overlaps(inferer: Component) -> list[float]:
    overlap = inferer.arguments.get("overlap", 0.25)
    overlaps = overlap if isinstance(overlap, list) else [overlap] * 3
    if len(overlaps) != 3 or not all(
        isinstance(each, int | float) and 0 <= each < 1 for each in overlaps
    ):
        raise inferer.refuse(f"has the overlap {shorten_value(overlap)}")
    return overlaps


def _gaussian(inferer: Component) -> Json:
    sigma = inferer.arguments.get("sigma_scale", 0.125)
    if not isinstance(sigma, int | float) or not 0 < sigma <= 1:
        raise inferer.refuse(f"has the sigma_scale {shorten_value(sigma)}")
    return {"gaussian": sigma, "floor": "monai"}


def _zyx(
    size: tuple[float, float, float] | None,
) -> tuple[float | None, float | None, float | None]:
    if size is None:
        return (None, None, None)
    x, y, z = size
    return (z, y, x)


def _cautions(prepared: Preparation) -> list[str]:
    cautions: list[str] = []
    if prepared.orientation is not None:
        cautions.append(
            f"MONAI turns images to the orientation {shorten_text(prepared.orientation)} (x, y, "
            "z); a job takes a volume as it lies. See that its axes run in these directions."
        )
    if prepared.voxel_size is None:
        cautions.append("The bundle does not say at which voxel size the network was trained.")
    return cautions


KIND = PackageKind(
    title="a MONAI bundle",
    contents=f"{CONFIGS[0]}, {METADATA}, {_WEIGHTS[0]} or {_WEIGHTS[1]}",
    is_root=is_bundle,
    list_files=_list_files,
    read=_read,
)
