"""`ArtifactSyncMixin`: a class Trainable whose artifacts are saved, flushed and restored with it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ray.train._internal.storage import StorageContext

from ray_artifact_sync.errors import ArtifactConflictError, ArtifactSyncError, ConfigurationError
from ray_artifact_sync.storage_context import ArtifactStorageContext

if TYPE_CHECKING:
    from ray_artifact_sync.session import TrialArtifacts

logger = logging.getLogger(__name__)


class ArtifactSyncMixin:
    """Put it before `tune.Trainable` in the bases; nothing else changes.

        class MyTrainable(ArtifactSyncMixin, tune.Trainable): ...

    Whatever the trainable writes into its working dir (its cwd, by default) is an artifact: saved with each checkpoint,
    synced in the background, flushed at the end (also after `cleanup()` and after a step that raises), and restored to
    what it was at the checkpoint before `load_checkpoint()` is called. Files that `setup()` opens stay usable over the
    restore.

    Only active in a run whose `SyncConfig` has an `ArtifactSyncer`; elsewhere (also outside Tune) it does nothing.

    Raises:
        ConfigurationError: It stands after `tune.Trainable` in the bases; told when the class is defined.
        ArtifactSyncError: A sync failed, with `ArtifactSyncer(on_error="raise")`; the trial fails then.

    Example:
        ```python
        from ray import tune
        from ray_artifact_sync import ArtifactSyncMixin


        class Training(ArtifactSyncMixin, tune.Trainable):
            def setup(self, config):
                self.log = open("log.txt", "a", buffering=1)

            def step(self):
                print(f"step {self.iteration + 1}", file=self.log)
                return {"done": self.iteration + 1 == 8}

            def save_checkpoint(self, checkpoint_dir): ...

            def load_checkpoint(self, checkpoint_dir): ...
        ```
    """

    _artifact_storage: ArtifactStorageContext | None = None
    _artifact_fresh = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[: cls.__mro__.index(ArtifactSyncMixin)]:
            if base.__module__ == "ray.tune.trainable.trainable" and base.__name__ == "Trainable":
                raise ConfigurationError(
                    f"{cls.__name__} names ArtifactSyncMixin after tune.Trainable, where it has no effect. Write: "
                    f"class {cls.__name__}(ArtifactSyncMixin, tune.Trainable)."
                )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._begin_artifacts(args, kwargs)
        super().__init__(*args, **kwargs)

    @property
    def artifacts(self) -> TrialArtifacts | None:
        """This trial's session, or None where artifacts are not synced."""
        return self._artifact_storage.session() if self._artifact_storage is not None else None

    # --- Ray's life cycle -------------------------------------------------------------------------

    def train(self) -> Any:
        """Runs a step; flushes the artifacts if it raises or was the last one."""
        artifacts = self.artifacts
        self._artifact_fresh = False
        if artifacts is not None:
            artifacts.proceed()
        try:
            result = super().train()  # type: ignore[misc]
        except Exception:
            self._flush_artifacts("after a step that raised")
            raise
        if artifacts is None or not isinstance(result, dict) or "__duplicate__" in result:
            return result
        if result.get("done"):
            self._flush_artifacts("with the last result")
        if self._artifact_storage is not None and self._artifact_storage.sync_config.syncer.report_metrics:
            result.update(artifacts.metrics())
        return result

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Saves a checkpoint with its artifacts."""
        self._flush_log_files()
        return super().save(*args, **kwargs)  # type: ignore[misc]

    def restore(self, checkpoint_path: Any) -> Any:
        """Restores the artifacts as of the checkpoint, then the trainable."""
        storage, artifacts = self._artifact_storage, self.artifacts
        if storage is not None and artifacts is not None:
            checkpoint = getattr(checkpoint_path, "checkpoint", checkpoint_path)
            if hasattr(checkpoint, "filesystem"):
                donor, name = storage.locate_checkpoint(checkpoint)
                if donor is None:
                    artifacts.restore(name, fresh=self._artifact_fresh)
                else:
                    artifacts.restore_foreign(donor, name, fresh=self._artifact_fresh)
        return super().restore(checkpoint_path)  # type: ignore[misc]

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the old trial's artifacts before the actor turns to a new trial (`reuse_actors=True`)."""
        self._end_artifacts()
        self._begin_artifacts(args, kwargs)
        return super().reset(*args, **kwargs)  # type: ignore[misc]

    def stop(self) -> None:
        """Stops the trainable, then flushes what `cleanup()` wrote too."""
        try:
            super().stop()  # type: ignore[misc]
        finally:
            self._end_artifacts()

    def flush_artifacts(self) -> None:
        """Syncs now. Called by the driver before it lets the actor go; may be called by the trainable too."""
        self._flush_artifacts("on request")

    # --- inside -----------------------------------------------------------------------------------

    def _begin_artifacts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # By type: the signatures of Ray's `__init__` and `reset` differ between releases.
        storage = next((value for value in (*args, *kwargs.values()) if isinstance(value, StorageContext)), None)
        self._artifact_storage = None
        self._artifact_fresh = True
        if isinstance(storage, ArtifactStorageContext):
            self._artifact_storage = storage
            storage.session(set_aside=True)
        elif storage is not None:
            logger.warning(
                "%s has ArtifactSyncMixin, but the run's sync_config has no ArtifactSyncer: its artifacts are NOT "
                "synced. Use `ray_artifact_sync.configure(run_config)`.",
                type(self).__name__,
            )

    def _end_artifacts(self) -> None:
        if self._artifact_storage is not None:
            self._flush_log_files()
            self._artifact_storage.end_session()

    def _flush_artifacts(self, when: str) -> None:
        artifacts = self.artifacts
        if artifacts is None:
            return
        self._flush_log_files()
        try:
            artifacts.sync()
        except ArtifactConflictError as error:
            logger.warning("The artifacts were not flushed %s: %s", when, error)
        except ArtifactSyncError:
            if artifacts.options.on_error == "raise":
                raise

    def _flush_log_files(self) -> None:
        """Ray's `log_to_file` streams are files of the working dir with a buffer in this process."""
        for name in ("_stdout_fp", "_stderr_fp"):
            stream = getattr(self, name, None)
            if stream is not None and not stream.closed:
                stream.flush()
