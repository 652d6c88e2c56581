"""N ranks, each with a part of one set of files: what collides, what conflicts, who uploads what. Pure.

Every rank calls these functions with the same values (what all ranks told each other), so every rank gets the same
result; nothing depends on the order in which a rank lists its files, or on clocks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ray_artifact_sync.entries import Manifest
from ray_artifact_sync.errors import ArtifactConflictError, ConfigurationError

OnConflict = Literal["error", "lowest_rank", "rank_suffix"]
ON_CONFLICT: tuple[OnConflict, ...] = ("error", "lowest_rank", "rank_suffix")

Content: TypeAlias = tuple[int, str | None]
"""Size in bytes and BLAKE3 of a file; no digest where the size says enough."""

_NAMED_IN_MESSAGES = 10


@dataclass(frozen=True, slots=True)
class Source:
    """What a rank says about the directory that it brings.

    Attributes:
        root: What identifies the directory (node, device, inode): equal for two ranks that share it.
        selects: Whether the rank selects files of it; otherwise it brings all of them.
    """

    root: Hashable
    selects: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """What one rank brings.

    Attributes:
        files: Artifact path to size in bytes.
        empty_dirs: Artifact paths of directories without any child.
    """

    files: Mapping[str, int] = field(default_factory=dict)
    empty_dirs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Merge:
    """All listings as one, before anybody has read a file.

    Attributes:
        owners: Path of a file or empty directory to the rank that brings it; the lowest one where ranks share it.
        collisions: Path to the ranks (ascending) that bring a file there from different directories.
        clashes: Path to the ranks that bring a file there and those that bring a directory there.
        directories: Directories that hold something of any rank.
        empty_dirs: Empty directory to the lowest rank that brings it.
    """

    owners: Mapping[str, int]
    collisions: Mapping[str, tuple[int, ...]]
    clashes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    directories: frozenset[str] = frozenset()
    empty_dirs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who uploads what.

    Attributes:
        uploads: Artifact path to the rank that uploads it and the path that this rank has it at.
        agreed: Digests of files that several ranks bring: only this content may be uploaded.
    """

    uploads: Mapping[str, tuple[int, str]]
    agreed: Mapping[str, str] = field(default_factory=dict)


def who_lists(sources: Sequence[Source | None]) -> frozenset[int]:
    """The ranks whose listings count.

    Of ranks that share a directory, the lowest brings all of it, unless ranks select: then each brings its selection.

    Raises:
        ConfigurationError: No rank brings anything.
    """
    if all(source is None for source in sources):
        raise ConfigurationError("No rank has anything to upload: at least one must pass a directory, not None.")
    leaders: dict[Hashable, int] = {}
    chosen = set()
    for rank, source in enumerate(sources):
        if source is None:
            continue
        if source.selects:
            chosen.add(rank)
        elif source.root not in leaders:
            leaders[source.root] = rank
            chosen.add(rank)
    return frozenset(chosen)


def merge_listings(listings: Sequence[Listing | None], sources: Sequence[Source | None]) -> Merge:
    """Puts the ranks' listings together.

    Args:
        listings: By rank; None for a rank that brings nothing.
        sources: By rank.
    """
    owners: dict[str, int] = {}
    collisions: dict[str, list[int]] = {}
    directories: set[str] = set()
    for rank, listing in enumerate(listings):
        if listing is None:
            continue
        for path in listing.files:
            owner = owners.setdefault(path, rank)
            if owner == rank:
                _add_parents(path, directories)
            elif path in collisions:
                if all(_root(sources, other) != _root(sources, rank) for other in collisions[path]):
                    collisions[path].append(rank)
            elif _root(sources, owner) != _root(sources, rank):
                collisions[path] = [owner, rank]
    empty: dict[str, int] = {}
    for rank, listing in enumerate(listings):
        for path in listing.empty_dirs if listing is not None else ():
            _add_parents(path, directories)
            empty.setdefault(path, rank)
    clashing = owners.keys() & (directories | empty.keys())
    clashes = {path: _who_brings(path, listings) for path in sorted(clashing)}
    empty = {path: rank for path, rank in empty.items() if path not in directories}
    owners.update((path, rank) for path, rank in empty.items() if path not in owners)
    collided = {path: tuple(ranks) for path, ranks in sorted(collisions.items())}
    return Merge(owners, collided, clashes, frozenset(directories), empty)


def digests_to_exchange(
    merge: Merge, listings: Sequence[Listing | None], base: Manifest | None = None
) -> dict[int, list[str]]:
    """Which files a rank has to hash: those whose size does not tell already that they differ.

    Args:
        merge: Of the listings.
        listings: By rank.
        base: What all ranks were given at the start, see `assign`.

    Returns:
        Rank to the paths that it must hash, sorted.
    """
    wanted: dict[int, list[str]] = defaultdict(list)
    for path, ranks in merge.collisions.items():
        sizes = [_size(listings, rank, path) for rank in ranks]
        known = base.get(path) if base is not None else None
        for rank, size in zip(ranks, sizes, strict=True):
            if sizes.count(size) > 1 or (known is not None and known.size == size):
                wanted[rank].append(path)
    return dict(wanted)


