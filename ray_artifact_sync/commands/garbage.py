"""Finds and removes what nothing in a trial dir refers to any more. For trials that nobody writes to now.

A session cleans up after itself; what is left here is from attempts that were killed. The rules are those of
`KnownStorage.garbage`, with two differences: nothing is known but what storage says, so more is kept (every snapshot
pins, whether it counts or not); and a session that is running may know of things that nothing on storage refers to yet:
a snapshot that will be written when its checkpoint's files are there, a layer or a copy that the next commit names, a
temporary file. None of these can be told from garbage by looking. So a trial is touched only if nothing at all in its
directory, nor among its experiment's files of the driver, was written for a time that no running trial lets pass
(`older_than`); a trial that cannot be judged is left alone.

What is removed, by its exact name only: preserved versions, layers, the records of restores before the last one, files
that were being written, probes of `doctor`. Never artifacts, checkpoints, or anything else.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ray_artifact_sync import layout
from ray_artifact_sync.entries import Manifest
from ray_artifact_sync.errors import ArtifactNotFoundError, ArtifactSyncError, ManifestError
from ray_artifact_sync.manifest import Document, ManifestStack
from ray_artifact_sync.plan import parents
from ray_artifact_sync.run_parts import RunPartDir
from ray_artifact_sync.sharded_upload import SetDir
from ray_artifact_sync.stores.base import ArtifactStore, StoredFile
from ray_artifact_sync.trial_dir import TrialDir
from ray_artifact_sync.trial_reader import request

BATCH = 500
"""Files that are deleted between two looks whether somebody began to write."""
FUTURE_SECONDS = 300.0
"""How far the storage's clock may be ahead of this one."""

_DIGITS = rf"[0-9]{{{layout.TOKEN_DIGITS}}}"
_TMP = re.compile(rf"tmp/(?:(?P<token>{_DIGITS})|free-[0-9a-f-]+|gone-[0-9a-f]+|append-[0-9a-f]+)(?:/.+)?")
_PROBE = re.compile(rf"{re.escape(layout.STATE_DIR)}/doctor-[0-9a-f]{{16}}/[a-z]+")

Kind = Literal["aside", "layer", "object", "tmp", "probe"]
KINDS: tuple[Kind, ...] = ("aside", "layer", "object", "tmp", "probe")
"""In the order of removal: a record never outlives what it refers to."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One file that nothing refers to; `path` is relative to the trial dir."""

    kind: Kind
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Garbage:
    """What was found in one trial dir.

    Attributes:
        pieces: What may go, in the order of removal.
        skipped: Why the trial is left alone; empty if it is not.
        is_problem: Whether that is because something is not right there.
        mark: What is looked at again before each removal.
    """

    pieces: tuple[Piece, ...] = ()
    skipped: str = ""
    is_problem: bool = False
    mark: tuple[object, ...] = field(default=(), repr=False)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(piece.size for piece in self.pieces)


class SignsOfLife:
    """Files that are written while a trial runs, beyond its own: those of the driver in the experiment's directory.

    Args:
        above: Its root is a directory that the trials lie in, at any depth; None if that cannot be read.
    """

    def __init__(self, above: ArtifactStore | None) -> None:
        self._above = above
        self._folders: dict[str, list[StoredFile]] = {}
        self._runs: dict[int, list[StoredFile]] = {}
        self._lock = threading.Lock()

    def of(self, path: str, trial: TrialDir) -> list[StoredFile]:
        """Files whose age counts for a trial; for a part of a Ray Train run, all of the run's.

        Args:
            path: The trial's, below the root.
            trial: The trial.
        """
        with self._lock:
            found: list[StoredFile] = []
            if self._above is not None:
                for folder in ["", *parents(path)]:
                    if folder not in self._folders:
                        self._folders[folder] = request(partial(self._above.list_files, folder), "Listing")
                    found += self._folders[folder]
            if isinstance(trial, RunPartDir):
                run = trial.part_store.run
                if id(run) not in self._runs:
                    self._runs[id(run)] = request(lambda: list(run.list()), "Listing the run")
                found += self._runs[id(run)]
            return found


