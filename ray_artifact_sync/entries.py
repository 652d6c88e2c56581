"""The values that everything else speaks in: artifact paths, entries, manifests, plan operations.

Pure: no disk, no network, no Ray. All values are frozen; a manifest is replaced, never changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ray_artifact_sync.errors import InvalidPathError

MAX_PATH_BYTES = 4096
"""Longest artifact path in UTF-8 bytes (Linux' PATH_MAX); object stores end at 1,024 and say so themselves."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def is_plain(name: str) -> bool:
    """Whether a file name that a directory lists is surely a valid segment; a quick look that most names pass."""
    return name.isascii() and name.isprintable()


def validate_path(path: str) -> str:
    """Returns `path` if it is a valid artifact path.

    An artifact path is a POSIX path relative to the working dir in exactly one spelling.

    Args:
        path: For example `"plots/loss.png"`.

    Returns:
        The same string.

    Raises:
        InvalidPathError: It is absolute, empty or too long, has an empty, `.` or `..` segment, a NUL
            or another control character that object stores refuse, or is not valid Unicode.
    """
    if not isinstance(path, str) or not path:
        raise InvalidPathError(f"An artifact path must be a non-empty string, not {path!r}.", path=path)
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidPathError(
            f"The file name {path!r} is not valid UTF-8; object stores cannot hold it. Rename the file.",
            path=path,
        ) from None
    if len(encoded) > MAX_PATH_BYTES:
        raise InvalidPathError(
            f"The artifact path starting {path[:60]!r} has {len(encoded)} bytes; the limit is {MAX_PATH_BYTES}.",
            path=path,
        )
    if _CONTROL.search(path):
        raise InvalidPathError(
            f"The artifact path {path!r} has a control character; object stores refuse it. Rename the file.",
            path=path,
        )
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            raise InvalidPathError(
                f"The artifact path {path!r} is not relative and normalized: it has the segment {segment!r}.",
                path=path,
            )
    return path


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One artifact in a manifest.

    Attributes:
        path: Artifact path.
        size: Bytes.
        digest: BLAKE3 of the content, 64 hex characters; empty for an empty directory, and for a file that only a
            listing of storage names (a restore finds it out; no document ever holds such an entry).
        mtime_ns: Modification time on the node that wrote it, in ns since the epoch. Informative: nothing is
            decided by it.
        is_dir: An empty directory, kept so that a restore brings it back. It has no object in storage.
    """

    path: str
    size: int
    digest: str
    mtime_ns: int = 0
    is_dir: bool = False

    def same_content(self, other: FileEntry | None) -> bool:
        """Whether both name the same bytes (times are not content)."""
        return (
            other is not None
            and self.digest == other.digest
            and self.size == other.size
            and self.is_dir == other.is_dir
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """The complete list of a trial's artifacts at one moment.

    Attributes:
        entries: Artifact path to entry.
        token: The attempt that committed it (see `layout.py`); empty for a manifest never committed.
    """

    entries: Mapping[str, FileEntry] = field(default_factory=dict)
    token: str = ""

    @classmethod
    def of(cls, entries: Iterable[FileEntry], token: str = "") -> Manifest:
        """Builds a manifest from entries."""
        return cls({entry.path: entry for entry in entries}, token)

    def __iter__(self) -> Iterator[FileEntry]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, path: str) -> FileEntry | None:
        """The entry at `path`, or None."""
        return self.entries.get(path)

    def same_content(self, other: Manifest) -> bool:
        """Whether both list the same paths with the same bytes."""
        if self.entries is other.entries:
            return True
        return self.entries.keys() == other.entries.keys() and all(
            entry.same_content(other.entries[path]) for path, entry in self.entries.items()
        )

    @property
    def total_bytes(self) -> int:
        """Sum of all sizes, in bytes."""
        return sum(entry.size for entry in self)


@dataclass(frozen=True, slots=True)
class LocalFile:
    """What the scan saw of one local file.

    Attributes:
        path: Artifact path.
        size: Bytes at the moment of the scan.
        mtime_ns: Modification time, ns since the epoch.
        digest: BLAKE3 hex of the whole content where it is known, else None (the transfer computes it).
        prefix_digests: Size in bytes to the BLAKE3 hex of the first so many bytes, for the sizes that the planner
            asked about.
        is_dir: An empty directory.
    """

    path: str
    size: int
    mtime_ns: int
    digest: str | None = None
    prefix_digests: Mapping[int, str] = field(default_factory=dict)
    is_dir: bool = False


# --- plan operations: what a sync does to storage, each with its reason --------------------------


@dataclass(frozen=True, slots=True)
class Preserve:
    """Copy, on the server side, what `path` holds to the objects under each of `digests`."""

    path: str
    digests: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete what this library stored at `path` (preserved before if needed): the path changes its kind."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Upload:
    """Send the whole local file.

    `digest` is None where only the transfer reads the content; `size` is then what the scan saw.
    """

    path: str
    size: int
    mtime_ns: int
    digest: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Append:
    """Add the local file's bytes from `offset` on to what `path` holds; `offset` is the stored size in bytes."""

    path: str
    size: int
    mtime_ns: int
    digest: str
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class CopyStored:
    """Content that storage already holds at `source`: copy it there to `path`, on the server side."""

    path: str
    source: str
    size: int
    mtime_ns: int
    digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class Skip:
    """A local file that is not synced, and why.

    `unreadable` (a file, or a directory with all below it) does not say that it is gone: what the head lists there
    stays listed.
    """

    path: str
    reason: str
    kind: Literal["owned", "excluded", "unsupported", "unreadable", "vanished", "invalid", "unstable"]


Transfer: TypeAlias = Upload | Append | CopyStored


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """What one sync does, in this order: preserve, remove, transfer; then the manifest is committed.

    Attributes:
        preserves: Server-side copies of versions that a pinned manifest still needs.
        removes: Paths whose kind changes between file and directory.
        transfers: Files that change in storage.
        unchanged: Entries whose content storage holds at their path: those of the head as they are, and what an earlier
            sync sent but could not commit.
        dropped: Paths of the head that no longer exist locally: the next manifest does not list them, their objects
            stay.
    """

    preserves: tuple[Preserve, ...] = ()
    removes: tuple[Remove, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    unchanged: tuple[FileEntry, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether storage already equals the local state."""
        return not (self.preserves or self.removes or self.transfers or self.dropped)
