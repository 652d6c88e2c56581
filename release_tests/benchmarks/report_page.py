"""The report page: how long a browser takes to load an experiment of 200 trials. Needs Chromium and ChromeDriver."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from release_tests.benchmarks.common import Row, main, medians, scratch
from tests.support.browser import browser
from tests.support.experiments import make_experiment

ROUNDS = int(os.environ.get("ROUNDS", "5"))
TRIALS = 200
EVENTS = 150

LOADED = "const t = performance.timing; return t.loadEventEnd && (t.loadEventEnd - t.navigationStart) / 1000"
# Also the timelines and pictures that are seen first, which are drawn when the page is there.
DRAWN = """
const done = arguments[0];
const look = () => {
  const seen = [...document.querySelectorAll(".lane")].filter((one) => one.getBoundingClientRect().top < innerHeight);
  if (seen.length && seen.every((one) => one.firstChild)) done(performance.now() / 1000);
  else requestAnimationFrame(look);
};
look();
"""


def until(driver, script: str) -> float:
    while not (found := driver.execute_script(script)):
        time.sleep(0.02)
    return float(found)


def run() -> list[Row]:
    seconds: dict[str, list[float]] = {"loaded": [], "drawn": [], "made by the command": []}
    with scratch() as directory:
        experiment = make_experiment(Path(directory), TRIALS, events=EVENTS)
        output = Path(directory) / "report.html"
        for _ in range(ROUNDS):
            started = time.perf_counter()
            command = [sys.executable, "-m", "ray_artifact_sync", "report", str(experiment), "-o", str(output)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds["made by the command"].append(time.perf_counter() - started)
            with browser() as driver:
                driver.get(output.as_uri())
                seconds["loaded"].append(until(driver, LOADED))
                seconds["drawn"].append(driver.execute_async_script(DRAWN))
                rows = driver.execute_script("return document.querySelectorAll('.trial').length")
                events = driver.execute_script("return TRIALS.reduce((sum, one) => sum + eventsOf(one).length, 0)")
            assert rows == TRIALS
            print({name: round(values[-1], 2) for name, values in seconds.items()}, flush=True)
        size = output.stat().st_size
    found = medians(seconds)
    return [
        Row(
            f"report page of {TRIALS} trials in headless Chromium",
            "loads in < 2 s",
            f"{found['loaded']:.2f} s until it is loaded, {found['drawn']:.2f} s until what is seen first is drawn; "
            f"{events:,} events, {size / 1e6:.1f} MB; the command takes {found['made by the command']:.1f} s",
            found["loaded"] < 2,
            seconds,
        )
    ]


if __name__ == "__main__":
    main("report_page", run)
