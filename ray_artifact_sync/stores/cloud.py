"""S3, GCS and Azure through obstore: a PUT is atomic by itself, and errors are honest.

obstore releases the GIL during a call, so the blocking calls below cost the training loop next to
nothing. It signs the SHA-256 of every S3 payload, which the server checks; GCS and Azure have no
such check here: what they hold is verified by its digest when it is read.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from itertools import chain, islice
from typing import Any

import obstore
from obstore import exceptions as obstore_errors

from ray_artifact_sync.errors import (
    ArtifactNotFoundError,
    InvalidPathError,
    PreconditionFailedError,
    StorageError,
    StoragePermissionError,
)
from ray_artifact_sync.stores.ahead import ReadAhead
from ray_artifact_sync.stores.base import (
    CHUNK_SIZE,
    ArtifactStore,
    Buffer,
    Files,
    Names,
    StoredFile,
)
from ray_artifact_sync.stores.clients import Client
from ray_artifact_sync.stores.common import (
    UNTRUSTED,
    byte_length,
    check_azure_key,
    check_path,
    check_prefix,
    chunks_of,
    is_refusal,
    is_temporary,
    is_transient,
    join,
    scrub,
    slices,
    take,
)
from ray_artifact_sync.stores.credentials import EXPIRED_CODES
from ray_artifact_sync.stores.feed import Feed
from ray_artifact_sync.stores.s3_append import MIN_APPEND_SIZE, S3Appender

SMALL = 8 * 1024 * 1024
"""Bytes up to which a file is one PUT; also the smallest part of a multipart upload."""

_PARTS = 9_000  # S3 and Azure end at 10,000 and 50,000; the rest is room for files that grow
_PART_CONCURRENCY = 4  # parts in flight of one file: memory is this many parts
_WINDOW = 8 * 1024 * 1024  # bytes of one GET, so that the request timeout fits files of any size
_DEPTH = 2  # windows of one file that are read ahead
_ahead = threading.BoundedSemaphore(4)  # windows read ahead in this process: memory is this many
_DELETE_BATCH = 1_000
_LIST_PAGE = 1_000
_COPY_LIMIT = 5 * 1024**3  # S3's CopyObject
_COPY_SECONDS = 60.0  # for a copy that Azure makes in the background

_TRIES = 3  # of a request whose credentials have expired
_ERRORS = (obstore_errors.BaseError, OSError, ValueError)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]+)</Code>|[\"{ ]code: \"([^\"]+)\"")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
# What obstore says of an error of `ClientSpec.source`, and what those are called that may pass.
_PROVIDER = "AWS credential provider"
_NO_ANSWER = ("Timeout", "Connection", "Throttling", "TooManyRequests", "ServiceUnavailable")
# Where clients look for credentials when they were given none.
_CREDENTIAL_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")


class CloudStore(ArtifactStore):
    """Objects below a prefix of one bucket or container.

    Args:
        client: An obstore store for the bucket, or a `Client` that may change it.
        root: The prefix inside the bucket; empty for the whole bucket.
        description: What `ArtifactStore.description` is to say, given the root; no credentials.
        part_concurrency: Parts of one large file in flight at once.
        client_without_retries: The same place, for conditional writes: if the answer to one is lost, a second try
            would be refused because of the first, and look as if nothing had been written. So a lost answer is an
            error that can be retried, and the caller looks at what is there first.
        appender: Appends on the server side; None where nothing can.
    """

    def __init__(
        self,
        client: Any,
        root: str = "",
        *,
        description: Callable[[str], str] = "object store prefix {!r}".format,
        part_concurrency: int = _PART_CONCURRENCY,
        client_without_retries: Any = None,
        appender: S3Appender | None = None,
    ) -> None:
        self._client = client if isinstance(client, Client) else Client(client)
        self._client_without_retries = client_without_retries or self._client
        self.root = check_prefix(root)
        self.description = description(self.root)
        self._describe = description
        self.can_precondition = None
        self.min_append_size = MIN_APPEND_SIZE if appender else 0
        self._appender = appender
        self._part_concurrency = part_concurrency
        self._ignores_ranges = False  # until this server is caught at it
        self._needs_version = type(self.client).__name__ == "GCSStore"
        self._is_azure = type(self.client).__name__ == "AzureStore"

    @property
    def client(self) -> Any:
        """The obstore store of the bucket."""
        return self._client.current

    def stat(self, path: str) -> StoredFile | None:
        """See `ArtifactStore.stat`."""
        try:
            with self._errors("look at", path):
                return _stored(path, self._ask(obstore.head, self._key(path)))
        except ArtifactNotFoundError:
            return None

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """See `ArtifactStore.list`."""
        prefix = check_prefix(prefix)
        folders: Counter[str] = Counter()  # files directly in each
        empty: Files = []
        with self._errors("list", prefix or "."):
            for batch in self._pages(self._folder(prefix)):
                for meta in batch:
                    file = _stored(self._relative(meta["path"]), meta)
                    folders[file.path.rpartition("/")[0]] += 1
                    if is_temporary(file.path):
                        continue
                    if file.size:
                        yield file
                    else:
                        empty.append(file)
        yield from self._without_markers(empty, folders)

    def list_dirs(self, prefix: str = "") -> Names:
        """See `ArtifactStore.list_dirs`."""
        folders = (self._relative(folder) for folder in self._children(prefix)["common_prefixes"])
        return sorted(folder.rpartition("/")[2] for folder in folders if not is_temporary(folder))

    def list_files(self, prefix: str = "") -> Files:
        """See `ArtifactStore.list_files`."""
        own_marker = self._folder(check_prefix(prefix))
        return sorted(
            (
                _stored(self._relative(meta["path"]), meta)
                for meta in self._children(prefix)["objects"]
                if meta["path"] != own_marker
            ),
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
        if length == 0:
            self._require(path)
            return
        end = None if length is None else start + length
        got = self._get(path, start, end, None)
        if got is None:
            return
        response, skip = got
        size, etag = response.meta["size"], response.meta["e_tag"]
        end = size if end is None else min(end, size)
        stop = end if self._ignores_ranges else min(end, start + _WINDOW)

        def window(at: int) -> Iterator[Buffer]:
            got = None if self._ignores_ranges else self._get(path, at, end, etag)
            if got is None or self._ignores_ranges:
                raise _NoRangesError
            window_end = min(end, at + _WINDOW)
            yield from self._exactly(*got, path=path, start=at, stop=window_end, chunk_size=chunk_size)

        first = self._exactly(response, skip, path=path, start=start, stop=stop, chunk_size=chunk_size)
        ahead = ReadAhead(window, range(stop, end, _WINDOW), _ahead, depth=_DEPTH)
        try:
            ahead.begin()
            for chunk in chain(first, ahead.chunks()):
                start += byte_length(chunk)
                yield chunk
        except _NoRangesError:
            # This server does not serve windows: the rest in one stream.
            response = self._request(path, {"if_match": etag} if etag else {})
            yield from self._exactly(response, start, path=path, start=start, stop=end, chunk_size=chunk_size)
        finally:
            ahead.close()

    def put(
        self,
        path: str,
        data: Buffer | Iterable[Buffer],
        *,
        if_match: str | None = None,
        if_absent: bool = False,
        size_hint: int | None = None,
    ) -> StoredFile:
        """See `ArtifactStore.put`."""
        key = self._key(path)
        chunks = slices(chunks_of(data), SMALL)
        head, ended = take(chunks, SMALL)
        if ended:
            mode = self._mode(path, if_match, if_absent=if_absent)
            client = self._client if mode == "overwrite" else self._client_without_retries
            try:
                with self._errors("write", path):
                    result = self._ask(obstore.put, key, head, client=client, mode=mode, use_multipart=False)
            except StorageError as error:
                if mode == "overwrite" or getattr(error, "status", None) != HTTPStatus.NOT_IMPLEMENTED:
                    raise
                self.can_precondition = False  # this server has no preconditions, and says so
                return self.put(path, head)
            return StoredFile(path, len(head), _quoted(result["e_tag"]))
        return self._put_parts(path, chain((head,), chunks), size_hint or 0)

    @property
    def can_append(self) -> bool:  # type: ignore[override]  # a plain attribute in the base
        """Whether the server appends; becomes False when it is caught doing it wrong."""
        return self._appender is not None and self._appender.usable

    def append(
        self,
        path: str,
        offset: int,
        data: Iterable[Buffer],
        *,
        if_match: str | None = None,
        digest: str | None = None,
    ) -> StoredFile:
        """See `ArtifactStore.append`. Atomic here: readers see the old object or the new one, whole."""
        if self._appender is None:
            return super().append(path, offset, data, if_match=if_match, digest=digest)
        return self._appender.append(self, self._key, path, offset, data, if_match=if_match, digest=digest)

    def copy(self, source: str, target: str) -> None:
        """See `ArtifactStore.copy`."""
        try:
            with self._errors("copy", source):
                self._copy(source, target)
        except ArtifactNotFoundError:
            raise
        except StorageError as error:
            refused = error.retryable or isinstance(error, StoragePermissionError)
            found = None if refused else self.stat(source)
            if found is None or found.size <= _COPY_LIMIT:
                raise
            self.put(target, self.read_chunks(source), size_hint=found.size)

    def _copy(self, source: str, target: str) -> None:
        try:
            self._ask(obstore.copy, self._key(source), self._key(target))
        except obstore_errors.BaseError as error:
            if not (self._is_azure and "PendingCopyOperation" in str(error)):
                raise  # else an earlier try is still being carried out
        if self._is_azure:
            self._await_copy(source, target)

    def _await_copy(self, source: str, target: str) -> None:
        """Azure may say that it will copy, and do it later; until then, the target is empty."""
        ends = time.monotonic() + _COPY_SECONDS
        pause, size = 0.01, -1
        while True:
            found = self.stat(target)
            if found is not None and found.size:
                return
            if size < 0:
                size = self._require(source).size
            if found is not None and size == 0:
                return
            if time.monotonic() > ends:
                raise StorageError(
                    f"{self.description} has not copied {source!r} to {target!r} within {_COPY_SECONDS:g} s.",
                    retryable=True,
                    path=source,
                )
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def delete(self, paths: Iterable[str]) -> None:
        """See `ArtifactStore.delete`."""
        keys = iter([self._key(path) for path in paths])
        while batch := tuple(islice(keys, _DELETE_BATCH)):
            if not self._delete_batch(batch):
                # Only S3 forgives a missing object; elsewhere the batch stops at it.
                for key in batch:
                    self._delete_one(key)

    def _delete_batch(self, keys: tuple[str, ...]) -> bool:
        """Deletes objects; False if some were missing and the others may still be there."""
        try:
            with self._errors("delete", self._relative(keys[0])):
                self._ask(obstore.delete, [*keys])
        except ArtifactNotFoundError:
            return False
        except StorageError as error:
            # JuiceFS' gateway deletes, but does not name in its answer what it deleted: look for it.
            if "invalid DeleteObjects response" not in str(error) or any(self._holds(key) for key in keys):
                raise
        return True

    def _holds(self, key: str) -> bool:
        return self.stat(self._relative(key)) is not None

    def _delete_one(self, key: str) -> None:
        with (
            contextlib.suppress(ArtifactNotFoundError),
            self._errors("delete", self._relative(key)),
        ):
            self._ask(obstore.delete, key)

    def make_dir(self, path: str) -> None:
        """Does nothing: object stores have no directories."""
        check_path(path)

    def below(self, path: str) -> CloudStore:
        """See `ArtifactStore.below`."""
        store = CloudStore(
            self._client,
            self._key(path),
            description=self._describe,
            part_concurrency=self._part_concurrency,
            client_without_retries=self._client_without_retries,
            appender=self._appender,
        )
        store.can_precondition, store.reason = self.can_precondition, self.reason
        return store

    # --- writing ---------------------------------------------------------------------------------

    def _put_parts(self, path: str, chunks: Iterable[Buffer], size_hint: int) -> StoredFile:
        """A multipart upload: the caller's iterable runs here, obstore in a thread of its own.

        obstore would run the iterable inside of its own runtime, where no other call of obstore
        works (a stream that is read from a store could not be written to one).
        """
        feed = Feed()

        def upload() -> Any:
            with self._errors("write", path):
                return self._ask(
                    obstore.put,
                    self._key(path),
                    feed,
                    tries=1,  # what was fed is gone: the caller tries again
                    use_multipart=True,
                    chunk_size=part_size(size_hint),
                    max_concurrency=self._part_concurrency,
                )

        size = 0
        with feed.consumer(upload) as result:
            for chunk in chunks:
                if not feed.send(chunk):
                    break
                size += byte_length(chunk)
        return StoredFile(path, size, _quoted(result()["e_tag"]))

    def _mode(self, path: str, if_match: str | None, *, if_absent: bool) -> Any:
        if self.can_precondition is False:
            return "overwrite"
        if if_absent:
            return "create"
        if if_match is None:
            return "overwrite"
        if not self._needs_version:
            return {"e_tag": if_match}
        # GCS has preconditions on the generation, which a StoredFile does not carry.
        with self._errors("look at", path):
            meta = self._ask(obstore.head, self._key(path))
        if _quoted(meta["e_tag"]) != if_match:
            raise PreconditionFailedError(
                f"{path!r} in {self.description} is not the version that was expected.", path=path
            )
        return {"e_tag": meta["e_tag"], "version": meta["version"]}

    # --- reading ---------------------------------------------------------------------------------

    def _require(self, path: str) -> StoredFile:
        found = self.stat(path)
        if found is None:
            raise ArtifactNotFoundError(f"There is no file {path!r} in {self.description}.", path=path)
        return found

    def _get(self, path: str, start: int, end: int | None, etag: str | None) -> tuple[Any, int] | None:
        """One GET of `[start, end)` or its first window.

        Returns:
            The response and how many of its first bytes lie before `start`; None if the file ends
            there.
        """
        if self._ignores_ranges or (start == 0 and end is None):
            return self._request(path, {}), start
        stop = start + _WINDOW if end is None else min(end, start + _WINDOW)
        options: dict[str, Any] = {"if_match": etag} if etag else {}
        try:
            return self._request(path, {**options, "range": (start, stop)}), 0
        except PreconditionFailedError as error:
            raise StorageError(
                f"{path!r} in {self.description} was replaced while it was read.",
                retryable=True,
                path=path,
            ) from error
        except (ArtifactNotFoundError, StoragePermissionError):
            raise
        except StorageError as error:
            if "non-partial response" in str(error):
                # Some S3-compatible servers answer 200 where 206 is due: read past the beginning.
                self._ignores_ranges = True
                return self._request(path, options), start
            # A range that begins beyond the end, or on some servers one that only ends there.
            size = self._require(path).size
            if start >= size:
                return None
            if stop <= size:
                raise
            return self._request(path, {**options, "range": (start, size)}), 0

    def _request(self, path: str, options: dict[str, Any]) -> Any:
        with self._errors("read", path):
            return self._ask(obstore.get, self._key(path), options=options)

    def _exactly(
        self, response: Any, skip: int, *, path: str, start: int, stop: int, chunk_size: int
    ) -> Iterator[Buffer]:
        """The bytes `[start, stop)` out of a response, `skip` bytes into it; raises if they are not all there."""
        for chunk in self._stream(response, path, skip, stop - start, chunk_size):
            start += byte_length(chunk)
            yield chunk
        if start < stop:
            raise StorageError(
                f"{path!r} in {self.description} ended after {start} of {stop} bytes.",
                retryable=True,
                path=path,
            )

    def _stream(self, response: Any, path: str, skip: int, length: int, chunk_size: int) -> Iterator[Buffer]:
        """`length` bytes of a response after the first `skip`; the rest is not fetched."""
        with self._errors("read", path):
            for piece in response.stream(min_chunk_size=max(1, min(chunk_size, length))):
                chunk = memoryview(piece)
                skipped = min(skip, chunk.nbytes)
                skip -= skipped
                chunk = chunk[skipped : skipped + length]
                length -= chunk.nbytes
                if chunk.nbytes:
                    yield chunk
                if not length:
                    return

    def _children(self, prefix: str) -> Any:
        prefix = check_prefix(prefix)
        with self._errors("list", prefix or "."):
            return self._ask(obstore.list_with_delimiter, self._folder(prefix))

    def _without_markers(self, empty: Files, folders: Counter[str]) -> Iterator[StoredFile]:
        """Drops directory markers, which obstore lists as if they were empty files.

        Ray and pyarrow leave objects named `dir/`; obstore shows them as `dir`. Those with something below them are
        known by that. For the others, `dir` itself is asked for, or a listing of their directory where that costs
        less: it shows markers as directories.
        """
        parents = {
            folder[:end]
            for folder in folders
            for end in (*(match.start() for match in re.finditer("/", folder)), len(folder))
        }
        doubtful: dict[str, Files] = {}
        for file in empty:
            if file.path not in parents:
                doubtful.setdefault(file.path.rpartition("/")[0], []).append(file)
        for folder, files in doubtful.items():
            if len(files) <= 1 + folders[folder] // _LIST_PAGE:
                yield from (file for file in files if self.stat(file.path) is not None)
            else:
                listed = {file.path for file in self.list_files(folder)}
                yield from (file for file in files if file.path in listed)

    # --- requests --------------------------------------------------------------------------------

    def _ask(
        self,
        function: Callable[..., Any],
        *args: Any,
        client: Client | None = None,
        tries: int = _TRIES,
        **options: Any,
    ) -> Any:
        """One request; again with new credentials, if the server says that those it came with have expired.

        Such a request has not been carried out, so that a condition of it holds for the next try as well.
        """
        client = client or self._client
        while True:
            used = client.current
            try:
                return function(used, *args, **options)
            except _ERRORS as error:
                reason: Exception = error
                if client.renewable and function is obstore.head:
                    reason = _reason_of_head(used, args[0], error)
                tries -= 1
                if not (has_expired(reason) and client.renew(used) and tries):
                    raise reason  # noqa: B904  (the same, or what says more)

    def _pages(self, folder: str | None) -> Iterator[Any]:
        """Pages of a listing; new credentials go on where the old ones ended."""
        last: str | None = None
        tries = _TRIES
        while True:
            used = self.client
            try:
                for batch in obstore.list(used, folder, offset=last, chunk_size=_LIST_PAGE):
                    yield batch
                    last, tries = batch[-1]["path"], _TRIES
            except _ERRORS as error:
                tries -= 1
                if not (has_expired(error) and self._client.renew(used) and tries):
                    raise
            else:
                return

    # --- names and errors ------------------------------------------------------------------------

    def _key(self, path: str) -> str:
        key = join(self.root, check_path(path))
        return check_azure_key(key) if self._is_azure else key

    def _folder(self, prefix: str) -> str | None:
        return join(self.root, prefix) or None

    def _relative(self, key: str) -> str:
        return key[len(self.root) + 1 :] if self.root else key

    @contextlib.contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        """Turns obstore's errors into this package's."""
        try:
            yield
        except _ERRORS as error:
            if isinstance(error, StorageError | InvalidPathError):
                raise
            what = f"Cannot {verb} {path!r} in {self.description}"
            # Not `from error`: obstore's text may hold a signed URL, and tracebacks show causes.
            raise storage_error(error, what, path, renewable=self._client.renewable) from None


class _NoRangesError(Exception):
    """A window cannot be read by itself."""


def part_size(size_hint: int) -> int:
    """Bytes of a part, such that `size_hint` bytes need no more parts than there may be."""
    mebibyte = 1024 * 1024
    needed = -(-size_hint // _PARTS)
    return max(SMALL, -(-needed // mebibyte) * mebibyte)


def has_expired(error: BaseException) -> bool:
    """Whether the server refused credentials that may have been right once."""
    return _code(error) in EXPIRED_CODES


def _code(error: BaseException) -> str:
    return next(filter(None, found.groups()), "") if (found := _CODE.search(str(error))) else ""


def _reason_of_head(client: Any, key: str, error: Exception) -> Exception:
    """An answer to HEAD has no body that could say why it refuses: what GET says to the same, if that is clearer."""
    status = int(found.group(1)) if (found := _STATUS.search(str(error))) else None
    if status not in (HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN):
        return error
    try:
        obstore.get(client, key, options={"range": (0, 1)})
    except _ERRORS as reason:
        return reason if has_expired(reason) else error
    return error


def storage_error(
    error: BaseException, what: str, path: str, *, renewable: bool = False
) -> StorageError | InvalidPathError:
    """This package's error for one of obstore's.

    Args:
        error: What obstore raised.
        what: What was tried, for the message.
        path: The artifact path, or a prefix.
        renewable: Whether other credentials may be found where these came from.

    Returns:
        The error to raise; its message holds no credentials.
    """
    text = str(error).partition("Debug source:")[0]
    status = int(found.group(1)) if (found := _STATUS.search(text)) else None
    code = _code(error)
    message = f"{what}: {_reason(text, status, code)}"
    retryable = is_transient(status, code)
    if isinstance(error, ValueError):
        return InvalidPathError(message, path=path)
    if any(host in text for host in _CREDENTIAL_HOSTS):
        return StoragePermissionError(
            f"{what}: no credentials were found (asked this machine's metadata service last)."
            " Set them in the environment of every node, or in the filesystem given to Ray.",
            path=path,
        )
    if retryable or (_PROVIDER in text and any(sign in text for sign in _NO_ANSWER)):
        return StorageError(message, retryable=True, path=path, status=status)
    if code in EXPIRED_CODES:
        advice = (
            "Credentials were looked for anew, and it refuses these, too."
            if renewable
            else "They were given with the file system or the URI, so nothing can renew them here: give it new ones, or"
            " none, and every node looks for its own."
        )
        return StoragePermissionError(f"{message}. {advice}", retryable=renewable, path=path, status=status)
    if is_refusal(status, code) or isinstance(
        error, obstore_errors.PermissionDeniedError | obstore_errors.UnauthenticatedError
    ):
        return StoragePermissionError(message, path=path, status=status)
    if isinstance(error, obstore_errors.PreconditionError | obstore_errors.AlreadyExistsError):
        return PreconditionFailedError(message, path=path, status=status)
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return StorageError(message, path=path, status=status)
    if code == "NoSuchUpload":
        # Its parts were cleared away; or it was completed, and the answer lost. Either way: send the file again.
        return StorageError(message, retryable=True, path=path, status=status)
    if isinstance(error, FileNotFoundError):
        return ArtifactNotFoundError(message, path=path, status=status)
    if status is None and "InvalidCertificate" in str(error):
        return StorageError(f"{what}: {UNTRUSTED}", path=path)
    # Without a status there was no answer: a reset, a timeout, a name that did not resolve.
    no_answer = status is None and any(
        sign in text for sign in ("HTTP error", "error sending request", "timed out", "body")
    )
    return StorageError(message, retryable=no_answer, path=path, status=status)


def _reason(text: str, status: int | None, code: str) -> str:
    if code:
        found = _MESSAGE.search(text)
        detail = f" ({scrub(found.group(1))})" if found and found.group(1) else ""
        return f"the server answered {status or ''} {code}{detail}".replace("  ", " ")
    return scrub(text)


def _stored(path: str, meta: Any) -> StoredFile:
    modified = meta["last_modified"]
    mtime_ns = None
    if modified:
        whole = modified.replace(microsecond=0)
        mtime_ns = int(whole.timestamp()) * 10**9 + modified.microsecond * 1_000
    return StoredFile(path, meta["size"], _quoted(meta["e_tag"]), mtime_ns)


def _quoted(etag: str | None) -> str | None:
    """An etag as a header has it; listings of some servers lack the quotes."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag
