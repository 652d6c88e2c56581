"""Turns "you pull from my iterator" into "I push to you": a bounded pipe between two threads."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ray_artifact_sync.stores.base import Buffer

_END = object()
_DEPTH = 2  # chunks that wait in the pipe


class Feed:
    """An iterator that one thread reads and another one fills.

    The reader (`consumer`) runs in a new thread; the block that fills it stays in the caller's, and
    so do all of its exceptions. If the block raises, the reader sees an exception too, and gives up.
    """

    def __init__(self) -> None:
        self._chunks: queue.Queue[Any] = queue.Queue(_DEPTH)
        self._done = threading.Event()

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Buffer:
        chunk = self._chunks.get()
        if chunk is _END:
            raise StopIteration
        if isinstance(chunk, _GivenUpError):
            raise chunk
        return bytes(chunk)  # no copy if it is bytes; the caller may fill a buffer again otherwise

    def send(self, chunk: Buffer) -> bool:
        """Hands a chunk over; waits while the pipe is full.

        Returns:
            False if the reader has ended (failed), and nothing is needed any more.
        """
        if self._done.is_set():
            return False
        if len(chunk):
            self._chunks.put(bytes(chunk))
        return True

    @contextlib.contextmanager
    def consumer(self, read: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Runs `read` in a thread while the block fills the pipe, and waits for its end.

        Args:
            read: Iterates over this feed.

        Yields:
            After the block: a function that gives what `read` returned, or raises what it raised.
        """
        outcome: list[tuple[Any, BaseException | None]] = []

        def run() -> None:
            try:
                outcome.append((read(), None))
            except BaseException as error:
                outcome.append((None, error))
            self._done.set()
            # Room for a sender that found the pipe full just before.
            with contextlib.suppress(queue.Empty):
                while True:
                    self._chunks.get_nowait()

        def result() -> Any:
            value, error = outcome[0]
            if error is not None:
                raise error
            return value

        thread = threading.Thread(target=run, name="artifact-upload", daemon=True)
        thread.start()
        last: object = _END
        try:
            yield result
        except BaseException:
            last = _GivenUpError("The iterable of this upload raised.")
            raise
        finally:
            if not self._done.is_set():
                self._chunks.put(last)
            thread.join()


class _GivenUpError(Exception):
    """Makes the reader give up; nobody else sees it."""
