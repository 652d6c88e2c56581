"""`pull`: downloads artifacts into a local directory."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ray_artifact_sync.commands.downloads import Wanted, check_destination, download
from ray_artifact_sync.commands.output import CANNOT, OK, complain, plural, print_json, progress, say, show_size
from ray_artifact_sync.patterns import Selection
from ray_artifact_sync.trial_reader import load_all
from ray_artifact_sync.view import ArtifactView

SHOWN_FAILURES = 20


def run_pull(
    view: ArtifactView,
    dest: str,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    force: bool = False,
    as_json: bool = False,
) -> int:
    """Downloads what the view shows. See `downloads.download` for what is atomic."""
    dest = os.path.abspath(os.path.expanduser(dest))
    check_destination(dest)
    selection = Selection.of(include=include, exclude=exclude)
    failures: dict[str, Exception] = {}
    failures.update(load_all(view.readers))
    wanted = []
    for name, reader in view.readers.items():
        if name in failures:
            continue
        try:
            manifest = reader.manifest(view.checkpoint)
        except ValueError as error:  # a damaged manifest, or one of a newer release
            failures[name] = error
            continue
        wanted += [
            Wanted(reader, entry, entry.path if view.is_single else f"{name}/{entry.path}")
            for entry in manifest
            if selection.reason_to_skip(entry.path, entry.is_dir) is None
        ]
    report = download(
        wanted, dest, force=force, watch=lambda size, files: progress("Pulling", total_bytes=size, files=files)
    )
    failures.update(report.failures)
    if as_json:
        print_json(
            "pull",
            {
                "uri": view.uri,
                "checkpoint": view.checkpoint,
                "dest": dest,
                "files": report.files,
                "bytes": report.bytes_read,
                "kept": report.kept,
                "failures": [{"path": path, "error": str(error)} for path, error in sorted(failures.items())],
            },
        )
    else:
        kept = f"; {plural(report.kept, 'file')} there already" if report.kept else ""
        say(f"{plural(report.files, 'file')}, {show_size(report.bytes_read)}, to {dest}{kept}")
    for path in sorted(failures)[:SHOWN_FAILURES]:
        complain(f"{path}: {failures[path]}")
    if len(failures) > SHOWN_FAILURES:
        complain(f"... and {len(failures) - SHOWN_FAILURES} more failed.")
    return CANNOT if failures else OK
