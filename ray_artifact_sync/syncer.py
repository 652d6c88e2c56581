"""`ArtifactSyncer`: a Ray `Syncer`, used by `SyncConfig(syncer=...)` and alone."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow.fs
from ray.train._internal.syncer import Syncer

from ray_artifact_sync import progress_bars
from ray_artifact_sync.concurrency import Deadline, Operation, OperationThread
from ray_artifact_sync.directory_sync import DirectorySync, sync_directory_down
from ray_artifact_sync.driver_files import DriverFiles
from ray_artifact_sync.entries import Skip
from ray_artifact_sync.errors import ArtifactSyncError, SyncTimeoutError
from ray_artifact_sync.options import (
    DEFAULT_MAX_CONCURRENCY,
    DEFAULT_RETRIES,
    DEFAULT_SYNC_PERIOD,
    DEFAULT_SYNC_TIMEOUT,
    OnError,
    SyncOptions,
)
from ray_artifact_sync.patterns import FnmatchExclude, Selection
from ray_artifact_sync.progress import Watcher
from ray_artifact_sync.registry import ArtifactRegistry
from ray_artifact_sync.scan import SkipRule, take_all
from ray_artifact_sync.session_log import log_fields
from ray_artifact_sync.state_copies import copy_state
from ray_artifact_sync.stores import ArtifactStore, open_uri

logger = logging.getLogger(__name__)

Patterns = Iterable[str] | str


class ArtifactSyncer(Syncer):  # type: ignore[misc]  # Ray has no type information here
    """Syncs directories with storage: only changes, in parallel, verified, in the background.

    Handed to `configure(run_config, syncer=...)`, it says how a run's artifacts, checkpoints and experiment state
    travel. Alone, it syncs any directory; each file that it writes is whole or absent, and nothing is deleted but by
    `delete`.

    Keeps Ray's contract: `sync_up`, `sync_down` and `delete` start a background operation and return True, or return
    False while one is running; they never raise for a storage error. `wait` raises it.

    Args:
        include: Gitignore-style patterns of the files to sync; none means all.
        exclude: Patterns of the files to leave out; wins over `include`.
        max_concurrency: Requests in flight.
        retries: Further tries of a request that may succeed later (throttling, resets, timeouts).
        history: Keep every version that a retained checkpoint needs, so that restoring it is exact.
        adopt_foreign_artifacts: On restoring another trial's checkpoint (PBT), take its artifacts too.
        on_error: `"warn"`: a failed sync of artifacts is logged and counted; `"raise"`: it fails the trial.
        report_metrics: Add `artifact_sync/...` to every result of a trial, and count in Ray's own metrics (dashboard,
            Prometheus).
        progress: Show a bar for transfers that take more than a few seconds. None: where a terminal shows it, that of
            the driver for its workers; True: in workers always (Ray draws it on the driver); False: never.
        sync_period: Seconds between background syncs, 0 for none; alone, of `sync_up_if_needed`. What is given to
            `configure` or `SyncConfig` goes before this, `sync_timeout` as well.
        sync_timeout: Seconds that one sync may take; None for as long as it takes.
        storage_filesystem: What remote directories are paths on; without it they are URIs or absolute paths.

    Raises:
        ConfigurationError: An option makes no sense; it says which.

    Example:
        ```python
        import os
        from ray_artifact_sync import ArtifactSyncer

        os.makedirs("plots", exist_ok=True)
        with open("plots/loss.svg", "w") as file:
            file.write("<svg/>")
        syncer = ArtifactSyncer(exclude=["*.tmp"])
        assert syncer.sync_up(os.path.abspath("plots"), "s3://bucket/plots")
        syncer.wait()
        ```
    """

    def __init__(
        self,
        *,
        include: Patterns = (),
        exclude: Patterns = (),
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        retries: int = DEFAULT_RETRIES,
        history: bool = True,
        adopt_foreign_artifacts: bool = False,
        on_error: OnError = "warn",
        report_metrics: bool = True,
        progress: bool | None = None,
        sync_period: float = DEFAULT_SYNC_PERIOD,
        sync_timeout: float | None = DEFAULT_SYNC_TIMEOUT,
        storage_filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> None:
        super().__init__(sync_period=sync_period, sync_timeout=sync_timeout)
        self.selection = Selection.of(include=include, exclude=exclude)
        self.max_concurrency = max_concurrency
        self.retries = retries
        self.history = history
        self.adopt_foreign_artifacts = adopt_foreign_artifacts
        self.on_error: OnError = on_error
        self.report_metrics = report_metrics
        self.progress = progress
        self.storage_filesystem = storage_filesystem
        self._on_driver = False
        self._driver_has_terminal = False
        self._registry = ArtifactRegistry.default()
        self._reset_runtime()
        self.options()  # tells bad options now

    progress: bool | None = None  # in experiments of releases that had no bars
    _driver_has_terminal = False
    last_sync_up_time: float
    last_sync_down_time: float

    def _reset_runtime(self) -> None:
        self._thread = OperationThread("artifact-syncer")
        self._lock = threading.Lock()
        self._operation: Operation | None = None
        self._command: Callable[[Deadline], object] | None = None
        self._directories: dict[tuple[str, str], DirectorySync] = {}
        self._driver_files: DriverFiles | None = None

    def options(
        self, *, registry: ArtifactRegistry | None = None, sync_period: float | None = None, **others: Any
    ) -> SyncOptions:
        """The options of a trial's session under this syncer."""
        return SyncOptions(
            selection=self.selection,
            registry=registry if registry is not None else ArtifactRegistry.default(),
            max_concurrency=self.max_concurrency,
            retries=self.retries,
            history=self.history,
            adopt_foreign_artifacts=self.adopt_foreign_artifacts,
            on_error=self.on_error,
            sync_period=self.sync_period if sync_period is None else sync_period,
            sync_timeout=others.pop("sync_timeout", self.sync_timeout),
            **others,
        )

    def watcher(self) -> Watcher | None:
        """Who shows the progress of transfers in this process; None for nobody."""
        return progress_bars.watcher(self.progress, driver_has_terminal=self._driver_has_terminal)

    def bind(
        self,
        storage_filesystem: pyarrow.fs.FileSystem,
        *,
        sync_period: float,
        sync_timeout: float | None,
        registry: ArtifactRegistry,
    ) -> ArtifactSyncer:
        """A copy for one storage context of a run: the driver's experiment state, the whole staging directory."""
        bound = copy.copy(self)
        bound._registry = registry  # noqa: SLF001  (our own copy)
        bound.storage_filesystem = storage_filesystem
        bound.sync_period = sync_period
        bound.sync_timeout = sync_timeout
        bound._on_driver = True  # noqa: SLF001  (our own copy)
        return bound

    # --- Ray's contract ---------------------------------------------------------------------------

    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        """Starts sending what changed in a local directory since the last sync.

        Args:
            local_dir: Local directory.
            remote_dir: A URI (`s3://bucket/dir?endpoint_override=...`, `file://`), an absolute path, or a path on
                `storage_filesystem`.
            exclude: Ray's fnmatch patterns on paths relative to `local_dir`.

        Returns:
            True if it was started, False while another operation runs.
        """
        rule = self._rule(exclude)
        copies: dict[str, str] = {}
        return self._launch(
            lambda deadline: self._sync_up_now(local_dir, remote_dir, rule, copies, deadline),
            prepare=lambda: copies.update(copy_state(os.path.abspath(local_dir))) if self._on_driver else None,
        )

    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        """Starts downloading a remote directory; files that are there already are left alone.

        Args:
            remote_dir: See `sync_up`.
            local_dir: Local directory; created if missing. Files that the remote one does not have stay.
            exclude: Ray's fnmatch patterns.

        Returns:
            True if it was started, False while another operation runs.
        """
        rule = self._rule(exclude)
        return self._launch(
            lambda deadline: sync_directory_down(
                self._open(remote_dir),
                local_dir,
                options=self.options(),
                deadline=deadline,
                rule=rule,
                watcher=None if self._on_driver else self.watcher(),
            )
        )

    def delete(self, remote_dir: str) -> bool:
        """Starts deleting everything below a remote directory.

        Returns:
            True if it was started, False while another operation runs.
        """

        def delete(_deadline: Deadline) -> None:
            store = self._open(remote_dir)
            store.delete([file.path for file in store.list()])

        return self._launch(delete)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the operation that was started last.

        Args:
            timeout: Seconds; `sync_timeout` (which counts from the start) if None.

        Raises:
            ArtifactSyncError: It failed (also: `SyncTimeoutError`). What was sent before is there.
        """
        operation = self._operation
        if operation is None:
            return
        if timeout is not None and not operation.wait_done(timeout):
            raise SyncTimeoutError(f"The sync did not end within {timeout:g} s; it goes on in the background.")
        try:
            operation.wait()
        finally:
            self._operation = None

    def retry(self) -> None:
        """Starts the last operation again."""
        if self._command is None:
            raise ArtifactSyncError("There is nothing to retry: no sync was started yet.")
        self._start(self._command)

    def sync_up_if_needed(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        """Like `sync_up`, if the last one began at least `sync_period` ago; else returns False."""
        now = time.time()
        if now - self.last_sync_up_time < self.sync_period:
            return False
        started = self.sync_up(local_dir, remote_dir, exclude)
        if started:
            self.last_sync_up_time = now
        return started

    def sync_down_if_needed(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        """Like `sync_down`, if the last one began at least `sync_period` ago; else returns False."""
        now = time.time()
        if now - self.last_sync_down_time < self.sync_period:
            return False
        started = self.sync_down(remote_dir, local_dir, exclude)
        if started:
            self.last_sync_down_time = now
        return started

    def close(self) -> None:
        """Lets the background thread end when its work is done."""
        self._thread.close()

    # --- inside -----------------------------------------------------------------------------------

    def _rule(self, exclude: list[str] | None) -> SkipRule:
        patterns = FnmatchExclude.of(*exclude) if exclude else None
        # On the driver, `include` and `exclude` are about artifacts; its own files all count.
        selection = None if self._on_driver else self.selection
        if patterns is None and selection is None:
            return take_all

        def rule(path: str, is_dir: bool) -> Skip | None:
            if patterns is not None and (pattern := None if is_dir else patterns.matches(path)):
                return Skip(path, f"matches exclude {pattern!r}", "excluded")
            if selection is not None:
                reason = selection.reason_to_prune(path) if is_dir else selection.reason_to_skip(path)
                if reason:
                    return Skip(path, reason, "excluded")
            return None

        return rule

    def _open(self, remote_dir: str) -> ArtifactStore:
        return open_uri(remote_dir, self.storage_filesystem)

    def _sync_up_now(
        self, local_dir: str, remote_dir: str, rule: SkipRule, copies: Mapping[str, str], deadline: Deadline
    ) -> None:
        key = (os.path.abspath(local_dir), str(remote_dir).rstrip("/"))
        if self._on_driver and self._driver_files is None:
            _warn_without_callback()
            self._driver_files = DriverFiles(key[0], self._registry, max_concurrency=self.max_concurrency)
        directory = self._directories.get(key)
        if directory is None:
            directory = self._directories[key] = DirectorySync(
                key[0],
                self._open(key[1]),
                options=self.options(),
                verify_remote=not self._on_driver,
                shared=self._driver_files,
                watcher=None if self._on_driver else self.watcher(),
            )
        if self._driver_files is not None:
            rule = self._driver_files.sync_rule(rule)
            directory.forget(self._driver_files.before_sync(directory.store.below, directory.stored, deadline))
        directory.sync_up(deadline, rule, elsewhere=copies)

    def _launch(self, command: Callable[[Deadline], object], *, prepare: Callable[[], None] = lambda: None) -> bool:
        with self._lock:
            operation = self._operation
            if operation is not None and not operation.done():
                return False
            if operation is not None:
                try:
                    operation.wait()
                except Exception as error:
                    logger.warning(
                        "The last sync failed, and nobody waited for it: %s",
                        error,
                        extra=log_fields("directory_sync_failed", error=type(error).__name__, message=str(error)),
                    )
            prepare()
            self._start(command)
            return True

    def _start(self, command: Callable[[Deadline], object]) -> None:
        self._command = command
        self._operation = self._thread.submit(command, seconds=self.sync_timeout, what="The sync")

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if not progress_bars.in_worker():
            state["_driver_has_terminal"] = progress_bars.terminal_here()  # workers cannot know
        for name in ("_thread", "_lock", "_operation", "_command", "_directories", "_driver_files"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_runtime()


def _warn_without_callback() -> None:
    from ray_artifact_sync.callback import ArtifactSyncCallback  # noqa: PLC0415  (imports all of ray.tune)

    if not ArtifactSyncCallback.active:
        logger.warning(
            "This run has no ArtifactSyncCallback: Ray may end a trial's actor 10 s after the last result, before its "
            "artifacts are in storage. Use `ray_artifact_sync.configure(run_config)`, or add ArtifactSyncCallback() to "
            "RunConfig(callbacks=...).",
            extra=log_fields("no_callback"),
        )
