"""A class Trainable's whole life on real Ray, on local storage and on S3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray import tune

from ray_artifact_sync import ArtifactSyncer
from tests.integration.runs import LINES, check_exact, trial_dir, tuner
from tests.integration.trainables import Logging, Plain, Reusable

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("wipe", "open_in_setup"),
    [
        pytest.param(False, False, id="same-node-opened-each-time", marks=pytest.mark.exhaustive),
        pytest.param(False, True, id="same-node-opened-in-setup", marks=pytest.mark.exhaustive),
        pytest.param(True, False, id="other-node-opened-each-time"),
        pytest.param(True, True, id="other-node-opened-in-setup"),
    ],
)
def test_killed_after_a_checkpoint(ray_cluster, place, tmp_path, wipe, open_in_setup):
    config = {"crash_at": 6, "wipe": wipe, "sync_first": True, "open_in_setup": open_in_setup}
    results = tuner(Logging, place, tmp_path, config, log_to_file=True).fit()
    directory = trial_dir(place, results[0])
    check_exact(directory)
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]
    assert (tmp_path / "markers/rewritten_at_restore").read_text() == "version 4\n"
    printed = (directory / "stdout").read_text().splitlines()
    assert [line for line in printed if line.startswith("printed")] == [f"printed in step {n}" for n in range(1, 9)]


def test_newer_data_on_the_same_node_is_set_aside(ray_cluster, place, tmp_path):
    """Restored as of the checkpoint; what the killed attempt had written since is kept, and never uploaded."""

    class Looking(Logging):
        def load_checkpoint(self, checkpoint_dir):
            super().load_checkpoint(checkpoint_dir)
            aside = list(Path(".ray_artifact_sync/set_aside").glob("*/log.txt"))
            self.mark("set_aside", "|".join(path.read_text() for path in aside))

    results = tuner(Looking, place, tmp_path, {"crash_at": 6}).fit()
    directory = trial_dir(place, results[0])
    check_exact(directory)
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]
    assert (tmp_path / "markers/set_aside").read_text().split() == LINES[:6]
    assert not list(directory.rglob("set_aside"))


def test_killed_before_the_first_checkpoint_starts_clean(ray_cluster, place, tmp_path):
    results = tuner(Logging, place, tmp_path, {"crash_at": 3, "sync_first": True}).fit()
    check_exact(trial_dir(place, results[0]))
    assert not (tmp_path / "markers/log_at_restore").exists()


def test_killed_between_upload_and_registration(ray_cluster, place, tmp_path):
    """The second checkpoint (step 8) is complete in storage, but Ray never heard of it: the first one counts."""
    results = tuner(Logging, place, tmp_path, {"kill_in_save": 2, "steps": 8}).fit()
    directory = trial_dir(place, results[0])
    check_exact(directory)
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]
    snapshots = list((directory / "checkpoint_000001").glob(".ray_artifact_sync-*.json"))
    assert len(snapshots) == 1
    assert (tmp_path / "markers/kill_in_save").exists()


def test_step_that_raises_is_flushed(ray_cluster, place, tmp_path):
    results = tuner(Logging, place, tmp_path, {"crash_at": 6, "crash": "raise"}).fit()
    directory = trial_dir(place, results[0])
    check_exact(directory)
    assert (directory / "raised.txt").read_text() == "written in the step that raised: 6\n"


def test_the_last_failure_keeps_everything(ray_cluster, place, tmp_path):
    """No retry left: what the raising step and cleanup() wrote is the trial's last word, and is there."""
    results = tuner(Logging, place, tmp_path, {"crash_at": 6, "crash": "raise"}, max_failures=0).fit()
    assert results[0].error is not None
    directory = place.fetch(results[0].path)
    assert (directory / "log.txt").read_text().split() == LINES[:6]
    assert (directory / "raised.txt").exists()
    assert (directory / "cleanup.txt").exists()


def test_two_crashes_in_a_row(ray_cluster, place, tmp_path):
    config = {"crash_at": 6, "kill_in_save": 2, "sync_first": True, "wipe": True}
    results = tuner(Logging, place, tmp_path, config, checkpoint={"checkpoint_frequency": 2}).fit()
    check_exact(trial_dir(place, results[0]))


