"""Which store serves a place: the file system that Ray hands over, or a URI."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem as FsspecLocal
from pyarrow import ArrowInvalid
from pyarrow import fs as pafs

from ray_artifact_sync.errors import ConfigurationError, StorageError
from ray_artifact_sync.stores.arrow import ArrowStore, fsspec_of
from ray_artifact_sync.stores.base import ArtifactStore
from ray_artifact_sync.stores.clients import (
    ClientLimits,
    ClientSpec,
    NoClient,
    client_of,
    spec_of_arrow,
    spec_of_fsspec,
)
from ray_artifact_sync.stores.cloud import CloudStore
from ray_artifact_sync.stores.common import join, scrub
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.stores.s3_append import appender_of

logger = logging.getLogger(__name__)

# Ray writes this file into the experiment directory when a run starts.
_MARKER = ".validate_storage_marker"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PROBED_FILES = 100


def open_store(filesystem: Any, path: str, *, limits: ClientLimits | None = None) -> ArtifactStore:
    """The fastest store that reaches `path` on a file system with the same rights.

    Args:
        filesystem: A `pyarrow.fs.FileSystem` as Ray hands it over, or an fsspec file system.
        path: The directory on it (absolute, or `bucket/prefix`). It need not exist.
        limits: Timeouts and retries of object store clients.

    Returns:
        A store whose root is `path`.

    Raises:
        ConfigurationError: `filesystem` is neither.
    """
    base, path = _unwrap(filesystem, path)
    inner = fsspec_of(base)
    if isinstance(base, pafs.LocalFileSystem) or isinstance(inner, FsspecLocal):
        logger.debug("Storage %s: kernel calls (a local or mounted file system).", path)
        local = PosixStore(path if inner is None else inner._strip_protocol(path))  # noqa: SLF001
        local.reason = "it is a directory of this machine or of a mounted share"
        return local
    spec, root = _spec(base, inner, path)
    if isinstance(spec, ClientSpec):
        spec_or_reason = _open_cloud(spec, root, base, path, limits)
        if isinstance(spec_or_reason, CloudStore):
            return spec_or_reason
        spec = spec_or_reason
    store = ArrowStore(base, path)
    store.reason = spec.reason
    logger.debug("Storage %s: pyarrow, because %s.", store.description, spec.reason)
    return store


def open_uri(
    uri: str | os.PathLike[str],
    storage_filesystem: Any = None,
    *,
    limits: ClientLimits | None = None,
) -> ArtifactStore:
    """The store for an absolute path or a URI.

    Args:
        uri: `/a/path`, `file:///a/path`, `s3://bucket/key?endpoint_override=...&scheme=http`,
            `gs://`, `abfs://`, whatever else pyarrow or fsspec know; a path on
            `storage_filesystem` where that is given.
        storage_filesystem: A pyarrow or fsspec file system.
        limits: Timeouts and retries of object store clients.

    Returns:
        A store whose root is that place.

    Raises:
        ConfigurationError: The place cannot be understood.
    """
    filesystem, path = resolve_uri(uri, storage_filesystem)
    return open_store(filesystem, path, limits=limits)


def resolve_uri(uri: str | os.PathLike[str], storage_filesystem: Any = None) -> tuple[Any, str]:
    """The file system that an absolute path or a URI means, and the path on it; see `open_uri`.

    Raises:
        ConfigurationError: The place cannot be understood.
    """
    text = os.fspath(uri)
    if storage_filesystem is not None:
        return storage_filesystem, text
    scheme = _SCHEME.match(text)
    if scheme is None:
        if not os.path.isabs(text):
            raise ConfigurationError(f"{text!r} is neither an absolute path nor a URI such as 's3://bucket/path'.")
        return pafs.LocalFileSystem(), text
    if scheme.group(1).lower() == "file":
        # A URI, so percent-encoding is undone; `?` and `#` are common in trial names: kept.
        return pafs.LocalFileSystem(), "/" + unquote(text[len("file://") :].partition("/")[2])
    return _from_uri(text)


def _unwrap(filesystem: Any, path: str) -> tuple[Any, str]:
    """The file system inside of pyarrow's and fsspec's "file system below a directory"."""
    if isinstance(filesystem, fsspec.AbstractFileSystem):
        filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))
    if not isinstance(filesystem, pafs.FileSystem):
        raise ConfigurationError(f"A storage file system must be a pyarrow or fsspec one, not {type(filesystem)!r}.")
    while True:
        if isinstance(filesystem, pafs.SubTreeFileSystem):
            path = join(filesystem.base_path.rstrip("/"), path.strip("/")) or "/"
            filesystem = filesystem.base_fs
        elif isinstance(inner := fsspec_of(filesystem), DirFileSystem):
            path = join(str(inner.path).rstrip("/"), path.strip("/"))
            filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(inner.fs))
        else:
            return filesystem, path


def _spec(base: Any, inner: Any, path: str) -> tuple[ClientSpec | NoClient, str]:
    """What client would serve a place, and the root inside of its bucket."""
    segments = [segment for segment in path.split("/") if segment]
    bucket, root = (segments[0] if segments else ""), "/".join(segments[1:])
    if not bucket:
        return NoClient("the path names no bucket"), ""
    if inner is None:
        return spec_of_arrow(base, bucket), root
    return spec_of_fsspec(inner, bucket), root


def _open_cloud(
    spec: ClientSpec, root: str, filesystem: Any, path: str, limits: ClientLimits | None
) -> CloudStore | NoClient:
    try:
        limits = limits or ClientLimits()
        client = client_of(spec, limits)
        client_without_retries = client_of(spec, replace(limits, retries=0))
    except Exception as error:
        return NoClient(f"obstore refuses its options ({scrub(error)})")
    place = f" at {spec.place}" if spec.place else ""
    store = CloudStore(
        client,
        root,
        description=lambda root: f"{spec.kind} {join(spec.bucket, root)}{place} (obstore)",
        client_without_retries=client_without_retries,
        appender=appender_of(spec, limits),
    )
    why = "its options name the credentials"
    if not spec.proven:
        if disagreement := _probe(store, ArrowStore(filesystem, path)):
            return NoClient(disagreement)
        why = "its own credentials see the same files"
    store.reason = why
    logger.debug("Storage %s: obstore, because %s.", store.description, why)
    return store


def _probe(store: CloudStore, reference: ArrowStore) -> str:
    """Why `store` does not seem to be where `reference` is; empty if it is.

    Both found their credentials by themselves. They are believed to be at the same place with the
    same rights if both see Ray's marker, or, where there is none, list the same files.
    """
    try:
        for parent in (0, 1, 2):
            ours, theirs = _ancestor(store, parent), _ancestor(reference, parent)
            if ours is None or theirs is None:
                break
            expected = theirs.stat(_MARKER)
            if expected is not None:
                found = ours.stat(_MARKER)
                same = found is not None and found.size == expected.size
                return "" if same else "obstore does not see Ray's marker file"
        ours_listed = [file.path for file in store.list_files()][:_PROBED_FILES]
        theirs_listed = [file.path for file in reference.list_files()][:_PROBED_FILES]
    except StorageError as error:
        return f"obstore's own credentials do not work there ({error})"
    return "" if ours_listed == theirs_listed else "obstore lists other files"


def _ancestor(store: Any, levels: int) -> Any:
    """A store whose root lies `levels` above; None if that leaves the bucket."""
    root = store.root
    for _ in range(levels):
        if "/" not in root.strip("/"):
            return None
        root = root.rpartition("/")[0]
    if isinstance(store, CloudStore):
        return CloudStore(store.client, root, description=lambda _root: store.description)
    return ArrowStore(store.filesystem, root)


def _from_uri(uri: str) -> tuple[Any, str]:
    """A pyarrow file system and the path on it."""
    try:
        try:
            return _open_arrow(uri)
        except ArrowInvalid:
            # Trial names have spaces and brackets, which a URI would have encoded.
            parts = urlsplit(uri)
            quoted = parts._replace(path=quote(parts.path, safe="/%")).geturl()
            if quoted == uri:
                raise
            return _open_arrow(quoted)
    except (ArrowInvalid, NotImplementedError, OSError) as error:
        reason = scrub(error)
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
    except Exception as error:
        message = f"{scrub(uri)!r} cannot be opened: pyarrow says {reason!r}, fsspec {scrub(error)!r}."
        raise ConfigurationError(_without_password(message, uri)) from None
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path


def _without_password(message: str, uri: str) -> str:
    """`message` without the pieces of the URI's password, which need not look like one: in it, slashes split."""
    user_info, found, _ = uri.partition("://")[2].rpartition("@")
    for piece in re.split(r"[/?#]", user_info.partition(":")[2]) if found else ():
        for shown in {piece, quote(piece), quote(piece, safe="")} - {""}:
            message = message.replace(shown, "***")
    return message


def _open_arrow(uri: str) -> tuple[Any, str]:
    filesystem, path = pafs.FileSystem.from_uri(uri)
    if filesystem.type_name == "abfs" and (key := urlsplit(uri).password):
        # pyarrow uses the key of a URI, and forgets it when it is asked for its options or pickled.
        options = {name: value for name, value in filesystem.__reduce__()[1][0].items() if value}
        filesystem = pafs.AzureFileSystem(**{**options, "account_key": unquote(key)})
    return filesystem, str(path)
