"""`TrialArtifacts`: one attempt of one trial, from its start to its end. Knows nothing of Ray.

Threads: every operation runs in one daemon thread of the session, one after the other; callers wait for theirs, at
most `sync_timeout`. A second daemon thread queues a background sync every `sync_period` while nothing else runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import TypeVar

from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, Operation, OperationThread, Pacer, run_all
from ray_artifact_sync.driver_note import TakenPaths, read_note, reason, save_version
from ray_artifact_sync.entries import Manifest, Skip
from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactSyncError,
    IncompleteSyncError,
    ManifestError,
    PathTakenError,
    StorageError,
    SyncTimeoutError,
    UnknownFormatError,
)
from ray_artifact_sync.journal_files import JournalWriter
from ray_artifact_sync.known_storage import KnownStorage, state_from_listing
from ray_artifact_sync.manifest import ManifestStack
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.plan import pinned_versions
from ray_artifact_sync.progress import Watcher
from ray_artifact_sync.scan import HashCache
from ray_artifact_sync.session_events import Observer, SessionEvents
from ray_artifact_sync.session_log import SessionLog, SyncStats
from ray_artifact_sync.stores.base import ArtifactStore
from ray_artifact_sync.sync_down import RestorePass, RestoreReport
from ray_artifact_sync.sync_up import MirrorReplacedError, SyncPass, SyncReport
from ray_artifact_sync.transfer import TransferEngine, call_with_retries
from ray_artifact_sync.trial_dir import CONFLICT_TRIES, TrialDir, TrialWriter
from ray_artifact_sync.working_dir import WorkingDir

logger = logging.getLogger(__name__)

BACKGROUND_SHARE = 0.03
"""Part of the program's time that a background sync of small files may hold the interpreter."""

SPARE_FILES = 100
SPARE_BYTES = 64 * 1024 * 1024
"""Preserved copies that only a head needed which was replaced since wait for the next checkpoint, unless there are so
many: a trial that never checkpoints must not pile them up, and not every sync must pay for a deletion."""

Result = TypeVar("Result")


