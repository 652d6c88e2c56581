"""The driver's side of ownership: files that nobody declared, and files that worker and driver both write.

Ray's driver keeps one staging directory for the experiment, with a directory for each trial; the session of a trial
runs elsewhere and cannot know what callbacks put there unless they declare it. So, for a file that is not declared:

- Before the driver stores it, a note in the trial dir names it (`driver_note.py`); a session that finds the note leaves
  the path to the driver.
- Then it copies what the path holds, and preserves of that copy what the worker lists, and all of it: the worker may be
  about to list it. A session looks for the note between its uploads and its commit (where the store has preconditions,
  the driver's write is conditional instead). So one of the two sees the other, in any order (Dekker's flags: each
  raises its own before it looks at the other's).
- Where the store lets a worker replace the driver's version before it has seen the note (one without preconditions, or
  a large file), the driver sees that at its next syncs and sends its version again. It looks for as long as files of
  the trial change, and `LOOKS` syncs longer.

What could not be preserved is not overwritten: the driver's file waits for the next sync. Declared files cost nothing
of this.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.driver_note import read_note, write_note
from ray_artifact_sync.entries import FileEntry, Skip, validate_path
from ray_artifact_sync.errors import ArtifactNotFoundError, ArtifactSyncError, InvalidPathError, ManifestError
from ray_artifact_sync.local_files import hash_file
from ray_artifact_sync.plan import PathState
from ray_artifact_sync.registry import ArtifactRegistry
from ray_artifact_sync.scan import SkipRule
from ray_artifact_sync.stores.base import ArtifactStore
from ray_artifact_sync.trial_dir import TrialDir

logger = logging.getLogger(__name__)

NO_TOKEN = layout.make_token(0)
"""Under this token the driver preserves a worker's version; every attempt may clean it up."""
LOOKS = 3


@dataclass(slots=True)
class _Trial:
    """What the driver knows of one trial with undeclared files.

    Attributes:
        names: Those files.
        noted: What the note in the trial dir names; None before it was read.
        new: Those of `names` that were not looked for in the worker's listing yet.
        newest: Modification time of the newest file in its staging directory, ns.
        looks_left: Syncs at which the driver still looks whether its version is there.
    """

    names: set[str] = field(default_factory=set)
    noted: frozenset[str] | None = None
    new: set[str] = field(default_factory=set)
    newest: int = 0
    looks_left: int = 0


