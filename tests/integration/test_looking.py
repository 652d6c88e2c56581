"""What Ray gives (`ResultGrid`, `Result`, `Checkpoint`) can be looked at; so can the experiment by its place."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ray import tune

from ray_artifact_sync import ArtifactView
from tests.integration.runs import LINES, content, tuner
from tests.integration.trainables import Logging
from tests.support.s3_servers import environment, uri_at

pytestmark = pytest.mark.ray


def command(*arguments: str) -> str:
    """The command in a process of its own, in which Ray cannot be imported."""
    code = "import sys; sys.modules['ray'] = None; from ray_artifact_sync.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment()},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_results_can_be_looked_at(ray_cluster, place, tmp_path, request):
    config = {"crash_at": 6, "which": tune.grid_search([1, 2])}
    results = tuner(Logging, place, tmp_path, config).fit()
    grid = ArtifactView(results)
    assert len(grid.trials) == len(results) == 2
    assert grid.checkpoints == ("checkpoint_000000", "checkpoint_000001")
    for result in results:
        view = ArtifactView(result)
        assert view.read_text("log.txt").split() == LINES
        assert view.read_bytes("plots/3.bin") == content(3)
        saved = ArtifactView(result.checkpoint)
        assert saved.checkpoint == os.path.basename(result.checkpoint.path)
        assert saved.at("checkpoint_000000").read_text("log.txt").split() == LINES[:4]
        name = os.path.basename(result.path)
        assert grid[name].read_text("log.txt").split() == LINES
        owners = {artifact.path: artifact.owner for artifact in view if artifact.owner}
        assert owners["progress.csv"] == "CSVLoggerCallback"
        assert owners["result.json"] == "JsonLoggerCallback"
    uri = place.storage_path + "/exp"
    if place.filesystem is not None:
        uri = uri_at(request.getfixturevalue("proxy").endpoint, uri.partition("/")[2])
    assert "artifacts of 2 trials" in command("ls", uri).splitlines()[-1]
    assert command("verify", uri).startswith("0 problems in ")
    assert "a trial may be running" in command("gc", uri)
    assert "Nothing to remove." in command("gc", uri, "--older-than", "0", "--nothing-running")
    assert "Nothing is wrong." in command("doctor", uri)
    command("pull", f"{uri}@checkpoint_000000", str(tmp_path / "pulled"))
    for name in grid.trials:
        assert (tmp_path / "pulled" / name / "log.txt").read_text().split() == LINES[:4]
