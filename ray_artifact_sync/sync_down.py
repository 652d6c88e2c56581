"""One pass from storage to a working dir: make its artifacts what a manifest lists, in place, every byte verified."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.entries import FileEntry, LocalFile, Manifest
from ray_artifact_sync.errors import (
    ArtifactNotFoundError,
    ArtifactSyncError,
    IncompleteSyncError,
    IntegrityError,
    SyncTimeoutError,
)
from ray_artifact_sync.local_files import ConsistentReader
from ray_artifact_sync.plan import Fill, plan_restore
from ray_artifact_sync.progress import TransferProgress, Watcher, counted, watched_by
from ray_artifact_sync.scan import HashCache, SkipRule, as_local_files, hash_local_file, scan_tree
from ray_artifact_sync.stores.base import Buffer
from ray_artifact_sync.transfer import call_with_retries
from ray_artifact_sync.trial_dir import TrialDir
from ray_artifact_sync.working_dir import WorkingDir

logger = logging.getLogger(__name__)

HASHING_THREADS = 4


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What one restore did.

    Attributes:
        manifest: What the working dir holds now.
        exact: Whether that is what the artifacts were when the checkpoint was saved.
        bytes_read: Content bytes read from storage.
        files_read: Files read from storage.
        files_local: Files filled from what an earlier attempt left on this node.
        set_aside: Local files moved away.
        lost: Artifacts whose content of that moment is nowhere any more.
        seconds: Duration.
    """

    manifest: Manifest
    exact: bool
    bytes_read: int = 0
    files_read: int = 0
    files_local: int = 0
    set_aside: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(slots=True)
