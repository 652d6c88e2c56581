"""The table at the end of the demo."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.table import Table

from ray_artifact_sync.demo.counting import FileCount, LineCount, TrialCount
from ray_artifact_sync.demo.scenarios import SCENARIOS


def side_by_side(sides: Mapping[str, Mapping[str, TrialCount]]) -> Table:
    """Every scenario with one column a side.

    Args:
        sides: Column title to scenario name to what was counted.
    """
    table = Table(box=box.ASCII2, header_style="bold")
    table.add_column("", no_wrap=True)
    for title in sides:
        table.add_column(title, justify="right", no_wrap=True)
    for scenario in SCENARIOS:
        counts = [trials[scenario.name] for trials in sides.values()]
        expected = counts[0].lines.expected
        table.add_section()
        table.add_row(f"[bold]{scenario.title}[/bold]", *("" for _ in counts))
        table.add_row(f"  log in storage, {expected} lines expected", *(_lines(count.lines) for count in counts))
        if scenario.kills:
            table.add_row("  rewritten files as of the checkpoint at resume", *(_files(it.at_resume) for it in counts))
            table.add_row("  files of cleanup() in storage", *(_files(it.at_stop) for it in counts))
        else:
            table.add_row("  files of the step and of cleanup() in storage", *(_files(it.at_stop) for it in counts))
    return table


def _lines(lines: LineCount) -> str:
    parts = [f"{lines.lost} lost", f"{lines.duplicated} twice"]
    if lines.foreign:
        parts.append(f"{lines.foreign} torn")
    if not lines.in_order:
        parts.append("out of order")
    return _colored(", ".join(parts), good=lines.exact)


def _files(files: FileCount | None) -> str:
    if files is None:
        return "-"
    return _colored(f"{files.right} of {files.expected}", good=files.exact)


def _colored(text: str, *, good: bool) -> str:
    return f"[green]{text}[/green]" if good else f"[red]{text}[/red]"
