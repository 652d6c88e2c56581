"""`report`: one HTML page about an experiment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ray_artifact_sync.commands.output import CANNOT, NOT_RIGHT, OK, complain, plural, print_json, say, show_size
from ray_artifact_sync.errors import ConfigurationError
from ray_artifact_sync.report import build_page, check_output, write_page
from ray_artifact_sync.report_data import ExperimentReport, collect
from ray_artifact_sync.report_json import as_json as report_json
from ray_artifact_sync.view import ArtifactView

MOST_MB = 1000.0
SHOWN = 20


def run_report(
    view: ArtifactView, output: str, *, max_embed_mb: float, force: bool = False, as_json: bool = False
) -> int:
    """Writes the page, or prints its data."""
    if not 0 <= max_embed_mb <= MOST_MB:
        raise ConfigurationError(f"--max-embed-mb must be a number from 0 to {MOST_MB:g}, not {max_embed_mb:g}.")
    output = os.path.abspath(os.path.expanduser(output))
    if not as_json:
        check_output(output, force=force)
    with _reading(len(view.readers)):
        report = collect(view.found.place, view.readers, embed_bytes=0 if as_json else int(max_embed_mb * 1e6))
    if as_json:
        print_json("report", report_json(report))
    else:
        page = build_page(report)
        write_page(output, page)
        say(f"{plural(len(report.trials), 'trial')}, {_embedded(report)}; {output} ({show_size(len(page))})")
    unreadable = [trial for trial in report.trials if trial.error]
    for trial in unreadable[:SHOWN]:
        complain(f"{trial.name}: {trial.error}")
    if len(unreadable) > SHOWN:
        complain(f"... and {len(unreadable) - SHOWN} more trials cannot be read.")
    if len(unreadable) == len(report.trials):
        return CANNOT
    return NOT_RIGHT if unreadable else OK


def _embedded(report: ExperimentReport) -> str:
    items = [item for trial in report.trials for item in trial.embedded]
    shown = sum(item.data is not None for item in items)
    left_out = len(items) - shown
    return f"{plural(shown, 'file')} embedded" + (f" ({left_out} left out)" if left_out else "")


@contextmanager
def _reading(trials: int) -> Iterator[None]:
    """Says what goes on, on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415  (only on terminals)

    with Console(stderr=True).status(f"Reading {plural(trials, 'trial')} ..."):
        yield
