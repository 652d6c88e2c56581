"""Uploads a checkpoint's own files through the transfer engine, so that a refused request is an error."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactSyncError,
    IncompleteSyncError,
    StorageError,
    SyncTimeoutError,
)
from ray_artifact_sync.local_files import ConsistentReader
from ray_artifact_sync.plan import PathState
from ray_artifact_sync.progress import TransferProgress
from ray_artifact_sync.stores.base import ArtifactStore
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.transfer import TransferEngine

logger = logging.getLogger(__name__)

_ANYTHING = PathState()
"""Checkpoint files replace whatever a crashed attempt left at their paths."""


def upload_checkpoint(source: ArtifactStore, engine: TransferEngine, name: str, deadline: Deadline) -> int:
    """Copies all files of a checkpoint into the trial dir.

    Files of this library (a snapshot in a restored directory that is reported again) are left out. Atomic for each
    file, not for the checkpoint: Ray registers it only after this returns.

    Args:
        source: The checkpoint as the user wrote it, usually a local temporary directory.
        engine: Of the trial dir.
        name: Checkpoint dir name.
        deadline: Ends the work.

    Returns:
        Bytes uploaded.

    Raises:
        ArtifactConflictError: A newer attempt took over.
        IncompleteSyncError: Some files were refused, or changed while they were read. There is no checkpoint then.
        SyncTimeoutError: The deadline passed.
    """
    files = list(_local_files(source.root) if isinstance(source, PosixStore) else _stored_files(source))
    failures: dict[str, BaseException] = {}
    progress = TransferProgress(f"{name} of {engine.what}", files=len(files), bytes=sum(file.size for file in files))

    def work(file: _SourceFile) -> None:
        try:
            file.send(engine, f"{name}/{file.path}", deadline, progress.bytes_done)
            progress.file_done()
        except (ArtifactConflictError, SyncTimeoutError):
            raise
        except (ArtifactSyncError, OSError) as error:
            failures[file.path] = error

    engine.store.make_dir(name)
    if isinstance(source, PosixStore):
        for path in _empty_dirs(source.root):
            engine.store.make_dir(f"{name}/{path}")
    with engine.watched(progress):
        run_all(sorted(files, key=lambda file: -file.size), work, workers=engine.max_concurrency, deadline=deadline)
    if failures:
        path, error = next(iter(failures.items()))
        raise IncompleteSyncError(
            f"Checkpoint {name} was not saved: {len(failures)} of its {len(files)} files could not be written to "
            f"{engine.store.description}; the first: {path}: {error}",
            failures=failures,
        ) from error
    return sum(file.size for file in files)


@dataclass(frozen=True, slots=True)
class _SourceFile:
    path: str
    size: int

    def send(self, engine: TransferEngine, target: str, deadline: Deadline, count: Callable[[int], None]) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _LocalFile(_SourceFile):
    local_path: str

    def send(self, engine: TransferEngine, target: str, deadline: Deadline, count: Callable[[int], None]) -> None:
        engine.put_file(target, ConsistentReader(self.local_path), self.size, _ANYTHING, deadline, count=count)


@dataclass(frozen=True, slots=True)
class _StoredFile(_SourceFile):
    store: ArtifactStore

    def send(self, engine: TransferEngine, target: str, deadline: Deadline, count: Callable[[int], None]) -> None:
        stored = engine.call(
            f"Copying {self.path}",
            lambda: engine.store.put(target, self.store.read_chunks(self.path), size_hint=self.size),
            deadline,
        )
        count(stored.size)
        if stored.size != self.size:
            raise StorageError(f"{target} has {stored.size} bytes instead of {self.size}.")


def _is_ours(path: str) -> bool:
    return layout.is_reserved(path) or layout.snapshot_token(path) is not None


def _local_files(root: str) -> Iterator[_LocalFile]:
    """All files, symlinks followed (as Ray's own upload does)."""
    for directory, path in _walk(root):
        for name in os.listdir(directory):
            local_path = os.path.join(directory, name)
            file_path = f"{path}/{name}" if path else name
            if _is_ours(file_path) or os.path.isdir(local_path):
                continue
            if os.path.isfile(local_path):
                yield _LocalFile(file_path, os.path.getsize(local_path), local_path)
            else:
                logger.warning(
                    "%s of a checkpoint is no regular file (a dangling link, a pipe?): left out.", local_path
                )


def _empty_dirs(root: str) -> Iterator[str]:
    for directory, path in _walk(root):
        if path and not os.listdir(directory):
            yield path


def _walk(root: str) -> Iterator[tuple[str, str]]:
    """Every directory and its path. One that two links lead to is there twice; one that contains itself is not."""
    pending: list[tuple[str, str, frozenset[str]]] = [(root, "", frozenset())]
    while pending:
        directory, path, above = pending.pop()
        real = os.path.realpath(directory)
        if real in above:
            continue
        yield directory, path
        for name in os.listdir(directory):
            child = os.path.join(directory, name)
            child_path = f"{path}/{name}" if path else name
            if os.path.isdir(child) and not _is_ours(child_path):
                pending.append((child, child_path, above | {real}))


def _stored_files(source: ArtifactStore) -> Iterator[_StoredFile]:
    for file in source.list():
        if not _is_ours(file.path):
            yield _StoredFile(file.path, file.size, source)
