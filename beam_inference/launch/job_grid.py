"""At which scale and voxel size a packaged network reads a volume, as keys of a job file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry.resampling import coarse_axis
from beam_inference.geometry.zyx import VoxelSizeNm, is_same_size
from beam_inference.models.packages import OwnResampling, Recipe, Setting
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.kvstores import LOCAL, storage_of_environment, url_of
from beam_inference.volumes.opening import open_source
from beam_inference.volumes.volume import Volume

_NM_PER_MM = 1e6


@dataclass(frozen=True, slots=True)
class InputScales:
    """A volume that is to be read.

    Attributes:
        path: as the user wrote it.
        driver: TensorStore's name of its format.
        scales: its scales, open.
    """

    path: str
    driver: str
    scales: Sequence[Volume]


@dataclass(frozen=True, slots=True)
class JobGrid:
    """Which scale of the input is read, and at which voxel size.

    Attributes:
        scale: index of the scale.
        settings: keys that say so.
        cautions: what could not be found out; sentences.
    """

    scale: int
    settings: Sequence[Setting] = ()
    cautions: Sequence[str] = ()


def open_input(path: str) -> InputScales:
    """Open all scales of a volume.

    Raises:
        VolumeError: there is none, or it cannot be read.
    """
    storage = storage_of_environment(LOCAL)
    url = url_of(path)
    stored = volume_at(url, storage)
    if stored is None:
        raise VolumeError(
            f"no volume lies at {path}: expected a precomputed, zarr or n5 volume. Files such as "
            "NIfTI or TIFF become one with beam-inference convert"
        )
    scales = [
        open_source(VolumeSource(url, scale=index, storage=storage))
        for index in range(len(stored.scales))
    ]
    return InputScales(path, stored.driver, scales)


def choose_grid(recipe: Recipe, source: InputScales) -> JobGrid:
    """Choose the scale whose voxel size is that of the training data, or how to resample to it.

    Args:
        recipe: of the package.
        source: the volume.

    Raises:
        ConfigError: no scale fits, and the package's own tool would not resample either, or in a
            way that is not known here.
    """
    trained = ", ".join("any" if size is None else f"{size:g}" for size in recipe.voxel_size)
    own = source.scales[0].voxel_size_nm
    if all(size is None for size in recipe.voxel_size):
        return JobGrid(0)
    if not recipe.has_unit:
        return JobGrid(
            0,
            cautions=[
                f"The network was trained at a voxel size of [{trained}] (z, y, x) in a unit that "
                "the package does not say. Compare that with the volume's"
                f"{'' if own is None else f', {_sizes_text(own)} nm'}; where it differs, choose "
                "another input.scale, or write model.voxel_size_nm and input.resample."
            ],
        )
    if own is None:
        return JobGrid(
            0,
            [_voxel_size_setting(recipe, (1.0, 1.0, 1.0))],
            [
                "The volume does not say its voxel size: it is taken for that of the training "
                f"data, [{trained}] mm (z, y, x)."
            ],
        )
    sizes = [volume.voxel_size_nm or own for volume in source.scales]
    for index, size in enumerate(sizes):
        if is_same_size(_wanted_nm(recipe, size), size):
            reason = f"the scale whose voxels are those of the training data, [{trained}] mm"
            return JobGrid(
                index, [*_scale_setting(index, reason), _voxel_size_setting(recipe, size)]
            )
    if recipe.resampling is None:
        raise ConfigError(
            f"the network was trained at a voxel size of {_sizes_text(_wanted_nm(recipe, own))} nm "
            f"(z, y, x), and {source.path} has {'; '.join(map(_sizes_text, sizes))}: it would see "
            "objects of another size, and give another result than its own tool. Make a scale that "
            "fits, with beam-inference resample or the tool that made the volume"
        )
    return _resampled_grid(recipe, recipe.resampling, sizes)


def _resampled_grid(
    recipe: Recipe, resampling: OwnResampling, sizes: Sequence[VoxelSizeNm]
) -> JobGrid:
    """Resample the coarsest scale that is nowhere coarser than the training data."""
    scale = max(
        (
            index
            for index, size in enumerate(sizes)
            if all(
                own <= wanted for own, wanted in zip(size, _wanted_nm(recipe, size), strict=True)
            )
        ),
        default=0,
    )
    own = sizes[scale]
    wanted = _wanted_nm(recipe, own)
    cautions = [*resampling.cautions]
    if resampling.order == 3 and coarse_axis(own, wanted, resampling.separate_z) is not None:
        cautions.append(
            "A cubic spline goes beyond the values that it passes through. The package's own tool "
            "keeps each thick section within the values that occur in it, this job within those of "
            "all sections: beside a section's brightest and darkest voxels results may differ."
        )
    separate_z = coarse_axis(wanted, own, resampling.separate_z_back) is not None
    return JobGrid(
        scale,
        [
            *_scale_setting(scale, "the coarsest scale that is as fine as the training data"),
            Setting(
                "input.resample",
                {
                    "order": resampling.order,
                    "separate_z": resampling.separate_z,
                    **({} if resampling.clip is None else {"clip": resampling.clip}),
                },
                f"from {_sizes_text(own)} nm to the voxels of the training data, as its own tool",
            ),
            _voxel_size_setting(recipe, own),
            Setting(
                "output.voxel_size_nm",
                "input",
                "the network's answers come back to the input's voxels before they are finished",
            ),
            Setting(
                "output.resample",
                {"order": resampling.order_back, "separate_z": separate_z},
                "as its own tool resamples them",
            ),
        ],
        cautions,
    )


def _scale_setting(index: int, reason: str) -> list[Setting]:
    return [Setting("input.scale", index, reason)] if index else []


def _wanted_nm(recipe: Recipe, own: VoxelSizeNm) -> VoxelSizeNm:
    """The voxel size of the training data, ZYX, nanometres; a volume's own where any will do."""
    z, y, x = (
        default if size is None else size * _NM_PER_MM
        for size, default in zip(recipe.voxel_size, own, strict=True)
    )
    return (z, y, x)


def _voxel_size_setting(recipe: Recipe, own: VoxelSizeNm) -> Setting:
    return Setting(
        "model.voxel_size_nm",
        [_plain_number(size) for size in _wanted_nm(recipe, own)],
        "of the training data; an input of another voxel size is refused, or resampled",
    )


def _plain_number(value: float) -> float:
    """A number that is written without a fraction if it has none."""
    rounded = round(value, 3)
    return int(rounded) if rounded == int(rounded) else rounded


def _sizes_text(sizes: VoxelSizeNm) -> str:
    return f"[{', '.join(f'{size:.9g}' for size in sizes)}]"
