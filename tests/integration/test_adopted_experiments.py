"""Experiments that began on Ray's own `SyncConfig(sync_artifacts=True)` and go on with this library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray import tune

from ray_artifact_sync import (
    ArtifactSyncCallback,
    ArtifactSyncer,
    ArtifactSyncMixin,
    ConfigurationError,
    SyncConfig,
    restore_tuner,
    with_artifacts,
)
from ray_artifact_sync.storage_context import ArtifactStorageContext
from tests.integration.places import Place, local_place
from tests.integration.runs import LINES, check_exact, content, trial_dir
from tests.integration.trainables import LoggingBody, function

pytestmark = pytest.mark.ray

# The same name on both sides: Ray compares it.
Before = type("Trained", (LoggingBody,), {})
After = type("Trained", (ArtifactSyncMixin, LoggingBody), {})


class Predictions(tune.Callback):
    """Writes into the trial dir on the driver, and says so."""

    artifact_patterns = ("predictions/",)

    def on_trial_result(self, iteration, trials, trial, result, **info):
        directory = Path(trial.local_path, "predictions")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{result['n']}.txt").write_text("the driver's")


def run_on_ray_alone(trainable, place: Place, tmp_path: Path, config: dict, frequency: int = 4) -> tune.ResultGrid:
    markers = tmp_path / "markers"
    markers.mkdir()
    run_config = tune.RunConfig(
        name="exp",
        sync_config=tune.SyncConfig(sync_artifacts=True),
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=frequency),
        callbacks=[Predictions()],
        log_to_file=True,
        verbose=0,
        **place.run_options,
    )
    return tune.Tuner(trainable, param_space={**config, "markers": str(markers)}, run_config=run_config).fit()


def test_adopting_an_experiment(ray_cluster, place, tmp_path):
    """Restored by listing, leftovers set aside; the next crash returns to the same; later restores need nothing."""
    config = {"crash_at": 6, "crash_again_at": 7, "crash": "raise"}
    before = run_on_ray_alone(Before, place, tmp_path, config)
    assert before[0].error is not None
    assert not (place.fetch(before[0].path) / ".ray_artifact_sync").exists()
    experiment = f"{place.storage_path}/exp"

    tuner = restore_tuner(experiment, After, storage_filesystem=place.filesystem, resume_errored=True)
    results = tuner.fit()
    assert results[0].error is not None, "crash_again_at"
    # The leftovers on this node were at step 6; storage was at the checkpoint's step 4.
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]
    assert (tmp_path / "markers/rewritten_at_restore").read_text() == "version 4\n"
    restored = (tmp_path / "markers/files_at_restore").read_text().split("\n")
    assert "log.txt" in restored
    assert not {"progress.csv", "result.json", "params.json", "predictions", "checkpoint_000000"} & set(restored)
    directory = place.fetch(results[0].path)
    assert (directory / "raised.txt").read_text() == "written in the step that raised: 7\n"
    said = (directory / "stderr").read_text()
    assert said.count("was not run with ray-artifact-sync up to now") == 1, said

    # Nothing of this is needed any more: a plain restore, of the same checkpoint, which still has no snapshot.
    assert not list((directory / "checkpoint_000000").glob(".ray_artifact_sync-*"))
    tuner = tune.Tuner.restore(experiment, After, storage_filesystem=place.filesystem, resume_errored=True)
    results = tuner.fit()
    directory = trial_dir(place, results[0])
    check_exact(directory)
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]
    assert (directory / "predictions/8.txt").read_text() == "the driver's"
    assert json.loads((directory / "result.json").read_text().splitlines()[-1])["n"] == 8
    assert len(list((directory / "checkpoint_000001").glob(".ray_artifact_sync-*.json"))) == 1

    for grid in (results, tune.Tuner.restore(experiment, After, storage_filesystem=place.filesystem).get_results()):
        assert len(grid) == 1
        assert grid[0].metrics["n"] == 8
        assert grid[0].path == results[0].path
        assert grid[0].checkpoint.path.endswith("checkpoint_000001")
        assert len(grid.get_dataframe()) == 1


def test_what_was_synced_after_the_checkpoint_comes_back_too(ray_cluster, place, tmp_path):
    """Without manifests nobody can tell: what storage holds is restored, though it is newer than the checkpoint."""
    run_on_ray_alone(Before, place, tmp_path, {"crash_at": 6, "crash": "raise", "sync_first": True})
    experiment = f"{place.storage_path}/exp"
    results = restore_tuner(experiment, After, storage_filesystem=place.filesystem, resume_errored=True).fit()
    directory = trial_dir(place, results[0])
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:6]
    assert (directory / "log.txt").read_text().split() == [*LINES[:6], *LINES[4:]]
    assert (directory / "plots/6.bin").read_bytes() == content(6)


def test_adopting_a_function(ray_cluster, tmp_path):
    place = local_place(tmp_path)
    run_on_ray_alone(function, place, tmp_path, {"crash_at": 6, "crash": "raise"}, frequency=0)
    tuner = restore_tuner(f"{place.storage_path}/exp", with_artifacts(function), resume_errored=True)
    results = tuner.fit()
    # Ray alone has uploaded what the function wrote until it raised: newer than the checkpoint, and nobody can tell.
    lines = (tmp_path / "markers/log_at_restore").read_text().split()
    directory = trial_dir(place, results[0])
    assert lines in (LINES[:4], LINES[:6])
    assert (directory / "log.txt").read_text().split() == [*lines, *LINES[4:]]
    assert (directory / "cleanup.txt").exists()


def test_restarting_an_adopted_experiment_starts_clean(ray_cluster, tmp_path):
    place = local_place(tmp_path)
    run_on_ray_alone(Before, place, tmp_path, {"crash_at": 6, "crash": "raise"})
    results = restore_tuner(f"{place.storage_path}/exp", After, restart_errored=True).fit()
    check_exact(trial_dir(place, results[0]))
    assert not (tmp_path / "markers/log_at_restore").exists()


def test_other_options_for_an_experiment_of_this_library(ray_cluster, tmp_path):
    """The restored trials, too, follow the new options, here and in later restores."""
    from tests.integration.runs import tuner
    from tests.integration.trainables import Logging

    place = local_place(tmp_path)
    tuner(Logging, place, tmp_path, {"crash_at": 6, "crash": "raise"}, max_failures=0).fit()
    experiment = f"{place.storage_path}/exp"
    options = {"syncer": ArtifactSyncer(exclude="plots/"), "sync_period": 7}
    results = restore_tuner(experiment, Logging, resume_errored=True, **options).fit()
    directory = trial_dir(place, results[0])
    assert (directory / "log.txt").read_text().split() == LINES
    assert (directory / "plots/6.bin").exists(), "of the first run"
    assert not (directory / "plots/8.bin").exists()
    again = tune.Tuner.restore(experiment, Logging)
    config = again._local_tuner._run_config
    assert isinstance(config.sync_config, SyncConfig)
    assert config.sync_config.sync_period == 7
    assert sum(isinstance(callback, ArtifactSyncCallback) for callback in config.callbacks) == 1


def test_options_that_nobody_knows_are_told(ray_cluster, tmp_path):
    place = local_place(tmp_path)
    run_on_ray_alone(Before, place, tmp_path, {"steps": 1})
    with pytest.raises(ConfigurationError, match=r"takes the options of Tuner\.restore.*resume_all"):
        restore_tuner(f"{place.storage_path}/exp", After, resume_all=True)


def test_an_adopted_context_is_for_the_same_place(ray_cluster, tmp_path):
    from ray.train._internal.storage import StorageContext

    config = SyncConfig(syncer=ArtifactSyncer())
    plain = StorageContext(str(tmp_path), "exp", trial_dir_name="t", current_checkpoint_index=3)
    adopted = ArtifactStorageContext.adopting(plain, config)
    for name in ("trial_fs_path", "trial_working_directory", "trial_driver_staging_path", "checkpoint_fs_path"):
        assert getattr(adopted, name) == getattr(plain, name)
    assert adopted.sync_config is config
    assert type(adopted.syncer) is ArtifactSyncer
