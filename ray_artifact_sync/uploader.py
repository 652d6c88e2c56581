"""`RemoteUploader`: uploads single files in the background and says what became of each. Works alone, without Ray.

Threads: each of up to `max_workers` daemon threads takes the next upload; in process mode, each of them talks to one
worker process. They are no `concurrent.futures` pool, because the interpreter joins the threads of those at its exit,
and one request that hangs would keep a training process from ending.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import pickle
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import ByteBudget, Deadline
from ray_artifact_sync.entries import validate_path
from ray_artifact_sync.errors import (
    ArtifactSyncError,
    ConfigurationError,
    FileChangedError,
    IncompleteSyncError,
    InvalidPathError,
    StagingError,
    StorageError,
    SyncTimeoutError,
)
from ray_artifact_sync.local_files import FileStat, open_regular
from ray_artifact_sync.stores import open_uri
from ray_artifact_sync.stores.base import ArtifactStore, StoredFile
from ray_artifact_sync.stores.posix import PosixStore, copy_data
from ray_artifact_sync.transfer import MEMORY_BUDGET, call_with_retries
from ray_artifact_sync.upload_worker import ProcessRunner, Runner, ThreadRunner, UploadRequest

logger = logging.getLogger(__name__)

DEFAULT_THREADS = 16
DEFAULT_PROCESSES = 2
DEFAULT_STAGED_BYTES = 8 * 1024**3

_IDLE_SECONDS = 10.0
"""A worker without work ends after so long; the next upload starts a new one."""
_CHECK_PATH = f"{layout.STATE_DIR}/upload-check"
_STAGING_PREFIX = "ray-artifact-sync-staging-"
_ABANDONED_SECONDS = 60.0
_UNFINISHED_SECONDS = 24 * 3600.0
"""So long nobody has written to a file that is still being written, on whichever machine."""


class RemoteUploader:
    """Uploads files in the background; each upload is a future.

    An upload is atomic: readers see the whole file or what was there before. Uploads to one remote path happen in the
    order in which they were asked for; those to different paths in any order. All methods may be called from any
    thread. A forked child cannot use its parent's uploader.

    Args:
        remote_dir: Where to: a URI, an absolute path, or a path on `storage_filesystem`.
        storage_filesystem: A pyarrow or fsspec file system; must be picklable with `executor="process"`.
        max_workers: Uploads at once; 16 threads or 2 processes by default.
        executor: `"thread"`, or `"process"`: uploads cost the calling process neither GIL nor memory; each worker takes
            about a second to start and 100 MB.
        num_attempts: Tries of each upload before it fails; only errors that may pass (503, resets) are tried again.
        stage: Copy each file aside first, so that the caller may change or delete it as soon as `upload_file_async`
            returns. The copy shares the file's blocks where the file system can (XFS, Btrfs). Without it, files must
            stay as they are until their upload is done; one that changes meanwhile fails, and is never sent mixed.
        staging_dir: Where the copies go; a new directory below it, `tempfile.gettempdir()` by default.
        max_staged_bytes: How much may be staged at once. `upload_file_async` waits until earlier uploads have made
            room; a file that is larger by itself is refused.

    Raises:
        StoragePermissionError: The credentials do not allow to write there.
        StorageError: Storage cannot be reached, or refused a first small write.
        ConfigurationError: Options that cannot work.
        StagingError: No directory for the copies can be made.

    Example:
        ```python
        from ray_artifact_sync import RemoteUploader

        with open("model.pt", "wb") as file:
            file.write(b"weights")
        with RemoteUploader("s3://bucket/run-1") as uploader:
            saved = [uploader.upload_file_async("step-10/model.pt", "model.pt", overwrite=True)]
            uploader.publish_after(saved, "latest", "step-10")
        assert saved[0].result().size == 7
        ```
    """

    def __init__(
        self,
        remote_dir: str | os.PathLike[str],
        storage_filesystem: Any = None,
        *,
        max_workers: int | None = None,
        executor: Literal["thread", "process"] = "thread",
        num_attempts: int = 3,
        stage: bool = True,
        staging_dir: str | os.PathLike[str] | None = None,
        max_staged_bytes: int = DEFAULT_STAGED_BYTES,
    ) -> None:
        if executor not in ("thread", "process"):
            raise ConfigurationError(f'executor must be "thread" or "process", not {executor!r}.')
        if max_workers is None:
            max_workers = DEFAULT_THREADS if executor == "thread" else DEFAULT_PROCESSES
        for name, value in (
            ("max_workers", max_workers),
            ("num_attempts", num_attempts),
            ("max_staged_bytes", max_staged_bytes),
        ):
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {value!r}.")
        store = open_uri(remote_dir, storage_filesystem)
        place = _pickled(remote_dir, storage_filesystem) if executor == "process" else b""
        _check_write_access(store, num_attempts)
        if isinstance(store, PosixStore):
            _sweep_unfinished(store.root)
        self.description = store.description
        self._num_attempts = num_attempts
        # What the crew holds must not hold the uploader: it would never be collected.
        budget, deadline = ByteBudget(MEMORY_BUDGET), Deadline(what="The upload")

        def make_runner() -> Runner:
            return ProcessRunner(place) if place else ThreadRunner(store, budget, deadline)

        self._crew = _Crew(max_workers, make_runner, store.description)
        self._staging = _Staging(staging_dir, max_staged_bytes, self._crew) if stage else None
        self._pid = os.getpid()
        self._pointers: dict[str, Future[StoredFile]] = {}
        self._finalizer = weakref.finalize(self, _abandon, self._pid, self._crew, self._staging, deadline)
        self._finalizer.atexit = False  # at exit, `_warn_at_exit` comes first, for all uploaders
        _open_uploaders.add(self)

    # --- uploads ----------------------------------------------------------------------------------

    def upload_file_async(
        self, remote_path: str, local_path: str | os.PathLike[str], overwrite: bool = False
    ) -> Future[StoredFile]:
        """Begins the upload of one file.

        What is wrong on this machine is raised here; what goes wrong in storage is raised by the future, and again by
        `check_workers` and `wait`.

        Args:
            remote_path: POSIX path below `remote_dir`.
            local_path: The file.
            overwrite: Replace a file that is there already. Otherwise the future raises `ArtifactExistsError` (a
                `FileExistsError`); an attempt that finds what an earlier attempt of the same upload left goes on.

        Returns:
            What was written (path, size in bytes, etag), once it is there. Cancelling works until the upload begins.

        Raises:
            FileNotFoundError: There is no such local file.
            StagingError: No room for the copy (`errno` is ENOSPC for a full disk); nothing is left behind.
            InvalidPathError: `remote_path` is absolute, leaves `remote_dir`, or is this library's own.
            ArtifactSyncError: The uploader is closed, or the file keeps changing while it is copied.
        """
        self._require_open()
        path = _check_remote_path(remote_path)
        source = os.path.abspath(os.fspath(local_path))
        staged: _StagedFile | None = None
        if self._staging is not None:
            staged = self._staging.copy(source)
            source, size = staged.path, staged.size
        else:
            fd = open_regular(source)
            size = os.fstat(fd).st_size
            os.close(fd)
        request = UploadRequest(path, source, size, overwrite, self._num_attempts)
        return self._crew.submit(_Task(request, self, staged))

    def publish_after(
        self, futures: Iterable[Future[Any]], remote_path: str, content: bytes | str
    ) -> Future[StoredFile]:
        """Writes a small file, such as `latest`, once all of some uploads are done; never if one of them failed.

        It replaces what is there. Two calls for the same path write in the order of the calls. No worker waits for the
        uploads, so that this cannot block with any number of them.

        Args:
            futures: What must have succeeded before; a cancelled one counts as failed.
            remote_path: POSIX path below `remote_dir`.
            content: All of it; text is encoded as UTF-8.

        Returns:
            Raises `ArtifactSyncError` if it was not written because an upload had failed.
        """
        self._require_open()
        path = _check_remote_path(remote_path)
        data = content.encode() if isinstance(content, str) else bytes(content)
        request = UploadRequest(path, data, len(data), overwrite=True, num_attempts=self._num_attempts)
        task = _Task(request, self)
        awaited = list(futures)
        earlier = self._pointers.get(path)
        self._crew.promise(task)
        self._pointers[path] = task.future
        _Gate(self._crew, task, awaited, earlier).watch()
        return task.future

    # --- what became of them ----------------------------------------------------------------------

    def check_workers(self) -> None:
        """Raises the first failure that `wait` has not reported yet; does not block.

        Raises:
            Exception: What an upload failed with.
        """
        failure = self._crew.first_failure()
        if failure is not None:
            raise failure

    def wait(self, timeout: float | None = None) -> None:
        """Waits for everything that was begun, then reports all failures at once (and forgets them).

        Args:
            timeout: Seconds.

        Raises:
            IncompleteSyncError: Some uploads failed, see `failures`; all others are there.
            SyncTimeoutError: The uploads go on.
            ConfigurationError: In a forked child, where nothing goes on.
        """
        self._require_own_process()
        if not self._crew.wait(timeout):
            raise SyncTimeoutError(
                f"{self._crew.unfinished} uploads to {self.description} did not end within {timeout:g} s."
            )
        failures = self._crew.take_failures()
        if failures:
            path, error = next(iter(failures.items()))
            raise IncompleteSyncError(
                f"{len(failures)} files could not be uploaded to {self.description}; the first: {path}: {error}",
                failures=failures,
            ) from error

    def wait_and_close(self) -> None:
        """Waits for everything that was begun, ends the workers, and reports all failures as `wait` does."""
        try:
            self.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Ends at once: uploads that have not begun are cancelled, those under way are not waited for.

        A worker process is ended; a thread finishes the request that it is in. May be called twice.
        """
        finalizer = self._finalizer.detach()  # called here: at exit, finalizers do nothing any more
        if finalizer is not None:
            _, end, args, _ = finalizer
            end(*args)
            _open_uploaders.discard(self)

    def __enter__(self) -> RemoteUploader:  # noqa: PYI034  (`Self` is newer than Python 3.10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait_and_close()
        elif issubclass(kind, Exception):
            try:
                self.wait_and_close()
            except IncompleteSyncError as failure:
                logger.error("%s", failure)  # noqa: TRY400  (the error of the body goes on)
        else:
            self.close()  # Ctrl-C: the user wants to leave

    def __getstate__(self) -> None:
        raise TypeError("A RemoteUploader holds threads of this process and cannot be pickled.")

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigurationError("This RemoteUploader was made in the parent process; make one here.")

    def _require_open(self) -> None:
        self._require_own_process()
        if not self._finalizer.alive:
            raise ArtifactSyncError(f"This uploader to {self.description} is closed.")


