"""The pages of the guide, the fences on them, and the docstrings that the reference shows."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$", re.MULTILINE)

RUN_ELSEWHERE = {
    "python -m venv .venv && .venv/bin/pip install . && .venv/bin/ray-artifact-sync demo": (
        "release_tests/packaging.py",
        ("README.md", "ray-artifact-sync demo"),
    ),
    'python -m venv .venv && .venv/bin/pip install -e ".[test]" && .venv/bin/python -m pytest': (
        ".ci/run",
        ('pip" install -q -e ".[test]"', 'bin/python" -m pytest'),
    ),
}
"""Blocks that install things or run this very test: which file runs them in CI, and what must stand in it for that."""

NOT_IN_ALL = {
    "ray_artifact_sync.train": ("artifacts", "WorkerArtifacts"),
    "ray_artifact_sync.ray_collective": ("RayCollective",),
    "ray_artifact_sync.collectives": ("Collective", "TorchCollective"),
}
"""What users name beside `ray_artifact_sync.__all__`."""


def guide() -> list[Path]:
    """README, and every page in docs/."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def fences(text: str) -> list[str]:
    """The info strings of all fenced blocks."""
    found = [match.group(3).strip() for match in FENCE.finditer(text)]
    assert len(found) % 2 == 0, "a fence is never closed"
    return found[::2]


def public_names() -> dict[str, object]:
    """Full name to object, for everything that the reference must show."""
    package = importlib.import_module("ray_artifact_sync")
    names = {f"ray_artifact_sync.{name}": getattr(package, name) for name in package.__all__ if name != "__version__"}
    for module, others in NOT_IN_ALL.items():
        names.update((f"{module}.{name}", getattr(importlib.import_module(module), name)) for name in others)
    return names


def documented() -> dict[str, str]:
    """Full name to docstring."""
    return {name: inspect.getdoc(value) or "" for name, value in public_names().items()}
