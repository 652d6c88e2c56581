"""`history`: the versions of one file over the checkpoints."""

from __future__ import annotations

from ray_artifact_sync.commands.output import OK, iso_time, print_json, say, show_size, table
from ray_artifact_sync.errors import ArtifactNotFoundError
from ray_artifact_sync.trial_reader import load_all
from ray_artifact_sync.view import ArtifactView, Version, show_time, versions_of

SHOWN_NAMES = 3


def run_history(view: ArtifactView, path: str, *, as_json: bool = False) -> int:
    """Shows the versions. Where the view has several trials, the path begins with a trial's name, or means all."""
    if failures := load_all(view.readers):
        raise next(iter(failures.values()))
    found = _versions(view, path)
    if as_json:
        print_json(
            "history",
            {
                "uri": view.uri,
                "path": path,
                "versions": [
                    {
                        "trial": version.trial,
                        "path": version.path,
                        "size": version.size,
                        "digest": version.digest,
                        "written": iso_time(version.mtime_ns),
                        "checkpoints": list(version.checkpoints),
                        "newest": version.is_newest,
                        "place": version.place,
                    }
                    for version in found
                ],
            },
        )
        return OK
    for trial in dict.fromkeys(version.trial for version in found):
        versions = [version for version in found if version.trial == trial]
        say(f"{trial}/{versions[0].path}")
        rows = [
            (
                show_size(version.size),
                show_time(version.mtime_ns),
                version.digest[:12],
                _checkpoints(version),
                version.place or "nowhere any more",
            )
            for version in versions
        ]
        table(("SIZE", "WRITTEN (UTC)", "DIGEST", "IN", "BYTES AT"), rows, right=("SIZE",))
    return OK


def _versions(view: ArtifactView, path: str) -> list[Version]:
    try:
        return list(view.versions(path))
    except ArtifactNotFoundError:
        found = [version for reader in view.readers.values() for version in versions_of(reader, path)]
        if not found:
            raise
        return found


def _checkpoints(version: Version) -> str:
    names = [*version.checkpoints, *(["newest"] if version.is_newest else [])]
    if len(names) <= SHOWN_NAMES:
        return ", ".join(names)
    return f"{names[0]}, ..., {names[-1]} ({len(names)} in all)"
