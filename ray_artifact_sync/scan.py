"""Working dir -> what is there: one walk, no file read that stat says is unchanged.

Never raises for a single file: what cannot be an artifact becomes a `Skip` with its reason.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ray_artifact_sync import layout
from ray_artifact_sync.entries import MAX_PATH_BYTES, LocalFile, Skip, is_plain, validate_path
from ray_artifact_sync.errors import FileChangedError, InvalidPathError
from ray_artifact_sync.local_files import FileStat, HashedFile, hash_file, mapped_inodes

SkipRule = Callable[[str, bool], Skip | None]
"""Decides about an artifact path (and whether it is a directory, to prune whole trees): a Skip, or None to take it."""


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of one walk.

    Attributes:
        files: Artifact path to the stat of the file.
        empty_dirs: Directories without any child.
        skips: What was left out, with reasons.
    """

    files: Mapping[str, FileStat]
    empty_dirs: tuple[str, ...] = ()
    skips: tuple[Skip, ...] = ()


def take_all(_path: str, _is_dir: bool) -> Skip | None:
    """The rule that skips nothing."""
    return None


def scan_tree(
    root: str, rule: SkipRule = take_all, *, skip_checkpoints: bool = False, cache: HashCache | None = None
) -> Scan:
    """Lists the artifacts below a directory; a missing directory is an empty one.

    Symlinks to regular files inside the root count as the files they show; those that leave the root, dangle or lead
    to a directory are skipped. FIFOs, sockets and devices are skipped. Nothing is opened.

    Args:
        root: Local directory.
        rule: Leaves out what an owner declares or what is excluded.
        skip_checkpoints: Leave out `checkpoint_NNNNNN` directories at the top.
        cache: Gives the stat of a file that has not changed, so that a scan of many files makes no new objects (and no
            work for the garbage collector).
    """
    walk = _Walk(os.path.realpath(root), rule, skip_checkpoints, cache)
    walk.directory(root, "")
    return Scan(walk.files, tuple(walk.empty_dirs), tuple(walk.skips))


@dataclass(slots=True)
class _Walk:
    real_root: str
    rule: SkipRule
    skip_checkpoints: bool
    cache: HashCache | None
    files: dict[str, FileStat] = field(default_factory=dict)
    empty_dirs: list[str] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)

    def directory(self, local_dir: str, prefix: str) -> None:
        pending = [(local_dir, prefix)]
        while pending:
            local_dir, prefix = pending.pop()
            try:
                with os.scandir(local_dir) as children:
                    entries = list(children)
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone since its parent was listed; the root may not exist yet
            except OSError as error:
                self.skip(prefix or ".", f"unreadable directory: {error.strerror}", "unreadable")
                continue
            if not entries and prefix:
                self.empty_dirs.append(prefix)
            pending.extend(child for entry in entries if (child := self.child(entry, prefix)))

    def child(self, entry: os.DirEntry[str], prefix: str) -> tuple[str, str] | None:
        """Records one directory entry; returns a directory to go into."""
        name = entry.name
        if not prefix and layout.is_reserved(name):
            return None
        path = f"{prefix}/{name}" if prefix else name
        try:
            is_link = entry.is_symlink()
            is_dir = entry.is_dir(follow_symlinks=False)
            if not prefix and is_dir and self.skip_checkpoints and layout.is_checkpoint_dir(name):
                return None
            if not (is_plain(name) and len(path) <= MAX_PATH_BYTES):
                validate_path(path)
            if skip := self.rule(path, is_dir):
                self.skips.append(skip)
                return None
            if is_dir:
                return entry.path, path
            self.file(entry, path, is_link=is_link)
        except FileNotFoundError:
            self.skip(path, "deleted while the directory was listed", "vanished")
        except InvalidPathError as error:
            # In the form that Python would write it in: a raw newline or byte must not break a log.
            self.skip(repr(path)[1:-1], str(error).removesuffix("."), "invalid")
        except OSError as error:
            self.skip(path, f"unreadable: {error.strerror}", "unreadable")
        return None

    def file(self, entry: os.DirEntry[str], path: str, *, is_link: bool) -> None:
        if is_link and (reason := self.reason_against_link(entry.path)):
            self.skip(path, reason, "unsupported")
            return
        result = entry.stat(follow_symlinks=is_link)
        if stat.S_ISREG(result.st_mode):
            seen = FileStat.of(result)
            self.files[path] = seen if self.cache is None else self.cache.known_stat(path, seen)
        else:
            self.skip(path, f"not a regular file ({_kind(result.st_mode)})", "unsupported")

    def reason_against_link(self, local_path: str) -> str | None:
        target = os.path.realpath(local_path)
        if not os.path.exists(target):
            return "dangling symlink"
        if os.path.commonpath([self.real_root, target]) != self.real_root:
            return "symlink that leaves the working dir"
        if os.path.isdir(target):
            return "symlink to a directory (its target is synced at its own path)"
        if layout.is_reserved(os.path.relpath(target, self.real_root)):
            return "symlink into this library's own directory"
        return None

    def skip(self, path: str, reason: str, kind: str) -> None:
        self.skips.append(Skip(path, reason, kind))  # type: ignore[arg-type]


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISFIFO, "FIFO"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISBLK, "block device"),
        (stat.S_ISCHR, "character device"),
    ):
        if test(mode):
            return name
    return "unknown kind"


