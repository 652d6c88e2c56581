"""`ls`: the trials at a place, and their artifacts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ray_artifact_sync.commands.output import (
    CANNOT,
    OK,
    complain,
    iso_time,
    plural,
    print_json,
    say,
    show_size,
    table,
)
from ray_artifact_sync.errors import ArtifactSyncError
from ray_artifact_sync.patterns import Selection
from ray_artifact_sync.trial_reader import TrialReader, load_all
from ray_artifact_sync.view import Artifact, ArtifactView, list_trial, show_time


@dataclass(frozen=True, slots=True)
class _Listed:
    """One trial; with an error, nothing of it could be read."""

    reader: TrialReader
    artifacts: tuple[Artifact, ...] = ()
    others: tuple[str, ...] = ()
    error: Exception | None = None

    @property
    def own(self) -> list[Artifact]:
        return [artifact for artifact in self.artifacts if artifact.owner is None]

    @property
    def total(self) -> int:
        return sum(artifact.size for artifact in self.own)


def run_ls(
    view: ArtifactView,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    show_all: bool = False,
    only_trials: bool = False,
    as_json: bool = False,
) -> int:
    """Lists. A trial that cannot be read does not hide the others: it is told on stderr, and in the exit code."""
    selection = Selection.of(include=include, exclude=exclude)
    failures = load_all(view.readers)
    listed = [_list(view, name, failures.get(name), selection) for name in view.trials]
    for one in listed:
        if one.error is not None:
            complain(str(one.error))
    if as_json:
        print_json("ls", _document(view, listed, only_trials=only_trials, show_all=show_all))
    elif only_trials:
        _show_trials(listed)
    else:
        _show_files(view, listed, show_all=show_all)
    return CANNOT if any(one.error is not None for one in listed) else OK


def _list(view: ArtifactView, name: str, failure: Exception | None, selection: Selection) -> _Listed:
    reader = view.readers[name]
    if failure is not None:
        return _Listed(reader, error=failure)
    try:
        artifacts = tuple(
            artifact
            for artifact in list_trial(reader, view.checkpoint)
            if selection.reason_to_skip(artifact.path) is None
        )
        others = [file.path for file, owner in reader.other_files() if owner is None] if not view.checkpoint else []
    except ArtifactSyncError as error:
        return _Listed(reader, error=error)
    return _Listed(reader, artifacts, tuple(path for path in others if selection.reason_to_skip(path) is None))


def _document(view: ArtifactView, listed: list[_Listed], *, only_trials: bool, show_all: bool) -> dict[str, Any]:
    trials = []
    for one in listed:
        trial: dict[str, Any] = {"trial": one.reader.name, "error": None if one.error is None else str(one.error)}
        if one.error is None:
            trial["checkpoints"] = [
                {"name": saved.name, "saved": iso_time(saved.saved_ns), "artifacts": len(saved.manifest)}
                for saved in one.reader.checkpoints.values()
            ]
            trial["artifact_count"] = len(one.own)
            trial["artifact_bytes"] = one.total
            if not only_trials:
                trial["artifacts"] = [
                    {
                        "path": artifact.path,
                        "size": artifact.size,
                        "written": iso_time(artifact.mtime_ns),
                        "digest": artifact.digest,
                        "checkpoint": artifact.checkpoint,
                        "owner": artifact.owner,
                    }
                    for artifact in one.artifacts
                ]
            if show_all:
                trial["other_files"] = list(one.others)
        trials.append(trial)
    return {"uri": view.uri, "checkpoint": view.checkpoint, "trials": trials}


def _show_files(view: ArtifactView, listed: list[_Listed], *, show_all: bool) -> None:
    for one in listed:
        if one.error is not None:
            continue
        if not view.is_single:
            say(one.reader.name)
        _show_trial(one, show_all=show_all)
        if not view.is_single:
            say()
    artifacts = sum(len(one.own) for one in listed)
    as_of = f" as of {view.checkpoint}" if view.checkpoint else ""
    total = show_size(sum(one.total for one in listed))
    say(f"{plural(artifacts, 'artifact')} of {plural(len(listed), 'trial')}{as_of}, {total}")
    others = sum(len(one.others) for one in listed)
    if others and not show_all:
        say(f"{plural(others, 'more file')} that no manifest lists (--all shows them)")


def _show_trial(one: _Listed, *, show_all: bool) -> None:
    rows = [
        (
            show_size(artifact.size),
            show_time(artifact.mtime_ns),
            artifact.checkpoint or "-",
            artifact.owner or "",
            artifact.path,
        )
        for artifact in one.artifacts
    ]
    table(("SIZE", "WRITTEN (UTC)", "SINCE CHECKPOINT", "OWNER", "PATH"), rows, right=("SIZE",))
    for path in one.others if show_all else ():
        say(f"{path}  (no manifest lists it)")


def _show_trials(listed: list[_Listed]) -> None:
    rows = [
        (
            f"{len(one.own):,}",
            show_size(one.total),
            str(len(one.reader.checkpoints)),
            [*one.reader.checkpoints, "-"][max(len(one.reader.checkpoints) - 1, 0)],
            one.reader.name,
        )
        for one in listed
        if one.error is None
    ]
    columns = ("ARTIFACTS", "SIZE", "CHECKPOINTS", "NEWEST CHECKPOINT", "TRIAL")
    table(columns, rows, right=("ARTIFACTS", "SIZE", "CHECKPOINTS"))
