"""Carries out a plan: preserve, remove, then transfer, each step bounded, retried and reported; commits nothing.

Threads: the caller's thread waits; up to `max_concurrency` daemon threads each take the next operation. A failure of
one file does not stop the others. Before every request that changes storage, `before_write` is asked: it raises when
the writer was replaced or the deadline has passed, so that a call that wakes up late does nothing more. Large files
ask again before each chunk. A request that hangs beyond its deadline keeps its path: no other is sent there until it
returns, since it could land after that one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import tenacity

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import ByteBudget, Deadline, Pacer, run_all
from ray_artifact_sync.entries import Append, CopyStored, FileEntry, Preserve, Remove, Skip, SyncPlan, Transfer, Upload
from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactNotFoundError,
    ArtifactSyncError,
    CannotAppendError,
    FileChangedError,
    InvalidPathError,
    PathTakenError,
    PreconditionFailedError,
    StorageError,
    SyncTimeoutError,
)
from ray_artifact_sync.local_files import ConsistentReader, HashedFile
from ray_artifact_sync.plan import PathState
from ray_artifact_sync.progress import TransferProgress, Watcher, counted, no_count, watched_by
from ray_artifact_sync.stores.base import ArtifactStore, StoredFile
from ray_artifact_sync.trial_dir import CONFLICT_TRIES

logger = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 64
DEFAULT_RETRIES = 5
SMALL_FILE = 1024 * 1024
"""Files up to this many bytes are read whole before they are sent: one request, and no part of a changed file."""
MEMORY_BUDGET = 48 * 1024 * 1024
LARGE_FILE_WEIGHT = 24 * 1024 * 1024
"""What one streamed file counts for in the budget: its parts in flight."""

Result = TypeVar("Result")


def is_retryable(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(error, StorageError) and error.retryable


def call_with_retries(
    call: Callable[[], Result],
    *,
    retries: int,
    deadline: Deadline,
    what: str,
    before: Callable[[], None] | None = None,
    on_retry: Callable[[], None] | None = None,
) -> Result:
    """Calls until it succeeds, with exponential backoff and full jitter (Brooker, AWS Architecture Blog 2015).

    Args:
        call: What to do; only errors that say so are tried again.
        retries: Further tries after the first.
        deadline: No try begins after it.
        what: For the log.
        before: Called before each try; what it raises ends the loop.
        on_retry: Called before each further try.
    """

    def log(state: tenacity.RetryCallState) -> None:
        if on_retry is not None:
            on_retry()
        error = state.outcome.exception() if state.outcome else None
        logger.info("%s failed (%s); trying again (%d of %d).", what, error, state.attempt_number, retries)

    def attempt() -> Result:
        deadline.check()
        if before is not None:
            before()
        return call()

    # The first try is made here: the machinery for the others costs as much as sending a small file.
    try:
        return attempt()
    except Exception as error:
        if retries == 0 or not is_retryable(error):
            raise
        failed = [error]

    def attempt_again() -> Result:
        if failed:
            raise failed.pop()  # the first try, as far as counting and waiting go
        return attempt()

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_retryable),
        stop=tenacity.stop_after_attempt(retries + 1),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=15),
        sleep=deadline.sleep,
        before_sleep=log,
        reraise=True,
    )(attempt_again)


class SharedPaths(Protocol):
    """Paths that somebody else may write, too, for a writer who replaces what is there but must not lose it."""

    def __contains__(self, path: object) -> bool:
        """Whether a path is one of them."""

    def before_replacing(self, path: str) -> None:
        """Is told that a path holds what this writer did not leave there, before that is replaced.

        Raises:
            StorageError: It could not be preserved; it is not replaced then.
        """


@dataclass(slots=True)
class TransferResult:
    """What a run did.

    Attributes:
        entries: Artifact path to the entry that landed.
        states: What paths hold now, where that changed; None for nothing.
        preserved: Digests kept as objects by this run.
        hashed: What was learned about local files.
        skips: Files that vanished meanwhile.
        changed: Files that were written meanwhile: plan them again.
        failures: Artifact path to the error that stopped it.
        sent: Artifact path to the content bytes sent.
    """

    entries: dict[str, FileEntry] = field(default_factory=dict)
    states: dict[str, PathState | None] = field(default_factory=dict)
    preserved: set[str] = field(default_factory=set)
    hashed: dict[str, HashedFile] = field(default_factory=dict)
    skips: list[Skip] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    failures: dict[str, BaseException] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)


class TransferEngine:
    """Runs plans against one store.

    Args:
        store: Where to.
        token: The attempt under which versions are preserved.
        max_concurrency: Requests in flight.
        retries: Further tries of a request that may succeed later.
        before_write: Called before each request that changes storage.
        confirm_writer: Called after a refused precondition: raises if somebody else may write now.
        confirm_path: Called with a path that holds something else than this writer left there: raises
            `PathTakenError` if it must stay. Noticed where the store has preconditions, and on POSIX by a look.
        shared: For a writer that is not the only one, in the place of the other two: where it must not be alone.
        watcher: Shows the progress of what takes long.
        what: What is transferred, for people: the trial.

    Attributes:
        requests: Writes of files so far, tries included.
        retries_made: Requests so far that were tried again.
    """

    def __init__(
        self,
        store: ArtifactStore,
        *,
        token: str = "",
        max_concurrency: int = DEFAULT_CONCURRENCY,
        retries: int = DEFAULT_RETRIES,
        before_write: Callable[[], None] | None = None,
        confirm_writer: Callable[[], None] | None = None,
        confirm_path: Callable[[str], None] | None = None,
        shared: SharedPaths | None = None,
        watcher: Watcher | None = None,
        what: str = "Files",
    ) -> None:
        self.store = store
        self.what = what
        self.max_concurrency = max_concurrency
        self.retries = retries
        self.requests = self.retries_made = 0
        self._token = token
        self._before_write = before_write
        self._confirm_writer = confirm_writer
        self._confirm_path = confirm_path if shared is None else shared.before_replacing
        self._shared = shared
        self._watcher = watcher
        self._budget = ByteBudget(MEMORY_BUDGET)
        self._writing: set[str] = set()
        self._copied: set[str] = set()
        self._lock = threading.Lock()

    def run(
        self,
        plan: SyncPlan,
        *,
        root: str,
        states: Mapping[str, PathState],
        deadline: Deadline,
        sources: Mapping[str, str] | None = None,
        set_aside: Collection[str] = (),
        result: TransferResult | None = None,
        pacer: Pacer | None = None,
    ) -> TransferResult:
        """Carries out a plan.

        Args:
            plan: What to do.
            root: Local directory that the paths are relative to.
            states: What the paths hold (for conditional writes).
            deadline: Ends the work.
            sources: Artifact path to another local file to send in its place (a staged copy).
            set_aside: Paths that are copied aside before they are removed.
            result: Where to record what happens, for a caller that needs it also when this raises.
            pacer: Slows the small files down.

        Returns:
            What happened; failures of single files are in it.

        Raises:
            ArtifactConflictError: A newer attempt took over; nothing more was written.
            SyncTimeoutError: The deadline passed.
        """
        job = _Job(self, states, root, sources or {}, set_aside, deadline, result or TransferResult(), pacer)
        result = job.result
        job.progress = TransferProgress(
            self.what, files=len(plan.transfers), bytes=sum(bytes_to_send(op) for op in plan.transfers)
        )
        try:
            with self.watched(job.progress):
                job.each(plan.preserves, job.preserve)
                job.each([op for op in plan.removes if op.path not in result.failures], job.remove)
                # Large files first: the longest transfer then does not begin last.
                transfers = sorted(plan.transfers, key=lambda op: -op.size)
                job.each([op for op in transfers if not job.blocked(op.path)], job.transfer)
        finally:
            job.close()
        return result

    def watched(self, progress: TransferProgress) -> AbstractContextManager[object]:
        """A block during which the watcher, if there is one, looks at the progress."""
        return watched_by(self._watcher, progress)

    def call(self, what: str, call: Callable[[], Result], deadline: Deadline, *, path: str = "") -> Result:
        """One request that changes storage, with retries and the writer's check.

        Args:
            what: For the log.
            call: The request.
            deadline: No try begins after it.
            path: What it writes; no two requests write there at once.
        """

        def alone() -> Result:
            with self._alone(path):
                return call()

        return call_with_retries(
            alone if path else call,
            retries=self.retries,
            deadline=deadline,
            what=what,
            before=self._before_write,
            on_retry=self._note_retry,
        )

    def copy_landed(self, target: str) -> None:
        """Says that nothing is open about a copy any more."""
        with self._lock:
            self._copied.discard(target)

    def tries_again(self, target: str) -> bool:
        """Whether a copy to this path was begun before, of which nobody knows whether it landed."""
        with self._lock:
            again = target in self._copied
            self._copied.add(target)
        return again

    def _note_retry(self) -> None:
        with self._lock:
            self.retries_made += 1

    @contextmanager
    def _alone(self, path: str) -> Iterator[None]:
        with self._lock:
            if path in self._writing:
                raise StorageError(
                    f"An earlier request to write {path!r} hangs still; nothing is sent there until it returns, since "
                    "it could overwrite that.",
                    retryable=True,
                    path=path,
                )
            self._writing.add(path)
            self.requests += 1
        try:
            yield
        finally:
            with self._lock:
                self._writing.discard(path)

    def fenced(self, chunks: Iterable[bytes], deadline: Deadline, count: Callable[[int], None]) -> Iterator[bytes]:
        """The chunks, for as long as this is the writer and in time: a stopped process that goes on ends here."""
        for chunk in chunks:
            deadline.check()
            if self._before_write is not None:
                self._before_write()
            yield chunk
            count(len(chunk))

    def put(self, path: str, data: bytes, deadline: Deadline) -> StoredFile:
        """Writes one small file, whatever is there."""
        return self.call(f"Writing {path}", lambda: self.store.put(path, data), deadline, path=path)

    def budget_for(self, size: int) -> int:
        """What a file counts for in the memory budget, in bytes."""
        return size if size <= SMALL_FILE else min(2 * size, LARGE_FILE_WEIGHT)

    def is_guarded(self, path: str) -> bool:
        """Whether what a path holds is looked at before it is replaced, where the store makes that possible."""
        return self._confirm_writer is not None if self._shared is None else path in self._shared

    def is_shared(self, path: str) -> bool:
        """Whether another writer is known to write there."""
        return self._shared is not None and path in self._shared

    def put_file(
        self,
        path: str,
        reader: ConsistentReader,
        size: int,
        state: PathState | None,
        deadline: Deadline,
        *,
        count: Callable[[int], None] = no_count,
    ) -> StoredFile:
        """Writes one file from a reader; conditionally where the store can, so that no newer writer is overwritten."""

        def put(**precondition: object) -> StoredFile:
            if size <= SMALL_FILE:
                stored = self.store.put(path, reader.read_all(LARGE_FILE_WEIGHT), **precondition)  # type: ignore[arg-type]
                count(stored.size)
                return stored
            with counted(count) as count_chunk:
                chunks = self.fenced(reader, deadline, count_chunk)
                return self.store.put(path, chunks, size_hint=size, **precondition)  # type: ignore[arg-type]

        def guarded() -> StoredFile:
            if self.store.can_precondition is False or not self.is_guarded(path):
                self.look(path, state)
                return put()
            # Of a path that is not known, the first guess is that it holds nothing: never write unconditionally.
            etag = state.etag if state is not None else None
            for tries_left in range(CONFLICT_TRIES - 1, -1, -1):
                try:
                    return put(if_absent=True) if etag is None else put(if_match=etag)
                except PreconditionFailedError:
                    if not tries_left:
                        raise
                # Either a newer writer, or an older one whose request was under way, or an earlier try of ours that
                # landed although its answer was lost, or something that somebody else left at this path.
                present = self.store.stat(path)
                etag = present.etag if present else None
                if self._confirm_writer is not None:
                    self._confirm_writer()  # after the look: what it saw must not be a newer writer's
                if self._confirm_path is not None:
                    self._confirm_path(path)
                logger.debug("%s is not what this writer left there; replacing it.", path)
            raise AssertionError

        with self._budget.hold(self.budget_for(size), deadline):
            return self.call(f"Uploading {path}", guarded, deadline, path=path)

    def look(self, path: str, state: PathState | None) -> None:
        """Looks whether a path still holds what this writer left there, where that costs next to nothing.

        Raises:
            PathTakenError: It does not, and what it holds must stay.
        """
        if self._confirm_path is None or not self.store.can_fence or not self.is_guarded(path):
            return
        present = self.store.stat(path)
        if present is not None and (state is None or state.etag != present.etag):
            self._confirm_path(path)

    def taken(self, path: str, error: Exception) -> PathTakenError | None:
        """Whether a write failed because somebody else's file, or directory, stands in the way and must stay."""
        if self._confirm_writer is None or self._confirm_path is None or not self.store.can_fence:
            return None
        if not isinstance(error, StorageError):
            return None
        try:
            self._confirm_path(path)
        except PathTakenError as taken:
            return taken
        except ArtifactSyncError:
            return None
        return None

    def append_file(
        self,
        op: Append,
        reader: ConsistentReader,
        etag: str | None,
        deadline: Deadline,
        *,
        count: Callable[[int], None] = no_count,
    ) -> StoredFile:
        """Adds to one file from a reader that begins at its end."""

        def append() -> StoredFile:
            with counted(count) as count_chunk:
                chunks = self.fenced(reader, deadline, count_chunk)
                return self.store.append(op.path, op.offset, chunks, if_match=etag, digest=op.digest)

        with self._budget.hold(self.budget_for(op.size - op.offset), deadline):
            return self.call(f"Appending to {op.path}", append, deadline, path=op.path)

    def confirm_writer(self, error: BaseException) -> None:
        """Raises if somebody else may write now, after an error that says that somebody wrote."""
        if isinstance(error, PreconditionFailedError) and self._confirm_writer is not None:
            self._confirm_writer()


