"""Neuroglancer in a headless Chromium, with our server in this process."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets

from beam_inference.config.fields import Json
from beam_inference.geometry.zyx import Zyx
from beam_inference.view.command import client_folder
from beam_inference.view.server import StateAt, viewer_application

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--use-angle=swiftshader"),
    *("--enable-unsafe-swiftshader", "--no-proxy-server", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--window-size=1400,900"),
)
_WHEN_READY = """
const done = arguments[0], begin = Date.now();
let before = false;
(function look() {
  const viewer = window.viewer;
  const ready = viewer && viewer.layerManager.managedLayers.length && viewer.isReady();
  if (ready && before) return done("");
  if (Date.now() - begin > 60000) return done("not ready after a minute");
  before = ready;
  setTimeout(look, 100);
})()
"""
_PANEL = """
const panel = [...viewer.display.panels][0];
return [panel.canvasRelativeClippedTop, panel.canvasRelativeClippedLeft,
        panel.renderViewport.height, panel.renderViewport.width]
"""
_PICTURE = "viewer.display.draw(); return viewer.display.canvas.toDataURL().split(',')[1]"


@contextmanager
def served(
    folders: Mapping[str, Path], state: StateAt, log: Callable[[Any], None] | None = None
) -> Iterator[str]:
    """Serve the viewer, and yield its URL; ``log`` is given each request's handler."""
    application, token = viewer_application(client_folder(), folders, state)
    if log is not None:
        application.settings["log_function"] = log
    socket, *_ = sockets = bind_sockets(0, "127.0.0.1")
    started = threading.Event()
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        server = HTTPServer(application)
        server.add_sockets(sockets)
        loop.call_soon(started.set)
        loop.run_forever()
        server.stop()
        loop.run_until_complete(server.close_all_connections())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}/{token}/"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class Page:
    """The viewer, open in a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load a page anew, and wait until all it shows is there."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(url)
        self.wait()

    def wait(self) -> None:
        """Wait until the viewer has all it shows."""
        trouble = self.driver.execute_async_script(_WHEN_READY)
        assert not trouble, (trouble, self.complaints(), self.layer_errors())

    def center(self, position: Zyx) -> tuple[int, ...]:
        """RGB of the pixel in the middle of the first panel, once a voxel, ZYX, is there."""
        x, y, z = (n + 0.5 for n in position[::-1])
        self.driver.execute_script(
            f"viewer.navigationState.position.value = Float32Array.of({x}, {y}, {z})"
        )
        self.wait()
        top, left, height, width = self.driver.execute_script(_PANEL)
        # Of an even number of pixels the one left of the middle, as Neuroglancer rounds.
        return tuple(
            int(value) for value in self.picture()[top + height // 2, left + (width - 1) // 2]
        )

    def picture(self) -> np.ndarray:
        """The pixels of the panels: (Y, X, 3)."""
        from PIL import Image

        png = base64.b64decode(self.driver.execute_script(_PICTURE))
        return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))

    def complaints(self) -> list[str]:
        """Errors on the console, without those of blocks and optional files that are not there."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING") and "404 (Not Found)" not in entry["message"]
        ]

    def layer_errors(self) -> list[str]:
        """Messages of the viewer about what it cannot load."""
        errors: list[str] = self.driver.execute_script(
            "return viewer.layerManager.managedLayers.flatMap(each => (each.layer?.dataSources ?? "
            "[]).map(source => source.loadState_?.error?.message).filter(Boolean).map(text => "
            "each.name + ': ' + text))"
        )
        return errors


@contextmanager
def chromium() -> Iterator[Page]:
    """A browser; the test is skipped on machines without one."""
    selenium = pytest.importorskip("selenium.webdriver")
    program, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if program is None or driver is None:
        pytest.skip("there is no chromium with chromedriver on this machine")
    options = selenium.ChromeOptions()
    options.binary_location = program
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    browser.set_script_timeout(90)
    try:
        yield Page(browser)
    finally:
        browser.quit()


def microscope(state: Json, voxels_per_pixel: float = 0.02) -> Json:
    """The state as one xy panel, close by default, with opaque volumes and nothing over them."""
    layers = [
        {**layer, "opacity": 1.0} if layer["type"] == "image" else {**layer, "selectedAlpha": 1.0}
        for layer in state["layers"]
        if layer["type"] != "annotation"
    ]
    bare = {
        "showAxisLines": False,
        "showScaleBar": False,
        "layout": "xy",
        "crossSectionScale": voxels_per_pixel,
    }
    return {**state, "layers": layers, **bare}
