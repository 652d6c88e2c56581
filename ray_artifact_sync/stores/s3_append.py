"""Appending to an S3 object without sending it again: UploadPartCopy of what is there, then a part with the new bytes.

obstore has no UploadPartCopy; botocore has (the extra `[s3]`; s3fs and boto3 bring it too). The client goes to the
same place with the same credentials as the obstore client, and is made at the first append.

What keeps an object whole:

- Readers see the old object until CompleteMultipartUpload, the new one after it. A crash in between leaves the old one
  (and parts that nothing lists: a lifecycle rule `AbortIncompleteMultipartUpload` on the bucket takes them away; in the
  middle of the proof below, at worst an object of 5 MiB in `.ray_artifact_sync/tmp/`, which nothing reads).
- Whatever fails in between ends the multipart upload before the error goes on, so that a Complete that was sent, and
  whose answer was lost, cannot land on top of what is written next.
- The source must be the very version that was last written: its size and etag are looked at first, the copy is bound
  to that etag, and so is the Complete where the store has conditional writes.
- Servers exist whose UploadPartCopy answers 200 and copies nothing, or the whole object instead of a range. So a client
  has to prove itself before it touches an artifact: it appends to a piece of the object under a name of its own, and
  every byte is read back. The first artifact that it appends to is read back too, whole, and its digest compared. After
  that, the size is checked each time.
- Until then, anything but success means that the caller writes the whole file; what is no passing failure means it for
  the rest of the process. After that, refused credentials and passing failures are errors as everywhere else.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from blake3 import blake3

from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.errors import (
    ArtifactNotFoundError,
    CannotAppendError,
    PreconditionFailedError,
    StorageError,
    StoragePermissionError,
)
from ray_artifact_sync.layout import TMP
from ray_artifact_sync.stores.base import ArtifactStore, Buffer, StoredFile
from ray_artifact_sync.stores.clients import ClientLimits, ClientSpec
from ray_artifact_sync.stores.common import byte_length, is_refusal, is_transient, scrub
from ray_artifact_sync.stores.credentials import EXPIRED_CODES, has_botocore

logger = logging.getLogger(__name__)

MIN_APPEND_SIZE = 16 * 1024 * 1024
"""Bytes in storage from which on appending pays.

