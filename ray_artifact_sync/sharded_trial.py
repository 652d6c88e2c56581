"""`ShardedTrial`: one trial's artifacts that N ranks bring together; `TrialArtifacts` in lock-step.

Every operation is a sequence of steps that all ranks take together (`Together`): agree on who uploads what, upload,
report, commit. Rank 0 alone writes manifests, snapshots and the claim. What fails on one rank fails on all of them at
the same step, so that no rank waits for one that has given up; nothing is committed then.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from ray_artifact_sync import layout
from ray_artifact_sync.collectives import Collective, directory_id
from ray_artifact_sync.concurrency import Deadline, Pacer, run_all
from ray_artifact_sync.entries import FileEntry, LocalFile, Manifest, Skip
from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactSyncError,
    FileChangedError,
    IncompleteSyncError,
    WorkerDiedError,
    portable,
)
from ray_artifact_sync.journal import MAX_SENT, SentFile
from ray_artifact_sync.manifest import ManifestStack
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.plan import PathState, parents, plan_sync_up
from ray_artifact_sync.progress import Watcher
from ray_artifact_sync.scan import Scan, as_local_files, hash_local_file, scan_tree
from ray_artifact_sync.session import TrialArtifacts
from ray_artifact_sync.session_events import Observer
from ray_artifact_sync.sharding import (
    Assignment,
    Content,
    Listing,
    OnConflict,
    Source,
    assign,
    digests_to_exchange,
    merge_listings,
    merge_metadata,
    who_lists,
)
from ray_artifact_sync.stores.base import ArtifactStore
from ray_artifact_sync.sync_down import RestoreReport
from ray_artifact_sync.sync_up import HASHING_THREADS, SyncPass, SyncReport
from ray_artifact_sync.transfer import TransferEngine, call_with_retries
from ray_artifact_sync.trial_dir import TrialDir, TrialWriter

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
Selector = Callable[[str], bool]
"""Takes an artifact path; whether this rank brings (or wants) it."""


class Together:
    """Steps that all ranks take together, and that fail on all of them if they fail on one.

    Args:
        collective: The ranks.
    """

    def __init__(self, collective: Collective) -> None:
        self.rank = collective.rank
        self.world_size = collective.world_size
        self._collective = collective
        self._steps = 0
        self._broken: BaseException | None = None

    def all(self, what: str, act: Callable[[], Value]) -> list[Value]:
        """Does something on every rank.

        Args:
            what: The step's name. The ranks' must be equal.
            act: This rank's part.

        Returns:
            What it gave on each rank, in the order of ranks.

        Raises:
            WorkerDiedError: A rank is gone, or takes another step: from now on, every step fails.
            Exception: What this rank's part raised; where only others' did, that of the lowest of them, as the same
                class if it is one of this package's.
        """
        failure: BaseException | None = None
        mine: Any = None
        if self._broken is not None:
            raise WorkerDiedError(f"The ranks lost each other before ({self._broken}); {what} is impossible.")
        try:
            mine = act()
        except Exception as error:
            failure = error
        self._steps += 1
        try:
            said = self._collective.allgather((self._steps, what, mine, portable(failure) if failure else None))
        except BaseException as error:
            self._broken = error
            raise
        strangers = [rank for rank, (number, name, *_) in enumerate(said) if (number, name) != (self._steps, what)]
        if strangers:
            self._broken = WorkerDiedError(
                f"Ranks {strangers} are at another step than {what!r} of rank {self.rank}: not all ranks made the same "
                "calls in the same order.",
                ranks=tuple(strangers),
            )
            raise self._broken
        if failure is not None:
            raise failure
        for rank, (*_, theirs) in enumerate(said):
            if theirs is not None:
                raise of_rank(theirs, rank)
        return [value for _, _, value, _ in said]

    def on_first(self, what: str, act: Callable[[], Value]) -> Value:
        """Does something on rank 0 alone, and tells all what it gave. Raises what `all` raises."""
        value: Value = self.all(what, act if self.rank == 0 else lambda: None)[0]  # type: ignore[assignment]
        return value


def of_rank(error: BaseException, rank: int) -> BaseException:
    """Another rank's error, saying whose it is."""
    if isinstance(error, ArtifactSyncError):
        error.args = (f"Rank {rank}: {error}",)
        return error
    return ArtifactSyncError(f"Rank {rank}: {type(error).__name__}: {error}", ranks=(rank,))


