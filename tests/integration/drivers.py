"""Drivers in processes of their own, each with a Ray of its own: started, waited for, killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start_driver(tmp_path: Path, spec: dict, *, stderr: Path | None = None) -> subprocess.Popen:
    file = tmp_path / f"driver-{time.monotonic_ns()}.json"
    file.write_text(json.dumps({"tmp_path": str(tmp_path), **spec}))
    environment = {**os.environ, "RAY_AIR_NEW_OUTPUT": "0", "TUNE_GLOBAL_CHECKPOINT_S": "0"}
    with open(stderr or os.devnull, "w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.integration.driver", str(file)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )


def wait_for(path: Path, driver: subprocess.Popen, seconds: float = 150) -> None:
    ends = time.monotonic() + seconds
    while not path.exists():
        assert driver.poll() is None, "the driver ended early"
        assert time.monotonic() < ends, f"{path} did not appear"
        time.sleep(0.05)


def kill_session(driver: subprocess.Popen, worker: int) -> None:
    """The driver, the worker and all of the driver's Ray processes die at once, without a word."""
    os.kill(worker, signal.SIGSTOP)
    children = _descendants(driver.pid)
    for pid in [driver.pid, *children, worker]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.wait()


def run_and_kill(tmp_path: Path, spec: dict) -> None:
    """Runs a driver until its trial waits (`wait_at`), and kills both; from then on, trials do not wait any more."""
    driver = start_driver(tmp_path, spec)
    try:
        wait_for(tmp_path / "markers/waiting", driver)
        kill_session(driver, int((tmp_path / "markers/waiting").read_text()))
    finally:
        end_driver(driver)
    (tmp_path / "markers/go_on").touch()


def end_driver(driver: subprocess.Popen) -> None:
    """Ends a driver that a failed test has left, with its Ray processes; does nothing if it has ended."""
    if driver.poll() is not None:
        return
    for pid in [driver.pid, *_descendants(driver.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.wait()


def _descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            if parent == pid:
                found += [int(entry.name), *_descendants(int(entry.name))]
    return found


def run_driver(tmp_path: Path, spec: dict) -> dict:
    driver = start_driver(tmp_path, spec)
    out, _ = driver.communicate(timeout=150)
    assert driver.returncode == 0, out
    return json.loads(out.splitlines()[-1])
