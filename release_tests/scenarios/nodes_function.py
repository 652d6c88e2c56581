"""A function trainable on nodes with their own disks, which are lost in mid-step, in mid-upload and in mid-restore."""

from __future__ import annotations

from pathlib import Path

from release_tests import trials
from release_tests.cluster import connected, why_not
from release_tests.scenarios.nodes_class import lose, ray_alone

NAME = "nodes lost, function trainable"
quick = False


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    if reason := why_not():
        return {"skipped": reason}
    figures: dict[str, object] = {}
    with connected("a", "b") as cluster:
        figures.update(lose(cluster, workdir / "rclone", "rclone", trials.function, all_kinds=True))
        figures["Ray alone: steps lost, twice"] = ray_alone(cluster, workdir / "alone", trials.function_body)
    return figures
