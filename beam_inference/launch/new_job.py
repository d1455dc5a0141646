"""Writes a job file for a packaged network and a volume, with the reason beside each key."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job_text
from beam_inference.config.network import Network
from beam_inference.errors import ConfigError
from beam_inference.foreign_text import clean_line, clean_text
from beam_inference.launch.job_grid import (
    InputScales,
    choose_grid,
    open_input,
)
from beam_inference.models.fetch import fetch_package
from beam_inference.models.hashes import model_sha256
from beam_inference.models.hugging_face import SCHEME, parse_address
from beam_inference.models.packages import Folds, Recipe, Setting

_SECTIONS = ("input", "inputs", "output", "model", "inference", "postprocess")
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
        network_path: what a job names as its network; None if that is packed.
    """

    path: str
    folds: Folds | None
    sha256: str
    recipe: Recipe
    network_path: str | None


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
        file = package.find_network(recipe)
        local = package.path if file is None else file
        if not isinstance(local, Path):
            local = package.path
        network = Network(path=str(local), folds=None if folds is None else list(folds))
        named = _pin(path, package.path) if file is None else str(local)
        is_packed = file is not None and local == package.path
        return Package(path, folds, model_sha256(network), recipe, None if is_packed else named)


def _pin(path: str, folder: Path) -> str:
    """Name a package by its commit, if it lies on Hugging Face."""
    return parse_address(path).at(folder.name) if path.startswith(SCHEME) else path


def make_job(
    package: Package,
    input_path: str,
    output_path: str,
    folder: Path,
    further: Sequence[str] = (),
) -> NewJob:
    """Make a job file that runs a package's network over a volume as its own tool does.

    Args:
        package: the network.
        input_path: path or URL of the volume.
        output_path: path or URL of the result.
        folder: where the job file will lie: paths in it are relative to this folder.
        further: paths or URLs of volumes whose channels follow, in the network's order.

    Raises:
        ConfigError: the two do not go together; see :func:`choose_grid`.
        VolumeError: the volume cannot be read.
    """
    if package.recipe.obstacle is not None:
        raise ConfigError(f"{package.path}: a job cannot run it: {package.recipe.obstacle}")
    if package.network_path is None:
        raise ConfigError(
            f"{package.path}: a job names its file {package.recipe.network_file}, which is packed: "
            "unpack the zip file, and name the folder"
        )
    source = open_input(input_path)
    grid = choose_grid(package.recipe, source)
    settings = [
        Setting("input.path", _path_from(folder, input_path), "the volume"),
        *_further_settings(package, [_path_from(folder, path) for path in further], grid.scale),
        Setting("output.path", _path_from(folder, output_path), "the result, made at launch"),
        _format_setting(source),
        Setting("model.path", _path_from(folder, package.network_path), package.recipe.title),
        Setting("model.sha256", package.sha256, "of these files; others are refused"),
        *_fold_settings(package.folds),
        *grid.settings,
        *package.recipe.settings,
        Setting("inference.chunk_shape", "auto", "found at the first launch, from the memory"),
    ]
    cautions = [*package.recipe.cautions, *grid.cautions]
    text = _write_text(package, settings, cautions)
    would_be = f"the job that would run {package.path} over {input_path} into {output_path}"
    config = parse_job_text(text, folder, would_be)
    return NewJob(text, config, cautions, grid.scale)


def _further_settings(package: Package, paths: Sequence[str], scale: int) -> list[Setting]:
    if not paths:
        return []
    same = {"scale": scale} if scale else {}
    names = package.recipe.facts.get("channels", "in the order of the network's channels")
    reason = f"the other modalities, channels of the network after the first: {names}"
    return [Setting("inputs", [{"path": path, **same} for path in paths], reason)]


def _format_setting(source: InputScales) -> Setting:
    if source.driver == "neuroglancer_precomputed":
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
    absolute = Path(path).absolute()
    inside = os.path.relpath(absolute, folder.absolute())
    return str(absolute) if inside.startswith("..") else inside


def _write_text(package: Package, settings: Sequence[Setting], cautions: Sequence[str]) -> str:
    title = clean_line(f"{package.recipe.title} ({package.path})")
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
        if any(setting.key.partition(".")[0] == section for setting in settings):
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