def agree_on_token(together: Together, trial: TrialDir, options: SyncOptions) -> str:
    """A token for this attempt: the same on all ranks, larger than every one before, whatever the clocks say.

    Raises:
        StorageError: Storage cannot be read.
    """
    what = "Reading the newest token"
    ask = partial(
        call_with_retries,
        TrialWriter(trial, "").newest_token,
        retries=options.retries,
        deadline=Deadline(options.sync_timeout, what),
        what=what,
    )
    newest = together.all("newest token", ask)
    return together.on_first(
        "token", lambda: layout.make_token(max(time.time_ns(), *(int(token or 0) + 1 for token in newest)))
    )


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a rank says after its part of a sync."""

    entries: Mapping[str, FileEntry] = field(default_factory=dict)
    states: Mapping[str, PathState | None] = field(default_factory=dict)
    preserved: frozenset[str] = frozenset()
    failures: Mapping[str, BaseException] = field(default_factory=dict)
    error: BaseException | None = None
    bytes_sent: int = 0
    files_sent: int = 0
    bytes_changed: int = 0
    most_sent: tuple[SentFile, ...] = ()


class ShardedTrial(TrialArtifacts):
    """Made by every rank with equal arguments, except for what it brings. All ranks make the same calls.

    Args:
        local_dir: What this rank brings; None for nothing.
        store: Storage; the trial dir is its root.
        together: The ranks.
        trial: Reads the trial dir.
        token: From `agree_on_token`.
        options: How to sync; there are no background syncs.
        on_conflict: See `sharding.assign`.
        selector: Which files this rank brings; None for all.
        metadata: What this rank says about the set; None for nothing.
        own_dir: The directory is this rank's alone, and `begin` is called: it is locked and taken over.
        always_commit: Commit also what equals the head.
        skip_checkpoints: Leave out directories that look like Ray's checkpoints.
        observer: On rank 0: is told what all ranks did.
        watcher: Shows the progress of this rank's transfers.
    """

    def __init__(
        self,
        local_dir: str | None,
        store: ArtifactStore,
        *,
        together: Together,
        trial: TrialDir,
        token: str,
        options: SyncOptions,
        on_conflict: OnConflict = "error",
        selector: Selector | None = None,
        metadata: Mapping[str, Any] | None = None,
        own_dir: bool = False,
        always_commit: bool = False,
        skip_checkpoints: bool = False,
        observer: Observer | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        super().__init__(
            local_dir if local_dir is not None else os.devnull,
            store,
            trial=trial,
            token=token,
            options=replace(options, sync_period=0.0, journal=options.journal and together.rank == 0),
            observer=observer if together.rank == 0 else None,
            watcher=watcher,
        )
        self.merged_metadata: dict[str, Any] = {}
        self._local_dir = local_dir
        self._together = together
        self._on_conflict = on_conflict
        self._selector = selector
        self._metadata = metadata
        self._own_dir = own_dir
        self._always_commit = always_commit
        self._skip_checkpoints = skip_checkpoints
        self._is_first = together.rank == 0
        self._base: Manifest | None = None
        self._scan = Scan({})

    def begin(self, *, set_aside: bool = True) -> None:
        """See `TrialArtifacts.begin`. Waits until all ranks have begun and storage is claimed."""
        super().begin(set_aside=set_aside)
        with suppress(PermissionError):  # a storage that can only be read will do for a restore
            self._run(self._open, "Opening the trial dir")

    def commit_checkpoint(self, name: str, upload: Callable[[TransferEngine], None]) -> bool:
        """See `TrialArtifacts.commit_checkpoint`. Every rank uploads its part of the checkpoint's own files.

        The snapshot is written when all ranks have uploaded theirs; if one fails, all do, and there is none.
        """

        def upload_together(engine: TransferEngine) -> None:
            self._together.all("checkpoint files", lambda: upload(engine))

        return super().commit_checkpoint(name, upload_together)

    # --- one sync -----------------------------------------------------------------------------------

    def _open(self, deadline: Deadline) -> None:
        if self._opened:
            return

        def claim() -> tuple[bool, bool | None]:
            existed = self._request(self._writer.claim, deadline, "Claiming the trial dir")
            self._request(self._writer.settle, deadline, "Finding out what the store can do")
            return existed, self.store.can_precondition

        existed, can_precondition = self._together.on_first("claim", claim)

        def learn() -> None:
            if not self._is_first:
                self.store.can_precondition = can_precondition
                self.store.begin_writing(self.token)
            if existed:
                self._known = self._request(lambda: self._learn(deadline), deadline, "Listing the trial dir")

        self._together.all("learn", learn)
        self._opened = True
        self._events.begun(self._known.stack.manifest)

    def _sync(self, deadline: Deadline, pacer: Pacer | None = None) -> SyncReport:  # noqa: ARG002  (never in the background)
        started = time.monotonic()
        self._open(deadline)
        before, requests, retries = self._known.stack, self._engine.requests, self._engine.retries_made
        assignment = self._agree(deadline)
        kept = len(self._known.mirror.preserved)
        self._make_way(assignment, deadline)
        report = self._send(assignment, deadline)
        self._log.skips(report.skips)
        self._commit(report.manifest, deadline)
        if len(self._known.mirror.preserved) > kept:
            self._tidy(deadline, list_checkpoints=False)
        report = replace(report, seconds=time.monotonic() - started)
        self.stats.seconds += report.seconds
        self._events.synced(
            report,
            seconds=report.seconds,
            requests=self._engine.requests - requests,
            retries=self._engine.retries_made - retries,
            committed=self._known.stack is not before,
        )
        self._log.success(report)
        return report

    def _agree(self, deadline: Deadline) -> Assignment:
        """Finds out who uploads what. Two exchanges, and a third if files collide; nothing is written."""
        said = self._together.all("sources", lambda: (self._source(), self._metadata))
        sources = [source for source, _ in said]
        listing_ranks = who_lists(sources)
        self.merged_metadata = merge_metadata([metadata for _, metadata in said], on_conflict=self._on_conflict)
        listings = self._together.all(
            "listings", lambda: self._listing() if self._together.rank in listing_ranks else None
        )
        merge = merge_listings(listings, sources)
        wanted = digests_to_exchange(merge, listings, self._base)
        contents: list[Mapping[str, Content | None]] = [{} for _ in sources]
        if wanted:
            contents = self._together.all(
                "digests", lambda: self._contents(wanted.get(self._together.rank, []), deadline)
            )
        return assign(merge, listings, contents, base=self._base, on_conflict=self._on_conflict)

    def _source(self) -> Source | None:
        if self._local_dir is None:
            return None
        return Source(directory_id(self._local_dir), selects=self._selector is not None)

    def _listing(self) -> Listing:
        self._scan = scan_tree(self._working_dir.root, self._rule, skip_checkpoints=self._skip_checkpoints)
        self._cache.forget_except(self._scan.files.keys())
        empty = [path for path in self._scan.empty_dirs if self._selector is None or self._selector(path)]
        return Listing({path: stat.size for path, stat in self._scan.files.items()}, tuple(empty))

    def _rule(self, path: str, is_dir: bool) -> Skip | None:
        if skip := self.options.skip_rule(path, is_dir):
            return skip
        if self._selector is None or is_dir or self._selector(path):
            return None
        return Skip(path, "not selected by this rank", "excluded")

    def _contents(self, paths: list[str], deadline: Deadline) -> dict[str, Content | None]:
        """Hashes files, a block at a time; None for those that are gone."""
        local = as_local_files(self._scan, self._cache)
        contents: dict[str, Content | None] = {}

        def work(path: str) -> None:
            file = local[path]
            if file.digest is None:
                hashed = hash_local_file(file, (), self._working_dir.local_path(path), self._cache)
                if isinstance(hashed, Skip) and hashed.kind == "vanished":
                    contents[path] = None
                    return
                if isinstance(hashed, Skip):
                    raise FileChangedError(f"{path!r} cannot be compared with that of other ranks: {hashed.reason}.")
                file = hashed
            contents[path] = file.size, file.digest

        run_all(paths, work, workers=HASHING_THREADS, deadline=deadline)
        return contents

    def _make_way(self, assignment: Assignment, deadline: Deadline) -> None:
        """Where storage has a file and the set a directory, or the other way round, rank 0 removes it first."""
        states = self._known.mirror.states
        if not states:
            return
        directories = {parent for path in assignment.uploads for parent in parents(path)}
        in_the_way = (states.keys() & directories) or any(
            not assignment.uploads.keys().isdisjoint(parents(path)) for path in states
        )
        if not in_the_way:
            return

        def remove() -> tuple[list[str], set[str]]:
            wanted = {path: LocalFile(path, 0, 0) for path in assignment.uploads}
            sync_pass = self._pass({}, deadline)
            plan = plan_sync_up(
                wanted,
                head=self._known.mirror.head,
                states=states,
                pinned=sync_pass.pinned,
                preserved=self._known.mirror.preserved,
            )
            gone = [op.path for op in plan.removes]
            preserves = tuple(op for op in plan.preserves if op.path in gone)
            plan = replace(plan, preserves=preserves, transfers=(), unchanged=(), dropped=())
            others = {path for path in gone if sync_pass.is_of_others(path)}
            result = self._engine.run(
                plan, root=self._working_dir.root, states=states, deadline=deadline, set_aside=others
            )
            if result.failures:
                raise IncompleteSyncError("What is in the way cannot be removed.", failures=result.failures)
            return gone, result.preserved

        gone, preserved = self._together.on_first("make way", remove)
        for path in gone:
            states.pop(path, None)
        self._known.mirror.preserved |= preserved

    def _send(self, assignment: Assignment, deadline: Deadline) -> SyncReport:
        """Uploads this rank's part, and waits for the others'."""
        sync_pass = self._pass(assignment.uploads, deadline)
        said = self._together.all("uploads", lambda: self._send_own(assignment, sync_pass))
        mirror = self._known.mirror
        entries: dict[str, FileEntry] = {}
        failures: dict[str, BaseException] = {}
        for rank, sent in enumerate(said):
            entries.update(sent.entries)
            failures.update(sent.failures)
            if rank == self._together.rank:
                continue
            mirror.preserved |= sent.preserved
            for path, state in sent.states.items():
                if state is None:
                    mirror.states.pop(path, None)
                else:
                    mirror.states[path] = replace(state, own=False)
        for rank, sent in enumerate(said):
            if sent.error is not None:
                raise sent.error if rank == self._together.rank else of_rank(sent.error, rank)
        self.stats.bytes_sent += sync_pass.bytes_sent
        self.stats.files_sent += sync_pass.files_sent
        report = SyncReport(
            Manifest(dict(sorted(entries.items())), self.token),
            sum(sent.bytes_sent for sent in said),
            sum(sent.files_sent for sent in said),
            skips=(*self._scan.skips, *sync_pass.skips),
            failures=failures,
            bytes_changed=sum(sent.bytes_changed for sent in said),
            most_sent=tuple(
                heapq.nlargest(
                    MAX_SENT, (file for sent in said for file in sent.most_sent), key=lambda file: file.bytes_sent
                )
            ),
        )
        if failures:
            incomplete = self._incomplete(report)
            self._note_failure(incomplete)
            raise incomplete
        return report

    def _pass(self, uploads: Mapping[str, tuple[int, str]], deadline: Deadline) -> SyncPass:
        known = self._known
        renamed = {
            path: self._working_dir.local_path(local)
            for path, (rank, local) in uploads.items()
            if rank == self._together.rank and local != path
        }
        return SyncPass(
            root=self._working_dir.root,
            engine=self._engine,
            mirror=known.mirror,
            cache=self._cache,
            pinned=known.pinned(history=True),
            deadline=deadline,
            rule=self._rule,
            elsewhere=renamed,
        )

    def _send_own(self, assignment: Assignment, sync_pass: SyncPass) -> _Sent:
        mirror = self._known.mirror
        before, kept = dict(mirror.states), set(mirror.preserved)
        error: BaseException | None = None
        failures: dict[str, BaseException] = {}
        entries: Mapping[str, FileEntry] = {}
        local = as_local_files(self._scan, self._cache)
        files = {
            path: replace(local[name], path=path)
            for path, (rank, name) in assignment.uploads.items()
            if rank == self._together.rank and name in local
        }
        try:
            self._request(self._check_writer, sync_pass.deadline, "Looking at the claim")
            if files:
                with self._exclusive(sync_pass.deadline):
                    report = sync_pass.run_files(files)
                entries, failures = report.manifest.entries, dict(report.failures)
                failures.update(_changed_since(assignment, files, entries))
        except Exception as raised:
            error = portable(raised)
        changed = {
            path: mirror.states.get(path)
            for path in before.keys() | mirror.states.keys()
            if mirror.states.get(path) is not before.get(path)
        }
        return _Sent(
            entries,
            changed,
            frozenset(mirror.preserved - kept),
            {path: portable(failure) for path, failure in failures.items()},
            error,
            sync_pass.bytes_sent,
            sync_pass.files_sent,
            sync_pass.bytes_changed,
            tuple(sync_pass.most_sent),
        )

    # --- what rank 0 does for all ---------------------------------------------------------------------

    def _commit(self, manifest: Manifest, deadline: Deadline) -> None:
        """Makes a manifest the head. By rank 0, after every rank has said that its part is in storage."""
        known = self._known

        def commit() -> bool:
            if not self._always_commit and known.uncertain is None and manifest.same_content(known.stack.manifest):
                return False
            if self.merged_metadata:
                self._write_metadata(deadline)
            self._request(lambda: self._commit_now(Manifest(manifest.entries, self.token)), deadline, "Committing")
            return True

        if self._together.on_first("commit", commit) and not self._is_first:
            known.stack = ManifestStack(Manifest(manifest.entries, self.token))
            known.mirror.head = known.stack.manifest

    def _write_metadata(self, deadline: Deadline) -> None:
        data = encode_metadata(self.merged_metadata)
        self._engine.put(f"{layout.METADATA}/{self.token}.json", data, deadline)

    def _remove_stale_snapshots(self, name: str, deadline: Deadline) -> None:
        self._open(deadline)
        self._together.on_first(
            "stale snapshots", lambda: super(ShardedTrial, self)._remove_stale_snapshots(name, deadline)
        )
        self._known.snapshots.pop(name, None)
        self._known.retained.pop(name, None)

    def _finish_checkpoint(self, name: str, stack: ManifestStack, deadline: Deadline, started: float) -> None:
        known = self._known
        known.retained[name] = stack
        known.snapshots[name] = (f"{name}/{layout.snapshot_name(self.token)}",)
        self._together.on_first(
            "snapshot",
            lambda: self._request(lambda: self._writer.write_snapshot(stack, name), deadline, "Writing the snapshot"),
        )
        known.in_flight = None
        self._tidy(deadline, list_checkpoints=True)
        self._events.checkpointed(name, seconds=time.monotonic() - started, error=None)

    def _is_untidy(self) -> bool:
        return bool(self._known.objects(self.token))  # the same on all ranks

    def _tidy(self, deadline: Deadline, *, list_checkpoints: bool) -> None:
        known = self._known
        checkpoints, kept = set(known.snapshots), set(known.mirror.preserved)

        def tidy() -> tuple[set[str], set[str]]:
            super(ShardedTrial, self)._tidy(deadline, list_checkpoints=list_checkpoints)
            return checkpoints - known.snapshots.keys(), kept - known.mirror.preserved

        gone, dropped = self._together.on_first("tidy", tidy)
        if self._is_first:
            return
        for name in gone:
            known.snapshots.pop(name, None)
            known.retained.pop(name, None)
        known.forget([layout.object_path(self.token, digest) for digest in dropped])

    # --- the way back -----------------------------------------------------------------------------------

    def _newest(self, *, fresh: bool) -> ManifestStack:
        return self._known.found if fresh else self._known.stack  # what was never committed is not of all ranks

    def _bring_back(
        self,
        stack: ManifestStack,
        deadline: Deadline,
        *,
        exact: bool,
        fresh: bool,
        record: str = "",  # noqa: ARG002  (only for what is not of all ranks)
    ) -> RestoreReport:
        def bring_back() -> RestoreReport:
            with self._exclusive(deadline):
                restore = self._restore_pass(self.trial, self._known.objects(self.token), deadline, fresh=fresh)
                return restore.run(stack.manifest, exact=exact)

        report = self._together.all("restore", bring_back)[self._together.rank]
        self._base = stack.manifest
        try:
            self._commit(stack.manifest, deadline)
        except ArtifactConflictError:
            raise
        except ArtifactSyncError as error:
            self._note_failure(error)
        return report

    # --- helpers ----------------------------------------------------------------------------------------

    def _note_failure(self, error: BaseException) -> None:
        if self.options.on_error == "raise":
            self.stats.failed_syncs += 1  # the caller hears of it
            self._events.failed(error)
        else:
            super()._note_failure(error)

    def _check_writer(self) -> None:
        if self._own_dir:
            self._working_dir.check()
        self._writer.check()

    @contextmanager
    def _exclusive(self, deadline: Deadline) -> Iterator[None]:
        if self._own_dir:
            with super()._exclusive(deadline):
                yield
        else:
            yield  # a directory of the user's: no lock in it, other ranks may share it


def encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """The JSON bytes of a set's metadata."""
    return json.dumps(metadata, ensure_ascii=False, indent=1).encode("utf-8")


def _changed_since(
    assignment: Assignment, files: Mapping[str, LocalFile], entries: Mapping[str, FileEntry]
) -> dict[str, BaseException]:
    """Files that are not any more what the ranks agreed on."""
    changed: dict[str, BaseException] = {}
    for path in files:
        digest = assignment.agreed.get(path)
        entry = entries.get(path)
        if digest is not None and (entry is None or entry.digest != digest):
            changed[path] = FileChangedError(f"{path!r} was changed after the ranks had compared theirs.", path=path)
    return changed
