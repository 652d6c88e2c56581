"""The report as values for JSON: totals, events, what grew, what was skipped. Bounded, whatever the storage holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ray_artifact_sync._version import __version__
from ray_artifact_sync.entries import Manifest
from ray_artifact_sync.journal import JournalRecord
from ray_artifact_sync.report_data import ExperimentReport, TrialReport, sort_of, visible

MAX_EVENTS = 600
"""Of one trial; neighbouring syncs become one beyond that."""
ALL_EVENTS = 60_000
"""Of all trials together: their share gets smaller."""
MIN_EVENTS = 100
MAX_FILES = 15
MAX_SKIPS = 200
MAX_FAILURES = 100
MAX_CHECKPOINTS = 500
SHORTEST_GROWTH = 60.0
"""Seconds: what a file grew by in less says little about an hour."""


def as_json(report: ExperimentReport) -> dict[str, Any]:
    """The report without the contents of files; every name and message is visible text. See `ray-artifact-sync report`.

    Times are Unix seconds, sizes bytes. Numbers that are 0 and texts that are empty are left out of events.
    """
    limit = max(MIN_EVENTS, min(MAX_EVENTS, ALL_EVENTS // max(1, len(report.trials))))
    return {
        "uri": report.uri,
        "name": report.name,
        "made": round(report.made, 3),
        "version": __version__,
        "trials": [_trial_json(trial, limit) for trial in report.trials],
    }


def _trial_json(trial: TrialReport, limit: int) -> dict[str, Any]:
    records = trial.journal.records if trial.journal is not None else ()
    largest = sorted((entry for entry in trial.head if not entry.is_dir), key=lambda entry: -entry.size)
    skips = _skips(records)
    failures = [_failure(record) for record in records if record.error]
    embedded = [
        {"path": item.path, "size": item.size, "sort": item.sort, "mime": item.mime, "left_out": item.left_out}
        for item in trial.embedded
    ]
    return {
        "name": trial.name,
        "error": trial.error,
        "note": trial.note,
        "damaged": trial.damaged,
        "files": sum(not entry.is_dir for entry in trial.head),
        "bytes": trial.head.total_bytes,
        "totals": _totals(records),
        "attempts": _attempts(records),
        "events": _events(records, limit),
        "journal": None
        if trial.journal is None
        else {"damaged": trial.journal.damaged, "unknown": trial.journal.unknown, "cut": trial.journal.cut},
        "checkpoints": _checkpoints(trial),
        "largest": [
            {"path": visible(entry.path), "size": entry.size, "written": _seconds(entry.mtime_ns)}
            for entry in largest[:MAX_FILES]
        ],
        "growing": _growing(trial),
        "skipped": skips[:MAX_SKIPS],
        "skipped_in_all": sum(record.skipped for record in records),
        "failures": failures[-MAX_FAILURES:],
        "failures_in_all": len(failures),
        "embedded": embedded,
        "not_embedded": _not_embedded(trial),
    }


def _seconds(ns: int) -> float | None:
    return round(ns / 1e9, 3) if 0 < ns < 1 << 62 else None


def _totals(records: Iterable[JournalRecord]) -> dict[str, int]:
    totals: dict[str, int] = defaultdict(int)
    for record in records:
        for name in ("files_sent", "bytes_sent", "bytes_changed", "requests", "retries"):
            totals[name] += getattr(record, name)
        totals["syncs"] += (record.kind == "sync") + record.idle
        totals["checkpoints"] += record.kind == "checkpoint" and record.exact
        totals["restores"] += record.kind == "restore"
        totals["failures"] += bool(record.error) * (1 + record.repeats)
    return dict(totals)


def _attempts(records: Iterable[JournalRecord]) -> list[dict[str, Any]]:
    """Each attempt: from when to when, on which node, and whether it came to its end."""
    attempts: dict[str, dict[str, Any]] = {}
    for record in records:
        attempt = attempts.setdefault(
            record.attempt, {"begin": record.t - record.seconds, "end": record.t, "host": "", "closed": False}
        )
        attempt["begin"] = round(min(attempt["begin"], record.t - record.seconds), 3)
        attempt["end"] = round(max(attempt["end"], record.t), 3)
        attempt["host"] = attempt["host"] or visible(record.host)
        attempt["closed"] = attempt["closed"] or record.kind == "close"
    return list(attempts.values())


_IN_EVENTS = (
    "seconds",
    "files_sent",
    "bytes_sent",
    "bytes_changed",
    "retries",
    "failed",
    "repeats",
    "files_read",
    "bytes_read",
    "files_local",
)


def _events(records: Sequence[JournalRecord], limit: int) -> list[dict[str, Any]]:
    groups = [[record] for record in records]
    while len(groups) > limit:
        fewer = _paired(groups)
        if len(fewer) == len(groups):
            break
        groups = fewer
    return [_event(group) for group in groups[-2 * limit :]]


def _paired(groups: list[list[JournalRecord]]) -> list[list[JournalRecord]]:
    """Neighbouring groups of syncs put together, two and two; checkpoints, restores and failures stay."""
    fewer: list[list[JournalRecord]] = []
    mergeable = False
    for group in groups:
        plain = all(record.kind == "sync" and not record.error for record in group)
        same_attempt = bool(fewer) and fewer[-1][-1].attempt == group[0].attempt
        if plain and mergeable and same_attempt:
            fewer[-1] = fewer[-1] + group
            mergeable = False
        else:
            fewer.append(group)
            mergeable = plain
    return fewer


def _event(group: list[JournalRecord]) -> dict[str, Any]:
    record = group[-1]
    if len(group) > 1:
        summed = ("seconds", "files_sent", "bytes_sent", "bytes_changed", "retries")
        record = replace(record, **{name: sum(getattr(one, name) for one in group) for name in summed})
    event: dict[str, Any] = {"kind": record.kind, "t": round(record.t, 3)}
    for name in _IN_EVENTS if record.kind == "sync" else (*_IN_EVENTS, "files", "bytes"):
        if value := getattr(record, name):
            event[name] = round(value, 3) if isinstance(value, float) else value
    if len(group) > 1:
        event["syncs"] = len(group)
    for name in ("checkpoint", "error"):
        if text := getattr(record, name):
            event[name] = visible(text)
    if not record.exact:
        event["exact"] = False
    return event


def _failure(record: JournalRecord) -> dict[str, Any]:
    return {
        "t": round(record.t, 3),
        "kind": record.kind,
        "error": visible(record.error),
        "checkpoint": visible(record.checkpoint),
        "failed": record.failed,
        "times": 1 + record.repeats,
    }


def _skips(records: Iterable[JournalRecord]) -> list[dict[str, Any]]:
    """Files that were not synced, each once, with the newest reason."""
    skips: dict[str, dict[str, Any]] = {}
    for record in records:
        for skip in record.skips:
            path = visible(skip.path)
            skips.pop(path, None)
            skips[path] = {
                "path": path,
                "kind": visible(skip.kind),
                "reason": visible(skip.reason),
                "t": round(record.t, 3),
            }
    return list(skips.values())


def _checkpoints(trial: TrialReport) -> list[dict[str, Any]]:
    """Those with a snapshot: how many files differ from the one before, and how much these hold."""
    found = []
    before = Manifest()
    for name, t, manifest in trial.checkpoints:
        changed = [entry for entry in manifest if not entry.is_dir and not entry.same_content(before.get(entry.path))]
        found.append(
            {
                "name": visible(name),
                "t": round(t, 3) if t is not None else None,
                "files": sum(not entry.is_dir for entry in manifest),
                "bytes": manifest.total_bytes,
                "files_changed": len(changed),
                "bytes_in_changed": sum(entry.size for entry in changed),
            }
        )
        before = manifest
    return found[-MAX_CHECKPOINTS:]


def _growing(trial: TrialReport) -> list[dict[str, Any]]:
    """The files that grew most, from what checkpoints, the journal and the head say of their sizes."""
    sizes: dict[str, dict[float, int]] = defaultdict(dict)
    for _, t, manifest in trial.checkpoints:
        for entry in manifest if t is not None else ():
            if not entry.is_dir:
                sizes[entry.path][t or 0.0] = entry.size
    for record in trial.journal.records if trial.journal is not None else ():
        for file in record.sent:
            sizes[file.path][record.t] = file.size
    grown: list[dict[str, Any]] = []
    for path, points in sizes.items():
        now = trial.head.get(path)
        if now is None or len(points) < 2:  # noqa: PLR2004  (from one size to another)
            continue
        first, last = min(points), max(points)
        if points[last] > points[first]:
            grown.append(
                {
                    "path": visible(path),
                    "from": points[first],
                    "size": points[last],
                    "seconds": round(last - first, 3),
                    "per_hour": round((points[last] - points[first]) / max(last - first, SHORTEST_GROWTH) * 3600),
                }
            )
    return sorted(grown, key=lambda one: -one["per_hour"])[:MAX_FILES]


def _not_embedded(trial: TrialReport) -> dict[str, int]:
    """How many files could be shown by their kind, and are neither in the page nor named there."""
    counts = {"pictures": 0, "texts": 0}
    for entry in trial.head:
        found = None if entry.is_dir else sort_of(entry.path)
        if found is not None:
            counts["pictures" if found[0] == "picture" else "texts"] += 1
    for item in trial.embedded:
        counts["pictures" if item.sort == "picture" else "texts"] -= 1
    return counts
