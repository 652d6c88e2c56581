"""The driver's side of ownership: files that nobody declared, and files that worker and driver both write.

Ray's driver keeps one staging directory for the experiment, with a directory for each trial; the session of a trial
runs elsewhere and cannot know what callbacks put there unless they declare it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from ray_artifact_sync import layout
from ray_artifact_sync.entries import FileEntry
from ray_artifact_sync.errors import ArtifactSyncError
from ray_artifact_sync.registry import ArtifactRegistry
from ray_artifact_sync.stores.base import ArtifactStore
from ray_artifact_sync.trial_dir import TrialDir

logger = logging.getLogger(__name__)

NO_TOKEN = layout.make_token(0)
"""Under this token the driver preserves a worker's version; every attempt may clean it up."""


class DriverFiles:
    """Watches the files of one experiment's staging directory; says each thing once.

    Args:
        local_dir: The staging directory.
        registry: Who writes what.
    """

    def __init__(self, local_dir: str, registry: ArtifactRegistry) -> None:
        self._local_dir = local_dir
        self._registry = registry
        self._seen: set[str] = set()
        self._said: set[str] = set()

    def before_sync(self, open_trial: Callable[[str], ArtifactStore]) -> None:
        """Looks at the files that are new in the staging directory.

        Args:
            open_trial: Opens the storage of a trial, given its trial dir's name.
        """
        for path in files_below(self._local_dir):
            if path in self._seen:
                continue
            self._seen.add(path)
            trial, _, name = path.partition("/")
            if name and trial != layout.STATE_DIR and self._registry.owner_of(name) is None:
                self._say_undeclared(trial, name)
                self._save_workers_version(trial, name, open_trial)

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

    def _save_workers_version(self, trial: str, name: str, open_trial: Callable[[str], ArtifactStore]) -> None:
        """The driver's file stays; what a worker stored at the same path is kept for its checkpoints."""
        try:
            worker = TrialDir(open_trial(trial), trial)
            head = worker.head()
            entry = head.manifest.get(name) if head is not None else None
            if entry is None or entry.is_dir:
                return
            self._preserve(worker, entry)
        except ArtifactSyncError as error:
            logger.warning("Could not look at what the worker of %s stored as %s: %s", trial, name, error)
            return
        logger.warning(
            "%s of %s is written by the driver and by the trainable. The driver's stays; the trainable's is kept only "
            "where a checkpoint needs it. Rename one of them, or declare it (see above).",
            name,
            trial,
        )

    def _preserve(self, worker: TrialDir, entry: FileEntry) -> None:
        if entry.size and entry.digest not in worker.objects():
            worker.store.copy(entry.path, layout.object_path(NO_TOKEN, entry.digest))


def files_below(local_dir: str) -> list[str]:
    """All files below a directory, as POSIX paths relative to it."""
    found = []
    for directory, _, names in os.walk(local_dir):
        prefix = os.path.relpath(directory, local_dir)
        found += [name if prefix == "." else f"{prefix}/{name}" for name in names]
    return found