def assign(
    merge: Merge,
    listings: Sequence[Listing | None],
    contents: Sequence[Mapping[str, Content | None]],
    *,
    base: Manifest | None = None,
    on_conflict: OnConflict = "error",
) -> Assignment:
    """Decides who uploads what.

    Identical files go up once, from the lowest rank. A file that a rank was given at the start (`base`) and has not
    changed gives way to one that another rank changed.

    Args:
        merge: Of the listings.
        listings: By rank.
        contents: By rank: path to size and digest, for what `digests_to_exchange` asked for; None for a file that is
            gone meanwhile.
        base: What all ranks were given at the start; None for nothing.
        on_conflict: `"error"`; `"lowest_rank"`: what a rank brings is taken unless it contradicts what a lower one
            brings; `"rank_suffix"`: each rank's file is taken, as `<path>.rank_<rank>`.

    Raises:
        ArtifactConflictError: Ranks bring different files, or a file and a directory, under one path, with
            `on_conflict="error"`; or there is a file already under a name with a suffix. The attribute `conflicts`
            maps the paths to the ranks.
    """
    decision = _Decision(merge, {path: (rank, path) for path, rank in merge.owners.items()}, {}, {})
    for path, ranks in merge.collisions.items():
        if path not in merge.clashes or on_conflict == "lowest_rank":
            decision.same_path(path, _claims(path, ranks, listings, contents, base), on_conflict)
    for path, (file_ranks, dir_ranks) in merge.clashes.items():
        if on_conflict == "error":
            decision.conflicts[path] = tuple(sorted({*file_ranks, *dir_ranks}))
        elif on_conflict == "rank_suffix":
            decision.with_suffix(path, file_ranks)
    if merge.clashes and on_conflict == "lowest_rank":
        decision.lowest_ranks_first()
    if decision.conflicts:
        raise _conflict(decision.conflicts, merge)
    return Assignment(decision.uploads, decision.agreed)


def merge_metadata(parts: Sequence[Mapping[str, Any] | None], *, on_conflict: OnConflict = "error") -> dict[str, Any]:
    """Merges what the ranks say about the set, dictionaries recursively.

    Args:
        parts: By rank; None for nothing.
        on_conflict: With `"lowest_rank"` the lowest rank's value is taken, otherwise unequal values are an error.

    Raises:
        ArtifactConflictError: Two ranks give unequal values for one key; it names the key and the ranks.
        ConfigurationError: A key is no text, or a value cannot be written as JSON.
    """
    conflicts: dict[str, list[int]] = {}
    merged: dict[str, Any] = {}
    givers: dict[tuple[str, ...], int] = {}
    for rank, part in enumerate(parts):
        if part is not None:
            _check_metadata(part, rank)
            _merge_into(merged, part, rank, (), givers, conflicts)
    if conflicts and on_conflict != "lowest_rank":
        keys = "; ".join(f"{key!r} by {_ranks(ranks)}" for key, ranks in list(conflicts.items())[:_NAMED_IN_MESSAGES])
        raise ArtifactConflictError(
            f"Ranks give unequal metadata for the same key: {keys}. Give each rank keys of its own, or equal values.",
            conflicts={key: tuple(ranks) for key, ranks in conflicts.items()},
        )
    return merged


# --- collisions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Claim:
    rank: int
    size: int
    digest: str | None
    unchanged: bool

    @property
    def content(self) -> Content:
        return self.size, self.digest


