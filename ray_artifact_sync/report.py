"""The report page: one HTML file with everything in it, that loads nothing and runs nothing but its own script.

What storage holds is hostile input: it gets into the page as JSON in a data block and as base64, is shown by the script
as text only, and pictures are `<img>` with data URIs, in which an SVG's scripts do not run. A content security policy
with the digests of the page's one script and one style sheet forbids the rest.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from importlib import resources
from typing import Any

from ray_artifact_sync._version import __version__
from ray_artifact_sync.errors import ConfigurationError
from ray_artifact_sync.report_data import ExperimentReport
from ray_artifact_sync.report_json import as_json

GENERATOR = "ray-artifact-sync"
_MARK = f'<meta name="generator" content="{GENERATOR}'


def build_page(report: ExperimentReport) -> str:
    """The page."""
    template, style, script = (_part(name) for name in ("page.html", "page.css", "page.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src {_source(style)}; script-src {_source(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    data = as_json(report)
    # Of many trials, most of the data are events: in blocks of their own, so that each is read when it is drawn.
    events = [
        f'<script type="application/json" id="events-{number}">{in_script(trial.pop("events"))}</script>'
        for number, trial in enumerate(data["trials"])
    ]
    parts = {
        "policy": policy,
        "generator": f"{GENERATOR} {__version__}",
        "title": html.escape(report.name),
        "style": style,
        "script": script,
        "data": in_script(data),
        "events": "\n".join(events),
        "contents": "\n".join(_contents(report)),
    }
    pieces = template.split("{{")
    page = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        page += [parts[name], rest]
    return "".join(page)


def _part(name: str) -> str:
    return (resources.files("ray_artifact_sync") / "report_page" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """What a policy calls a script or style of exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def in_script(value: Any) -> str:
    """JSON that can stand in a `<script>` element: no `<` that could end it or begin a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _contents(report: ExperimentReport) -> list[str]:
    """Data blocks with the contents of files; the script finds one by the numbers of trial and file."""
    return [
        f'<script type="text/plain" id="file-{number}-{position}">{base64.b64encode(item.data).decode()}</script>'
        for number, trial in enumerate(report.trials)
        for position, item in enumerate(trial.embedded)
        if item.data is not None
    ]


def check_output(path: str, *, force: bool) -> None:
    """Refuses to replace a file that is no report.

    Raises:
        ConfigurationError: There is one, or the directory does not exist.
    """
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise ConfigurationError(f"{path} cannot be written: there is no directory {directory}.")
    if os.path.isdir(path):
        raise ConfigurationError(f"{path} is a directory; name a file, such as {os.path.join(path, 'report.html')}.")
    if force or not os.path.lexists(path):
        return
    with open(path, "rb") as file:
        if _MARK.encode() not in file.read(4096):
            raise ConfigurationError(f"{path} is there already and is no report; choose another name, or use --force.")


def write_page(path: str, page: str) -> None:
    """Writes the page; its name holds what it held before, or all of it."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(page)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
