"""A real browser without a window: Chromium, driven by ChromeDriver."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # a container's root has none
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def missing() -> str:
    """What is not installed; empty if all is there."""
    if not any(map(shutil.which, BROWSERS)):
        return "no Chromium is installed (Debian: chromium)"
    return "" if shutil.which("chromedriver") else "no ChromeDriver is installed (Debian: chromium-driver)"


@contextmanager
def browser(*, width: int = 1360, height: int = 900, dark: bool = False) -> Iterator[Chrome]:
    """A browser whose window is exactly so large; it logs what it would have loaded from the network."""
    with tempfile.TemporaryDirectory() as profile:
        options = Options()
        options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            yield driver
        finally:
            driver.quit()


def screenshot(driver: Chrome, path: Path) -> Path:
    """The window as it is now."""
    driver.save_screenshot(str(path))
    return path