def _check_remote_path(path: str) -> str:
    validate_path(path)
    if layout.is_reserved(path):
        raise InvalidPathError(f"{path!r} belongs to ray-artifact-sync itself; choose another name.")
    return path


def _pickled(remote_dir: str | os.PathLike[str], storage_filesystem: Any) -> bytes:
    try:
        return pickle.dumps((os.fspath(remote_dir), storage_filesystem))
    except Exception as error:
        raise ConfigurationError(
            f"storage_filesystem cannot be sent to worker processes ({error}); use a URI, or executor='thread'."
        ) from None


def _check_write_access(store: ArtifactStore, num_attempts: int) -> None:
    """Writes a small file and takes it away again."""
    try:
        call_with_retries(
            lambda: store.put(_CHECK_PATH, b"ray-artifact-sync checks that it may write here.\n"),
            retries=num_attempts - 1,
            deadline=Deadline(),
            what="Checking the write access",
        )
    except StorageError as error:
        message = f"RemoteUploader cannot write to {store.description}: {error}"
        raise type(error)(message, **error._fields) from None
    try:
        store.delete([_CHECK_PATH])
    except StorageError as error:  # the right to write may come without the right to delete
        logger.debug("%s stays in %s: %s", _CHECK_PATH, store.description, error)


# --- the workers ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Task:
    """One upload on its way; while it is, it keeps its uploader from being collected."""

    request: UploadRequest
    owner: RemoteUploader
    staged: _StagedFile | None = None
    future: Future[StoredFile] = field(default_factory=Future)

    @property
    def path(self) -> str:
        return self.request.remote_path