def test_drivers_files_stay_the_drivers(ray_cluster, place, tmp_path):
    """A worker that writes progress.csv, result.json or a declared file does not touch the driver's."""

    class Predictions(tune.Callback):
        artifact_patterns = ("predictions/", "summary.json")

    class Careless(Logging):
        def step(self):
            for name in ("progress.csv", "result.json", "summary.json"):
                with open(name, "w") as file:
                    file.write("the worker's")
            import os

            os.makedirs("predictions", exist_ok=True)
            os.makedirs("sub", exist_ok=True)
            for name in ("predictions/1.txt", "sub/progress.csv", "checkpoint_notes.txt"):
                with open(name, "w") as file:
                    file.write("the worker's")
            return super().step()

    results = tuner(Careless, place, tmp_path, {"steps": 4}, callbacks=[Predictions()]).fit()
    directory = trial_dir(place, results[0])
    assert "training_iteration" in (directory / "progress.csv").read_text()
    assert json.loads((directory / "result.json").read_text().splitlines()[0])["n"] == 1
    assert not (directory / "predictions").exists()
    assert not (directory / "summary.json").exists()
    assert (directory / "sub/progress.csv").read_text() == "the worker's"
    assert (directory / "checkpoint_notes.txt").read_text() == "the worker's"


def test_sync_artifacts_false_writes_no_artifact(ray_cluster, place, tmp_path):
    results = tuner(Logging, place, tmp_path, {"steps": 4}, sync={"sync_artifacts": False}).fit()
    directory = trial_dir(place, results[0])
    assert (directory / "checkpoint_000000/n").read_text() == "4"
    assert not (directory / "log.txt").exists()
    assert not (directory / "plots").exists()
    assert not (directory / ".ray_artifact_sync").exists()
    assert not list((directory / "checkpoint_000000").glob(".ray_artifact_sync*"))


def test_without_the_mixin_artifacts_are_uploaded(ray_cluster, place, tmp_path):
    results = tuner(Plain, place, tmp_path, {}, checkpoint={"checkpoint_at_end": True}).fit()
    assert (trial_dir(place, results[0]) / "log.txt").read_text() == "1\n2\n3\n"


def test_reused_actors_keep_trials_apart(ray_cluster, place, tmp_path):
    results = tuner(
        Reusable,
        place,
        tmp_path,
        {"who": tune.grid_search(["a", "b", "c", "d"])},
        tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=1),
        checkpoint={},
        log_to_file=True,
    ).fit()
    for result in results:
        directory, who = trial_dir(place, result), result.config["who"]
        assert (directory / "who.txt").read_text() == f"{who}\n"
        assert [path.name for path in directory.glob("only_*")] == [f"only_{who}.txt"]
        assert (directory / "log.txt").read_text().split() == LINES[:3]
        assert (directory / "stdout").read_text().count("printed in step 3") == 1


def test_results_carry_the_metrics(ray_cluster, tmp_path):
    from tests.integration.places import local_place

    results = tuner(Logging, local_place(tmp_path), tmp_path, {}).fit()
    metrics = results[0].metrics
    assert metrics["artifact_sync/failed_syncs"] == 0
    assert metrics["artifact_sync/files_sent"] > 8


@pytest.mark.parametrize("kind", ["put_object"])
def test_refused_checkpoint_is_an_error_and_no_checkpoint(ray_cluster, tmp_path, proxy, kind):
    from tests.integration.places import s3_place
    from tests.support.s3_servers import filesystem_at

    place = s3_place(tmp_path, filesystem_at(proxy.endpoint))
    proxy.fail(kind=kind, path="/checkpoint_000000/n", status=403)
    results = tuner(Logging, place, tmp_path, {"steps": 4}, max_failures=0, syncer=ArtifactSyncer(retries=1)).fit()
    assert results[0].error is not None
    assert "403" in str(results[0].error) or "ermission" in str(results[0].error)
    assert results[0].checkpoint is None
