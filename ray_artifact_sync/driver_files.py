"""The driver's side of ownership: files that nobody declared, and files that worker and driver both write.

Ray's driver keeps one staging directory for the experiment, with a directory for each trial; the session of a trial
runs elsewhere and cannot know what callbacks put there unless they declare it. So, for a file that is not declared:

- Before the driver stores it, a note in the trial dir names it (`driver_note.py`); a session that finds the note leaves
  the path to the driver.
- What a worker had stored at the path by then is preserved for the checkpoints that list it.
- Where the store lets a worker replace the driver's version before it has seen the note (one without preconditions, or
  a large file), the driver sees that at its next syncs and sends its version again. It looks for as long as files of
  the trial change, and `LOOKS` syncs longer.

Declared files cost nothing of this.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.driver_note import read_note, write_note
from ray_artifact_sync.entries import FileEntry
from ray_artifact_sync.errors import ArtifactNotFoundError, ArtifactSyncError
from ray_artifact_sync.plan import PathState
from ray_artifact_sync.registry import ArtifactRegistry
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
        if not known.names <= known.noted:
            noted = known.noted | known.names
            write_note(store, noted)
            known.noted = noted
        if known.new or overwritten:
            self._save_workers_versions(TrialDir(store, trial), known.new | overwritten)
            known.new.clear()
        return overwritten

    def _is_trial(self, trial: str, store: ArtifactStore) -> bool:
        """Whether a directory of the experiment is a trial's: a callback may make others."""
        if trial not in self._with_declared and store.stat(layout.WRITER) is not None:
            self._with_declared.add(trial)
        return trial in self._with_declared

    def _save_workers_versions(self, worker: TrialDir, names: Iterable[str]) -> None:
        """The driver's files stay; what a worker stored at the same paths is kept for its checkpoints."""
        head = worker.head()
        entries = {name: entry for name in names if (entry := head.manifest.get(name) if head else None)}
        for name in sorted(entries):
            if not entries[name].is_dir:
                self._say_collision(worker.name, name)
        if entries:
            _preserve(worker, entries)

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


def _preserve(worker: TrialDir, entries: Mapping[str, FileEntry]) -> None:
    """Copies what the worker's checkpoints and its head list, from the paths to the preserved versions."""
    inventory = worker.inventory()
    stacks = [worker.snapshot(name, paths) for name, paths in inventory.snapshots.items()]
    stacks += [worker.exploit(key) for key in inventory.exploits]
    for name, newest in entries.items():
        listed = [newest, *(stack.manifest.get(name) for stack in stacks if stack is not None)]
        versions = {(entry.size, entry.digest) for entry in listed if entry is not None and entry.size}
        wanted = sorted(version for version in versions if version[1] not in inventory.objects)
        for digest in _held(worker.store, name, wanted):
            worker.store.copy(name, layout.object_path(NO_TOKEN, digest))


def _held(store: ArtifactStore, name: str, versions: list[tuple[int, str]]) -> list[str]:
    """Which versions (size and digest, the smallest first) what a path holds begins with."""
    found: list[str] = []
    left = list(versions)
    hasher, offset = blake3(), 0
    try:
        for chunk in store.read_chunks(name, length=left[-1][0]) if left else ():
            view = memoryview(chunk)
            while left and offset + len(view) >= left[0][0]:
                size, digest = left.pop(0)
                hasher.update(view[: size - offset])
                view, offset = view[size - offset :], size
                if hasher.copy().hexdigest() == digest:
                    found.append(digest)
            hasher.update(view)
            offset += len(view)
    except ArtifactNotFoundError:
        return []
    return found
