"""How commands speak: tables for people, one JSON document for programs, a progress bar on terminals only."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ray_artifact_sync.progress import TransferProgress, bar_when_slow, watched_by
from ray_artifact_sync.progress_bars import RichBar
from ray_artifact_sync.view import time_of

OK, NOT_RIGHT, CANNOT = 0, 1, 2
JSON_FORMAT = 1
"""Raised when a key changes its meaning or goes; new keys may come at any time."""

# Names come from storage, where anybody may have written them: no control codes reach the terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def safe(text: object) -> str:
    """Text for a terminal, with control characters shown as escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def say(text: str = "") -> None:
    """One line on stdout."""
    sys.stdout.write(f"{safe(text)}\n")


def complain(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"ray-artifact-sync: {safe(text)}\n")


def print_json(command: str, body: Mapping[str, Any]) -> None:
    """The document of a command: its name and format version first."""
    document = {"command": command, "format": JSON_FORMAT, **body}
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=True) + "\n")


def iso_time(ns: int | None) -> str | None:
    """A time as JSON documents have it: ISO 8601, UTC."""
    time = time_of(ns)
    return None if time is None else time.isoformat()


def show_size(size: int) -> str:
    """Bytes for people, in decimal units."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:  # noqa: PLR2004  (decimal units)
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else many}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Prints rows: a rich table on a terminal, aligned plain text otherwise.

    Args:
        columns: Headings; the last column is the one that may be long.
        rows: Cells.
        right: Headings of the columns that are aligned to the right.
    """
    cells = [[safe(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(columns, cells, right)
        return
    widths = [max(len(row[at]) for row in [list(columns), *cells]) for at in range(len(columns))]
    for row in [list(columns), *cells]:
        padded = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, columns, strict=True)
        ]
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def _rich_table(columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415  (only on terminals)
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        shown.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in cells:
        shown.add_row(*(Text(cell) for cell in row))  # plain text: names may look like markup
    Console(highlight=False).print(shown)


@contextmanager
def progress(title: str, *, total_bytes: int, files: int) -> Iterator[TransferProgress]:
    """Counters for the time of the block; with a bar on stderr if that is a terminal and it takes a second or more.

    Args:
        title: What goes on.
        total_bytes: Of all files.
        files: How many.
    """
    counters = TransferProgress(title, files=files, bytes=total_bytes)
    watcher = bar_when_slow(RichBar, after=1.0, every=0.2) if sys.stderr.isatty() else None
    with watched_by(watcher, counters):
        yield counters
