"""The job as frozen, strict models: what may stand in a job file, and what contradicts itself.

How a file becomes such a model is in :mod:`beam_inference.config.job_file`.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Discriminator, Field, PositiveFloat, Tag, field_validator, model_validator

from beam_inference.config.devices import DeviceKind, DeviceName, kind_of
from beam_inference.config.engines import CHOOSE, EngineName, Precision, get_engine
from beam_inference.config.factories import factory_parts
from beam_inference.config.fields import (
    INTEGER_DTYPES,
    LABEL_DTYPES,
    Count,
    Margin,
    Model,
    Natural,
    Point,
    Scales,
    Seconds,
    Shape,
    Url,
    VoxelSize,
    WritableUrl,
)
from beam_inference.config.heads import Head, channel_ranges, common_activation
from beam_inference.config.normalize import (
    FromLevels,
    Normalize,
    Sections,
    check_listed,
    check_undone,
    sees_patches,
)
from beam_inference.config.operators import (
    InstalledOperator,
    channels_after,
    gives_labels,
    interval_after,
    largest_label,
    total_halo,
)
from beam_inference.config.planes import (
    CombinePlanes,
    Plane,
    PlaneSum,
    check_planes,
    normal_axis,
)
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import FurtherInput, Input, Mask, Output, Roi
from beam_inference.geometry.blending import BlendWindow
from beam_inference.geometry.exact_sums import bound_above
from beam_inference.geometry.grids import LatticeKind
from beam_inference.geometry.plan import Strategy
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, is_same_size, triple

MOST_DEPTH = 64
"""Most ``job.io_depth``: each takes two threads, and an input and a result in memory."""

MOST_CACHED = 1024
"""Most ``job.cached_cutouts``."""

MOST_MEMBERS = 63
"""Most networks of ``model.ensemble``: all are in memory at a time."""

MOST_SECTIONS = 255
"""Most ``model.sections``: each is read, and held in memory, with every patch."""

OUTPUT = "output"
"""The key of the output that every job has."""

_SECTIONS_ALONG_Z: list[Plane] = ["yx"]
"""The planes of a 2-D network that names none."""

MOST_THREADS = 1024
"""Most ``inference.threads``: no machine has more cores, and each thread takes memory."""


class Channel(Model):
    """What an output channel says."""

    affinity: Point | None = Field(
        None,
        description=(
            "offset, ZYX: whether a voxel and the one at this offset belong together; else of the "
            "voxel"
        ),
    )


_SHA256 = re.compile(r"[0-9a-f]{64}(\+[0-9a-f]{64})?")


class _NetworkFiles(Model):
    """Where a network is."""

    path: Url = Field(
        description=(
            "identity, a TorchScript file (.pt, .ts), a torch.export file (.pt2), an ONNX file "
            "(.onnx), an OpenVINO file (.xml), a package (a folder or a zip file of one), "
            "package.module:factory or file.py:factory"
        )
    )
    folds: Annotated[list[Natural | Literal["all"]], Field(min_length=1)] | None = Field(
        None,
        description=(
            "of an nnU-Net folder, the folds whose answers are averaged. Default: all that are "
            "numbered"
        ),
    )
    weights: Url | None = Field(
        None,
        description=(
            "state dict or safetensors, for a factory; the .bin of an .xml, by default beside it"
        ),
    )
    sha256: str | None = Field(
        None,
        description=(
            "expected hash of the weights, or of path where there are none; or of a factory's "
            "file and the weights, with a + between them"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _beside(cls, values: Any) -> Any:
        path = values.get("path") if isinstance(values, dict) else None
        if isinstance(path, str) and path.endswith(".xml") and not values.get("weights"):
            return {**values, "weights": path.removesuffix(".xml") + ".bin"}
        return values

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ValueError(
                "sha256 must be 64 lower-case hexadecimal digits, or two such with a + between"
            )
        if self.folds is not None and len(set(self.folds)) < len(self.folds):
            raise ValueError(f"folds {self.folds} names a fold twice")
        is_factory = self.path != "identity" and factory_parts(self.path) is not None
        if self.weights is not None and not is_factory and not self.path.endswith(".xml"):
            raise ValueError(
                f"weights go with a factory (package.module:factory), not with path: {self.path}"
            )
        return self


class Member(_NetworkFiles):
    """A network whose answers are averaged with those of others."""

    share: PositiveFloat = Field(
        1.0, description="how much it counts in the mean, where the network of model.path counts 1"
    )

    @property
    def files(self) -> dict[str, Any]:
        """Where the network is, by key."""
        return {name: getattr(self, name) for name in _NetworkFiles.model_fields}

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if self.path == "identity":
            raise ValueError("identity is no network to be averaged with others")
        return self


class Network(_NetworkFiles):
    """The trained network."""

    ensemble: list[Member] = Field(
        [],
        max_length=MOST_MEMBERS,
        description=(
            "further networks, whose answers after the activation are averaged with those of path"
        ),
    )
    input_channels: Count = 1
    output_channels: Count = 1
    heads: Annotated[list[Head], Field(min_length=1)] | None = Field(
        None,
        description=(
            "of a network that returns several arrays, those that are used, as channels one after "
            "another; output_channels is their sum. output.head says which one is written"
        ),
    )
    channels: list[Channel] | None = Field(
        None, description="what each output channel says; inference.augment needs it"
    )
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    normalize: Normalize = Field("none", description="unit: the stored dtype's maximum becomes 1")
    denormalize: bool = Field(
        False,
        description=(
            "undo what normalize has done, on the network's values, for networks that return what "
            "they were given, such as denoised images"
        ),
    )
    batch_norm: Literal["running", "batch"] = Field(
        "running", description="statistics that BatchNorm layers use"
    )
    crop_margin: Margin = Field(
        (0, 0, 0), description="voxels by which the input exceeds its patch, per side"
    )
    dims: Literal[2, 3] = 3
    axes: Literal["zyx", "xyz"] = Field(
        "zyx",
        description=(
            "the order of the axes in the arrays that the network was trained on; all keys of the "
            "job are z, y, x in any case"
        ),
    )
    sections: Annotated[Count, Field(le=MOST_SECTIONS)] = Field(
        1,
        description=(
            "of a 2-D network, how many neighbouring sections it takes as channels: an odd number; "
            "its output belongs to the middle one"
        ),
    )
    planes: Annotated[list[Plane], Field(min_length=1)] | None = Field(
        None,
        description=(
            "of a 2-D network, the planes that it is run over, such as [yx, zx, zy]; patches are "
            "then 3-D. Default: sections along z, one by one"
        ),
    )
    combine_planes: CombinePlanes = Field(
        "mean",
        description=(
            "how the answers of several planes become one. mean: of each channel. vote: the share "
            "of the planes for which a channel is the largest. {sum: [{zx: 0, zy: 0}, …]}: of the "
            "channels named, for each output channel"
        ),
    )
    output_scale: Scales = Field(
        (1, 1, 1),
        description=(
            "voxels of the network's output for each voxel of its input, ZYX; 1/2 for one for "
            "every two. Shapes of patches, overlaps and margins are in the finer ones of both"
        ),
    )
    prediction_bound: PositiveFloat | None = Field(
        None,
        description=(
            "how large the network's values are, after the activation; rounded up to a power of "
            "two. Sums are exact in steps of 2^-23 of it, for values of up to twice as much. "
            "Default: 1 after an activation, else the largest value of a trial, kept ever after"
        ),
    )
    voxel_size_nm: VoxelSize | None = Field(
        None, description="voxel size the network was trained at, ZYX, nanometres"
    )

    @property
    def finer_by(self) -> Zyx:
        """Voxels of the network's output within one of its input, ZYX; 1 where it is not finer."""
        return triple(n if isinstance(n, int) else 1 for n in self.output_scale)

    @property
    def coarser_by(self) -> Zyx:
        """Voxels of the network's input within one of its output, ZYX; 1 where it's not coarser."""
        return triple(
            1 if isinstance(n, int) else int(n.removeprefix("1/")) for n in self.output_scale
        )

    @property
    def members(self) -> list[Network]:
        """Each network of the ensemble as if it were the only one; the network if there is none."""
        alone = self.model_copy(update={"ensemble": []})
        return [alone, *(alone.model_copy(update=each.files) for each in self.ensemble)]

    @property
    def shares(self) -> list[float]:
        """What each of :attr:`members` counts in their mean; they add up to 1."""
        shares = [1.0, *(each.share for each in self.ensemble)]
        return [share / sum(shares) for share in shares]

    @property
    def input_margin(self) -> Zyx:
        """Voxels by which the input exceeds its patch, per side: with neighbouring sections."""
        if self.dims == 3:
            return self.crop_margin
        normals = {normal_axis(plane) for plane in self.planes or _SECTIONS_ALONG_Z}
        around = self.sections // 2
        return triple(
            max(margin, around if axis in normals else 0)
            for axis, margin in enumerate(self.crop_margin)
        )

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lowest and highest value of a network without heads; None if it is not known."""
        if self.combine_planes == "vote":
            return (0.0, 1.0)
        if self.activation == "none":
            return None
        if isinstance(self.combine_planes, PlaneSum):
            return (0.0, float(self.combine_planes.most_terms))
        return (0.0, 1.0)

    @property
    def stated_bound(self) -> float | None:
        """The power of two that the network's values stay within; None if only a trial can tell."""
        if self.prediction_bound is not None:
            return bound_above(self.prediction_bound)
        return None if self.interval is None else bound_above(self.interval[1])

    @property
    def stated_bounds(self) -> tuple[float | None, ...]:
        """The stated bound of each head; of the whole network where it has none."""
        if self.heads is None:
            return (self.stated_bound,)
        return tuple(head.stated_bound for head in self.heads)

    @property
    def channel_ranges(self) -> list[range]:
        """The channels of each head; all of them where the network has none."""
        return [range(self.output_channels)] if self.heads is None else channel_ranges(self.heads)

    def of_head(self, key: int | str | None) -> Network:
        """The network as one that returns a head alone, or its heads joined where key is None.

        Raises:
            ValueError: there is no such head.
        """
        if self.heads is None:
            if key is not None:
                raise ValueError(f"head: {key} needs model.heads, which says what {key} is")
            return self
        if key is None:
            activation = common_activation(self.heads)
            return self.model_copy(update={"heads": None, "activation": activation})
        head, channels = self._find_head(key, self.heads)
        described = None if self.channels is None else [self.channels[n] for n in channels]
        return self.model_copy(
            update={
                "heads": None,
                "output_channels": head.channels,
                "channels": described,
                "activation": head.activation,
                "prediction_bound": head.prediction_bound,
            }
        )

    def channels_of_head(self, key: int | str | None) -> range:
        """The channels of a head among those of all; all of them where key is None."""
        if key is None or self.heads is None:
            return range(self.output_channels)
        return self._find_head(key, self.heads)[1]

    def _find_head(self, key: int | str, heads: list[Head]) -> tuple[Head, range]:
        for head, channels in zip(heads, self.channel_ranges, strict=True):
            if head.key == key:
                return head, channels
        known = ", ".join(str(head.key) for head in heads)
        raise ValueError(f"head: {key} is not among model.heads: {known}")

    @model_validator(mode="before")
    @classmethod
    def _add_up_heads(cls, values: Any) -> Any:
        """The channels of all heads are those of the network, which need not be written."""
        heads = values.get("heads") if isinstance(values, dict) else None
        if not isinstance(heads, list) or "output_channels" in values:
            return values
        counts = [
            each.channels
            if isinstance(each, Head)
            else (each.get("channels", 1) if isinstance(each, dict) else None)
            for each in heads
        ]
        if not all(isinstance(count, int) for count in counts):
            return values  # what is wrong with it is told by its own check
        return {**values, "output_channels": sum(counts)}

    @model_validator(mode="after")
    def _check_denormalize(self) -> Self:
        if not self.denormalize:
            return self
        if self.activation != "none":
            raise ValueError(
                f"denormalize undoes normalize, but activation: {self.activation} gives shares of "
                "classes: remove one of them"
            )
        check_undone(self.normalize, self.input_channels, self.output_channels)
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.path == "identity":
            if self.ensemble:
                raise ValueError("identity is no network to be averaged with those of ensemble")
            if self.sha256 is not None or self.activation == "softmax":
                raise ValueError("identity takes no sha256 and no softmax")
            if self.input_channels != self.output_channels:
                raise ValueError("identity needs as many output_channels as input_channels")
        if isinstance(self.normalize, tuple):
            check_listed(self.normalize, self.input_channels)
        self._check_channels()
        self._check_heads()
        self.stated_bound  # noqa: B018  # raises ValueError for one that is out of reach
        self._check_sections()
        if self.axes == "xyz" and self.dims == 2:
            raise ValueError(
                "axes: xyz turns the three axes of a 3-D network, and dims is 2: a network of "
                "other planes than [y, x] names them in planes"
            )
        self._check_planes()
        return self

    def _check_planes(self) -> None:
        if self.dims == 3 and self.planes is not None:
            raise ValueError(
                f"planes: {self.planes} are of a network that takes (N, C, Y, X), and dims is 3: "
                "write dims: 2, or remove planes"
            )
        if self.dims == 3:
            return
        planes = self.planes or _SECTIONS_ALONG_Z
        check_planes(planes)
        for axis, margin in zip("zyx", self.crop_margin, strict=True):
            if margin and not any(axis in plane for plane in planes):
                raise ValueError(
                    f"a 2-D network (dims: 2) has no crop_margin on {axis}, which none of its "
                    "planes has: it must be 0"
                )
        self._check_combined_planes(planes)

    def _check_combined_planes(self, planes: list[Plane]) -> None:
        combine = self.combine_planes
        if combine == "mean":
            return
        if self.planes is None:
            raise ValueError("combine_planes has no effect without planes: remove it")
        name = combine if isinstance(combine, str) else "sum"
        if self.heads is not None or self.denormalize:
            raise ValueError(
                f"combine_planes: {name} does not go with "
                f"{'denormalize' if self.heads is None else 'heads'}: write combine_planes: mean, "
                "or remove one of them"
            )
        if not isinstance(combine, PlaneSum):
            if self.output_channels == 1:
                raise ValueError(
                    "combine_planes: vote is of several classes, and output_channels is 1: write "
                    "combine_planes: mean"
                )
            return
        if len(combine.sum) != self.output_channels:
            raise ValueError(
                f"combine_planes.sum describes {len(combine.sum)} channels, output_channels says "
                f"{self.output_channels}"
            )
        named = {plane for terms in combine.sum for plane in terms}
        if named != set(planes):
            raise ValueError(
                f"combine_planes.sum names the planes {', '.join(sorted(named))}, and planes says "
                f"{', '.join(planes)}: they must be the same"
            )

    def _check_sections(self) -> None:
        if self.sections == 1:
            return
        if self.dims != 2:
            raise ValueError(
                f"sections: {self.sections} makes neighbouring sections the channels of a network "
                "that takes (N, C, Y, X), and dims is 3: write dims: 2, or remove sections"
            )
        if self.sections % 2 == 0:
            raise ValueError(
                f"sections: {self.sections} has no middle one, which the output would belong to: "
                "write an odd number"
            )
        if self.path == "identity":
            raise ValueError("identity returns what it is given, and takes no sections")

    def _check_heads(self) -> None:
        if self.heads is None:
            return
        total = sum(head.channels for head in self.heads)
        if total != self.output_channels:
            raise ValueError(
                f"heads have {total} channels together, output_channels says "
                f"{self.output_channels}: remove output_channels, or make them agree"
            )
        keys = [head.key for head in self.heads]
        if len(set(keys)) < len(keys):
            raise ValueError(f"heads: {keys} names one twice")
        refused = {
            "path: identity": self.path == "identity",
            f"activation: {self.activation}": self.activation != "none",
            "prediction_bound": self.prediction_bound is not None,
            "denormalize": self.denormalize,
        }
        for key, is_asked in refused.items():
            if is_asked:
                raise ValueError(
                    f"{key} does not go with heads: remove one of them. Each head has an "
                    "activation and a prediction_bound of its own"
                )

    def _check_channels(self) -> None:
        if self.channels is not None and len(self.channels) != self.output_channels:
            raise ValueError(
                f"channels describes {len(self.channels)}, output_channels says "
                f"{self.output_channels}"
            )
        offsets = [
            channel.affinity for channel in self.channels or [] if channel.affinity is not None
        ]
        if len(set(offsets)) < len(offsets) or (0, 0, 0) in offsets:
            raise ValueError(
                "channels: each affinity needs an offset of its own, other than [0, 0, 0]"
            )