class TrialArtifacts:
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
        self.options = options or SyncOptions()
        self.token = token
        self.store = store
        self.trial = trial if isinstance(trial, TrialDir) else TrialDir(store, trial)
        self.stats = SyncStats()
        self._working_dir = WorkingDir(working_dir, token)
        self._writer = TrialWriter(self.trial, token)
        self._registered = registered_checkpoint
        self._engine = TransferEngine(
            store,
            token=token,
            max_concurrency=self.options.max_concurrency,
            retries=self.options.retries,
            before_write=self._check_writer,
            confirm_writer=self._writer.confirm,
            confirm_path=self._confirm_path,
            watcher=watcher,
            what=self.trial.name,
        )
        self._thread = OperationThread(f"artifact-sync-{self.trial.name}")
        self._watcher = watcher
        self._ticker: threading.Thread | None = None
        self._pacer = Pacer(BACKGROUND_SHARE)
        self._stop_ticking = threading.Event()
        self._cache = HashCache()
        self._known = KnownStorage()
        self._patience = self.options.predecessor_wait
        self._half_restored = False
        self._takes_over = False  # a commit of the attempt before may be under way, until the head is this one's
        self._restore_may_come = True
        self._unlisted = self._learned = False
        self._taken = self._given_up = TakenPaths()
        self._spare_files = self._spare_bytes = 0
        self._begun = self._closed = self._opened = False
        self._log = SessionLog(
            self.trial.name, store.description, token=token, history=self.options.history, stats=self.stats
        )
        self._journal = JournalWriter(store, token) if self.options.journal else None
        self._events = SessionEvents(self.trial.name, token, journal=self._journal, observer=observer)

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
        self._run(
            lambda deadline: self._remove_stale_snapshots(name, deadline), "Removing a stale snapshot", journal=False
        )
        upload(self._engine)
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

    # --- operations (all on the operation thread) --------------------------------------------------

    def _open(self, deadline: Deadline) -> None:
        """Claims the trial dir and learns what is there; once, again after a failure."""
        if self._opened:
            return
        existed = self._request(self._writer.claim, deadline, "Claiming the trial dir")
        # With a checkpoint but without a claim, the trial began without this library: what is there is all there is.
        with_checkpoint = self._registered is not None and self._registered >= 0
        if existed or with_checkpoint:
            self._look_around(deadline)
        elif not self._writer.is_protected:
            self._request(self._read_note, deadline, "Looking for the driver's note")
            self._writer.saw_head(None)
        else:
            self._writer.saw_head(None)
        self._unlisted = with_checkpoint and self._known.headless and bool(self._known.mirror.unlisted)
        self._takes_over = existed and not self.store.can_fence
        self._opened = True
        self._events.begun(self._known.stack.manifest)

    @property
    def _awaits_restore(self) -> bool:
        """Whether nothing may be written yet.

        Nothing pins what no manifest lists: what `setup()` writes must not replace it before it was restored.
        """
        return self._unlisted and self._restore_may_come

    def _look_around(self, deadline: Deadline) -> None:
        self._known = self._request(lambda: self._learn(deadline), deadline, "Listing the trial dir")
        self._learned = True
        if self.store.can_precondition:
            # After the look: none of the tags that it saw must be those of a newer attempt.
            self._request(self._writer.confirm, deadline, "Looking who is the writer")
        self._writer.saw_head(self._known.inventory.head_etag)

    def _take_over(self, deadline: Deadline) -> None:
        """Before the first write after another attempt: makes the head this attempt's own, where no fence does that.

        Raises:
            MirrorReplacedError: The other one has committed meanwhile; storage was looked at anew.
        """
        if not self._takes_over:
            return
        if not self._request(
            lambda: self._writer.take_over_head(self._known.stack), deadline, "Taking over the newest manifest"
        ):
            self._look_around(deadline)
            raise MirrorReplacedError(f"The manifest of {self.store.description} changes again and again.")
        self._takes_over = False

    def _learn(self, deadline: Deadline) -> KnownStorage:
        inventory = self.trial.inventory()
        if inventory.driver_note:
            self._read_note()
        found = self._head()
        head = found or ManifestStack()
        known = KnownStorage(stack=head, inventory=inventory, headless=found is None)
        counted = [
            name
            for name in inventory.snapshots
            if self._registered is None or layout.checkpoint_index(name) <= self._registered
        ]

        def load(name: str) -> None:
            snapshot = self.trial.snapshot(name, inventory.snapshots[name])
            if snapshot is not None:
                known.retained[name] = snapshot

        def load_exploit(key: str) -> None:
            stack = self.trial.exploit(key)
            if stack is not None:
                known.exploits[key] = stack

        run_all(counted, load, workers=self.options.max_concurrency, deadline=deadline)
        run_all(inventory.exploits, load_exploit, workers=self.options.max_concurrency, deadline=deadline)
        known.unregistered = frozenset(inventory.snapshots.keys() - set(counted))
        written = inventory.head_mtime_ns
        for manifest in known.pinned(history=self.options.history):
            for path in manifest.entries:
                if path in inventory.files and path not in known.mirror.states:
                    known.mirror.states[path] = state_from_listing(inventory, path, head.manifest.get(path), written)
        unlisted = [path for path in inventory.files if path not in known.mirror.states]
        known.mirror.unlisted = frozenset(path for path in unlisted if self._rule(path, False) is None)
        for path in known.mirror.unlisted:
            known.mirror.states[path] = state_from_listing(inventory, path, None, written)
        for path in head.displaced & known.mirror.states.keys():
            known.mirror.states[path] = replace(known.mirror.states[path], digest=None)
        known.mirror.head = head.manifest
        referenced = known.referenced_digests()
        known.trusted = {digest for digest in inventory.objects if digest in referenced}
        known.mirror.preserved = set(known.trusted)
        return known

    def _head(self) -> ManifestStack | None:
        """The head; none in place of a damaged one, of which a copy is kept: checkpoints do not depend on it."""
        try:
            return self.trial.head()
        except UnknownFormatError:
            raise
        except ManifestError as error:
            copy = f"{layout.ASIDE}/{self.token}/damaged.json"
            logger.error(  # noqa: TRY400  (no traceback: the message says it)
                "%s Going on without the list of the newest artifacts (it is kept as %s); those of checkpoints do not "
                "depend on it.",
                error,
                self.trial.describe(copy),
                extra=self._log.fields("head_damaged", kept_as=copy),
            )
            with suppress(ArtifactSyncError):  # a copy for people; reading needs no write access
                self.store.copy(layout.MANIFEST, copy)
            return None

    def _sync_reported(self, deadline: Deadline) -> SyncReport:
        self._restore_may_come = False
        report = self._sync(deadline)
        if report.failures:
            raise self._incomplete(report)
        return report

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

    def _commit(self, manifest: Manifest, deadline: Deadline) -> None:
        """Makes a manifest the head, if it differs."""
        known = self._known
        if known.uncertain is None and manifest.same_content(known.stack.manifest):
            return
        self._request(lambda: self._commit_now(Manifest(manifest.entries, self.token)), deadline, "Committing")

    def _commit_now(self, manifest: Manifest) -> None:
        known = self._known
        if not known.aside_written and len(known.found.manifest) and known.stack is known.found:
            self._writer.write_record(layout.aside_path(self.token), known.found)
            known.aside_written = True
        stack = replace(self._writer.advance(known.stack, manifest), displaced=known.displaced(manifest))
        known.uncertain = stack  # a commit that seems to fail may have landed all the same
        self._writer.commit_head(stack)
        known.stack, known.uncertain = stack, None
        known.mirror.head = manifest
        self._takes_over = False

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
            self._request(lambda: self._collect_garbage(list_checkpoints=list_checkpoints), deadline, "Cleaning up")
        except ArtifactConflictError:
            raise
        except Exception as error:
            logger.warning(
                "Old versions in %s could not be removed (next time): %s",
                self.store.description,
                error,
                extra=self._log.fields("cleanup_failed", error=type(error).__name__),
            )

    def _collect_garbage(self, *, list_checkpoints: bool) -> None:
        """Removes what no retained snapshot, no snapshot being written, nothing set aside and no head refers to.

        Args:
            list_checkpoints: Look which checkpoints Ray has deleted meanwhile (a request).
        """
        known = self._known
        if list_checkpoints:
            there = self.store.list_dirs()
            if layout.DRIVER_DIR in there:
                self._read_note()
                self._leave_to_driver()
            for name in known.snapshots.keys() - set(there):
                del known.snapshots[name]
                known.retained.pop(name, None)
        journal = self._stale_journal()
        garbage = [*known.garbage(self.token, self._writer.layers), *journal]
        if garbage:
            self._writer.delete(garbage)
            known.forget(garbage)
            if self._journal is not None:
                self._journal.forget(journal)

    def _noted(self, checkpoint: str, restore: Callable[[], RestoreReport]) -> RestoreReport:
        try:
            report = restore()
        except IncompleteSyncError as error:
            self._events.failed(error, checkpoint=checkpoint)
            raise
        self._events.restored(checkpoint, report)
        return report

    def _restore(self, checkpoint: str, deadline: Deadline, *, fresh: bool) -> RestoreReport:
        self._open_for_reading(deadline)
        known = self._known
        stack = known.retained.get(checkpoint) or self._request(
            lambda: self.trial.snapshot(checkpoint), deadline, "Reading the snapshot"
        )
        if stack is not None:
            return self._bring_back(stack, deadline, exact=True, fresh=fresh)
        # What is taken in place of a snapshot is recorded: after the next crash, the same is taken again.
        key = _record_key("", checkpoint, self._registered)
        stack = known.exploits.get(key) or self._newest(fresh=fresh)
        listed = len(stack.manifest) if self._is_listing(stack) else None
        report = self._bring_back(stack, deadline, exact=False, fresh=fresh, record=key)
        # Afterwards: what `log_to_file` wrote before is as of the checkpoint now.
        self._log.inexact(checkpoint, listed=listed)
        return report

    def _newest(self, *, fresh: bool) -> ManifestStack:
        """The newest artifacts: those that the head lists; where nothing was ever committed, all files that are there.

        Before the first step, a background sync may have committed what `setup()` wrote; that is not meant.
        """
        stack = self._known.found if fresh else self._known.stack
        if self._known.headless and stack is self._known.found:
            return ManifestStack(self._known.listing(self._rule))
        return stack

    def _is_listing(self, stack: ManifestStack) -> bool:
        """Whether a stack was never committed: its digests are found out by the restore."""
        return not stack.manifest.token and any(not entry.digest and not entry.is_dir for entry in stack.manifest)

    def _restore_foreign(self, donor: TrialDir, checkpoint: str, deadline: Deadline, *, fresh: bool) -> RestoreReport:
        self._open_for_reading(deadline)
        if self.options.adopt_foreign_artifacts:
            return self._adopt(donor, checkpoint, deadline, fresh=fresh)
        key = _record_key(f"{donor.store.description}\n{donor.name}", checkpoint, self._registered)
        logger.info(
            "%s took over %s of %s and keeps its own artifacts.",
            self.trial.name,
            checkpoint,
            donor.name,
            extra=self._log.fields("foreign_checkpoint", checkpoint=checkpoint, donor=donor.name),
        )
        if fresh:
            stack = self._known.exploits.get(key) or self._newest(fresh=True)
            return self._bring_back(stack, deadline, exact=True, fresh=True, record=key)
        try:
            # The working dir is the truth; nothing to bring back.
            self._sync(deadline)
            self._record(key, deadline)
        except ArtifactConflictError:
            raise
        except ArtifactSyncError as error:
            self._note_failure(error)
        return RestoreReport(self._known.stack.manifest, exact=True)

    def _record(self, key: str, deadline: Deadline) -> None:
        """Records the head as what a checkpoint stands for that says nothing about this trial's artifacts."""
        known = self._known
        if key in known.exploits:
            return
        stack = known.exploits[key] = known.stack
        known.inventory = known.inventory.with_exploit(key)
        self._request(lambda: self._writer.write_record(layout.exploit_path(key), stack), deadline, "Recording")

    def _adopt(self, donor: TrialDir, checkpoint: str, deadline: Deadline, *, fresh: bool) -> RestoreReport:
        stack = self._request(lambda: donor.snapshot(checkpoint), deadline, "Reading the donor's snapshot")
        if stack is None:
            logger.warning(
                "%s of %s has no snapshot; %s keeps its own artifacts.",
                checkpoint,
                donor.name,
                self.trial.name,
                extra=self._log.fields("restore_inexact", checkpoint=checkpoint, donor=donor.name),
            )
            return self._bring_back(self._newest(fresh=fresh), deadline, exact=False, fresh=fresh)
        with self._exclusive(deadline), self._restoring():
            report = self._restore_pass(donor, donor.objects(), deadline, fresh=fresh).run(stack.manifest, exact=True)
        self._log.lost(report)
        return report

    def _bring_back(
        self, stack: ManifestStack, deadline: Deadline, *, exact: bool, fresh: bool, record: str = ""
    ) -> RestoreReport:
        known = self._known
        with self._exclusive(deadline), self._restoring():
            report = self._restore_pass(self.trial, known.objects(self.token), deadline, fresh=fresh).run(
                stack.manifest, exact=exact
            )
        self._log.lost(report)
        listing = self._is_listing(stack)
        if listing:
            known.learn_contents(report.manifest)
        try:
            # The head follows: a crash before the next sync must not leave the superseded one as the newest.
            self._request(self._check_writer, deadline, "Looking at the claim")
            self._commit(report.manifest if report.lost or listing else stack.manifest, deadline)
            if record:
                self._record(record, deadline)
        except ArtifactConflictError:
            raise
        except ArtifactSyncError as error:
            self._note_failure(error)
        return report

    def _restore_pass(
        self,
        trial: TrialDir,
        objects: Mapping[str, tuple[str, ...]],
        deadline: Deadline,
        *,
        fresh: bool,
    ) -> RestorePass:
        return RestorePass(
            trial=trial,
            working_dir=self._working_dir,
            objects=objects,
            rule=self.options.skip_rule,  # what a checkpoint lists is the worker's, whoever writes at its path now
            foreign=self._taken,
            keep_unlisted=fresh,
            max_concurrency=self.options.max_concurrency,
            retries=self.options.retries,
            deadline=deadline,
            tolerant=self.options.on_error == "warn",
            watcher=self._watcher,
        )

    def _open_for_reading(self, deadline: Deadline) -> None:
        """Like `_open`, but a storage that can only be read will do."""
        try:
            self._open(deadline)
        except (ArtifactConflictError, SyncTimeoutError):
            raise
        except PermissionError as error:
            logger.warning(
                "%s cannot be written (%s); restoring all the same.",
                self.store.description,
                error,
                extra=self._log.fields("storage_read_only"),
            )
            self._known = self._request(lambda: self._learn(deadline), deadline, "Listing the trial dir")
            self._learned = True
        finally:
            self._restore_may_come = False
        if not self._learned and not self._known.mirror.states:
            # Nobody said that there are checkpoints; but one is to be restored.
            self._look_around(deadline)

    # --- helpers ----------------------------------------------------------------------------------

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
            operation = self._submit(self._background_sync, "A background sync")
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

    def _stale_journal(self) -> list[str]:
        return self._journal.stale(self._known.inventory.journals) if self._journal is not None else []

    def _rule(self, path: str, is_dir: bool) -> Skip | None:
        """Which files are not synced, and why: those of the driver, declared or not, and what the user excludes."""
        if self._taken and (skip := self._taken.skip(path, is_dir)):
            return skip
        if not is_dir and path in self._cache:
            return None  # it was let through before: the options do not change
        return self.options.skip_rule(path, is_dir)

    def _confirm_path(self, path: str) -> None:
        """A path holds something that this session did not leave there: perhaps the driver writes it, too."""
        self._read_note()
        if path in self._taken:
            raise PathTakenError(reason(path))

    def _leave_out_taken(self, report: SyncReport, deadline: Deadline) -> SyncReport:
        """Looks for the driver's note between the uploads and their commit, where the store lets both write a path.

        The driver preserves what it replaces, but not what is stored after it has looked. What it may have replaced
        since is not committed, unless it can be preserved now.
        """
        known = self._known
        if known.uncertain is None and report.manifest.same_content(known.stack.manifest):
            return report
        self._request(self._writer.settle, deadline, "Finding out about preconditions")
        if self.store.can_precondition:
            return report
        self._request(self._read_note, deadline, "Looking for the driver's note")
        taken = self._taken
        self._leave_to_driver(report.manifest)
        gone = [
            entry.path
            for entry in report.manifest
            if entry.path in taken and entry.size and entry.digest not in known.mirror.preserved
        ]
        if not gone:
            return report
        entries = {path: entry for path, entry in report.manifest.entries.items() if path not in gone}
        skips = (*report.skips, *(Skip(path, reason(path), "owned") for path in gone))
        return replace(report, manifest=Manifest(entries), skips=skips)

    def _leave_to_driver(self, newest: Manifest | None = None) -> None:
        """Gives up the paths that the driver has taken; what checkpoints need of them is preserved first.

        Args:
            newest: What was just stored and is not committed yet.
        """
        if self._given_up is self._taken:
            return
        known, taken = self._known, self._taken
        pinned = known.pinned(history=True) + ([newest] if newest is not None else [])
        for path in [path for path in known.mirror.states if path in taken]:
            for size, digest in pinned_versions(path, pinned, known.mirror.preserved):
                local = self._working_dir.local_path(path)
                target = layout.object_path(self.token, digest)
                if save_version(self.store, local, path, size, digest, known.mirror.states[path].etag, target):
                    known.mirror.preserved.add(digest)
        known.give_up(taken)
        self._given_up = taken

    def _read_note(self) -> None:
        paths = read_note(self.store)
        if not paths <= self._taken.paths:
            self._taken = TakenPaths(paths | self._taken.paths)

    def _check_writer(self) -> None:
        self._working_dir.check()
        self._writer.check()

    @contextmanager
    def _exclusive(self, deadline: Deadline) -> Iterator[None]:
        left = deadline.remaining()
        with self._working_dir.locked(self._patience if left is None else min(left, self._patience)) as held:
            if not held:
                deadline.check()
                if self._patience:
                    logger.warning(
                        "An earlier attempt holds the lock of %s and does not let go (stopped?); going on without it.",
                        self._working_dir.root,
                        extra=self._log.fields("predecessor_stuck"),
                    )
            # A process that was stopped while it held the lock must not stop its successor, nor delay it each time.
            self._patience = self.options.predecessor_wait if held else 0.0
            self._working_dir.check()
            yield

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        self._half_restored = True
        yield
        self._half_restored = False

    def _request(self, call: Callable[[], Result], deadline: Deadline, what: str) -> Result:
        return call_with_retries(call, retries=self.options.retries, deadline=deadline, what=what)

    def _incomplete(self, report: SyncReport) -> IncompleteSyncError:
        path, error = next(iter(report.failures.items()))
        return IncompleteSyncError(
            f"{len(report.failures)} of {len(report.manifest) + len(report.failures)} artifacts could not be sent to "
            f"{self.store.description}; the first: {path}: {error}",
            failures=report.failures,
        )

    def _note_failure(self, error: BaseException) -> None:
        self._log.failure(error)
        self._events.failed(error)

    def __getstate__(self) -> None:
        raise TypeError("TrialArtifacts holds threads and locks of this process and cannot be pickled.")


def _record_key(donor: str, checkpoint: str, newest: int | None) -> str:
    """The name of the record of what a checkpoint stands for that says nothing about this trial's artifacts.

    Args:
        donor: The trial that it belongs to; empty for the trial itself, wherever it lies.
        checkpoint: Its name.
        newest: Index of the own newest checkpoint. Once there is a newer one, the record stands for nothing.
    """
    text = f"{donor}\n{checkpoint}" if newest is None else f"{donor}\n{checkpoint}\n{newest}"
    return blake3(text.encode()).hexdigest()[:32]
