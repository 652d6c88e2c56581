"""A class Trainable's whole life on real Ray."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from ray import tune

from ray_artifact_sync import ArtifactSyncer, configure
from tests.integration.trainables import Logging

pytestmark = pytest.mark.ray

LINES = [str(n) for n in range(1, 9)]


def fit(storage_path, tmp_path, config, **run):
    markers = tmp_path / "markers"
    markers.mkdir(exist_ok=True)
    run_config = tune.RunConfig(
        name="exp",
        storage_path=str(storage_path),
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=run.pop("frequency", 4)),
        failure_config=tune.FailureConfig(max_failures=2),
        verbose=0,
        **run,
    )
    tuner = tune.Tuner(
        Logging,
        param_space={**config, "markers": str(markers)},
        run_config=configure(run_config, syncer=ArtifactSyncer()),
    )
    return tuner.fit()


def trial_dir(results) -> Path:
    assert not results.errors, results.errors
    return Path(results[0].path)


def check_exact(directory: Path) -> None:
    assert (directory / "log.txt").read_text().split() == LINES
    assert (directory / "rewritten.txt").read_text() == "version 8\n"
    for n in range(1, 9):
        assert (directory / f"plots/{n}.bin").read_bytes() == hashlib.sha256(str(n).encode()).digest() * 1000
    assert (directory / "cleanup.txt").read_text() == "written in cleanup\n"


@pytest.mark.parametrize("open_in_setup", [False, True])
@pytest.mark.parametrize("wipe", [False, True], ids=["same-node", "other-node"])
def test_killed_after_a_checkpoint(ray_cluster, tmp_path, wipe, open_in_setup):
    results = fit(
        tmp_path / "storage",
        tmp_path,
        {"crash_at": 6, "wipe": wipe, "sync_first": True, "open_in_setup": open_in_setup},
        log_to_file=True,
    )
    directory = trial_dir(results)
    check_exact(directory)
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]
    assert (tmp_path / "markers/rewritten_at_restore").read_text() == "version 4\n"
    printed = (directory / "stdout").read_text().splitlines()
    assert [line for line in printed if line.startswith("printed")] == [f"printed in step {n}" for n in range(1, 9)]


def test_killed_before_the_first_checkpoint_starts_clean(ray_cluster, tmp_path):
    results = fit(tmp_path / "storage", tmp_path, {"crash_at": 3, "sync_first": True})
    check_exact(trial_dir(results))


def test_step_that_raises_is_flushed(ray_cluster, tmp_path):
    results = fit(tmp_path / "storage", tmp_path, {"crash_at": 6, "crash": "raise"})
    directory = trial_dir(results)
    check_exact(directory)
    assert (directory / "raised.txt").read_text() == "written in the step that raised: 6\n"