def bytes_to_send(op: Transfer) -> int:
    """The bytes of a file that have to go over."""
    if isinstance(op, CopyStored):
        return 0
    return op.size - op.offset if isinstance(op, Append) else op.size


class _Job:
    """One run of a plan; its methods are called by many threads at once."""

    def __init__(  # noqa: PLR0917  (one caller)
        self,
        engine: TransferEngine,
        states: Mapping[str, PathState],
        root: str,
        sources: Mapping[str, str],
        set_aside: Collection[str],
        deadline: Deadline,
        result: TransferResult,
        pacer: Pacer | None,
    ) -> None:
        self.engine = engine
        self.states = states
        self.root = root
        self.sources = sources
        self.set_aside = set_aside
        self.deadline = deadline
        self.result = result
        self.pacer = pacer
        self.progress = TransferProgress("", files=0, bytes=0)
        self._lock = threading.Lock()

    def close(self) -> None:
        """From now on, what a call that hung reports goes nowhere; the caller reads the result meanwhile."""
        with self._lock:
            self.result = TransferResult()

    def each(self, operations: Iterable[Preserve | Remove | Transfer], act: Callable[..., None]) -> None:
        def guarded(op: Preserve | Remove | Transfer) -> None:
            try:
                act(op)
            except (ArtifactConflictError, SyncTimeoutError):
                raise
            except PathTakenError as error:
                self.skip(Skip(op.path, str(error), "owned"))
            except FileNotFoundError as error:
                if isinstance(error, ArtifactSyncError):
                    self.fail(op, error)
                else:
                    self.skip(Skip(op.path, "deleted before it could be sent", "vanished"))
            except PermissionError as error:
                if isinstance(error, ArtifactSyncError):
                    self.fail(op, error)
                else:
                    self.skip(Skip(op.path, f"unreadable: {error.strerror}", "unreadable"))
            except InvalidPathError as error:
                self.skip(Skip(op.path, str(error).removesuffix("."), "invalid"))
            except FileChangedError:
                with self._lock:
                    self.result.changed.add(op.path)
            except Exception as error:
                if (taken := self.engine.taken(op.path, error)) is not None:
                    self.skip(Skip(op.path, str(taken), "owned"))
                else:
                    self.fail(op, error)

        def paced(op: Preserve | Remove | Transfer) -> None:
            # Of a large file, the kernel and the hasher take most of the time, and they leave the interpreter alone.
            if self.pacer is None or (isinstance(op, Upload | Append) and op.size > SMALL_FILE):
                guarded(op)
            else:
                self.pacer.call(guarded, op)

        run_all(operations, paced, workers=self.engine.max_concurrency, deadline=self.deadline)

    def blocked(self, path: str) -> bool:
        """Whether an earlier phase failed for this path or for one that had to give way to it."""
        failures = self.result.failures
        return path in failures or any(
            failed.startswith(f"{path}/") or path.startswith(f"{failed}/") for failed in failures
        )

    def fail(self, op: Preserve | Remove | Transfer, error: BaseException) -> None:
        with self._lock:
            self.result.failures[op.path] = error
            if not (isinstance(op, Append) and op.path in self.result.states):  # else `append` has found it out
                self.result.states[op.path] = PathState()

    def skip(self, skip: Skip) -> None:
        with self._lock:
            self.result.skips.append(skip)

    def preserve(self, op: Preserve) -> None:
        for digest in op.digests:
            target = layout.object_path(self.engine._token, digest)  # noqa: SLF001  (one module, two halves)
            state = self.states.get(op.path)
            copy = partial(self.copy_once, op.path, target, size=state.size if state is not None else -1)
            try:
                self.engine.call(f"Preserving {op.path}", copy, self.deadline, path=target)
            except ArtifactNotFoundError:
                logger.warning(
                    "%s is gone from %s although a manifest lists it; somebody else deleted it.",
                    op.path,
                    self.engine.store.description,
                )
                return
            with self._lock:
                self.result.preserved.add(digest)

    def copy_once(self, source: str, target: str, *, size: int) -> None:
        """Copies on the server side, unless an earlier try did so and only its answer was lost.

        A newer attempt may have seen the copy and rely on it, and have replaced the source since.

        Args:
            source: What to copy.
            target: Where to.
            size: Bytes that the source has, as far as is known.
        """
        again = self.engine.tries_again(target)
        if again and (found := self.engine.store.stat(target)) is not None and found.size == size:
            return
        self.engine.store.copy(source, target)
        self.engine.copy_landed(target)

    def remove(self, op: Remove) -> None:
        self.engine.look(op.path, self.states.get(op.path))
        if op.path in self.set_aside:
            aside = layout.aside_file_path(self.engine._token, op.path)  # noqa: SLF001
            logger.warning(
                "%s in %s is listed nowhere and stands where %s; it is moved to %s.",
                op.path,
                self.engine.store.description,
                op.reason,
                aside,
            )
            copy = partial(self.engine.store.copy, op.path, aside)
            self.engine.call(f"Setting {op.path} aside", copy, self.deadline, path=aside)
        self.engine.call(
            f"Deleting {op.path}", lambda: self.engine.store.delete([op.path]), self.deadline, path=op.path
        )
        with self._lock:
            self.result.states[op.path] = None

    def transfer(self, op: Transfer) -> None:
        if isinstance(op, Append):
            self.append(op)
        elif isinstance(op, CopyStored):
            self.copy(op)
        else:
            self.upload(op)
        self.progress.file_done()

    def local_path(self, path: str) -> str:
        return self.sources.get(path) or os.path.join(self.root, path)

    def upload(self, op: Upload | Append) -> None:
        size = op.size if op.digest is not None else None
        reader = ConsistentReader(self.local_path(op.path), size=size, expect_digest=op.digest)
        state = self.result.states.get(op.path, self.states.get(op.path))
        stored = self.engine.put_file(op.path, reader, op.size, state, self.deadline, count=self.progress.bytes_done)
        assert reader.hashed is not None
        if stored.size != reader.hashed.stat.size:
            raise StorageError(
                f"{op.path}: {reader.hashed.stat.size} bytes were sent, but {self.engine.store.description} "
                f"holds {stored.size}.",
                retryable=True,
                path=op.path,
            )
        self.landed(op, reader.hashed, stored, sent=stored.size)

    def append(self, op: Append) -> None:
        reader = ConsistentReader(self.local_path(op.path), size=op.size, expect_digest=op.digest, start=op.offset)
        state = self.states.get(op.path)
        try:
            stored = self.engine.append_file(
                op, reader, state.etag if state else None, self.deadline, count=self.progress.bytes_done
            )
        except (PreconditionFailedError, ArtifactNotFoundError, CannotAppendError) as error:
            # An earlier try got a part of the way, somebody wrote there, or it does not work here: send the whole file.
            self.engine.confirm_writer(error)
            logger.debug("%s is sent whole: %s", op.path, error)
            self.upload(op)
            return
        except BaseException:
            state = self.after_failed_append(op, state)
            with self._lock:
                self.result.states[op.path] = state
            raise
        assert reader.hashed is not None
        self.landed(op, reader.hashed, stored, sent=op.size - op.offset)

    def after_failed_append(self, op: Append, before: PathState | None) -> PathState:
        """What the path holds then: its beginning stands; on a disk, its size says whether that is all.

        If it is, the next try appends again. To send the whole file, a disk without room needs the most room.
        """
        if before is not None and self.engine.store.can_fence:
            with suppress(StorageError):
                present = self.engine.store.stat(op.path)
                if present is not None and present.size == op.offset:
                    return replace(before, etag=present.etag)
        return PathState()

    def copy(self, op: CopyStored) -> None:
        if self.engine.is_shared(op.path):  # a copy has no precondition
            self.upload(Upload(op.path, op.size, op.mtime_ns, op.digest, op.reason))
            return
        self.engine.look(op.path, self.result.states.get(op.path, self.states.get(op.path)))
        try:
            self.engine.call(
                f"Copying {op.source} to {op.path}",
                lambda: self.engine.store.copy(op.source, op.path),
                self.deadline,
                path=op.path,
            )
        except ArtifactNotFoundError:
            self.upload(Upload(op.path, op.size, op.mtime_ns, op.digest, "the copy's source is gone"))
            return
        with self._lock:
            self.result.entries[op.path] = FileEntry(op.path, op.size, op.digest, op.mtime_ns)
            self.result.states[op.path] = PathState(op.size, op.digest, own=True)

    def landed(self, op: Transfer, hashed: HashedFile, stored: StoredFile, *, sent: int) -> None:
        entry = FileEntry(op.path, hashed.stat.size, hashed.digest, hashed.stat.mtime_ns)
        with self._lock:
            self.result.entries[op.path] = entry
            self.result.states[op.path] = PathState(entry.size, entry.digest, own=True, etag=stored.etag)
            if op.path not in self.sources:
                self.result.hashed[op.path] = hashed
            self.result.sent[op.path] = sent
