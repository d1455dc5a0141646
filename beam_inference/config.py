"""The job as frozen, strict models: what may stand in a job file, and what contradicts itself.

How a file becomes such a model is in :mod:`beam_inference.job_file`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    FiniteFloat,
    PositiveFloat,
    Tag,
    model_validator,
)

from beam_inference.storage import (
    Count,
    Integer,
    Model,
    Natural,
    Storage,
    Url,
    WritableUrl,
    holds_credentials,
)

INTEGER_DTYPES = ("uint8", "uint16", "int8", "int16")
"""Integer dtypes that an output can have; float32 holds each of their values exactly."""


def _three(value: object) -> object:
    """Accept ``64x64x64`` for a shape, which needs no quoting where flags are passed on by other tools."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+x-?\d+x-?\d+", value):
        return [int(n) for n in value.split("x")]
    return value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, int) else value


_SECRET_KEY = re.compile("headers|secret|token|passw|access_key", re.IGNORECASE)
_InThree = BeforeValidator(
    _three, json_schema_input_type=tuple[int, int, int] | Annotated[str, Field(pattern=r"^-?\d+x-?\d+x-?\d+$")]
)
Point = Annotated[tuple[Integer, Integer, Integer], _InThree]
Shape = Annotated[tuple[Count, Count, Count], _InThree]
Margin = Annotated[tuple[Natural, Natural, Natural], _InThree]
VoxelSize = tuple[PositiveFloat, PositiveFloat, PositiveFloat]
Range = tuple[FiniteFloat, FiniteFloat]


class Input(Model):
    """The volume to read."""

    path: Url | None = Field(None, description="URL or path of a precomputed, zarr v2/v3 or n5 volume")
    spec: dict[str, Any] | None = Field(None, description="a full TensorStore spec, instead of path")
    scale: Natural = Field(0, description="which scale of a multiscale precomputed volume, 0 the finest")
    channel: Annotated[list[Natural], BeforeValidator(_as_list, json_schema_input_type=int | list[int])] | None = Field(
        None, description="channel or channels to read; default all"
    )
    fill: Literal["reflect", "constant"] = Field("reflect", description="what lies outside the volume")
    fill_value: FiniteFloat = Field(0.0, description="value for fill: constant, in stored units")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.spec is None):
            raise ValueError("give either path or spec")
        if self.spec is not None and "driver" not in self.spec:
            raise ValueError("spec is no TensorStore spec: it has no 'driver'")
        if self.spec is not None and _spec_holds_credentials(self.spec):
            raise ValueError(
                "spec holds credentials (headers, or a URL with user:password@, a signature or a token). The job is "
                "recorded beside its output, where others can read it. See docs/object-stores.md"
            )
        if self.spec is not None and self.scale:
            raise ValueError("scale has no effect beside spec: put scale_index into the spec")
        if self.fill == "reflect" and self.fill_value:
            raise ValueError("fill_value has no effect with fill: reflect; write fill: constant, or remove it")
        return self


def _spec_holds_credentials(spec: object) -> bool:
    if isinstance(spec, dict):
        return any(_SECRET_KEY.search(str(key)) or _spec_holds_credentials(value) for key, value in spec.items())
    if isinstance(spec, list):
        return any(map(_spec_holds_credentials, spec))
    return isinstance(spec, str) and holds_credentials(spec)


class Bounds(Model):
    """A box, ZYX."""

    start: Point
    stop: Point

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(b <= a for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"stop {list(self.stop)} must lie beyond start {list(self.start)} on every axis (z, y, x)")
        return self


class Roi(Bounds):
    """The box to produce."""

    context: Margin = Field((0, 0, 0), description="voxels by which the patch lattice reaches beyond the ROI")


class Output(Model):
    """The volume to write."""

    path: WritableUrl = Field(description="URL or path; created at launch if absent")
    format: Literal["precomputed", "zarr3", "zarr2"] = "precomputed"
    dtype: Literal["float32", "uint8", "uint16", "int8", "int16"] = "float32"
    block_shape: Shape = Field((64, 64, 64), description="voxels of a storage block, ZYX")
    value_range: Range | None = Field(
        None, description="what maps onto an integer dtype's full range; 0 to 1 after sigmoid or softmax"
    )
    bounds: Bounds | None = Field(None, description="extent of a new output, when the ROI is only a part of it")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.value_range is not None:
            if self.dtype == "float32":
                raise ValueError("value_range has no effect with dtype: float32, which is written as it is; remove it")
            if self.value_range[0] >= self.value_range[1]:
                raise ValueError(f"value_range {list(self.value_range)} must be [low, high] with low < high")
        if self.format == "precomputed" and self.dtype in ("int8", "int16"):
            raise ValueError(f"precomputed volumes of {self.dtype} are not read by Neuroglancer; use zarr3 or zarr2")
        return self