def network_keys(model: Network) -> list[str]:
    """The key of each of a network's members in the job file, for messages and records."""
    return ["model", *(f"model.ensemble.{number}" for number in range(len(model.ensemble)))]


_ChunkShape = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[Shape, Tag("shape")],
    Discriminator(lambda value: "auto" if value == "auto" else "shape"),
]
_BatchSize = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[Count, Tag("number")],
    Discriminator(lambda value: "auto" if value == "auto" else "number"),
]


BatchSize = int | Literal["auto"]


class Mirror(Model):
    """Test-time augmentation by flips alone."""

    mirror: list[Literal["z", "y", "x"]] = Field(
        min_length=1, description="the axes of which all combinations are flipped"
    )

    @field_validator("mirror")
    @classmethod
    def _sort(cls, axes: list[str]) -> list[str]:
        if len(set(axes)) < len(axes):
            raise ValueError(f"mirror {axes} names an axis twice")
        return sorted(axes, key="zyx".index)


class Gaussian(Model):
    """Blend weights of a Gaussian."""

    gaussian: Annotated[PositiveFloat, Field(le=1)] = Field(
        description="standard deviation, as a share of the patch on each axis"
    )
    floor: Literal["none", "nnunet", "monai"] = Field(
        "none",
        description=(
            "the least weight before normalisation, and the centre. none: there is none; the "
            "middle. nnunet: there is none in float32; voxel n // 2. monai: 1e-3; the middle"
        ),
    )

    @property
    def window(self) -> BlendWindow:
        """The window of each patch."""
        return BlendWindow(
            "gaussian",
            self.gaussian,
            is_on_voxel=self.floor == "nnunet",
            floor=_MONAI_FLOOR if self.floor == "monai" else 0.0,
        )


