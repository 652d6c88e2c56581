"""The journal of a trial: one JSON line for everything that a session did. Pure: records to lines and back.

    {"v": 1, "t": 1780000000.25, "kind": "sync", "seconds": 0.41, "files_sent": 2, "bytes_sent": 4096, ...}

A field that is not there has its default (see `JournalRecord`). The reader takes what others may have written: a line
that is damaged, hostile, or of a format that this release does not know is skipped and counted, and sizes are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from ray_artifact_sync import layout

VERSION = 1
MAX_LINE_BYTES = 16 * 1024
"""A longer line is not read. The writer stays far below."""
MAX_TEXT = 1000
"""Characters of one text in a line; what is longer ends with an ellipsis."""
MAX_LISTED = 20
"""Skipped files that one line names; there is a number for all."""
MAX_SENT = 5
"""Sent files that one line names, those with the most bytes."""
MAX_NUMBER = 2.0**63

SEGMENT_BYTES = 64 * 1024
SEGMENT_LINES = 500
"""From either on, the next line goes into a new file: where a file is written whole each time, that costs no more."""
KEEP_ATTEMPTS = 20
KEEP_BYTES = 4 * 1024 * 1024
"""What is kept of a trial's journal: the newest attempts, the newest segments."""
READ_BYTES = 2 * KEEP_BYTES
READ_RECORDS = 50_000

