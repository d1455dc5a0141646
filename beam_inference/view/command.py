"""``beam-inference view``: what its words mean, and what it tells."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from beam_inference.config.storage import check_url
from beam_inference.errors import COMPLETE, ConfigError
from beam_inference.foreign_text import clean_text
from beam_inference.launch.job_files import load_job
from beam_inference.view.layers import View, view_of
from beam_inference.view.viewer_state import hosted_link

MOST_BOXES = 1000
"""Most boxes of each kind in a viewer that is served from here."""
MOST_BOXES_IN_LINK = 100
"""Most boxes of each kind in a link, which is to be passed on."""


def look(
    things: Sequence[str],
    overrides: Sequence[str],
    *,
    volume: str | None,
    step: str | None,
    patches: bool,
    bind: str,
    port: int,
    browser: bool,
    link: bool,
) -> int:
    """Serve local volumes until interrupted; with ``link``, or if none is local, print a link.

    Raises:
        UserError: something cannot be opened or shown, or the address not be had; or there is more
            than one job.
    """
    jobs = [each for each in things if _is_job(each)]
    volumes = [_url(each) for each in things if not _is_job(each)]
    if len(jobs) > 1:
        raise ConfigError(
            f"{' and '.join(jobs)}: view takes one job at a time, and any number of volumes "
            "beside it"
        )
    if overrides and not jobs:
        raise ConfigError(
            f"{overrides[0]} would change a job, but none is given: put its file first"
        )
    job = load_job(jobs[0], overrides, volume, step) if jobs else None
    view = view_of(job, volumes, patches=patches)
    for shown in view.shown:
        print(clean_text(f"{shown.name}: {shown.url}"), file=sys.stderr)
    if view.folders and not link:
        _serve(view, bind, port, browser)
    elif view.folders:
        print(json.dumps(view.state(None, MOST_BOXES_IN_LINK), indent=1))
    else:
        if any(shown.url.startswith("http://") for shown in view.shown):
            print(
                "a browser shows nothing that lies at http:// in a page of https://",
                file=sys.stderr,
            )
        print(hosted_link(view.state(None, MOST_BOXES_IN_LINK)))
    return COMPLETE


def _serve(view: View, bind: str, port: int, browser: bool) -> None:
    client = client_folder()
    from beam_inference.view.server import serve

    def listening(url: str) -> None:
        if not _is_of_this_machine(bind):
            print(
                "whoever has this link can read these volumes, and what is sent is not encrypted:",
                file=sys.stderr,
            )
        print(f"{url} (Ctrl-C ends it)", flush=True)
        if browser and _has_screen():
            webbrowser.open(url)

    serve(client, view.folders, lambda base: view.state(base, MOST_BOXES), bind, port, listening)


def client_folder() -> Path:
    """The folder in which the Neuroglancer package keeps its client.

    Raises:
        ConfigError: it is not installed.
    """
    spec = find_spec("neuroglancer")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("view needs Neuroglancer: pip install 'beam-inference[view]'")
    return Path(spec.submodule_search_locations[0]) / "static" / "client"


def _is_job(thing: str) -> bool:
    return thing.endswith((".yaml", ".yml")) or ("://" not in thing and Path(thing).is_file())


def _url(volume: str) -> str:
    """The URL of a path; a URL stays, and so does a TensorStore driver after a bar."""
    check_url(volume, "a volume to view")
    path, bar, driver = volume.partition("|")
    return volume if "://" in path else Path(path).absolute().as_uri() + bar + driver


def _is_of_this_machine(bind: str) -> bool:
    return bind == "localhost" or bind.startswith("127.") or bind == "::1"


def _has_screen() -> bool:
    """Whether a browser has a screen; without one, a text browser would take the terminal."""
    return sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
