"""Runs of one trial on a cluster whose nodes are lost under it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import tune

from ray_artifact_sync import configure, with_artifacts
from release_tests import trials
from release_tests.checks import Storage
from release_tests.cluster import Cluster, Node, wait_until

RESTORED_BYTES = 200 * 1024 * 1024
"""Of the large file on a local disk: its upload and its restore take long enough to be caught."""
SENT_BYTES = 24 * 1024 * 1024
"""Of the large file on S3, whose connection is slowed down instead."""


class Accomplice:
    """Does things to the cluster while a run goes on; an error in it is raised at the end."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Accomplice:  # noqa: PYI034  (nobody derives from it)
        self._thread.start()
        return self

    def __exit__(self, kind, *exc) -> None:
        self._thread.join(0 if kind else 120)
        if self._error is not None:
            raise self._error
        assert kind or not self._thread.is_alive(), "the run was over before everything had happened"


def trial_config(workdir: Path, storage: Storage, **more: Any) -> dict[str, Any]:
    shared = workdir / "shared"
    shared.mkdir(exist_ok=True)
    big = SENT_BYTES if storage.proxy else RESTORED_BYTES
    return {"shared": str(shared), "big": big, **more}


def tuner(trainable: Any, storage: Storage, config: dict[str, Any], *, plain: bool = False, keep: int | None = None):
    """A run of one trial; `plain`: with what Ray alone has to offer."""
    is_function = trainable is trials.function
    options: dict[str, Any] = {} if is_function else {"checkpoint_frequency": trials.FREQUENCY}
    run_config = tune.RunConfig(
        name="exp",
        checkpoint_config=tune.CheckpointConfig(num_to_keep=keep, **options),
        failure_config=tune.FailureConfig(max_failures=20),
        verbose=0,
        **storage.run_options,
    )
    if plain:
        run_config.sync_config = tune.SyncConfig(sync_artifacts=True, sync_artifacts_on_checkpoint=True)
    else:
        run_config = configure(run_config)
    return tune.Tuner(
        with_artifacts(trainable) if is_function and not plain else trainable,
        param_space=config,
        run_config=run_config,
    )


class Losses:
    """What can happen to the nodes of a run, each thing once.

    Args:
        cluster: With at least two nodes that one trial fits on.
        storage: The run's.
        config: The trial's.
    """

    def __init__(self, cluster: Cluster, storage: Storage, config: dict[str, Any]) -> None:
        self.cluster, self.storage = cluster, storage
        self.shared = Path(config["shared"])
        self.big = config["big"]
        self.lost = 0

    def alive(self) -> list[Node]:
        return [node for node in self.cluster.nodes.values() if node.process.poll() is None]

    def lose(self, *nodes: Node) -> None:
        """The raylets are killed, and other nodes take their places."""
        for node in nodes:
            node.kill_raylet()
            self.lost += 1
        self.cluster.add(*(self.cluster.new_name() for _ in nodes))
        for node in nodes:
            node.lose()

    def wait_for(self, mark: str) -> Path:
        path = self.shared / mark
        wait_until(path.exists, 120, what=mark)
        return path

    def in_mid_step(self, n: int, rank: int = 0) -> None:
        """Half of the step's files are written."""
        self.lose(self.cluster.node_of(self.wait_for(f"hold-{n}-{rank}")))

    def in_mid_upload(self, n: int) -> Any:
        """The large file of step `n`'s checkpoint is on its way.

        Returns:
            For `in_mid_restore`: what holds up the restore that follows.
        """
        proxy = self.storage.proxy
        if proxy is None:
            mark = self.wait_for(f"saving-{n}")
            pattern = "*/.ray_artifact_sync/tmp/*/*"
            run = Path(self.storage.path, "exp")
            wait_until(lambda: any(map(_size, run.glob(pattern))), 60, what="an upload", pause=0.001)
            self.lose(self.cluster.node_of(mark))
            return None
        proxy.reset_counts()
        proxy.bandwidth = 4_000_000
        mark = self.wait_for(f"saving-{n}")
        wait_until(lambda: proxy.counts["upload_part"], 60, what="an upload", pause=0.002)
        node = self.cluster.node_of(mark)
        rule = proxy.hang("get_object", "big.bin", times=1)
        self.lose(node)
        proxy.bandwidth = None
        return rule

    def in_mid_restore(self, rule: Any) -> None:
        """The large file is on its way back; every node is lost."""
        nodes = self.alive()
        if rule is not None:
            wait_until(rule.reached.is_set, 120, what="a restore")
        else:
            roots = [node.disk(self.cluster.ray_dir) for node in nodes]
            wait_until(
                lambda: any(0 < size < self.big for root in roots for size in map(_size, root.glob(WORKING_FILE))),
                120,
                what="a restore",
                pause=0.001,
            )
        self.lose(*nodes)
        if rule is not None:
            rule.release()


WORKING_FILE = "session_*/artifacts/*/exp/working_dirs/*/big.bin"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
