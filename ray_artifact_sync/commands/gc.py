"""`gc`: removes what nothing refers to any more."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ray_artifact_sync.commands.garbage import KINDS, Garbage, Piece, SignsOfLife, find_garbage, remove_garbage
from ray_artifact_sync.commands.output import CANNOT, OK, complain, plural, print_json, say, show_size, table
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.errors import ArtifactSyncError, ConfigurationError
from ray_artifact_sync.experiments import Found, FoundTrial
from ray_artifact_sync.run_parts import RunPartDir
from ray_artifact_sync.sharded_upload import SetDir
from ray_artifact_sync.stores import ArtifactStore, open_store
from ray_artifact_sync.trial_dir import TrialDir

TRIALS_AT_ONCE = 8
SAFE_SECONDS = 3600.0
"""A trial that runs may well write nothing for so long; less must be confirmed."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?")
_UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(slots=True)
class _Cleaning:
    """One trial dir."""

    name: str
    trial: TrialDir
    garbage: Garbage
    removed: int = 0
    removed_bytes: int = 0
    error: str = ""


def duration(text: str) -> float:
    """Seconds: `24h`, `30min`, `7d`, `90`.

    Raises:
        ConfigurationError: It is none.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(f"{text!r} is no duration; write 24h, 30min, 7d or a number of seconds.")
    return float(found[1]) * _UNITS[found[2]]


def run_gc(
    found: Found, *, older_than: str = "24h", nothing_running: bool = False, delete: bool = False, as_json: bool = False
) -> int:
    """Finds garbage and, with `delete`, removes it. See `garbage` for what it is and why a running trial is safe."""
    seconds = duration(older_than)
    if seconds < SAFE_SECONDS and not nothing_running:
        raise ConfigurationError(
            f"A running trial may well write nothing for {older_than}, and --older-than tells it from one that is "
            "over. Take 1h or more, or say with --nothing-running that no trial there is running."
        )
    signs = SignsOfLife(_above(found))
    cleanings: list[_Cleaning] = []

    def look(one: FoundTrial) -> None:
        try:
            garbage = find_garbage(one.trial, older_than=seconds, signs=signs.of(one.name, one.trial))
            cleaning = _Cleaning(one.name, one.trial, garbage)
        except ArtifactSyncError as error:
            cleaning = _Cleaning(one.name, one.trial, Garbage(), error=str(error))
        cleanings.append(cleaning)

    places = {id(one.trial.store): one for one in (*found.trials, *found.directories)}
    run_all(places.values(), look, workers=TRIALS_AT_ONCE, deadline=Deadline())
    cleanings.sort(key=lambda cleaning: cleaning.name)
    if delete:
        run_all(cleanings, _remove, workers=TRIALS_AT_ONCE, deadline=Deadline())
    if as_json:
        _print_document(found, cleanings, delete=delete)
    else:
        _show(cleanings, delete=delete)
    for cleaning in cleanings:
        if cleaning.error or cleaning.garbage.is_problem:
            complain(f"{cleaning.name}: {cleaning.error or cleaning.garbage.skipped}")
    return CANNOT if any(cleaning.error or cleaning.garbage.is_problem for cleaning in cleanings) else OK


def _above(found: Found) -> ArtifactStore | None:
    """The directory that the trials lie in: the experiment's, where a trial itself was named."""
    if not found.single:
        return found.store
    trial, path = found.trials[0].trial, found.place.path
    if isinstance(trial, SetDir):
        return None
    if isinstance(trial, RunPartDir):
        path = path.rpartition("/")[0].rpartition("/")[0]
    parent = path.rpartition("/")[0]
    return open_store(found.place.filesystem, parent) if parent else None


def _remove(cleaning: _Cleaning) -> None:
    try:
        for batch in remove_garbage(cleaning.trial, cleaning.garbage):
            cleaning.removed += len(batch)
            cleaning.removed_bytes += sum(piece.size for piece in batch)
    except ArtifactSyncError as error:
        cleaning.error = str(error)


def _print_document(found: Found, cleanings: list[_Cleaning], *, delete: bool) -> None:
    print_json(
        "gc",
        {
            "uri": found.place.uri,
            "dry_run": not delete,
            "trials": [
                {
                    "trial": cleaning.name,
                    "garbage": [
                        {"kind": piece.kind, "path": piece.path, "size": piece.size}
                        for piece in cleaning.garbage.pieces
                    ],
                    "removed": cleaning.removed,
                    "removed_bytes": cleaning.removed_bytes,
                    "skipped": cleaning.garbage.skipped or None,
                    "error": cleaning.error or None,
                }
                for cleaning in cleanings
            ],
        },
    )


def _show(cleanings: list[_Cleaning], *, delete: bool) -> None:
    rows = [
        (_counts(cleaning.garbage.pieces), show_size(cleaning.garbage.size), cleaning.name)
        for cleaning in cleanings
        if cleaning.garbage.pieces
    ]
    if rows:
        table(("NOTHING REFERS TO", "SIZE", "IN"), rows, right=("SIZE",))
    for cleaning in cleanings:
        if cleaning.garbage.skipped and not cleaning.garbage.is_problem:
            say(f"{cleaning.name} is left alone: {cleaning.garbage.skipped}")
    count = sum(len(cleaning.garbage.pieces) for cleaning in cleanings)
    if delete:
        removed = sum(cleaning.removed for cleaning in cleanings)
        say(f"{plural(removed, 'file')} removed, {show_size(sum(one.removed_bytes for one in cleanings))}")
    elif count:
        say(f"{plural(count, 'file')}, {show_size(sum(one.garbage.size for one in cleanings))}: --delete removes them")
    else:
        say("Nothing to remove.")


_NAMES = {"aside": "old record", "layer": "layer", "object": "old version", "tmp": "temporary file", "probe": "probe"}


def _counts(pieces: tuple[Piece, ...]) -> str:
    counts = {kind: sum(piece.kind == kind for piece in pieces) for kind in KINDS}
    return ", ".join(plural(count, _NAMES[kind]) for kind, count in counts.items() if count)