def find_garbage(trial: TrialDir, *, older_than: float, signs: Iterable[StoredFile]) -> Garbage:
    """Looks for garbage in one trial dir, or in a directory that is merely kept in sync. Writes nothing.

    Args:
        trial: Where.
        older_than: Seconds that nothing may have been written for.
        signs: Files elsewhere whose age counts, too.

    Raises:
        StorageError: Storage cannot be read.
    """
    mark = _mark(trial)  # before the listing: what comes after it is seen as a change
    listed = {file.path: file for file in request(lambda: _listing(trial), f"Listing {trial.name}")}
    inner = trial.store.below(layout.STATE_DIR)  # listings of the trial dir do not show its temporary files
    tmp = [
        replace(file, path=f"{layout.STATE_DIR}/{file.path}")
        for file in request(lambda: list(inner.list("tmp")), "Listing temporary files")
    ]
    if reason := _why_alive([*listed.values(), *tmp, *signs], older_than):
        return Garbage(skipped=reason)
    token = request(trial.claim, "Reading the claim") or "" if layout.WRITER in listed else ""
    if not token and not isinstance(trial, SetDir):
        return Garbage(skipped=f"{layout.WRITER} is damaged or gone", is_problem=True)
    try:
        pinned = _Pinned.read(trial, listed)
    except ManifestError as error:
        return Garbage(skipped=f"what it refers to is not known: {error}", is_problem=True)
    if pinned is None:
        return Garbage(skipped="it has no manifest, so that nothing says what is referred to")
    pieces = [*_state_files(listed.values(), pinned, token), *_temporary(tmp, token)]
    return Garbage(tuple(sorted(pieces, key=lambda piece: (KINDS.index(piece.kind), piece.path))), mark=mark)


def remove_garbage(trial: TrialDir, garbage: Garbage) -> Iterator[Sequence[Piece]]:
    """Removes what was found, in batches; gives each batch when it is gone.

    Killed at any moment, or when storage fails, what is left is as it was: no manifest refers to anything removed.

    Raises:
        ArtifactSyncError: Somebody began to write to the trial; nothing more was removed.
        StorageError: Storage refused.
    """
    for kind in KINDS:
        pieces = [piece for piece in garbage.pieces if piece.kind == kind]
        for start in range(0, len(pieces), BATCH):
            batch = pieces[start : start + BATCH]
            if _mark(trial) != garbage.mark:
                raise ArtifactSyncError(
                    f"Somebody writes to {trial.store.description} since it was looked at; the rest was left alone."
                )
            _delete(trial, kind, [piece.path for piece in batch])
            yield batch


def _listing(trial: TrialDir) -> list[StoredFile]:
    if isinstance(trial, SetDir):
        # It may be a whole experiment: each sync writes its manifest, so that its own files say enough.
        return [*trial.store.list_files(), *trial.store.list(layout.STATE_DIR)]
    return list(trial.store.list())


