"""Where the artifacts of a Ray Train run lie: the directories of its parts, and their snapshots in its checkpoints.

<run dir>/                                          (`get_storage().experiment_fs_path`; a trial dir on Train V1)
  artifacts/<part>/                                 one part: a trial dir (see `layout.py`) without checkpoints
  checkpoint_.../                                   as Ray names them, or the user does
    <the checkpoint's own files>
    .ray_artifact_sync/<part>/.ray_artifact_sync-<token>.json       snapshot of the part
    .ray_artifact_sync/ranks.json                                   how many ranks saved it

A part is what one rank writes (`rank_0`), or the merged set of all ranks (`merged`). `RunPartStore` shows one part as
an ordinary trial dir, with its snapshots in its checkpoint directories, so that everything that reads trial dirs reads
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ray_artifact_sync import layout
from ray_artifact_sync.errors import ArtifactNotFoundError
from ray_artifact_sync.manifest import FORMAT
from ray_artifact_sync.stores import ArtifactStore, StoredFile, open_store
from ray_artifact_sync.stores.base import Buffer, Files, Names
from ray_artifact_sync.trial_dir import TrialDir

ARTIFACTS = "artifacts"
MERGED = "merged"


def rank_part(rank: int) -> str:
    """The name of a rank's part."""
    return f"rank_{rank}"


def open_part(filesystem: Any, run_dir: str, part: str) -> RunPartDir:
    """A part of a run, to read or to write.

    Args:
        filesystem: What Ray gives as `storage_filesystem`.
        run_dir: The run's directory on it.
        part: `rank_part(...)` or `MERGED`.
    """
    run_dir = run_dir.rstrip("/")
    return part_of(open_store(filesystem, run_dir), run_dir.rpartition("/")[2], part)


def part_of(run: ArtifactStore, run_name: str, part: str) -> RunPartDir:
    """A part of a run.

    Args:
        run: Its root is the run's directory.
        run_name: The run directory's name.
        part: `rank_part(...)` or `MERGED`.
    """
    return RunPartDir(RunPartStore(run, run.below(f"{ARTIFACTS}/{part}"), part), f"{run_name}/{ARTIFACTS}/{part}")


class RunPartDir(TrialDir):
    """Reads one part of a run.

    Args:
        store: Shows it as a trial dir.
        name: Its snapshots carry it.
    """

    def __init__(self, store: RunPartStore, name: str) -> None:
        super().__init__(store, name)
        self.part_store = store

    def in_checkpoint(self, path: str) -> bool:
        """Whether a file is a snapshot: nothing else of a checkpoint is shown, and users name them as they like."""
        return layout.snapshot_token(path.rpartition("/")[2]) is not None


