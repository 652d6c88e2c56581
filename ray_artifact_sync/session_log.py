"""What a session says to people: each thing once, with its cause and what to do; and the totals that results carry."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ray_artifact_sync.entries import Skip
from ray_artifact_sync.sync_down import RestoreReport
from ray_artifact_sync.sync_up import SyncReport

logger = logging.getLogger(__name__)

SLOW_SYNC_SECONDS = 30.0


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
        history: Whether the session keeps old versions.
        stats: Counted here: failed syncs.
    """

    def __init__(self, trial: str, place: str, *, history: bool, stats: SyncStats) -> None:
        self._trial = trial
        self._place = place
        self._history = history
        self._stats = stats
        self._said: set[tuple[str, str]] = set()
        self._last_failure = ""

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
        )

    def success(self, report: SyncReport) -> None:
        """Says when syncs work again, and when one was slow."""
        if self._last_failure:
            self._last_failure = ""
            logger.info("The artifacts of %s are in sync again.", self._trial)
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
            )

    def skips(self, skips: tuple[Skip, ...]) -> None:
        """One warning for each file and reason; what the user excluded is no news."""
        for skip in skips:
            if skip.kind == "excluded" or (skip.path, skip.kind) in self._said:
                continue
            self._said.add((skip.path, skip.kind))
            if skip.kind == "owned":
                logger.warning(
                    "%s in the working dir of %s is not synced: %s. Write it under another name to keep it.",
                    skip.path,
                    self._trial,
                    skip.reason,
                )
            else:
                logger.warning("%s of %s is not synced: %s.", skip.path, self._trial, skip.reason)
