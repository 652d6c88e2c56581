"""Sessions without Ray, their violent ends, and stores that fail or die at a chosen operation."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.errors import StorageError
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.session import TrialArtifacts
from ray_artifact_sync.stores.base import ArtifactStore


def open_session(working_dir, store, token, *, trial="trial", registered=None, set_aside=True, **options):
    """A begun session that does nothing in the background, unless told so."""
    options = {"sync_period": 3600.0, "predecessor_wait": 0.2, "retries": 2, "sync_timeout": 60.0, **options}
    session = TrialArtifacts(
        str(working_dir),
        store,
        trial=trial,
        token=layout.make_token(token),
        options=SyncOptions(**options),
        registered_checkpoint=registered,
    )
    session.begin(set_aside=set_aside)
    return session


def abandon(session) -> None:
    """What `kill -9` leaves of a session: nothing flushed, no lock held."""
    session._stop_ticking.set()
    session._thread.close()
    session._working_dir.end()


def save(session, name: str, files=None, meanwhile=lambda: None) -> bool:
    """Commits a checkpoint whose own files go through the engine, after `meanwhile`."""

    def upload(engine) -> None:
        meanwhile()
        for path, data in (files or {"model.bin": b"model of " + name.encode()}).items():
            engine.put(f"{name}/{path}", data, Deadline())

    return session.commit_checkpoint(name, upload)


def read_tree(root) -> dict[str, bytes | None]:
    """Artifact path to bytes of a working dir, None for an empty directory."""
    tree: dict[str, bytes | None] = {}
    for folder, dirs, files in os.walk(root):
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else f"{relative}/"
        if not prefix and layout.STATE_DIR in dirs:
            dirs.remove(layout.STATE_DIR)
        if prefix and not dirs and not files:
            tree[relative] = None
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                tree[prefix + name] = file.read()
    return tree


class Killed(BaseException):
    """The process ends here."""


class WrappedStore(ArtifactStore):
    """Calls `around(verb, path, act)` for each operation; the default just acts."""

    def __init__(self, inner: ArtifactStore) -> None:
        self.inner = inner
        self.description = inner.description
        self.can_append = inner.can_append
        self.min_append_size = inner.min_append_size
        self.can_fence = inner.can_fence

    @property
    def can_precondition(self):
        return self.inner.can_precondition

    @can_precondition.setter
    def can_precondition(self, value):
        self.inner.can_precondition = value

    def around(self, verb: str, path: str, act: Callable):
        return act()

    def stat(self, path):
        return self.around("stat", path, lambda: self.inner.stat(path))

    def list(self, prefix=""):
        return iter(self.around("list", prefix, lambda: list(self.inner.list(prefix))))

    def list_dirs(self, prefix=""):
        return self.around("list_dirs", prefix, lambda: self.inner.list_dirs(prefix))

    def list_files(self, prefix=""):
        return self.around("list_files", prefix, lambda: self.inner.list_files(prefix))

    def read_chunks(self, path, **options):
        return self.around("read", path, lambda: self.inner.read_chunks(path, **options))

    def put(self, path, data, **options):
        return self.around("put", path, lambda: self.inner.put(path, data, **options))

    def append(self, path, offset, data, **options):
        return self.around("append", path, lambda: self.inner.append(path, offset, data, **options))

    def copy(self, source, target):
        return self.around("copy", target, lambda: self.inner.copy(source, target))

    def delete(self, paths):
        paths = list(paths)
        return self.around("delete", paths[0] if paths else "", lambda: self.inner.delete(paths))

    def make_dir(self, path):
        return self.around("make_dir", path, lambda: self.inner.make_dir(path))

    def begin_writing(self, token):
        return self.around("begin_writing", token, lambda: self.inner.begin_writing(token))


WRITES = frozenset(("put", "append", "copy", "delete"))


class FaultyStore(WrappedStore):
    """Dies or fails at the n-th write after `arm`.

    With `kill`, nothing works from then on (the process is dead); otherwise one write fails. `landed` says whether the
    write at which it happens still takes effect; an append and a batch of deletions then get half of the way.
    """

    def __init__(self, inner: ArtifactStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._countdown: int | None = None
        self._kill = self._landed = self._dead = False
        self._retryable = False
        self.fired = False

    def arm(self, countdown: int, *, kill: bool, landed: bool, retryable: bool = False) -> None:
        self._countdown, self._kill, self._landed, self._retryable = countdown, kill, landed, retryable
        self.fired = False

    def disarm(self) -> None:
        self._countdown = None

    def around(self, verb, path, act):
        if self._dead:
            raise Killed
        if verb not in WRITES or self._countdown is None or path.startswith(f"{layout.JOURNAL}/"):
            return act()  # the journal is written when there is time for it: at no fixed place in the order
        with self._lock:
            self._countdown -= 1
            fires = self._countdown < 0
            if fires:
                self._countdown = None
        if not fires:
            return act()
        self.fired = True
        self._dead = self._kill
        if self._landed:
            act()
        if self._kill:
            raise Killed
        raise StorageError(f"injected at {verb} {path}", retryable=self._retryable)

    def append(self, path, offset, data, **options):
        def half():
            chunks = b"".join(bytes(chunk) for chunk in data)
            return self.inner.append(path, offset, [chunks[: len(chunks) // 2]])

        will_fire = self._countdown == 0
        whole = lambda: self.inner.append(path, offset, data, **options)  # noqa: E731
        return self.around("append", path, half if will_fire else whole)

    def delete(self, paths):
        paths = list(paths)
        some = paths[: len(paths) // 2] if self._countdown == 0 else paths
        return self.around("delete", paths[0] if paths else "", lambda: self.inner.delete(some))
