"""The page on failure modes explains every warning, every error in the log, and every public error class."""

from __future__ import annotations

import ast
import re

import ray_artifact_sync
from ray_artifact_sync.errors import ArtifactSyncError
from tests.docs.pages import DOCS, ROOT

PACKAGE = ROOT / "ray_artifact_sync"
PAGE = (DOCS / "failures.md").read_text(encoding="utf-8")
PLACEHOLDER = re.compile(r"%[-0-9.]*[a-z]")
CALLS = ("logger.warning", "logger.error", "logger.log")
BEGINNING = 60
"""Characters: what a message says in these, apart from its values, must stand on one line of the page."""


def logged_messages():
    """Where it is logged, and the message, of everything in the package that is more than information."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "demo" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "logger.warning",
                "logger.error",
                "logger.log",
            ):
                message = node.args[node.func.attr == "log"]
                assert isinstance(message, ast.Constant), f"{path.name}:{node.lineno}: a message is one literal"
                yield f"{path.name}:{node.lineno}", message.value


def on_the_page(message: str) -> bool:
    parts = [part.strip(" .:,") for part in PLACEHOLDER.split(message[:BEGINNING])]
    parts[-1] = parts[-1].rpartition(" ")[0] or parts[-1]  # the last word may be cut off
    words = [part for part in parts if re.search("[a-z]{2}", part)]
    return any(all(part in line for part in words) for line in PAGE.splitlines())


def test_every_warning_is_explained():
    missing = [f"{where}: {message}" for where, message in logged_messages() if not on_the_page(message)]
    assert not missing, "Explain these in docs/failures.md:\n" + "\n".join(missing)


def test_the_check_sees_messages():
    assert len(list(logged_messages())) > 30
    assert not on_the_page("Something that no page explains: %s")


def test_every_public_error_is_explained():
    public = [getattr(ray_artifact_sync, name) for name in ray_artifact_sync.__all__]
    errors = [value for value in public if isinstance(value, type) and issubclass(value, ArtifactSyncError)]
    missing = [error.__name__ for error in errors if f"| `{error.__name__}`" not in PAGE]
    assert missing == ["ArtifactSyncError"], missing
