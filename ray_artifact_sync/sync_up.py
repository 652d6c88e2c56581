"""One pass from a local directory to storage: scan, hash, plan, transfer, until no file changes under the pass."""

from __future__ import annotations

import heapq
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, Pacer, run_all
from ray_artifact_sync.entries import FileEntry, LocalFile, Manifest, Skip, SyncPlan
from ray_artifact_sync.errors import ArtifactSyncError, FileChangedError
from ray_artifact_sync.journal import MAX_SENT, SentFile
from ray_artifact_sync.local_files import ConsistentReader
from ray_artifact_sync.plan import PathState, digests_wanted, new_bytes, parents, plan_sync_up
from ray_artifact_sync.scan import HashCache, SkipRule, as_local_files, hash_local_file, scan_tree
from ray_artifact_sync.transfer import TransferEngine, TransferResult
from ray_artifact_sync.working_dir import STAGING_PREFIX

logger = logging.getLogger(__name__)

HASHING_THREADS = 4
ROUNDS = 4
"""Passes over files that change meanwhile; from the second on, they are copied first and the copy is sent."""


class MirrorReplacedError(ArtifactSyncError):
    """The session has looked at storage anew: a pass that it made before would go by what was there then."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one sync did.

    Attributes:
        manifest: The artifacts as they are in storage now.
        bytes_sent: Content bytes sent.
        files_sent: Files sent.
        seconds: Duration.
        skips: Local files that were left out, with reasons.
        failures: Artifact path to the error that stopped it; where the head had an older version, that stands.
        bytes_changed: Content bytes that were new (see `plan.new_bytes`).
        most_sent: The files with the most bytes sent.
    """

    manifest: Manifest
    bytes_sent: int = 0
    files_sent: int = 0
    seconds: float = 0.0
    skips: tuple[Skip, ...] = ()
    failures: Mapping[str, BaseException] = field(default_factory=dict)
    bytes_changed: int = 0
    most_sent: tuple[SentFile, ...] = ()


@dataclass(slots=True)
class Mirror:
    """What a session knows of the storage side; changed only by the passes of that session.

    Attributes:
        head: Newest committed manifest.
        states: What each path holds now.
        preserved: Digests that are kept as objects.
        unlisted: Files that were there at the start and that no manifest lists: an earlier attempt's, or somebody
            else's.
    """

    head: Manifest = field(default_factory=Manifest)
    states: dict[str, PathState] = field(default_factory=dict)
    preserved: set[str] = field(default_factory=set)
    unlisted: frozenset[str] = frozenset()


