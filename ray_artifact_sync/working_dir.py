"""One trial's working dir on this node: who may use it now, what an earlier attempt left, filling files in place.

Two attempts of a trial can overlap in one working dir: after an error or a pause, Ray starts the new actor while the
old one is still in `stop()`. Three files below `.ray_artifact_sync/` order them:

- `alive` is locked for as long as an attempt lives. A new attempt waits (bounded) for it, so that the old one's last
  upload is over before its leftovers are moved away. A killed process loses the lock with its life.
- `lock` is held during each operation.
- `token` names the newest attempt on this node; an older one that sees it stops quietly.

The locks are POSIX record locks: unlike flock(2) locks, they are not inherited by forked data-loader processes that
outlive their parent.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.entries import FileEntry
from ray_artifact_sync.errors import ArtifactConflictError, ArtifactSyncError, IntegrityError
from ray_artifact_sync.local_files import FileStat
from ray_artifact_sync.stores.base import Buffer
from ray_artifact_sync.stores.sparse import is_hole

logger = logging.getLogger(__name__)

KEPT_SET_ASIDE = 2
"""How many attempts' leftovers are kept; what is older is deleted when a new attempt begins."""

STAGING_PREFIX = "staging-"
"""Begins the names of directories, in the state dir, for copies of files that keep changing."""

