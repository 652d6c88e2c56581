"""The seam into Ray: a `StorageContext` that sends checkpoints and artifacts through this library's session.

`Experiment._storage_context_cls` becomes a factory that gives Ray's own class unless the run's `sync_config` has our
syncer, so that merely importing this package changes nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import pyarrow.fs
from ray.train._internal.storage import StorageContext

from ray_artifact_sync import layout
from ray_artifact_sync.checkpoint_upload import upload_checkpoint
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.errors import ArtifactConflictError, ArtifactSyncError, ConfigurationError, StorageError
from ray_artifact_sync.metrics import SyncMetrics
from ray_artifact_sync.session import TrialArtifacts
from ray_artifact_sync.stores import ArtifactStore, open_store
from ray_artifact_sync.syncer import ArtifactSyncer
from ray_artifact_sync.transfer import TransferEngine, call_with_retries
from ray_artifact_sync.trial_dir import TrialDir

logger = logging.getLogger(__name__)

_TRANSIENT = ("_session", "_session_over", "_checkpoint_just_saved", "_bound_syncer")


class ArtifactStorageContext(StorageContext):  # type: ignore[misc]  # Ray has no type information here
    """Ray's storage context, with the checkpoint and artifact paths going through `TrialArtifacts`.

    On the driver it only issues tokens and syncs the experiment state. In a trial's actor it owns the session. In the
    workers of Ray Train V1 it uploads checkpoint files and nothing else.
    """

    _session: TrialArtifacts | None = None
    _session_over = False
    _checkpoint_just_saved = False
    _bound_syncer: ArtifactSyncer | None = None
    _token_value = 0

    @classmethod
    def adopting(cls, context: StorageContext, sync_config: Any) -> ArtifactStorageContext:
        """A context for the same place as another one, under one of our sync configurations.

        Args:
            context: Of a trial that was restored from an earlier run: Ray's own, or one of ours with other options.
            sync_config: A `SyncConfig` with a syncer.
        """
        adopted = cls.__new__(cls)
        adopted.__dict__.update(
            (name, value) for name, value in context.__dict__.items() if name not in ("syncer", *_TRANSIENT)
        )
        adopted.sync_config = sync_config
        return adopted

    # --- what Ray reads ---------------------------------------------------------------------------

    @property
    def syncer(self) -> ArtifactSyncer:
        """The run's syncer for this context's filesystem as it is now (`Tuner.restore` replaces it)."""
        bound = self._bound_syncer
        if bound is None or bound.storage_filesystem is not self.storage_filesystem:
            bound = self._bound_syncer = self.sync_config.syncer.bind(
                self.storage_filesystem,
                sync_period=self.sync_config.sync_period,
                sync_timeout=self.sync_config.sync_timeout,
                registry=self.sync_config.registry,
            )
        return bound

    @syncer.setter
    def syncer(self, value: object) -> None:
        """Ray's constructor assigns its own syncer; it is not used."""

    def persist_current_checkpoint(self, checkpoint: Any) -> Any:
        """Saves a checkpoint: artifacts, the checkpoint's files, the snapshot. Blocks.

        Raises:
            ArtifactSyncError: The checkpoint's files were refused; there is no checkpoint.
        """
        self._check_marker()
        name, target = self.checkpoint_dir_name, self.checkpoint_fs_path

        def upload(engine: TransferEngine) -> None:
            if not self._is_persisted_already(checkpoint, target):
                upload_checkpoint(open_store(checkpoint.filesystem, checkpoint.path), engine, name, Deadline())

        session = self.session() if self.sync_config.sync_artifacts_on_checkpoint else None
        if session is None:
            upload(TransferEngine(self.trial_store(), **self._engine_options()))
        else:
            session.commit_checkpoint(name, upload)
            self._checkpoint_just_saved = True
        return checkpoint.__class__(filesystem=self.storage_filesystem, path=target)

    def persist_artifacts(self, force: bool = False) -> None:
        """Syncs the artifacts now (`force`), except right after a checkpoint that brought them along.

        Without `force` there is nothing to do: the session syncs every `sync_period` by itself.
        """
        session = self.session()
        if session is None or not force:
            return
        if self._checkpoint_just_saved:
            self._checkpoint_just_saved = False
            return
        try:
            session.sync()
        except ArtifactConflictError:
            raise
        except ArtifactSyncError:
            if session.options.on_error == "raise":
                raise

    def _check_marker(self) -> None:
        """Ray's check that this node sees the run's storage; a moment without it is no reason to lose the checkpoint.

        Raises:
            RuntimeError: The node has no access to it, says Ray.
            StorageError: Storage cannot be reached.
        """

        def check() -> None:
            try:
                self._check_validation_file()
            except OSError as error:
                raise StorageError(f"The run's storage cannot be reached: {error}", retryable=True) from error

        syncer = self.sync_config.syncer
        call_with_retries(check, retries=syncer.retries, deadline=Deadline(), what="Looking for the run's storage")

    # --- the session ------------------------------------------------------------------------------

    def session(self, *, set_aside: bool = False) -> TrialArtifacts | None:
        """The trial's session in this process, begun when first asked for.

        Args:
            set_aside: Move away what an earlier attempt left in the working dir. Only right before the trainable
                writes anything.

        Returns:
            None where nothing is to be synced: `sync_artifacts=False`, in a worker of Ray Train V1, or after
            `end_session` (Ray's function session still knows the old context when an actor is reset).
        """
        if not self.sync_config.sync_artifacts or self._session_over or _in_train_worker():
            return None
        if self._session is None:
            if not set_aside:
                logger.warning(
                    "The artifacts of %s are uploaded, but a restore will not bring them back: derive the trainable "
                    "from ArtifactSyncMixin, or wrap the function in with_artifacts(...).",
                    self.trial_dir_name,
                )
            self._session = TrialArtifacts(
                self.trial_working_directory,
                self.trial_store(),
                trial=self.trial_dir_name,
                token=layout.make_token(self._token_value or time.time_ns()),
                options=self.sync_config.syncer.options(
                    registry=self.sync_config.registry,
                    sync_period=self.sync_config.sync_period,
                    sync_timeout=self.sync_config.sync_timeout,
                ),
                registered_checkpoint=self.current_checkpoint_index,
                observer=SyncMetrics(self.experiment_dir_name) if self.sync_config.syncer.report_metrics else None,
                watcher=self.sync_config.syncer.watcher(),
            )
            self._session.begin(set_aside=set_aside)
        return self._session

    def end_session(self) -> None:
        """Flushes and ends the session, if there is one."""
        session, self._session, self._session_over = self._session, None, True
        if session is not None:
            session.close()

    def trial_store(self) -> ArtifactStore:
        """The trial dir as a store."""
        return open_store(self.storage_filesystem, self.trial_fs_path)

    def locate_checkpoint(self, checkpoint: Any) -> tuple[TrialDir | None, str]:
        """Whose checkpoint it is.

        Returns:
            The trial dir that it lies in (None if that is this trial's own), and its name.
        """
        parent, _, name = checkpoint.path.rstrip("/").rpartition("/")
        if parent.strip("/") == self.trial_fs_path.strip("/"):
            return None, name
        return TrialDir(open_store(checkpoint.filesystem, parent), parent.rpartition("/")[2]), name

    def _engine_options(self) -> dict[str, Any]:
        syncer = self.sync_config.syncer
        return {
            "max_concurrency": syncer.max_concurrency,
            "retries": syncer.retries,
            "watcher": syncer.watcher(),
            "what": self.trial_dir_name or self.experiment_dir_name,
        }

    def _is_persisted_already(self, checkpoint: Any, target: str) -> bool:
        """Whether the user reports the very directory that it would be copied to."""
        same_path = checkpoint.path.strip("/") == target.strip("/")
        return same_path and bool(checkpoint.filesystem.equals(self.storage_filesystem))

    # --- tokens -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """The pickled state; each one carries a new, larger token.

        Ray pickles the context for every actor that it starts or resets, and nothing else has to be told about
        attempts. (It also copies and snapshots it; tokens may have gaps.) The wall clock makes tokens increase over
        restarts of the driver, the last one issued makes them increase within it.
        """
        self._token_value = max(self._token_value + 1, time.time_ns())
        return {name: value for name, value in self.__dict__.items() if name not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _in_train_worker() -> bool:
    """Whether this process is a worker of Ray Train V1, several of which share one trial dir."""
    try:
        from ray.train._internal.session import get_session  # noqa: PLC0415  (moves between releases)

        session = get_session()
    except ImportError:
        return False
    return session is not None and getattr(session, "world_rank", None) is not None


# --- the factory ----------------------------------------------------------------------------------


def install() -> None:
    """Makes Ray Tune ask us for storage contexts; does nothing the second time."""
    from ray.tune.experiment import Experiment  # noqa: PLC0415  (imports all of ray.tune)

    present = Experiment._storage_context_cls  # noqa: SLF001  (the seam)
    if getattr(present, "_ray_artifact_sync", False):
        return
    Experiment._storage_context_cls = staticmethod(_factory_over(present))  # noqa: SLF001


def _factory_over(ray_class: type) -> Callable[..., Any]:
    def make_storage_context(*args: Any, **kwargs: Any) -> Any:
        syncer = getattr(kwargs.get("sync_config"), "syncer", None)
        if not isinstance(syncer, ArtifactSyncer):
            return ray_class(*args, **kwargs)
        _check_filesystem(kwargs.get("storage_filesystem"))
        context = ArtifactStorageContext(*args, **kwargs)
        _check_place(context)
        return context

    make_storage_context._ray_artifact_sync = True  # type: ignore[attr-defined]  # noqa: SLF001
    return make_storage_context


def _check_filesystem(filesystem: pyarrow.fs.FileSystem | None) -> None:
    """Tells an unpicklable filesystem now instead of in every worker."""
    if filesystem is None:
        return
    from ray import cloudpickle  # noqa: PLC0415

    try:
        cloudpickle.dumps(filesystem)
    except Exception as error:
        raise ConfigurationError(
            f"RunConfig(storage_filesystem={filesystem!r}) cannot be pickled ({error}), so no worker could use it. "
            "Give a filesystem whose handler can be pickled: it should keep options, and connect when it is used."
        ) from error


def _check_place(context: ArtifactStorageContext) -> None:
    """A storage path inside the working dirs would sync itself."""
    if not isinstance(context.storage_filesystem, pyarrow.fs.LocalFileSystem):
        return
    # <session>/artifacts/<time>/<experiment>/working_dirs/<trial>: this experiment's, or an earlier one's.
    runs = os.path.dirname(os.path.dirname(context._get_session_path()))  # noqa: SLF001
    storage = os.path.abspath(context.storage_fs_path)
    if storage.startswith(f"{runs}/") and "working_dirs" in storage[len(runs) :].split("/"):
        raise ConfigurationError(
            f"RunConfig(storage_path={storage!r}) lies inside the trials' working dirs (below {runs}); their "
            "artifacts would be synced into themselves. Choose another storage_path."
        )
