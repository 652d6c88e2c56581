"""Downloads versions of artifacts into a local directory: resumable, verified, and never outside of it.

Every file is written below `<dest>/.ray_artifact_sync/pull/` and then moved to its name, so that a name never holds a
part of a file. A part that an interrupted download left there is continued. Directories are opened one by one and
symbolic links among them are not followed, so that neither a hostile manifest nor a link in the destination leads out
of it. Nothing that was in the destination is deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat as stat_module
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.entries import FileEntry, validate_path
from ray_artifact_sync.errors import ArtifactExistsError, ArtifactNotFoundError, ArtifactSyncError, ConfigurationError
from ray_artifact_sync.plan import parents
from ray_artifact_sync.progress import TransferProgress
from ray_artifact_sync.stores.base import CHUNK_SIZE
from ray_artifact_sync.stores.posix import NO_LINKS
from ray_artifact_sync.trial_reader import TrialReader, request

DOWNLOADS = 16
HASHING_THREADS = 4
_SCRATCH = (layout.STATE_DIR, "pull")
_LOCK = "lock"
_PART = re.compile(r"[0-9a-f]{32}\.part")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Wanted:
    """One version to be downloaded.

    Attributes:
        reader: Of its trial.
        entry: The version; an empty directory too.
        target: Where to, relative to the destination.
    """

    reader: TrialReader
    entry: FileEntry
    target: str


@dataclass(slots=True)
class DownloadReport:
    """What a download did.

    Attributes:
        files: Files downloaded.
        bytes_read: Bytes read from storage.
        kept: Files that were there already, with the right content.
        failures: Target to the error that stopped it.
    """

    files: int = 0
    bytes_read: int = 0
    kept: int = 0
    failures: dict[str, Exception] = field(default_factory=dict)


State = Literal["missing", "same", "different", "directory", "file"]


def download(
    wanted: Iterable[Wanted],
    dest: str,
    *,
    force: bool = False,
    watch: Callable[[int, int], AbstractContextManager[TransferProgress]],
) -> DownloadReport:
    """Makes the files at the destination what is wanted; other files there stay as they are.

    Atomic for each file: its name holds what it held before, or the whole new content.

    Args:
        wanted: What to download.
        dest: Local directory; created if missing.
        force: Replace files there that differ.
        watch: Given the bytes and the number of files to be read, a block that gives the counters.

    Returns:
        What was done; failures of single files are in it, the others are complete.

    Raises:
        ArtifactExistsError: Files at the destination differ, without `force`; or something there is a directory where
            a file must go, or the other way round. Nothing was written.
        ConfigurationError: The destination cannot be one.
        InvalidPathError: A name cannot be one.
    """
    wanted = [*wanted]
    _check_targets(wanted)
    check_destination(dest)
    with Destination.open(dest) as destination:
        states = _look(wanted, destination)
        _refuse(wanted, states, dest, force=force)
        report = DownloadReport(kept=sum(states[one.target] == "same" and not one.entry.is_dir for one in wanted))
        missing = [one for one in wanted if states[one.target] != "same"]
        with destination.scratch() as scratch, watch(_total(missing), _count(missing)) as progress:
            _Downloads(destination, scratch, report, progress, states).run(missing)
        return report


def check_destination(dest: str) -> None:
    """Refuses what is a storage directory of this library: pulling into it would damage it.

    Raises:
        ConfigurationError: It is one, or lies in one, or is a file.
    """
    if os.path.lexists(dest) and not os.path.isdir(dest):
        raise ConfigurationError(f"{dest} is not a directory; name a directory to pull into.")
    directory = os.path.realpath(dest)
    while True:
        if any(os.path.lexists(os.path.join(directory, name)) for name in (layout.WRITER, layout.MANIFEST)):
            raise ConfigurationError(
                f"{dest} is where a run stores its artifacts (there is {directory}/{layout.STATE_DIR}); pull into a "
                "directory elsewhere."
            )
        parent = os.path.dirname(directory)
        if parent == directory:
            return
        directory = parent


def _check_targets(wanted: list[Wanted]) -> None:
    files = {validate_path(one.target) for one in wanted if not one.entry.is_dir}
    seen: set[str] = set()
    for one in wanted:
        if one.target in seen or not files.isdisjoint(parents(validate_path(one.target))):
            raise ConfigurationError(f"Two of the files to be downloaded go to {one.target!r}; pull them one by one.")
        seen.add(one.target)


def _look(wanted: list[Wanted], destination: Destination) -> dict[str, State]:
    states: dict[str, State] = {}

    def look(one: Wanted) -> None:
        states[one.target] = destination.state(one.target, one.entry)

    run_all(wanted, look, workers=HASHING_THREADS, deadline=Deadline())
    return states


def _refuse(wanted: list[Wanted], states: Mapping[str, State], dest: str, *, force: bool) -> None:
    in_the_way = [one.target for one in wanted if states[one.target] in ("directory", "file")]
    if in_the_way:
        first = in_the_way[0]
        what = (
            "is a directory, and a file must go there"
            if states[first] == "directory"
            else "is a file or a link, or lies behind one, where a directory must be"
        )
        raise ArtifactExistsError(
            f"{os.path.join(dest, first)} {what}{_and_more(in_the_way)}; pull deletes nothing: move it away, or pull "
            "into another directory.",
            path=first,
        )
    different = [one.target for one in wanted if states[one.target] == "different"]
    if different and not force:
        raise ArtifactExistsError(
            f"{os.path.join(dest, different[0])} is there already with other content{_and_more(different)}; --force "
            "replaces such files, or pull into another directory.",
            path=different[0],
        )


def _and_more(targets: list[str]) -> str:
    return f" (and {len(targets) - 1} more like it)" if len(targets) > 1 else ""


def _total(wanted: list[Wanted]) -> int:
    return sum(one.entry.size for one in wanted)


def _count(wanted: list[Wanted]) -> int:
    return sum(not one.entry.is_dir for one in wanted)


class Destination:
    """A local directory that is written to without leaving it. Use as a context manager.

    Args:
        path: For messages.
        descriptor: Of the open directory.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    @contextmanager
    def open(cls, path: str) -> Iterator[Destination]:
        """Opens the directory; makes it if it is missing."""
        os.makedirs(path, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def state(self, path: str, entry: FileEntry) -> State:
        """What is at a path, compared with a version."""
        try:
            with self.parent(path) as (parent, name):
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if stat_module.S_ISDIR(found.st_mode):
                    return "same" if entry.is_dir else "directory"
                if entry.is_dir:
                    return "file"
                if not stat_module.S_ISREG(found.st_mode) or found.st_size != entry.size:
                    return "different"
                return "same" if _digest_of(parent, name) == entry.digest else "different"
        except FileNotFoundError:
            return "missing"
        except NotADirectoryError:
            return "file"

    @contextmanager
    def parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The open directory that a path lies in, and the path's last segment.

        Args:
            path: Relative, validated.
            make: Make directories that are missing.

        Raises:
            NotADirectoryError: A directory on the way is a file or a symbolic link.
            FileNotFoundError: One is missing.
        """
        *folders, name = path.split("/")
        with self.directory(folders, make=make) as descriptor:
            yield descriptor, name

    @contextmanager
    def directory(self, folders: Iterable[str], *, make: bool = False) -> Iterator[int]:
        """An open directory below this one; see `parent`."""
        descriptor = os.dup(self._descriptor)
        try:
            for folder in folders:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(folder, dir_fd=descriptor)
                try:
                    inner = os.open(folder, _DIRECTORY, dir_fd=descriptor)
                except OSError as error:
                    if error.errno == errno.ELOOP:  # a symbolic link
                        raise NotADirectoryError(errno.ENOTDIR, "a symbolic link is not followed", folder) from None
                    raise
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def scratch(self) -> Iterator[int]:
        """The open directory for parts; one download at a time.

        Raises:
            ConfigurationError: Another download writes there.
        """
        with self.directory(_SCRATCH, make=True) as scratch:
            lock = _locked(scratch, self.path)
            try:
                yield scratch
            finally:
                # What is left is what was not completed.
                if not any(_PART.fullmatch(name) for name in os.listdir(scratch)):
                    os.unlink(_LOCK, dir_fd=scratch)
                    for depth in (2, 1):
                        with suppress(OSError), self.directory(_SCRATCH[: depth - 1]) as above:
                            os.rmdir(_SCRATCH[depth - 1], dir_fd=above)
                os.close(lock)


def _locked(scratch: int, path: str) -> int:
    while True:
        lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=scratch)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(_LOCK, dir_fd=scratch, follow_symlinks=False).st_ino == os.fstat(lock).st_ino:
                return lock
        except FileNotFoundError:
            pass  # whoever had the lock has removed it: the next try makes a new one
        except BlockingIOError:
            os.close(lock)
            raise ConfigurationError(f"Another pull into {path} is running; wait for it.") from None
        os.close(lock)


def _digest_of(parent: int, name: str) -> str:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    with open(descriptor, "rb", buffering=0) as file:
        hasher = blake3()
        while chunk := file.read(CHUNK_SIZE):
            hasher.update(chunk)
    return str(hasher.hexdigest())


class _Part:
    """A file that is being downloaded: what is there of it, and the hash of that."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self.hasher = blake3()
        self.have = 0

    def take_up(self) -> int:
        """Reads what an earlier download left; the number of bytes."""
        if os.fstat(self._descriptor).st_size > self._size:
            self.begin_anew()
        while chunk := os.pread(self._descriptor, CHUNK_SIZE, self.have):
            self.hasher.update(chunk)
            self.have += len(chunk)
        return self.have

    def begin_anew(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self.hasher, self.have = blake3(), 0

    def add(self, chunk: memoryview) -> None:
        self.hasher.update(chunk)
        while chunk:
            written = os.pwrite(self._descriptor, chunk, self.have)
            self.have += written
            chunk = chunk[written:]

    def set_time(self, mtime_ns: int) -> None:
        with suppress(OSError, OverflowError):  # a time that this file system does not have
            os.utime(self._descriptor, ns=(mtime_ns, mtime_ns))


class _Downloads:
    """One download; `one` is called by many threads."""

    def __init__(
        self,
        destination: Destination,
        scratch: int,
        report: DownloadReport,
        progress: TransferProgress,
        states: Mapping[str, State],
    ) -> None:
        self.destination = destination
        self.scratch = scratch
        self.report = report
        self.progress = progress
        self.states = states

    def run(self, wanted: list[Wanted]) -> None:
        run_all(sorted(wanted, key=lambda one: -one.entry.size), self.one, workers=DOWNLOADS, deadline=Deadline())
        if not self.report.failures:
            for name in os.listdir(self.scratch):  # of versions that an earlier download wanted
                if _PART.fullmatch(name):
                    os.unlink(name, dir_fd=self.scratch)

    def one(self, wanted: Wanted) -> None:
        try:
            if wanted.entry.is_dir:
                with self.destination.directory(wanted.target.split("/"), make=True):
                    return
            self.file(wanted)
        except ArtifactSyncError as error:
            self.report.failures[wanted.target] = error
        except OSError as error:
            self.report.failures[wanted.target] = ArtifactSyncError(
                f"{os.path.join(self.destination.path, wanted.target)} cannot be written: {error.strerror or error}."
            )

    def file(self, wanted: Wanted) -> None:
        entry = wanted.entry
        key = f"{entry.digest} {entry.size} {wanted.target}"
        name = f"{blake3(key.encode()).hexdigest()[:32]}.part"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o666, dir_fd=self.scratch)
        try:
            part = _Part(descriptor, entry.size)
            if not self.fill(part, wanted):
                os.unlink(name, dir_fd=self.scratch)
                raise wanted.reader.lost(entry)
            part.set_time(entry.mtime_ns)
        finally:
            os.close(descriptor)
        self.publish(name, wanted)
        self.report.files += 1
        self.progress.file_done()

    def fill(self, part: _Part, wanted: Wanted) -> bool:
        """Makes a part the whole file; False if no place holds the content."""
        entry = wanted.entry
        resumed = part.take_up()
        self.progress.bytes_done(part.have)
        for place in wanted.reader.places(entry):
            if self.fill_from(part, wanted, place):
                return True
            if resumed:  # what was there may be what was wrong
                resumed = 0
                if self.fill_from(part, wanted, place):
                    return True
        return False

    def fill_from(self, part: _Part, wanted: Wanted, place: str) -> bool:
        """Continues from one place; begins anew, for the next try, if that was not the content."""
        entry = wanted.entry

        def read_on() -> None:
            for chunk in wanted.reader.chunks(entry, place, start=part.have):
                view = memoryview(chunk).cast("B")
                part.add(view)
                self.report.bytes_read += view.nbytes
                self.progress.bytes_done(view.nbytes)

        with suppress(ArtifactNotFoundError):
            request(read_on, f"Reading {place}")
        if part.have == entry.size and (not entry.size or part.hasher.hexdigest() == entry.digest):
            return True
        self.progress.bytes_done(-part.have)
        part.begin_anew()
        return False

    def publish(self, name: str, wanted: Wanted) -> None:
        """Moves a complete file to its place; replaces nothing that was not there when it was looked at."""
        with self.destination.parent(wanted.target, make=True) as (parent, target):
            if self.states[wanted.target] == "missing":
                try:
                    os.link(name, target, src_dir_fd=self.scratch, dst_dir_fd=parent, follow_symlinks=False)
                except FileExistsError:
                    raise ArtifactExistsError(
                        f"{os.path.join(self.destination.path, wanted.target)} appeared meanwhile and is left alone.",
                        path=wanted.target,
                    ) from None
                except OSError as error:
                    if error.errno not in NO_LINKS:
                        raise
                else:
                    os.unlink(name, dir_fd=self.scratch)
                    return
            os.rename(name, target, src_dir_fd=self.scratch, dst_dir_fd=parent)