class RestorePass:
    """One pass; `run` it once.

    Attributes:
        trial: Where from.
        working_dir: Where to.
        objects: Digest to the paths of preserved copies.
        rule: Local files that are none of our business, and entries that are never pulled.
        keep_unlisted: Leave local files alone that the manifest does not list.
        max_concurrency: Requests in flight.
        retries: Further tries of a request that may succeed later.
        deadline: Ends the pass.
        tolerant: Go on without entries whose content is proven to be nowhere (deleted by somebody, or replaced without
            being preserved): the newest version at their path is taken, if there is one.
        foreign: Paths that hold somebody else's files: their newest version is never taken.
        watcher: Shows the progress, if it takes long.
    """

    trial: TrialDir
    working_dir: WorkingDir
    objects: Mapping[str, tuple[str, ...]]
    rule: SkipRule
    keep_unlisted: bool
    max_concurrency: int
    retries: int
    deadline: Deadline
    tolerant: bool = False
    foreign: Container[str] = ()
    watcher: Watcher | None = None
    bytes_read: int = 0
    files_read: int = 0
    files_local: int = 0
    failures: dict[str, BaseException] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    found: dict[str, FileEntry] = field(default_factory=dict)
    progress: TransferProgress = field(default_factory=lambda: TransferProgress("", files=0, bytes=0))
    _objects_now: Mapping[str, tuple[str, ...]] | None = None
    _listing: threading.Lock = field(default_factory=threading.Lock)

    def run(self, manifest: Manifest, *, exact: bool) -> RestoreReport:
        """Makes the working dir what the manifest lists.

        Entries without a digest (see `FileEntry`) get what their path holds, if that has the size that was listed; the
        report's manifest has their digests.

        Raises:
            IncompleteSyncError: Content of some entries is nowhere to be read; the others were restored.
            SyncTimeoutError: The deadline passed.
        """
        started = time.monotonic()
        wanted = Manifest(
            {path: entry for path, entry in manifest.entries.items() if self.rule(path, entry.is_dir) is None},
            manifest.token,
        )
        local = self.local_files(wanted)
        leftover_dirs = self.working_dir.set_aside_dirs()
        leftovers, places = self.leftovers(wanted, leftover_dirs)
        plan = plan_restore(wanted, local, leftovers, keep_unlisted=self.keep_unlisted)
        self.working_dir.set_aside(plan.set_aside)
        if not self.keep_unlisted:
            unlisted = {path for path, file in local.items() if file.is_dir} | {
                os.path.dirname(path) for path in plan.set_aside
            }
            self.working_dir.remove_empty_dirs(unlisted.difference(plan.make_dirs))
        for path in plan.make_dirs:
            self.working_dir.make_dir(path)
        # Directories first, one thread: two fills that make the same parent would race.
        for parent in sorted({os.path.dirname(fill.entry.path) for fill in plan.fills} - {""}):
            self.working_dir.make_dir(parent)
        self.progress = TransferProgress(
            f"Restoring {self.trial.name}", files=len(plan.fills), bytes=sum(fill.entry.size for fill in plan.fills)
        )
        with watched_by(self.watcher, self.progress):
            run_all(
                sorted(plan.fills, key=lambda fill: -fill.entry.size),
                lambda fill: self.fill(fill, places.get(fill.entry.path)),
                workers=self.max_concurrency,
                deadline=self.deadline,
            )
        if self.failures:
            first = next(iter(self.failures.items()))
            raise IncompleteSyncError(
                f"{len(self.failures)} of {len(wanted)} artifacts could not be restored from "
                f"{self.trial.store.description}; the first: {first[0]}: {first[1]}",
                failures=self.failures,
            )
        if self.lost or self.found:
            lost = set(self.lost)
            kept = {path: entry for path, entry in wanted.entries.items() if path not in lost}
            wanted = Manifest({**kept, **self.found}, wanted.token)
        return RestoreReport(
            manifest=wanted,
            exact=exact and not self.lost,
            lost=tuple(sorted(self.lost)),
            bytes_read=self.bytes_read,
            files_read=self.files_read,
            files_local=self.files_local,
            set_aside=plan.set_aside,
            seconds=time.monotonic() - started,
        )

    def local_files(self, wanted: Manifest) -> dict[str, LocalFile]:
        """What the working dir holds; digests where the size could be right."""
        scan = scan_tree(self.working_dir.root, self.rule, skip_checkpoints=True)
        local = as_local_files(scan, HashCache())
        links = [path for path in local if os.path.islink(self.working_dir.local_path(path))]
        for path in links:
            # What a link shows is another file's content, which this restore may change: it gives way to a file.
            local[path] = replace(local[path], size=-1)
        same_size = [
            path
            for path, file in local.items()
            if not file.is_dir and (entry := wanted.get(path)) is not None and entry.size == file.size
        ]
        self.hash_into(local, same_size, self.working_dir.local_path, lambda _path: ())
        return local

    def leftovers(self, wanted: Manifest, directories: list[str]) -> tuple[dict[str, LocalFile], dict[str, str]]:
        """Set-aside files that may hold what is wanted, with the digests of the prefixes in question."""
        found: dict[str, LocalFile] = {}
        places: dict[str, str] = {}
        for entry in wanted:
            for directory in directories if entry.digest else ():
                place = os.path.join(directory, entry.path)
                if os.path.isfile(place) and not os.path.islink(place) and os.path.getsize(place) >= entry.size:
                    stat = os.stat(place)
                    found[entry.path] = LocalFile(entry.path, stat.st_size, stat.st_mtime_ns)
                    places[entry.path] = place
                    break
        self.hash_into(found, list(found), places.__getitem__, lambda path: (wanted.entries[path].size,))
        return found, places

    def hash_into(
        self,
        files: dict[str, LocalFile],
        paths: list[str],
        place_of: Callable[[str], str],
        marks_of: Callable[[str], tuple[int, ...]],
    ) -> None:
        """Adds the digests of some files, and of their prefixes."""

        def work(path: str) -> None:
            hashed = hash_local_file(files[path], marks_of(path), place_of(path))
            if isinstance(hashed, LocalFile):
                files[path] = hashed

        run_all(paths, work, workers=HASHING_THREADS, deadline=self.deadline)

    def fill(self, fill: Fill, leftover: str | None) -> None:
        """Fills one file from the first place that really holds its content."""
        self.fill_counted(fill, leftover)
        self.progress.file_done()

    def fill_counted(self, fill: Fill, leftover: str | None) -> None:
        """Fills one file, and notes what came of it."""
        errors: list[BaseException] = []
        try:
            if fill.local_source is not None and leftover is not None and self.fill_from_leftover(fill.entry, leftover):
                return
            if not fill.entry.digest:
                self.fill_as_listed(fill.entry)
                return
            for place in self.tries(fill.entry, errors):
                try:
                    self.fill_from_storage(fill.entry, place)
                except (IntegrityError, ArtifactNotFoundError) as error:
                    errors.append(error)
                    continue
                self.bytes_read += fill.entry.size
                self.files_read += 1
                return
            if self.tolerant:
                self.lost.append(fill.entry.path)
                if fill.entry.path in self.foreign:
                    self.working_dir.remove(fill.entry.path)  # what was tried in vain
                else:
                    self.take_newest(fill.entry.path)
                return
        except SyncTimeoutError:
            raise
        except (ArtifactSyncError, OSError) as error:
            errors.append(error)
        self.failures[fill.entry.path] = errors[0] if errors else ArtifactNotFoundError("nowhere to be found")

    def fill_as_listed(self, entry: FileEntry) -> None:
        """Fills a file of which only path and size are known."""

        def chunks() -> Iterator[Buffer]:
            for chunk in self.trial.store.read_chunks(entry.path):
                self.deadline.check()
                yield chunk

        def fill() -> tuple[int, str]:
            return self.working_dir.fill_unverified(entry.path, chunks(), mtime_ns=entry.mtime_ns)

        try:
            size, digest = call_with_retries(
                fill, retries=self.retries, deadline=self.deadline, what=f"Reading {entry.path}"
            )
        except ArtifactNotFoundError:
            if not self.tolerant:
                raise
            self.lost.append(entry.path)
            self.working_dir.remove(entry.path)
            return
        if size != entry.size:
            if not self.tolerant:
                raise IntegrityError(f"{entry.path}: {size} bytes were read, but {entry.size} are listed.")
            self.lost.append(entry.path)  # somebody writes it now; this is its newest version
            return
        self.found[entry.path] = replace(entry, digest=digest)
        self.bytes_read += size
        self.files_read += 1

    def take_newest(self, path: str) -> None:
        """Fills a file with whatever its path in storage holds; takes it away if that is nothing."""

        def take() -> None:
            try:
                self.working_dir.fill_unverified(path, self.trial.store.read_chunks(path))
            except ArtifactNotFoundError:
                self.working_dir.remove(path)

        call_with_retries(take, retries=self.retries, deadline=self.deadline, what=f"Reading {path}")

    def tries(self, entry: FileEntry, errors: Sequence[BaseException]) -> Iterator[str]:
        """The places; all of them once more if one had wrong bytes, which may have been so on the way only."""
        yield from self.places(entry)
        if any(isinstance(error, IntegrityError) for error in errors):
            yield from self.places(entry)

    def places(self, entry: FileEntry) -> Iterator[str]:
        """See `TrialDir.places`."""
        return self.trial.places(entry, self.objects, self.objects_now)

    def objects_now(self) -> Mapping[str, tuple[str, ...]]:
        """The objects listed once more, at most once in a pass."""
        with self._listing:
            if self._objects_now is None:
                self._objects_now = call_with_retries(
                    self.trial.objects, retries=self.retries, deadline=self.deadline, what="Listing preserved copies"
                )
            return self._objects_now

    def fill_from_leftover(self, entry: FileEntry, leftover: str) -> bool:
        """Fills a file from what an earlier attempt left; whether that was right."""
        reader = ConsistentReader(leftover, size=entry.size, expect_digest=entry.digest)
        try:
            self.working_dir.fill(entry, reader)
        except (ArtifactSyncError, FileNotFoundError) as error:
            logger.debug("%s cannot be filled from %s: %s", entry.path, leftover, error)
            return False
        self.files_local += 1
        self.progress.bytes_done(entry.size)
        return True

    def fill_from_storage(self, entry: FileEntry, place: str) -> None:
        """Fills a file from one place in storage."""

        def chunks(count: Callable[[int], None]) -> Iterator[Buffer]:
            for chunk in self.trial.chunks(entry, place):
                self.deadline.check()
                yield chunk
                count(len(chunk))

        def fill() -> None:
            with counted(self.progress.bytes_done) as count:
                self.working_dir.fill(entry, chunks(count))

        call_with_retries(
            fill,
            retries=self.retries,
            deadline=self.deadline,
            what=f"Reading {place}",
        )
