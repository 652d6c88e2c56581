"""`RestoringAttempt`: what brings artifacts back to the working dir: as of a checkpoint, the own or another trial's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from blake3 import blake3

from ray_artifact_sync.attempt_sync import SyncingAttempt
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.errors import ArtifactConflictError, ArtifactSyncError, IncompleteSyncError
from ray_artifact_sync.manifest import ManifestStack
from ray_artifact_sync.sync_down import RestorePass, RestoreReport
from ray_artifact_sync.trial_dir import TrialDir

logger = logging.getLogger(__name__)


class RestoringAttempt(SyncingAttempt):
    """An attempt that can bring artifacts back, too."""

    def _noted(self, checkpoint: str, restore: Callable[[], RestoreReport]) -> RestoreReport:
        try:
            report = restore()
        except IncompleteSyncError as error:
            self._events.failed(error, checkpoint=checkpoint)
            raise
        self._events.restored(checkpoint, report)
        return report

    def _restore(self, checkpoint: str, deadline: Deadline, *, fresh: bool) -> RestoreReport:
        self._open_for_reading(deadline)
        known = self._known
        stack = known.retained.get(checkpoint) or self._request(
            lambda: self.trial.snapshot(checkpoint), deadline, "Reading the snapshot"
        )
        if stack is not None:
            return self._bring_back(stack, deadline, exact=True, fresh=fresh)
        # What is taken in place of a snapshot is recorded: after the next crash, the same is taken again.
        key = _record_key("", checkpoint, self._registered)
        stack = known.exploits.get(key) or self._newest(fresh=fresh)
        listed = len(stack.manifest) if self._is_listing(stack) else None
        report = self._bring_back(stack, deadline, exact=False, fresh=fresh, record=key)
        # Afterwards: what `log_to_file` wrote before is as of the checkpoint now.
        self._log.inexact(checkpoint, listed=listed)
        return report

    def _newest(self, *, fresh: bool) -> ManifestStack:
        """The newest artifacts: those that the head lists; where nothing was ever committed, all files that are there.

        Before the first step, a background sync may have committed what `setup()` wrote; that is not meant.
        """
        stack = self._known.found if fresh else self._known.stack
        if self._known.headless and stack is self._known.found:
            return ManifestStack(self._known.listing(self._rule))
        return stack

    def _is_listing(self, stack: ManifestStack) -> bool:
        """Whether a stack was never committed: its digests are found out by the restore."""
        return not stack.manifest.token and any(not entry.digest and not entry.is_dir for entry in stack.manifest)

    def _restore_foreign(self, donor: TrialDir, checkpoint: str, deadline: Deadline, *, fresh: bool) -> RestoreReport:
        self._open_for_reading(deadline)
        if self.options.adopt_foreign_artifacts:
            return self._adopt(donor, checkpoint, deadline, fresh=fresh)
        key = _record_key(f"{donor.store.description}\n{donor.name}", checkpoint, self._registered)
        logger.info(
            "%s took over %s of %s and keeps its own artifacts.",
            self.trial.name,
            checkpoint,
            donor.name,
            extra=self._log.fields("foreign_checkpoint", checkpoint=checkpoint, donor=donor.name),
        )
        if fresh:
            stack = self._known.exploits.get(key) or self._newest(fresh=True)
            return self._bring_back(stack, deadline, exact=True, fresh=True, record=key)
        try:
            # The working dir is the truth; nothing to bring back.
            self._sync(deadline)
            self._record(key, deadline, anew=True)
        except ArtifactConflictError:
            raise
        except ArtifactSyncError as error:
            self._note_failure(error)
        return RestoreReport(self._known.stack.manifest, exact=True)

    def _adopt(self, donor: TrialDir, checkpoint: str, deadline: Deadline, *, fresh: bool) -> RestoreReport:
        stack = self._request(lambda: donor.snapshot(checkpoint), deadline, "Reading the donor's snapshot")
        if stack is None:
            logger.warning(
                "%s of %s has no snapshot; %s keeps its own artifacts.",
                checkpoint,
                donor.name,
                self.trial.name,
                extra=self._log.fields("restore_inexact", checkpoint=checkpoint, donor=donor.name),
            )
            return self._bring_back(self._newest(fresh=fresh), deadline, exact=False, fresh=fresh)
        with self._exclusive(deadline), self._restoring():
            report = self._restore_pass(donor, donor.objects(), deadline, fresh=fresh).run(stack.manifest, exact=True)
        self._log.lost(report)
        return report

    def _bring_back(
        self, stack: ManifestStack, deadline: Deadline, *, exact: bool, fresh: bool, record: str = ""
    ) -> RestoreReport:
        known = self._known
        with self._exclusive(deadline), self._restoring():
            report = self._restore_pass(self.trial, known.objects(self.token), deadline, fresh=fresh).run(
                stack.manifest, exact=exact
            )
        self._log.lost(report)
        listing = self._is_listing(stack)
        if listing:
            known.learn_contents(report.manifest)
        try:
            # The head follows: a crash before the next sync must not leave the superseded one as the newest.
            self._request(self._check_writer, deadline, "Looking at the claim")
            self._commit(report.manifest if report.lost or listing else stack.manifest, deadline)
            if record:
                self._record(record, deadline)
        except ArtifactConflictError:
            raise
        except ArtifactSyncError as error:
            self._note_failure(error)
        return report

    def _restore_pass(
        self,
        trial: TrialDir,
        objects: Mapping[str, tuple[str, ...]],
        deadline: Deadline,
        *,
        fresh: bool,
    ) -> RestorePass:
        return RestorePass(
            trial=trial,
            working_dir=self._working_dir,
            objects=objects,
            rule=self.options.skip_rule,  # what a checkpoint lists is the worker's, whoever writes at its path now
            foreign=self._taken,
            keep_unlisted=fresh,
            max_concurrency=self.options.max_concurrency,
            retries=self.options.retries,
            deadline=deadline,
            tolerant=self.options.on_error == "warn",
            watcher=self._watcher,
        )


def _record_key(donor: str, checkpoint: str, newest: int | None) -> str:
    """The name of the record of what a checkpoint stands for that says nothing about this trial's artifacts.

    Args:
        donor: The trial that it belongs to; empty for the trial itself, wherever it lies.
        checkpoint: Its name.
        newest: Index of the own newest checkpoint. Once there is a newer one, the record stands for nothing.
    """
    text = f"{donor}\n{checkpoint}" if newest is None else f"{donor}\n{checkpoint}\n{newest}"
    return blake3(text.encode()).hexdigest()[:32]