An append is six requests, one after the other, and a copy inside of the server; it saves the bytes that are there. For
64 KiB more at 20 ms a request and 200 Mbit/s, `release_tests/benchmarks/s3_append.py` measured 0.23 s instead of 0.52 s
on 8 MiB, 0.7 s instead of 1.6 s on 32 MiB and 2.9 s instead of 9.2 s on 200 MiB; without a limit on the bandwidth an
append never won (0.27 and 0.20 s, 0.47 and 0.44 s, 1.4 and 1.2 s). Reckoned from that, not measured: at this size it
costs one or two tenths of a second where the network is as fast as the server copies, and wins below some 500 Mbit/s.
"""

_MIN_PART = 5 * 1024 * 1024  # S3: every part but the last
_TAIL_PART = 8 * 1024 * 1024  # memory of an append is two of these
_COPY_PART = 512 * 1024 * 1024  # S3 allows 5 GiB; a few hundred MiB end within the request timeout
_COPY_PARTS = 5_000
_COPY_CONCURRENCY = 4
_MAX_PARTS = 10_000
_TRIES = 3  # failures that may pass, before a client that never succeeded is given up


def appender_of(spec: ClientSpec, limits: ClientLimits) -> S3Appender | None:
    """The appender for a spec, the same one for equal arguments in one process; None if there is none.

    Not for anonymous access, which writes nothing, nor without botocore.
    """
    if spec.kind != "S3" or dict(spec.config).get("skip_signature") or not has_botocore():
        return None
    # The process is part of the key: a forked child must not use its parent's connections, nor its locks.
    return _appenders.setdefault((os.getpid(), spec, limits), S3Appender(spec, limits))


class S3Appender:
    """Appends to the objects of one bucket; what it learned about the server holds for the process.

    Args:
        spec: The bucket, and how to reach it.
        limits: Timeouts. Its requests are not tried again here, since the layer above does.
    """

    def __init__(self, spec: ClientSpec, limits: ClientLimits) -> None:
        self.usable = True
        self._spec = spec
        self._limits = limits
        self._lock = threading.Lock()
        self._made: Any = None
        self._authority: Any = None  # keeps the file with the certificates
        self._probed = False
        self._verified = False
        self._failures = 0

    def append(
        self,
        store: ArtifactStore,
        key_of: Callable[[str], str],
        path: str,
        offset: int,
        data: Iterable[Buffer],
        *,
        if_match: str | None,
        digest: str | None,
    ) -> StoredFile:
        """See `ArtifactStore.append`.

        Args:
            store: Reads, looks at and deletes what this writes.
            key_of: From an artifact path to the key in the bucket.
            path: Which file.
            offset: Bytes that it has.
            data: What to add.
            if_match: The etag that it must have, if known.
            digest: BLAKE3 of the whole as it will be, if known.
        """
        if not self.usable:
            raise CannotAppendError(f"{store.description} does not append.", path=path)
        if offset < _MIN_PART:
            raise CannotAppendError(f"{path!r} is too small for an append.", path=path)
        present = store.stat(path)
        if present is None or present.size != offset or (if_match and present.etag != if_match):
            raise PreconditionFailedError(
                f"Cannot append to {path!r} in {store.description}: it is not the version of {offset} bytes that was"
                " last written.",
                path=path,
            )
        upload = _Upload(self, store, path, key_of(path), present)
        self._prove(upload, key_of)
        counted = _Counted(data)
        etag = upload.run(
            key_of(path), _ranges(offset), counted, if_match=present.etag if store.can_precondition else None
        )
        size = offset + counted.size
        self._verify(store, path, size, digest)
        return StoredFile(path, size, etag)

    def _prove(self, upload: _Upload, key_of: Callable[[str], str]) -> None:
        """Appends to a piece of the object under another name, once; gives up if the result is wrong."""
        if self._probed:
            return
        with self._lock:
            if self._probed or not self.usable:
                return
            store, path, offset = upload.store, upload.path, upload.present.size
            start = offset - _MIN_PART
            piece = b"".join(bytes(chunk) for chunk in store.read_chunks(path, start=start, length=_MIN_PART))
            tail = secrets.token_bytes(64)
            probe = f"{TMP}/append-{secrets.token_hex(8)}"
            try:
                upload.run(key_of(probe), [(start, offset)], [tail], if_match=None)
                found = b"".join(bytes(chunk) for chunk in store.read_chunks(probe, length=_MIN_PART + 2 * len(tail)))
            except ArtifactNotFoundError:
                found = b""
            finally:
                with contextlib.suppress(StorageError):
                    store.delete([probe])
            if found != piece + tail:
                self.give_up(store, "it answers that it copied, but what it wrote is not what was asked for")
                raise CannotAppendError(f"{store.description} appends wrong.", path=path)
            self._probed = True

    def _verify(self, store: ArtifactStore, path: str, size: int, digest: str | None) -> None:
        """Looks at what was written: at its size, and the first time at every byte."""
        present = store.stat(path)
        right = present is not None and present.size == size
        if right and digest is not None and not self._verified:
            hasher = blake3()
            for chunk in store.read_chunks(path, length=size):
                hasher.update(chunk)
            right = hasher.hexdigest() == digest
            self._verified = right
        if not right:
            self.give_up(store, f"an append to {path!r} gave something else")
            raise CannotAppendError(f"{store.description} appended to {path!r} wrong.", path=path)

    # --- failures --------------------------------------------------------------------------------

    def give_up(self, store: ArtifactStore, reason: object) -> None:
        """No appends any more in this process; logged once."""
        if self.usable:
            self.usable = False
            logger.warning(
                "%s does not append on the server side: %s. Files that grow are sent whole.", store.description, reason
            )

    def call(self, store: ArtifactStore, path: str, operation: str, **arguments: Any) -> Any:
        """One request.

        Raises:
            PreconditionFailedError: The object is another version.
            ArtifactNotFoundError: It is gone.
            CannotAppendError: Send the whole file.
            StorageError: Only from a client that has appended before: refused, or a failure that may pass.
        """
        try:
            return self._ask(operation, **arguments)
        except Exception as raised:
            # Not `from raised`, whose text may hold what is signed.
            error = _storage_error(raised, f"Cannot append to {path!r} in {store.description}", path)
        if isinstance(error, PreconditionFailedError | ArtifactNotFoundError):
            raise error
        if self._verified:
            if error.retryable or isinstance(error, StoragePermissionError):
                raise error
        else:
            self._failures += 1
            passing = error.retryable and getattr(error, "status", None) in (None, 408, 429, 503)
            if not passing or self._failures >= _TRIES:
                self.give_up(store, error)
        raise CannotAppendError(str(error), path=path)

    def abort(self, key: str, upload_id: str) -> None:
        """Ends a multipart upload; one that cannot be ended is left to the bucket's lifecycle rules."""
        try:
            self._ask("abort_multipart_upload", Key=key, UploadId=upload_id)
        except Exception as error:
            logger.debug("A multipart upload to %s could not be aborted: %s", key, scrub(error))

    # --- the client ------------------------------------------------------------------------------

    def _ask(self, operation: str, **arguments: Any) -> Any:
        """One request; once more with new credentials, if the server says that those it came with have expired."""
        client = self._client()
        try:
            return getattr(client, operation)(Bucket=self._spec.bucket, **arguments)
        except Exception as error:
            if not (self._spec.renewable and _code_of(error) in EXPIRED_CODES):
                raise
        self._forget(client)
        return getattr(self._client(), operation)(Bucket=self._spec.bucket, **arguments)

    def _client(self) -> Any:
        if self._made is None:
            with _making:
                if self._made is None:
                    self._made = self._make()
        return self._made

    def _forget(self, client: Any) -> None:
        """The next request makes a client of its own, unless another thread has made one already."""
        with _making:
            if self._made is client:
                self._made = None
                if self._spec.source is not None:
                    self._spec.source.renew()

    def _make(self) -> Any:
        import botocore.config  # noqa: PLC0415  (an optional extra, and slow to import)
        import botocore.session  # noqa: PLC0415

        config, options, secret = (dict(pairs) for pairs in (self._spec.config, self._spec.options, self._spec.secret))
        if self._spec.source is not None:
            secret = self._spec.source()
        verify: bool | str | None = False if options.get("allow_invalid_certificates") else None
        if certificate := options.get("root_certificate"):
            self._authority = tempfile.NamedTemporaryFile(suffix=".pem")  # noqa: SIM115  (as long as the client)
            self._authority.write(certificate)
            self._authority.flush()
            verify = self._authority.name
        proxy = options.get("proxy_url")
        return botocore.session.Session().create_client(
            "s3",
            region_name=config["region"],
            endpoint_url=endpoint_of(self._spec),
            verify=verify,
            # Without them: the environment, a web identity, the instance's role, as for the obstore client.
            aws_access_key_id=secret.get("access_key_id"),
            aws_secret_access_key=secret.get("secret_access_key"),
            aws_session_token=secret.get("token"),
            config=botocore.config.Config(
                connect_timeout=self._limits.connect_timeout,
                read_timeout=self._limits.request_timeout,
                retries={"total_max_attempts": 1},
                max_pool_connections=32,
                ignore_configured_endpoint_urls=True,
                proxies={"http": proxy, "https": proxy} if proxy else None,
                # Else parts are sent as aws-chunked, which some servers do not know; signed payloads are checked too.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={
                    "addressing_style": "virtual" if config.get("virtual_hosted_style_request") else "path",
                    "payload_signing_enabled": True,
                },
            ),
        )


