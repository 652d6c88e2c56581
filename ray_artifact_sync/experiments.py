"""Finds the trials below a place on storage: an experiment, one trial, or a Ray Train run with its parts.

What makes a directory a trial is the claim of its writer, `.ray_artifact_sync/writer.json`. A manifest without a claim
is that of a directory that is merely kept in sync: the driver's files of an experiment, or what `ArtifactSyncer` sent.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.errors import (
    ArtifactNotFoundError,
    ArtifactSyncError,
    ConfigurationError,
    InvalidPathError,
    StoragePermissionError,
)
from ray_artifact_sync.run_parts import ARTIFACTS, part_of
from ray_artifact_sync.sharded_upload import SetDir
from ray_artifact_sync.stores import ArtifactStore, open_store, resolve_uri
from ray_artifact_sync.stores.common import scrub
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.trial_dir import TrialDir

logger = logging.getLogger(__name__)

LOOKING_THREADS = 32
MAX_DEPTH = 2
"""Storage path, experiment, trial: so deep below the place that was named."""

_RAY_FILES = re.compile(r"experiment_state-.*\.json|tuner\.pkl|trainer\.pkl|result\.json|params\.json|progress\.csv")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_AT = re.compile(r"(?P<place>.+?)/*@(?P<checkpoint>checkpoint_[^/@?]+)(?P<query>\?.*)?")


@dataclass(frozen=True, slots=True)
class Place:
    """A directory on a storage.

    Attributes:
        uri: As people name it; without credentials.
        filesystem: What `path` is on: a pyarrow or fsspec file system.
        path: The directory.
    """

    uri: str
    filesystem: Any = field(repr=False)
    path: str

    @property
    def name(self) -> str:
        """The last segment of the path."""
        return self.path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class FoundTrial:
    """A trial that was found.

    Attributes:
        name: Its path below the place that was searched; its own name where it is that place.
        trial: Reads it.
        driver_files: Gives the paths in it that the driver stored; asks storage when it is called.
    """

    name: str
    trial: TrialDir
    driver_files: Callable[[], frozenset[str]] = frozenset


@dataclass(frozen=True, slots=True)
class Found:
    """What lies at a place.

    Attributes:
        place: Where.
        store: Its root is the place.
        trials: By name.
        directories: Those that are merely kept in sync (an experiment's files of the driver).
        single: The place is one trial itself, and paths in it need no trial's name.
    """

    place: Place
    store: ArtifactStore
    trials: tuple[FoundTrial, ...]
    directories: tuple[FoundTrial, ...]
    single: bool


class DriverListing:
    """What the driver stored below an experiment's directory, as its manifest there says; read once, when asked.

    Args:
        open_dir: Opens the experiment's directory.
    """

    def __init__(self, open_dir: Callable[[], ArtifactStore]) -> None:
        self._open_dir = open_dir
        self._paths: list[str] | None = None
        self._lock = threading.Lock()

    def files_of(self, trial: str) -> frozenset[str]:
        """Paths in a trial dir that the driver stored; none where that cannot be read."""
        with self._lock:
            if self._paths is None:
                self._paths = self._read()
        return frozenset(path[len(trial) + 1 :] for path in self._paths if path.startswith(f"{trial}/"))

    def _read(self) -> list[str]:
        try:
            stack = SetDir(self._open_dir(), "").head()
        except (ArtifactSyncError, ValueError) as error:
            logger.info("What the driver stored is not known: %s", error)
            return []
        return list(stack.manifest.entries) if stack is not None else []


def split_checkpoint(uri: str) -> tuple[str, str | None]:
    """Splits `URI@checkpoint_000003`; the checkpoint may stand before or after the options of the URI."""
    match = _AT.fullmatch(uri)
    if match is None:
        return uri, None
    return f"{match['place']}{match['query'] or ''}", match["checkpoint"]


def place_at(uri: str | os.PathLike[str], storage_filesystem: Any = None) -> Place:
    """The place that a URI, a path, or a path on a file system names.

    Raises:
        ConfigurationError: It cannot be understood.
    """
    text = os.fspath(uri)
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"A place is a URI such as 's3://bucket/experiment' or a path, not {uri!r}.")
    if storage_filesystem is None and not _SCHEME.match(text):
        text = os.path.abspath(os.path.expanduser(text))
    filesystem, path = resolve_uri(text, storage_filesystem)
    return Place(scrub(text), filesystem, path.rstrip("/") or path)


def find_trials(place: Place) -> Found:
    """Finds the trials at a place or below it.

    One to three requests for each directory that is looked at, many at once; nothing is written.

    Raises:
        ArtifactNotFoundError: There is nothing, or nothing of this library.
        StorageError: Storage cannot be read.
    """
    run_dir, part = _run_of(place)
    if part:
        run = open_store(place.filesystem, run_dir)
        trial = part_of(run, run_dir.rpartition("/")[2], part)
        if trial.store.below(layout.STATE_DIR).list_files():
            return Found(place, trial.store, (FoundTrial(part, trial),), (), single=True)
    store = open_store(place.filesystem, place.path)
    search = _Search(place.name)
    search.look(store, "", 0)
    if not search.trials and search.root_directory is not None:
        return Found(place, store, (search.root_directory,), (), single=True)
    if not search.trials:
        raise ArtifactNotFoundError(_nothing_there(place, store))
    directories = (*search.directories, *([search.root_directory] if search.root_directory else []))
    single = search.root_is_trial and len(search.trials) == 1
    trials = _with_driver_files(search.trials, place if search.root_is_trial else None, store)
    return Found(place, store, trials, directories, single=single)


def _with_driver_files(trials: list[FoundTrial], place: Place | None, store: ArtifactStore) -> tuple[FoundTrial, ...]:
    """The trials by name, each with what knows about the driver's files in it.

    Args:
        trials: What was found.
        place: Where the place is a trial itself: its experiment lies above.
        store: Its root is the place.
    """
    listings: dict[str, DriverListing] = {}
    found = []
    for one in sorted(trials, key=lambda trial: trial.name):
        experiment, _, own_name = one.name.rpartition("/")
        if experiment not in listings:
            listings[experiment] = DriverListing(_opener(place, store, experiment))
        found.append(replace(one, driver_files=partial(listings[experiment].files_of, own_name)))
    return tuple(found)


def _opener(place: Place | None, store: ArtifactStore, experiment: str) -> Callable[[], ArtifactStore]:
    if place is not None:
        return lambda: open_store(place.filesystem, place.path.rpartition("/")[0])
    return lambda: store.below(experiment) if experiment else store


def _run_of(place: Place) -> tuple[str, str]:
    """The run and the part, if the place could be a part of a Ray Train run."""
    parent, _, part = place.path.rpartition("/")
    run_dir, _, artifacts = parent.rpartition("/")
    return (run_dir, part) if artifacts == ARTIFACTS and run_dir and part else ("", "")


class _Search:
    """One search; collects what it finds. `look` is called by many threads at once."""

    def __init__(self, root_name: str) -> None:
        self.trials: list[FoundTrial] = []
        self.directories: list[FoundTrial] = []
        self.root_directory: FoundTrial | None = None
        self.root_is_trial = False
        self._root_name = root_name
        self._lock = threading.Lock()

    def look(self, store: ArtifactStore, name: str, depth: int) -> None:
        """Looks at one directory, and below it where trials may be.

        Args:
            store: Its root is the directory.
            name: Its path below the place; empty for the place itself.
            depth: How far below.
        """
        own_name = name.rpartition("/")[2] or self._root_name
        children = store.list_dirs()
        state = (
            {file.path.rpartition("/")[2] for file in store.list_files(layout.STATE_DIR)}
            if layout.STATE_DIR in children
            else set()
        )
        is_trial = "writer.json" in state
        is_synced = "manifest.json" in state and not is_trial
        with self._lock:
            if is_trial:
                self.trials.append(FoundTrial(name or own_name, TrialDir(store, own_name)))
                self.root_is_trial = self.root_is_trial or not name
            elif is_synced:
                directory = FoundTrial(name or own_name, SetDir(store, own_name))
                if name:
                    self.directories.append(directory)
                else:
                    self.root_directory = directory
        if ARTIFACTS in children and self.look_for_parts(store, name, own_name):
            children.remove(ARTIFACTS)
        if depth < MAX_DEPTH and not is_trial:
            below = [child for child in children if not (layout.is_reserved(child) or layout.is_checkpoint_dir(child))]
            run_all(
                below,
                lambda child: self.look_below(store, child, f"{name}/{child}" if name else child, depth + 1),
                workers=LOOKING_THREADS >> 2 * depth,
                deadline=Deadline(),
            )

    def look_below(self, store: ArtifactStore, child: str, name: str, depth: int) -> None:
        """Looks at a directory that nobody named: one that is closed to us (`lost+found`), or odd, is left out."""
        try:
            self.look(store.below(child), name, depth)
        except (StoragePermissionError, InvalidPathError) as error:
            logger.warning("%s is left out: %s", name, error)

    def look_for_parts(self, store: ArtifactStore, name: str, own_name: str) -> bool:
        """The parts of a Ray Train run; whether there are any."""
        any_found = False
        for part in store.list_dirs(ARTIFACTS):
            path = f"{ARTIFACTS}/{part}"
            claim = f"{path}/{layout.WRITER}"
            if any(file.path == claim for file in store.list_files(f"{path}/{layout.STATE_DIR}")):
                found = FoundTrial(f"{name}/{path}" if name else path, part_of(store, own_name, part))
                any_found = True
                with self._lock:
                    self.trials.append(found)
        return any_found


def _nothing_there(place: Place, store: ArtifactStore) -> str:
    """Why there is no trial at a place, in one sentence."""
    if isinstance(store, PosixStore) and os.path.isfile(store.root):
        return f"{place.uri} is a file; name the directory of an experiment or of a trial."
    files, dirs = store.list_files(), store.list_dirs()
    if not files and not dirs:
        return f"There is nothing at {place.uri}."
    if layout.is_checkpoint_dir(place.name):
        trial, _, checkpoint = place.uri.partition("?")[0].rpartition("/")
        return f"{place.uri} is a checkpoint; name its trial and the checkpoint like this: {trial}@{checkpoint}"
    names = [file.path for file in files]
    if any(_RAY_FILES.fullmatch(name) for name in names):
        return (
            f"{place.uri} was written by Ray, but without ray-artifact-sync: no trial there has a "
            f"{layout.STATE_DIR} directory. Run it with `configure(run_config)`."
        )
    return (
        f"There is no experiment or trial at {place.uri}: none of its {len(files)} files and {len(dirs)} directories "
        "was written by ray-artifact-sync."
    )
