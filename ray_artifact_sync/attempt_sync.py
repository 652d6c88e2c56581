"""`SyncingAttempt`: what brings artifacts to storage: syncs, the ends of a checkpoint, removing what nobody needs."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from ray_artifact_sync import layout
from ray_artifact_sync.attempt import Attempt
from ray_artifact_sync.concurrency import Deadline, Pacer, run_all
from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactSyncError,
    IncompleteSyncError,
    ManifestError,
    StorageError,
)
from ray_artifact_sync.manifest import ManifestStack
from ray_artifact_sync.sync_up import MirrorReplacedError, SyncPass, SyncReport
from ray_artifact_sync.trial_dir import CONFLICT_TRIES

logger = logging.getLogger(__name__)

LIST_PAGE = 1000
"""Entries that one request of a listing gives on object stores."""
SPARE_FILES = 100
SPARE_BYTES = 64 * 1024 * 1024
"""Preserved copies that only a head needed which was replaced since wait for the next checkpoint, unless there are so
many: a trial that never checkpoints must not pile them up, and not every sync must pay for a deletion."""


class SyncingAttempt(Attempt):
    """An attempt that can bring its working dir's artifacts to storage."""

    _spare_files = _spare_bytes = 0

    def _sync_reported(self, deadline: Deadline) -> SyncReport:
        self._restore_may_come = False
        report = self._sync(deadline)
        if report.failures:
            raise self._incomplete(report)
        return report

    def _last_sync(self, deadline: Deadline) -> None:
        self._open(deadline)
        if self._awaits_restore:
            return  # `setup()` failed
        if not self._writer.is_protected:
            with suppress(StorageError):
                self._read_note()
        self._sync_reported(deadline)
        if self._is_untidy():
            # Ray deletes the checkpoints beyond `num_to_keep` only after a save: the last ones are seen here.
            self._tidy(deadline, list_checkpoints=True)

    def _is_untidy(self) -> bool:
        """Whether there may be something that only the end of the attempt removes."""
        return bool(self._known.objects(self.token) or self._stale_journal())

    def _sync_for_checkpoint(self, deadline: Deadline) -> ManifestStack:
        self._sync_reported(deadline)
        self._known.in_flight = self._known.stack  # pinned until the snapshot is written
        return self._known.stack

    def _sync(self, deadline: Deadline, pacer: Pacer | None = None) -> SyncReport:
        started = time.monotonic()
        self._open(deadline)
        known = self._known
        before, requests, retries = known.stack, self._engine.requests, self._engine.retries_made
        if self._half_restored:
            raise ArtifactSyncError(
                "The last restore did not complete, so that the working dir is a mix of versions; nothing is synced "
                "from it until one does."
            )
        with self._exclusive(deadline):
            self._request(self._check_writer, deadline, "Looking at the claim")
            self._leave_to_driver()
            try:
                report = self._send_changes(deadline, pacer)
            finally:
                self.stats.seconds += time.monotonic() - started
            known = self._known
            report = self._leave_out_taken(report, deadline)
            self._log.skips(report.skips)
            self._commit(report.manifest, deadline)
            if self._spare_files >= SPARE_FILES or self._spare_bytes >= SPARE_BYTES:
                self._tidy(deadline, list_checkpoints=False)
        self._events.synced(
            report,
            seconds=time.monotonic() - started,
            requests=self._engine.requests - requests,
            retries=self._engine.retries_made - retries,
            committed=known.stack is not before,
        )
        if report.failures:
            self._log.failure(self._incomplete(report))
        else:
            self._log.success(report)
        return report

    def _send_changes(self, deadline: Deadline, pacer: Pacer | None) -> SyncReport:
        """Brings the artifacts to storage; commits nothing."""
        for _ in range(CONFLICT_TRIES - 1):
            with suppress(MirrorReplacedError):
                return self._send_once(deadline, pacer)
        return self._send_once(deadline, pacer)

    def _send_once(self, deadline: Deadline, pacer: Pacer | None) -> SyncReport:
        known = self._known
        kept = len(known.mirror.preserved)
        sync_pass = SyncPass(
            root=self._working_dir.root,
            engine=self._engine,
            mirror=known.mirror,
            cache=self._cache,
            pinned=known.pinned(history=self.options.history),
            unwritten=[known.in_flight.manifest] if known.in_flight is not None else [],
            deadline=deadline,
            rule=self._rule,
            skip_checkpoints=True,
            pacer=pacer,
            prepare=lambda: self._take_over(deadline),
        )
        try:
            report = sync_pass.run()
        finally:
            self.stats.bytes_sent += sync_pass.bytes_sent
            self.stats.files_sent += sync_pass.files_sent
        self._spare_files += len(known.mirror.preserved) - kept
        self._spare_bytes += sync_pass.preserved_bytes
        return report

    def _remove_stale_snapshots(self, name: str, deadline: Deadline) -> None:
        """A reused checkpoint directory must not show an earlier snapshot as that of the new checkpoint."""
        known = self._known
        try:
            self._open(deadline)
            known = self._known
            stale = known.snapshots.get(name, ())
        except ManifestError:  # of a newer release: no reason to lose the checkpoint too
            files = self._request(lambda: self.store.list_files(name), deadline, "Looking for a stale snapshot")
            stale = tuple(file.path for file in files if layout.snapshot_token(file.path.rpartition("/")[2]))
        self._request(self._check_writer, deadline, "Looking at the claim")
        if stale:
            self._request(lambda: self._writer.delete(stale), deadline, "Removing a stale snapshot")
            known.snapshots.pop(name, None)
            known.retained.pop(name, None)

    def _finish_checkpoint(self, name: str, stack: ManifestStack, deadline: Deadline, started: float) -> None:
        known = self._known
        known.retained[name] = stack  # from now on: a request that seems to fail may have landed all the same
        known.snapshots[name] = (f"{name}/{layout.snapshot_name(self.token)}",)
        self._request(lambda: self._writer.write_snapshot(stack, name), deadline, "Writing the snapshot")
        known.in_flight = None
        known.outlive_records(keep_newest=self._registered is not None)
        if self._registered is not None:
            self._registered = max(self._registered, layout.checkpoint_index(name))
        self._tidy(deadline, list_checkpoints=True)
        self._events.checkpointed(name, seconds=time.monotonic() - started, error=None)

    def _tidy(self, deadline: Deadline, *, list_checkpoints: bool) -> None:
        if self._takes_over:
            return  # what looks like garbage may be what a commit under way refers to
        self._spare_files = self._spare_bytes = 0
        try:
            self._request(
                lambda: self._collect_garbage(deadline, list_checkpoints=list_checkpoints), deadline, "Cleaning up"
            )
        except ArtifactConflictError:
            raise
        except Exception as error:
            logger.warning(
                "Old versions in %s could not be removed (next time): %s",
                self.store.description,
                error,
                extra=self._log.fields("cleanup_failed", error=type(error).__name__),
            )

    def _collect_garbage(self, deadline: Deadline, *, list_checkpoints: bool) -> None:
        """Removes what no retained snapshot, no snapshot being written, nothing set aside and no head refers to.

        Args:
            deadline: Ends the work.
            list_checkpoints: Look which checkpoints Ray has deleted meanwhile (a request).
        """
        known = self._known
        if list_checkpoints:
            for name in self._deleted_checkpoints(deadline):
                del known.snapshots[name]
                known.retained.pop(name, None)
        journal = self._stale_journal()
        garbage = [*known.garbage(self.token, self._writer.layers), *journal]
        if garbage:
            known.distrust(garbage)  # the deletion may land, and fail all the same
            self._writer.delete(garbage)
            known.forget(garbage)
            if self._journal is not None:
                self._journal.forget(journal)

    def _deleted_checkpoints(self, deadline: Deadline) -> list[str]:
        """Checkpoints with a snapshot that Ray has deleted: one listing, or a look at each where that is cheaper."""
        snapshots = self._known.snapshots
        at_the_top = sum("/" not in path for path in self._known.mirror.states)
        if self.store.can_fence or at_the_top < LIST_PAGE * len(snapshots):
            there = set(self.store.list_dirs())
            if layout.DRIVER_DIR in there:
                self._read_note()
                self._leave_to_driver()
            return [name for name in snapshots if name not in there]
        gone: list[str] = []

        def look(name: str) -> None:
            if all(self.store.stat(path) is None for path in snapshots[name]):
                gone.append(name)

        run_all(list(snapshots), look, workers=self.options.max_concurrency, deadline=deadline)
        return gone

    def _incomplete(self, report: SyncReport) -> IncompleteSyncError:
        path, error = next(iter(report.failures.items()))
        return IncompleteSyncError(
            f"{len(report.failures)} of {len(report.manifest) + len(report.failures)} artifacts could not be sent to "
            f"{self.store.description}; the first: {path}: {error}",
            failures=report.failures,
        )

    def _stale_journal(self) -> list[str]:
        return self._journal.stale(self._known.inventory.journals) if self._journal is not None else []