Kind: TypeAlias = Literal["begin", "sync", "checkpoint", "restore", "failure", "close"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class SkipNote:
    """A file that was left out, and why; `kind` as in `entries.Skip`."""

    path: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file that was sent.

    Attributes:
        path: Artifact path.
        size: Bytes that it has now.
        bytes_sent: Bytes that were sent of it.
    """

    path: str
    size: int
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    """One thing that a session did.

    Attributes:
        kind: `begin` (the attempt has claimed the trial dir), `sync`, `checkpoint`, `restore`, `failure` (something
            failed as a whole), `close` (the attempt has ended).
        t: When it ended, Unix seconds by the node's clock.
        seconds: Duration.
        host: The node (`begin`).
        checkpoint: Name of the checkpoint (`checkpoint`, `restore`).
        files: Files of the newest manifest.
        bytes: Bytes of the newest manifest.
        files_sent: Files sent.
        bytes_sent: Content bytes sent.
        bytes_changed: Content bytes that were new: what grew, as far as the beginning was proven to be the same, and
            what was rewritten as a whole.
        requests: Writes to storage that this took, tries included; bookkeeping not included.
        retries: Requests that were tried again.
        failed: Files that could not be sent, or restored.
        error: Class and message of the first error.
        idle: Syncs since the last line that found nothing to do.
        repeats: How many times more the same failure came in a row.
        files_read: Files read from storage (`restore`).
        bytes_read: Bytes read from storage (`restore`).
        files_local: Files taken from what an earlier attempt left on the node (`restore`).
        exact: False: not as of the checkpoint (`restore`), or without a snapshot (`checkpoint`).
        skipped: Files that are left out for the first time.
        skips: The first of them.
        sent: The files with the most bytes sent.
        dropped: Lines before this one that were never written.
        attempt: Token of the attempt; not in the line, but in the file's name.
    """

    kind: Kind
    t: float
    seconds: float = 0.0
    host: str = ""
    checkpoint: str = ""
    files: int = 0
    bytes: int = 0
    files_sent: int = 0
    bytes_sent: int = 0
    bytes_changed: int = 0
    requests: int = 0
    retries: int = 0
    failed: int = 0
    error: str = ""
    idle: int = 0
    repeats: int = 0
    files_read: int = 0
    bytes_read: int = 0
    files_local: int = 0
    exact: bool = True
    skipped: int = 0
    skips: tuple[SkipNote, ...] = ()
    sent: tuple[SentFile, ...] = ()
    dropped: int = 0
    attempt: str = ""


@dataclass(frozen=True, slots=True)
class Journal:
    """What was read of a journal.

    Attributes:
        records: In the order of attempts and lines.
        damaged: Lines that were skipped because they are no valid records.
        unknown: Lines that were skipped because a newer release wrote them.
        cut: Whether there is more than what was read.
    """

    records: tuple[JournalRecord, ...] = ()
    damaged: int = 0
    unknown: int = 0
    cut: bool = False


# --- writing ------------------------------------------------------------------------------------------


def encode_line(record: JournalRecord) -> bytes:
    """The line of a record, with its newline; at most half of `MAX_LINE_BYTES`."""
    line = _encode(record)
    if len(line) > MAX_LINE_BYTES // 2:
        record = replace(record, skips=(), error=record.error[:200])
        line = _encode(record)
    if len(line) > MAX_LINE_BYTES // 2:
        line = _encode(replace(record, sent=(), host="", checkpoint=record.checkpoint[:200]))
    return line


def _encode(record: JournalRecord) -> bytes:
    values: dict[str, Any] = {"v": VERSION, "t": round(record.t, 3), "kind": record.kind}
    for name, default in _DEFAULTS.items():
        value = getattr(record, name)
        if value == default:
            continue
        if name == "skips":
            value = [[_short(skip.path), skip.kind, _short(skip.reason)] for skip in value[:MAX_LISTED]]
        elif name == "sent":
            value = [[_short(file.path), file.size, file.bytes_sent] for file in value[:MAX_SENT]]
        elif isinstance(value, float):
            value = round(value, 4)
        elif isinstance(value, str):
            value = _short(value)
        values[name] = value
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


# --- reading ------------------------------------------------------------------------------------------


class JournalReader:
    """Takes the segments of a journal, in any pieces; `result` is what was understood.

    Args:
        limit: Records after which no more are taken.
    """

    def __init__(self, limit: int = READ_RECORDS) -> None:
        self._limit = limit
        self._records: list[JournalRecord] = []
        self._damaged = self._unknown = 0
        self._cut = False

    def segment(self, attempt: str, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        """Reads one file.

        Args:
            attempt: The token in its name.
            chunks: Its bytes.
        """
        for line in _lines(chunks):
            if len(self._records) >= self._limit:
                self._cut = True
                return
            if line is None:
                self._damaged += 1
            elif line.strip():
                self._line(attempt, line)

    def leave_out(self) -> None:
        """Notes that there is more than what is read."""
        self._cut = True

    def result(self) -> Journal:
        """What was read so far."""
        return Journal(tuple(self._records), self._damaged, self._unknown, self._cut)

    def _line(self, attempt: str, line: bytes) -> None:
        try:
            values = json.loads(line.decode("utf-8"), parse_constant=_refuse)
            if not isinstance(values, dict):
                raise TypeError("not an object")  # noqa: TRY301
            version, kind = values.get("v"), values.get("kind")
            newer = isinstance(version, int) and version > VERSION
            if newer or (isinstance(kind, str) and kind not in KINDS):
                self._unknown += 1
                return
            self._records.append(_record(values, attempt))
        except (ValueError, TypeError, RecursionError, OverflowError):
            self._damaged += 1


def _lines(chunks: Iterable[bytes | bytearray | memoryview]) -> Iterator[bytes | None]:
    """The lines, without holding more than one; None for one that is too long."""
    rest, skipping = b"", False
    for chunk in chunks:
        *lines, rest = (rest + bytes(chunk)).split(b"\n")
        for line in lines:
            yield None if skipping or len(line) > MAX_LINE_BYTES else line
            skipping = False
        if len(rest) > MAX_LINE_BYTES:
            rest, skipping = b"", True
    if rest or skipping:
        yield None if skipping else rest


def _record(values: Mapping[str, Any], attempt: str) -> JournalRecord:
    if _count(values.get("v")) < 1:
        raise ValueError("no version")
    known = {name: _CHECKS[name](values[name]) for name in values.keys() & _CHECKS.keys()}
    return JournalRecord(**known, attempt=attempt)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < MAX_NUMBER:
        raise ValueError("no number")
    return float(value)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_NUMBER:
        raise ValueError("no count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return _short(value.encode("utf-8", "backslashreplace").decode("utf-8"))  # half a surrogate pair is valid JSON


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("no truth value")
    return value


def _kind(value: object) -> Kind:
    if value not in KINDS:
        raise ValueError("unknown kind")
    return value


def _list(value: object, limit: int) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, list) for item in value):
        raise TypeError("no list of lists")
    return value[:limit]


def _skips(value: object) -> tuple[SkipNote, ...]:
    return tuple(SkipNote(_text(path), _text(kind), _text(reason)) for path, kind, reason in _list(value, MAX_LISTED))


def _sent(value: object) -> tuple[SentFile, ...]:
    return tuple(SentFile(_text(path), _count(size), _count(sent)) for path, size, sent in _list(value, MAX_SENT))


_BY_TYPE: dict[str, Callable[[object], Any]] = {"float": _number, "int": _count, "str": _text, "bool": _flag}
_CHECKS: dict[str, Callable[[object], Any]] = {
    **{item.name: _BY_TYPE[str(item.type)] for item in fields(JournalRecord) if str(item.type) in _BY_TYPE},
    "kind": _kind,
    "skips": _skips,
    "sent": _sent,
}
del _CHECKS["attempt"]
_DEFAULTS = {item.name: item.default for item in fields(JournalRecord) if item.name not in ("kind", "t", "attempt")}


# --- which files are kept -----------------------------------------------------------------------------


def stale_segments(sizes: Mapping[str, int], token: str) -> list[str]:
    """The segments that may go: beyond the newest attempts and the newest bytes, of tokens up to `token`.

    Args:
        sizes: File name to bytes, of everything in the journal's directory. Other names are nobody's garbage.
        token: The attempt that asks; its newest segment always stays.
    """
    ours = sorted((name for name in sizes if layout.journal_token(name)), reverse=True)
    attempts: list[str] = []
    stale, kept = [], 0
    for position, name in enumerate(ours):
        attempt = layout.journal_token(name) or ""
        if attempt not in attempts:
            attempts.append(attempt)
        kept += sizes[name]
        too_many = len(attempts) > KEEP_ATTEMPTS or kept > KEEP_BYTES
        if too_many and position and attempt <= token:
            stale.append(name)
    return stale
