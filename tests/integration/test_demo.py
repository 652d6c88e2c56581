"""The demo as people run it: exact with this library, and not with Ray alone, or it would prove nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# The local form is in the quick release tests, as the README's first command.
pytestmark = [pytest.mark.ray, pytest.mark.exhaustive]

COMMAND = [sys.executable, "-c", "from ray_artifact_sync.cli import main; main()", "demo"]


@pytest.mark.parametrize("options", [[], pytest.param(["--s3"], marks=pytest.mark.s3)], ids=["local", "s3"])
def test_demo(tmp_path, options):
    place = tmp_path / "demo"
    done = subprocess.run(
        [*COMMAND, *options, "--storage-path", str(place)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""

    rows = [row for row in done.stdout.splitlines() if row.startswith("|")]
    logs = [found for row in rows if (found := re.findall(r"(\d+) lost, (\d+) twice", row))]
    same_node, other_node, raises = [(tuple(map(int, plain)), tuple(map(int, ours))) for plain, ours in logs]
    assert {ours for _, ours in (same_node, other_node, raises)} == {(0, 0)}
    assert same_node[0][1] > 0, "Ray alone no longer writes lines twice"
    assert other_node[0][0] > 0, "Ray alone no longer loses lines"
    assert raises[0][0] > 0, "Ray alone no longer loses what a step that raises wrote"

    files = [found for row in rows if (found := re.findall(r"(\d+) of (\d+)", row))]
    assert files
    for (plain, _), (ours, expected) in files:
        assert ours == expected
        assert int(plain) < int(expected)

    for named in re.findall(rf"{re.escape(str(place))}\S+", done.stdout):
        assert Path(named).exists()
    assert len(list(place.rglob("log.txt"))) == 6
