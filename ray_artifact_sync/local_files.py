"""Reading local files that somebody may be writing: opening safely, hashing, one consistent version.

The digest of this package is BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), 64 hex characters.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3

from ray_artifact_sync.errors import FileChangedError

READ_SIZE = 1024 * 1024
"""Bytes of one read: large enough for BLAKE3's wide SIMD paths, small enough to stay in the cache."""

_CLOCK_TICK_NS = 50_000_000
"""A file touched this recently may be written again without a visible change of its times (coarse kernel clock)."""

EMPTY_DIGEST = blake3(b"").hexdigest()


class FileStat(NamedTuple):
    """What identifies a version of a local file without reading it.

    A tuple: a scan makes one for each file, and the garbage collector does not have to look into it.

    `ctime_ns` and `inode` are part of it so that a file deleted and made again with the same name, size and mtime is
    seen as another one.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, result: os.stat_result) -> FileStat:
        """Takes the four fields out of a stat result."""
        return cls(result.st_size, result.st_mtime_ns, result.st_ctime_ns, result.st_ino)

    def settled_before(self, moment_ns: int) -> bool:
        """Whether a write after `moment_ns` (wall clock) would have shown in the times."""
        return max(self.mtime_ns, self.ctime_ns) < moment_ns - _CLOCK_TICK_NS


def mapped_inodes() -> frozenset[int]:
    """Inodes of the files that this process has mapped for writing (`mmap`, `numpy.memmap`); none without /proc.

    The first write to a page of a mapping shows in the file's times; later ones, until the kernel has written the page
    back, do not (on tmpfs: never).
    """
    found = set()
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:  # address, permissions, offset, device, inode, path: see proc_pid_maps(5)
            fields = line.split(maxsplit=5)
            if fields[1][1] == "w" and fields[1][3] == "s":
                found.add(int(fields[4]))
    return frozenset(found)


def open_regular(path: str) -> int:
    """Opens a regular file for reading; never blocks on a FIFO that took its place.

    Returns:
        A file descriptor that the caller closes.

    Raises:
        FileChangedError: It is no regular file (any more).
        OSError: It cannot be opened (gone, no permission).
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileChangedError(f"{path!r} is no longer a regular file.", path=path)
    return fd


@dataclass(frozen=True, slots=True)
class HashedFile:
    """The digest of the first `stat.size` bytes of a file, and of shorter prefixes.

    Attributes:
        stat: The file as it was when hashing began.
        digest: BLAKE3 hex of its first `stat.size` bytes.
        prefix_digests: Size to digest, for each mark that was asked for.
        settled: Whether equal stat results later on prove equal content (no write can have hidden in a clock tick).
    """

    stat: FileStat
    digest: str
    prefix_digests: dict[int, str]
    settled: bool


def hash_file(path: str, marks: Collection[int] = ()) -> HashedFile:
    """Hashes one consistent version of a file, once through, memory flat.

    A file that only grows meanwhile gives the digest of the prefix that it was at the start.

    Args:
        path: Local path.
        marks: Sizes in bytes; the digest of each such prefix is recorded on the way. Those beyond the end are left
            out.

    Raises:
        FileChangedError: The content changed under the reading, three times in a row.
        OSError: The file is gone or unreadable.
    """
    for _ in range(3):
        started = time.time_ns()
        fd = open_regular(path)
        try:
            before = FileStat.of(os.fstat(fd))
            digest, prefixes = _hash_fd(fd, before.size, marks)
            if digest is None:
                continue
            after = FileStat.of(os.fstat(fd))
            if after == before and before.settled_before(started):
                return HashedFile(before, digest, prefixes, settled=True)
            if after.size < before.size:
                continue
            if _hash_fd(fd, before.size, ())[0] == digest:
                return HashedFile(before, digest, prefixes, settled=False)
        finally:
            os.close(fd)
    raise FileChangedError(f"{path!r} keeps changing while it is read.", path=path)


