"""Counters and a histogram of the syncs, in Ray's own metrics: Ray's dashboard and Prometheus show them.

Their only tag of ours is the experiment: a tag with a value for each trial would make a time series for each.
"""

from __future__ import annotations

import logging
from typing import Any

from ray_artifact_sync.journal import JournalRecord

logger = logging.getLogger(__name__)

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper ends of the histogram's buckets."""


class SyncMetrics:
    """Observes a session (see `session_events.Observer`). Never raises; needs a process of Ray.

    Args:
        experiment: The experiment's name, the tag of all metrics.
    """

    def __init__(self, experiment: str) -> None:
        self._tags = {"experiment": experiment}
        self._metrics: dict[str, Any] = {}
        self._failed = False

    def __call__(self, record: JournalRecord) -> None:
        """Counts what a session did."""
        if self._failed or record.kind not in ("sync", "failure"):
            return
        try:
            self._count(record)
        except Exception as error:
            self._failed = True
            logger.warning("The syncs of %s are not in Ray's metrics: %s", self._tags["experiment"], error)

    def _count(self, record: JournalRecord) -> None:
        metrics = self._metrics or self._make()
        for name, value in (
            ("bytes_sent", record.bytes_sent),
            ("files_sent", record.files_sent),
            ("retries", record.retries),
            ("failed_syncs", int(record.kind == "failure" or record.failed > 0)),
        ):
            if value:
                metrics[name].inc(value, self._tags)
        if record.kind == "sync":
            metrics["seconds"].observe(record.seconds, self._tags)

    def _make(self) -> dict[str, Any]:
        from ray.util.metrics import Counter, Histogram  # noqa: PLC0415  (only in a process of Ray)

        def counter(name: str, description: str) -> Any:
            return Counter(f"artifact_sync_{name}", description=description, tag_keys=("experiment",))

        self._metrics = {
            "bytes_sent": counter("bytes_sent", "Bytes of artifacts sent to storage."),
            "files_sent": counter("files_sent", "Artifacts sent to storage."),
            "retries": counter("retries", "Requests for artifacts that were tried again."),
            "failed_syncs": counter("failed_syncs", "Syncs that did not bring everything to storage."),
            "seconds": Histogram(
                "artifact_sync_seconds",
                description="Duration of a sync of artifacts.",
                boundaries=list(SECONDS),
                tag_keys=("experiment",),
            ),
        }
        return self._metrics
