"""Reads back what the manifests of a trial list, and compares every digest. Never writes.

Each distinct content is read once: a preserved copy proves all versions with its digest, and of a file that only grew,
one reading proves all of its versions, since each is a prefix of the next. Memory is a few chunks for each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.entries import Manifest
from ray_artifact_sync.errors import ArtifactNotFoundError, ArtifactSyncError, ManifestError, UnknownFormatError
from ray_artifact_sync.plan import Version
from ray_artifact_sync.progress import TransferProgress
from ray_artifact_sync.trial_reader import TrialReader, request

READING_THREADS = 8

Kind = Literal["missing", "wrong", "unreadable", "manifest"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it should be.

    Attributes:
        trial: Name of the trial.
        kind: `missing`: nothing is where the content should be; `wrong`: something else is; `unreadable`: storage gave
            an error; `manifest`: a listing is damaged.
        path: Artifact path, or path of the listing.
        size: Bytes that the content should have.
        digest: BLAKE3 that it should have, hex.
        listed_by: Checkpoints that list it; `newest` for the newest artifacts.
        detail: For people.
    """

    trial: str
    kind: Kind
    path: str
    size: int = 0
    digest: str = ""
    listed_by: tuple[str, ...] = ()
    detail: str = ""


@dataclass(slots=True)
class Verification:
    """What one trial's verification found.

    Attributes:
        trial: Its name.
        documents: Listings read.
        versions: Versions of files that they list.
        contents: Distinct contents among them.
        bytes_read: Content bytes read.
        problems: What is not right.
    """

    trial: str
    documents: int = 0
    versions: int = 0
    contents: int = 0
    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Listings:
    """The listings of one trial that count.

    Attributes:
        manifests: By name: `newest`, or that of the checkpoint.
        problems: Those that are damaged.
    """

    manifests: Mapping[str, Manifest]
    problems: tuple[Problem, ...]


NEWEST = "newest"


def read_listings(reader: TrialReader, only: str | None = None) -> Listings:
    """Reads the head and every snapshot that counts, and misses none that is damaged.

    Args:
        reader: Of the trial.
        only: Read the snapshot of this checkpoint alone.

    Raises:
        UnknownFormatError: A newer release wrote one of them.
        StorageError: Storage cannot be read.
    """
    trial = reader.trial
    manifests: dict[str, Manifest] = {}
    problems = []
    try:
        if only is None and reader.contents.head is not None:
            manifests[NEWEST] = reader.head
    except UnknownFormatError:
        raise
    except ManifestError as error:
        problems.append(Problem(reader.name, "manifest", layout.MANIFEST, listed_by=(NEWEST,), detail=str(error)))
    snapshots = reader.contents.inventory.snapshots
    for name, paths in sorted(snapshots.items()) if only is None else [(only, snapshots.get(only, ()))]:
        for path in sorted(paths, reverse=True):  # of several, the one with the newest token counts
            try:
                found = request(lambda path=path, name=name: trial.snapshot_at(path, name), f"Reading {path}")  # type: ignore[misc]
            except UnknownFormatError:
                raise
            except ManifestError as error:
                problems.append(Problem(reader.name, "manifest", path, listed_by=(name,), detail=str(error)))
                break
            if found is not None:
                manifests[name] = found.manifest
                break
    return Listings(manifests, tuple(problems))


