"""How far a transfer is: counters that its threads move on, and a bar that looks at them when it takes long.

The transfer only counts. Whoever wants to show something gives a `Watcher`; a thread of its own then looks at the
counters now and then, so that many small files cost no more with a bar than without.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeAlias

logger = logging.getLogger(__name__)

SHOW_AFTER = 3.0
"""Seconds that a transfer runs before it gets a bar."""
SHOW_EVERY = 0.5
_LAST_WORD = 2.0
"""Seconds that a transfer waits for its bar to go away."""


class TransferProgress:
    """The counters of one transfer. Thread-safe.

    Attributes:
        what: What is transferred, for people.
        files: How many files in all.
        bytes: How many bytes in all.
        files_done: Files that are done.
        bytes_done_so_far: Bytes that went over; those of a request that failed are taken back.
    """

    def __init__(self, what: str, *, files: int, bytes: int) -> None:  # noqa: A002  (what it is)
        self.what = what
        self.files = files
        self.bytes = bytes
        self.files_done = 0
        self.bytes_done_so_far = 0
        self._lock = threading.Lock()

    def bytes_done(self, count: int) -> None:
        """So many bytes more; negative to take them back."""
        with self._lock:
            self.bytes_done_so_far += count

    def file_done(self) -> None:
        """One file more."""
        with self._lock:
            self.files_done += 1


def no_count(count: int) -> None:
    """Where nobody counts."""


@contextmanager
def counted(count: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """Counts the bytes of one request, and takes them back if it fails."""
    so_far = 0

    def more(number: int) -> None:
        nonlocal so_far
        so_far += number
        count(number)

    try:
        yield more
    except BaseException:
        count(-so_far)
        raise


Watcher: TypeAlias = Callable[[TransferProgress], AbstractContextManager[object]]
"""Gives a block for the time of a transfer. What it raises on entering is logged, and the transfer goes on without."""


class Bar(Protocol):
    """What shows one transfer; called by one thread."""

    def update(self) -> None:
        """Shows the counters as they are now."""

    def close(self) -> None:
        """Goes away."""


def watched_by(watcher: Watcher | None, progress: TransferProgress) -> AbstractContextManager[object]:
    """The watcher's block; an empty one where nobody watches, there is nothing to do, or the watcher fails."""
    if watcher is None or not progress.files:
        return nullcontext()
    try:
        return watcher(progress)
    except Exception as error:
        logger.warning("The progress of a transfer cannot be shown: %s", error)
        return nullcontext()


def bar_when_slow(
    make_bar: Callable[[TransferProgress], Bar], *, after: float | None = None, every: float | None = None
) -> Watcher:
    """A watcher that makes a bar for a transfer that takes long.

    Args:
        make_bar: Makes it.
        after: Seconds that count as long; `SHOW_AFTER` if None.
        every: Seconds between two looks; `SHOW_EVERY` if None.
    """

    @contextmanager
    def watch(progress: TransferProgress) -> Iterator[None]:
        done = threading.Event()
        thread = threading.Thread(
            target=_show,
            args=(
                make_bar,
                progress,
                done,
                SHOW_AFTER if after is None else after,
                SHOW_EVERY if every is None else every,
            ),
            name="artifact-sync-bar",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(_LAST_WORD)

    return watch


def _show(
    make_bar: Callable[[TransferProgress], Bar],
    progress: TransferProgress,
    done: threading.Event,
    after: float,
    every: float,
) -> None:
    if done.wait(after):
        return
    try:
        bar = make_bar(progress)
        try:
            while True:
                bar.update()
                if done.wait(every):
                    break
            bar.update()
        finally:
            bar.close()
    except Exception as error:
        logger.warning("The progress of %s cannot be shown: %s", progress.what, error)