_POLL_SECONDS = 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class WorkingDir:
    """The working dir of one trial, used by one attempt.

    Args:
        root: The directory; created by `begin`.
        token: The attempt.
    """

    def __init__(self, root: str, token: str) -> None:
        self.root = os.path.abspath(root)
        self.token = token
        self._alive_fd: int | None = None
        self._token_seen: tuple[FileStat, str] | None = None
        self._mutex = threading.RLock()

    def local_path(self, path: str) -> str:
        """Where an artifact path lies on this node."""
        return os.path.join(self.root, path)

    @property
    def set_aside_dir(self) -> str:
        """Where this attempt put what it found."""
        return self.local_path(f"{layout.SET_ASIDE}/{self.token}")

    # --- taking over ------------------------------------------------------------------------------

    def begin(self, wait_seconds: float, *, set_aside: bool = True) -> None:
        """Takes the working dir over: waits for a living predecessor, then sets its files aside.

        Args:
            wait_seconds: How long a predecessor that is still alive may take; then its files are moved under it, and
                it stops at its next operation.
            set_aside: Move what is there away; it is an earlier attempt's.

        Raises:
            ArtifactConflictError: A newer attempt has the working dir already.
        """
        os.makedirs(self.local_path(layout.STATE_DIR), exist_ok=True)
        self._await_predecessor(wait_seconds)
        try:
            with self.locked(wait_seconds):  # held or not: a stopped process must not stop its successor
                self.check()
                self._write_token()
                self._remove_staging()
                if set_aside:
                    self._set_leftovers_aside()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Lets a successor begin."""
        if self._alive_fd is not None:
            os.close(self._alive_fd)  # closing releases the record lock
            self._alive_fd = None

    @contextmanager
    def locked(self, wait_seconds: float | None = None) -> Iterator[bool]:
        """Holds the node-local lock of this working dir.

        Args:
            wait_seconds: How long to wait for another attempt's operation; None for as long as it takes.

        Yields:
            Whether the lock is held. False after the wait was in vain, or where nothing can be written any more: what
            a disk with errors, remounted read-only, still holds is to be saved all the same.
        """
        with self._mutex:
            try:
                os.makedirs(self.local_path(layout.STATE_DIR), exist_ok=True)
                fd = os.open(self.local_path(layout.LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                    raise
                yield False
                return
            try:
                yield _lock_within(fd, wait_seconds)
            finally:
                os.close(fd)

    def check(self) -> None:
        """Raises if a newer attempt has taken over on this node.

        Raises:
            ArtifactConflictError: It has.
        """
        newest = self._read_token()
        if newest is not None and newest > self.token:
            raise _replaced(newest)

    def _await_predecessor(self, wait_seconds: float) -> None:
        fd = os.open(self.local_path(layout.ALIVE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if not _lock_within(fd, wait_seconds):
            logger.warning(
                "An earlier attempt of this trial is still alive in %s after %g s; going on without it.",
                self.root,
                wait_seconds,
            )
        self._alive_fd = fd

    def _read_token(self) -> str | None:
        path = self.local_path(layout.LOCAL_TOKEN)
        try:
            # It is only ever replaced by a new file, so that an equal stat is an equal token. Asked before every write.
            seen = FileStat.of(os.stat(path))
            if self._token_seen is not None and self._token_seen[0] == seen:
                return self._token_seen[1]
            with open(path, encoding="ascii") as file:
                token = file.read().strip()
        except (OSError, UnicodeDecodeError):
            return None
        if not layout.is_token(token):
            return None
        self._token_seen = seen, token
        return token

    def _write_token(self) -> None:
        temporary = self.local_path(f"{layout.LOCAL_TOKEN}.{self.token}")
        try:
            with _naming(temporary), open(temporary, "w", encoding="ascii") as file:
                file.write(self.token)
            os.replace(temporary, self.local_path(layout.LOCAL_TOKEN))
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _set_leftovers_aside(self) -> None:
        names = [name for name in os.listdir(self.root) if name != layout.STATE_DIR]
        if names:
            os.makedirs(self.set_aside_dir, exist_ok=True)
            for name in names:
                os.rename(self.local_path(name), os.path.join(self.set_aside_dir, name))
            logger.info(
                "%d files and directories of an earlier attempt were moved to %s.", len(names), self.set_aside_dir
            )
        for old in self.set_aside_dirs()[KEPT_SET_ASIDE:]:
            shutil.rmtree(old, ignore_errors=True)

    def _remove_staging(self) -> None:
        """Deletes the copies that a killed sync left."""
        for name in os.listdir(self.local_path(layout.STATE_DIR)):
            if name.startswith(STAGING_PREFIX):
                shutil.rmtree(self.local_path(f"{layout.STATE_DIR}/{name}"), ignore_errors=True)

    def set_aside_dirs(self) -> list[str]:
        """All set-aside directories, newest first."""
        base = self.local_path(layout.SET_ASIDE)
        with suppress(FileNotFoundError):
            names = sorted((name for name in os.listdir(base) if layout.is_token(name)), reverse=True)
            return [os.path.join(base, name) for name in names]
        return []

    # --- changing files ---------------------------------------------------------------------------

    def set_aside(self, paths: Iterable[str]) -> None:
        """Moves single files away; what was set aside before under the same name is kept beside them."""
        for path in paths:
            target = _free_place(self.set_aside_dir, path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with suppress(FileNotFoundError):
                os.rename(self.local_path(path), target)

    def remove_empty_dirs(self, paths: Iterable[str]) -> None:
        """Removes directories that are empty, and parents that this leaves empty; an empty one would be an artifact."""
        for path in sorted(paths, key=len, reverse=True):
            current = path
            with suppress(OSError):  # not empty, or no directory any more
                while current:
                    os.rmdir(self.local_path(current))
                    current = os.path.dirname(current)

    def fill(self, entry: FileEntry, chunks: Iterable[Buffer]) -> None:
        """Gives a file the content of `chunks`, in place: the inode stays, so that open handles go on working.

        A file with several names (hard links) is the exception: it is made anew, so that the content of the others,
        which may lie outside of the working dir, stays.

        Not atomic: a file that is being filled is a mix until this returns. An attempt that dies in it is followed by
        one that sets the working dir aside, so nobody takes the mix for an artifact.

        Raises:
            IntegrityError: The chunks are not the content that the entry names; the file must be filled again.
        """
        local_path = self.local_path(entry.path)
        self.clear_the_way(entry.path)
        fd = _open_alone(local_path)
        try:
            written = _write_verified(fd, local_path, entry, chunks)
            os.ftruncate(fd, written)
            if entry.mtime_ns:
                os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)

    def fill_unverified(self, path: str, chunks: Iterable[Buffer], *, mtime_ns: int = 0) -> tuple[int, str]:
        """Like `fill`, with whatever the chunks hold.

        Returns:
            Their bytes and BLAKE3.
        """
        self.clear_the_way(path)
        local_path = self.local_path(path)
        fd = _open_alone(local_path)
        hasher, offset, old_size = blake3(), 0, os.fstat(fd).st_size
        try:
            for chunk in chunks:
                hasher.update(chunk)
                offset += _write_at(fd, local_path, chunk, offset, old_size)
            os.ftruncate(fd, offset)
            if mtime_ns:
                os.utime(fd, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(fd)
        return offset, hasher.hexdigest()

    def remove(self, path: str) -> None:
        """Takes a file away."""
        with suppress(FileNotFoundError):
            os.unlink(self.local_path(path))

    def clear_the_way(self, path: str) -> None:
        """Makes the parents of a path real directories, and the path itself free for a file."""
        _make_real_dirs(self.root, path.split("/")[:-1])
        _clear_the_way(self.root, path)

    def make_dir(self, path: str) -> None:
        """Creates a directory and its parents, replacing nothing but links."""
        _make_real_dirs(self.root, path.split("/"))

    def __getstate__(self) -> None:
        raise TypeError("A WorkingDir holds locks of this process and cannot be pickled.")


def _lock_within(fd: int, wait_seconds: float | None) -> bool:
    """Takes an exclusive record lock; False if that took too long. A file system without such locks has no holder."""
    give_up = None if wait_seconds is None else time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return True
            if give_up is not None and time.monotonic() >= give_up:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True


def _open_alone(local_path: str) -> int:
    """Opens a file for writing, a new one if others share its inode."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(local_path, flags, 0o666)
    if os.fstat(fd).st_nlink <= 1:
        return fd
    os.close(fd)
    with suppress(FileNotFoundError):
        os.unlink(local_path)
    return os.open(local_path, flags, 0o666)