@dataclass(slots=True)
class Verifier:
    """Verifies one trial. `prepare` reads the listings, `run` the contents.

    Attributes:
        reader: Of the trial.
        only: Verify this checkpoint alone.
    """

    reader: TrialReader
    only: str | None = None
    result: Verification = field(init=False)
    wanted: dict[str, dict[Version, list[str]]] = field(default_factory=dict)
    _good: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.result = Verification(self.reader.name)

    def prepare(self) -> None:
        """Reads the listings.

        Raises:
            UnknownFormatError: A newer release wrote one of them.
            StorageError: Storage cannot be read.
        """
        listings = read_listings(self.reader, self.only)
        self.result.documents = len(listings.manifests)
        self.result.problems.extend(listings.problems)
        for name, manifest in listings.manifests.items():
            for entry in manifest:
                if not entry.is_dir and entry.size:
                    versions = self.wanted.setdefault(entry.path, {})
                    versions.setdefault((entry.size, entry.digest), []).append(name)
        self.result.versions = sum(len(versions) for versions in self.wanted.values())
        self.result.contents = len({digest for versions in self.wanted.values() for _, digest in versions})

    @property
    def expected_bytes(self) -> int:
        """About how many bytes `run` will read."""
        objects = self.reader.contents.inventory.objects
        copies = {version for versions in self.wanted.values() for version in versions if version[1] in objects}
        paths = [max((size for size, digest in v if digest not in objects), default=0) for v in self.wanted.values()]
        return sum(size for size, _ in copies) + sum(paths)

    def run(self, progress: TransferProgress) -> None:
        """Reads the contents; what was found is in `result`."""
        objects = self.reader.contents.inventory.objects
        sizes = {digest: size for versions in self.wanted.values() for size, digest in versions}
        copies = [digest for digest in sizes if digest in objects]
        run_all(
            copies,
            lambda digest: self.read_copies(digest, sizes[digest], objects[digest], progress),
            workers=READING_THREADS,
            deadline=Deadline(),
        )
        run_all(
            sorted(self.wanted, key=lambda path: -max(size for size, _ in self.wanted[path])),
            lambda path: self.read_path(path, progress),
            workers=READING_THREADS,
            deadline=Deadline(),
        )
        if any(problem.kind != "manifest" for problem in self.result.problems):
            self.look_again()
        self.result.problems.sort(key=lambda problem: (problem.path, problem.size))

    def read_copies(self, digest: str, size: int, places: tuple[str, ...], progress: TransferProgress) -> None:
        """Proves the versions with one digest by a preserved copy, if one is right."""
        for place in places:
            try:
                if digest in self.digests_at(place, [size], progress).values():
                    with self._lock:
                        self._good.add(digest)
                    progress.file_done()
                    return
            except ArtifactSyncError:
                continue  # the path may hold it all the same

    def read_path(self, path: str, progress: TransferProgress) -> None:
        """Proves those versions of a path that no preserved copy has proven."""
        open_versions = {version: names for version, names in self.wanted[path].items() if version[1] not in self._good}
        if not open_versions:
            return
        kind: Kind = "wrong"
        found: dict[int, str] = {}
        detail = "its path holds something else, and no copy was preserved"
        try:
            found = self.digests_at(path, sorted({size for size, _ in open_versions}), progress)
        except ArtifactNotFoundError:
            kind, detail = "missing", "there is nothing at its path, and no copy was preserved"
        except ArtifactSyncError as error:
            kind, detail = "unreadable", str(error)
        for (size, digest), names in open_versions.items():
            if found.get(size) != digest:
                self.add(Problem(self.reader.name, kind, path, size, digest, tuple(names), detail))
        progress.file_done()

    def add(self, problem: Problem) -> None:
        """Notes a problem."""
        with self._lock:
            self.result.problems.append(problem)

    def digests_at(self, place: str, sizes: list[int], progress: TransferProgress) -> dict[int, str]:
        """The digests of the first so many bytes at a place, for each size that it reaches."""

        def read() -> dict[int, str]:
            hasher, have, found = blake3(), 0, {}
            marks = iter(sizes)
            mark = next(marks, None)
            for chunk in self.reader.trial.store.read_chunks(place, length=sizes[-1]):
                view = memoryview(chunk).cast("B")
                progress.bytes_done(view.nbytes)
                with self._lock:
                    self.result.bytes_read += view.nbytes
                while mark is not None and have + view.nbytes >= mark:
                    hasher.update(view[: mark - have])
                    view, have = view[mark - have :], mark
                    found[mark] = str(hasher.hexdigest())
                    mark = next(marks, None)
                hasher.update(view)
                have += view.nbytes
            return found

        return request(read, f"Reading {place}")

    def look_again(self) -> None:
        """A running trial replaces files and deletes copies: what is not listed any more is no problem.

        What is still listed may have been preserved meanwhile.
        """
        self.reader.refresh()
        try:
            listings = read_listings(self.reader, self.only)
        except ArtifactSyncError:
            return
        still = []
        for problem in self.result.problems:
            names = tuple(
                name
                for name in problem.listed_by
                if (manifest := listings.manifests.get(name)) is not None
                and (entry := manifest.get(problem.path)) is not None
                and (entry.size, entry.digest) == (problem.size, problem.digest)
            )
            if problem.kind == "manifest" or (names and not self.is_preserved_now(problem)):
                still.append(problem)
        self.result.problems = still

    def is_preserved_now(self, problem: Problem) -> bool:
        """Whether a copy of a version is there by now, and right."""
        quiet = TransferProgress("", files=0, bytes=0)
        for place in (*self.reader.contents.inventory.objects.get(problem.digest, ()), problem.path):
            try:
                if self.digests_at(place, [problem.size], quiet).get(problem.size) == problem.digest:
                    return True
            except ArtifactSyncError:
                continue
        return False
