"""A node stands still for so long that Ray runs its trial elsewhere; then it goes on, and must not overwrite anything.

One is stopped in the middle of a step, the next one in the middle of an upload: on S3 without preconditions, on S3 with
them, and on a directory that all nodes see. The trial's process goes on before its raylet does, which would end it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_artifact_sync import ArtifactConflictError
from release_tests import trials
from release_tests.checks import check_trial, lines_of, storage_at
from release_tests.cluster import Cluster, Node, connected, wait_until, why_not
from release_tests.losses import Losses, trial_config
from release_tests.runs import PATIENCE, Accomplice, tuner

NAME = "nodes frozen and thawed"
quick = False
TIMEOUT = 1200

WORKERS = "ray::"
"""What the names of Ray's workers begin with."""


class Insistent(trials.Writer):
    """When it goes on after it stood still in a step, it syncs; it tells how its syncs and saves were refused."""

    def step(self) -> dict:
        held = Path(self.cfg["shared"], "hold-5-0")
        first = not held.exists()
        result = super().step()
        if first and held.exists():
            self._tell("sync", self.artifacts.sync)
        return result

    def save(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell("save", lambda: super(Insistent, self).save(*args, **kwargs))

    def _tell(self, what: str, act: Any) -> Any:
        try:
            return act()
        except ArtifactConflictError as error:
            trials.mark(self.cfg, f"refused-{what}", str(error))
            raise


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    if reason := why_not():
        return {"skipped": reason}
    figures: dict[str, object] = {}
    with connected("a", "b") as cluster:
        for kind in ("local", "rclone", "moto"):
            figures.update(freeze(cluster, workdir / kind, kind))
        figures["Ray alone: steps lost, twice"] = ray_alone(cluster, workdir / "alone")
    return figures


def freeze(cluster: Cluster, workdir: Path, kind: str) -> dict[str, object]:
    """One run, and what was checked of it."""
    workdir.mkdir()
    with storage_at(kind, workdir) as storage:
        config = trial_config(workdir, storage, holds=[5], waits=[6, 7])
        losses = Losses(cluster, storage, config)

        def act() -> None:
            node = cluster.node_of(losses.wait_for("hold-5-0"))
            node.freeze()
            successor = cluster.node_of(losses.wait_for("before-6-0"))
            wake(losses, node, "refused-sync")

            rule = losses.hold_upload(6, successor)
            successor.freeze()
            losses.wait_for("before-7-0")
            if rule is not None:
                rule.release()
            wake(losses, successor, "refused-save")
            losses.let_go(7)

        with Accomplice(act):
            result = tuner(Insistent, storage, config).fit()[0]
        assert result.error is None, result.error
        assert not (workdir / "shared" / "inexact").exists(), (workdir / "shared" / "inexact").read_text()
        checked = check_trial(storage.look(result.path), config, steps=trials.STEPS)
        return {f"{kind}: attempts refused": 2, f"{kind}: checkpoints exact": checked}


def wake(losses: Losses, node: Node, refused: str) -> None:
    """The attempt of a frozen node goes on, and is refused; then the rest of the node, which Ray has given up."""
    (losses.shared / "released").touch()
    node.thaw(WORKERS)
    losses.wait_for(refused)
    node.thaw()
    wait_until(lambda: not node.named("raylet"), PATIENCE, what="the end of a raylet that was given up")
    node.lose()
    losses.cluster.add(losses.cluster.new_name())


def ray_alone(cluster: Cluster, workdir: Path) -> str:
    workdir.mkdir()
    with storage_at("local", workdir) as storage:
        config = {**trial_config(workdir, storage, holds=[5], waits=[6]), "big": 0}
        losses = Losses(cluster, storage, config)

        def act() -> None:
            node = cluster.node_of(losses.wait_for("hold-5-0"))
            node.freeze()
            losses.wait_for("before-6-0")
            (losses.shared / "released").touch()
            node.thaw()
            losses.let_go(6)

        with Accomplice(act):
            result = tuner(trials.WriterBody, storage, config, plain=True).fit()[0]
        lost, twice = lines_of(storage.look(result.path))
        assert lost + twice, "Ray alone is exact, too: the comparison proves nothing any more"
        return f"{lost}, {twice}"
