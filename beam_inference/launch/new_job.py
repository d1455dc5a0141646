"""Writes a job file for a packaged network and a volume, with the reason beside each key."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

from beam_inference.config.job import JobConfig, Network
from beam_inference.config.job_file import parse_job_text
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.foreign_text import clean_text
from beam_inference.geometry.zyx import VoxelSizeNm, is_same_size
from beam_inference.models.fetch import fetch_package
from beam_inference.models.hashes import model_sha256
from beam_inference.models.packages import Folds, Recipe, Setting
from beam_inference.volumes.detection import StoredVolume, volume_at
from beam_inference.volumes.kvstores import LOCAL, storage_of_environment, url_of
from beam_inference.volumes.opening import open_source
from beam_inference.volumes.volume import Volume

_NM_PER_MM = 1e6

_SECTIONS = ("input", "output", "model", "inference", "postprocess")
"""Keys at the top of a job file, in the order in which they are written."""

_WIDTH = 98
"""Characters of a line of comments."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package as it was described.

    Attributes:
        path: as the user wrote it, a path or URL.
        folds: those that the user chose.
        sha256: hash of the files that determine the network.
        recipe: how the network is run.
    """

    path: str
    folds: Folds | None
    sha256: str
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job file that was made.

    Attributes:
        text: the file's content.
        config: what it says.
        cautions: what the package's own tool does otherwise; sentences.
        scale: index of the input's scale.
    """

    text: str
    config: JobConfig
    cautions: Sequence[str]
    scale: int


def describe_package(path: str, folds: Folds | None) -> Package:
    """Read what a package says about running its network.

    Args:
        path: a folder or zip file, a path or URL.
        folds: those that are to be used; None for those that the package's own tool takes.

    Raises:
        ModelContractError: there is none, or it is one that cannot be run here.
    """
    with fetch_package(path, folds) as package:
        recipe = package.network.describe()
        network = Network(path=str(package.path), folds=None if folds is None else list(folds))
        return Package(path, folds, model_sha256(network), recipe)


def make_job(package: Package, input_path: str, output_path: str, folder: Path) -> NewJob:
    """Make a job file that runs a package's network over a volume as its own tool does.

    Args:
        package: the network.
        input_path: path or URL of the volume.
        output_path: path or URL of the result.
        folder: where the job file will lie: paths in it are relative to this folder.

    Raises:
        ConfigError: the two do not go together.
        VolumeError: the volume cannot be read.
    """
    source = _open_input(input_path)
    place = _place_settings(package.recipe, source)
    settings = [
        Setting("input.path", _path_from(folder, input_path), "the volume"),
        *_padding_settings(package.recipe, source.scales[place.scale]),
        Setting("output.path", _path_from(folder, output_path), "the result, made at launch"),
        _format_setting(source),
        Setting("model.path", _path_from(folder, package.path), package.recipe.title),
        Setting("model.sha256", package.sha256, "of these files; others are refused"),
        *_fold_settings(package.folds),
        *place.settings,
        *package.recipe.settings,
        Setting("inference.chunk_shape", "auto", "found at the first launch, from the memory"),
    ]
    cautions = [*package.recipe.cautions, *place.cautions]
    text = _write_text(package, settings, cautions)
    return NewJob(text, parse_job_text(text, folder, "the job file"), cautions, place.scale)


@dataclass(frozen=True, slots=True)
class _Input:
    """A volume that is to be read.

    Attributes:
        path: as the user wrote it.
        stored: what lies there.
        scales: its scales, open.
    """

    path: str
    stored: StoredVolume
    scales: Sequence[Volume]


@dataclass(frozen=True, slots=True)
class _Place:
    """Which scale of the input is read, and at which voxel size.

    Attributes:
        scale: index of the scale.
        settings: keys that say so.
        cautions: what could not be found out; sentences.
    """

    scale: int
    settings: Sequence[Setting]
    cautions: Sequence[str]


def _open_input(path: str) -> _Input:
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
    return _Input(path, stored, scales)


