"""One upload, and where it runs: in the calling thread, or in a worker process of its own.

A worker process is a fresh interpreter (never a fork: threads, locks and CUDA contexts of a training process do not
survive one), started without importing the caller's `__main__`. It ends when its parent does, however that dies.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

from blake3 import blake3

from ray_artifact_sync.concurrency import ByteBudget, Deadline
from ray_artifact_sync.errors import (
    ArtifactExistsError,
    ArtifactNotFoundError,
    ArtifactSyncError,
    PreconditionFailedError,
    StorageError,
    WorkerDiedError,
)
from ray_artifact_sync.local_files import ConsistentReader
from ray_artifact_sync.stores import open_uri
from ray_artifact_sync.stores.base import ArtifactStore, StoredFile
from ray_artifact_sync.transfer import LARGE_FILE_WEIGHT, MEMORY_BUDGET, SMALL_FILE, call_with_retries

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5
"""How often a worker looks whether its parent lives (an idle one is told at once, by its connection)."""
_POLL_SECONDS = 1.0
_START = "import sys; sys.path[:] = {path!r}; from ray_artifact_sync.upload_worker import serve; serve({fd}, {parent})"


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """What to upload.

    Attributes:
        remote_path: Where, relative to the store's root.
        source: A local path, or the content itself.
        size: Bytes, as far as known; decides how much memory is set aside.
        overwrite: Whether a file that is there already may be replaced.
        num_attempts: Tries in all.
    """

    remote_path: str
    source: str | bytes
    size: int
    overwrite: bool
    num_attempts: int


class Runner(Protocol):
    """Makes uploads for one worker thread, one after the other."""

    def run(self, request: UploadRequest) -> StoredFile:
        """Uploads; raises what went wrong."""

    def close(self) -> None:
        """Ends what the runner started."""


@dataclass(slots=True)
class Upload:
    """One request on its way through its attempts.

    Attributes:
        store: Where to.
        request: What.
        sent: Digests of the contents that earlier attempts sent to the end: only these can be there because of us.
    """

    store: ArtifactStore
    request: UploadRequest
    sent: set[str] = field(default_factory=set)

    def run(self, budget: ByteBudget, deadline: Deadline) -> StoredFile:
        """Uploads, with retries.

        Raises:
            ArtifactExistsError: Somebody else's file is there, and `overwrite` is False.
            StorageError: The last attempt failed, or one with an error that a retry does not help against.
        """
        request = self.request
        with budget.hold(request.size if request.size <= SMALL_FILE else LARGE_FILE_WEIGHT):
            return call_with_retries(
                self.attempt,
                retries=request.num_attempts - 1,
                deadline=deadline,
                what=f"Uploading {request.remote_path}",
            )

    def attempt(self) -> StoredFile:
        """One try."""
        if self.request.overwrite:
            return self.send(if_absent=False)
        # Asked in any case: not every store enforces `if_absent`, and one that does cannot tell ours from others'.
        present = self.store.stat(self.request.remote_path)
        if present is not None:
            self.require_ours(present)
            return self.send(if_absent=False)
        try:
            return self.send(if_absent=True)
        except PreconditionFailedError:
            # Somebody else was faster, or the client itself tried again after an answer that was lost.
            present = self.store.stat(self.request.remote_path)
            if present is None:
                raise
            self.require_ours(present)
            return present

    def send(self, *, if_absent: bool) -> StoredFile:
        """Puts the content there."""
        path, source = self.request.remote_path, self.request.source
        if isinstance(source, bytes):
            self.sent.add(blake3(source).hexdigest())
            return self.store.put(path, source, if_absent=if_absent)
        reader = ConsistentReader(source)
        try:
            if self.request.size <= SMALL_FILE:
                stored = self.store.put(path, reader.read_all(), if_absent=if_absent)
            else:
                stored = self.store.put(path, reader, if_absent=if_absent, size_hint=self.request.size)
        finally:
            if reader.hashed is not None:
                self.sent.add(reader.hashed.digest)
        if reader.hashed is not None and stored.size != reader.hashed.stat.size:
            raise StorageError(
                f"{path}: {reader.hashed.stat.size} bytes were sent, but {self.store.description} holds {stored.size}.",
                retryable=True,
                path=path,
            )
        return stored

    def require_ours(self, present: StoredFile) -> None:
        """Raises unless an earlier attempt of this very upload left what is there."""
        if self.sent:
            hasher = blake3()
            with suppress(ArtifactNotFoundError):
                for chunk in self.store.read_chunks(present.path):
                    hasher.update(chunk)
            if hasher.hexdigest() in self.sent:
                return
        raise ArtifactExistsError(
            f"{present.path!r} is in {self.store.description} already ({present.size} bytes); pass `overwrite=True` to "
            "replace it.",
            path=present.path,
        )


class ThreadRunner:
    """Uploads in the calling thread."""

    def __init__(self, store: ArtifactStore, budget: ByteBudget, deadline: Deadline) -> None:
        self._store = store
        self._budget = budget
        self._deadline = deadline

    def run(self, request: UploadRequest) -> StoredFile:
        """See `Runner.run`."""
        return Upload(self._store, request).run(self._budget, self._deadline)

    def close(self) -> None:
        """Does nothing."""


class ProcessRunner:
    """Uploads in one worker process, which is started when it is needed, and again when it died.

    Args:
        place: Pickled `(remote_dir, storage_filesystem)`: the worker opens its own store.
    """

    def __init__(self, place: bytes) -> None:
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while there is none."""
        return self._process.pid if self._process is not None else None

    def run(self, request: UploadRequest) -> StoredFile:
        """See `Runner.run`.

        Raises:
            WorkerDiedError: The process ended in the middle; the next request gets a new one.
        """
        try:
            stored, error = self._answer(self._begin(request))
        except (EOFError, OSError):
            raise self._died(request) from None
        if error is not None:
            raise error
        assert stored is not None
        return stored

    def _begin(self, request: UploadRequest) -> Connection:
        """Hands a request over; one that a worker did not take (it died idle) goes to a new worker."""
        with suppress(EOFError, OSError):
            if self._connection is not None:
                self._connection.send(request)
                self._receive(self._connection)
                return self._connection
        self.close()
        self._start()
        assert self._connection is not None
        self._connection.send(request)
        self._receive(self._connection)
        return self._connection

    def _start(self) -> None:
        ours, theirs = Pipe()
        try:
            code = _START.format(path=sys.path, fd=theirs.fileno(), parent=os.getpid())
            self._process = subprocess.Popen(  # noqa: S603  (this very interpreter)
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
            )
        finally:
            theirs.close()
        self._connection = ours
        with suppress(OSError):  # a worker that died at once is found by the next request
            ours.send_bytes(self._place)

    def _answer(self, connection: Connection) -> tuple[StoredFile | None, BaseException | None]:
        answer: tuple[StoredFile | None, BaseException | None] = self._receive(connection)
        return answer

    def _receive(self, connection: Connection) -> Any:
        while not connection.poll(_POLL_SECONDS):
            if self._process is None or self._process.poll() is not None:
                raise EOFError
        return connection.recv()

    def _died(self, request: UploadRequest) -> WorkerDiedError:
        process = self._process
        code = None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(5)
        self.close()
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        return WorkerDiedError(
            f"The worker process {how} while it uploaded {request.remote_path!r}. The file may or may not be there; "
            "upload it again.",
            path=request.remote_path,
        )

    def close(self) -> None:
        """Ends the worker process."""
        connection, self._connection = self._connection, None
        process, self._process = self._process, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()  # it is idle, or its upload is not wanted any more: stores publish all or nothing
            process.wait()


# --- in the worker process -----------------------------------------------------------------------


def serve(fd: int, parent: int) -> None:
    """The life of a worker process: answers requests until its parent hangs up or dies.

    Args:
        fd: Descriptor of its end of the connection.
        parent: Process id of its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()
    connection = Connection(fd)
    with suppress(EOFError, OSError):
        place = connection.recv_bytes()
        store: ArtifactStore | None = None
        budget = ByteBudget(MEMORY_BUDGET)
        while True:
            request = connection.recv()
            connection.send(None)  # it is ours now: if this process dies, it may have been uploaded
            try:
                store = store or open_uri(*pickle.loads(place))  # noqa: S301  (from our parent)
                answer: tuple[Any, BaseException | None] = (Upload(store, request).run(budget, Deadline()), None)
            except Exception as error:
                answer = (None, _portable(error))
            connection.send(answer)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def _portable(error: Exception) -> BaseException:
    """The error, or what can be said of it if it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  (our own bytes)
    except Exception:
        return ArtifactSyncError(f"{type(error).__name__}: {error}")
    return error
