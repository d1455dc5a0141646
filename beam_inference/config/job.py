"""The job as frozen, strict models: what may stand in a job file, and what contradicts itself.

How a file becomes such a model is in :mod:`beam_inference.config.job_file`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from beam_inference.config.fields import (
    INTEGER_DTYPES,
    LABEL_DTYPES,
    Count,
    Model,
    Natural,
    Seconds,
    WritableUrl,
)
from beam_inference.config.inference import Inference, Mirror
from beam_inference.config.network import Network
from beam_inference.config.normalize import FromLevels, Sections, sees_patches
from beam_inference.config.operators import (
    InstalledOperator,
    channels_after,
    gives_labels,
    interval_after,
    largest_label,
    total_halo,
)
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import FurtherInput, Input, Mask, Output, Roi
from beam_inference.geometry.plan import Strategy
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, is_same_size

MOST_DEPTH = 64
"""Most ``job.io_depth``: each takes two threads, and an input and a result in memory."""

MOST_CACHED = 1024
"""Most ``job.cached_cutouts``."""

OUTPUT = "output"
"""The key of the output that every job has."""

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