class _Crew:
    """Up to `limit` daemon threads that upload what is queued. Does not know the uploader, which may be dropped."""

    def __init__(self, limit: int, make_runner: Callable[[], Runner], description: str) -> None:
        self.description = description
        self.changed = threading.Condition(threading.RLock())
        self._limit = limit
        self._make_runner = make_runner
        self._queue: deque[_Task] = deque()
        self._unfinished: set[_Task] = set()
        self._running: set[str] = set()
        self._failures: list[tuple[str, BaseException]] = []
        self._runners: dict[int, Runner] = {}
        self._threads = 0
        self._idle = 0
        self.closed = False

    @property
    def unfinished(self) -> int:
        """Uploads that are not done."""
        return len(self._unfinished)

    def runners(self) -> list[Runner]:
        """Those that live now."""
        with self.changed:
            return list(self._runners.values())

    def is_worker(self) -> bool:
        """Whether the calling thread is one of these workers (in a callback of a future)."""
        return threading.get_ident() in self._runners

    def promise(self, task: _Task) -> None:
        """Counts a task that is submitted later."""
        with self.changed:
            self._unfinished.add(task)

    def submit(self, task: _Task) -> Future[StoredFile]:
        """Queues a task, and starts a thread for it if all are busy."""
        with self.changed:
            if self.closed:
                if task.staged is not None:
                    task.staged.release()
                _cancel(task.future)
                self._unfinished.discard(task)
                return task.future
            self._unfinished.add(task)
            self._queue.append(task)
            if self._idle < len(self._queue) and self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._loop, name=f"artifact-upload-{self._threads}", daemon=True).start()
            self.changed.notify_all()
        return task.future

    def settle(self, task: _Task, stored: StoredFile | None, error: BaseException | None) -> None:
        """Ends a task: its copy goes, then its future says so, then the waiting ones are woken."""
        if task.staged is not None:
            task.staged.release()
        if error is not None:
            with self.changed:
                self._failures.append((task.path, error))
            task.future.set_exception(error)
        elif stored is not None:
            task.future.set_result(stored)
        with self.changed:
            self._running.discard(task.path)
            self._unfinished.discard(task)
            self.changed.notify_all()

    def first_failure(self) -> BaseException | None:
        """The first failure that was not taken yet."""
        with self.changed:
            return self._failures[0][1] if self._failures else None

    def take_failures(self) -> dict[str, BaseException]:
        """All failures since the last call, by remote path."""
        with self.changed:
            failures, self._failures = self._failures, []
        return dict(failures)

    def wait(self, timeout: float | None) -> bool:
        """Waits until all is done; whether it is."""
        with self.changed:
            return self.changed.wait_for(lambda: not self._unfinished, timeout)

    def close(self) -> None:
        """Cancels what has not begun, and lets the threads end."""
        with self.changed:
            self.closed = True
            cancelled, self._queue = list(self._queue), deque()
            self.changed.notify_all()
        for task in cancelled:
            _cancel(task.future)
            self.settle(task, None, None)

    def _loop(self) -> None:
        runner = self._make_runner()
        ident = threading.get_ident()
        with self.changed:
            self._runners[ident] = runner
        try:
            while (task := self._next()) is not None:
                self._run(runner, task)
        finally:
            with self.changed:
                self._runners.pop(ident, None)
            runner.close()

    def _next(self) -> _Task | None:
        """The first task whose path nobody uploads right now; None to end the thread."""
        give_up = time.monotonic() + _IDLE_SECONDS
        with self.changed:
            while True:
                for position, task in enumerate(self._queue):
                    if task.path not in self._running:
                        del self._queue[position]
                        self._running.add(task.path)
                        return task
                left = give_up - time.monotonic()
                if self.closed or left <= 0:
                    self._threads -= 1
                    return None
                self._idle += 1
                self.changed.wait(left)
                self._idle -= 1

    def _run(self, runner: Runner, task: _Task) -> None:
        if not task.future.set_running_or_notify_cancel():
            self.settle(task, None, None)
            return
        try:
            stored = runner.run(task.request)
        except BaseException as error:
            logger.debug("Uploading %s to %s failed: %s", task.path, self.description, error)
            self.settle(task, None, error)
        else:
            self.settle(task, stored, None)