class Affine(Model):
    """The network's input is ``clip(value * scale + offset)``."""

    scale: FiniteFloat
    offset: FiniteFloat = 0.0
    clip: Range | None = Field(None, description="lowest and highest value, after scale and offset")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip {list(self.clip)} must be [low, high] with low < high")
        return self


def _normalize(value: object) -> object:
    if not isinstance(value, (dict, Affine)) and value not in ("none", "unit"):
        raise ValueError(f"{value!r} is not one of none, unit, or {{scale: …, offset: …, clip: [low, high]}}")
    return value


class Channel(Model):
    """What an output channel says."""

    affinity: Point | None = Field(
        None, description="offset, ZYX: whether a voxel and the one at this offset belong together; else of the voxel"
    )


class Network(Model):
    """The trained network."""

    path: Url = Field(
        description="identity, a TorchScript file (.pt, .ts), a torch.export file (.pt2), an ONNX file (.onnx), an "
        "OpenVINO file (.xml), package.module:factory or file.py:factory"
    )
    weights: Url | None = Field(
        None, description="state dict or safetensors, for a factory; the .bin of an .xml, by default beside it"
    )
    sha256: str | None = Field(None, description="expected hash of the weights, or of path where there are none")
    input_channels: Count = 1
    output_channels: Count = 1
    channels: list[Channel] | None = Field(
        None, description="what each output channel says; inference.augment needs it"
    )
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    normalize: Annotated[
        Annotated[Literal["none", "unit"], Tag("name")] | Annotated[Affine, Tag("affine")],
        Discriminator(lambda value: "affine" if isinstance(value, (dict, Affine)) else "name"),
        BeforeValidator(_normalize),
    ] = Field("none", description="unit: the stored dtype's maximum becomes 1")
    batch_norm: Literal["running", "batch"] = Field("running", description="statistics that BatchNorm layers use")
    crop_margin: Margin = Field((0, 0, 0), description="voxels by which the input exceeds its patch, per side")
    dims: Literal[2, 3] = 3
    voxel_size_nm: VoxelSize | None = Field(None, description="voxel size the network was trained at, ZYX, nanometres")

    @model_validator(mode="before")
    @classmethod
    def _beside(cls, values: Any) -> Any:
        if isinstance(values, dict) and str(values.get("path")).endswith(".xml") and not values.get("weights"):
            return {**values, "weights": values["path"].removesuffix(".xml") + ".bin"}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError("sha256 must be 64 lower-case hexadecimal digits")
        is_factory = self.path != "identity" and _FACTORY.fullmatch(self.path) is not None
        if self.weights is not None and not is_factory and not self.path.endswith(".xml"):
            raise ValueError(f"weights go with a factory (package.module:factory), not with path: {self.path}")
        if self.path == "identity":
            if self.sha256 is not None or self.activation == "softmax":
                raise ValueError("identity takes no sha256 and no softmax")
            if self.input_channels != self.output_channels:
                raise ValueError("identity needs as many output_channels as input_channels")
        if self.channels is not None and len(self.channels) != self.output_channels:
            raise ValueError(f"channels describes {len(self.channels)}, output_channels says {self.output_channels}")
        offsets = [channel.affinity for channel in self.channels or [] if channel.affinity is not None]
        if len(set(offsets)) < len(offsets) or (0, 0, 0) in offsets:
            raise ValueError("channels: each affinity needs an offset of its own, other than [0, 0, 0]")
        if self.dims == 2 and self.crop_margin[0]:
            raise ValueError("a 2-D network (dims: 2) has no crop_margin on z: it must be 0")
        return self


_FACTORY = re.compile(r"(?P<module>.+):(?P<name>[A-Za-z_]\w*)")


def factory_parts(path: str) -> tuple[str, str] | None:
    """Module (dotted, or a .py file) and name of a factory path such as ``package.module:factory``, else None."""
    match = _FACTORY.fullmatch(path)
    return (match["module"], match["name"]) if match else None


_ChunkShape = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[Shape, Tag("shape")],
    Discriminator(lambda value: "auto" if value == "auto" else "shape"),
]
_BatchSize = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[Count, Tag("number")],
    Discriminator(lambda value: "auto" if value == "auto" else "number"),
]


SeamMode = Literal["exchange", "recompute", "crop"]


