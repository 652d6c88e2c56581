"""What a session did, as records: to the journal, to the log (level DEBUG), and to whoever observes the session."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeAlias

from ray_artifact_sync.entries import Manifest, Skip
from ray_artifact_sync.errors import IncompleteSyncError
from ray_artifact_sync.journal import MAX_LISTED, JournalRecord, Kind, SkipNote
from ray_artifact_sync.journal_files import JournalWriter
from ray_artifact_sync.session_log import log_fields
from ray_artifact_sync.stores.common import scrub
from ray_artifact_sync.sync_down import RestoreReport
from ray_artifact_sync.sync_up import SyncReport

logger = logging.getLogger(__name__)

Observer: TypeAlias = Callable[[JournalRecord], None]
"""Is told every record when it happens, in the thread that did the work; must be quick. What it raises is logged."""

MAX_NOTED_SKIPS = 20_000


class SessionEvents:
    """The records of one session. Thread-safe where it has to be: a checkpoint ends in the caller's thread.

    Args:
        trial: The trial dir's name.
        token: The attempt.
        journal: Where records are written; None for nowhere.
        observer: Who else is told.
    """

    def __init__(self, trial: str, token: str, *, journal: JournalWriter | None, observer: Observer | None) -> None:
        self._trial = trial
        self._token = token
        self._journal = journal
        self._observer = observer
        self._idle = 0
        self._skips: set[tuple[str, str]] = set()
        self._manifest = Manifest()
        self._bytes = 0

    def begun(self, head: Manifest) -> None:
        """The attempt has claimed the trial dir."""
        self._emit("begin", manifest=head, host=platform.node())

    def synced(self, report: SyncReport, *, seconds: float, requests: int, retries: int, committed: bool) -> None:
        """A sync has ended; some files may have failed."""
        new = self._new_skips(report.skips)
        if not (report.files_sent or committed or new or report.failures):
            self._idle += 1
            self._tell(JournalRecord(kind="sync", t=time.time(), seconds=seconds, attempt=self._token))
            return
        first = next(iter(report.failures.values()), None)
        self._emit(
            "sync",
            manifest=report.manifest,
            seconds=seconds,
            files_sent=report.files_sent,
            bytes_sent=report.bytes_sent,
            bytes_changed=report.bytes_changed,
            requests=requests,
            retries=retries,
            failed=len(report.failures),
            error=describe_error(first) if first is not None else "",
            skipped=len(new),
            skips=tuple(SkipNote(skip.path, skip.kind, skip.reason) for skip in new[:MAX_LISTED]),
            sent=report.most_sent,
        )

    def checkpointed(self, name: str, *, seconds: float, error: BaseException | None) -> None:
        """A checkpoint was saved; with `error`, without a snapshot of its artifacts."""
        self._emit(
            "checkpoint",
            manifest=self._manifest,
            seconds=seconds,
            checkpoint=name,
            exact=error is None,
            error=describe_error(error) if error is not None else "",
        )

    def restored(self, checkpoint: str, report: RestoreReport) -> None:
        """The artifacts of a checkpoint were brought back."""
        self._emit(
            "restore",
            manifest=report.manifest,
            seconds=report.seconds,
            checkpoint=checkpoint,
            exact=report.exact,
            files_read=report.files_read,
            bytes_read=report.bytes_read,
            files_local=report.files_local,
            failed=len(report.lost),
        )

    def failed(self, error: BaseException, *, checkpoint: str = "") -> None:
        """Something failed as a whole; with `checkpoint`, restoring it."""
        failed = len(error.failures) if isinstance(error, IncompleteSyncError) else 0
        self._emit("failure", error=describe_error(error), failed=failed, checkpoint=checkpoint)

    def closed(self) -> None:
        """The attempt has ended."""
        self._emit("close", manifest=self._manifest)

    # --- inside -----------------------------------------------------------------------------------

    def _new_skips(self, skips: tuple[Skip, ...]) -> list[Skip]:
        new = [skip for skip in skips if (skip.path, skip.kind) not in self._skips]
        if len(self._skips) > MAX_NOTED_SKIPS:  # names that are never the same: enough was said
            return []
        self._skips.update((skip.path, skip.kind) for skip in new)
        return new

    def _emit(self, kind: Kind, *, manifest: Manifest | None = None, **facts: Any) -> None:
        if manifest is not None:
            if manifest is not self._manifest:
                self._manifest, self._bytes = manifest, manifest.total_bytes
            facts.update(files=len(manifest), bytes=self._bytes)
        idle, self._idle = self._idle, 0
        record = JournalRecord(kind=kind, t=time.time(), idle=idle, attempt=self._token, **facts)
        if self._journal is not None:
            self._journal.add(record)
        self._tell(record)

    def _tell(self, record: JournalRecord) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "%s of %s: %.2f s, %d files, %d bytes sent.",
                record.kind,
                self._trial,
                record.seconds,
                record.files_sent,
                record.bytes_sent,
                extra=log_fields(f"{record.kind}_done", trial=self._trial, **_facts(record)),
            )
        if self._observer is None:
            return
        try:
            self._observer(record)
        except Exception as error:
            logger.warning("Whoever observes the syncs of %s raised, and is not told any more: %s", self._trial, error)
            self._observer = None


def describe_error(error: BaseException) -> str:
    """An error's class and message, on one line and without what looks like a credential."""
    return f"{type(error).__name__}: {scrub(error)}"


def _facts(record: JournalRecord) -> dict[str, object]:
    """What of a record is said in the log: its numbers and texts, where they say anything."""
    names = [item.name for item in fields(record) if item.name not in ("kind", "t", "skips", "sent", "exact")]
    facts = {name: value for name in names if (value := getattr(record, name)) not in (0, "")}
    return {**facts, "exact": record.exact} if record.checkpoint else facts
