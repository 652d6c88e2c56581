"""`ArtifactSyncCallback`: on the driver, keeps Ray from ending an actor before its artifacts are in storage."""

from __future__ import annotations

import copy
import logging
import time
from typing import TYPE_CHECKING, Any

from ray.tune import Callback

from ray_artifact_sync.storage_context import ArtifactStorageContext

if TYPE_CHECKING:
    from ray.tune.experiment import Trial
    from typing_extensions import Self

    from ray_artifact_sync.config import SyncConfig

logger = logging.getLogger(__name__)


class ArtifactSyncCallback(Callback):  # type: ignore[misc]  # Ray has no type information here
    """Waits for the trials' last syncs before an experiment ends.

    In the middle of a run, Ray gives a stopping actor 600 s (`TUNE_FORCE_TRIAL_CLEANUP_S`), but at the end of an
    experiment only 10 s, which cannot be changed. So every completed trial is asked to flush, and when the last running
    trial completes, the driver waits for all of these flushes. What `cleanup()` writes after that still has the 10 s.

    Args:
        timeout: Seconds to wait at most. Then it says which trials are late, and the experiment ends.

    Example:
        `configure` adds one. By hand:

        ```python
        from ray import tune
        from ray_artifact_sync import ArtifactSyncCallback, ArtifactSyncer, SyncConfig

        run_config = tune.RunConfig(
            callbacks=[ArtifactSyncCallback(timeout=600)], sync_config=SyncConfig(syncer=ArtifactSyncer())
        )
        ```
    """

    active = False
    """Whether some experiment of this process has one."""

    def __init__(self, timeout: float = 1800.0) -> None:
        self.timeout = timeout
        self._pending: dict[str, Any] = {}
        self._sync_config: SyncConfig | None = None
        self._to_adopt = False

    def adopting(self, sync_config: SyncConfig) -> Self:
        """The same callback, which takes restored trials over into a sync configuration (see `restore_tuner`).

        Ray restores a trial with the storage context that it was pickled with, and gives neither the run's
        `sync_config` nor the context's class a say. A callback is asked before the first of them is started.
        """
        callback = copy.copy(self)
        callback._sync_config = sync_config  # noqa: SLF001  (our own)
        return callback

    def setup(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002  (Ray's signature)
        """Ray calls this when an experiment begins."""
        ArtifactSyncCallback.active = True
        self._to_adopt = self._sync_config is not None

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:  # noqa: ARG002
        """Before the first step, all restored trials are there, and none is running. Later ones are ours already."""
        if not self._to_adopt:
            return
        self._to_adopt = False
        for trial in trials:
            trial.set_storage(ArtifactStorageContext.adopting(trial.storage, self._sync_config))

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:  # noqa: ARG002
        """Asks the trial's actor to flush; waits for all flushes if no other trial is running."""
        actor = trial.temporary_state.ray_actor
        flush = getattr(actor, "flush_artifacts", None) if actor is not None else None
        if flush is not None:
            self._pending[trial.trial_id] = flush.remote()
        if all(other.is_finished() or other is trial for other in trials):
            self._wait()

    def _wait(self) -> None:
        import ray  # noqa: PLC0415

        ends = time.monotonic() + self.timeout
        for trial_id, reference in self._pending.items():
            try:
                ray.get(reference, timeout=max(0.0, ends - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                logger.warning("Trial %s did not flush its artifacts within %g s.", trial_id, self.timeout)
            except Exception as error:
                logger.info("Trial %s could not flush its artifacts: %s", trial_id, error)
        self._pending.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": {}, "_to_adopt": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_sync_config": None, "_to_adopt": False, **state})