_MONAI_FLOOR = 1e-3
"""Least weight of MONAI 1.6.1 where the largest is 1.

nnU-Net 2.8.1 raises zeros to the smallest positive weight. In its half precision there are some; in
float32 there are none, and its results in half precision are no nearer to ours with such a floor.
"""

Blend = Annotated[
    Annotated[Literal["bump", "constant"], Tag("word")] | Annotated[Gaussian, Tag("Gaussian")],
    Discriminator(lambda value: "Gaussian" if isinstance(value, dict | Gaussian) else "word"),
]
"""How patches are weighted where they overlap."""


Augment = Annotated[
    Annotated[Literal["none", "xy", "xyz"], Tag("word")] | Annotated[Mirror, Tag("Mirror")],
    Discriminator(lambda value: "Mirror" if isinstance(value, dict | Mirror) else "word"),
]
"""How a network's answers are averaged over symmetries of a patch."""


class Inference(Model):
    """How the network is applied."""

    patch_shape: Shape
    patch_overlap: Margin = (0, 0, 0)
    lattice: LatticeKind = Field(
        "stride",
        description=(
            "where patches lie that do not fit the volume exactly. stride: one after the other, "
            "the last moved back. spread: as many, evenly, as nnU-Net's. pad: the last hangs over "
            "the end"
        ),
    )
    blend: Blend = Field(
        "bump",
        description=(
            "weights where patches overlap: bump, constant, or {gaussian: 0.125, floor: nnunet}"
        ),
    )
    chunk_shape: _ChunkShape = Field(
        description=(
            "the unit of work, a multiple of block_shape. auto: the best that fits 2 GiB per "
            "worker process, found at first launch, kept ever after"
        )
    )
    seams: Literal["exact", "crop"] = Field(
        "exact",
        description=(
            "exact: the result is that of the whole volume at once, whatever the chunks. crop: "
            "each chunk has patches of its own, which is cheap and leaves seams"
        ),
    )
    strategy: Literal["auto", "exchange", "recompute"] = Field(
        "auto",
        description=(
            "how chunks get what they share, with seams: exact; the bits are the same, and it may "
            "change from launch to launch. exchange: each patch is computed once, and sums pass "
            "through files. recompute: each chunk computes all patches that touch it. auto: what "
            "is cheaper"
        ),
    )
    chunk_crop_margin: Margin | None = Field(
        None, description="only for seams: crop; default patch_overlap"
    )
    batch_size: _BatchSize = Field(
        1, description="patches per network call. auto: tried at first launch, kept ever after"
    )
    device: DeviceName = Field(
        "auto",
        description=(
            "where the network runs: cpu, cuda (also AMD's GPUs), mps, xpu. cuda:1 is one GPU of "
            "several, cuda all of them. auto: the GPU of the machine that computes, else cpu"
        ),
    )
    precision: Precision = Field(
        "float32",
        description=(
            "what the network computes in; sums are always float32. int8: on CPUs with engine: "
            "openvino, which a launch calibrates on patches of the input"
        ),
    )
    engine: EngineName = Field(
        "auto",
        description=(
            "what runs the network; compile is torch.compile. auto: openvino on a CPU, where it is "
            "installed and gives what PyTorch gives, else torch. fastest: whichever is, with its "
            "memory_format, tried where the network will run. Both are decided at first launch, "
            "kept ever after"
        ),
    )
    memory_format: Literal["contiguous", "channels_last"] = Field(
        "contiguous",
        description=(
            "how PyTorch lays out the network's arrays; which is faster depends on network and GPU"
        ),
    )
    augment: Augment = Field(
        "none",
        description=(
            "mean over the 8 flips and transposes of y and x, or 16 with flips of z, of each "
            "patch; or over the flips of the axes that mirror lists"
        ),
    )
    threads: Annotated[Count, Field(le=MOST_THREADS)] | None = Field(
        None,
        description=(
            "CPU threads of the network per worker process; they change its last bits. Default: "
            "the cores shared by the worker processes at first launch, kept ever after; 1 on "
            "remote runners"
        ),
    )

    mixed_devices: bool = Field(
        False,
        description=(
            "whether launches with other devices, engines, threads and batches may do chunks of "
            "this job: what they write agrees to 1e-5 of the range of values, not in every bit. "
            "Each chooses its own, and first computes a finished chunk to see that it agrees"
        ),
    )

    partition: Shape = Field(
        (1, 1, 1),
        description=(
            "processes of one machine that share each patch, along z, y and x, for patches that "
            "are too large for one: each holds a part, and exchanges its borders with the others"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _read_former_seams(cls, values: Any) -> Any:
        """The strategies were seam modes of their own once: job files still say so."""
        seams = values.get("seams") if isinstance(values, dict) else None
        if seams not in ("exchange", "recompute"):
            return values
        if values.get("strategy", seams) != seams:
            raise ValueError(
                f"seams: {seams} is a former way to write strategy: {seams}, but strategy says "
                f"{values['strategy']}: write seams: exact, and the strategy"
            )
        return {**values, "seams": "exact", "strategy": seams}

    @property
    def window(self) -> BlendWindow:
        """What a patch's voxels weigh where patches overlap."""
        return self.blend.window if isinstance(self.blend, Gaussian) else BlendWindow(self.blend)

    @property
    def patches_per_call(self) -> int:
        """``batch_size``; 1 as long as ``auto`` is not decided."""
        return 1 if self.batch_size == "auto" else self.batch_size

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(o >= p for o, p in zip(self.patch_overlap, self.patch_shape, strict=True)):
            raise ValueError(
                f"patch_overlap {list(self.patch_overlap)} must be smaller than patch_shape "
                f"{list(self.patch_shape)} on every axis (z, y, x)"
            )
        if self.chunk_crop_margin is not None and self.seams != "crop":
            raise ValueError("chunk_crop_margin has an effect only with seams: crop; remove it")
        if self.strategy != "auto" and self.seams == "crop":
            raise ValueError(
                f"strategy: {self.strategy} has an effect only with seams: exact; remove it"
            )
        if self.mixed_devices and self.precision != "float32":
            raise ValueError(
                f"mixed_devices takes precision: float32: results of {self.precision} do not "
                "agree from engine to engine. Remove one of the two"
            )
        if self.precision == "tf32" and self.device_kind not in (None, "cuda"):
            raise ValueError(
                "precision: tf32 exists only on CUDA devices; use float32 on the "
                f"{self.device_kind}"
            )
        self._check_engine()
        self._check_partition()
        return self

    @property
    def device_kind(self) -> DeviceKind | None:
        """The kind of device, without its number; None while it is left to choose."""
        return None if self.device == "auto" else kind_of(self.device)

    @property
    def members(self) -> int:
        """Processes that share each patch."""
        return math.prod(self.partition)

    def _check_partition(self) -> None:
        if self.members == 1:
            return
        if self.engine != "torch" or self.memory_format != "contiguous":
            raise ValueError(
                f"partition {list(self.partition)} divides networks of PyTorch: write engine: "
                "torch, and leave memory_format out"
            )
        if self.device_kind not in (None, "cpu"):
            raise ValueError(
                f"partition {list(self.partition)} divides patches among processes on CPUs, not "
                f"yet among devices: write device: cpu, or remove partition"
            )
        if any(n > p for n, p in zip(self.partition, self.patch_shape, strict=True)):
            raise ValueError(
                f"partition {list(self.partition)} has more processes along an axis than "
                f"patch_shape {list(self.patch_shape)} has voxels (z, y, x)"
            )

    def _check_engine(self) -> None:
        formats: tuple[str, ...] = ("contiguous",)
        if self.precision == "int8" and self.engine in CHOOSE:
            raise ValueError(
                f"precision: int8 changes the network's values visibly, so engine: {self.engine} "
                "does not choose it: write engine: openvino"
            )
        if self.engine not in CHOOSE:
            engine = get_engine(self.engine)
            formats = engine.memory_formats
            if (
                self.device_kind not in (None, *engine.devices)
                or self.precision not in engine.precisions
            ):
                other = "openvino" if self.precision == "int8" else "torch, or auto"
                raise ValueError(
                    f"engine: {self.engine} runs {engine.limits}; write engine: {other}"
                )
        if self.memory_format not in formats:
            raise ValueError(
                f"memory_format: {self.memory_format} is PyTorch's; write engine: torch or "
                "compile, or remove it (engine: fastest tries both)"
            )


_SHARED_KEYS = ("bounds", "voxel_size_nm", "resample")
"""Keys that say where the voxels of all outputs of a job are."""


class FurtherOutput(Output):
    """A volume that is written beside the output, in the same pass."""

    postprocess: list[InstalledOperator] = Field(
        [], description="what is done to the values that this volume is made of, in this order"
    )

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        for key in _SHARED_KEYS:
            if getattr(self, key) != Output.model_fields[key].get_default():
                raise ValueError(f"{key} is that of output, which all volumes have: remove it")
        return self

    def as_output(self, main: Output) -> Output:
        """This volume as the only output of a job, with what it shares with the job's own."""
        values = {name: getattr(self, name) for name in Output.model_fields}
        shared = {name: getattr(main, name) for name in _SHARED_KEYS}
        return Output.model_construct(**values | shared)


OutputName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
"""A name of a further output: letters, digits, _ and -."""


class Timeouts(Model):
    """What a single step of a chunk may take, in seconds; what takes longer is given up."""

    read: Seconds = Field(
        1800.0, description="reading a chunk's input; then the chunk is put into quarantine"
    )
    network: Seconds | None = Field(
        None,
        description="one call of the network; then the process ends, and the runner tries again; "
        "default 20 times the first call, and at least 600",
    )
    write: Seconds = Field(
        1800.0, description="writing a chunk's blocks; then the worker is at fault"
    )
    claim: Seconds = Field(
        60.0,
        description="silence of a worker of any launch, until others do the chunks that it claimed",
    )


class Job(Model):
    """How the job is run; nothing here changes the output's bytes."""

    max_failed_chunks: Natural | None = Field(
        None, description="above this many quarantined chunks the job fails; default no bound"
    )
    attempts: Count = Field(3, description="attempts per chunk and stage, inside the worker")
    resume: bool = Field(True, description="skip chunks that have a receipt")
    state_path: WritableUrl | None = Field(None, description="default <output>/_beam_inference")
    run_length: Count | None = Field(
        None, description="chunks per Beam element; default from their number"
    )
    io_depth: Annotated[Count, Field(le=MOST_DEPTH)] | None = Field(
        None,
        description=(
            "chunks per thread that are read ahead, and written behind, at most. Default: as many "
            "as hide how long the stores take, up to 16, as far as memory allows"
        ),
    )
    cached_cutouts: Annotated[Natural, Field(le=MOST_CACHED)] | None = Field(
        None,
        description=(
            "a worker process keeps the decoded input blocks of as many chunks' inputs. Default: "
            "one for each of its threads, at least 2"
        ),
    )
    timeouts: Timeouts = Field(Timeouts(), description="what a single step may take")


class JobConfig(Model):
    """A job file.

    Example:
        >>> job = JobConfig.model_validate({
        ...     "input": {"path": "file:///data/em"},
        ...     "output": {"path": "file:///data/affinities"},
        ...     "model": {"path": "affinity.pt", "output_channels": 3},
        ...     "inference": {
        ...         "patch_shape": "20x256x256",
        ...         "patch_overlap": "4x64x64",
        ...         "chunk_shape": "64x512x512",
        ...     },
        ... })
        >>> job.inference.patch_shape
        (20, 256, 256)
    """

    input: Input
    inputs: list[FurtherInput] = Field(
        [],
        description=(
            "further volumes over the same box, such as other modalities: their channels follow "
            "those of input, in this order"
        ),
    )
    output: Output
    model: Network
    inference: Inference
    postprocess: list[InstalledOperator] = Field(
        [], description="what is done to the network's values, in this order"
    )
    outputs: dict[OutputName, FurtherOutput] = Field(
        {}, description="further volumes, by names of yours, that are written in the same pass"
    )
    mask: Mask | None = Field(
        None, description="where the output is wanted; default: in the whole ROI"
    )
    roi: Roi | None = Field(None, description="default: the whole input")
    job: Job = Job()
    storage: Storage = Storage()

    @property
    def output_model(self) -> Network:
        """The network as the output sees it: as one that returns the output's head alone."""
        return self.model.of_head(self.output.head)

    @property
    def output_channels(self) -> int:
        """Channels of the output, which operators may have made of the network's."""
        return channels_after(self.postprocess, self.output_model.output_channels)

    @property
    def output_keys(self) -> list[str]:
        """The keys of the outputs in the job file: "output" first, then "outputs.NAME"."""
        return [OUTPUT, *(f"outputs.{name}" for name in self.outputs)]

    @property
    def previews(self) -> dict[str, str]:
        """The keys of the outputs that have a preview, by the preview's own key."""
        return {
            f"{key}.preview": key
            for key, single in self.by_output.items()
            if single.output.preview is not None
        }

    @property
    def written_keys(self) -> list[str]:
        """The keys of all volumes that chunks are written to: outputs first, then previews."""
        return [*self.output_keys, *self.previews]

    def preview_scale(self, key: str) -> Zyx:
        """Voxels of an output along each side of a voxel of a volume; 1 unless it is a preview."""
        source = self.previews.get(key)
        preview = None if source is None else self.by_output[source].output.preview
        return (1, 1, 1) if preview is None else preview.scale

    @property
    def preview_range(self) -> tuple[float, float] | None:
        """What maps onto the preview's full range; None if it has to be said, or there is none."""
        preview = self.output.preview
        if preview is None:
            return None
        if preview.value_range is not None:
            return preview.value_range
        if self.output_interval is not None:
            return self.output_interval
        return None if self.output_model.activation == "none" else (0.0, 1.0)

    @property
    def by_output(self) -> dict[str, Self]:
        """The job for each of its outputs, as if it wrote that one alone.

        Returns:
            By :attr:`output_keys`.
        """
        single = {OUTPUT: self.model_copy(update={"outputs": {}})}
        for name, further in self.outputs.items():
            values = {
                "output": further.as_output(self.output),
                "postprocess": further.postprocess,
                "outputs": {},
            }
            single[f"outputs.{name}"] = self.model_copy(update=values)
        return single

    @property
    def gives_labels(self) -> bool:
        """Whether the output is whole numbers that name something, written as they are."""
        return gives_labels(self.postprocess)

    @property
    def stated_strategy(self) -> Strategy | None:
        """The strategy that the job file asks for; None if it leaves the choice."""
        inference = self.inference
        if inference.seams == "crop":
            return "crop"
        return None if inference.strategy == "auto" else inference.strategy

    @property
    def network_interval(self) -> tuple[float, float] | None:
        """Lowest and highest value of the output's head, known after an activation; else None."""
        return self.output_model.interval

    @property
    def output_interval(self) -> tuple[float, float] | None:
        """Lowest and highest value after the operators; None if they are not known.

        Raises:
            ValueError: an operator makes no sense for the values that it is given.
        """
        channels = self.output_model.output_channels
        return interval_after(self.postprocess, self.network_interval, channels)

    @property
    def largest_predictions(self) -> tuple[float, ...]:
        """The largest magnitude that the activation of each head allows; infinity without one."""
        heads = self.model.heads
        if heads is None:
            interval = self.model.interval
            return (math.inf if interval is None else interval[1],)
        return tuple(math.inf if head.activation == "none" else 1.0 for head in heads)

    @model_validator(mode="before")
    @classmethod
    def _inherit_blocks(cls, values: Any) -> Any:
        """What a further output does not say of its format and blocks is as in the output."""
        if not isinstance(values, dict) or not isinstance(values.get("outputs"), dict):
            return values
        output = values.get("output")
        known = output if isinstance(output, dict) else {}
        outputs = {}
        for name, further in values["outputs"].items():
            if not isinstance(further, dict):
                return values
            keys = ["format", "block_shape"]
            if not {"format", "block_shape"} & further.keys():
                keys.append("shard_shape")
            outputs[name] = {key: known[key] for key in keys if key in known} | further
        return {**values, "outputs": outputs}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, single in self.by_output.items():
            try:
                single._check_labels()
                single._check_output()
            except ValueError as error:
                text = str(error)
                text = f"output.{text}" if text.startswith("head: ") else text
                if key != OUTPUT:
                    named = text.replace("output.", f"{key}.")
                    text = named if named != text else f"{key}: {text}"
                raise ValueError(text) from None
        self._check_inputs()
        self._check_halos()
        self._check_resample()
        self._check_output_scale()
        self._check_domain()
        self._check_inference()
        return self

    def _check_inputs(self) -> None:
        for number, further in enumerate(self.inputs):
            try:
                further.check_fill(self.input)
            except ValueError as error:
                raise ValueError(f"inputs.{number}: {error}") from None
        normalize = self.model.normalize
        if self.inputs and isinstance(normalize, FromLevels | Sections):
            raise ValueError(
                "model.normalize: levels are of one volume, and inputs names others: write a list "
                "of steps, each with the channels that it is for, such as {standard: {levels: "
                "FILE}, channels: [0]}"
            )

    def _check_halos(self) -> None:
        """Refuse crops that another output would move: each is as if it were alone."""
        halos = {total_halo(single.postprocess) for single in self.by_output.values()}
        if self.inference.seams == "crop" and len(halos) > 1:
            raise ValueError(
                "inference.seams: crop: operators that look beyond a voxel move the seams, and "
                f"those of the outputs look {' and '.join(str(list(h)) for h in sorted(halos))} "
                "voxels far (z, y, x): write seams: exact, or a job for each"
            )

    def _check_labels(self) -> None:
        if self.gives_labels and (
            self.output.dtype == "float32" or self.output.value_range is not None
        ):
            raise ValueError(
                "postprocess gives whole numbers, which are written as they are: write an integer "
                "output.dtype, and no output.value_range"
            )
        if self.gives_labels:
            largest = largest_label(self.postprocess, self.output_model.output_channels)
            if largest > np.iinfo(self.output.dtype).max:
                raise ValueError(
                    f"postprocess gives labels up to {largest}, which {self.output.dtype} does not "
                    "hold"
                )
        if self.output.dtype in LABEL_DTYPES and not self.gives_labels:
            raise ValueError(
                f"output.dtype: {self.output.dtype} is for labels, which argmax, regions, "
                "threshold or own with labels make"
            )

    @property
    def resampled_voxel_size_nm(self) -> VoxelSizeNm | None:
        """The voxel size that the input is resampled to, ZYX; None if it is read as it is."""
        resample = self.input.resample
        return None if resample is None else resample.voxel_size_nm or self.model.voxel_size_nm

    def _check_resample(self) -> None:
        if self.input.resample is None:
            return
        wanted = self.resampled_voxel_size_nm
        trained = self.model.voxel_size_nm
        if wanted is None:
            raise ValueError(
                "input.resample needs to know the voxel size that the network was trained at: "
                "write model.voxel_size_nm: [z, y, x]"
            )
        if trained is not None and not is_same_size(wanted, trained):
            raise ValueError(
                f"input.resample.voxel_size_nm is {list(wanted)}, and model.voxel_size_nm "
                f"{list(trained)} (z, y, x): the network would see objects of another size than "
                "it was trained on. Remove one of them."
            )

    def _check_domain(self) -> None:
        if self.roi is None or self.roi.domain is None:
            return
        refused = {
            "inference.seams: crop": self.inference.seams == "crop",
            "input.box": self.input.box is not None,
        }
        for key, is_given in refused.items():
            if is_given:
                raise ValueError(
                    f"roi.domain does not go with {key}: voxels would depend on where the ROI "
                    "ends. Remove one of them"
                )

    def _check_output_scale(self) -> None:
        finer = self.model.finer_by
        coarser = self.model.coarser_by
        if coarser != (1, 1, 1):
            self._check_coarser_output(coarser, finer)
        elif finer != (1, 1, 1):
            self._check_finer_output(finer)

    def _check_coarser_output(self, scale: Zyx, finer: Zyx) -> None:
        text = f"model.output_scale [{', '.join(map(str, self.model.output_scale))}]"
        if finer != (1, 1, 1):
            raise ValueError(
                f"{text} is finer on one axis, and coarser on another: no job does that. Write a "
                "network that repeats its voxels on one of them"
            )
        inference = self.inference
        shapes = {
            "inference.patch_shape": inference.patch_shape,
            "inference.patch_overlap": inference.patch_overlap,
        }
        if self.roi is not None:
            shapes["roi.context"] = self.roi.context
        for key, shape in shapes.items():
            if any(n % s for n, s in zip(shape, scale, strict=True)):
                raise ValueError(
                    f"{key} {list(shape)} must be a multiple of {list(scale)} (z, y, x), because "
                    f"of {text}, so that patches begin with a voxel of the network's output; it is "
                    "in voxels of the network's input"
                )
        refused = {
            "inference.lattice: spread": inference.lattice == "spread",
            "inference.seams: crop": inference.seams == "crop",
            "inference.precision: int8": inference.precision == "int8",
            "model.denormalize": self.model.denormalize,
            "model.dims: 2": self.model.dims == 2 and scale[0] != 1,
            "model.planes": self.model.planes is not None,
            "inference.augment": inference.augment in ("xy", "xyz") and scale[1] != scale[2],
        }
        for key, is_asked in refused.items():
            if is_asked:
                raise ValueError(f"{key} does not go with {text}: remove one of them")

    def _check_finer_output(self, scale: Zyx) -> None:
        inference = self.inference
        shapes = {
            "inference.patch_shape": inference.patch_shape,
            "inference.patch_overlap": inference.patch_overlap,
            "model.crop_margin": self.model.crop_margin,
        }
        if self.roi is not None:
            shapes["roi.context"] = self.roi.context
        if self.roi is not None and self.output.voxel_size_nm == "network":
            shapes |= {"roi.start": self.roi.start, "roi.stop": self.roi.stop}
        for key, shape in shapes.items():
            if any(n % s for n, s in zip(shape, scale, strict=True)):
                raise ValueError(
                    f"{key} {list(shape)} must be a multiple of model.output_scale {list(scale)} "
                    "(z, y, x), so that patches begin with a voxel of the network's input; it is "
                    "in voxels of the output"
                )
        refused = {
            "inference.lattice: spread": inference.lattice == "spread",
            "inference.seams: crop": inference.seams == "crop",
            "inference.precision: int8": inference.precision == "int8",
            "input.fill: reflect": self.input.fill == "reflect",
            "model.dims: 2": self.model.dims == 2 and scale[0] != 1,
            "model.planes": self.model.planes is not None,
            "inference.augment": inference.augment in ("xy", "xyz") and scale[1] != scale[2],
        }
        for key, is_asked in refused.items():
            if is_asked:
                others = "; write symmetric, edge or constant" if "fill" in key else ""
                raise ValueError(
                    f"{key} does not go with model.output_scale {list(scale)}: voxels of the "
                    f"network's input would be cut{others}"
                )

    def _check_inference(self) -> None:
        inference = self.inference
        model = self.model
        if self.input.network_fill is not None and sees_patches(model.normalize):
            raise ValueError(
                "input.fill_units: network puts a value beyond the volume once a patch is "
                "normalised, and a step of model.normalize is by: patch, which takes what lies "
                "there into account: write input.fill_units: stored"
            )
        is_of_sections = model.dims == 2 and model.planes is None
        if is_of_sections and inference.patch_shape[0] != 1:
            raise ValueError(
                "a 2-D network (model.dims: 2) takes patches of depth 1, but "
                f"inference.patch_shape is {list(inference.patch_shape)}: its first number must "
                "be 1, unless model.planes says over which planes of a patch it is run"
            )
        if model.planes is not None and inference.precision == "int8":
            raise ValueError(
                "inference.precision: int8 does not go with model.planes: write precision: float32"
            )
        if inference.augment != "none" and model.channels is None:
            raise ValueError(
                "inference.augment needs to know what each output channel says: write "
                "model.channels: "
                f"[{', '.join(['{}'] * min(3, model.output_channels))}] for values of voxels, "
                "{affinity: [z, y, x]} for affinities"
            )
        plane = [list(shape[1:]) for shape in (inference.patch_shape, model.crop_margin)]
        if inference.augment in ("xy", "xyz") and any(y != x for y, x in plane):
            raise ValueError(
                f"inference.augment: {inference.augment} swaps y and x, but patches are {plane[0]} "
                f"and crop margins {plane[1]} there (y, x): they must be equal; or write "
                "inference.augment: {mirror: [y, x]}, which only flips"
            )
        flips = inference.augment.mirror if isinstance(inference.augment, Mirror) else []
        if is_of_sections and (inference.augment == "xyz" or "z" in flips):
            raise ValueError(
                "a 2-D network (model.dims: 2) has no z to flip: write inference.augment: xy, or "
                "{mirror: [y, x]}"
            )
        self._check_int8()
        if model.batch_norm == "batch" and inference.batch_size != 1:
            raise ValueError(
                "model.batch_norm: batch needs inference.batch_size: 1, so that no patch sees its "
                f"neighbours' statistics; found {inference.batch_size}"
            )

    def _check_int8(self) -> None:
        model = self.model
        if self.inference.precision != "int8":
            return
        refused = {
            "is calibrated on arrays z, y, x, and model.axes is xyz": model.axes == "xyz",
            "is for one network, and model.ensemble names further ones": bool(model.ensemble),
            "is for networks that return one array, and model.heads names several": (
                model.heads is not None
            ),
        }
        for cause, is_asked in refused.items():
            if is_asked:
                raise ValueError(f"inference.precision: int8 {cause}: write precision: float32")

    def _check_output(self) -> None:
        channels = self.output_channels  # raises what the operators cannot do
        if self.output.encoding not in ("auto", "raw") and channels != 1:
            raise ValueError(
                f"output.encoding: {self.output.encoding} is for one channel (readers disagree "
                f"about the order of more), and there are {channels}"
            )
        interval = self.output_interval  # raises what operators cannot do with their values
        is_scaled = self.output.dtype in INTEGER_DTYPES and not self.gives_labels
        is_known = interval is not None or self.output_model.activation != "none"
        if is_scaled and self.output.value_range is None and not is_known:
            raise ValueError(
                f"output.value_range is needed to write {self.output.dtype} without an activation: "
                "[low, high] of the network's values"
            )
        if self.output.preview is not None and self.preview_range is None:
            raise ValueError(
                f"output.preview.value_range is needed to write {self.output.preview.dtype} "
                "without an activation: [low, high] of the output's values"
            )