@dataclass(slots=True)
class SyncPass:
    """One pass; `run` it once.

    Attributes:
        root: Local directory.
        engine: Where to, and how.
        mirror: What storage holds; brought up to date with every request that was made, also by a failing pass.
        cache: Digests of local files.
        pinned: Manifests whose versions must stay readable, the head among them.
        unwritten: Those of them that are in no document on storage yet.
        deadline: Ends the pass.
        rule: Leaves local files out.
        skip_checkpoints: Leave out Ray's checkpoint directories.
        staging: Directory for copies of files that keep changing.
        elsewhere: Artifact path to the local file to send, where that is not at the same path below `root`.
        pacer: Slows the transfers of small files down, for the program's sake.
        prepare: Called before the first write; may raise `MirrorReplacedError`.
    """

    root: str
    engine: TransferEngine
    mirror: Mirror
    cache: HashCache
    pinned: Sequence[Manifest]
    deadline: Deadline
    rule: SkipRule
    unwritten: Sequence[Manifest] = ()
    skip_checkpoints: bool = False
    staging: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    pacer: Pacer | None = None
    prepare: Callable[[], None] = lambda: None
    entries: dict[str, FileEntry] = field(default_factory=dict)
    skips: list[Skip] = field(default_factory=list)
    failures: dict[str, BaseException] = field(default_factory=dict)
    bytes_sent: int = 0
    files_sent: int = 0
    bytes_changed: int = 0
    most_sent: list[SentFile] = field(default_factory=list)
    preserved_bytes: int = 0

    def run(self) -> SyncReport:
        """Brings storage up to the local state; commits nothing.

        Raises:
            ArtifactConflictError: A newer attempt took over.
            SyncTimeoutError: The deadline passed.
        """
        scan = scan_tree(self.root, self.rule, skip_checkpoints=self.skip_checkpoints, cache=self.cache)
        self.skips.extend(scan.skips)
        self.cache.forget_except(scan.files.keys())
        files = as_local_files(scan, self.cache)
        for path in self.elsewhere.keys() & files.keys():
            stat = os.stat(self.elsewhere[path])
            files[path] = LocalFile(path, stat.st_size, stat.st_mtime_ns)
        return self.run_files(files)

    def run_files(self, files: dict[str, LocalFile]) -> SyncReport:
        """Like `run`, for files that were listed already."""
        started = time.monotonic()
        changed = self.round(files, {})
        for _ in range(ROUNDS - 1):
            if not changed:
                break
            with self.staged(changed) as (local, sources, restless):
                changed = self.round(local, sources) | restless
        self.cache.distrust_mapped()
        for path in changed:
            self.skips.append(Skip(path, "keeps changing while it is read", "unstable"))
        unreadable = {skip.path for skip in self.skips if skip.kind == "unreadable"}
        self.keep_old_versions([*changed, *self.failures, *self.listed_below(unreadable)])
        return SyncReport(
            Manifest(self.entries),
            self.bytes_sent,
            self.files_sent,
            time.monotonic() - started,
            tuple(self.skips),
            self.failures,
            self.bytes_changed,
            tuple(self.most_sent),
        )

    def round(self, local: dict[str, LocalFile], sources: Mapping[str, str]) -> set[str]:
        """Plans and transfers some files; returns those that changed meanwhile."""
        sources = {**self.elsewhere, **sources}
        unstable = self.hash_wanted(local, sources)
        plan = self.plan(local)
        # Until the run says otherwise, it is not known what these paths hold: the process or the request may die.
        before = {op.path: self.mirror.states[op.path] for op in plan.transfers if op.path in self.mirror.states}
        result = TransferResult()
        if plan.preserves or plan.removes or plan.transfers:
            self.prepare()
        try:
            self.engine.run(
                plan,
                root=self.root,
                states=before,
                deadline=self.deadline,
                sources=sources,
                set_aside={op.path for op in plan.removes if self.is_of_others(op.path)},
                result=result,
                pacer=self.pacer,
            )
        finally:
            self.count(result, local)
            self.absorb(plan, result, before)
        self.entries.update((entry.path, entry) for entry in plan.unchanged)
        return result.changed | unstable

    def is_of_others(self, path: str) -> bool:
        """Whether a stored file may be somebody else's, so that it must not be deleted."""
        state = self.mirror.states.get(path)
        return path in self.mirror.unlisted and (state is None or not state.own)

    def plan(self, local: Mapping[str, LocalFile]) -> SyncPlan:
        """What must be done for some files."""
        plan = plan_sync_up(
            local,
            head=self.mirror.head,
            states=self.mirror.states,
            pinned=self.pinned,
            unwritten=self.unwritten,
            preserved=self.mirror.preserved,
            can_append=self.engine.store.can_append,
            min_append_size=self.engine.store.min_append_size,
        )
        if logger.isEnabledFor(logging.DEBUG):
            for op in (*plan.preserves, *plan.removes, *plan.transfers):
                logger.debug("%s %s: %s", type(op).__name__.lower(), op.path, op.reason)
        return plan

    def hash_wanted(self, local: dict[str, LocalFile], sources: Mapping[str, str]) -> set[str]:
        """Reads what the planner must know; replaces the entries of `local`, drops what cannot be read."""
        wanted = digests_wanted(
            local,
            head=self.mirror.head,
            states=self.mirror.states,
            pinned=self.pinned,
            preserved=self.mirror.preserved,
        )
        unstable: set[str] = set()

        def work(path: str) -> None:
            source = sources.get(path)
            hashed = hash_local_file(
                local[path],
                wanted[path],
                source or os.path.join(self.root, path),
                None if source else self.cache,
            )
            if isinstance(hashed, LocalFile):
                local[path] = hashed
                return
            del local[path]
            if hashed.kind == "unstable":
                unstable.add(path)
            else:
                self.skips.append(hashed)

        run_all(list(wanted), work, workers=HASHING_THREADS, deadline=self.deadline)
        return unstable

    def absorb(self, plan: SyncPlan, result: TransferResult, before: Mapping[str, PathState]) -> None:
        """Takes over what a run did, and what it may have done."""
        states = self.mirror.states
        done = result.entries.keys() | result.changed | {skip.path for skip in result.skips}
        for op in plan.transfers:
            if op.path not in done and op.path not in result.states:
                states[op.path] = PathState()
        for path, state in result.states.items():
            if state is None:
                states.pop(path, None)
            else:
                states[path] = state
        for path in result.changed:
            # Nothing was published, except that an append may have gone half-way.
            if path not in result.states and path not in before:
                states.pop(path, None)
        self.mirror.preserved |= result.preserved
        self.preserved_bytes += sum(
            max(before[op.path].size, 0)
            for op in plan.preserves
            if op.path in before and not result.preserved.isdisjoint(op.digests)
        )
        for path, hashed in result.hashed.items():
            self.cache.remember(path, hashed)
        self.entries.update(result.entries)
        self.skips.extend(result.skips)
        self.failures.update(result.failures)
        for path in result.entries:
            self.failures.pop(path, None)

    def count(self, result: TransferResult, local: Mapping[str, LocalFile]) -> None:
        """Adds up what a run sent, and how much of it was new."""
        head = self.mirror.head
        self.bytes_sent += sum(result.sent.values())
        self.files_sent += len(result.sent)
        self.bytes_changed += sum(
            new_bytes(entry, head.get(path), local[path].prefix_digests) for path, entry in result.entries.items()
        )
        sent = [SentFile(path, result.entries[path].size, count) for path, count in result.sent.items()]
        self.most_sent = heapq.nlargest(MAX_SENT, [*self.most_sent, *sent], key=lambda file: file.bytes_sent)

    def keep_old_versions(self, paths: Collection[str]) -> None:
        """A file that could not be sent keeps the version that the head lists: it is still readable.

        Unless the file is a directory now, or its directory a file: a manifest cannot list both.
        """
        old = {path: entry for path in paths if path not in self.entries and (entry := self.mirror.head.get(path))}
        if not old:
            return
        directories = {parent for path in self.entries for parent in parents(path)}
        for path, entry in old.items():
            above = (self.entries.get(parent) for parent in parents(path))
            if path not in directories and not any(parent is not None and not parent.is_dir for parent in above):
                self.entries[path] = entry

    def listed_below(self, paths: Collection[str]) -> list[str]:
        """What the head lists at or below some paths; `.` is the root."""
        if not paths:
            return []
        above = set(paths)
        return [
            path for path in self.mirror.head.entries if "." in above or not above.isdisjoint([path, *parents(path)])
        ]

    @contextmanager
    def staged(self, paths: Collection[str]) -> Iterator[tuple[dict[str, LocalFile], dict[str, str], set[str]]]:
        """Copies files that somebody writes to all the time: a local copy is quick, an upload may not be."""
        base = self.staging or os.path.join(self.root, layout.STATE_DIR)
        os.makedirs(base, exist_ok=True)
        directory = tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=base)
        local: dict[str, LocalFile] = {}
        sources: dict[str, str] = {}
        restless: set[str] = set()
        try:
            for number, path in enumerate(sorted(paths)):
                self.deadline.check()
                target = os.path.join(directory, str(number))
                try:
                    _copy_consistent(self.elsewhere.get(path) or os.path.join(self.root, path), target)
                except FileNotFoundError:
                    self.skips.append(Skip(path, "deleted before it could be sent", "vanished"))
                    continue
                except FileChangedError:
                    restless.add(path)
                    continue
                stat = os.stat(target)
                local[path] = LocalFile(path, stat.st_size, stat.st_mtime_ns)
                sources[path] = target
            yield local, sources, restless
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _copy_consistent(source: str, target: str) -> None:
    reader = ConsistentReader(source)
    with open(target, "wb") as file:
        file.writelines(reader)
    if reader.hashed is not None:
        mtime_ns = reader.hashed.stat.mtime_ns
        os.utime(target, ns=(mtime_ns, mtime_ns))
