"""Bounded work in daemon threads, deadlines, and a budget of bytes: what keeps syncs from hanging or swelling.

Threads here are daemons on purpose: `concurrent.futures` joins its threads at interpreter exit, so that one storage
call that never returns would hang the exit of a training process.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ray_artifact_sync.errors import ArtifactSyncError, SyncTimeoutError

Item = TypeVar("Item")


class Deadline:
    """One moment that a whole operation must end by; cancelling moves it to now.

    Args:
        seconds: From now; None for never.
        what: What ends then, for the error message.
    """

    def __init__(self, seconds: float | None = None, what: str = "The sync") -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._seconds = seconds
        self._what = what
        self._cancelled = threading.Event()

    def remaining(self) -> float | None:
        """Seconds left, at least 0; None for never."""
        if self._cancelled.is_set():
            return 0.0
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def cancel(self) -> None:
        """Ends it now: whoever checks next stops."""
        self._cancelled.set()

    def check(self) -> None:
        """Raises if the time is over.

        Raises:
            SyncTimeoutError: It is.
        """
        if self.remaining() == 0.0:
            raise SyncTimeoutError(
                f"{self._what} did not end within {self._seconds:g} s (`sync_timeout`) and was stopped."
                if self._seconds is not None
                else f"{self._what} was cancelled."
            )

    def sleep(self, seconds: float) -> None:
        """Sleeps, but not beyond the deadline and not on after a cancel."""
        left = self.remaining()
        self._cancelled.wait(seconds if left is None else min(seconds, left))


class ByteBudget:
    """Limits the bytes that concurrent transfers hold in memory."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, size: int, deadline: Deadline | None = None) -> Iterator[None]:
        """Waits until `size` bytes (at most the whole budget) are free, and holds them.

        Raises:
            SyncTimeoutError: The deadline passed: those who hold the budget hang.
        """
        size = min(size, self._total)
        with self._changed:
            while self._free < size:
                self._changed.wait(1.0)
                if deadline is not None:
                    deadline.check()
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


class Pacer:
    """Keeps background work from holding the interpreter (the GIL) more than a share of the time.

    Python code of a thread that sends small files costs some 0.1 ms of CPU a file, during which the program stands
    still. At full speed that adds up to a tenth of its time; nothing is in a hurry in the background.

    Args:
        share: The part of the time that the threads' Python code may take together.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._used = 0.0
        self._started = time.monotonic()
        self._hurry = threading.Event()

    def hurry(self) -> None:
        """Somebody waits now: from here on, nothing is held up."""
        self._hurry.set()

    def call(self, work: Callable[[Item], None], item: Item) -> None:
        """Does one piece of work, then rests for as long as the pieces so far are ahead of their share."""
        before = time.thread_time()
        try:
            work(item)
        finally:
            self._used += time.thread_time() - before  # a lost update between threads does no harm
            ahead = self._used / self._share - (time.monotonic() - self._started)
            if ahead > 0:
                self._hurry.wait(ahead)


def run_all(items: Iterable[Item], work: Callable[[Item], None], *, workers: int, deadline: Deadline) -> None:
    """Calls `work` on every item, up to `workers` at once, and returns when all calls have returned.

    `work` reports by itself; an exception that leaves it stops the run and is raised here (the first one). When the
    deadline passes, no further item is begun; calls under way are waited for only by the daemon threads that run them.

    Raises:
        SyncTimeoutError: The deadline passed before all was done.
    """
    queue = iter(list(items))
    pending = list(queue)
    if not pending:
        return
    if workers <= 1 or len(pending) == 1:
        for item in pending:
            deadline.check()
            work(item)
        return
    _Crew(pending, work, deadline).run(min(workers, len(pending)))


class _Crew:
    def __init__(self, items: list[Item], work: Callable[[Item], None], deadline: Deadline) -> None:
        self._items = iter(items)
        self._work = work
        self._deadline = deadline
        self._lock = threading.Condition()
        self._active = 0
        self._error: BaseException | None = None

    def run(self, workers: int) -> None:
        for number in range(workers):
            with self._lock:
                self._active += 1
            try:
                threading.Thread(target=self._loop, name=f"artifact-sync-{number}", daemon=True).start()
            except RuntimeError:  # no more threads for this process: with those that there are, or else with this one
                if number == 0:
                    self._loop()
                else:
                    with self._lock:
                        self._active -= 1
                break
        with self._lock:
            while self._active:
                self._lock.wait(self._deadline.remaining())
                if self._active and self._deadline.remaining() == 0.0:
                    break
        if self._error is not None:
            raise self._error
        if self._active:
            self._deadline.check()

    def _loop(self) -> None:
        try:
            while True:
                with self._lock:
                    if self._error is not None:
                        break
                    pending = list(itertools.islice(self._items, 1))
                if not pending:
                    break
                self._deadline.check()  # an item that is not begun must not look like one that is done
                self._work(pending[0])
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
        finally:
            with self._lock:
                self._active -= 1
                self._lock.notify_all()


class Operation:
    """One call queued for an `OperationThread`, with its deadline."""

    def __init__(self, call: Callable[[Deadline], object], seconds: float | None, what: str) -> None:
        self.deadline = Deadline(seconds, what)
        self._call = call
        self._seconds = seconds
        self._what = what
        self._done = threading.Event()
        self._result: object = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes the call (on the operation thread), unless it is too late for it."""
        try:
            self.deadline.check()
            self._result = self._call(self.deadline)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._done.is_set()

    def wait_done(self, seconds: float) -> bool:
        """Waits up to `seconds`; whether the call has ended."""
        return self._done.wait(seconds)

    def wait(self) -> object:
        """The call's result; its exception is raised here.

        Raises:
            SyncTimeoutError: It did not end in time. It is cancelled: it may finish the request that it hangs in, and
                nothing after that.
        """
        grace = 1.0  # the call itself notices the deadline first and says more about it
        left = self.deadline.remaining()
        if not self._done.wait(None if left is None else left + grace):
            self.deadline.cancel()
            raise SyncTimeoutError(
                f"{self._what} did not end within {self._seconds:g} s (`sync_timeout`): a storage call hangs. It is "
                "cancelled; later ones are refused until it returns, so that it cannot write over newer data."
            )
        if self._error is not None:
            raise self._error
        return self._result


class OperationThread:
    """Runs operations one after the other in one daemon thread; two never run at once, even if one hangs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: list[Operation] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._closed = False

    def submit(self, call: Callable[[Deadline], object], *, seconds: float | None, what: str) -> Operation:
        """Queues a call. `seconds` count from now, also while it waits for its turn.

        Raises:
            ArtifactSyncError: No thread could be started.
        """
        operation = Operation(call, seconds, what)
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._closed = False
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:
                    self._thread = None
                    raise ArtifactSyncError(f"{what} cannot begin: {error} (too many threads?).") from error
            self._queue.append(operation)
            self._changed.notify_all()
        return operation

    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        with self._changed:
            return not self._busy and not self._queue

    def waiting(self) -> bool:
        """Whether something waits for its turn."""
        with self._changed:
            return bool(self._queue)

    def close(self) -> None:
        """Lets the thread end once the queue is empty; does not wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                while not self._queue:
                    if self._closed:
                        self._thread = None
                        return
                    self._changed.wait()
                operation = self._queue.pop(0)
                self._busy = True
            operation.run()
