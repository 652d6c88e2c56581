"""Decides what a sync does. Pure: values in, values out; every transfer and every skipped file carries its reason.

The rules that keep the promises:

- *Pinned* manifests are those whose every version must stay readable: the head, the snapshots of retained checkpoints,
  and what a restore set aside. A version (path, size, digest) is readable if its path holds content that begins with
  it, or if it was preserved under its digest.
- Before content at a path is replaced by content that does not begin with a pinned version, that version is preserved.
- What a snapshot lists that is not written yet is preserved as well before content is added to it: who comes to take
  the path over (the driver) preserves what is listed and all that is there, but cannot know of such a beginning.
- An append is planned only onto content that this very session wrote, and only after the hash of the local prefix
  proved equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_artifact_sync.entries import (
    Append,
    CopyStored,
    FileEntry,
    LocalFile,
    Manifest,
    Preserve,
    Remove,
    SyncPlan,
    Transfer,
    Upload,
)

MIN_COPY_SIZE = 64 * 1024
"""Bytes from which on it is worth hashing a new file to find out whether storage holds its content already."""

MAX_APPENDED_SHARE = 0.25
"""The most that is appended to a file, as a share of what is stored, where an append costs requests.

What is appended goes up one part at a time, a whole file four at once: an append has to save most of the bytes.
"""


@dataclass(frozen=True, slots=True)
class PathState:
    """What a path in the trial dir physically holds, as far as the session knows.

    A path without a state holds nothing that the session knows of.

    Attributes:
        size: Bytes; -1 where not known (a failed write may have landed).
        digest: BLAKE3 hex; None where not known.
        own: This session wrote it, so that nobody else has it open for writing.
        etag: The backend's tag of it, for conditional writes; None where not known.
    """

    size: int = -1
    digest: str | None = None
    own: bool = False
    etag: str | None = None

    def holds(self, size: int, digest: str | None) -> bool:
        """Whether the path holds exactly this content."""
        return digest is not None and self.digest == digest and self.size == size


Version = tuple[int, str]
"""Size in bytes and digest of one version of a path."""


def pinned_versions(path: str, pinned: Iterable[Manifest], preserved: Collection[str]) -> set[Version]:
    """The versions of `path` that must stay readable and that were not preserved yet."""
    versions = set()
    for manifest in pinned:
        entry = manifest.entries.get(path)
        if entry is not None and not entry.is_dir and entry.size and entry.digest not in preserved:
            versions.add((entry.size, entry.digest))
    return versions


def digests_wanted(
    local: Mapping[str, LocalFile],
    *,
    head: Manifest,
    states: Mapping[str, PathState],
    pinned: Sequence[Manifest],
    preserved: Collection[str],
) -> dict[str, frozenset[int]]:
    """Which files the planner has to know the digest of, and of which prefixes.

    A file that is new and small, or whose path holds nothing worth comparing, is not among them: its digest is
    computed while it is sent.

    Returns:
        Path to the sizes (bytes) of the prefixes; the digest of the whole is always wanted too.
    """
    wanted: dict[str, frozenset[int]] = {}
    stored_sizes = {state.size for state in states.values() if state.own and state.size >= MIN_COPY_SIZE}
    for path, file in local.items():
        if file.is_dir:
            continue
        state = states.get(path)
        if file.digest is not None and (state is None or state.holds(file.size, file.digest)):
            continue  # the cache vouches for it, and nothing at its path is replaced
        entry = head.get(path)
        marks = {size for size, _ in pinned_versions(path, pinned, preserved) if size <= file.size}
        if state is not None and state.own and 0 <= state.size <= file.size:
            marks.add(state.size)
        if entry is not None and not entry.is_dir and entry.size == file.size:
            marks.add(entry.size)
        if marks or (file.digest is None and file.size in stored_sizes):
            wanted[path] = frozenset(marks)
    return wanted


def new_bytes(entry: FileEntry, old: FileEntry | None, prefix_digests: Mapping[int, str]) -> int:
    """How many bytes of a file are new: what it grew by if its beginning is proven to be the old version, else all.

    Args:
        entry: What it is now.
        old: What the head listed.
        prefix_digests: What was found out about the local file.
    """
    if old is None or old.is_dir or old.size > entry.size:
        return entry.size
    return entry.size - old.size if prefix_digests.get(old.size) == old.digest else entry.size


def plan_sync_up(
    local: Mapping[str, LocalFile],
    *,
    head: Manifest,
    states: Mapping[str, PathState],
    pinned: Sequence[Manifest] = (),
    unwritten: Sequence[Manifest] = (),
    preserved: Collection[str] = frozenset(),
    can_append: bool = False,
    min_append_size: int = 0,
) -> SyncPlan:
    """Compares the working dir with storage.

    Args:
        local: Artifact path to local file, with the digests that `digests_wanted` asked for.
        head: Newest committed manifest.
        states: Artifact path to what that path holds now.
        pinned: Manifests whose versions must stay readable; the head belongs to them.
        unwritten: Those of them that are in no document on storage yet.
        preserved: Digests already kept as objects.
        can_append: Whether the store can append.
        min_append_size: Bytes that a file must have in storage before an append pays; 0 where it always does.

    Returns:
        The plan. Files whose digest is not known are uploads, their digest being computed on the way.
    """
    planner = _Planner(
        head, states, pinned, unwritten, preserved, can_append=can_append, min_append_size=min_append_size
    )
    for path, file in local.items():
        planner.local_file(path, file)
    planner.kind_changes(local)
    dropped = tuple(path for path in head.entries if path not in local)
    return SyncPlan(
        preserves=tuple(planner.preserves.values()),
        removes=tuple(planner.removes),
        transfers=planner.ordered_transfers(),
        unchanged=tuple(planner.unchanged),
        dropped=dropped,
    )


class _Planner:
    """The growing lists of one `plan_sync_up`."""

    def __init__(
        self,
        head: Manifest,
        states: Mapping[str, PathState],
        pinned: Sequence[Manifest],
        unwritten: Sequence[Manifest],
        preserved: Collection[str],
        *,
        can_append: bool,
        min_append_size: int,
    ) -> None:
        self.head = head
        self.states = states
        self.pinned = pinned
        self.unwritten = unwritten
        self.preserved = preserved
        self.can_append = can_append
        self.min_append_size = min_append_size
        self.preserves: dict[str, Preserve] = {}
        self.removes: list[Remove] = []
        self.transfers: list[Transfer] = []
        self.unchanged: list[FileEntry] = []
        self._sources: dict[Version, str] | None = None

    def local_file(self, path: str, file: LocalFile) -> None:
        entry, state = self.head.get(path), self.states.get(path)
        if file.is_dir:
            same = entry is not None and entry.is_dir
            self.unchanged.append(entry if same and entry else FileEntry(path, 0, "", is_dir=True))
            return
        if state is not None and file.digest is not None and state.holds(file.size, file.digest):
            if entry is None or entry.is_dir or (entry.size, entry.digest) != (file.size, file.digest):
                # Not in the head where an earlier sync sent it and could not commit: nothing to send again.
                entry = FileEntry(path, file.size, file.digest, file.mtime_ns)
            self.unchanged.append(entry)
            return
        transfer = self.transfer(path, file, entry, state)
        self.transfers.append(transfer)
        if state is not None:
            self.preserve_what_is_lost(path, file)

    def transfer(self, path: str, file: LocalFile, entry: FileEntry | None, state: PathState | None) -> Transfer:
        if (
            self.can_append
            and file.digest is not None
            and state is not None
            and state.own
            and 0 < state.size < file.size
            and self.append_pays(state.size, file.size)
            and state.digest is not None
            and file.prefix_digests.get(state.size) == state.digest
        ):
            return Append(
                path, file.size, file.mtime_ns, file.digest, state.size, f"grew from {state.size} to {file.size} bytes"
            )
        if file.digest is not None and file.size >= MIN_COPY_SIZE:
            source = self.sources().get((file.size, file.digest))
            if source is not None and source != path:
                return CopyStored(
                    path, source, file.size, file.mtime_ns, file.digest, f"storage holds the content at {source}"
                )
        return Upload(path, file.size, file.mtime_ns, file.digest, _reason(file, entry, state))

    def append_pays(self, stored: int, size: int) -> bool:
        if not self.min_append_size:
            return True
        return stored >= self.min_append_size and size - stored <= stored * MAX_APPENDED_SHARE

    def sources(self) -> dict[Version, str]:
        """Content that this session stored, and where."""
        if self._sources is None:
            self._sources = {
                (state.size, state.digest): path
                for path, state in self.states.items()
                if state.own and state.digest is not None and state.size >= MIN_COPY_SIZE
            }
        return self._sources

    def preserve_what_is_lost(self, path: str, file: LocalFile) -> None:
        lost = {
            digest
            for size, digest in pinned_versions(path, self.pinned, self.preserved)
            if not (file.digest == digest and file.size == size) and file.prefix_digests.get(size) != digest
        }
        # Other content: were it the same, there was nothing to transfer.
        lost |= {digest for _, digest in pinned_versions(path, self.unwritten, self.preserved)}
        if lost:
            self.preserves[path] = Preserve(path, tuple(sorted(lost)), "about to be replaced, a manifest needs it")

    def kind_changes(self, local: Mapping[str, LocalFile]) -> None:
        """Paths that were a file and are a directory now, and the other way round."""
        sending = {transfer.path for transfer in self.transfers}
        if not sending:
            return
        directories = {parent for path in sending for parent in parents(path)}
        for path in directories & self.states.keys():
            self.give_way(path, "a file is a directory now")
        for path in self.states.keys() - local.keys():
            if not sending.isdisjoint(parents(path)):
                self.give_way(path, "its directory is a file now")

    def ordered_transfers(self) -> tuple[Transfer, ...]:
        """Copies whose source changes in this very plan become uploads, so that nothing depends on an order."""
        touched = {op.path for op in self.transfers} | {op.path for op in self.removes}
        return tuple(
            Upload(op.path, op.size, op.mtime_ns, op.digest, f"{op.reason}, which changes too")
            if isinstance(op, CopyStored) and op.source in touched
            else op
            for op in self.transfers
        )

    def give_way(self, path: str, reason: str) -> None:
        lost = {digest for _, digest in pinned_versions(path, self.pinned, self.preserved)}
        if lost:
            self.preserves[path] = Preserve(path, tuple(sorted(lost)), reason)
        self.removes.append(Remove(path, reason))


def parents(path: str) -> list[str]:
    """The directories that a path lies in, the outermost first."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _reason(file: LocalFile, entry: FileEntry | None, state: PathState | None) -> str:
    if entry is None:
        return "new"
    if entry.is_dir:
        return "a directory became a file"
    if file.digest is not None and file.digest == entry.digest:
        return "storage holds nothing at its path" if state is None else "storage holds another version at its path"
    if file.size != entry.size:
        return f"size changed from {entry.size} to {file.size} bytes"
    return "content changed"


