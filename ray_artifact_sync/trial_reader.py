"""Reads one trial: what its manifests list, and where on storage the bytes of each version lie. Never writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.driver_note import read_note
from ray_artifact_sync.entries import FileEntry, Manifest
from ray_artifact_sync.errors import ArtifactNotFoundError, IntegrityError, ManifestError
from ray_artifact_sync.registry import ArtifactRegistry
from ray_artifact_sync.sharded_upload import SetDir
from ray_artifact_sync.stores.base import Buffer, StoredFile
from ray_artifact_sync.transfer import call_with_retries
from ray_artifact_sync.trial_dir import Inventory, TrialDir

READ_RETRIES = 4
LOADING_THREADS = 16
SHOWN_NAMES = 5
A_CALLBACK = "a callback"
"""The owner of a file that the driver stored and that no known component declares."""

Result = TypeVar("Result")


def request(call: Callable[[], Result], what: str) -> Result:
    """One request that reads, tried again when it may succeed later."""
    return call_with_retries(call, retries=READ_RETRIES, deadline=Deadline(), what=what)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that has a snapshot of the artifacts.

    Attributes:
        name: Checkpoint dir name.
        manifest: The artifacts as of this checkpoint.
        saved_ns: When the snapshot was written, by the storage's clock, ns since the epoch; None if it does not say.
    """

    name: str
    manifest: Manifest
    saved_ns: int | None


@dataclass(frozen=True, slots=True)
class Contents:
    """What lies in a trial dir at the moment of one listing.

    Attributes:
        listing: Path to file, for every file there is.
        inventory: The same by what it is.
        head: The newest artifacts; None before the first commit, or the error where it is damaged.
        checkpoints: Those with a snapshot, by name, the oldest first.
        bare_checkpoints: Names of those without.
    """

    listing: Mapping[str, StoredFile]
    inventory: Inventory
    head: Manifest | ManifestError | None
    checkpoints: Mapping[str, SavedCheckpoint]
    bare_checkpoints: tuple[str, ...]