def _free_place(base: str, path: str) -> str:
    """Where a path can be put below `base`, beside what has its name, or a parent's name, already."""
    *parents, name = path.split("/")
    current = base
    for part in parents:
        current = os.path.join(current, part)
        while os.path.lexists(current) and (os.path.islink(current) or not os.path.isdir(current)):
            current += ".later"
    target = os.path.join(current, name)
    while os.path.lexists(target):
        target += ".later"
    return target


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Adds the path to the kernel's errors, which do not name a file that is open: which disk is full?"""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


def _write_at(fd: int, path: str, chunk: Buffer, offset: int, old_size: int) -> int:
    """Writes all of a chunk; returns its size in bytes. Beyond the file's old end, zeros are left out: holes."""
    view = memoryview(chunk)
    if offset >= old_size and is_hole(chunk):
        return len(view)
    written = 0
    with _naming(path):
        while written < len(view):
            written += os.pwrite(fd, view[written:], offset + written)
    return written


def _write_verified(fd: int, path: str, entry: FileEntry, chunks: Iterable[Buffer]) -> int:
    hasher = blake3()
    offset, old_size = 0, os.fstat(fd).st_size
    for chunk in chunks:
        view = memoryview(chunk)
        if offset + len(view) > entry.size:
            raise IntegrityError(f"{entry.path}: more than the {entry.size} bytes that the manifest names.")
        hasher.update(view)
        offset += _write_at(fd, path, chunk, offset, old_size)
    if offset != entry.size or hasher.hexdigest() != entry.digest:
        raise IntegrityError(
            f"{entry.path}: the {offset} bytes read are not the {entry.size} bytes with BLAKE3 {entry.digest[:16]}... "
            "that the manifest names.",
            path=entry.path,
        )
    return offset


def _make_real_dirs(root: str, parts: list[str]) -> None:
    current = root
    for part in parts:
        current = os.path.join(current, part)
        if os.path.islink(current):
            os.unlink(current)  # a link could lead out of the working dir
        if not os.path.isdir(current):
            os.mkdir(current)


def _clear_the_way(root: str, path: str) -> None:
    """Removes an empty directory or a link at a path."""
    target = os.path.join(root, path)
    if os.path.islink(target):
        os.unlink(target)
    elif os.path.isdir(target):
        try:
            _remove_empty_tree(target)
        except OSError as error:
            raise ArtifactSyncError(f"{path!r} must be a file again, but is a directory with files in it.") from error


def _remove_empty_tree(directory: str) -> None:
    for current, _, _ in os.walk(directory, topdown=False):
        os.rmdir(current)


def _replaced(newest: str) -> ArtifactConflictError:
    return ArtifactConflictError(
        f"A newer attempt of this trial (token {newest}) has taken over the working dir; this one stops writing.",
        newest=newest,
    )
