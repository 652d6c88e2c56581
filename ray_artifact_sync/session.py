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
from ray_artifact_sync.concurrency import Deadline, Operation, OperationThread, run_all
from ray_artifact_sync.entries import Manifest
from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactSyncError,
    IncompleteSyncError,
    ManifestError,
    SyncTimeoutError,
    UnknownFormatError,
)
from ray_artifact_sync.known_storage import KnownStorage, state_from_listing
from ray_artifact_sync.manifest import ManifestStack
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.scan import HashCache
from ray_artifact_sync.session_log import SessionLog, SyncStats
from ray_artifact_sync.stores.base import ArtifactStore
from ray_artifact_sync.sync_down import RestorePass, RestoreReport
from ray_artifact_sync.sync_up import SyncPass, SyncReport
from ray_artifact_sync.transfer import TransferEngine, call_with_retries
from ray_artifact_sync.trial_dir import TrialDir, TrialWriter
from ray_artifact_sync.working_dir import WorkingDir

logger = logging.getLogger(__name__)

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
        )
        self._thread = OperationThread(f"artifact-sync-{self.trial.name}")
        self._ticker: threading.Thread | None = None
        self._stop_ticking = threading.Event()
        self._cache = HashCache()
        self._known = KnownStorage()
        self._patience = self.options.predecessor_wait
        self._half_restored = False
        self._spare_files = self._spare_bytes = 0
        self._begun = self._closed = self._opened = False
        self._log = SessionLog(self.trial.name, store.description, history=self.options.history, stats=self.stats)

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
        failure: ArtifactSyncError | None = None
        stack: ManifestStack | None = None
        try:
            stack = self._run(self._sync_for_checkpoint, "The artifact sync")
        except ArtifactConflictError:
            raise
        except ArtifactSyncError as error:
            failure = error
        self._run(lambda deadline: self._remove_stale_snapshots(name, deadline), "Removing a stale snapshot")
        upload(self._engine)
        if stack is not None:
            try:
                self._run(lambda deadline: self._finish_checkpoint(name, stack, deadline), "Writing the snapshot")
            except ArtifactConflictError:
                raise
            except ArtifactSyncError as error:
                failure = error
        if failure is None:
            return True
        if self.options.on_error == "raise":
            raise failure
        logger.error(
            "Checkpoint %s of %s was saved WITHOUT its artifacts: %s Restoring it will bring back the newest artifacts "
            "that could be saved.",
            name,
            self.trial.name,
            failure,
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
            lambda deadline: self._restore(checkpoint, deadline, fresh=fresh),
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
        return self._run(
            lambda deadline: self._restore_foreign(donor, checkpoint, deadline, fresh=fresh),
            f"Restoring artifacts at {donor.name}/{checkpoint}",
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
                self._run(self._last_sync, "The last artifact sync")
        except ArtifactConflictError as error:
            logger.info("The last sync of an old attempt was left out: %s", error)
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
        if existed:
            self._known = self._request(lambda: self._learn(deadline), deadline, "Listing the trial dir")
        self._opened = True

    def _learn(self, deadline: Deadline) -> KnownStorage:
        inventory = self.trial.inventory()
        head = self._head()
        known = KnownStorage(stack=head, inventory=inventory)
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
        known.mirror.unlisted = frozenset(path for path in unlisted if self.options.skip_rule(path, False) is None)
        for path in known.mirror.unlisted:
            known.mirror.states[path] = state_from_listing(inventory, path, None, written)
        for path in head.displaced & known.mirror.states.keys():
            known.mirror.states[path] = replace(known.mirror.states[path], digest=None)
        known.mirror.head = head.manifest
        referenced = known.referenced_digests()
        known.trusted = {digest for digest in inventory.objects if digest in referenced}
        known.mirror.preserved = set(known.trusted)
        return known

    def _head(self) -> ManifestStack:
        """The head; nothing in place of a damaged one, of which a copy is kept: checkpoints do not depend on it."""
        try:
            return self.trial.head() or ManifestStack()
        except UnknownFormatError:
            raise
        except ManifestError as error:
            copy = f"{layout.ASIDE}/{self.token}/damaged.json"
            logger.error(  # noqa: TRY400  (no traceback: the message says it)
                "%s Going on without the list of the newest artifacts (it is kept as %s); those of checkpoints do not "
                "depend on it.",
                error,
                self.trial.describe(copy),
            )
            with suppress(ArtifactSyncError):  # a copy for people; reading needs no write access
                self.store.copy(layout.MANIFEST, copy)
            return ManifestStack()

    def _sync_reported(self, deadline: Deadline) -> SyncReport:
        report = self._sync(deadline)
        if report.failures:
            raise self._incomplete(report)
        return report

    def _last_sync(self, deadline: Deadline) -> SyncReport:
        report = self._sync_reported(deadline)
        if self._known.objects(self.token):
            # Ray deletes the checkpoints beyond `num_to_keep` only after a save: the last ones are seen here.
            self._tidy(deadline, list_checkpoints=True)
        return report

    def _sync_for_checkpoint(self, deadline: Deadline) -> ManifestStack:
        self._sync_reported(deadline)
        self._known.in_flight = self._known.stack  # pinned until the snapshot is written
        return self._known.stack

    def _sync(self, deadline: Deadline) -> SyncReport:
        started = time.monotonic()
        self._open(deadline)
        known = self._known
        if self._half_restored:
            raise ArtifactSyncError(
                "The last restore did not complete, so that the working dir is a mix of versions; nothing is synced "
                "from it until one does."
            )
        with self._exclusive(deadline):
            self._check_writer()
            kept = len(known.mirror.preserved)
            sync_pass = SyncPass(
                root=self._working_dir.root,
                engine=self._engine,
                mirror=known.mirror,
                cache=self._cache,
                pinned=known.pinned(history=self.options.history),
                deadline=deadline,
                rule=self.options.skip_rule,
                skip_checkpoints=True,
            )
            try:
                report = sync_pass.run()
            finally:
                self.stats.bytes_sent += sync_pass.bytes_sent
                self.stats.files_sent += sync_pass.files_sent
                self.stats.seconds += time.monotonic() - started
            self._log.skips(report.skips)
            self._commit(report.manifest, deadline)
            self._spare_files += len(known.mirror.preserved) - kept
            self._spare_bytes += sync_pass.preserved_bytes
            if self._spare_files >= SPARE_FILES or self._spare_bytes >= SPARE_BYTES:
                self._tidy(deadline, list_checkpoints=False)
        if report.failures:
            self._note_failure(self._incomplete(report))
        else:
            self._log.success(report)
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
        self._check_writer()
        if stale:
            self._request(lambda: self._writer.delete(stale), deadline, "Removing a stale snapshot")
            known.snapshots.pop(name, None)
            known.retained.pop(name, None)

    def _finish_checkpoint(self, name: str, stack: ManifestStack, deadline: Deadline) -> None:
        known = self._known
        known.retained[name] = stack  # from now on: a request that seems to fail may have landed all the same
        known.snapshots[name] = (f"{name}/{layout.snapshot_name(self.token)}",)
        self._request(lambda: self._writer.write_snapshot(stack, name), deadline, "Writing the snapshot")
        known.in_flight = None
        known.exploits.clear()
        self._tidy(deadline, list_checkpoints=True)

    def _tidy(self, deadline: Deadline, *, list_checkpoints: bool) -> None:
        self._spare_files = self._spare_bytes = 0
        try:
            self._request(lambda: self._collect_garbage(list_checkpoints=list_checkpoints), deadline, "Cleaning up")
        except ArtifactConflictError:
            raise
        except Exception as error:
            logger.warning("Old versions in %s could not be removed (next time): %s", self.store.description, error)

    def _collect_garbage(self, *, list_checkpoints: bool) -> None:
        """Removes what no retained snapshot, no snapshot being written, nothing set aside and no head refers to.

        Args:
            list_checkpoints: Look which checkpoints Ray has deleted meanwhile (a request).
        """
        known = self._known
        if list_checkpoints:
            for name in known.snapshots.keys() - set(self.trial.checkpoints()):
                del known.snapshots[name]
                known.retained.pop(name, None)
        garbage = known.garbage(self.token, self._writer.layers)
        if garbage:
            self._writer.delete(garbage)
            known.forget(garbage)

    def _restore(self, checkpoint: str, deadline: Deadline, *, fresh: bool) -> RestoreReport:
        self._open_for_reading(deadline)
        known = self._known
        stack = known.retained.get(checkpoint) or self._request(
            lambda: self.trial.snapshot(checkpoint), deadline, "Reading the snapshot"
        )
        exact = stack is not None
        if stack is None:
            # Before the first step, a background sync may have committed what `setup()` wrote; that is not meant.
            stack = known.found if fresh else known.stack
            logger.warning(
                "Checkpoint %s of %s has no snapshot of its artifacts (an older run, or a failed sync); the newest "
                "artifacts are restored, which may be newer than the checkpoint.",
                checkpoint,
                self.trial.name,
            )
        return self._bring_back(stack, deadline, exact=exact, fresh=fresh)

    def _restore_foreign(self, donor: TrialDir, checkpoint: str, deadline: Deadline, *, fresh: bool) -> RestoreReport:
        self._open_for_reading(deadline)
        if self.options.adopt_foreign_artifacts:
            return self._adopt(donor, checkpoint, deadline, fresh=fresh)
        if not fresh:
            # The working dir is the truth; nothing to bring back.
            self._sync(deadline)
        known = self._known
        key = blake3(f"{donor.store.description}\n{donor.name}\n{checkpoint}".encode()).hexdigest()[:32]
        recorded = known.exploits.get(key)
        stack = recorded or (known.found if fresh else known.stack)
        if recorded is None:
            known.exploits[key] = stack
            self._request(
                lambda: self._writer.write_record(f"{layout.EXPLOITS}/{key}.json", stack), deadline, "Recording"
            )
            known.inventory = known.inventory.with_exploit(key)
        logger.info("%s took over %s of %s and keeps its own artifacts.", self.trial.name, checkpoint, donor.name)
        if not fresh:
            return RestoreReport(stack.manifest, exact=True)
        return self._bring_back(stack, deadline, exact=True, fresh=fresh)

    def _adopt(self, donor: TrialDir, checkpoint: str, deadline: Deadline, *, fresh: bool) -> RestoreReport:
        stack = self._request(lambda: donor.snapshot(checkpoint), deadline, "Reading the donor's snapshot")
        if stack is None:
            logger.warning(
                "%s of %s has no snapshot; %s keeps its own artifacts.", checkpoint, donor.name, self.trial.name
            )
            own = self._known.found if fresh else self._known.stack
            return self._bring_back(own, deadline, exact=False, fresh=fresh)
        with self._exclusive(deadline), self._restoring():
            report = self._restore_pass(donor, donor.objects(), deadline, fresh=fresh).run(stack.manifest, exact=True)
        self._log.lost(report)
        return report

    def _bring_back(self, stack: ManifestStack, deadline: Deadline, *, exact: bool, fresh: bool) -> RestoreReport:
        known = self._known
        with self._exclusive(deadline), self._restoring():
            report = self._restore_pass(self.trial, known.objects(self.token), deadline, fresh=fresh).run(
                stack.manifest, exact=exact
            )
        self._log.lost(report)
        try:
            # The head follows: a crash before the next sync must not leave the superseded one as the newest.
            self._check_writer()
            self._commit(report.manifest if report.lost else stack.manifest, deadline)
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
            rule=self.options.skip_rule,
            keep_unlisted=fresh,
            max_concurrency=self.options.max_concurrency,
            retries=self.options.retries,
            deadline=deadline,
            tolerant=self.options.on_error == "warn",
        )

    def _open_for_reading(self, deadline: Deadline) -> None:
        """Like `_open`, but a storage that can only be read will do."""
        try:
            self._open(deadline)
        except (ArtifactConflictError, SyncTimeoutError):
            raise
        except PermissionError as error:
            logger.warning("%s cannot be written (%s); restoring all the same.", self.store.description, error)
            self._known = self._learn(deadline)

    # --- helpers ----------------------------------------------------------------------------------

    def _run(self, call: Callable[[Deadline], Result], what: str) -> Result:
        operation = self._submit(call, what)
        try:
            return operation.wait()  # type: ignore[return-value]
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
        try:
            self._sync(deadline)
        except ArtifactConflictError as error:
            self._stop_ticking.set()
            self._note_failure(error)
        except Exception as error:
            self._note_failure(error)

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

    def __getstate__(self) -> None:
        raise TypeError("TrialArtifacts holds threads and locks of this process and cannot be pickled.")
