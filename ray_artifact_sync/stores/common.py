"""What the stores share: paths, streams and messages. Pure."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator

from ray_artifact_sync.entries import validate_path
from ray_artifact_sync.errors import InvalidPathError
from ray_artifact_sync.layout import TMP
from ray_artifact_sync.stores.base import Buffer
from ray_artifact_sync.stores.credentials import EXPIRED_CODES

TRANSIENT_ERRNOS = frozenset(
    (
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.EMFILE,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENOTCONN,
        errno.ESTALE,
        errno.ETIMEDOUT,
    )
)
"""Error numbers of failures that may pass by themselves."""

_RETRYABLE_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504, 507, 509, 529))
_RETRYABLE_CODES = frozenset(
    (
        "ConditionalRequestConflict",  # S3: two conditional writes at once, neither was judged
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServerBusy",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    )
)
_REFUSED_CODES = frozenset(("AccessDenied", *EXPIRED_CODES))

UNTRUSTED = (
    "nobody that this machine trusts vouches for the server's certificate. If it is the right server, name the file of"
    " its authority: pyarrow's `tls_ca_file_path`, or `client_kwargs={'verify': ...}` of s3fs."
)
"""What is wrong, and what to do, where TLS refuses a server."""

_TMP_PREFIX = f"{TMP}/"

# What may carry a secret in a client's message: a signed URL's query, `key=value`, URL user info.
_SECRETS = (
    (re.compile(r"(?i)([a-z0-9]://)[^/\s@\"']+@"), r"\1***@"),
    # Not encoded as it should be, a password may hold slashes.
    (re.compile(r"(?i)([a-z0-9]://[^/\s@:\"']*:)[^\s@\"']+@"), r"\1***@"),
    (
        re.compile(
            r"(?i)\b(x-amz-[a-z-]*(?:signature|credential|token)|x-goog-signature|x-goog-credential"
            r"|signature|sig|awsaccesskeyid|access_?key(?:_?id)?|secret(?:_?access)?_?key"
            r"|session_?token|account_?key|sas_?token|access_?token|client_?secret|password)"
            r"([\"']?\s*[=:]\s*[\"']?)[^\s&\"'<>,)]+"
        ),
        r"\1\2***",
    ),
    (re.compile(r"(?i)\b(bearer|basic|aws4-hmac-sha256)\s+[^\s\"',]+"), r"\1 ***"),
    (
        re.compile(
            r"(?i)<(AWSAccessKeyId|StringToSign|SignatureProvided|StringToSignBytes"
            r"|CanonicalRequest|CanonicalRequestBytes)>[^<]*"
        ),
        r"<\1>***",
    ),
)
_LONGEST_MESSAGE = 600


def check_path(path: str) -> str:
    """`path`, if it is a valid artifact path.

    Raises:
        InvalidPathError: It is not.
    """
    return validate_path(path)


def check_azure_key(key: str) -> str:
    """`key`, unless Azure would take it for another one.

    Raises:
        InvalidPathError: It has a backslash, which Azure turns into a slash without a word.
    """
    if "\\" in key:
        raise InvalidPathError(
            f"Azure cannot hold {key!r}: it makes a slash of each backslash, which is the name of another file. Rename "
            "the file.",
            path=key,
        )
    return key


def check_prefix(prefix: str) -> str:
    """A directory without its trailing slashes; the empty string is the root.

    Raises:
        InvalidPathError: It is not a valid path.
    """
    prefix = prefix.rstrip("/")
    return validate_path(prefix) if prefix else ""


def is_temporary(path: str) -> bool:
    """Whether `path` is a file being written, which no listing shows."""
    return path == TMP or path.startswith(_TMP_PREFIX)


def join(root: str, path: str) -> str:
    """Both parts with a slash between them; either may be empty."""
    return f"{root}/{path}" if root and path else root or path


def scrub(text: object) -> str:
    """A client's message as one short line, without what looks like a credential."""
    message = " ".join(str(text).split())
    for pattern, replacement in _SECRETS:
        message = pattern.sub(replacement, message)
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."


def is_transient(status: int | None, code: str) -> bool:
    """Whether an answer of an object store says that the same request may succeed later."""
    return code in _RETRYABLE_CODES or status in _RETRYABLE_STATUS


def is_refusal(status: int | None, code: str) -> bool:
    """Whether an answer of an object store refuses the credentials, or the right to do this."""
    return status in (401, 403) or code in _REFUSED_CODES


def chunks_of(data: Buffer | Iterable[Buffer]) -> Iterator[Buffer]:
    """The chunks of a payload, in whichever form it came."""
    if isinstance(data, bytes | bytearray | memoryview):
        return iter((data,))
    return iter(data)


def byte_length(chunk: Buffer) -> int:
    """Bytes in a chunk (`len` of a memoryview counts elements, which may be wider)."""
    return chunk.nbytes if isinstance(chunk, memoryview) else len(chunk)


def slices(chunks: Iterator[Buffer], size: int) -> Iterator[Buffer]:
    """Cuts chunks that are larger than `size` bytes, without copying them."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        if view.nbytes <= size:
            yield chunk
            continue
        for start in range(0, view.nbytes, size):
            yield view[start : start + size]


def take(chunks: Iterator[Buffer], limit: int) -> tuple[bytes, bool]:
    """Reads chunks until they end or exceed `limit` bytes.

    Args:
        chunks: Advanced by what is read.
        limit: Bytes.

    Returns:
        What was read, and whether the chunks ended.
    """
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        parts.append(bytes(chunk))
        size += len(parts[-1])
        if size > limit:
            return b"".join(parts), False
    return b"".join(parts), True