class DriverFiles:
    """Watches the files of one experiment's staging directory; says each thing once.

    Is a `SharedPaths`: the driver's files that a worker may write, too.

    Args:
        local_dir: The staging directory.
        registry: Who writes what.
        max_concurrency: Trials looked at side by side.
    """

    def __init__(self, local_dir: str, registry: ArtifactRegistry, *, max_concurrency: int = 32) -> None:
        self._local_dir = local_dir
        self._registry = registry
        self._workers = max_concurrency
        self._seen: set[str] = set()
        self._with_declared: set[str] = set()
        self._trials: dict[str, _Trial] = {}
        self._said: set[str] = set()
        self._held_back: set[str] = set()
        self._open_trial: Callable[[str], ArtifactStore] | None = None

    def before_sync(
        self, open_trial: Callable[[str], ArtifactStore], stored: Mapping[str, PathState], deadline: Deadline
    ) -> set[str]:
        """Looks at the files that are new in the staging directory, and whether the others are still there.

        Never raises for what storage answers: the driver's files are to be sent all the same.

        Args:
            open_trial: Opens the storage of a trial, given its trial dir's name.
            stored: What the driver left at which path of the experiment's directory.
            deadline: Ends the work.

        Returns:
            Paths of the experiment's directory that somebody else has overwritten.
        """
        self._find_new()
        self._open_trial = open_trial
        self._held_back.clear()
        overwritten: set[str] = set()
        lock = threading.Lock()

        def visit(trial: str) -> None:
            try:
                found = self._visit(trial, open_trial(trial), stored)
            except ArtifactSyncError as error:
                logger.warning("Could not look at what the worker of %s stored: %s", trial, error)
                return
            with lock:
                overwritten.update(f"{trial}/{name}" for name in found)

        run_all(self._to_visit(), visit, workers=self._workers, deadline=deadline)
        return overwritten

    def __contains__(self, path: object) -> bool:
        """See `SharedPaths`."""
        trial, _, name = str(path).partition("/")
        return trial in self._with_declared and trial in self._trials and name in self._trials[trial].names

    def before_replacing(self, path: str) -> None:
        """See `SharedPaths`."""
        trial, _, name = path.partition("/")
        if path in self and self._open_trial is not None:
            self._save_workers_versions(TrialDir(self._open_trial(trial), trial), {name}, unseen={name})

    def sync_rule(self, rule: SkipRule) -> SkipRule:
        """A rule that also leaves out files at whose paths the worker's could not be preserved yet."""

        def skip(path: str, is_dir: bool) -> Skip | None:
            if path in self._held_back:
                return Skip(path, "what the worker has stored there could not be preserved yet", "owned")
            return rule(path, is_dir)

        return skip

    # --- the local side ---------------------------------------------------------------------------

    def _find_new(self) -> None:
        for path in files_below(self._local_dir):
            if path in self._seen:
                continue
            self._seen.add(path)
            trial, _, name = path.partition("/")
            if not name or layout.is_reserved(trial):
                continue
            if self._registry.owner_of(name) is not None:
                self._with_declared.add(trial)
                continue
            try:
                validate_path(path)
            except InvalidPathError:
                continue  # no store takes it, nor may a worker's artifact have the name; the sync itself says so
            self._say_undeclared(trial, name)
            known = self._trials.setdefault(trial, _Trial())
            known.names.add(name)
            known.new.add(name)

    def _to_visit(self) -> list[str]:
        """The trials with something new, and those that were active a short while ago."""
        trials = []
        for trial, known in self._trials.items():
            newest = _newest_below(os.path.join(self._local_dir, trial))
            if newest > known.newest or (known.new and trial in self._with_declared):
                known.newest, known.looks_left = newest, LOOKS
            if known.looks_left:
                known.looks_left -= 1
                trials.append(trial)
        return trials

    # --- one trial --------------------------------------------------------------------------------

    def _visit(self, trial: str, store: ArtifactStore, stored: Mapping[str, PathState]) -> set[str]:
        known = self._trials[trial]
        if not self._is_trial(trial, store):
            return set()
        overwritten = {
            name
            for name in known.names - known.new
            if (state := stored.get(f"{trial}/{name}")) is not None and not _is_there(store, name, state)
        }
        if known.noted is None:
            known.noted = read_note(store)
        unseen = overwritten | (known.names - known.noted)
        if not known.names <= known.noted:
            noted = known.noted | known.names
            write_note(store, noted)
            known.noted = noted
        if known.new or unseen:
            try:
                self._save_workers_versions(TrialDir(store, trial), known.new | unseen, unseen=unseen)
            except ArtifactSyncError:
                known.noted -= unseen  # to be looked at again
                self._held_back.update(f"{trial}/{name}" for name in unseen)
                raise
            known.new.clear()
        return overwritten

    def _is_trial(self, trial: str, store: ArtifactStore) -> bool:
        """Whether a directory of the experiment is a trial's: a callback may make others."""
        if trial not in self._with_declared and store.stat(layout.WRITER) is not None:
            self._with_declared.add(trial)
        return trial in self._with_declared

    def _save_workers_versions(self, worker: TrialDir, names: Collection[str], *, unseen: Collection[str]) -> None:
        """The driver's files stay; what a worker stored at the same paths is kept for its checkpoints.

        Args:
            worker: The trial.
            names: Where to look.
            unseen: Where the worker may be writing just now. At the others it knew of the note by the time it began:
                what matters there is listed.
        """
        copies = {name: copy for name in sorted(unseen) if (copy := _take(worker.store, name))}
        head = _head(worker)
        listed = {name: entry for name in names if (entry := head.get(name))}
        copies |= {name: copy for name in listed.keys() - unseen if (copy := _take(worker.store, name))}
        if not copies:
            return
        own = {name: _digest(os.path.join(self._local_dir, worker.name, name)) for name in copies}
        collided = _preserve(worker, copies, listed, own)
        worker.store.delete(copies.values())
        for name in sorted(collided):
            self._say_collision(worker.name, name)

    def _say_undeclared(self, trial: str, name: str) -> None:
        pattern = f"{name.partition('/')[0]}/" if "/" in name else name
        if pattern in self._said:
            return
        self._said.add(pattern)
        logger.warning(
            "The driver writes %s into trial dirs (first seen in %s), but no callback declares it. If a trainable "
            "writes the same file, the two would overwrite each other. Declare it on the callback that writes it: "
            "`artifact_patterns = (%r,)`; for somebody else's callback: `ArtifactRegistry.declare(ThatCallback, %r)`.",
            name,
            trial,
            pattern,
            pattern,
        )

    def _say_collision(self, trial: str, name: str) -> None:
        if f"{trial}/{name}" in self._said:
            return
        self._said.add(f"{trial}/{name}")
        logger.warning(
            "%s of %s is written by the driver and by the trainable. The driver's stays; the trainable's is kept only "
            "where a checkpoint needs it. Rename one of them, or declare it (see above).",
            name,
            trial,
        )


