"""`TrialArtifacts`: one attempt of one trial, from its start to its end. Knows nothing of Ray.

Threads: every operation runs in one daemon thread of the session, one after the other; callers wait for theirs, at
most `sync_timeout`. A second daemon thread queues a background sync every `sync_period` while nothing else runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from ray_artifact_sync.attempt_restore import RestoringAttempt
from ray_artifact_sync.concurrency import Deadline, Operation, OperationThread, Pacer
from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactSyncError,
    IncompleteSyncError,
    SyncTimeoutError,
)
from ray_artifact_sync.manifest import ManifestStack
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.progress import Watcher
from ray_artifact_sync.session_events import Observer
from ray_artifact_sync.stores.base import ArtifactStore
from ray_artifact_sync.sync_down import RestoreReport
from ray_artifact_sync.sync_up import SyncReport
from ray_artifact_sync.transfer import TransferEngine
from ray_artifact_sync.trial_dir import TrialDir

logger = logging.getLogger(__name__)

BACKGROUND_SHARE = 0.03
"""Part of the program's time that a background sync of small files may hold the interpreter."""

Result = TypeVar("Result")


class TrialArtifacts(RestoringAttempt):
    """The artifacts of one trial during one attempt.

    Call `begin` before anything is written into the working dir, then any of the others, `close` last. All methods may
    be called from any thread.

    Args:
        working_dir: Local directory that the trial writes into.
        store: Storage, with the trial dir as its root.
        trial: The trial dir's name, or what reads it.
        token: The attempt (see `layout.make_token`); must be larger than those of all earlier attempts.
        options: How to sync.
        registered_checkpoint: Index of the newest checkpoint that counts; directories with a larger one are leftovers
            of a crash between upload and registration. None: all count.
        observer: Is told what the session did; see `session_events.Observer`.
        watcher: Shows the progress of transfers that take long; see `progress.Watcher`.

    Example:
        Inside of a trainable, `self.artifacts` is the session; elsewhere:

        ```python
        import time
        from ray_artifact_sync import TrialArtifacts
        from ray_artifact_sync.layout import make_token
        from ray_artifact_sync.stores import open_uri

        store = open_uri("s3://bucket/session/trial")
        session = TrialArtifacts("working-dir", store, trial="trial", token=make_token(time.time_ns()))
        session.begin()
        with open("working-dir/log.txt", "w") as log:
            log.write("step 1")
        assert session.sync().bytes_sent == 6
        assert session.sync().bytes_sent == 0
        session.close()
        ```
    """

    def __init__(
        self,
        working_dir: str,
        store: ArtifactStore,
        *,
        trial: str | TrialDir,
        token: str,
        options: SyncOptions | None = None,
        registered_checkpoint: int | None = None,
        observer: Observer | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        super().__init__(
            working_dir,
            store,
            trial=trial,
            token=token,
            options=options,
            registered_checkpoint=registered_checkpoint,
            observer=observer,
            watcher=watcher,
        )
        self._thread = OperationThread(f"artifact-sync-{self.trial.name}")
        self._ticker: threading.Thread | None = None
        self._pacer = Pacer(BACKGROUND_SHARE)
        self._stop_ticking = threading.Event()
        self._begun = self._closed = False

    # --- the life of an attempt -------------------------------------------------------------------

    @property
    def working_dir(self) -> str:
        """The local directory."""
        return self._working_dir.root

    def begin(self, *, set_aside: bool = True) -> None:
        """Takes over the working dir, moves leftovers away, and starts the background syncs.

        The claim on storage is made in the background, so that a storage that is down does not keep a trial from
        starting.

        Args:
            set_aside: Move away what is in the working dir: an earlier attempt's.

        Raises:
            ArtifactConflictError: A newer attempt has the working dir.
        """
        if self._begun:
            return
        self._working_dir.begin(self.options.predecessor_wait, set_aside=set_aside)
        self._begun = True
        self._submit(self._open, "Opening the trial dir")
        self._ticker = threading.Thread(target=self._tick, name="artifact-sync-period", daemon=True)
        self._ticker.start()

    def proceed(self) -> None:
        """Says that the first step begins: if no restore came, none will, and background syncs need not wait for it."""
        self._restore_may_come = False

    def sync(self) -> SyncReport:
        """Brings storage up to date with the working dir, and commits the head. Blocks.

        A sync with nothing changed sends nothing.

        Raises:
            ArtifactConflictError: A newer attempt took over; this one must stop.
            IncompleteSyncError: Some files failed; the others are committed.
            SyncTimeoutError: `sync_timeout` passed.
            StorageError: Storage refused the bookkeeping.
        """
        return self._run(self._sync_reported, "The artifact sync")

    def commit_checkpoint(self, name: str, upload: Callable[[TransferEngine], None]) -> bool:
        """Saves a checkpoint: artifacts first, then its own files, then the snapshot inside it, last. Blocks.

        Args:
            name: Checkpoint dir name.
            upload: Uploads the checkpoint's own files; called whether or not the artifacts could be synced. Its errors
                pass through, and there is no snapshot then.

        Returns:
            Whether the checkpoint has a snapshot. False after a failed sync with `on_error="warn"`.

        Raises:
            ArtifactConflictError: A newer attempt took over; nothing was uploaded.
            ArtifactSyncError: The sync failed, with `on_error="raise"` (after the upload).
        """
        started = time.monotonic()
        failure: ArtifactSyncError | None = None
        stack: ManifestStack | None = None
        try:
            stack = self._run(self._sync_for_checkpoint, "The artifact sync", journal=False)
        except ArtifactConflictError:
            raise
        except ArtifactSyncError as error:
            failure = error
        try:
            self._run(
                lambda deadline: self._remove_stale_snapshots(name, deadline),
                "Removing a stale snapshot",
                journal=False,
            )
        except ArtifactConflictError:
            raise
        except SyncTimeoutError as error:  # a request of the sync still hangs: no reason to lose the checkpoint, too
            if not self._opened or name in self._known.snapshots:
                raise
            failure, stack = failure or error, None
        upload(self._engine)  # its requests look at the claim, too
        if stack is not None:
            try:
                self._run(
                    lambda deadline: self._finish_checkpoint(name, stack, deadline, started), "Writing the snapshot"
                )
            except ArtifactConflictError:
                raise
            except ArtifactSyncError as error:
                failure = error
        if failure is None:
            return True
        self._events.checkpointed(name, seconds=time.monotonic() - started, error=failure)
        self._write_journal_later()
        if self.options.on_error == "raise":
            raise failure
        logger.error(
            "Checkpoint %s of %s was saved WITHOUT its artifacts: %s Restoring it will bring back the newest artifacts "
            "that could be saved.",
            name,
            self.trial.name,
            failure,
            extra=self._log.fields("checkpoint_without_artifacts", checkpoint=name, error=type(failure).__name__),
        )
        return False

    def restore(self, checkpoint: str, *, fresh: bool) -> RestoreReport:
        """Makes the working dir's artifacts what they were when one of this trial's checkpoints was saved. Blocks.

        Args:
            checkpoint: Checkpoint dir name.
            fresh: No step was taken since `begin`: local files that the snapshot does not list are this attempt's own
                first outputs, and stay. Otherwise they are moved away.

        Returns:
            What was done; `exact=False` if the checkpoint has no snapshot and the newest artifacts were taken.

        Raises:
            IncompleteSyncError: Content that the snapshot lists could not be read. Where it is proven to be nowhere any
                more, this is raised with `on_error="raise"` only; else it is logged, named in the report's `lost`, and
                the newest version takes its place.
        """
        return self._run(
            lambda deadline: self._noted(checkpoint, lambda: self._restore(checkpoint, deadline, fresh=fresh)),
            f"Restoring the artifacts of {checkpoint}",
        )

    def restore_foreign(self, donor: TrialDir, checkpoint: str, *, fresh: bool) -> RestoreReport:
        """Another trial's checkpoint is taken over (PBT): keeps this trial's own artifacts, or adopts the donor's.

        The own manifest of this moment is recorded, so that a crash right after returns to it.

        Args:
            donor: The other trial's dir.
            checkpoint: The name of its checkpoint.
            fresh: See `restore`.
        """
        name = f"{donor.name}/{checkpoint}"
        return self._run(
            lambda deadline: self._noted(name, lambda: self._restore_foreign(donor, checkpoint, deadline, fresh=fresh)),
            f"Restoring artifacts at {name}",
        )

    def metrics(self) -> dict[str, float]:
        """The totals under the names that results carry them by."""
        return {f"artifact_sync/{name}": value for name, value in asdict(self.stats).items()}

    def close(self, *, flush: bool = True) -> None:
        """Ends the attempt: one last sync, then a successor may begin.

        Raises for a failed sync only with `on_error="raise"`; ends quietly when a newer attempt exists.

        Args:
            flush: Do the last sync.

        Raises:
            ArtifactSyncError: The last sync failed, with `on_error="raise"`.
        """
        if self._closed:
            return
        self._closed = True
        self._stop_ticking.set()
        try:
            if flush and self._begun:
                self._run(self._end, "The last artifact sync")
        except ArtifactConflictError as error:
            logger.info(
                "The last sync of an old attempt was left out: %s", error, extra=self._log.fields("attempt_replaced")
            )
        except ArtifactSyncError:
            if self.options.on_error == "raise":
                raise
        finally:
            self._thread.close()
            self._working_dir.end()

    # --- the thread of the operations ---------------------------------------------------------------

    def _end(self, deadline: Deadline) -> None:
        """The last sync, and the end of the journal; the second also where some files failed."""
        try:
            self._last_sync(deadline)
        except (ArtifactConflictError, SyncTimeoutError):
            raise
        except Exception:
            self._events.closed()
            self._write_journal()
            raise
        self._events.closed()
        self._write_journal()

    def _run(self, call: Callable[[Deadline], Result], what: str, *, journal: bool = True) -> Result:
        """Queues an operation and waits for it.

        Args:
            call: The operation.
            what: For messages.
            journal: Write the journal too, if it is time.
        """

        def call_and_note(deadline: Deadline) -> Result:
            try:
                return call(deadline)
            finally:
                if self._journal is not None and self._journal.is_immediate:
                    self._write_journal()

        operation = self._submit(call_and_note if journal else call, what)
        self._pacer.hurry()  # a background sync may be in the way
        try:
            result: Result = operation.wait()  # type: ignore[assignment]
        except ArtifactConflictError:
            raise
        except SyncTimeoutError as error:
            self._note_failure(error)
            raise
        except IncompleteSyncError:
            raise
        except ArtifactSyncError as error:
            self._note_failure(error)
            raise
        except OSError as error:  # the local side: a full disk, a working dir that is gone
            self._note_failure(error)
            raise ArtifactSyncError(f"{what} failed on this node: {error}") from error
        if journal:
            self._write_journal_later()
        return result

    def _submit(self, call: Callable[[Deadline], object], what: str) -> Operation:
        return self._thread.submit(call, seconds=self.options.sync_timeout, what=what)

    def _tick(self) -> None:
        while not self._stop_ticking.wait(self.options.sync_period or None):
            if not self._thread.idle():
                continue
            try:
                operation = self._submit(self._background_sync, "A background sync")
            except ArtifactSyncError as error:
                self._note_failure(error)
                continue
            while not operation.done() and not self._stop_ticking.wait(0.05):
                pass

    def _background_sync(self, deadline: Deadline) -> None:
        pacer = self._pacer = Pacer(BACKGROUND_SHARE)
        if self._thread.waiting():
            pacer.hurry()
        try:
            self._open(deadline)
            if self._awaits_restore:
                return
            self._sync(deadline, pacer)
        except ArtifactConflictError as error:
            self._stop_ticking.set()
            self._note_failure(error)
        except Exception as error:
            self._note_failure(error)

        if self._journal is not None and self._journal.due():
            self._write_journal()

    def _write_journal(self) -> None:
        """On the operation thread. Never fails: the journal is not worth a sync."""
        if self._journal is None or not self._opened:
            return
        try:
            self._check_writer()
            self._journal.write()
        except Exception as error:
            logger.debug("The journal of %s was not written: %s", self.trial.name, error)

    def _write_journal_later(self) -> None:
        """Queues a write, if it is time, and does not wait for it."""
        if self._journal is not None and self._journal.due() and not self._closed:
            self._submit(lambda _deadline: self._write_journal(), "Writing the journal")

    def __getstate__(self) -> None:
        raise TypeError("TrialArtifacts holds threads and locks of this process and cannot be pickled.")