_appenders: dict[tuple[int, ClientSpec, ClientLimits], S3Appender] = {}
_making = threading.Lock()


def _renew_lock() -> None:
    """A lock that another thread held at a fork would stay locked for ever in the child."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def endpoint_of(spec: ClientSpec) -> str | None:
    """The endpoint as botocore wants it: without the bucket, also where that is part of the host."""
    config = dict(spec.config)
    endpoint: str | None = config.get("endpoint")
    if endpoint and config.get("virtual_hosted_style_request"):
        return endpoint.replace(f"://{spec.bucket}.", "://", 1)
    return endpoint


class _Upload:
    """Multipart uploads that begin with a copy of one object."""

    def __init__(self, appender: S3Appender, store: ArtifactStore, path: str, source: str, present: StoredFile) -> None:
        self.appender = appender
        self.store = store
        self.path = path
        self.source = source
        self.present = present

    def run(
        self, target: str, copied: list[tuple[int, int]], tail: Iterable[Buffer], *, if_match: str | None
    ) -> str | None:
        """Writes `target`: ranges of the source, then the tail. All or nothing.

        Returns:
            The etag of what was written.
        """
        upload_id = self._call("create_multipart_upload", Key=target)["UploadId"]
        place = {"Key": target, "UploadId": upload_id}
        etags: dict[int, str] = {}

        def copy(part: tuple[int, tuple[int, int]]) -> None:
            number, (start, stop) = part
            answer = self._call(
                "upload_part_copy",
                **place,
                PartNumber=number,
                CopySource={"Bucket": self.appender._spec.bucket, "Key": self.source},  # noqa: SLF001  (two halves)
                CopySourceRange=f"bytes={start}-{stop - 1}",
                **({"CopySourceIfMatch": self.present.etag} if self.present.etag else {}),
            )
            etags[number] = answer.get("CopyPartResult", {}).get("ETag", "")
            if not etags[number]:
                self.appender.give_up(self.store, "it does not know UploadPartCopy")
                raise CannotAppendError(f"{self.store.description} does not copy parts.", path=self.path)

        try:
            run_all(enumerate(copied, 1), copy, workers=_COPY_CONCURRENCY, deadline=Deadline())
            etags.update(self._send(place, tail, first=len(copied) + 1))
            parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
            answer = self._call(
                "complete_multipart_upload",
                **place,
                MultipartUpload={"Parts": parts},
                **({"IfMatch": if_match} if if_match else {}),
            )
        except BaseException:
            self.appender.abort(target, upload_id)
            raise
        etag: str | None = answer.get("ETag")
        return etag

    def _send(self, place: dict[str, str], tail: Iterable[Buffer], *, first: int) -> Iterator[tuple[int, str]]:
        for number, block in enumerate(_blocks(tail), first):
            if number > _MAX_PARTS:
                raise CannotAppendError(f"Too much to append to {self.path!r}.", path=self.path)
            yield number, self._call("upload_part", **place, PartNumber=number, Body=block)["ETag"]

    def _call(self, operation: str, **arguments: Any) -> Any:
        return self.appender.call(self.store, self.path, operation, **arguments)


def _ranges(size: int) -> list[tuple[int, int]]:
    """`[0, size)` in pieces of about the same size, small enough for one request each."""
    pieces = -(-size // max(_COPY_PART, -(-size // _COPY_PARTS)))
    bounds = [size * number // pieces for number in range(pieces + 1)]
    return list(itertools.pairwise(bounds))


class _Counted:
    """Chunks, and how many bytes they had."""

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        self._chunks = chunks
        self.size = 0

    def __iter__(self) -> Iterator[Buffer]:
        for chunk in self._chunks:
            self.size += byte_length(chunk)
            yield chunk


def _blocks(chunks: Iterable[Buffer]) -> Iterator[bytes]:
    """The chunks as parts: all of `_TAIL_PART` bytes or a little more, except the last."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        if len(held) >= _TAIL_PART:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def _code_of(error: Exception) -> str:
    """What S3 called the error, if it was S3."""
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""