def _cancel(future: Future[StoredFile]) -> None:
    if future.cancel():
        future.set_running_or_notify_cancel()  # wakes those who wait for it


class _Gate:
    """Holds a pointer back until all of some futures are done.

    Args:
        awaited: Must all have succeeded.
        earlier: The previous pointer to the same path: only its end is awaited.
    """

    def __init__(
        self, crew: _Crew, task: _Task, awaited: Collection[Future[Any]], earlier: Future[StoredFile] | None
    ) -> None:
        self._crew = crew
        self._task = task
        self._awaited = awaited
        self._all = [*awaited, *([earlier] if earlier is not None else [])]
        self._left = len(self._all)
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Begins."""
        if not self._all:
            self._open()
        for future in self._all:
            future.add_done_callback(self._done)

    def _done(self, _future: Future[Any]) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._open()

    def _open(self) -> None:
        failed = [error for future in self._awaited if (error := _error_of(future)) is not None]
        if not failed:
            self._crew.submit(self._task)
        elif not self._task.future.set_running_or_notify_cancel():
            self._crew.settle(self._task, None, None)
        else:
            message = (
                f"{self._task.path} was not written: {len(failed)} of the {len(self._awaited)} uploads before it "
                f"failed; the first: {failed[0]}"
            )
            self._crew.settle(self._task, None, ArtifactSyncError(message))


def _error_of(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError:
        return CancelledError("it was cancelled")


# --- staging -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _StagedFile:
    path: str
    size: int
    staging: _Staging

    def release(self) -> None:
        """Removes the copy."""
        with suppress(OSError):
            os.unlink(self.path)
        self.staging.give_back(self.size)


class _Staging:
    """Copies of files that wait for their upload, at most `limit` bytes of them, in a directory of their own."""

    def __init__(self, base: str | os.PathLike[str] | None, limit: int, crew: _Crew) -> None:
        self._limit = limit
        self._crew = crew
        self._used = 0
        self._count = 0
        parent = os.fspath(base) if base is not None else tempfile.gettempdir()
        try:
            _sweep(parent)
            self._dir = tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=parent)
            # Held while this process lives; the kernel lets go of it however it dies.
            self._lock = os.open(os.path.join(self._dir, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise StagingError(
                f"No staging directory can be made in {parent}: {error.strerror}. Choose another `staging_dir`, or "
                "pass `stage=False`.",
                errno=error.errno,
            ) from None

    def copy(self, source: str) -> _StagedFile:
        """Copies one version of a file; waits for room first.

        Raises:
            StagingError: It does not fit; nothing is left behind.
            FileChangedError: It changes all the time.
        """
        fd = open_regular(source)
        try:
            for _ in range(3):
                before = FileStat.of(os.fstat(fd))
                self._take(before.size, source)
                target = self._new_path()
                staged = _StagedFile(target, before.size, self)
                try:
                    _copy(fd, target)
                    unchanged = FileStat.of(os.fstat(fd)) == before and os.path.getsize(target) == before.size
                except OSError as error:
                    staged.release()
                    raise StagingError(
                        f"{source!r} ({before.size} bytes) cannot be copied to {self._dir}: {error.strerror}. Free "
                        "some space there, choose another `staging_dir`, or pass `stage=False`.",
                        errno=error.errno,
                        path=source,
                    ) from None
                except BaseException:
                    staged.release()
                    raise
                if unchanged:
                    return staged
                staged.release()
        finally:
            os.close(fd)
        raise FileChangedError(f"{source!r} keeps changing while it is copied.", path=source)

    def _take(self, size: int, source: str) -> None:
        if size > self._limit:
            raise StagingError(
                f"{source!r} has {size} bytes, more than may be staged at once (`max_staged_bytes={self._limit}`). "
                "Raise that, or pass `stage=False`.",
                path=source,
            )
        with self._crew.changed:
            if self._used + size > self._limit and self._crew.is_worker():
                raise StagingError(
                    "A callback of an upload cannot wait for room in the staging directory: it would hold up the "
                    "worker that makes the room.",
                    path=source,
                )
            self._crew.changed.wait_for(lambda: self._crew.closed or self._used + size <= self._limit)
            if self._crew.closed:
                raise ArtifactSyncError("The uploader was closed while the upload waited for room to be staged.")
            self._used += size

    def _new_path(self) -> str:
        with self._crew.changed:
            self._count += 1
            return os.path.join(self._dir, f"{self._count:08d}")

    def give_back(self, size: int) -> None:
        """Makes room."""
        with self._crew.changed:
            self._used -= size
            self._crew.changed.notify_all()

    def close(self) -> None:
        """Removes the directory; a request under way keeps the file that it has open."""
        shutil.rmtree(self._dir, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)


def _copy(source: int, target: str) -> None:
    os.lseek(source, 0, os.SEEK_SET)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        copy_data(source, descriptor)
    finally:
        os.close(descriptor)  # on network file systems, a full disk is reported here


def _sweep(parent: str) -> None:
    """Removes staging directories whose process died without a chance to do so."""
    for entry in _entries(parent):
        if not entry.name.startswith(_STAGING_PREFIX):
            continue
        with suppress(OSError):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime < _ABANDONED_SECONDS:
                continue  # perhaps made a moment ago, and not locked yet
            with _locked(os.path.join(entry.path, "lock")):
                shutil.rmtree(entry.path, ignore_errors=True)


def _sweep_unfinished(remote_dir: str) -> None:
    """Removes what uploaders that were killed had written of a file; object stores show nothing of it."""
    for folder in _entries(os.path.join(remote_dir, layout.TMP)):
        if not folder.name.startswith("free-"):
            continue  # a trial's, whose next attempt sees to it
        for entry in _entries(folder.path):
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _UNFINISHED_SECONDS:
                    os.unlink(entry.path)
                    os.rmdir(folder.path)  # unless there is more in it


def _entries(parent: str) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(parent) as entries:
        return list(entries)
    return []


@contextmanager
def _locked(path: str) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


# --- the end -------------------------------------------------------------------------------------


def _abandon(pid: int, crew: _Crew, staging: _Staging | None, deadline: Deadline) -> None:
    """Ends what an uploader started; does not wait. A forked child leaves alone what is its parent's."""
    if pid != os.getpid():
        return
    deadline.cancel()
    crew.close()
    for runner in crew.runners():
        if isinstance(runner, ProcessRunner):
            runner.close()
    if staging is not None:
        staging.close()


_open_uploaders: weakref.WeakSet[RemoteUploader] = weakref.WeakSet()


@atexit.register
def _warn_at_exit() -> None:
    for uploader in list(_open_uploaders):
        if uploader._pid != os.getpid():  # noqa: SLF001  (same module)
            continue
        unfinished = uploader._crew.unfinished  # noqa: SLF001
        if unfinished:
            logger.warning(
                "The interpreter ends with %d unfinished uploads to %s, which may be lost: call wait_and_close(), or "
                "use the RemoteUploader as a context manager.",
                unfinished,
                uploader.description,
            )
        uploader.close()
