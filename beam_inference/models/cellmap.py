"""CellMap's packages: a network in several forms, and ``metadata.json`` beside them.

What its keys mean was read in ``cellmap-flow`` (20e31e2). Shapes and voxel sizes are Z, Y, X; voxel
sizes are in nanometres.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import shorten_text
from beam_inference.models.package_files import (
    ForeignModel,
    Length,
    local_file,
    parse_foreign,
    read_json,
)
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
    from numpy.typing import NDArray

_FILE = "metadata.json"
_NETWORKS = ("model.ts", "model.pt2", "model.onnx", "model.pt")
"""Forms of the network, the preferred first; the last is pickled."""

_MM_PER_NM = 1e-6

Shape = Annotated[list[Annotated[int, Field(gt=0, le=1 << 16)]], Field(min_length=2, max_length=3)]
Size = Annotated[list[Length], Field(min_length=2, max_length=3)]


class _Metadata(ForeignModel):
    model_name: str = "a network"
    description: str = ""
    author: str = ""
    license: str = ""
    spatial_dims: int | None = None
    in_channels: Annotated[int, Field(gt=0, le=1 << 14)] = 1
    out_channels: Annotated[int, Field(gt=0, le=1 << 14)]
    channels_names: list[str] = Field([])
    input_shape: Shape
    output_shape: Shape
    inference_input_shape: Shape | None = None
    inference_output_shape: Shape | None = None
    input_voxel_size: Size
    output_voxel_size: Size | None = None


def _is_root(folder: Traversable) -> bool:
    return (folder / _FILE).is_file() and any((folder / name).is_file() for name in _NETWORKS)


def _list_files(root: Traversable, folds: Folds | None) -> list[str]:
    return [_FILE, _read(root, folds).network]


def _read(root: Traversable, folds: Folds | None) -> _Model:
    if folds is not None:
        raise ModelContractError(f"{root}: a CellMap package has no folds: remove model.folds")
    file = root / _FILE
    metadata = parse_foreign(read_json(file), _Metadata, file, "CellMap")
    shapes = (
        *(metadata.input_shape, metadata.output_shape, metadata.input_voxel_size),
        *(metadata.inference_input_shape, metadata.inference_output_shape),
        metadata.output_voxel_size,
    )
    if len({len(shape) for shape in shapes if shape is not None}) > 1:
        raise ModelContractError(f"{file}: its shapes and voxel sizes have other numbers of axes")
    return _Model(root, metadata)


@dataclass(frozen=True)
class _Model:
    """A package that was read."""

    root: Traversable
    metadata: _Metadata

    @cached_property
    def network(self) -> str:
        """Name of the file of the network."""
        return next(name for name in _NETWORKS if (self.root / name).is_file())

    def load(self, *, is_trusted: bool) -> Any:
        file = self.root / self.network
        if self.network.endswith(".onnx"):
            raise ModelContractError(
                f"{self.root}: its network is ONNX, which a job runs by its file: write "
                f"model.path: {file} (unpack a zip file first)"
            )
        with local_file(file) as path:
            if self.network.endswith(".pt2"):
                from beam_inference.models import exported

                return exported.load_file(path, allow_pickle=is_trusted)
            from beam_inference.models import packed_torchscript

            return packed_torchscript.load_packed(path, allow_pickle=is_trusted)

    def describe(self) -> Recipe:
        metadata = self.metadata
        dims = len(metadata.input_shape)
        is_plane = dims == 2
        grid = _Grid.of(metadata)
        names = ", ".join(map(shorten_text, metadata.channels_names))
        channels = "metadata.json"
        z, y, x = _in_three(metadata.input_voxel_size, None)
        return Recipe(
            title=f"CellMap, {shorten_text(metadata.model_name)}",
            facts={
                "description": metadata.description or "not stated",
                "author": metadata.author or "not stated",
                "licence": metadata.license or "not stated",
                "channels of the output": names or "not named",
                "weights": self.network,
            },
            settings=[
                Setting("model.input_channels", metadata.in_channels, channels),
                Setting("model.output_channels", metadata.out_channels, channels),
                *([Setting("model.dims", 2, "its shapes have two numbers")] * is_plane),
                *([] if grid.obstacle else grid.settings()),
                Setting("output.dtype", "float32", "as the network gives it"),
            ],
            voxel_size=(_millimetres(z), _millimetres(y), _millimetres(x)),
            has_unit=True,
            cautions=[
                "The package does not say how images are normalised: write model.normalize as the "
                "network was trained. As it is, the network sees stored values.",
                *([_BY_VOXEL_SIZES] if max(grid.scale) > 1 else ()),
                *(
                    [_OTHER_DIMS.format(metadata.spatial_dims, dims)]
                    if metadata.spatial_dims not in (None, dims)
                    else ()
                ),
            ],
            obstacle=grid.obstacle,
            network_file=self.network if self.network.endswith(".onnx") else None,
        )

    def sample(self) -> Sample | None:
        return None

    def predict_by_tool(self, image: NDArray[np.float32]) -> NDArray[np.float32]:  # noqa: ARG002
        raise NotCompared("CellMap's packages bring no example, and no tool of their own")


def _millimetres(size: float | None) -> float | None:
    return None if size is None else size * _MM_PER_NM


def _in_three(values: Sequence[Any], fill: Any) -> tuple[Any, Any, Any]:
    z, y, x = [fill] * (3 - len(values)) + list(values)
    return (z, y, x)


_BY_VOXEL_SIZES = (
    "How much finer the output is, only the voxel sizes in metadata.json tell, and a job believes "
    "them."
)

_OTHER_DIMS = (
    "metadata.json says spatial_dims: {}, and its shapes have {} numbers: the network is run as "
    "its shapes say."
)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Shapes of the network, in voxels, Z, Y, X.

    Attributes:
        given: what the network is given.
        answered: what it answers.
        ratios: voxels of the answer for each of what it is given.
        growths: how much larger what it is given, and its answer, are for inference than for
            training, in voxels; zeros where the package states one pair of shapes.
    """

    given: Sequence[int]
    answered: Sequence[int]
    ratios: Sequence[float]
    growths: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, metadata: _Metadata) -> _Grid:
        given = metadata.inference_input_shape or metadata.input_shape
        answered = metadata.inference_output_shape or metadata.output_shape
        coarse = metadata.input_voxel_size
        fine = metadata.output_voxel_size or coarse
        ratios = [a / b for a, b in zip(coarse, fine, strict=False)]
        pairs = zip(given, metadata.input_shape, answered, metadata.output_shape, strict=True)
        growths = [(a - b, c - d) for a, b, c, d in pairs]
        return cls(
            _in_three(given, 1),
            _in_three(answered, 1),
            _in_three(ratios, 1.0),
            _in_three(growths, (0, 0)),
        )

    @property
    def scale(self) -> list[int]:
        """``model.output_scale``."""
        return [round(ratio) for ratio in self.ratios]

    @property
    def lost(self) -> list[int]:
        """Voxels of the answer that convolutions without padding take, both sides together."""
        return [
            given * scale - answered
            for given, scale, answered in zip(self.given, self.scale, self.answered, strict=True)
        ]

    @property
    def obstacle(self) -> str | None:
        """Why a job cannot run it, in a clause."""
        if any(
            scale < 1 or abs(scale - ratio) > 1e-6
            for scale, ratio in zip(self.scale, self.ratios, strict=True)
        ):
            ratios = ", ".join(f"{ratio:g}" for ratio in self.ratios)
            return f"its output has [{ratios}] of the input's voxels (z, y, x); no job does that"
        if any(
            lost < 0 or lost % (2 * scale)
            for lost, scale in zip(self.lost, self.scale, strict=True)
        ):
            return (
                f"its output of {list(self.answered)} voxels does not lie in the middle of its "
                f"input of {list(self.given)}"
            )
        if any(
            given and given * scale != answered
            for (given, answered), scale in zip(self.growths, self.scale, strict=True)
        ):
            return (
                f"its shapes for inference exceed those for training by {list(self.growths)} "
                "voxels (z, y, x; given and answered), which does not fit an output that is, by "
                f"its voxel sizes, {self.scale} times finer"
            )
        return None

    def settings(self) -> list[Setting]:
        """The keys that say so."""
        margins = [lost // 2 for lost in self.lost]
        settings = []
        if any(scale > 1 for scale in self.scale):
            settings.append(Setting("model.output_scale", self.scale, "the output is finer"))
        if any(margins):
            reason = f"half of what is lost from [{', '.join(map(str, self.given))}]"
            settings.append(Setting("model.crop_margin", margins, reason))
        overlap = [0, 0, 0] if any(margins) else self._quarters()
        reason = "patches fit without seams" if any(margins) else "so that patches have no seams"
        return [
            *settings,
            Setting("inference.patch_shape", list(self.answered), "the package's output shape"),
            Setting("inference.patch_overlap", overlap, reason),
            Setting("input.fill", "symmetric", "the package does not say"),
        ]

    def _quarters(self) -> list[int]:
        return [
            scale * (size // scale // 4)
            for size, scale in zip(self.answered, self.scale, strict=True)
        ]


KIND = PackageKind(
    title="a CellMap package",
    contents=f"{_FILE}, and one of {', '.join(_NETWORKS)}",
    is_root=_is_root,
    list_files=_list_files,
    read=_read,
)
