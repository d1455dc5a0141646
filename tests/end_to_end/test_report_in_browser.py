"""Test that the demo's report shows everything in a real browser and fetches nothing."""

import json
import shutil
from contextlib import contextmanager

import pytest

from beam_inference.cli.main import main

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
FLAGS = [
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--no-proxy-server",
        "--disable-quic",
    ),
    *("--no-first-run", "--disable-background-networking", "--window-size=1140,900"),
]


@contextmanager
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="chromium and chromium-driver are not installed"
)
def test_the_demos_report(tmp_path):
    for needed in ("nilearn", "matplotlib", "jinja2"):
        pytest.importorskip(needed)
    assert main(["demo", str(tmp_path / "demo")]) == 0
    page = tmp_path / "report.html"
    assert (
        main(
            [
                "report",
                str(tmp_path / "demo" / "job.yaml"),
                "--to",
                str(page),
                "--worker-price",
                "0.4",
            ]
        )
        == 0
    )
    assert page.stat().st_size < 3_000_000
    with browser() as driver:
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            driver.get(page.as_uri())
            paper, ink = driver.execute_script(
                "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color];"
            )
            bright = [sum(map(int, colour[4:-1].split(","))) for colour in (paper, ink)]
            assert (bright[0] > 600 and bright[1] < 150) == (scheme == "light")
            text = driver.execute_script(
                "return getComputedStyle(document.querySelector('svg text')).fill;"
            )
            assert text != paper
        for width in (1140, 420):
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            sizes = driver.execute_script(
                "return [...document.querySelectorAll('svg')].map(e => [e.clientWidth, "
                "e.clientHeight]);"
            )
            assert len(sizes) == 6
            assert min(min(size) for size in sizes) > 50
        assert driver.execute_script("return document.querySelectorAll('svg image').length") > 6
        assert driver.get_log("browser") == []
        requests = [
            message["params"]["request"]["url"]
            for entry in driver.get_log("performance")
            if (message := json.loads(entry["message"])["message"])["method"]
            == "Network.requestWillBeSent"
        ]
        assert page.as_uri() in requests
        assert all(url == page.as_uri() or url.startswith("data:") for url in requests)
