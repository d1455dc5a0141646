"""``inference`` of a job file: patches, blending, and the engine that runs the network."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PositiveFloat, Tag, field_validator, model_validator

from beam_inference.config.devices import DeviceKind, DeviceName, kind_of
from beam_inference.config.engines import CHOOSE, EngineName, Precision, get_engine
from beam_inference.config.fields import Count, Margin, Model, Shape
from beam_inference.geometry.blending import BlendWindow
from beam_inference.geometry.grids import LatticeKind

MOST_THREADS = 1024
"""Most ``inference.threads``: no machine has more cores, and each thread takes memory."""

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