class Inference(Model):
    """How the network is applied."""

    patch_shape: Shape
    patch_overlap: Margin = (0, 0, 0)
    chunk_shape: _ChunkShape = Field(
        description="the unit of work, a multiple of block_shape. auto: the best that fits 2 GiB per worker process, "
        "found at first launch, kept ever after"
    )
    seams: SeamMode = "recompute"
    chunk_crop_margin: Margin | None = Field(None, description="only for seams: crop; default patch_overlap")
    batch_size: _BatchSize = Field(
        1, description="patches per network call. auto: tried at first launch, kept ever after"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    engine: Literal["auto", "torch", "openvino", "onnxruntime", "compile"] = Field(
        "auto",
        description="what runs the network; compile is torch.compile. auto: openvino on a CPU, where it is installed "
        "and gives what PyTorch gives, else torch; decided at first launch, kept ever after",
    )
    augment: Literal["none", "xy", "xyz"] = Field(
        "none", description="mean over the 8 flips and transposes of y and x, or 16 with flips of z, of each patch"
    )
    threads: Count | None = Field(
        None,
        description="CPU threads of the network per worker process; they change its last bits. Default: the cores "
        "shared by the worker processes at first launch, kept ever after; 1 on remote runners",
    )

    @property
    def patches_per_call(self) -> int:
        """``batch_size``; 1 as long as ``auto`` is not decided."""
        return 1 if self.batch_size == "auto" else self.batch_size

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(o >= p for o, p in zip(self.patch_overlap, self.patch_shape, strict=True)):
            raise ValueError(
                f"patch_overlap {list(self.patch_overlap)} must be smaller than patch_shape {list(self.patch_shape)} "
                "on every axis (z, y, x)"
            )
        if self.chunk_crop_margin is not None and self.seams != "crop":
            raise ValueError("chunk_crop_margin has an effect only with seams: crop; remove it")
        if self.device == "cpu" and self.precision == "tf32":
            raise ValueError("precision: tf32 exists only on CUDA devices; use float32 on the cpu")
        if self.engine in ("openvino", "onnxruntime") and (self.device == "cuda" or self.precision != "float32"):
            raise ValueError(f"engine: {self.engine} runs on the CPU in float32; write engine: torch, or auto")
        return self


class Job(Model):
    """How the job is run; nothing here changes the output's bytes."""

    max_failed_chunks: Natural | None = Field(
        None, description="above this many quarantined chunks the job fails; default no bound"
    )
    attempts: Count = Field(3, description="attempts per chunk and stage, inside the worker")
    resume: bool = Field(True, description="skip chunks that have a receipt")
    state_path: WritableUrl | None = Field(None, description="default <output>/_beam_inference")
    run_length: Count | None = Field(None, description="chunks per Beam element; default from their number")


class JobConfig(Model):
    """A job file.

    Example:
        >>> job = JobConfig.model_validate({
        ...     "input": {"path": "file:///data/em"},
        ...     "output": {"path": "file:///data/affinities"},
        ...     "model": {"path": "affinity.pt", "output_channels": 3},
        ...     "inference": {"patch_shape": "20x256x256", "patch_overlap": "4x64x64", "chunk_shape": "64x512x512"},
        ... })
        >>> job.inference.patch_shape
        (20, 256, 256)
    """

    input: Input
    output: Output
    model: Network
    inference: Inference
    roi: Roi | None = Field(None, description="default: the whole input")
    job: Job = Job()
    storage: Storage = Storage()

    @model_validator(mode="after")
    def _check(self) -> Self:
        inference, model = self.inference, self.model
        if model.dims == 2 and inference.patch_shape[0] != 1:
            raise ValueError(
                f"a 2-D network (model.dims: 2) takes patches of depth 1, but inference.patch_shape is "
                f"{list(inference.patch_shape)}: its first number must be 1"
            )
        if inference.augment != "none" and model.channels is None:
            raise ValueError(
                f"inference.augment: {inference.augment} needs to know what each output channel says: write "
                f"model.channels: [{', '.join(['{}'] * min(3, model.output_channels))}] for values of voxels, "
                "{affinity: [z, y, x]} for affinities"
            )
        plane = [list(shape[1:]) for shape in (inference.patch_shape, model.crop_margin)]
        if inference.augment != "none" and any(y != x for y, x in plane):
            raise ValueError(
                f"inference.augment: {inference.augment} swaps y and x, but patches are {plane[0]} and crop margins "
                f"{plane[1]} there (y, x): they must be equal"
            )
        if model.dims == 2 and inference.augment == "xyz":
            raise ValueError("a 2-D network (model.dims: 2) has no z to flip: write inference.augment: xy")
        if model.batch_norm == "batch" and inference.batch_size != 1:
            raise ValueError(
                "model.batch_norm: batch needs inference.batch_size: 1, so that no patch sees its neighbours' "
                f"statistics; found {inference.batch_size}"
            )
        if self.output.dtype in INTEGER_DTYPES and self.output.value_range is None and model.activation == "none":
            raise ValueError(
                f"output.value_range is needed to write {self.output.dtype} without an activation: "
                "[low, high] of the network's values"
            )
        return self
