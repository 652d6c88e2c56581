"""Any `pyarrow.fs.FileSystem`, for what has no faster client here.

That is HDFS, fsspec file systems, or S3 with credentials that only pyarrow can find. One output
stream a file: its `close()` raises what `pyarrow.fs.copy_files` swallows; the size is checked then.
fsspec file systems behind pyarrow are asked directly where pyarrow's wrapper would take a name as
a glob pattern (`rm("f[1]")` deletes `f1`).
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from pyarrow import fs as pafs

from ray_artifact_sync.errors import (
    ArtifactNotFoundError,
    ArtifactSyncError,
    StorageError,
    StoragePermissionError,
)
from ray_artifact_sync.layout import TMP
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
    UNTRUSTED,
    byte_length,
    check_azure_key,
    check_path,
    check_prefix,
    chunks_of,
    is_temporary,
    scrub,
    slices,
    take,
)

_SMALL = 8 * 1024 * 1024  # bytes that are held back until they are complete
_OBJECT_STORES = frozenset(("s3", "s3a", "gcs", "gs", "abfs", "abfss", "az", "adl", "oci", "oss", "tos", "obs"))
_AZURE = frozenset(("abfs", "abfss", "az"))
_TRANSIENT_TEXT = re.compile(
    r"(?i)slow.?down|throttl|too many requests|service.?unavailable|internal.?(error|failure)"
    r"|time(d)?.?out|network.?connection|connection (reset|refused|closed|aborted)|curlcode"
    r"|broken pipe|condition.?not.?met|request_limit_exceeded|(http|status|code)\D{0,12}(429|500|502|503|504)\b"
)
_REFUSED_TEXT = re.compile(
    r"(?i)access.?denied|permission.?denied|forbidden|unauthori[sz]ed|invalid.?access.?key"
    r"|signature.?does.?not.?match|signature_|expired.?token|(http|status|code)\D{0,12}(401|403)\b"
)
# S3 answers 400 for credentials that have expired. To HEAD, that has no body which says so; of GET, pyarrow drops it.
_EXPIRED_TEXT = re.compile(
    r"(?i)expired.?token|token.{0,20}expired|invalid.?access.?key|token.?refresh|status 400\) during (Head|Get)Object"
)
_CERTIFICATE_TEXT = re.compile(r"(?i)curlCode: 60|certificate.?verify.?failed")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_MISSING_TEXT = re.compile(r"(?i)path does not exist|no such (file|key)|nosuchkey|not.?found")


class ArrowStore(ArtifactStore):
    """Files below a directory of a pyarrow file system.

    On object stores a file up to 8 MiB is written directly (but for Azure); all else is written to a temporary name
    and moved, because most streams publish what they have when the writer gives up. The move
    replaces the target where the file system can; where it cannot (some fsspec ones), the target is
    deleted first, and a reader in that instant sees no file.

    Args:
        filesystem: A pyarrow file system, which may wrap an fsspec one.
        root: Directory (`bucket/prefix` on object stores).
    """

    can_append = False
    can_precondition = False

    def __init__(self, filesystem: Any, root: str = "") -> None:
        self.filesystem = filesystem
        self.root = root.rstrip("/")
        self._fsspec = fsspec_of(filesystem)
        kind = self._kind()
        self._is_object_store = kind in _OBJECT_STORES
        self._is_azure = kind in _AZURE
        # pyarrow's stream to Azure begins with an empty file in place of the old one; what it deletes, it leaves a
        # marker for; and it moves nothing in accounts without a hierarchical namespace.
        self._is_arrow_azure = self._is_azure and self._fsspec is None
        self.description = f"{kind} path {self.root or '/'} (pyarrow)"
        self._tmp = f"{TMP}/free-{secrets.token_hex(8)}"
        self._known_dirs: set[str] = set()
        self._renewing = threading.Lock()

    def stat(self, path: str) -> StoredFile | None:
        """See `ArtifactStore.stat`."""
        return self._stat_many([check_path(path)])[0]

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """See `ArtifactStore.list`."""
        for path, info in self._children(prefix, recursive=True):
            if info.type == pafs.FileType.File:
                yield _stored(path, info)

    def list_dirs(self, prefix: str = "") -> Names:
        """See `ArtifactStore.list_dirs`."""
        return sorted(
            path.rpartition("/")[2] for path, info in self._children(prefix) if info.type == pafs.FileType.Directory
        )

    def list_files(self, prefix: str = "") -> Files:
        """See `ArtifactStore.list_files`."""
        return sorted(
            (_stored(path, info) for path, info in self._children(prefix) if info.type == pafs.FileType.File),
            key=lambda file: file.path,
        )

    def read_chunks(
        self,
        path: str,
        *,
        start: int = 0,
        length: int | None = None,
        chunk_size: int = CHUNK_SIZE,
    ) -> Iterator[Buffer]:
        """See `ArtifactStore.read_chunks`."""
        with self._errors("read", path):
            stream = self.filesystem.open_input_file(self._full(path))
        try:
            with self._errors("read", path):
                size = stream.size()
                stream.seek(min(start, size))
            left = max(0, size - start)
            left = left if length is None else min(left, length)
            while left:
                with self._errors("read", path):
                    chunk = stream.read(min(chunk_size, left))
                if not chunk:
                    raise StorageError(
                        f"{path!r} in {self.description} ended {left} bytes too early.",
                        retryable=True,
                        path=path,
                    )
                left -= len(chunk)
                yield chunk
        finally:
            with contextlib.suppress(Exception):
                stream.close()

    def put(
        self,
        path: str,
        data: Buffer | Iterable[Buffer],
        *,
        if_match: str | None = None,  # noqa: ARG002  (cannot be enforced)
        if_absent: bool = False,  # noqa: ARG002
        size_hint: int | None = None,  # noqa: ARG002
    ) -> StoredFile:
        """See `ArtifactStore.put`."""
        check_path(path)
        chunks = slices(chunks_of(data), _SMALL)
        if not self._is_object_store or self._is_arrow_azure:
            return self._put_by_move(path, chunks)
        head, ended = take(chunks, _SMALL)
        if not ended:
            return self._put_by_move(path, chain((head,), chunks))
        self._write(path, path, (head,))
        return self._require_size(path, len(head))

    def copy(self, source: str, target: str) -> None:
        """See `ArtifactStore.copy`."""
        check_path(target)
        found = self.stat(source)
        if found is None:
            raise ArtifactNotFoundError(f"There is no file {source!r} in {self.description}.", path=source)
        # Only an object store's own copy is atomic, and only up to 5 GiB.
        if self._is_object_store:
            try:
                with self._errors("copy", source):
                    self._copy_file(self._full(source), self._full(target))
                self._require_size(target, found.size)
            except StoragePermissionError:
                raise
            except StorageError as error:
                if error.retryable:
                    raise
            else:
                return
        self.put(target, self.read_chunks(source), size_hint=found.size)

    def delete(self, paths: Iterable[str]) -> None:
        """See `ArtifactStore.delete`.

        Empty parents are removed on fsspec file systems only: pyarrow's own removal of a directory
        takes whatever another thread has just put there.
        """
        wanted = [check_path(path) for path in paths]
        folders: set[str] = set()
        for path, found in zip(wanted, self._stat_many(wanted), strict=True):
            if found is None:
                continue
            with contextlib.suppress(ArtifactNotFoundError), self._errors("delete", path):
                self._delete_file(self._full(path))
            folders.add(path.rpartition("/")[0])
        for folder in sorted(folders, key=len, reverse=True):
            self._remove_empty(folder)

    def make_dir(self, path: str) -> None:
        """See `ArtifactStore.make_dir`."""
        full = self._full(path)
        if not self._is_object_store:
            with self._errors("create the directory", path):
                self.filesystem.create_dir(full, recursive=True)

    def below(self, path: str) -> ArrowStore:
        """See `ArtifactStore.below`."""
        store = ArrowStore(self.filesystem, self._full(path))
        store.reason = self.reason
        return store

    # --- writing ---------------------------------------------------------------------------------

    def _put_by_move(self, path: str, chunks: Iterable[Buffer]) -> StoredFile:
        temporary = f"{self._tmp}/{secrets.token_hex(12)}{'/file' if self._is_arrow_azure else ''}"
        try:
            size = self._write(temporary, path, chunks)
            self._require_size(temporary, size)
            self._move(temporary, path)
            return self._require_size(path, size)
        except BaseException:
            self._drop(self._full(temporary))
            raise
        finally:
            self._remove_empty(self._tmp)

    def _write(self, place: str, path: str, chunks: Iterable[Buffer]) -> int:
        """Writes a file at `place`; not atomic. Errors speak of `path`."""
        stream = self._open_output(place, path)
        size = 0
        try:
            for chunk in chunks:
                with self._errors("write", path):
                    stream.write(chunk)
                size += byte_length(chunk)
        except BaseException:
            with contextlib.suppress(Exception):
                stream.close()
            raise
        with self._errors("write", path):
            stream.close()
        return size

    def _open_output(self, place: str, path: str) -> Any:
        full = self._full(place)
        self._ensure_parent(place, path)
        try:
            with self._errors("write", path):
                return self.filesystem.open_output_stream(full)
        except ArtifactNotFoundError:
            self._ensure_parent(place, path, again=True)  # removed since it was made
        except StorageError:
            if not self._is_azure:
                raise
            self._require_no_directory(place)  # pyarrow leaves the marker of a directory that is empty now
        with self._errors("write", path):
            return self.filesystem.open_output_stream(full)

    def _move(self, temporary: str, path: str) -> None:
        source, target = self._full(temporary), self._full(path)
        self._ensure_parent(path, path)
        self._require_no_directory(path)
        try:
            with self._errors("write", path):
                self._move_file(source, target)
        except StorageError as error:
            if error.retryable or self._stat_many([temporary])[0] is None:
                raise
            # The target's directory is gone, or this file system does not replace.
            self._ensure_parent(path, path, again=True)
            with contextlib.suppress(Exception):
                self._delete_file(target)
            with self._errors("write", path):
                self._move_file(source, target)

    def _require_no_directory(self, path: str) -> None:
        """Removes an empty directory at `path`, and refuses one that holds files."""
        if self._is_object_store and not self._is_azure:
            return
        with self._errors("write", path):
            info = self.filesystem.get_file_info(self._full(path))
        if info.type != pafs.FileType.Directory:
            return
        if next(self.list(path), None) is not None:
            raise StorageError(
                f"Cannot write {path!r} in {self.description}: a directory has that name.",
                path=path,
            )
        with self._errors("write", path):
            self.filesystem.delete_dir(self._full(path))

    def _ensure_parent(self, place: str, path: str, *, again: bool = False) -> None:
        parent = place.rpartition("/")[0]
        if self._is_object_store or (parent in self._known_dirs and not again):
            return
        with self._errors("write", path):
            self.filesystem.create_dir(self._full(parent) if parent else self.root, recursive=True)
        self._known_dirs.add(parent)

    def _require_size(self, path: str, size: int) -> StoredFile:
        found = self._stat_many([path])[0]
        if found is None or found.size != size:
            there = "nothing" if found is None else f"{found.size} bytes"
            raise StorageError(
                f"Wrote {size} bytes to {path!r} in {self.description}, which then had {there}.",
                retryable=True,
                path=path,
            )
        return found

    # --- pyarrow or fsspec -----------------------------------------------------------------------

    def _copy_file(self, source: str, target: str) -> None:
        if self._fsspec is None:
            self.filesystem.copy_file(source, target)
        else:
            self._fsspec.cp_file(source, target)

    def _delete_file(self, full: str) -> None:
        if self._fsspec is None:
            self.filesystem.delete_file(full)
        else:
            self._fsspec.rm_file(full)

    def _drop(self, temporary: str) -> None:
        """Removes a temporary file; the directory of its own that it has on Azure goes with it."""
        with contextlib.suppress(Exception):
            if self._is_arrow_azure:
                self.filesystem.delete_dir(temporary.rpartition("/")[0])
            else:
                self._delete_file(temporary)

    def _move_file(self, source: str, target: str) -> None:
        if self._is_arrow_azure:
            self.filesystem.copy_file(source, target)
            self._drop(source)
        elif self._fsspec is None:
            self.filesystem.move(source, target)
        elif _has_own_move(self._fsspec):
            self._fsspec.mv(source, target)
        else:
            self._fsspec.cp_file(source, target)
            self._fsspec.rm_file(source)

    def _remove_empty(self, folder: str) -> None:
        if self._fsspec is None or self._is_object_store:
            return
        while folder:
            try:
                self._fsspec.rmdir(self._full(folder))
            except FileNotFoundError:
                pass
            except Exception:
                return  # not empty, or cannot: an empty directory harms nobody
            self._known_dirs.discard(folder)
            folder = folder.rpartition("/")[0]

    # --- reading ---------------------------------------------------------------------------------

    def _stat_many(self, paths: Names) -> Sequence[StoredFile | None]:
        if not paths:
            return []
        self._forget()
        with self._errors("look at", paths[0]):
            infos = self.filesystem.get_file_info([self._full(path) for path in paths])
        return [
            _stored(path, info) if info.type == pafs.FileType.File else None
            for path, info in zip(paths, infos, strict=True)
        ]

    def _children(self, prefix: str, *, recursive: bool = False) -> Iterator[tuple[str, Any]]:
        prefix = check_prefix(prefix)
        base = self._full(prefix) if prefix else self.root
        self._forget()
        with self._errors("list", prefix or "."):
            # Asked first: some fsspec file systems list a file as its own child.
            if base and self.filesystem.get_file_info(base).type == pafs.FileType.File:
                return
            infos = self.filesystem.get_file_info(pafs.FileSelector(base, allow_not_found=True, recursive=recursive))
        start = len(self.root.strip("/"))
        depth = len(prefix) + 1 if prefix else 0
        for info in infos:
            path = info.path.strip("/")[start:].strip("/")
            if not recursive and "/" in path[depth:]:
                continue  # adlfs lists all the way down
            if path and path != prefix and not is_temporary(path):
                yield path, info

    def _forget(self) -> None:
        """Drops the listings that fsspec file systems remember: others write here too."""
        if self._fsspec is not None:
            with contextlib.suppress(Exception):
                self._fsspec.invalidate_cache()

    # --- names and errors ------------------------------------------------------------------------

    def _full(self, path: str) -> str:
        check_path(path)
        full = f"{self.root}/{path}" if self.root else path
        return check_azure_key(full) if self._is_azure else full

    def _kind(self) -> str:
        if self._fsspec is not None:
            protocol = self._fsspec.protocol
            return str(protocol if isinstance(protocol, str) else protocol[0])
        base = self.filesystem
        while isinstance(base, pafs.SubTreeFileSystem):
            base = base.base_fs
        return str(base.type_name)

    @contextlib.contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        used = self.filesystem
        try:
            yield
        except ArtifactSyncError:
            raise
        except Exception as error:
            what = f"Cannot {verb} {path!r} in {self.description}"
            found = storage_error(error, what, path)
            if not found.retryable and _EXPIRED_TEXT.search(_words(error, path)) and self._renew(used):
                found = StoragePermissionError(str(found), retryable=True, path=path)
            raise found from None

    def _renew(self, used: Any) -> bool:
        """Has credentials looked for anew, once of many threads that say so; False if that cannot give others."""
        with self._renewing:
            if self.filesystem is not used:
                return True
            renewed = with_new_credentials(used)
            self.filesystem = renewed or used
        return renewed is not None


def storage_error(error: Exception, what: str, path: str) -> StorageError:
    """This package's error for one of pyarrow's, or of the client behind fsspec.

    Args:
        error: What was raised.
        what: What was tried, for the message.
        path: The artifact path, or a prefix.

    Returns:
        The error to raise; its message holds no credentials.
    """
    text = str(error)
    message = f"{what}: {scrub(text) or type(error).__name__}"
    code = getattr(error, "errno", None)
    words = _words(error, path)
    if isinstance(error, FileNotFoundError):
        return ArtifactNotFoundError(message, path=path)
    if isinstance(error, PermissionError) or _REFUSED_TEXT.search(words):
        return StoragePermissionError(message, path=path)
    if _CERTIFICATE_TEXT.search(words):
        return StorageError(f"{what}: {UNTRUSTED}", path=path)
    transient = (
        isinstance(error, TimeoutError | ConnectionError)
        or code in TRANSIENT_ERRNOS
        or _TRANSIENT_TEXT.search(words) is not None
    )
    if transient:
        return StorageError(message, retryable=True, path=path)
    if _MISSING_TEXT.search(words):
        return ArtifactNotFoundError(message, path=path)
    return StorageError(message, path=path)


def _words(error: Exception, path: str) -> str:
    """The words of an answer without the names in it: a file may be called `access denied`."""
    return re.sub(rf"(?<!\w){re.escape(path)}(?!\w)", "", _QUOTED.sub("", str(error)))


def with_new_credentials(filesystem: Any) -> Any:
    """The same place with credentials that are looked for anew; None where they were given as such.

    pyarrow keeps what its first look has found, for as long as it seems to last.
    """
    inner = fsspec_of(filesystem)
    if inner is not None:
        if "s3" not in inner.protocol or inner.key or inner.anon:
            return None
        inner.connect(refresh=True)
        return filesystem
    if not isinstance(filesystem, getattr(pafs, "S3FileSystem", ())):
        return None
    reduced: Any = filesystem.__reduce__()  # as pickle does, which loses what was found
    rebuild, arguments = reduced[:2]
    given = any(arguments[0].get(name) for name in ("access_key", "anonymous"))
    return None if given else rebuild(*arguments)


def fsspec_of(filesystem: Any) -> Any:
    """The fsspec file system that a pyarrow one wraps, or None."""
    handler = getattr(filesystem, "handler", None)
    return handler.fs if isinstance(handler, pafs.FSSpecHandler) else None


def _has_own_move(filesystem: Any) -> bool:
    """Whether an fsspec file system renames by itself (fsspec's own `mv` expands globs)."""
    from fsspec import AbstractFileSystem  # noqa: PLC0415  (loaded if there is one)

    return type(filesystem).mv is not AbstractFileSystem.mv


def _stored(path: str, info: Any) -> StoredFile:
    return StoredFile(path, info.size or 0, None, info.mtime_ns)