class HashCache:
    """Digests of local files by their stat results, so that an unchanged file is not read again.

    Not shared between processes and never written to disk: after a restart everything is hashed anew.
    """

    def __init__(self) -> None:
        self._known: dict[str, HashedFile] = {}
        self._files: dict[str, LocalFile] = {}
        self._fresh: list[str] = []

    def local_file(self, path: str, seen: FileStat) -> LocalFile:
        """The file in the planner's terms; the same object as long as it stays the same file."""
        digest = self.get(path, seen)
        if digest is None:
            return LocalFile(path, seen.size, seen.mtime_ns)
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = LocalFile(path, seen.size, seen.mtime_ns, digest)
        return file

    def __contains__(self, path: str) -> bool:
        return path in self._known

    def known_stat(self, path: str, seen: FileStat) -> FileStat:
        """`seen`, as the object that is kept here if the file is the same."""
        known = self._known.get(path)
        return known.stat if known is not None and known.stat == seen else seen

    def get(self, path: str, seen: FileStat) -> str | None:
        """The digest of the file at `path` if `seen` proves that it is the version hashed before."""
        known = self._known.get(path)
        return known.digest if known is not None and known.settled and known.stat == seen else None

    def remember(self, path: str, hashed: HashedFile) -> None:
        """Records what was learned while the file was read."""
        self._known[path] = hashed
        self._fresh.append(path)
        self._files.pop(path, None)

    def distrust_mapped(self) -> None:
        """To be called after a pass: no stat result vouches for a file that this process writes through a mapping."""
        fresh, self._fresh = self._fresh, []
        mapped = mapped_inodes() if fresh else frozenset()
        for path in fresh if mapped else ():
            known = self._known.get(path)
            if known is not None and known.stat.inode in mapped:
                self._known[path] = replace(known, settled=False)
                self._files.pop(path, None)

    def forget_except(self, paths: Collection[str]) -> None:
        """Drops what is known of files that are gone."""
        for path in [path for path in self._known if path not in paths]:
            del self._known[path]
            self._files.pop(path, None)


def as_local_files(scan: Scan, cache: HashCache) -> dict[str, LocalFile]:
    """The scan in the planner's terms, with the digests that the cache can vouch for."""
    files = {path: cache.local_file(path, seen) for path, seen in scan.files.items()}
    for path in scan.empty_dirs:
        files[path] = LocalFile(path, 0, 0, "", is_dir=True)
    return files


def hash_local_file(
    file: LocalFile, marks: Collection[int], local_path: str, cache: HashCache | None = None
) -> LocalFile | Skip:
    """Reads what the planner asked for; the result describes the version that was hashed.

    Args:
        file: What the scan saw.
        marks: Sizes (bytes) of the prefixes whose digests are wanted.
        local_path: Where to read.
        cache: Remembers the result.

    Returns:
        The file with its digest and prefix digests, or a Skip if it vanished or keeps changing.
    """
    try:
        hashed = hash_file(local_path, marks)
    except FileNotFoundError:
        return Skip(file.path, "deleted before it could be read", "vanished")
    except FileChangedError as error:
        return Skip(file.path, str(error), "unstable")
    except OSError as error:
        return Skip(file.path, f"unreadable: {error.strerror}", "unreadable")
    if cache is not None:
        cache.remember(file.path, hashed)
    return LocalFile(file.path, hashed.stat.size, hashed.stat.mtime_ns, hashed.digest, hashed.prefix_digests)
