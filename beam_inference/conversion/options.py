"""The options of a conversion, and its result."""

from __future__ import annotations

from dataclasses import dataclass

from beam_inference.beam.stage_runner import StageOutcome
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import Resample
from beam_inference.conversion.copying import WINDOW_BYTES
from beam_inference.errors import COMPLETE
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
from beam_inference.volumes.kvstores import LOCAL

NO_VOXEL_SIZE = "the source does not state its voxel size: give --voxel-size Z,Y,X, in nm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResamplingOptions:
    """How a source is resampled while it is converted.

    Attributes:
        how: voxel size, order of the spline, and whether one axis takes the nearest voxels.
        like: path or URL of the volume whose voxels are made, instead of a voxel size.
        like_scale: number of its scale.
        postprocess: operators that follow, as a job file lists them, in YAML.
    """

    how: Resample
    like: str | None = None
    like_scale: int = 0
    postprocess: str = "[]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """Everything a user may choose but source and target.

    Attributes:
        format: format of the target; None: by its name, else precomputed.
        dataset: name of the dataset in a source with several.
        scale: number of the scale in a source with several; 0 is the finest.
        block_shape: ZYX, for volumes of blocks; None: by voxel size and depth.
        shard_shape: ZYX, a multiple of ``block_shape``, for formats that have shards.
        encoding: encoding of precomputed blocks; None: raw.
        labels: whether values are names of objects.
        voxel_size_nm: ZYX, instead of what the source states.
        offset: coordinates of the first voxel, ZYX, instead of what the source states.
        drop: what of the source may be lost: "offset", "voxel-size".
        pad: whether a target without offset begins at voxel 0, with zeros before the source.
        overwrite: whether to replace an existing target.
        storage: how object stores are reached.
        flags: Beam's flags, for volumes of blocks.
        window_bytes: bytes of the source that a thread holds at a time.
        resampling: to which voxels the source is resampled; None if it is copied as it is.
    """

    format: str | None = None
    dataset: str | None = None
    scale: int = 0
    block_shape: Zyx | None = None
    shard_shape: Zyx | None = None
    encoding: str | None = None
    labels: bool = False
    voxel_size_nm: VoxelSizeNm | None = None
    offset: Zyx | None = None
    drop: tuple[str, ...] = ()
    pad: bool = False
    overwrite: bool = False
    storage: Storage = LOCAL
    flags: tuple[str, ...] = ()
    window_bytes: int = WINDOW_BYTES
    resampling: ResamplingOptions | None = None


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """The target of a conversion, and how far it is.

    Attributes:
        target: path or URL of the target.
        format: its format.
        bounds: its box, ZYX.
        outcome: how the stages ended; None for a single file, which is always complete.
    """

    target: str
    format: str
    bounds: BoundingBox
    outcome: StageOutcome | None

    @property
    def exit_code(self) -> int:
        """0 complete, 1 failed, 130 interrupted."""
        return COMPLETE if self.outcome is None else self.outcome.exit_code
