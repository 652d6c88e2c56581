"""Reads the next windows of a large file while the first is being used: one connection is slower than most networks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ray_artifact_sync.stores.base import Buffer

Fetch = Callable[[int], Iterator[Buffer]]
"""Gives the chunks of the window that begins at an offset."""


class ReadAhead:
    """The chunks of consecutive windows, in order.

    Args:
        fetch: Reads one window; called in threads.
        starts: Where the windows begin.
        permits: One for each window that may be held in memory, shared by all readers. Whoever gets none reads its
            windows one after the other, as a stream.
        depth: Windows of this file that may be read ahead.
    """

    def __init__(self, fetch: Fetch, starts: Iterable[int], permits: threading.Semaphore, *, depth: int) -> None:
        self._fetch = fetch
        self._starts = deque(starts)
        self._permits = permits
        self._depth = depth
        self._begun: deque[_Window] = deque()

    def begin(self) -> None:
        """Begins to read as many windows as it may."""
        while self._starts and len(self._begun) < self._depth and self._permits.acquire(blocking=False):
            self._begun.append(_Window(self._fetch, self._starts.popleft(), self._permits))

    def chunks(self) -> Iterator[Buffer]:
        """All of them; what a fetch raised is raised in its place."""
        while self._begun or self._starts:
            if not self._begun:
                yield from self._fetch(self._starts.popleft())
                self.begin()
                continue
            window = self._begun.popleft()
            try:
                chunks = window.wait()
                self.begin()
                yield from chunks
            finally:
                window.drop()

    def close(self) -> None:
        """Gives up what was not used. Reads under way end by themselves."""
        self._starts.clear()
        while self._begun:
            self._begun.popleft().drop()


class _Window:
    def __init__(self, fetch: Fetch, start: int, permits: threading.Semaphore) -> None:
        self._permits = permits
        self._lock = threading.Lock()
        self._holders = 2  # the reading thread and the reader
        self._done = threading.Event()
        self._chunks: list[Buffer] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._read, args=(fetch, start), name="artifact-read-ahead", daemon=True).start()

    def wait(self) -> Iterator[Buffer]:
        """The chunks, once all are there; each is let go as it is given."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._give()

    def _give(self) -> Iterator[Buffer]:
        chunks, self._chunks = self._chunks[::-1], []
        while chunks:
            yield chunks.pop()

    def drop(self) -> None:
        """One of the two has no more need of it."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self._chunks = []
        self._permits.release()

    def _read(self, fetch: Fetch, start: int) -> None:
        try:
            self._chunks = list(fetch(start))
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
            self.drop()
