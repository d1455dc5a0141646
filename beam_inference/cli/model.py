"""The commands on packaged networks: ``init`` and ``model``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Literal

from beam_inference.cli.command import Options, Subparsers, add_command, add_debug, set_action
from beam_inference.cli.terminal import table_console
from beam_inference.errors import COMPLETE, FAILED, ConfigError
from beam_inference.foreign_text import clean_line

if TYPE_CHECKING:
    from beam_inference.launch.new_job import NewJob
    from beam_inference.models.packages import Recipe


def add(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_init(subparsers)
    _add_model(subparsers)


def _fold(word: str) -> int | Literal["all"]:
    if word == "all":
        return "all"
    if word.isascii() and word.isdecimal():
        return int(word)
    raise argparse.ArgumentTypeError(f"{word} is not a number of a fold, or all")


def _add_folds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folds",
        type=_fold,
        nargs="+",
        metavar="N",
        help="the folds to use, as numbers or all (default: all that are numbered)",
    )


@dataclass(frozen=True)
class InitOptions(Options):
    """Options of ``init``."""

    model: str
    input: Sequence[str]
    output: str
    to: str
    folds: Sequence[int | Literal["all"]] | None


def _add_init(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "init",
        "write a job file for a packaged network and a volume",
        "--model nnUNetTrainer__nnUNetPlans__3d_fullres --input em --to job.yaml",
        description=(
            "Write a job file that runs a packaged network, such as an nnU-Net results folder, "
            "over a volume as its own tool does. Each key has its reason as a comment."
        ),
    )
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="a folder or zip file, or a zip file's URL"
    )
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="VOLUME",
        help="a path or URL; or several volumes over one box, in the order of the channels",
    )
    parser.add_argument(
        "--output",
        default="prediction",
        metavar="VOLUME",
        help="what the job will make, a path or URL (default: prediction)",
    )
    parser.add_argument(
        "--to",
        default="job.yaml",
        metavar="FILE.YAML",
        help="the file to write; an existing one is left alone (default: job.yaml)",
    )
    _add_folds(parser)
    add_debug(parser)
    set_action(parser, InitOptions, init)


def init(options: InitOptions) -> int:
    """Write a job file, and print what is to be done next."""
    from beam_inference.launch.new_job import describe_package, make_job

    file = Path(options.to)
    if file.exists():
        raise ConfigError(f"--to {file} exists, and is left alone: remove it, or name another file")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--to {file}: there is no folder {file.absolute().parent}")
    package = describe_package(options.model, options.folds)
    first, *further = options.input
    new = make_job(package, first, options.output, file.absolute().parent, further)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(new.text)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    print(f"{file}: {package.recipe.title}, with the reason beside each key")
    for caution in new.cautions:
        print(f"- {caution}")
    print("next:")
    for command in _next_commands(options, file, package.recipe, new):
        print(f"  beam-inference {join(command)}")
    return COMPLETE


def _next_commands(
    options: InitOptions, file: Path, recipe: Recipe, new: NewJob
) -> list[list[str]]:
    """Returns the commands that a new job file is for, each as its words."""
    commands = [["plan", str(file)], ["run", str(file)]]
    if recipe.needs_levels:
        scale = ["--scale", str(new.scale)] if new.scale else []
        levels = str(file.parent / "levels.json")
        inside = ["--object"] if recipe.needs_object else []
        commands.insert(0, ["levels", *options.input, "--to", levels, *scale, *inside])
    return commands


@dataclass(frozen=True)
class ModelOptions(Options):
    """Options of ``model``."""

    what: str
    path: str
    folds: Sequence[int | Literal["all"]] | None
    trust_model: bool
    json: bool


def _add_model(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "model",
        "show what a packaged network is and wants, or test it",
        "show nnUNetTrainer__nnUNetPlans__3d_fullres",
        "test nnUNetTrainer__nnUNetPlans__3d_fullres --folds 0",
        description=(
            "Show what a packaged network is, and how a job would run it; or test it: predict the "
            "package's own example, or else an image of random numbers, compared with the "
            "package's own tool, if it is installed. No code in the package is run, unless "
            "--trust_model says so."
        ),
    )
    parser.add_argument("what", choices=("show", "test"), help="what to do")
    parser.add_argument("path", metavar="PATH", help="a folder or zip file, or a zip file's URL")
    _add_folds(parser)
    parser.add_argument(
        "--trust_model", action="store_true", help="let test run code that the package carries"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_debug(parser)
    set_action(parser, ModelOptions, model)


def model(options: ModelOptions) -> int:
    """Show or test a package."""
    return _show(options) if options.what == "show" else _test(options)


def _show(options: ModelOptions) -> int:
    from beam_inference.launch.new_job import describe_package

    package = describe_package(options.path, options.folds)
    recipe = package.recipe
    if options.json:
        print(json.dumps({"sha256": package.sha256, **asdict(recipe)}, indent=2))
        return COMPLETE
    from rich.table import Table
    from rich.text import Text

    print(recipe.title)
    unit = "mm" if recipe.has_unit else "in a unit that it does not say"
    sizes = ", ".join("any" if size is None else f"{size:g}" for size in recipe.voxel_size)
    size = f"[{sizes}] (z, y, x), {unit}" if any(recipe.voxel_size) else "not stated"
    facts = {**recipe.facts, "voxel size": size, "sha256": package.sha256}
    console = table_console(100)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(clean_line(value)))
    console.print(table)
    print("\nHow a job runs it as its own tool does:")
    keys = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        keys.add_column(overflow="fold")
    for setting in recipe.settings:
        keys.add_row(setting.key, Text(json.dumps(setting.value)), Text(clean_line(setting.reason)))
    console.print(keys)
    for caution in recipe.cautions:
        print(f"- {caution}")
    if recipe.obstacle is not None:
        print(f"A job cannot run it: {recipe.obstacle}.")
    return COMPLETE


def _test(options: ModelOptions) -> int:
    from beam_inference.launch.package_trial import try_package

    result = try_package(options.path, options.folds, is_trusted=options.trust_model)
    if options.json:
        print(json.dumps({**asdict(result), "passed": result.is_passed}, indent=2))
        return COMPLETE if result.is_passed else FAILED
    print(
        f"{result.title}: predicted {result.image} {list(result.image_shape)}; values from "
        f"{result.lowest:.4g} to {result.highest:.4g}"
    )
    print(result.comparison)
    return COMPLETE if result.is_passed else FAILED
