"""Runs on Ray with or without this library, and who does something while they go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ray import tune

from ray_artifact_sync import configure, with_artifacts
from release_tests import trials
from release_tests.checks import Storage

RUN = "exp"
PATIENCE = 300.0
"""Seconds that something may take on a busy machine before it counts as not happening."""


class Accomplice:
    """Does things while a run goes on; an error in it is raised at the end."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Accomplice:  # noqa: PYI034  (nobody derives from it)
        self._thread.start()
        return self

    def __exit__(self, kind, *exc) -> None:
        self._thread.join(0 if kind else PATIENCE)
        if self._error is not None:
            raise self._error
        assert kind or not self._thread.is_alive(), "the run was over before everything had happened"


def tuner(
    trainable: Any,
    storage: Storage,
    config: dict[str, Any],
    *,
    plain: bool = False,
    keep: int | None = None,
    frequency: int = trials.FREQUENCY,
    max_failures: int = 20,
    **options: Any,
):
    """A run of one trial, or of as many as the configuration says.

    Args:
        trainable: A class, or a function that is not wrapped yet.
        storage: Where.
        config: Of the trial.
        plain: With what Ray alone has to offer.
        keep: Checkpoints that are kept; all by default.
        frequency: Steps between two checkpoints of a class.
        max_failures: How often Ray may start the trial again.
        **options: Of `configure`.
    """
    is_class = isinstance(trainable, type)
    checkpoints: dict[str, Any] = {"checkpoint_frequency": frequency} if is_class else {}
    run_config = tune.RunConfig(
        name=RUN,
        checkpoint_config=tune.CheckpointConfig(num_to_keep=keep, **checkpoints),
        failure_config=tune.FailureConfig(max_failures=max_failures),
        verbose=0,
        **storage.run_options,
    )
    if plain:
        run_config.sync_config = tune.SyncConfig(sync_artifacts=True, sync_artifacts_on_checkpoint=True)
    else:
        run_config = configure(run_config, **options)
    return tune.Tuner(
        trainable if is_class or plain else with_artifacts(trainable), param_space=config, run_config=run_config
    )


def trainer(loop: Any, storage: Storage, config: dict[str, Any], *, workers: int):
    """A run of Ray Train V2, each worker on a node of its own."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    return DataParallelTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(name=RUN, failure_config=FailureConfig(max_failures=20), **storage.run_options),
    )
