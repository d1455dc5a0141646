"""The command ``cache``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from beam_inference.cli.command import Options, Subparsers, add_command, add_debug, set_action
from beam_inference.errors import COMPLETE


@dataclass(frozen=True)
class CacheOptions(Options):
    """Options of ``cache``."""

    what: str
    json: bool


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers,
        "cache",
        "show or clear what trials and conversions of networks have left for later launches",
        "",
        "clear",
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=("show", "clear"),
        default="show",
        help="show its place and size (default), or remove all of it",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_debug(parser)
    set_action(parser, CacheOptions, cache)


def cache(options: CacheOptions) -> int:
    """Print place and size of the cache, or clear it and print what there was."""
    from beam_inference.engines.cache import MOST_BYTES, cache_place, user_cache

    is_cleared = options.what == "clear"
    contents = user_cache().clear() if is_cleared else user_cache().contents()
    place = cache_place()
    if options.json:
        values = {"place": None if place is None else str(place), **asdict(contents)}
        print(json.dumps(values | {"most_bytes": MOST_BYTES, "cleared": is_cleared}, indent=2))
        return COMPLETE
    where = "nowhere: there is no home folder" if place is None else place
    files = f"{contents.entries} files, {contents.bytes / 2**20:.1f} MiB"
    if is_cleared:
        print(f"{where}: {files} removed")
    else:
        print(f"{where}: {files}; at most {MOST_BYTES / 2**20:.0f} MiB are kept")
    return COMPLETE
