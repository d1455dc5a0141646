"""What is to be looked at: a job, and volumes, opened as far as a viewer's state needs it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count, islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import tensorstore as ts

from beam_inference.config.fields import Json
from beam_inference.config.formats import installed_formats
from beam_inference.config.job import JobConfig
from beam_inference.config.network import Network
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import BeamInferenceError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import Origin
from beam_inference.geometry.plan import InferencePlan
from beam_inference.geometry.zyx import VoxelSizeNm
from beam_inference.job.parts import output_spec
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State, default_state_url
from beam_inference.launch.planned_job import plan_job
from beam_inference.launch.resume import relocate_job
from beam_inference.view import shaders
from beam_inference.view.boxes import chunk_boxes, patch_boxes
from beam_inference.view.multiscale import Scales, scales_at
from beam_inference.view.viewer_state import Axis, Boxes, VolumeLayer, view_state
from beam_inference.volumes.detection import json_object
from beam_inference.volumes.kvstores import LOCAL, local_folder, storage_of_environment
from beam_inference.volumes.mask import kept_values
from beam_inference.volumes.opening import open_source
from beam_inference.volumes.outputs import open_output
from beam_inference.volumes.volume import Volume

logger = logging.getLogger(__name__)

_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32")
_LABEL_DTYPES = ("uint32", "uint64")
_SAMPLE = (1, 256, 256)
"""Voxels that are looked at to find a brightness range, ZYX."""


def _neuroglancer_formats() -> dict[str, str]:
    """Neuroglancer's names of the formats it shows, by TensorStore's name of the driver."""
    return {each.driver: each.viewer for each in installed_formats() if each.viewer is not None}


@dataclass(frozen=True)
class Shown:
    """A volume, and how it is shown.

    Attributes:
        name: of its layer.
        volume: opened; with all its channels.
        storage: how it is reached.
        shader: None for labels.
        opacity: over what was named before it.
        channel: which one is shown at first where each has blocks of its own, which a shader cannot
            bring together.
    """

    name: str
    volume: Volume
    storage: Storage
    shader: str | None
    opacity: float
    channel: int = 0

    def __post_init__(self) -> None:
        stored = self.volume.stored_dtype
        if stored not in _DTYPES:  # what is read as another dtype, too
            raise VolumeError(
                f"{self.volume.url} holds {stored}, which Neuroglancer does not show; it shows "
                f"{', '.join(_DTYPES)}. Convert it."
            )
        formats = _neuroglancer_formats()
        if self.volume.driver not in formats:
            raise VolumeError(
                f"{self.volume.url} is of the kind {self.volume.driver}, which Neuroglancer does "
                f"not show here; it shows {', '.join(formats.values())}"
            )

    @cached_property
    def _array_url(self) -> str:
        spec = self.volume.kvstore.spec().to_json()
        endpoint = self.storage.s3.endpoint
        if spec["driver"] == "s3" and endpoint is not None:
            return f"{endpoint.rstrip('/')}/{spec['bucket']}/{spec.get('path', '')}".rstrip("/")
        return self.volume.kvstore_url

    @cached_property
    def _scales(self) -> Scales | None:
        """Scales of the OME-Zarr group that holds the array, if a viewer reads that."""
        return scales_at(self.volume.url, self._array_url, self.storage)

    @cached_property
    def url(self) -> str:
        """URL of the volume with all its scales, without a slash at the end."""
        return (
            self._array_url.removesuffix(f"/{self._scales.path}")
            if self._scales
            else self._array_url
        )

    @property
    def folder(self) -> Path | None:
        """Folder of the volume on this machine, if it is there."""
        return local_folder(self.url)

    @cached_property
    def _axes(self) -> tuple[Axis, ...]:
        """Its own axes, in their own order, as a viewer would place them."""
        methods = ts.OutputIndexMethod
        axes = []
        transform: Any = self.volume.store.spec().transform
        for each in transform.output:
            if each.method == methods.constant:
                axes.append(Axis("", each.offset))
            elif self._is_whole(each):
                name = "czyx"[each.input_dimension]
                axes.append(
                    Axis("", self.channel)
                    if name == "c" and _channels_apart(self.volume)
                    else Axis(name, shift=float(-each.offset))
                )
            else:
                raise VolumeError(
                    f"{self.volume.url} is a part of a store, cut out by a TensorStore spec; a "
                    "viewer reads stores as they are. Look at the volume itself, by its path."
                )
        return tuple(axes)

    def _is_whole(self, axis: Any) -> bool:
        """Whether an axis of the stored array is read as it is, from where its index zero lies."""
        if (axis.method, axis.stride) != (ts.OutputIndexMethod.single_input_dimension, 1):
            return False
        return bool(
            axis.offset == (0, *zyx.negative(self.volume.origin.voxel))[axis.input_dimension]
        )

    @cached_property
    def _assumed_m(self) -> float | None:
        """Size that Neuroglancer assumes of a voxel, in metres; None if the array says its size."""
        if self.volume.driver == "n5":
            return None if self.volume.voxel_size_nm is not None else 1e-9
        # What an OME-Zarr group says of its arrays, an array that is shown alone does not know.
        key = "zarr.json" if self.volume.driver == "zarr3" else ".zattrs"
        metadata = json_object(self.volume.kvstore, key, self.volume.url)
        units = (metadata.get("attributes", {}) if self.volume.driver == "zarr3" else metadata).get(
            "dimension_units"
        )
        return 1.0 if units is None else None

    @property
    def _assumed_sizes(self) -> Iterable[tuple[float | None, float]]:
        """Voxel size that Neuroglancer assumes on each axis, None where it is right; and offset."""
        if self._scales is not None:
            return zip(self._scales.voxels, self._scales.shifts, strict=True)
        return [(self._assumed_m, 0.0)] * len(self._axes)

    def layer(self, address: str, voxel_size_nm: VoxelSizeNm) -> VolumeLayer:
        """Make the layer, read at ``address``; the voxel size is for volumes without one."""
        source = f"{_neuroglancer_formats()[self.volume.driver]}://{address}"
        size = self.volume.voxel_size_nm or voxel_size_nm
        # says itself where it lies, and its voxel size at every scale
        if self.volume.driver == "neuroglancer_precomputed":
            return VolumeLayer(self.name, source, (), size, self.shader, self.opacity)
        metres = {name: nm * 1e-9 for name, nm in zip("zyx", size, strict=True)}
        axes = [
            replace(
                axis,
                stretch=1.0 if taken is None else metres.get(axis.name, 1.0) / taken,
                shift=axis.shift + shift,
            )
            for axis, (taken, shift) in zip(self._axes, self._assumed_sizes, strict=True)
        ]
        return VolumeLayer(self.name, source, axes, size, self.shader, self.opacity)


@dataclass(frozen=True)
class View:
    """The volumes and boxes that one viewer shows.

    Attributes:
        title: of the browser's tab.
        shown: volumes, from bottom to top.
        plan: geometry of the job whose chunks are shown, if there is one.
        launched: that job, if it was launched: its quarantined chunks are marked, as they are
            whenever the viewer is opened.
        patches: whether the job's patches are shown.
        roi: what is to be in the middle, in voxels of ``voxel_size_nm``, ZYX.
        marked: further boxes, whatever the job.
    """

    title: str
    shown: Sequence[Shown]
    plan: InferencePlan | None
    launched: ResolvedJob | None
    patches: bool
    roi: BoundingBox
    voxel_size_nm: VoxelSizeNm
    marked: Sequence[Boxes] = ()

    @property
    def folders(self) -> dict[str, Path]:
        """Folders to be served, by their names in URLs."""
        return {
            str(number): shown.folder
            for number, shown in enumerate(self.shown)
            if shown.folder is not None
        }

    def state(self, base: str | None, most_boxes: int) -> Json:
        """State of Neuroglancer, with :attr:`folders` served at ``base/NAME``.

        Args:
            base: URL of the server; None for file:// URLs.
            most_boxes: number of boxes of each kind, at most.

        Raises:
            WorkerFault: the state folder cannot be read.
        """
        names = self.folders if base is not None else {}
        layers = [
            shown.layer(
                f"{base}/{number}" if str(number) in names else shown.url, self.voxel_size_nm
            )
            for number, shown in enumerate(self.shown)
        ]
        return view_state(self.title, layers, self._boxes(most_boxes), self.roi, self.voxel_size_nm)

    def _boxes(self, most: int) -> list[Boxes]:
        if self.plan is None:
            return [*self.marked]
        boxes = [*self.marked, chunk_boxes(self.plan, most)]
        if self.patches:
            boxes.append(patch_boxes(self.plan, most))
        return boxes if self.launched is None else [*boxes, *_quarantine(self.launched, most)]


def view_of(job: JobConfig | None, volumes: Sequence[str], *, patches: bool) -> View:
    """Open a job and further volumes to be shown together; the job, or the first, is centred.

    A job is what was launched; before its first launch, its input and its chunks. The patch lattice
    is shown if ``patches``.

    Raises:
        UserError: one of them cannot be opened, or not be shown; or the job is another one than was
            launched.
    """
    view = None if job is None else _view_of_job(job, patches=patches)
    shown = [] if view is None else [*view.shown]
    for url in volumes:
        shown.append(_show_volume(url, {each.name for each in shown}))
    if view is not None:
        return replace(view, shown=shown)
    first = shown[0].volume
    size = first.voxel_size_nm or (1.0, 1.0, 1.0)
    return View(shown[0].name, shown, None, None, False, first.bounds, size)


def _view_of_job(config: JobConfig, *, patches: bool) -> View:
    state = State(default_state_url(config), config.storage)
    earlier = state.load_job()
    launched = None if earlier is None else relocate_job(config, earlier, state.url)
    if launched is None:
        planned = plan_job(config)
        plan = planned.plan
        voxel_size = planned.output.voxel_size_nm
        resampling = planned.input.resampling
        to_output = planned.to_output
    else:
        plan = launched.plan
        voxel_size = launched.voxel_size_nm
        resampling = launched.resampling
        to_output = launched.to_output
    section = config.input
    roi = plan.chunks.roi
    source = open_source(replace(section.source(config.storage), channel=None), check_blocks=False)
    if launched is not None:
        bounds = launched.input_bounds if resampling is None else resampling.source
        source = source.start_at(bounds.start)
    channels = section.channel or list(range(source.channels))
    visible = roi if to_output is None else to_output.source_box(roi)
    visible = visible if resampling is None else resampling.source_box(visible)
    shown = [_show_image("input", source, config.storage, visible, channels)]
    shown += _further_inputs_to_show(config)
    shown += [] if launched is None else _outputs_to_show(config, launched, roi)
    shown += _masks_to_show(config, launched)
    name = config.output.path.rstrip("/").rpartition("/")[2]
    return View(name, shown, plan, launched, patches, roi, voxel_size)


def _further_inputs_to_show(config: JobConfig) -> list[Shown]:
    """Make a layer of each further input of a job."""
    shown = []
    for number, section in enumerate(config.inputs):
        source = replace(section.source(config.storage), channel=None)
        volume = open_source(source, check_blocks=False)
        channels = section.channel or list(range(volume.channels))
        name = f"inputs.{number}"
        shown.append(_show_image(name, volume, config.storage, volume.bounds, channels))
    return shown


def _outputs_to_show(config: JobConfig, launched: ResolvedJob, roi: BoundingBox) -> list[Shown]:
    """Make a layer of each output of a job that is there, and of each preview."""
    shown = []
    for key, single in config.by_output.items():
        output = open_output(output_spec(launched, key))
        if output is not None:
            shader = (
                None if single.gives_labels else output_shader(output, single.output_model, roi)
            )
            shown.append(Shown(key, output, config.storage, shader, 0.5))
    for key, source in config.previews.items():
        preview = open_output(output_spec(launched, key))
        if preview is not None:
            box = roi.coarsen(config.preview_scale(key))
            shader = output_shader(preview, config.by_output[source].output_model, box)
            shown.append(Shown(key, preview, config.storage, shader, 0.5))
    return shown


def _masks_to_show(config: JobConfig, launched: ResolvedJob | None) -> list[Shown]:
    """Make a layer of each mask of a job; warn of those that a viewer cannot show."""
    shown = []
    for name, mask, color in (
        ("input.mask", config.input.mask, "#009e73"),
        ("mask", config.mask, "#cc79a7"),
    ):
        if mask is not None:
            source = mask.source(config.storage)
            volume = open_source(source, booleans=True, check_blocks=False)
            if launched is not None:
                volume = volume.place_at(Origin(launched.mask_origins.get(name, (0, 0, 0))))
            kept = kept_values(mask)
            shader = shaders.mask_shader(color, volume.dtype, kept, inverse=mask.inverse)
            try:
                shown.append(Shown(name, volume, config.storage, shader, 0.3))
            except VolumeError as error:
                logger.warning("%s is not shown: %s", name, error)
    return shown


def _quarantine(job: ResolvedJob, most_boxes: int) -> list[Boxes]:
    """Layer of the chunks that are quarantined now, with their causes; None if there are none."""
    records = (
        State(default_state_url(job.config), job.config.storage)
        .of(job)
        .read_quarantined(0, job.plan.chunks.count)
    )
    first = list(islice(records, most_boxes + 1))
    boxes = [
        (f"chunk {each.chunk}, {each.stage}: {each.cause}", each.box) for each in first[:most_boxes]
    ]
    some = f" (the first {most_boxes:,})" if len(first) > most_boxes else ""
    return [Boxes(f"quarantined{some}", "#ff0000", boxes, filled=True)] if boxes else []


def _show_volume(url: str, taken: Collection[str]) -> Shown:
    storage = storage_of_environment(LOCAL)
    volume = open_source(VolumeSource(url, storage=storage), check_blocks=False)
    stem = unquote(url.partition("|")[0].rstrip("/").rpartition("/")[2])
    name = next(
        name for name in chain([stem], (f"{stem} {n}" for n in count(2))) if name not in taken
    )
    if volume.channels == 1 and _holds_labels(volume):
        return Shown(name, volume, storage, None, 0.4)
    return _show_image(name, volume, storage, volume.bounds, range(volume.channels))


def _holds_labels(volume: Volume) -> bool:
    kind = volume.precomputed_type
    return bool(kind == "segmentation" if kind is not None else volume.dtype.name in _LABEL_DTYPES)


def _show_image(
    name: str, volume: Volume, storage: Storage, roi: BoundingBox, channels: Sequence[int]
) -> Shown:
    visible = (0.0, 255.0) if volume.dtype == np.uint8 else _brightness(volume, roi)
    if _channels_apart(volume):
        return Shown(name, volume, storage, shaders.grey(visible), 1.0, channels[0])
    shader = (
        shaders.rgb(visible, channels) if len(channels) == 3 else shaders.grey(visible, channels[0])
    )
    return Shown(name, volume, storage, shader, 1.0)


def _channels_apart(volume: Volume) -> bool:
    """Whether not all channels of a voxel are in one block."""
    read: Any = volume.store.chunk_layout.read_chunk
    together = read.shape[0]  # None where there is no such axis
    return together is not None and together < volume.channels


def output_shader(volume: Volume, model: Network, roi: BoundingBox) -> str:
    """Choose by the channels: affinities as red, green and blue; probabilities over the image."""
    probable = model.activation != "none"
    if volume.dtype.kind in "iu":
        limits = np.iinfo(volume.dtype)
        # what output.value_range was mapped onto
        visible = (float(limits.min), float(limits.max))
    else:
        visible = (0.0, 1.0) if probable else _brightness(volume, roi)
    channels = volume.channels
    same = channels == model.output_channels  # else operators have chosen among them
    affinities = (
        same
        and model.channels is not None
        and all(each.affinity is not None for each in model.channels)
    )
    if channels == 1:
        return shaders.heat(visible) if probable else shaders.grey(visible)
    if (channels >= 3 and affinities) or (channels == 3 and model.activation != "softmax"):
        return shaders.rgb(visible)
    # Of classes that exclude each other the first is, by convention, what is none of the others.
    return shaders.classes(visible, range(same and model.activation == "softmax", channels))


def _brightness(volume: Volume, roi: BoundingBox) -> shaders.Range:
    """Range of a few voxels in the middle of the ROI; 0 to 1 if they cannot be read."""
    roi = roi.intersection(volume.bounds)
    sides = [min(n, most) for n, most in zip(roi.shape, _SAMPLE, strict=True)]
    z, y, x = ((a + b - n) // 2 for a, b, n in zip(roi.start, roi.stop, sides, strict=True))
    try:
        sample = volume.read(BoundingBox((z, y, x), (z + sides[0], y + sides[1], x + sides[2])))
    # not written yet, or not to be read by this machine: the viewer will tell
    except BeamInferenceError:
        return (0.0, 1.0)
    finite = sample[np.isfinite(sample)]
    low, high = np.percentile(finite, (1, 99)) if finite.size else (0, 0)
    return (float(f"{low:.4g}"), float(f"{high:.4g}")) if low < high else (0.0, 1.0)
