"""The note that the driver leaves in a trial dir: which files there are its own although no callback declares them.

The driver writes it before it stores such a file; a session that finds it treats those paths as the driver's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable

from ray_artifact_sync import layout
from ray_artifact_sync.entries import Skip, validate_path
from ray_artifact_sync.errors import (
    ArtifactNotFoundError,
    FileChangedError,
    InvalidPathError,
    ManifestError,
    StorageError,
)
from ray_artifact_sync.local_files import ConsistentReader
from ray_artifact_sync.plan import parents
from ray_artifact_sync.stores.base import ArtifactStore

logger = logging.getLogger(__name__)

FORMAT = 1


class TakenPaths:
    """Paths of a trial dir that the driver writes. Immutable.

    Args:
        paths: Artifact paths.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self.paths = frozenset(paths)
        self._above = frozenset(parent for path in self.paths for parent in parents(path))

    def __bool__(self) -> bool:
        return bool(self.paths)

    def __contains__(self, path: object) -> bool:
        """Whether a worker's file at this path would be in the way of one of the driver's."""
        if not self.paths or not isinstance(path, str):
            return False
        return path in self.paths or path in self._above or not self.paths.isdisjoint(parents(path))

    def skip(self, path: str, is_dir: bool) -> Skip | None:
        """The `SkipRule`: a directory is fine where the driver has files below it."""
        taken = path in self.paths if is_dir else path in self
        return Skip(path, reason(path), "owned") if taken else None


def reason(path: str) -> str:
    """Why a worker's file is not stored."""
    return (
        f"the driver writes {path} of this trial too (a callback does, without declaring it), and the driver's version "
        "stays"
    )


def read_note(store: ArtifactStore) -> frozenset[str]:
    """The paths that the note in a trial dir names; none if there is no note.

    Raises:
        StorageError: It could not be read.
    """
    try:
        data = store.read(layout.DRIVER_FILES, limit=layout.MAX_LIST_BYTES)
    except ArtifactNotFoundError:
        return frozenset()
    except ManifestError:
        data = b""
    try:
        body = json.loads(data)
        if body["format"] != FORMAT or body["kind"] != "driver_files":
            raise ValueError("it has another format")  # noqa: TRY301  (one answer to all that can be wrong)
        return frozenset(validate_path(path) for path in body["files"])
    except (ValueError, KeyError, TypeError, RecursionError, InvalidPathError) as error:
        logger.warning(
            "%s/%s is damaged and left out (%s); what the driver writes is known only where a callback declares it.",
            store.description,
            layout.DRIVER_FILES,
            error,
        )
        return frozenset()


def write_note(store: ArtifactStore, paths: Iterable[str]) -> None:
    """Leaves the note. Atomic."""
    body = {"format": FORMAT, "kind": "driver_files", "files": sorted(paths)}
    store.put(layout.DRIVER_FILES, json.dumps(body, ensure_ascii=False).encode())


def save_version(  # noqa: PLR0917  (one caller)
    store: ArtifactStore, local_path: str, path: str, size: int, digest: str, etag: str | None, target: str
) -> bool:
    """Preserves a worker's version of a path that the driver writes now.

    The driver preserves what it finds after it has left its note; this is for what a worker stored since.

    Args:
        store: The trial dir.
        local_path: Where the worker may still have it.
        path: Where the worker stored it.
        size: Its bytes: the first so many of what either place holds.
        digest: Its BLAKE3.
        etag: Of what the worker stored.
        target: Where to.

    Returns:
        Whether it is there now.
    """
    try:
        store.put(target, ConsistentReader(local_path, size=size, expect_digest=digest), size_hint=size)
    except StorageError:
        raise
    except (OSError, FileChangedError) as error:
        logger.debug("%s is not preserved from this node: %s", path, error)
    else:
        return True
    if not _is_still(store, path, etag):
        return False
    store.copy(path, target)
    if _is_still(store, path, etag):  # so it was when it was copied
        return True
    store.delete([target])
    return False


def _is_still(store: ArtifactStore, path: str, etag: str | None) -> bool:
    present = store.stat(path)
    return present is not None and etag is not None and present.etag == etag
