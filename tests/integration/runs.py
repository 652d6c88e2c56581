"""One way to run the test trainables."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from ray_artifact_sync import ArtifactSyncer, configure
from tests.integration.places import Place

LINES = [str(n) for n in range(1, 9)]


def exploiting() -> PopulationBasedTraining:
    """A scheduler under which, of two trials, the worse takes over the better one's checkpoint at step 4."""
    return PopulationBasedTraining(
        time_attr="training_iteration",
        metric="score",
        mode="max",
        perturbation_interval=4,
        quantile_fraction=0.5,
        resample_probability=0.0,
        hyperparam_mutations={"lr": [0.1, 0.2]},
        synch=True,
    )


def tuner(
    trainable,
    place: Place,
    tmp_path: Path,
    config: dict,
    *,
    syncer=None,
    max_failures=2,
    tune_config=None,
    checkpoint=None,
    callbacks=None,
    sync=None,
    **run,
):
    markers = tmp_path / "markers"
    markers.mkdir(exist_ok=True)
    run_config = tune.RunConfig(
        name="exp",
        checkpoint_config=tune.CheckpointConfig(**({"checkpoint_frequency": 4} if checkpoint is None else checkpoint)),
        failure_config=tune.FailureConfig(max_failures=max_failures),
        verbose=0,
        callbacks=callbacks,
        **place.run_options,
        **run,
    )
    return tune.Tuner(
        trainable,
        param_space={**config, "markers": str(markers)},
        run_config=configure(run_config, syncer=syncer or ArtifactSyncer(), **(sync or {})),
        tune_config=tune_config,
    )


def trial_dir(place: Place, result) -> Path:
    assert result.error is None, result.error
    return place.fetch(result.path)


def content(n: int) -> bytes:
    return hashlib.sha256(str(n).encode()).digest() * 1000


def check_exact(directory: Path) -> None:
    assert (directory / "log.txt").read_text().split() == LINES
    assert (directory / "rewritten.txt").read_text() == "version 8\n"
    for n in range(1, 9):
        assert (directory / f"plots/{n}.bin").read_bytes() == content(n)
    assert (directory / "cleanup.txt").read_text() == "written in cleanup\n"
