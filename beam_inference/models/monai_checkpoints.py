"""Which files of weights a MONAI bundle loads, as its configuration names them.

Paths are often joined of texts and references by an expression, as ``$@bundle_root +
'/models/model.pt'``: such are read, and not run.
"""

from __future__ import annotations

import posixpath
import re

from beam_inference.models.monai_config import Config

_ROOT = "@bundle_root"
_DEEPEST = 16
_LONGEST = 4096
_TOKEN = re.compile(
    r"\s*(?:(?P<text>'[^']*'|\"[^\"]*\")|(?P<reference>@[\w#:]+)|(?P<joint>[+,/])"
    r"|(?:os\.path\.join|str|(?:pathlib\.)?Path)\(|\))"
)


def list_checkpoints(config: Config) -> list[str]:
    """The files of weights that MONAI would load: paths in the bundle, or expressions not read.

    Raises:
        ModelContractError: a reference leads nowhere.
    """
    found: set[str] = set()
    known: dict[str, str | None] = {_ROOT: ""}
    waiting: list[object] = [config.values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            paths = value.get("load_path")
            for path in paths if isinstance(paths, list) else [paths]:
                if isinstance(path, str):
                    joined = _join(config, path, known, 0)
                    found.add(path if joined is None else posixpath.normpath(joined).lstrip("/"))
    return sorted(found)


def _join(config: Config, text: str, known: dict[str, str | None], depth: int) -> str | None:
    """The path that a value stands for, from the bundle's folder on; None if it cannot be read.

    Args:
        config: of the bundle.
        text: the value, or an expression.
        known: what references stand for, which grows.
        depth: how many references led here.
    """
    if not text.startswith(("$", "@")):
        return text
    text = text.removeprefix("$")
    joined = ""
    place = 0
    while text[place:].strip():
        token = _TOKEN.match(text, place)
        if token is None:
            return None
        place = token.end()
        part: str | None = ""
        if token["text"] is not None:
            part = token["text"][1:-1]
        elif token["reference"] is not None:
            part = _join_reference(config, token["reference"], known, depth + 1)
        elif token["joint"] in (",", "/"):
            part = "/"
        if part is None or len(joined) + len(part) > _LONGEST:
            return None
        joined += part
    return joined


def _join_reference(
    config: Config, reference: str, known: dict[str, str | None], depth: int
) -> str | None:
    if reference not in known:
        known[reference] = None  # also for one that leads to itself
        value = config.look_up(reference, "load_path")
        if isinstance(value, str) and depth <= _DEEPEST:
            known[reference] = _join(config, value, known, depth)
    return known[reference]