class TrialReader:
    """One trial, read only. Loaded when it is first asked, and kept; thread-safe.

    Args:
        name: What people call it.
        trial: Where it lies.
        driver_files: Gives the paths in it that the driver stored, when that must be known.
    """

    def __init__(self, name: str, trial: TrialDir, *, driver_files: Callable[[], frozenset[str]] = frozenset) -> None:
        self.name = name
        self.trial = trial
        self._driver_files = driver_files
        self._contents: Contents | None = None
        self._objects_now: Mapping[str, tuple[str, ...]] | None = None
        self._lock = threading.RLock()

    # --- what there is ------------------------------------------------------------------------------

    @property
    def contents(self) -> Contents:
        """What lies in the trial dir; listed once.

        Raises:
            StorageError: Storage cannot be read.
        """
        with self._lock:
            if self._contents is None:
                self._contents = self._load()
            return self._contents

    def refresh(self) -> None:
        """Forgets what was read: the next question looks again."""
        with self._lock:
            self._contents = self._objects_now = None

    @property
    def head(self) -> Manifest:
        """The newest artifacts; empty before the first commit.

        Raises:
            ManifestError: The manifest is damaged, or a newer release wrote it. Checkpoints do not depend on it.
        """
        head = self.contents.head
        if isinstance(head, ManifestError):
            raise head
        return head or Manifest()

    @property
    def checkpoints(self) -> Mapping[str, SavedCheckpoint]:
        """Those with a snapshot, the oldest first."""
        return self.contents.checkpoints

    def manifest(self, checkpoint: str | None = None) -> Manifest:
        """The newest artifacts, or those of a checkpoint.

        Raises:
            ArtifactNotFoundError: There is no such checkpoint, or it has no snapshot.
        """
        if checkpoint is None:
            return self.head
        saved = self.checkpoints.get(checkpoint)
        if saved is not None:
            return saved.manifest
        if checkpoint in self.contents.bare_checkpoints:
            raise ArtifactNotFoundError(
                f"{checkpoint} of {self.name} has no snapshot of the artifacts: an older run, a failed sync, or the "
                "directory of another trial."
            )
        names = list(self.checkpoints)
        known = ", ".join([*(["..."] if len(names) > SHOWN_NAMES else []), *names[-SHOWN_NAMES:]]) or "none"
        raise ArtifactNotFoundError(f"{self.name} has no {checkpoint}; checkpoints with artifacts: {known}.")

    def first_checkpoint(self, entry: FileEntry) -> str | None:
        """The first of the present checkpoints that has this very version at this path."""
        for name, saved in self.checkpoints.items():
            if entry.same_content(saved.manifest.get(entry.path)):
                return name
        return None

    def other_files(self) -> list[tuple[StoredFile, str | None]]:
        """Files in the trial dir that are no artifacts: with their owner, or None where nobody known declares them."""
        registry = ArtifactRegistry.default()
        listed = self.head.entries
        files = {
            path: file
            for path, file in sorted(self.contents.inventory.files.items())
            if not layout.is_reserved(path) and (path not in listed or listed[path].is_dir)
        }
        owners = {path: owner.name for path in files if (owner := registry.owner_of(path))}
        if files.keys() - owners.keys():
            owners = {**dict.fromkeys(self._noted_files(), A_CALLBACK), **owners}
        return [(file, owners.get(path)) for path, file in files.items()]

    def _noted_files(self) -> frozenset[str]:
        """What the driver stored, as it says: declared by a callback that only the run knows, or by none."""
        noted = self._driver_files()
        if layout.DRIVER_FILES in self.contents.listing:
            noted |= request(lambda: read_note(self.trial.store), "Reading the driver's note")
        return noted

    # --- the bytes ----------------------------------------------------------------------------------

    def places(self, entry: FileEntry) -> Iterator[str]:
        """Where storage may hold a version, the surest first; the last ones cost a request."""
        return self.trial.places(entry, self.contents.inventory.objects, self._listed_again)

    def chunks(self, entry: FileEntry, place: str, *, start: int = 0) -> Iterator[Buffer]:
        """The bytes from `start` on that a place holds for a version; whoever takes them checks the digest."""
        if start >= entry.size:
            return iter(())
        return self.trial.store.read_chunks(place, start=start, length=entry.size - start)

    def read(self, entry: FileEntry) -> bytes:
        """The whole content of a version, verified.

        Raises:
            IntegrityError: No place holds it any more.
        """
        if entry.size == 0:
            return b""
        for place in self.places(entry):
            try:
                data = request(lambda place=place: b"".join(self.chunks(entry, place)), f"Reading {place}")  # type: ignore[misc]
            except ArtifactNotFoundError:
                continue
            if len(data) == entry.size and blake3(data).hexdigest() == entry.digest:
                return data
        raise self.lost(entry)

    def lost(self, entry: FileEntry) -> IntegrityError:
        """The error that says that a version is nowhere."""
        return IntegrityError(
            f"{self.name}/{entry.path} ({entry.size} bytes, {entry.digest[:12]}) is nowhere in "
            f"{self.trial.store.description} any more: deleted or replaced by somebody, or by the trial if it is "
            "running (then look again).",
            path=entry.path,
        )

    def _listed_again(self) -> Mapping[str, tuple[str, ...]]:
        with self._lock:
            if self._objects_now is None:
                self._objects_now = request(self.trial.objects, "Listing preserved copies")
            return self._objects_now

    # --- loading ------------------------------------------------------------------------------------

    def _load(self) -> Contents:
        files = request(lambda: list(self.trial.store.list()), f"Listing {self.name}")
        head: Manifest | ManifestError | None
        try:
            stack = request(self.trial.head, f"Reading the manifest of {self.name}")
            head = stack.manifest if stack is not None else None
        except ManifestError as error:
            head = error
        if isinstance(head, Manifest) and any(map(self.trial.in_checkpoint, head.entries)):
            self.trial = SetDir(self.trial.store, self.trial.name)  # a set of files has no checkpoints of Ray
        listing = {file.path: file for file in files}
        inventory = self.trial.inventory(files)
        saved: dict[str, SavedCheckpoint] = {}

        def load(name: str) -> None:
            found = request(lambda: self.trial.snapshot(name, inventory.snapshots[name]), f"Reading {name}")
            if found is not None:
                times = [listing[path].mtime_ns for path in inventory.snapshots[name]]
                saved[name] = SavedCheckpoint(name, found.manifest, max((t for t in times if t), default=None))

        run_all(inventory.snapshots, load, workers=LOADING_THREADS, deadline=Deadline())
        checkpoints = {name: saved[name] for name in sorted(saved, key=lambda name: checkpoint_order(saved[name]))}
        directories = {path.partition("/")[0] for path in listing if self.trial.in_checkpoint(path)}
        return Contents(listing, inventory, head, checkpoints, tuple(sorted(directories - saved.keys())))


def checkpoint_order(saved: SavedCheckpoint) -> tuple[bool, int, str]:
    """Sorts checkpoints: Ray Tune's by number, others by the time of the snapshot."""
    if layout.is_checkpoint_dir(saved.name):
        return False, layout.checkpoint_index(saved.name), saved.name
    return True, saved.saved_ns or 0, saved.name


def load_all(readers: Mapping[str, TrialReader]) -> dict[str, Exception]:
    """Loads trials, many at once; gives the errors of those that cannot be read."""
    failures: dict[str, Exception] = {}

    def load(reader: TrialReader) -> None:
        try:
            _ = reader.contents
        except Exception as error:
            failures[reader.name] = error

    run_all(readers.values(), load, workers=LOADING_THREADS, deadline=Deadline())
    return failures
