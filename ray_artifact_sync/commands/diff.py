"""`diff`: what changed between two checkpoints, or between a checkpoint and now."""

from __future__ import annotations

from typing import Any

from ray_artifact_sync.commands.output import OK, plural, print_json, say, show_size, table
from ray_artifact_sync.entries import FileEntry
from ray_artifact_sync.trial_reader import load_all
from ray_artifact_sync.view import ArtifactView


def run_diff(old: ArtifactView, new: ArtifactView, *, as_json: bool = False) -> int:
    """Compares two views by path and digest. Of one trial each, or of experiments with trials of the same names."""
    before, after = _entries(old, new), _entries(new, old)
    added = sorted(after.keys() - before.keys())
    removed = sorted(before.keys() - after.keys())
    common = before.keys() & after.keys()
    changed = sorted(path for path in common if not before[path].same_content(after[path]))
    if as_json:
        print_json(
            "diff",
            {
                "old": _side(old),
                "new": _side(new),
                "added": [_version(path, after[path]) for path in added],
                "removed": [_version(path, before[path]) for path in removed],
                "changed": [
                    {
                        "path": path,
                        "old": _version(path, before[path]),
                        "new": _version(path, after[path]),
                    }
                    for path in changed
                ],
                "unchanged": len(common) - len(changed),
            },
        )
        return OK
    rows = [("added", "", show_size(after[path].size), path) for path in added]
    rows += [("removed", show_size(before[path].size), "", path) for path in removed]
    rows += [("changed", show_size(before[path].size), show_size(after[path].size), path) for path in changed]
    if rows:
        table(("", "OLD", "NEW", "PATH"), sorted(rows, key=lambda row: row[3]), right=("OLD", "NEW"))
    say(
        f"{len(added)} added, {len(removed)} removed, {len(changed)} changed, "
        f"{plural(len(common) - len(changed), 'file')} equal"
    )
    return OK


def _entries(view: ArtifactView, other: ArtifactView) -> dict[str, FileEntry]:
    if failures := load_all(view.readers):
        raise next(iter(failures.values()))
    named = len(view.trials) > 1 or len(other.trials) > 1
    return {
        f"{name}/{entry.path}" if named else entry.path: entry
        for name, reader in view.readers.items()
        for entry in reader.manifest(view.checkpoint)
    }


def _side(view: ArtifactView) -> dict[str, Any]:
    return {"uri": view.uri, "checkpoint": view.checkpoint}


def _version(path: str, entry: FileEntry) -> dict[str, Any]:
    return {"path": path, "size": entry.size, "digest": entry.digest or None}
