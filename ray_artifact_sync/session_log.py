"""What a session says to people: each thing once, with its cause and what to do; and the totals that results carry.

Log records carry the facts of their message as fields too (`log_fields`), for those who collect logs as data.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ray_artifact_sync.entries import Skip
from ray_artifact_sync.sync_down import RestoreReport
from ray_artifact_sync.sync_up import SyncReport

logger = logging.getLogger(__name__)

SLOW_SYNC_SECONDS = 30.0


def log_fields(event: str, **facts: object) -> dict[str, object]:
    """The `extra` of a log record: its event and facts under names that clash with nobody's.

    Args:
        event: What happened, in one word: `sync_failed`, `file_skipped` ...
        **facts: Numbers and texts.
    """
    return {f"artifact_sync_{name}": value for name, value in {"event": event, **facts}.items()}


@dataclass(slots=True)
class SyncStats:
    """Totals of a session.

    Attributes:
        bytes_sent: Content bytes sent.
        files_sent: Files sent.
        seconds: Time spent in syncs.
        failed_syncs: Syncs that did not bring everything to storage.
    """

    bytes_sent: int = 0
    files_sent: int = 0
    seconds: float = 0.0
    failed_syncs: int = 0


class SessionLog:
    """The log of one session.

    Args:
        trial: The trial dir's name.
        place: The storage, for people.
        token: The attempt.
        history: Whether the session keeps old versions.
        stats: Counted here: failed syncs.
    """

    def __init__(self, trial: str, place: str, *, token: str = "", history: bool, stats: SyncStats) -> None:
        self._trial = trial
        self._token = token
        self._place = place
        self._history = history
        self._stats = stats
        self._said: set[tuple[str, str]] = set()
        self._last_failure = ""

    def fields(self, event: str, **facts: object) -> dict[str, object]:
        """The fields of a log record of this session."""
        return log_fields(event, trial=self._trial, attempt=self._token, **facts)

    def failure(self, error: BaseException) -> None:
        """Counts a failed sync and logs its cause once, until it changes or a sync succeeds."""
        self._stats.failed_syncs += 1
        said = f"{type(error).__name__}: {error}"
        level = logging.DEBUG if said == self._last_failure else logging.ERROR
        self._last_failure = said
        logger.log(
            level,
            "The artifacts of %s could not be synced (%d failed syncs so far); training goes on. %s",
            self._trial,
            self._stats.failed_syncs,
            said,
            extra=self.fields(
                "sync_failed", error=type(error).__name__, message=str(error), failed_syncs=self._stats.failed_syncs
            ),
        )

    def success(self, report: SyncReport) -> None:
        """Says when syncs work again, and when one was slow."""
        if self._last_failure:
            self._last_failure = ""
            logger.info("The artifacts of %s are in sync again.", self._trial, extra=self.fields("sync_recovered"))
        if report.seconds > SLOW_SYNC_SECONDS:
            largest = sorted(report.manifest, key=lambda entry: -entry.size)[:3]
            logger.warning(
                "Syncing the artifacts of %s took %.0f s (%d files, %.1f MB sent; the largest artifacts: %s). To make "
                "it faster: exclude files (`ArtifactSyncer(exclude=...)`), write fewer or smaller ones, or raise "
                "`sync_period`.",
                self._trial,
                report.seconds,
                report.files_sent,
                report.bytes_sent / 1e6,
                ", ".join(f"{entry.path} {entry.size / 1e6:.1f} MB" for entry in largest),
                extra=self.fields(
                    "sync_slow", seconds=report.seconds, files_sent=report.files_sent, bytes_sent=report.bytes_sent
                ),
            )

    def inexact(self, checkpoint: str, *, listed: int | None) -> None:
        """Says what is restored for a checkpoint that has no snapshot.

        Args:
            checkpoint: Its name.
            listed: The number of files, where they were found by listing the trial dir.
        """
        extra = self.fields("restore_inexact", checkpoint=checkpoint, listed=listed)
        if listed is None:
            logger.warning(
                "Checkpoint %s of %s has no snapshot of its artifacts (an older run, or a failed sync); the newest "
                "artifacts are restored, which may be newer than the checkpoint.",
                checkpoint,
                self._trial,
                extra=extra,
            )
            return
        logger.warning(
            "%s was not run with ray-artifact-sync up to now: no manifest says which artifacts belong to %s. The %d "
            "files that its trial dir holds are restored, without checkpoints and the driver's files; they may be "
            "newer than the checkpoint.",
            self._trial,
            checkpoint,
            listed,
            extra=extra,
        )

    def lost(self, report: RestoreReport) -> None:
        """Names what a restore could not bring back."""
        if report.lost:
            logger.error(
                "%d artifacts of %s are not what they were at the checkpoint: that content is nowhere in %s any more "
                "(deleted or replaced by somebody%s). Their newest version was taken where there is one: %s",
                len(report.lost),
                self._trial,
                self._place,
                "" if self._history else ", or history=False",
                ", ".join(report.lost[:10]),
                extra=self.fields("artifacts_lost", files=len(report.lost)),
            )

    def skips(self, skips: tuple[Skip, ...]) -> None:
        """One warning for each file and reason; what the user excluded is no news."""
        for skip in skips:
            if skip.kind == "excluded" or (skip.path, skip.kind) in self._said:
                continue
            self._said.add((skip.path, skip.kind))
            extra = self.fields("file_skipped", path=skip.path, kind=skip.kind, reason=skip.reason)
            if skip.kind == "owned":
                logger.warning(
                    "%s in the working dir of %s is not synced: %s. Write it under another name to keep it.",
                    skip.path,
                    self._trial,
                    skip.reason,
                    extra=extra,
                )
            else:
                logger.warning("%s of %s is not synced: %s.", skip.path, self._trial, skip.reason, extra=extra)