class RunPartStore(ArtifactStore):
    """One part of a run as the store of a trial dir.

    Args:
        run: The run's directory.
        artifacts: The part's directory below it.
        part: The part's name.
    """

    def __init__(self, run: ArtifactStore, artifacts: ArtifactStore, part: str) -> None:
        self.run = run
        self.artifacts = artifacts
        self.part = part
        self.description = artifacts.description
        self.can_append = artifacts.can_append
        self.min_append_size = artifacts.min_append_size
        self._checkpoint = ""

    @contextmanager
    def open_checkpoint(self, name: str) -> Iterator[None]:
        """Inside, `<name>/...` means the files of this checkpoint; before and after, artifacts of that name."""
        self._checkpoint = name
        try:
            yield
        finally:
            self._checkpoint = ""

    @property
    def can_precondition(self) -> bool | None:
        """See `ArtifactStore`."""
        return self.artifacts.can_precondition

    @can_precondition.setter
    def can_precondition(self, value: bool | None) -> None:
        self.artifacts.can_precondition = self.run.can_precondition = value

    def stat(self, path: str) -> StoredFile | None:
        """See `ArtifactStore.stat`."""
        store, real = self._route(path)
        return _named(store.stat(real), path)

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """See `ArtifactStore.list`. Of checkpoints, the part's snapshots only."""
        yield from self.artifacts.list(prefix)
        if not prefix:
            for name in self.list_dirs():
                yield from self.list_files(name)

    def list_dirs(self, prefix: str = "") -> Names:
        """See `ArtifactStore.list_dirs`; at the root, the run's directories."""
        if prefix:
            return self.artifacts.list_dirs(prefix)
        return [name for name in self.run.list_dirs() if name not in (ARTIFACTS, layout.STATE_DIR)]

    def list_files(self, prefix: str = "") -> Files:
        """See `ArtifactStore.list_files`; of a directory at the root, the part's snapshots in that checkpoint."""
        prefix = prefix.rstrip("/")
        if not prefix or "/" in prefix:
            return self.artifacts.list_files(prefix)
        found = self.run.list_files(self._snapshots(prefix))
        return [
            StoredFile(f"{prefix}/{name}", file.size, file.etag, file.mtime_ns)
            for file in found
            if layout.snapshot_token(name := file.path.rpartition("/")[2])
        ]

    def read_chunks(self, path: str, **options: Any) -> Iterator[Buffer]:
        """See `ArtifactStore.read_chunks`."""
        store, real = self._route(path)
        return store.read_chunks(real, **options)

    def put(self, path: str, data: Buffer | Iterable[Buffer], **options: Any) -> StoredFile:
        """See `ArtifactStore.put`."""
        store, real = self._route(path)
        stored = _named(store.put(real, data, **options), path)
        assert stored is not None
        return stored

    def append(self, path: str, offset: int, data: Iterable[Buffer], **options: Any) -> StoredFile:
        """See `ArtifactStore.append`."""
        return self.artifacts.append(path, offset, data, **options)

    def copy(self, source: str, target: str) -> None:
        """See `ArtifactStore.copy`. Within the part."""
        self.artifacts.copy(source, target)

    def delete(self, paths: Iterable[str]) -> None:
        """See `ArtifactStore.delete`."""
        here: list[str] = []
        in_run: list[str] = []
        for path in paths:
            store, real = self._route(path)
            (here if store is self.artifacts else in_run).append(real)
        if here:
            self.artifacts.delete(here)
        if in_run:
            self.run.delete(in_run)

    def make_dir(self, path: str) -> None:
        """See `ArtifactStore.make_dir`."""
        if path == self._checkpoint:
            self.run.make_dir(path)
        else:
            store, real = self._route(path)
            store.make_dir(real)

    def below(self, path: str) -> ArtifactStore:
        """See `ArtifactStore.below`. Within the part."""
        return self.artifacts.below(path)

    def begin_writing(self, token: str) -> None:
        """See `ArtifactStore.begin_writing`."""
        self.artifacts.begin_writing(token)

    def write_world_size(self, checkpoint: str, world_size: int) -> None:
        """Notes in a checkpoint how many ranks save it."""
        self.run.put(_ranks_path(checkpoint), json.dumps({"format": FORMAT, "world_size": world_size}).encode())

    def world_size_of(self, checkpoint: str) -> int | None:
        """How many ranks saved a checkpoint; None if it does not say."""
        try:
            found = json.loads(self.run.read(_ranks_path(checkpoint), limit=layout.MAX_NOTE_BYTES))["world_size"]
        except (ArtifactNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return found if type(found) is int and found > 0 else None

    def _route(self, path: str) -> tuple[ArtifactStore, str]:
        first, _, rest = path.partition("/")
        if rest and "/" not in rest and layout.snapshot_token(rest):
            return self.run, f"{self._snapshots(first)}/{rest}"
        if rest and first == self._checkpoint:
            return self.run, path
        return self.artifacts, path

    def _snapshots(self, checkpoint: str) -> str:
        return f"{checkpoint}/{layout.STATE_DIR}/{self.part}"


def _ranks_path(checkpoint: str) -> str:
    return f"{checkpoint}/{layout.STATE_DIR}/ranks.json"


def _named(file: StoredFile | None, path: str) -> StoredFile | None:
    return None if file is None else StoredFile(path, file.size, file.etag, file.mtime_ns)