def _hash_fd(fd: int, size: int, marks: Collection[int]) -> tuple[str | None, dict[int, str]]:
    """Hashes the first `size` bytes; None if the file is shorter."""
    hasher = blake3()
    prefixes: dict[int, str] = {}
    offset = 0
    for stop in [*sorted(mark for mark in set(marks) if mark < size), size]:
        while offset < stop:
            block = os.pread(fd, min(READ_SIZE, stop - offset), offset)
            if not block:
                return None, {}
            hasher.update(block)
            offset += len(block)
        prefixes[stop] = hasher.hexdigest()
    return prefixes[size], {mark: prefixes[mark] for mark in marks if mark in prefixes}


class ConsistentReader:
    """Chunks of one consistent version of a local file; its digest afterwards.

    Iterating it gives the first `size` bytes. Where the file changed meanwhile, it raises `FileChangedError` before
    it ends, so that a store that publishes at the end publishes nothing. May be iterated again (a retry).

    Args:
        path: Local path.
        size: Bytes to give; None for all that are there when the reading begins.
        expect_digest: The digest that these bytes must have; None if any content will do.
        start: Leave out this many bytes. They are read and hashed all the same: `expect_digest` and `hashed` are about
            the first `size` bytes.
        chunk_size: Bytes of one chunk.

    Attributes:
        hashed: The version that was given, after a complete iteration.
    """

    def __init__(
        self,
        path: str,
        *,
        size: int | None = None,
        expect_digest: str | None = None,
        start: int = 0,
        chunk_size: int = READ_SIZE,
    ) -> None:
        self._path = path
        self._size = size
        self._expect = expect_digest
        self._start = start
        self._chunk_size = chunk_size
        self.hashed: HashedFile | None = None

    def __iter__(self) -> Iterator[bytes]:
        started = time.time_ns()
        fd = open_regular(self._path)
        try:
            before = FileStat.of(os.fstat(fd))
            size = before.size if self._size is None else self._size
            hasher = blake3()
            for block in self._blocks(fd, 0, min(self._start, size)):
                hasher.update(block)  # not given, but the digest is that of the whole
            held = b""
            for block in self._blocks(fd, self._start, size):
                hasher.update(block)
                if held:
                    yield held
                held = block
            # The last block is held back until the version is known to be one.
            self._conclude(fd, before, size, hasher.hexdigest(), started)
            if held:
                yield held
        finally:
            os.close(fd)

    def _blocks(self, fd: int, offset: int, stop: int) -> Iterator[bytes]:
        while offset < stop:
            block = os.pread(fd, min(self._chunk_size, stop - offset), offset)
            if not block:
                raise FileChangedError(f"{self._path!r} became shorter while it was read.", path=self._path)
            offset += len(block)
            yield block

    def _conclude(self, fd: int, before: FileStat, size: int, digest: str, started: int) -> None:
        quiet = FileStat.of(os.fstat(fd)) == before and before.settled_before(started)
        if self._expect is not None:
            # `digest` is that of the very bytes that were given: nothing else needs to be proven.
            if digest != self._expect:
                raise FileChangedError(f"{self._path!r} is not what was planned any more.", path=self._path)
        elif not quiet and _hash_fd(fd, size, ())[0] != digest:
            raise FileChangedError(f"{self._path!r} was written while it was read.", path=self._path)
        version = FileStat(size, before.mtime_ns, before.ctime_ns, before.inode)
        self.hashed = HashedFile(version, digest, {}, settled=quiet and size == before.size)

    def read_all(self, limit: int | None = None) -> bytes:
        """All of the bytes at once (for small files).

        Args:
            limit: How many bytes may be held in memory; None for any number.

        Raises:
            FileChangedError: There are more by now.
        """
        parts: list[bytes] = []
        size = 0
        for part in self:
            size += len(part)
            if limit is not None and size > limit:
                raise FileChangedError(f"{self._path!r} is not a small file any more.", path=self._path)
            parts.append(part)
        return b"".join(parts)
