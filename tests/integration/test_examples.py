"""The examples run as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

QUICKSTART = Path(__file__).resolve().parents[2] / "examples/quickstart.py"


def run_quickstart(storage_path: str) -> str:
    done = subprocess.run(
        [sys.executable, str(QUICKSTART), "--storage-path", storage_path],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(output: str) -> None:
    assert "2 of 2 trials failed, as they should" in output
    _, *trials = output.split("--- log.txt\n")
    assert len(trials) == 2
    for trial in trials:
        log = trial.partition("--- ")[0].split("\n\n")[0].splitlines()
        assert [line.partition(":")[0] for line in log if line.startswith("step")] == [f"step {n}" for n in range(1, 9)]
        assert "up to step 8" in trial
        assert "ended after step 8" in trial
        assert '"loss": 0.0' in trial


def test_quickstart_on_a_local_directory(tmp_path):
    check(run_quickstart(str(tmp_path / "runs")))


@pytest.mark.s3
def test_quickstart_on_s3(s3_uri):
    check(run_quickstart(s3_uri("quickstart/runs")))