@dataclass(slots=True)
class _Decision:
    merge: Merge
    uploads: dict[str, tuple[int, str]]
    agreed: dict[str, str]
    conflicts: dict[str, tuple[int, ...]]

    def same_path(self, path: str, claims: list[_Claim], on_conflict: OnConflict) -> None:
        claims = [claim for claim in claims if not claim.unchanged] or claims
        if not claims:
            del self.uploads[path]  # deleted by all meanwhile
            return
        lowest = claims[0]
        if len({claim.content for claim in claims}) == 1 or on_conflict == "lowest_rank":
            self.uploads[path] = lowest.rank, path
            if lowest.digest is not None:
                self.agreed[path] = lowest.digest
        elif on_conflict == "rank_suffix":
            self.with_suffix(path, [claim.rank for claim in claims])
        else:
            self.conflicts[path] = tuple(claim.rank for claim in claims)

    def lowest_ranks_first(self) -> None:
        """Takes what every rank brings, in the order of ranks, unless it contradicts what was taken before."""
        empty = self.merge.empty_dirs
        offers = [(rank, path, False) for path, (rank, _) in self.uploads.items() if empty.get(path) != rank]
        offers += [(rank, path, True) for path, rank in empty.items()]
        files: set[str] = set()
        directories: set[str] = set()
        taken: dict[str, tuple[int, str]] = {}
        for rank, path, is_dir in sorted(offers):
            above: set[str] = set()
            _add_parents(path, above)
            if path in files or path in directories or not files.isdisjoint(above):
                continue
            taken[path] = rank, path
            directories |= above
            (directories if is_dir else files).add(path)
        self.uploads = taken

    def with_suffix(self, path: str, ranks: Iterable[int]) -> None:
        """Nothing is left under the plain name: no rank's file pretends to be that of all."""
        del self.uploads[path]
        for rank in ranks:
            name = f"{path}.rank_{rank}"
            if name in self.uploads or name in self.merge.directories:
                self.conflicts[name] = tuple(sorted({rank, self.uploads.get(name, (rank,))[0]}))
            self.uploads[name] = rank, path


def _claims(
    path: str,
    ranks: Iterable[int],
    listings: Sequence[Listing | None],
    contents: Sequence[Mapping[str, Content | None]],
    base: Manifest | None,
) -> list[_Claim]:
    known = base.get(path) if base is not None else None
    claims = []
    for rank in ranks:
        content = contents[rank].get(path, (_size(listings, rank, path), None))
        if content is None:
            continue
        size, digest = content
        unchanged = known is not None and digest is not None and (known.size, known.digest) == (size, digest)
        claims.append(_Claim(rank, size, digest, unchanged))
    return claims


def _conflict(conflicts: Mapping[str, tuple[int, ...]], merge: Merge) -> ArtifactConflictError:
    lines = []
    for path, ranks in sorted(conflicts.items())[:_NAMED_IN_MESSAGES]:
        if path in merge.clashes:
            files, directories = merge.clashes[path]
            lines.append(f"{path!r} is a file of {_ranks(files)} and a directory of {_ranks(directories)}")
        else:
            lines.append(f"{path!r} has different bytes from {_ranks(ranks)}")
    more = len(conflicts) - len(lines)
    return ArtifactConflictError(
        f"Ranks bring different things under the same path; nothing was uploaded. {'; '.join(lines)}"
        f"{f'; and {more} more' if more else ''}. Write under names that carry the rank, or choose `on_conflict`.",
        conflicts=dict(conflicts),
    )


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _size(listings: Sequence[Listing | None], rank: int, path: str) -> int:
    listing = listings[rank]
    assert listing is not None
    return listing.files[path]


def _root(sources: Sequence[Source | None], rank: int) -> Hashable:
    source = sources[rank]
    return source.root if source is not None else None


def _add_parents(path: str, directories: set[str]) -> None:
    while (cut := path.rfind("/")) > 0:
        path = path[:cut]
        if path in directories:
            return
        directories.add(path)


def _who_brings(path: str, listings: Sequence[Listing | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    below = f"{path}/"
    files, directories = [], []
    for rank, listing in enumerate(listings):
        if listing is None:
            continue
        if path in listing.files:
            files.append(rank)
        if any(other == path or other.startswith(below) for other in listing.empty_dirs) or any(
            other.startswith(below) for other in listing.files
        ):
            directories.append(rank)
    return tuple(files), tuple(directories)


# --- metadata -------------------------------------------------------------------------------------


def _check_metadata(part: Mapping[str, Any], rank: int) -> None:
    try:
        text = json.dumps(part)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"The metadata of rank {rank} cannot be written as JSON: {error}") from None
    if not isinstance(part, Mapping) or not _keys_are_text(part):
        raise ConfigurationError(f"The metadata of rank {rank} must be a dictionary with text keys: {text[:200]}")


def _keys_are_text(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _keys_are_text(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(_keys_are_text(inner) for inner in value)
    return True


def _merge_into(  # noqa: PLR0917  (recursive, private)
    merged: dict[str, Any],
    part: Mapping[str, Any],
    rank: int,
    above: tuple[str, ...],
    givers: dict[tuple[str, ...], int],
    conflicts: dict[str, list[int]],
) -> None:
    for key, value in part.items():
        where = (*above, key)
        if key not in merged:
            merged[key] = {} if isinstance(value, Mapping) else value
            givers[where] = rank
        known = merged[key]
        if isinstance(known, dict) and isinstance(value, Mapping):
            _merge_into(known, value, rank, where, givers, conflicts)
        elif not _equal(known, value):
            conflicts.setdefault(".".join(where), [givers[where]]).append(rank)


def _equal(left: object, right: object) -> bool:
    # The text makes NaN equal to itself.
    return left == right or json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
