"""The journal's files on storage: the one writer of an attempt, and reading them all.

Lines are buffered, so that a sync costs no request more; an attempt that does nothing writes nothing. Where appending
costs next to nothing (local and mounted directories), the buffer is written at the end of each operation; elsewhere
when its oldest line is `PATIENCE` seconds old, and at the end. There, a segment is written whole each time, which is
why it is small.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from ray_artifact_sync import layout
from ray_artifact_sync.errors import ArtifactConflictError, ArtifactNotFoundError
from ray_artifact_sync.journal import (
    READ_BYTES,
    SEGMENT_BYTES,
    SEGMENT_LINES,
    Journal,
    JournalReader,
    JournalRecord,
    encode_line,
    stale_segments,
)
from ray_artifact_sync.stores.base import ArtifactStore

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a line waits for others where each write is a request."""
MAX_BUFFERED = 1000
"""Lines that wait while storage refuses them; the oldest go first."""
READ_SEGMENTS = 500


class JournalWriter:
    """Writes the journal of one attempt. `add` may be called from any thread, the others from one at a time.

    Args:
        store: Its root is the trial dir.
        token: The attempt.
    """

    def __init__(self, store: ArtifactStore, token: str) -> None:
        self.token = token
        self.is_immediate = bool(store.can_append and not store.min_append_size)
        self._store = store
        self._buffer: list[JournalRecord] = []
        self._oldest = 0.0
        self._dropped = 0
        self._number = 0
        self._segment = b""
        self._lines = 0
        self._stored = 0
        self._sizes: dict[str, int] = {}
        self._has_news = False  # more than that the attempt began, or ended
        self._complained = False
        self._over = False
        self._lock = threading.Lock()

    def add(self, record: JournalRecord) -> None:
        """Takes a record for the next write. The same failure again only counts."""
        with self._lock:
            if self._over:
                return
            if not self._buffer:
                self._oldest = time.monotonic()
            self._has_news = self._has_news or record.kind not in ("begin", "close")
            last = self._buffer[-1] if self._buffer else None
            if last is not None and record.kind == last.kind == "failure" and record.error == last.error:
                self._buffer[-1] = replace(record, repeats=last.repeats + 1)
                return
            self._buffer.append(record)
            if len(self._buffer) > MAX_BUFFERED:
                del self._buffer[0]
                self._dropped += 1

    def due(self) -> bool:
        """Whether there is something to write now."""
        with self._lock:
            waited = self.is_immediate or time.monotonic() - self._oldest >= PATIENCE
            return bool(self._buffer) and self._has_news and waited and not self._over

    def write(self) -> None:
        """Writes what is buffered. A failure is logged once, and the lines wait for the next time.

        Raises:
            ArtifactConflictError: A newer attempt took over: this one writes no more.
        """
        with self._lock:
            if self._over or not self._buffer or not self._has_news:
                return
            records, self._buffer = self._buffer, []
            dropped, self._dropped = self._dropped, 0
        first = replace(records[0], dropped=dropped)
        try:
            self._write(b"".join(encode_line(record) for record in (first, *records[1:])), len(records))
        except ArtifactConflictError:
            self._over = True
            raise
        except Exception as error:
            logger.log(
                logging.DEBUG if self._complained else logging.INFO,
                "The journal of %s could not be written (next time): %s",
                self._store.description,
                error,
            )
            self._complained = True
            with self._lock:
                waiting = [*records, *self._buffer]
                self._buffer = waiting[-MAX_BUFFERED:]
                self._dropped += dropped + len(waiting) - len(self._buffer)

    def stale(self, found: Mapping[str, int]) -> list[str]:
        """Paths of segments that may go.

        Args:
            found: What earlier attempts left: file name to bytes.
        """
        return [f"{layout.JOURNAL}/{name}" for name in stale_segments({**found, **self._sizes}, self.token)]

    def forget(self, paths: list[str]) -> None:
        """Takes note of deleted segments."""
        for path in paths:
            self._sizes.pop(path.rpartition("/")[2], None)

    def _write(self, data: bytes, lines: int) -> None:
        if self._lines + lines > SEGMENT_LINES or self._stored + len(data) > SEGMENT_BYTES:
            self._begin_segment()
        path = f"{layout.JOURNAL}/{layout.journal_name(self.token, self._number)}"
        try:
            if self.is_immediate and self._stored:
                self._store.append(path, self._stored, [data])
            else:
                self._store.put(path, self._segment + data)
        except BaseException:
            if self.is_immediate:
                self._begin_segment()  # half of it may be there
            raise
        if not self.is_immediate:
            self._segment += data
        self._stored += len(data)
        self._lines += lines
        self._sizes[path.rpartition("/")[2]] = self._stored

    def _begin_segment(self) -> None:
        self._number += 1
        self._segment, self._lines, self._stored = b"", 0, 0


def read_journal(store: ArtifactStore, *, limit_bytes: int = READ_BYTES) -> Journal:
    """The journal of a trial. Needs no write access; damaged lines are skipped and counted.

    Args:
        store: Its root is the trial dir.
        limit_bytes: Of all segments together; the newest are read.

    Raises:
        StorageError: Storage cannot be read.
    """
    files = {file.path.rpartition("/")[2]: file for file in store.list_files(layout.JOURNAL)}
    ours = sorted((name for name in files if layout.journal_token(name)), reverse=True)
    left = limit_bytes
    wanted: list[tuple[str, int]] = []
    reader = JournalReader()
    for name in ours:
        if left <= 0 or len(wanted) == READ_SEGMENTS:
            reader.leave_out()
            break
        wanted.append((name, left))
        left -= files[name].size
    for name, most in reversed(wanted):
        if files[name].size > most:
            reader.leave_out()
        try:
            chunks = store.read_chunks(files[name].path, length=most)
            reader.segment(layout.journal_token(name) or "", chunks)
        except ArtifactNotFoundError:
            continue  # cleaned up since the listing
    return reader.result()
