"""The tests that a run of the test suite leaves out: all faults, long ones on both storages, 100,000 files, 6 GiB.

Takes as long as all other scenarios together, so it is a run of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "exhaustive tests"
quick = False
by_name = True
TIMEOUT = 3600


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "exhaustive", f"--basetemp={workdir / 'tests'}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, "see above"
    counts = dict(re.findall(r"(\d+) (passed|skipped)", done.stdout.splitlines()[-1]))
    return {word: int(count) for count, word in counts.items()}
