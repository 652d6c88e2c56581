"""`Attempt`: one attempt of one trial; what it has, what it knows of storage, and how it claims and commits.

The lowest of the layers of `session.TrialArtifacts`; above it are `attempt_sync.py` (the way to storage) and
`attempt_restore.py` (the way back). All methods run in the session's operation thread, one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.driver_note import TakenPaths, read_note, reason, save_version
from ray_artifact_sync.entries import Manifest, Skip
from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactSyncError,
    ManifestError,
    PathTakenError,
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
from ray_artifact_sync.sync_up import MirrorReplacedError, SyncReport
from ray_artifact_sync.transfer import TransferEngine, call_with_retries
from ray_artifact_sync.trial_dir import TrialDir, TrialWriter
from ray_artifact_sync.working_dir import WorkingDir

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Attempt:
    """What one attempt has and knows. The arguments are those of `session.TrialArtifacts`, which users make."""

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
        self._watcher = watcher
        self._cache = HashCache()
        self._known = KnownStorage()
        self._patience = self.options.predecessor_wait
        self._half_restored = False
        self._takes_over = False  # a commit of the attempt before may be under way, until the head is this one's
        self._restore_may_come = True
        self._unlisted = self._learned = False
        self._taken = self._given_up = TakenPaths()
        self._opened = False
        self._log = SessionLog(
            self.trial.name, store.description, token=token, history=self.options.history, stats=self.stats
        )
        self._journal = JournalWriter(store, token) if self.options.journal else None
        self._events = SessionEvents(self.trial.name, token, journal=self._journal, observer=observer)

    # --- the trial dir ----------------------------------------------------------------------------

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

    # --- commits ----------------------------------------------------------------------------------

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

    def _record(self, key: str, deadline: Deadline, *, anew: bool = False) -> None:
        """Records the head as what a checkpoint stands for that says nothing about this trial's artifacts.

        Args:
            key: Of the record.
            deadline: Ends the work.
            anew: Also where there is a record: the checkpoint was taken over once more.
        """
        known = self._known
        old = known.exploits.get(key)
        if old is not None and (not anew or old.manifest.same_content(known.stack.manifest)):
            return
        stack = known.exploits[key] = known.stack
        known.inventory = known.inventory.with_exploit(key)
        replaced = f"{key}, replaced"
        if old is not None:
            known.exploits[replaced] = old  # pinned until it is known to be gone
        self._request(lambda: self._writer.write_record(layout.exploit_path(key), stack), deadline, "Recording")
        known.exploits.pop(replaced, None)

    def _check_writer(self) -> None:
        self._working_dir.check()
        self._writer.check()

    # --- which paths are whose --------------------------------------------------------------------

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

    # --- the working dir --------------------------------------------------------------------------

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

    # --- helpers ----------------------------------------------------------------------------------

    def _request(self, call: Callable[[], Result], deadline: Deadline, what: str) -> Result:
        return call_with_retries(call, retries=self.options.retries, deadline=deadline, what=what)

    def _note_failure(self, error: BaseException) -> None:
        self._log.failure(error)
        self._events.failed(error)
