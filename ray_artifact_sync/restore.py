"""`restore_tuner`: goes on with an experiment that began without this library, or with other options."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

from ray_artifact_sync import layout
from ray_artifact_sync.config import OPTIONS, configure
from ray_artifact_sync.errors import ArtifactSyncError, ConfigurationError
from ray_artifact_sync.stores import open_uri

if TYPE_CHECKING:
    import pyarrow.fs
    from ray.tune import Tuner

    from ray_artifact_sync.syncer import ArtifactSyncer

logger = logging.getLogger(__name__)

TUNER_FILE = "tuner.pkl"
KEPT_TUNER_FILE = f"{layout.STATE_DIR}/{TUNER_FILE}"


def restore_tuner(
    path: str,
    trainable: Any,
    *,
    syncer: ArtifactSyncer | None = None,
    storage_filesystem: pyarrow.fs.FileSystem | None = None,
    **options: Any,
) -> Tuner:
    """`Tuner.restore`, with the artifacts of all trials synced from now on.

    For an experiment that ran without this library up to now (on Ray's own `SyncConfig(sync_artifacts=True)`, say), or
    that is to go on with other options: `Tuner.restore` alone takes the sync configuration of the first run.

        tuner = restore_tuner("s3://bucket/runs/exp", MyTrainable, resume_errored=True)
        tuner.fit()

    What such a trial stored is found by listing its trial dir, as no manifest says what belongs to its checkpoint: the
    files may be newer than that. From its next checkpoint on, restores are exact.

    The experiment's `tuner.pkl` is written anew, so that later calls of `Tuner.restore` need nothing of this; the old
    one is kept in the experiment's `.ray_artifact_sync/`.

    Args:
        path: The experiment's directory or URI.
        trainable: The same as before, now with `ArtifactSyncMixin` or `with_artifacts` (its name must be the same).
        syncer: How to sync; a default `ArtifactSyncer()` if None.
        storage_filesystem: What `path` is on; see `Tuner.restore`.
        **options: Of `configure` (`sync_period`, `sync_timeout`, `sync_artifacts`, `sync_artifacts_on_checkpoint`,
            `registry`), and of `Tuner.restore` (`resume_errored`, `param_space` ...).

    Returns:
        The tuner; call its `fit()`.

    Raises:
        ConfigurationError: An option makes no sense, or Ray runs through a Ray Client.

    Example:
        ```python
        import os
        from ray import tune
        from ray_artifact_sync import ArtifactSyncMixin, restore_tuner


        class Training(tune.Trainable):
            def step(self):
                return {"done": self.iteration == 1}

            def save_checkpoint(self, checkpoint_dir): ...


        storage = os.path.abspath("before")
        tune.Tuner(Training, run_config=tune.RunConfig(name="exp", storage_path=storage, verbose=0)).fit()


        class Training(ArtifactSyncMixin, Training): ...


        results = restore_tuner(f"{storage}/exp", Training).fit()
        assert not results.num_errors
        ```
    """
    from ray import tune  # noqa: PLC0415  (heavy; only needed here)

    ours = {name: options.pop(name) for name in OPTIONS if name in options}
    try:
        tuner = tune.Tuner.restore(path, trainable, storage_filesystem=storage_filesystem, **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise ConfigurationError(
            f"restore_tuner() takes the options of Tuner.restore, and syncer, {', '.join(OPTIONS)}: {error}."
        ) from error
    internal = getattr(tuner, "_local_tuner", None)
    if internal is None:
        raise ConfigurationError("restore_tuner() does not work through a Ray Client; call it on the cluster.")
    internal._run_config = _configured(internal._run_config, syncer, ours)  # noqa: SLF001  (Ray has no way to say it)
    try:
        _write_tuner(internal, path, storage_filesystem)
    except ArtifactSyncError as error:
        logger.warning(
            "%s of %s could not be written anew (%s): this run's artifacts are synced, but for the next one use "
            "restore_tuner() again.",
            TUNER_FILE,
            path,
            error,
        )
    return tuner


def _configured(run_config: Any, syncer: ArtifactSyncer | None, options: dict[str, Any]) -> Any:
    """The run configuration with our sync configuration, which its callback carries over to the restored trials."""
    from ray_artifact_sync.callback import ArtifactSyncCallback  # noqa: PLC0415  (imports ray.tune's callbacks)

    configured = configure(run_config, syncer=syncer, **options)
    configured.callbacks = [
        callback.adopting(configured.sync_config) if isinstance(callback, ArtifactSyncCallback) else callback
        for callback in configured.callbacks
    ]
    return configured


def _write_tuner(internal: Any, path: str, filesystem: pyarrow.fs.FileSystem | None) -> None:
    """Writes `tuner.pkl` as Ray does when a run begins, without a file system (it may hold credentials)."""
    from ray import cloudpickle  # noqa: PLC0415

    state = internal.__getstate__()
    state["_run_config"] = copy.copy(state["_run_config"])
    state["_run_config"].storage_filesystem = None  # `Tuner.restore` sets the one that it is given
    store = open_uri(path, filesystem)
    if store.stat(KEPT_TUNER_FILE) is None:
        store.copy(TUNER_FILE, KEPT_TUNER_FILE)
    store.put(TUNER_FILE, cloudpickle.dumps(state))