def _place_settings(recipe: Recipe, source: _Input) -> _Place:
    """Choose the scale whose voxel size is that of the training data."""
    trained = ", ".join("any" if size is None else f"{size:g}" for size in recipe.voxel_size)
    own = source.scales[0].voxel_size_nm
    if not recipe.has_unit:
        return _Place(
            0,
            [],
            [
                f"The network was trained at a voxel size of [{trained}] (z, y, x) in a unit that "
                "the package does not say. Compare that with the volume's"
                f"{'' if own is None else f', {_sizes_text(own)} nm'}; where it differs, choose "
                "another input.scale."
            ],
        )
    if own is None:
        return _Place(
            0,
            [_voxel_size_setting(recipe, (1.0, 1.0, 1.0))],
            [
                "The volume does not say its voxel size: it is taken for that of the training "
                f"data, [{trained}] mm (z, y, x)."
            ],
        )
    for index, volume in enumerate(source.scales):
        size = volume.voxel_size_nm or own
        wanted = _wanted_nm(recipe, size)
        if is_same_size(wanted, size):
            settings = [_voxel_size_setting(recipe, size)]
            if index:
                reason = f"the scale whose voxels are those of the training data, [{trained}] mm"
                settings.insert(0, Setting("input.scale", index, reason))
            return _Place(index, settings, [])
    sizes = "; ".join(_sizes_text(each.voxel_size_nm or own) for each in source.scales)
    raise ConfigError(
        f"the network was trained at a voxel size of {_sizes_text(_wanted_nm(recipe, own))} nm (z, "
        f"y, x), and {source.path} has {sizes}: it would see objects of another size, and give "
        "another result than its own tool. Make a scale that fits, with beam-inference resample or "
        "the tool that made the volume"
    )


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
        "of the training data; an input of another voxel size is refused",
    )


def _plain_number(value: float) -> float:
    """A number that is written without a fraction if it has none."""
    rounded = round(value, 3)
    return int(rounded) if rounded == int(rounded) else rounded


def _sizes_text(sizes: VoxelSizeNm) -> str:
    return f"[{', '.join(f'{size:.9g}' for size in sizes)}]"


def _padding_settings(recipe: Recipe, volume: Volume) -> list[Setting]:
    """What lies outside a volume that is smaller than a patch; none reaches beyond a larger one."""
    shape = recipe.values["inference.patch_shape"]
    is_smaller = any(n < p for n, p in zip(volume.bounds.shape, shape, strict=True))
    if not is_smaller or recipe.padding is None:
        return []
    padding = round(recipe.padding) if volume.dtype.kind in "iu" else recipe.padding
    return [
        Setting("input.fill", "constant", "the volume is smaller than a patch"),
        Setting("input.fill_value", padding, "what its own tool pads with, in stored units"),
    ]


def _format_setting(source: _Input) -> Setting:
    if source.stored.driver == "neuroglancer_precomputed":
        return Setting("output.format", "precomputed", "as the input")
    return Setting("output.format", "ome_zarr", "says its voxel size, and has room for a pyramid")


def _fold_settings(folds: Folds | None) -> list[Setting]:
    if folds is None:
        return []
    return [Setting("model.folds", list(folds), "those that init was told")]


def _path_from(folder: Path, path: str) -> str:
    """A path as a job file in a folder says it: relative where it lies inside the folder."""
    if "://" in path:
        return path
    absolute = Path(path).expanduser().absolute()
    inside = os.path.relpath(absolute, folder.absolute())
    return str(absolute) if inside.startswith("..") else inside


def _write_text(package: Package, settings: Sequence[Setting], cautions: Sequence[str]) -> str:
    title = clean_text(f"{package.recipe.title} ({package.path})")
    lines = [
        *_comment(f"A job file for {title}, made by beam-inference init."),
        *_comment(
            "Every key has its reason; docs/job-file.md explains all of them. Axes are z, y, x."
        ),
    ]
    if cautions:
        lines += ["#", *_comment("What its own tool does otherwise, or what to look at:")]
        for caution in cautions:
            lines += _comment(clean_text(caution), first="- ", rest="  ")
    for section in _SECTIONS:
        lines += ["", *_section(section, settings)]
    return "\n".join(lines) + "\n"


def _section(section: str, settings: Iterable[Setting]) -> list[str]:
    """The lines of one section; a key without a dot is one of its own."""
    lines: list[str] = []
    for setting in settings:
        if setting.key == section:
            return [
                *_comment(clean_text(setting.reason)),
                f"{section}: {_flow_text(setting.value)}",
            ]
        name, _, key = setting.key.partition(".")
        if name == section:
            lines += _comment(clean_text(setting.reason), indent="  ")
            lines.append(f"  {key}: {_flow_text(setting.value)}")
    return [f"{section}:", *lines]


def _flow_text(value: Any) -> str:
    """A value in YAML, on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str, *, indent: str = "", first: str = "", rest: str = "") -> list[str]:
    return wrap(
        text,
        _WIDTH,
        initial_indent=f"{indent}# {first}",
        subsequent_indent=f"{indent}# {rest}",
        break_long_words=False,
        break_on_hyphens=False,
    )
