"""``model`` of a job file: the network, or several, and what goes in and comes out."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from beam_inference.config.factories import factory_parts
from beam_inference.config.fields import (
    Count,
    Margin,
    Model,
    Natural,
    Point,
    Scales,
    Url,
    VoxelSize,
)
from beam_inference.config.heads import Head, channel_ranges, common_activation
from beam_inference.config.normalize import Normalize, check_listed, check_undone
from beam_inference.config.planes import CombinePlanes, Plane, PlaneSum, check_planes, normal_axis
from beam_inference.geometry.exact_sums import bound_above
from beam_inference.geometry.zyx import Zyx, triple

MOST_MEMBERS = 63
"""Most networks of ``model.ensemble``: all are in memory at a time."""

MOST_SECTIONS = 255
"""Most ``model.sections``: each is read, and held in memory, with every patch."""

_SECTIONS_ALONG_Z: list[Plane] = ["yx"]
"""The planes of a 2-D network that names none."""

_SHA256 = re.compile(r"[0-9a-f]{64}(\+[0-9a-f]{64})?")


class Channel(Model):
    """What an output channel says."""

    affinity: Point | None = Field(
        None,
        description=(
            "offset, ZYX: whether a voxel and the one at this offset belong together; else of the "
            "voxel"
        ),
    )


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
