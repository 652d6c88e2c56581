"""Local disks and mounted shares (NFS, EFS, FUSE), by the kernel's own calls.

A write goes to a temporary file below the same root and is renamed to its place: readers see the
old file or the new one. The temporary directory is also the fence between attempts, see
`PosixStore.begin_writing`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import stat as stat_module
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactNotFoundError,
    PreconditionFailedError,
    StorageError,
    StoragePermissionError,
)
from ray_artifact_sync.layout import TMP, is_token
from ray_artifact_sync.stores.base import (
    CHUNK_SIZE,
    ArtifactStore,
    Buffer,
    Files,
    Names,
    StoredFile,
)
from ray_artifact_sync.stores.common import (
    TRANSIENT_ERRNOS,
    check_path,
    check_prefix,
    chunks_of,
    is_temporary,
    join,
)
from ray_artifact_sync.stores.sparse import data_ranges, write_chunk

_FREE_PREFIX = "free-"
_GONE_PREFIX = "gone-"
_ABANDONED_SECONDS = 24 * 3600
_COPY_STEP = 64 * 1024 * 1024
_RENAME_TRIES = 50

_OPEN_FOR_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OPEN_FOR_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
# What a kernel or a file system answers that cannot do this kind of copy (EXDEV: two file systems).
_NO_KERNEL_COPY = frozenset(
    (
        errno.EBADF,
        errno.EINVAL,
        errno.ENOSYS,
        errno.ENOTSUP,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.ETXTBSY,
        errno.EXDEV,
    )
)
NO_LINKS = frozenset((errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM))
"""Errors of a file system that has no hard links, or no more for this file."""


class PosixStore(ArtifactStore):
    """Files below a directory of this machine or of a mounted share.

    Durability: `put` returns when the kernel has the bytes. They survive the death of the process,
    and of the machine as far as the file system's own write-back goes (on NFS, `close` has sent
    them to the server). There is no fsync a file: it doubles the cost of small files.

    Preconditions: `if_absent` is atomic where the file system has hard links. `if_match` compares
    right before the rename; another writer may slip between the two, so `can_precondition` is False
    and the fence between attempts is `begin_writing`.

    Symbolic links inside the root are never listed, and never followed where they are the last
    segment of a path.

    Args:
        root: Directory. Created by the first write.
    """

    can_append = True
    can_precondition = False
    can_fence = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.description = f"directory {self.root}"
        self._token: str | None = None
        self._free_name = f"{_FREE_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._unique = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._writes = 0

    def stat(self, path: str) -> StoredFile | None:
        """See `ArtifactStore.stat`."""
        try:
            found = os.lstat(self._full(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._error(error, "look at", path) from error
        return _stored(path, found) if stat_module.S_ISREG(found.st_mode) else None

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """See `ArtifactStore.list`."""
        pending = [check_prefix(prefix)]
        while pending:
            folder = pending.pop()
            for path, entry in self._scan(folder):
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif found := _stored_entry(path, entry):
                    yield found

    def list_dirs(self, prefix: str = "") -> Names:
        """See `ArtifactStore.list_dirs`."""
        entries = self._scan(check_prefix(prefix))
        return sorted(entry.name for _, entry in entries if entry.is_dir(follow_symlinks=False))

    def list_files(self, prefix: str = "") -> Files:
        """See `ArtifactStore.list_files`."""
        entries = self._scan(check_prefix(prefix))
        found = (_stored_entry(path, entry) for path, entry in entries)
        return sorted((file for file in found if file), key=lambda file: file.path)

    def read_chunks(
        self,
        path: str,
        *,
        start: int = 0,
        length: int | None = None,
        chunk_size: int = CHUNK_SIZE,
    ) -> Iterator[Buffer]:
        """See `ArtifactStore.read_chunks`."""
        descriptor = self._open_source(path)
        try:
            left = length
            while left is None or left > 0:
                step = chunk_size if left is None else min(chunk_size, left)
                try:
                    chunk = os.pread(descriptor, step, start)
                except OSError as error:
                    raise self._error(error, "read", path) from error
                if not chunk:
                    return
                start += len(chunk)
                left = None if left is None else left - len(chunk)
                yield chunk
        finally:
            os.close(descriptor)

    def put(
        self,
        path: str,
        data: Buffer | Iterable[Buffer],
        *,
        if_match: str | None = None,
        if_absent: bool = False,
        size_hint: int | None = None,  # noqa: ARG002  (a file grows by itself)
    ) -> StoredFile:
        """See `ArtifactStore.put`."""
        self._full(path)

        def fill(descriptor: int) -> None:
            self._write(descriptor, chunks_of(data), path)

        return self._publish(path, fill, if_match=if_match, if_absent=if_absent)

    def append(
        self,
        path: str,
        offset: int,
        data: Iterable[Buffer],
        *,
        if_match: str | None = None,  # noqa: ARG002  (its size is looked at, and only this session writes it)
        digest: str | None = None,  # noqa: ARG002  (the kernel needs no proof)
    ) -> StoredFile:
        """See `ArtifactStore.append`."""
        full = self._full(path)
        self._check_fence()
        try:
            # Never creating: a file that a newer attempt took away must not come back as a tail.
            descriptor = os.open(full, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise PreconditionFailedError(
                f"Cannot append to {path!r} in {self.description}: there is no such file.",
                path=path,
            ) from error
        except OSError as error:
            raise self._error(error, "append to", path) from error
        try:
            size = os.fstat(descriptor).st_size
            if size != offset:
                raise PreconditionFailedError(
                    f"Cannot append to {path!r} in {self.description}: it has {size} bytes, not the"
                    f" {offset} that were last written.",
                    path=path,
                )
            os.lseek(descriptor, offset, os.SEEK_SET)
            try:
                self._write(descriptor, chunks_of(data), path)
            except BaseException:
                self._take_back(descriptor, offset)
                raise
            return _stored(path, os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def copy(self, source: str, target: str) -> None:
        """See `ArtifactStore.copy`."""
        self._full(target)
        descriptor = self._open_source(source)
        try:

            def fill(output: int) -> None:
                try:
                    copy_data(descriptor, output)
                except OSError as error:
                    raise self._error(error, "write", target) from error

            self._publish(target, fill)
        finally:
            os.close(descriptor)

    def delete(self, paths: Iterable[str]) -> None:
        """See `ArtifactStore.delete`."""
        self._check_fence()
        folders: set[str] = set()
        for path in paths:
            try:
                os.unlink(self._full(path))
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                # macOS answers EPERM for a directory. A directory is no file: nothing to delete.
                if error.errno == errno.EISDIR or os.path.isdir(self._full(path)):
                    continue
                raise self._error(error, "delete", path) from error
            folders.add(path.rpartition("/")[0])
        for folder in sorted(folders, key=len, reverse=True):
            self._remove_empty(folder)

    def make_dir(self, path: str) -> None:
        """See `ArtifactStore.make_dir`."""
        try:
            os.makedirs(self._full(path), exist_ok=True)
        except OSError as error:
            raise self._error(error, "create the directory", path) from error

    def below(self, path: str) -> PosixStore:
        """See `ArtifactStore.below`."""
        store = PosixStore(self._full(path))
        store.reason = self.reason
        return store

    def begin_writing(self, token: str) -> None:
        """Takes over as the only writer: every older attempt's next rename fails.

        Raises:
            ArtifactConflictError: A newer attempt has begun.
            StorageError: The directory cannot be made.
        """
        base = self._full(TMP)
        own = os.path.join(base, token)
        for _ in range(_RENAME_TRIES):
            try:
                os.makedirs(own, exist_ok=True)
                break
            except FileNotFoundError:
                continue  # another process tidied an empty parent in between
            except OSError as error:
                raise self._error(error, "create the directory", f"{TMP}/{token}") from error
        try:
            # Made first, listed second: of two attempts at once, the later lister sees both.
            names = os.listdir(base)
        except OSError as error:
            raise self._error(error, "list", TMP) from error
        newer = [name for name in names if is_token(name) and name > token]
        if newer:
            _take_away(base, token)
            raise self._lost(max(newer))
        if token not in names:
            raise StorageError(f"The directory {own} vanishes again and again.", retryable=True)
        for name in names:
            if _is_superseded(base, name, token):
                _take_away(base, name)
        self._token = token

    # --- writing ---------------------------------------------------------------------------------

    def _publish(
        self,
        path: str,
        fill: Callable[[int], None],
        *,
        if_match: str | None = None,
        if_absent: bool = False,
    ) -> StoredFile:
        """Lets `fill` write a temporary file, and puts it in place."""
        target = self._full(path)
        with self._writing():
            temporary, descriptor = self._create_temporary(path)
            renamed = False
            try:
                try:
                    fill(descriptor)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
                    raise
                written = self._finish(temporary, descriptor, path)
                if if_match is not None:
                    self._require_etag(path, if_match)
                if not (if_absent and self._link(temporary, target, path)):
                    self._place(temporary, target, path, os.replace)
                    renamed = True
            finally:
                if not renamed:  # a failure, or a second link
                    with contextlib.suppress(OSError):
                        os.unlink(temporary)
        return _stored(path, written)

    def _finish(self, temporary: str, descriptor: int, path: str) -> os.stat_result:
        """Closes a written file; on network file systems this is where a full disk is reported."""
        try:
            os.close(descriptor)
            return os.lstat(temporary)  # after close: NFS servers set the final time there
        except FileNotFoundError as error:
            raise self._lost() from error
        except OSError as error:
            raise self._error(error, "write", path) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        if self._token:  # its directory stays
            yield
            return
        with self._lock:
            self._writes += 1
        try:
            yield
        finally:
            with self._lock:
                self._writes -= 1
                if not self._writes and not self._token:
                    # A one-off upload leaves nothing behind.
                    self._remove_empty(f"{TMP}/{self._free_name}")

    def _create_temporary(self, path: str) -> tuple[str, int]:
        token = self._token
        folder = f"{self.root}/{TMP}/{token or self._free_name}"
        # The process is part of the name: a forked child goes on from the same number.
        temporary = f"{folder}/{self._unique}-{os.getpid()}-{next(self._numbers)}"
        for _ in range(_RENAME_TRIES):
            try:
                return temporary, os.open(temporary, _OPEN_FOR_WRITE, 0o666)
            except FileNotFoundError as error:
                if token:
                    raise self._lost() from error
            except OSError as error:
                raise self._error(error, "write", path) from error
            try:
                os.makedirs(folder, exist_ok=True)
            except (FileNotFoundError, FileExistsError):
                continue  # another thread tidied an empty parent in between
            except OSError as error:
                raise self._error(error, "write", path) from error
        raise StorageError(
            f"Cannot write {path!r} to {self.description}: {folder} vanishes again and again.",
            retryable=True,
            path=path,
        )

    def _link(self, temporary: str, target: str, path: str) -> bool:
        """Puts a new file in place; False where the file system has no hard links."""
        try:
            self._place(temporary, target, path, os.link)
        except FileExistsError as error:
            raise PreconditionFailedError(f"{path!r} in {self.description} exists already.", path=path) from error
        except StorageError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno in NO_LINKS):
                raise
            if os.path.lexists(target):
                raise PreconditionFailedError(f"{path!r} in {self.description} exists already.", path=path) from cause
            return False
        return True

    def _place(self, temporary: str, target: str, path: str, act: Callable[[str, str], None]) -> None:
        """Runs a rename or link, making the target's parents when they are missing."""
        for _ in range(_RENAME_TRIES):
            try:
                act(temporary, target)
            except FileNotFoundError as error:
                if not os.path.lexists(temporary):
                    raise self._lost() from error
            except FileExistsError:
                raise
            except OSError as error:
                raise self._error(error, "write", path) from error
            else:
                return
            try:
                os.makedirs(os.path.dirname(target), exist_ok=True)
            except (FileNotFoundError, FileExistsError):
                # A delete tidied an empty parent in between; makedirs calls that "exists" if it
                # saw it at first. A file in the way shows itself at the next try.
                continue
            except OSError as error:
                raise self._error(error, "write", path) from error
        raise StorageError(
            f"Cannot write {path!r} to {self.description}: its directory vanishes again and again.",
            retryable=True,
            path=path,
        )

    def _write(self, descriptor: int, chunks: Iterable[Buffer], path: str) -> None:
        ends_with_hole = False
        for chunk in chunks:
            try:
                ends_with_hole = write_chunk(descriptor, chunk)
            except OSError as error:
                raise self._error(error, "write", path) from error
        if ends_with_hole:
            os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR))

    def _take_back(self, descriptor: int, size: int) -> None:
        """Cuts off what a failed append has written: on a full disk, it would take the room that the next try needs."""
        with contextlib.suppress(ArtifactConflictError, OSError):
            self._check_fence()
            os.ftruncate(descriptor, size)

    def _require_etag(self, path: str, etag: str) -> None:
        present = self.stat(path)
        if present is None or present.etag != etag:
            raise PreconditionFailedError(
                f"{path!r} in {self.description} is not the version that was expected.", path=path
            )

    def _check_fence(self) -> None:
        if self._token and not os.path.isdir(self._full(f"{TMP}/{self._token}")):
            raise self._lost()

    def _lost(self, newer: str | None = None) -> ArtifactConflictError:
        which = f" ({newer})" if newer else ""
        return ArtifactConflictError(
            f"A newer attempt{which} took over {self.description} (or it was removed):"
            " this process stops writing there."
        )

    # --- reading ---------------------------------------------------------------------------------

    def _open_source(self, path: str) -> int:
        try:
            descriptor = os.open(self._full(path), _OPEN_FOR_READ)
        except OSError as error:
            # ELOOP: the last segment is a symbolic link.
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise self._not_found(path) from error
            raise self._error(error, "read", path) from error
        if not stat_module.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._not_found(path)
        return descriptor

    def _scan(self, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """What lies directly in a directory and may be shown."""
        try:
            with os.scandir(self._full(folder) if folder else self.root) as entries:
                for entry in entries:
                    path = join(folder, entry.name)
                    if _is_text(entry.name) and not is_temporary(path):
                        yield path, entry
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._error(error, "list", folder or ".") from error

    def _remove_empty(self, folder: str) -> None:
        while folder:
            try:
                os.rmdir(self._full(folder))
            except FileNotFoundError:
                pass
            except OSError:
                return  # not empty, or not ours to remove: an empty directory harms nobody
            folder = folder.rpartition("/")[0]

    def _full(self, path: str) -> str:
        return f"{self.root}/{check_path(path)}"

    def _not_found(self, path: str) -> ArtifactNotFoundError:
        return ArtifactNotFoundError(f"There is no file {path!r} in {self.description}.", path=path)

    def _error(self, error: OSError, verb: str, path: str) -> StorageError:
        """This package's error for one of the kernel's."""
        code = error.errno
        message = f"Cannot {verb} {path!r} in {self.description}: {error.strerror or error}."
        if code in _FULL:
            return StorageError(f"{message} Free some space there.", path=path, errno=code)
        if code in _REFUSED:
            return StoragePermissionError(message, path=path, errno=code)
        if code == errno.ENOENT:
            return ArtifactNotFoundError(message, path=path, errno=code)
        if code in (errno.EISDIR, errno.ENOTEMPTY):
            message += " A directory has the name of the file."
        elif code in (errno.ENOTDIR, errno.EEXIST):
            message += " A file has the name of one of the directories in the path."
        return StorageError(message, retryable=code in TRANSIENT_ERRNOS, path=path, errno=code)


def copy_data(source: int, target: int) -> None:
    """Copies all bytes between two open files, in the kernel where it can. Holes stay holes.

    Args:
        source: Descriptor open for reading, at its start.
        target: Descriptor open for writing, at its start.

    Raises:
        OSError: Reading or writing failed.
    """
    size = os.fstat(source).st_size
    for start, end in data_ranges(source, size):
        _seek(start, source, target)
        copied = start + _kernel_copy(source, target, end - start)
        _seek(copied, source, target)
        # Also after a kernel copy: some file systems answer 0 although there is more.
        while chunk := os.read(source, min(CHUNK_SIZE, end - copied)):
            copied += len(chunk)
            view = memoryview(chunk)
            while view:
                view = view[os.write(target, view) :]
    os.ftruncate(target, min(size, os.fstat(source).st_size))  # a hole at the end


def _seek(position: int, *descriptors: int) -> None:
    for descriptor in descriptors:
        os.lseek(descriptor, position, os.SEEK_SET)


def _kernel_copy(source: int, target: int, count: int) -> int:
    """Copies what `copy_file_range` can of `count` bytes; the number of bytes that are there."""
    copy_file_range = getattr(os, "copy_file_range", None)
    copied = 0
    if copy_file_range is None:
        return copied
    try:
        while copied < count and (step := copy_file_range(source, target, min(_COPY_STEP, count - copied))):
            copied += step
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    return copied


def _stored(path: str, found: os.stat_result) -> StoredFile:
    etag = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    return StoredFile(path, found.st_size, etag, found.st_mtime_ns)


def _stored_entry(path: str, entry: os.DirEntry[str]) -> StoredFile | None:
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None  # deleted since the directory was read
    return _stored(path, found) if stat_module.S_ISREG(found.st_mode) else None


def _is_text(name: str) -> bool:
    """Whether a file name is valid UTF-8 (others cannot be artifacts)."""
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_superseded(base: str, name: str, token: str) -> bool:
    """Whether a temporary directory belongs to an older attempt, or to a process long dead."""
    if is_token(name):
        return name < token
    try:
        age = time.time() - os.lstat(os.path.join(base, name)).st_mtime
    except OSError:
        return False
    return name.startswith(_GONE_PREFIX) or age > _ABANDONED_SECONDS


def _take_away(base: str, name: str) -> None:
    """Removes a temporary directory so that a rename out of it fails from now on.

    Renamed first: `rmtree` takes the files one by one, and a writer could still finish the last.
    """
    gone = os.path.join(base, f"{_GONE_PREFIX}{secrets.token_hex(8)}")
    try:
        os.rename(os.path.join(base, name), gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)