def _delete(trial: TrialDir, kind: Kind, paths: list[str]) -> None:
    if kind != "tmp":
        request(lambda: trial.store.delete(paths), "Removing garbage")
        return
    # By the directory that they lie in, which stays: without it, a session could not go on.
    folders: dict[str, list[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append(name)
    for folder, names in folders.items():
        store = trial.store.below(folder)
        request(lambda store=store, names=names: store.delete(names), "Removing temporary files")  # type: ignore[misc]


def _mark(trial: TrialDir) -> tuple[object, ...]:
    """What changes when somebody begins an attempt, or commits."""
    return tuple(request(lambda path=path: trial.store.stat(path), f"Looking at {path}") for path in _MARKS)  # type: ignore[misc]


_MARKS = (layout.WRITER, layout.MANIFEST)


def _why_alive(files: Iterable[StoredFile], older_than: float) -> str:
    """Why there may be a running session; empty if there is none."""
    newest, newest_path = 0, ""
    for file in files:
        if file.mtime_ns is None:
            return f"its storage does not say when {file.path} was written"
        if file.mtime_ns > newest:
            newest, newest_path = file.mtime_ns, file.path
    age = time.time() - newest / 1e9
    if age < -FUTURE_SECONDS:
        return f"{newest_path} was written in the future: this machine's clock or the storage's is wrong"
    if age < older_than:
        return f"{newest_path} was written {show_age(max(age, 0.0))} ago; a trial may be running"
    return ""


def show_age(seconds: float) -> str:
    """A duration for people."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(slots=True)
class _Pinned:
    """What the manifests of a trial dir refer to."""

    digests: set[str] = field(default_factory=set)
    layers: set[str] = field(default_factory=set)
    newest_aside: str = ""

    @classmethod
    def read(cls, trial: TrialDir, listed: Mapping[str, StoredFile]) -> _Pinned | None:
        """Reads all manifests; None if there is no head.

        Raises:
            ManifestError: One is damaged, or a newer release wrote it.
        """
        head = request(trial.head, "Reading the manifest")
        if head is None:
            return None
        pinned = cls()
        pinned.add(head)
        asides = trial.inventory(listed.values()).asides
        pinned.newest_aside = max(asides, default="")
        records = [path for path in listed if path.startswith(f"{layout.EXPLOITS}/")]
        records += [layout.aside_path(pinned.newest_aside)] if asides else []
        for path in records:
            pinned.add_record(trial, path)
        for path in listed:
            if path.count("/") == 1 and layout.snapshot_token(path.partition("/")[2]):
                pinned.add_snapshot(trial, path)
        return pinned

    def add(self, stack: ManifestStack) -> None:
        self.add_manifest(stack.manifest)
        self.layers.update(ref.name for ref in stack.refs)

    def add_manifest(self, manifest: Manifest) -> None:
        self.digests.update(entry.digest for entry in manifest)

    def add_record(self, trial: TrialDir, path: str) -> None:
        document = request(lambda: trial.document(path, "manifest"), f"Reading {path}")
        if document is not None:
            self.add(request(lambda: trial.assembled(document), f"Reading {path}"))

    def add_snapshot(self, trial: TrialDir, path: str) -> None:
        """A snapshot pins also where it does not count: a renamed trial dir may get its name back."""
        document = request(lambda: trial.document(path, "snapshot"), f"Reading {path}")
        if document is None:
            return
        checkpoint = path.rpartition("/")[0]
        if (document.trial, document.checkpoint) == (trial.name, checkpoint):
            self.add(request(lambda: trial.assembled(document), f"Reading {path}"))
        else:
            self.add_foreign(trial, document)

    def add_foreign(self, trial: TrialDir, document: Document) -> None:
        """One from another trial: its layers may be elsewhere."""
        self.digests.update(entry.digest for entry in document.changes.entries.values())
        for ref in document.layers:
            self.layers.add(ref.name)
            alone = replace(document, layers=(ref,))
            try:
                self.add_manifest(request(lambda alone=alone: trial.assembled(alone), "Reading a layer").manifest)  # type: ignore[misc]
            except (ManifestError, ArtifactNotFoundError):
                continue


def _state_files(files: Iterable[StoredFile], pinned: _Pinned, token: str) -> Iterator[Piece]:
    """What of the library's own files nothing refers to, of attempts up to the newest."""
    for file in files:
        path = file.path
        match path.split("/"):
            case [layout.STATE_DIR, "objects", by, digest] if layout.is_token(by) and layout.is_digest(digest):
                if digest not in pinned.digests and by <= token:
                    yield Piece("object", path, file.size)
            case [layout.STATE_DIR, "layers", name] if layout.is_layer_name(name):
                # Directories that are merely kept in sync have no claim, and layers of whoever synced them.
                if name not in pinned.layers and (not token or name.partition("-")[0] <= token):
                    yield Piece("layer", path, file.size)
            case [layout.STATE_DIR, "aside", by, "manifest.json"] if layout.is_token(by):
                if by < pinned.newest_aside:
                    yield Piece("aside", path, file.size)
            case [layout.DRIVER_DIR, "taking", _]:  # the driver was killed while it looked
                yield Piece("tmp", path, file.size)
            case _ if _PROBE.fullmatch(path):
                yield Piece("probe", path, file.size)


def _temporary(files: Iterable[StoredFile], token: str) -> Iterator[Piece]:
    """Files that were being written, of attempts up to the newest."""
    for file in files:
        found = _TMP.fullmatch(file.path.removeprefix(f"{layout.STATE_DIR}/"))
        if found and (found["token"] or "") <= token:
            yield Piece("tmp", file.path, file.size)