# --- the way back ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fill:
    """Give a local file the content of an entry, in place.

    Attributes:
        entry: What it must hold.
        local_source: Set-aside file (relative to the set-aside dir) whose first `entry.size` bytes are that content;
            None to read from storage.
    """

    entry: FileEntry
    local_source: str | None


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore does to the working dir.

    Attributes:
        fills: Files to write.
        keeps: Entries that the working dir holds already.
        make_dirs: Empty directories to create.
        set_aside: Local files that the snapshot does not list, or that stand where a directory must be: moved away.
    """

    fills: tuple[Fill, ...]
    keeps: tuple[FileEntry, ...]
    make_dirs: tuple[str, ...]
    set_aside: tuple[str, ...]


def plan_restore(
    snapshot: Manifest,
    local: Mapping[str, LocalFile],
    leftovers: Mapping[str, LocalFile],
    *,
    keep_unlisted: bool,
) -> RestorePlan:
    """Compares a snapshot with the working dir.

    Args:
        snapshot: What the working dir must hold.
        local: What it holds, with digests of files that the snapshot lists with the same size.
        leftovers: What an earlier attempt left, with prefix digests at the sizes that the snapshot lists.
        keep_unlisted: Leave local files alone that the snapshot does not list (those that `setup()` of this attempt
            has just opened or written).
    """
    fills, keeps, make_dirs = [], [], []
    for entry in snapshot:
        here = local.get(entry.path)
        if entry.is_dir:
            make_dirs.append(entry.path)
        elif here is not None and here.size == entry.size and here.digest == entry.digest:
            keeps.append(entry)
        else:
            left = leftovers.get(entry.path)
            known = left is not None and (
                left.prefix_digests.get(entry.size) == entry.digest
                or (left.size == entry.size and left.digest == entry.digest)
            )
            fills.append(Fill(entry, entry.path if known else None))
    file_paths = {entry.path for entry in snapshot if not entry.is_dir}
    needed_dirs = {parent for entry in snapshot for parent in parents(entry.path)} | set(make_dirs)
    set_aside = []
    for path, file in local.items():
        if file.is_dir:
            continue  # empty; a fill that needs its place removes it
        unlisted = path not in file_paths and not keep_unlisted
        if unlisted or path in needed_dirs or not file_paths.isdisjoint(parents(path)):
            set_aside.append(path)
    return RestorePlan(tuple(fills), tuple(keeps), tuple(make_dirs), tuple(set_aside))
