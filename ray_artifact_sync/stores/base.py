"""The port to storage: what every store must do, in the words that the rest of the package uses."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ray_artifact_sync.errors import ManifestError

Buffer: TypeAlias = bytes | bytearray | memoryview
CHUNK_SIZE = 4 * 1024 * 1024
"""Bytes of one read or write step of a stream."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What storage says about one file.

    Attributes:
        path: POSIX path relative to the store's root.
        size: Bytes.
        etag: The backend's version tag, None where it has none.
        mtime_ns: When the backend says it was written, ns since the epoch; None where it does not say.
    """

    path: str
    size: int
    etag: str | None = None
    mtime_ns: int | None = None


# Named here because inside of a store, `list` is a method.
Names: TypeAlias = list[str]
Files: TypeAlias = list[StoredFile]


class ArtifactStore(abc.ABC):
    """Files below one root on one storage backend.

    All calls block and may be made from many threads at once. All paths are POSIX paths relative to the root.

    What every implementation guarantees (one contract test checks it for all):

    - A write is all or nothing: until `put` returns, and for ever if it raises (also when the iterable that it reads
      from raises), readers see the old content or no file, never a part. `append` is the exception, see there.
    - No error is swallowed. Errors are `StorageError` or a subclass; `retryable` says whether another try may help.
      `put` returning means that the backend confirmed all of the bytes.
    - Names are taken literally: `a%20b`, `a#b`, `a?b`, `a b`, `f[1]*` are different, ordinary files.
    - Missing parents are created by writes; no directory markers are left on object stores.

    Attributes:
        description: For people and logs: which client, which place. Never holds credentials.
        can_append: Whether `append` works.
        min_append_size: Bytes that a file must have before it pays to append to it instead of writing it anew.
        can_precondition: Whether `if_match` and `if_absent` are enforced. For object stores this starts as None
            (unknown) and is set by the one who found out (the claim of the writer file probes it).
        can_fence: Whether `begin_writing` cuts off writes in flight of older tokens.
        reason: Why this client serves the place, as the end of a sentence; for people.
    """

    description: str
    reason: str = ""
    can_append: bool = False
    min_append_size: int = 0
    can_precondition: bool | None = False
    can_fence: bool = False

    @abc.abstractmethod
    def stat(self, path: str) -> StoredFile | None:
        """The file at `path`, or None if there is no file (a directory is no file)."""

    @abc.abstractmethod
    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """All files below the directory `prefix`, recursively; nothing if it does not exist.

        `t_1` never lists what lies in `t_10`. The order is not defined.
        """

    @abc.abstractmethod
    def list_dirs(self, prefix: str = "") -> Names:
        """Names (one segment) of the directories directly below `prefix`, sorted; empty if it does not exist.

        One request for each 1,000 children on object stores; nothing below the children is listed.
        """

    @abc.abstractmethod
    def list_files(self, prefix: str = "") -> Files:
        """The files directly below the directory `prefix` (not recursive), sorted by path."""

    @abc.abstractmethod
    def read_chunks(
        self, path: str, *, start: int = 0, length: int | None = None, chunk_size: int = CHUNK_SIZE
    ) -> Iterator[Buffer]:
        """Streams the bytes `[start, start + length)` of a file, or to its end.

        A range that reaches beyond the end gives what is there. Memory stays within a few chunks.

        Raises:
            ArtifactNotFoundError: There is no such file (raised at the call or at the first chunk).
            StorageError: The stream broke; what was given so far must not be trusted to be all.
        """

    @abc.abstractmethod
    def put(
        self,
        path: str,
        data: Buffer | Iterable[Buffer],
        *,
        if_match: str | None = None,
        if_absent: bool = False,
        size_hint: int | None = None,
    ) -> StoredFile:
        """Writes a file, atomically.

        Args:
            path: Where.
            data: All of it, or its chunks. An exception from the iterable passes through unchanged, and nothing
                is published.
            if_match: Refuse unless the present object has this etag. Ignored where `can_precondition` is False,
                and for streams that need several requests.
            if_absent: Refuse if there is an object. Ignored likewise.
            size_hint: About how many bytes an iterable will give, where the caller knows; object stores choose the
                size of their parts by it (10,000 parts at most). A wrong hint costs speed, never bytes.

        Returns:
            What was written, with the backend's etag where it gives one.

        Raises:
            PreconditionFailedError: The precondition does not hold; nothing was written.
            StoragePermissionError: Refused.
            StorageError: Anything else.
        """

    def append(
        self,
        path: str,
        offset: int,
        data: Iterable[Buffer],
        *,
        if_match: str | None = None,
        digest: str | None = None,
    ) -> StoredFile:
        """Adds bytes at the end of a file whose size is `offset`.

        Not atomic: after a failure the file holds its first `offset` bytes and perhaps some of the new ones.

        Args:
            path: Where.
            offset: Bytes that the file has.
            data: What to add.
            if_match: Refuse unless the present object has this etag. Ignored by stores without etags.
            digest: BLAKE3 of the file as it will be; lets a store verify the first append that it makes.

        Raises:
            PreconditionFailedError: The file is not `offset` bytes long, or another version; nothing was written.
            CannotAppendError: It does not work here, after all: write the whole file.
        """
        raise NotImplementedError(f"{self.description} cannot append.")

    @abc.abstractmethod
    def copy(self, source: str, target: str) -> None:
        """Copies a file on the server side, atomically, replacing `target`. A real copy, never a link.

        Raises:
            ArtifactNotFoundError: There is no `source`.
        """

    @abc.abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Deletes files; missing ones are no error. Batched where the backend can.

        On stores with real directories, parents that this leaves empty are removed too, up to the root.
        """

    @abc.abstractmethod
    def make_dir(self, path: str) -> None:
        """Creates a directory where the backend has directories; nothing elsewhere."""

    def begin_writing(self, token: str) -> None:  # noqa: B027  (object stores need nothing)
        """Takes over as the only writer, and cuts off writes in flight of older tokens where that is possible.

        On POSIX stores, writes go through `.ray_artifact_sync/tmp/<token>/` and a rename. This call creates that
        directory and takes away those of older tokens, so that the rename of a write in flight finds its source
        gone. Object stores do this with preconditions instead.
        """

    def below(self, path: str) -> ArtifactStore:
        """The same storage with the directory `path` as the root. Costs no request; `path` need not exist."""
        raise NotImplementedError(f"{self.description} has no stores below it.")

    # --- helpers built on the above -------------------------------------------------------------

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        """The whole content of a (small) file.

        Args:
            path: Where.
            limit: The most bytes that it may have, for a file that anybody may have written: no more is read.

        Raises:
            ArtifactNotFoundError: There is no such file.
            ManifestError: It has more than `limit` bytes.
        """
        length = None if limit is None else limit + 1
        data = b"".join(bytes(chunk) for chunk in self.read_chunks(path, length=length))
        if limit is not None and len(data) > limit:
            raise ManifestError(
                f"{path!r} in {self.description} has more than {limit} bytes, which is too much for what it should be: "
                "it is damaged, or not from this library."
            )
        return data
