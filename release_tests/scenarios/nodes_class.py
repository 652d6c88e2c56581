"""A class trainable on nodes with their own disks, which are lost in mid-step, in mid-upload and in mid-restore.

On a directory that all nodes see, and on S3. Ray alone (`SyncConfig(sync_artifacts=True)`) loses one node, in mid-step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from release_tests import trials
from release_tests.checks import check_trial, lines_of, storage_at
from release_tests.cluster import Cluster, connected, why_not
from release_tests.losses import Losses, trial_config
from release_tests.runs import Accomplice, tuner

NAME = "nodes lost, class trainable"
quick = True


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    if reason := why_not():
        return {"skipped": reason}
    figures: dict[str, object] = {}
    with connected("a", "b") as cluster:
        for kind in ("rclone",) if quick else ("local", "rclone"):
            figures.update(lose(cluster, workdir / kind, kind, trials.Writer, all_kinds=not quick))
        figures["Ray alone: steps lost, twice"] = ray_alone(cluster, workdir / "alone", trials.WriterBody)
    return figures


def lose(cluster: Cluster, workdir: Path, kind: str, trainable: Any, *, all_kinds: bool) -> dict[str, object]:
    """One run, and what was checked of it."""
    workdir.mkdir()
    with storage_at(kind, workdir) as storage:
        config = trial_config(workdir, storage, holds=[5], waits=[6] if all_kinds else [])
        losses = Losses(cluster, storage, config)

        def act() -> None:
            losses.in_mid_step(5)
            if all_kinds:
                losses.in_mid_upload(6)
                losses.in_mid_restore()

        with Accomplice(act):
            result = tuner(trainable, storage, config).fit()[0]
        assert result.error is None, result.error
        assert not (workdir / "shared" / "inexact").exists(), (workdir / "shared" / "inexact").read_text()
        checked = check_trial(storage.look(result.path), config, steps=trials.STEPS)
        return {f"{kind}: nodes lost": losses.lost, f"{kind}: checkpoints exact": checked}


def ray_alone(cluster: Cluster, workdir: Path, body: Any) -> str:
    workdir.mkdir()
    with storage_at("local", workdir) as storage:
        config = trial_config(workdir, storage, holds=[5])
        config["big"] = 0
        losses = Losses(cluster, storage, config)
        with Accomplice(lambda: losses.in_mid_step(5)):
            result = tuner(body, storage, config, plain=True).fit()[0]
        lost, twice = lines_of(storage.look(result.path))
        assert lost + twice, "Ray alone is exact, too: the comparison proves nothing any more"
        return f"{lost}, {twice}"
