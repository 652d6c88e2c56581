"""The driver dies together with its node, and `Tuner.restore` runs on a third node, which has nothing of its disk.

Three trials are in the middle of a step then: two after different checkpoints, one before its first.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ray
from ray import tune

from release_tests import trials
from release_tests.checks import Storage, check_trial, lines_of, storage_at
from release_tests.cluster import Cluster, connected, wait_until, why_not
from release_tests.losses import SENT_BYTES
from release_tests.runs import PATIENCE, RUN, tuner

NAME = "driver and its node lost"
quick = False
TIMEOUT = 1200

HELD_IN = (5, 3, 2)
"""The steps in which the three trials are when the driver dies."""

PROCESS = "ray::Driver.run"
"""The driver's, as Ray calls it."""


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    if reason := why_not():
        return {"skipped": reason}
    figures: dict[str, object] = {}
    with connected("a", "b", cpus=2) as cluster:
        for kind in ("local", "rclone"):
            figures[f"{kind}: checkpoints exact"] = lose(cluster, workdir / kind, kind)
        alone = lose(cluster, workdir / "alone", "local", plain=True)
        figures["Ray alone: steps lost, twice"] = alone
    return figures


def lose(cluster: Cluster, workdir: Path, kind: str, *, plain: bool = False) -> object:
    """One experiment; how many checkpoints were exact, or what Ray alone has lost and has twice."""
    for n in HELD_IN:
        (workdir / f"shared-{n}").mkdir(parents=True)
    with storage_at(kind, workdir) as storage:
        config = {"shared": str(workdir / "shared"), "big": 0 if plain else SENT_BYTES}
        drive_to_its_death(cluster, workdir, storage, config, plain=plain)
        (node,) = cluster.add(cluster.new_name(), cpus=0)
        trials_done = ray.get(start(node.name, storage, config, plain=plain, restore=True), timeout=2 * PATIENCE)
        node.lose()
        assert len(trials_done) == len(HELD_IN)
        exact = lost = twice = 0
        for path, error in trials_done:
            assert not error, error
            if plain:
                lines = lines_of(storage.look(path))
                lost, twice = lost + lines[0], twice + lines[1]
            else:
                exact += check_trial(storage.look(path), config, steps=trials.STEPS)
        if not plain:
            assert "4" in restored(workdir, 5), "the new driver did not know of the last checkpoint"
            assert "2" in restored(workdir, 3), "the new driver did not know of the only checkpoint"
        inexact = [path.read_text() for path in workdir.glob("shared-*/inexact")]
        assert not inexact, inexact
        if plain:
            assert lost + twice, "Ray alone is exact, too: the comparison proves nothing any more"
        return f"{lost}, {twice}" if plain else exact


def drive_to_its_death(cluster: Cluster, workdir: Path, storage: Storage, config: dict, *, plain: bool) -> None:
    (node,) = cluster.add(cluster.new_name(), cpus=0)
    driver = start(node.name, storage, config, plain=plain, restore=False)
    for n in HELD_IN:
        wait_until((workdir / f"shared-{n}/hold-{n}-0").exists, PATIENCE, lambda: check(driver), what=f"step {n}")
    for _ in range(2):  # the first one may have been begun before
        before = states_of(storage)
        wait_until(
            lambda before=before: states_of(storage) != before, PATIENCE, what="a newer experiment state", pause=0.2
        )
    (pid,) = node.named(PROCESS)
    os.kill(pid, signal.SIGKILL)
    node.lose()
    try:
        ray.get(driver, timeout=PATIENCE)
    except ray.exceptions.GetTimeoutError:
        raise
    except ray.exceptions.RayError:
        return
    raise AssertionError("the driver lives")


def check(driver: ray.ObjectRef) -> None:
    """Raises what the driver has raised."""
    if ray.wait([driver], timeout=0)[0]:
        ray.get(driver)


def restored(workdir: Path, held_in: int) -> set[str]:
    """The steps that a trial was restored to."""
    return {path.read_text() for path in (workdir / f"shared-{held_in}").glob("restored-*")}


def states_of(storage: Storage) -> dict[str, bytes]:
    """What storage knows of the experiment."""
    place = storage.look(f"{storage.path}/{RUN}")
    names = [name for name in place.names() if name.startswith("experiment_state-")]
    return {name: place.read(name) for name in names}


def start(node: str, storage: Storage, config: dict, *, plain: bool, restore: bool) -> ray.ObjectRef:
    """A driver on this node; what its run will return.

    It is a detached actor: when it ends, Ray ends its trials and frees what was set aside for them, as for a job.
    """
    options = {"num_cpus": 0, "resources": {node: 1}, "name": f"driver-{node}", "lifetime": "detached"}
    driver = ray.remote(Driver).options(**options).remote()
    return driver.run.remote(storage.path, storage.filesystem, config, plain=plain, restore=restore)


class Driver:
    """Runs the experiment."""

    def run(self, path: str, filesystem: Any, config: dict, *, plain: bool, restore: bool) -> list[tuple[str, str]]:
        os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "1"
        trainable = trials.WriterBody if plain else trials.Writer
        shared = config["shared"]
        space = {
            **config,
            "holds": tune.grid_search([[n] for n in HELD_IN]),
            "shared": tune.sample_from(lambda spec: f"{shared}-{spec.config.holds[0]}"),
        }
        if restore:
            experiment = f"{path}/{RUN}"
            found = tune.Tuner.restore(experiment, trainable, storage_filesystem=filesystem, param_space=space)
        else:
            found = tuner(trainable, Storage(path, filesystem, None, None), space, plain=plain)
        return [(result.path, str(result.error or "")) for result in found.fit()]