def _storage_error(error: Exception, what: str, path: str) -> StorageError:
    """This package's error for one of botocore's."""
    name = type(error).__name__
    answer = getattr(error, "response", None)
    if not isinstance(answer, dict) or "Error" not in answer:
        if "Credential" in name or name in ("ProfileNotFound", "TokenRetrievalError", "SSOTokenLoadError"):
            return StoragePermissionError(f"{what}: {scrub(error)}", path=path)
        no_answer = any(sign in name for sign in ("Timeout", "Connection", "HTTPClient", "Streaming", "Proxy"))
        return StorageError(f"{what}: {name}: {scrub(error)}", retryable=no_answer, path=path)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = _code_of(error)
    detail = scrub(answer["Error"].get("Message", ""))
    message = f"{what}: the server answered {status} {code}" + (f" ({detail})" if detail else "")
    if is_transient(status, code):
        return StorageError(message, retryable=True, path=path, status=status)
    if is_refusal(status, code):
        return StoragePermissionError(message, path=path, status=status)
    if status == 412 or code == "PreconditionFailed":  # noqa: PLR2004
        return PreconditionFailedError(message, path=path, status=status)
    if code in ("NoSuchKey", "404"):
        return ArtifactNotFoundError(message, path=path, status=status)
    return StorageError(message, path=path, status=status)