def files_below(local_dir: str) -> list[str]:
    """All files below a directory, as POSIX paths relative to it."""
    found = []
    for directory, _, names in os.walk(local_dir):
        prefix = os.path.relpath(directory, local_dir)
        found += [name if prefix == "." else f"{prefix}/{name}" for name in names]
    return found


def _newest_below(directory: str) -> int:
    newest = 0
    for path in files_below(directory):
        try:
            newest = max(newest, os.stat(os.path.join(directory, path)).st_mtime_ns)
        except OSError:
            continue  # gone since it was listed
    return newest


def _is_there(store: ArtifactStore, name: str, state: PathState) -> bool:
    """Whether a path holds what the driver left there, as far as its size and etag tell."""
    present = store.stat(name)
    if present is None or present.size != state.size:
        return False
    return present.etag is None or state.etag is None or present.etag == state.etag


def _head(worker: TrialDir) -> Mapping[str, FileEntry]:
    """What the worker lists as its newest artifacts; nothing if that is damaged."""
    try:
        head = worker.head()
    except ManifestError as error:
        logger.debug("%s", error)
        return {}
    return head.manifest.entries if head else {}


def _take(store: ArtifactStore, name: str) -> str:
    """Copies what a path holds to where only the driver writes.

    Returns:
        Where to; empty if the path holds nothing.
    """
    copy = f"{layout.TAKING}/{blake3(name.encode()).hexdigest()}"
    try:
        store.copy(name, copy)
    except (ArtifactNotFoundError, InvalidPathError):  # or it is a path that this store cannot hold
        return ""
    return copy


def _digest(local_path: str) -> str:
    with suppress(OSError, ArtifactSyncError):
        return hash_file(local_path).digest
    return ""


def _preserve(
    worker: TrialDir, copies: Mapping[str, str], listed: Mapping[str, FileEntry], own: Mapping[str, str]
) -> set[str]:
    """Keeps what copies of paths hold, as far as the worker lists it or may be about to.

    Args:
        worker: The trial. What it lists is looked up now, after the copies were made: what is listed later is what they
            hold, or was stored by somebody who has seen the note.
        copies: Path to the copy of what it held.
        listed: What the head says about them.
        own: Path to the digest of the driver's file.

    Returns:
        The paths that held something of the worker's.
    """
    inventory = worker.inventory()
    stacks = [worker.snapshot(name, paths) for name, paths in inventory.snapshots.items()]
    for key in inventory.exploits:
        with suppress(ManifestError):  # damaged: it stands for nothing
            stacks.append(worker.exploit(key))
    collided = set()
    for name, copy in copies.items():
        entries = [listed.get(name), *(stack.manifest.get(name) for stack in stacks if stack is not None)]
        versions = {(entry.size, entry.digest) for entry in entries if entry is not None and entry.size}
        whole, beginnings = _digests_of(worker.store, copy, sorted(versions))
        if versions or (whole and whole != own[name]):
            collided.add(name)
        wanted = {digest for _, digest in versions} & beginnings | ({whole} - {"", own[name]})
        for digest in sorted(wanted - inventory.objects.keys()):
            worker.store.copy(copy, layout.object_path(NO_TOKEN, digest))
    return collided


def _digests_of(store: ArtifactStore, path: str, versions: list[tuple[int, str]]) -> tuple[str, set[str]]:
    """The digest of a file (empty if there is nothing in it), and those of its beginnings.

    Args:
        store: Where it is.
        path: The file.
        versions: Size in bytes and digest of what it may begin with, the smallest first.

    Returns:
        The first, and which versions' digests are right.
    """
    found: set[str] = set()
    left = list(versions)
    hasher, offset = blake3(), 0
    for chunk in store.read_chunks(path):
        view = memoryview(chunk)
        while left and offset + len(view) >= left[0][0]:
            size, digest = left.pop(0)
            hasher.update(view[: size - offset])
            view, offset = view[size - offset :], size
            if hasher.hexdigest() == digest:
                found.add(digest)
        hasher.update(view)
        offset += len(view)
    return (hasher.hexdigest() if offset else ""), found
