"""Two workers of Ray Train V2, each on a node with a disk of its own; in turn, the nodes are lost.

One in mid-step, the other one in mid-upload, both in mid-restore: Ray starts the workers anew each time. Ray alone has
nothing that would bring the workers' files to storage.
"""

from __future__ import annotations

from pathlib import Path

import ray.train

from release_tests import trials
from release_tests.checks import check_trial, rank_place, storage_at
from release_tests.cluster import Cluster, connected, why_not
from release_tests.losses import TrainLosses, trial_config
from release_tests.runs import Accomplice, trainer

NAME = "nodes lost, Ray Train"
quick = False
TIMEOUT = 1200

RANKS = 2


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    if reason := why_not():
        return {"skipped": reason}
    if not getattr(ray.train, "is_v2_enabled", lambda: False)():
        return {"skipped": "needs Ray Train V2"}
    figures: dict[str, object] = {}
    with connected("a", "b") as cluster:
        figures.update(lose(cluster, workdir / "rclone", "rclone"))
        figures["Ray alone: files of the workers in storage"] = ray_alone(workdir / "alone")
    return figures


def lose(cluster: Cluster, workdir: Path, kind: str) -> dict[str, object]:
    """One run, and what was checked of it."""
    workdir.mkdir()
    with storage_at(kind, workdir) as storage:
        config = trial_config(workdir, storage, holds=[5], waits=[6])
        losses = TrainLosses(cluster, storage, config)

        def act() -> None:
            losses.in_mid_step(5, rank=1)
            losses.in_mid_upload(6, rank=0)
            losses.in_mid_restore()

        with Accomplice(act):
            result = trainer(trials.train_loop, storage, config, workers=RANKS).fit()
        assert result.error is None, result.error
        assert not (workdir / "shared" / "inexact").exists(), (workdir / "shared" / "inexact").read_text()
        registered = {Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints}
        assert len(registered) == trials.STEPS // trials.FREQUENCY, registered
        checked = 0
        for rank in range(RANKS):
            place = rank_place(storage.look(result.path), rank)
            checked += check_trial(place, config, steps=trials.STEPS, rank=rank, checkpoints=registered)
        return {f"{kind}: nodes lost": losses.lost, f"{kind}: checkpoints of ranks exact": checked}


def ray_alone(workdir: Path) -> int:
    workdir.mkdir()
    with storage_at("local", workdir) as storage:
        config = {**trial_config(workdir, storage), "big": 0}
        result = trainer(trials.plain_train_loop, storage, config, workers=RANKS).fit()
        names = [path.rpartition("/")[2] for path in storage.look(result.path).names()]
        found = sum(name in ("log.txt", "rewritten.txt") or name.endswith(".bin") for name in names)
        assert not found, "Ray alone syncs artifacts, too: the comparison has to be another one now"
        return found
