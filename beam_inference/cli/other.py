"""The other commands: ``demo``, ``schema``, ``plugins`` and ``completion``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from beam_inference.cli.command import Options, Subparsers, add_command, add_debug, set_action
from beam_inference.cli.terminal import table_console
from beam_inference.errors import COMPLETE


def add(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_demo(subparsers)
    _add_schema(subparsers)
    _add_plugins(subparsers)
    _add_completion(subparsers)


@dataclass(frozen=True)
class DemoOptions(Options):
    """Options of ``demo``; ``run_command`` is the command line itself."""

    folder: str
    run_command: Callable[[Sequence[str]], int]


def _add_demo(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers, "demo", "segment a brain MRI template, end to end", "demo-output"
    )
    parser.add_argument(
        "folder",
        nargs="?",
        default="demo-output",
        help="folder for the results (default: demo-output)",
    )
    add_debug(parser)
    set_action(parser, DemoOptions, demo)


def demo(options: DemoOptions) -> int:
    """Segment a brain MRI template, with the commands that a user would give."""
    from beam_inference.demo.run_demo import run_demo

    return run_demo(Path(options.folder), options.run_command)


def _add_schema(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers, "schema", "print the job file's JSON schema", "> job.schema.json"
    )
    set_action(parser, Options, schema)


def schema(_: Options) -> int:
    """Print the job file's JSON schema."""
    from beam_inference.config.cohort import job_schema

    print(json.dumps(job_schema(), indent=2))
    return COMPLETE


@dataclass(frozen=True)
class PluginsOptions(Options):
    """Options of ``plugins``."""

    json: bool


def _add_plugins(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "plugins",
        "list the installed operators, engines, models and formats",
        "",
        "--json",
        description=(
            "List the operators, engines, models and formats that are installed here, by the "
            "names that job files use for them, with the packages that provide them."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_debug(parser)
    set_action(parser, PluginsOptions, plugins)


def plugins(options: PluginsOptions) -> int:
    """List what is installed of each kind of extension."""
    from beam_inference.config.plugins import GROUPS, list_plugins

    plugins = [plugin for group in GROUPS for plugin in list_plugins(group).values()]
    if options.json:
        print(json.dumps([asdict(plugin) for plugin in plugins], indent=2))
        return COMPLETE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("group", "name", "object", "distribution", "version"):
        table.add_column(heading, overflow="fold")
    for plugin in plugins:
        table.add_row(plugin.group, plugin.name, plugin.object, plugin.distribution, plugin.version)
    table_console(max(110, Console().width)).print(table)
    return COMPLETE


@dataclass(frozen=True)
class CompletionOptions(Options):
    """Options of ``completion``; ``parser`` is that of the command line."""

    shell: str
    parser: argparse.ArgumentParser


def _add_completion(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "completion",
        "print a completion script for a shell",
        "bash > ~/.local/share/bash-completion/completions/beam-inference",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    set_action(parser, CompletionOptions, completion)


def completion(options: CompletionOptions) -> int:
    """Print a script by which a shell completes the command line."""
    import shtab

    print(shtab.complete(options.parser, options.shell))
    return COMPLETE
