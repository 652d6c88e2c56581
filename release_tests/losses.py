"""What can happen to the nodes under a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from release_tests.checks import Storage
from release_tests.cluster import Cluster, Node, wait_until
from release_tests.runs import PATIENCE, RUN
from tests.support.fault_proxy import Rule

STATE_DIR = ".ray_artifact_sync"
RESTORED_BYTES = 200 * 1024 * 1024
"""Of the large file on a local disk: its upload and its restore take long enough to be caught."""
SENT_BYTES = 24 * 1024 * 1024
"""Of the large file on S3, where a request is held up instead: more than one part."""


def trial_config(workdir: Path, storage: Storage, **more: Any) -> dict[str, Any]:
    shared = workdir / "shared"
    shared.mkdir(exist_ok=True)
    big = SENT_BYTES if storage.proxy else RESTORED_BYTES
    return {"shared": str(shared), "big": big, **more}


class Losses:
    """What can happen to the nodes of a run, each thing once.

    Args:
        cluster: With a node for each of the run's processes, and one more.
        storage: The run's.
        config: The trial's; the steps before whose uploads something happens are in its `waits`.

    Attributes:
        working_file: Where a worker has the large file, below Ray's directory.
    """

    working_file = f"session_*/artifacts/*/{RUN}/working_dirs/*/big.bin"

    def __init__(self, cluster: Cluster, storage: Storage, config: dict[str, Any]) -> None:
        self.cluster, self.storage = cluster, storage
        self.shared = Path(config["shared"])
        self.big = config["big"]
        self.lost = 0
        self._held_restores: list[Rule] = []

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
        wait_until(path.exists, PATIENCE, what=mark)
        return path

    def let_go(self, n: int) -> None:
        """Step `n`, which waits, may begin."""
        (self.shared / f"go-{n}").touch()

    def in_mid_step(self, n: int, rank: int = 0) -> None:
        """Half of the step's files are written."""
        self.lose(self.cluster.node_of(self.wait_for(f"hold-{n}-{rank}")))

    def in_mid_upload(self, n: int, rank: int = 0) -> None:
        """The large file of step `n`, which waits to begin, is on its way to the checkpoint."""
        node = self.cluster.node_of(self.wait_for(f"before-{n}-{rank}"))
        self.hold_upload(n, node, rank)
        if self.storage.proxy is not None:  # for `in_mid_restore`, which may follow at once
            self._held_restores = [self.storage.proxy.hang("get_object", path) for path in ("big.bin", "/objects/")]
        self.lose(node)

    def hold_upload(self, n: int, node: Node, rank: int = 0) -> Rule | None:
        """Lets step `n` begin, and returns when the upload of its large file stands still.

        Returns:
            What holds up a request of it, on S3; elsewhere its node stands still.
        """
        proxy = self.storage.proxy
        if proxy is not None:
            rule = proxy.hang("upload_part", self._part(rank), times=1, abandoned="dropped")
            self.let_go(n)
            wait_until(rule.reached.is_set, PATIENCE, what="an upload")
            return rule
        run = Path(self.storage.path, RUN)
        unfinished = lambda: any(map(_size, run.glob(f"*/{self._part(rank)}{STATE_DIR}/tmp/*/*")))  # noqa: E731
        self.let_go(n)
        wait_until(unfinished, PATIENCE, what="an upload", pause=0.001)
        node.freeze()
        assert unfinished(), "the upload was over before the node could be stopped"
        return None

    def in_mid_restore(self) -> None:
        """The large file is on its way back; every node is lost."""
        nodes = self.alive()
        if self._held_restores:
            wait_until(lambda: any(rule.reached.is_set() for rule in self._held_restores), PATIENCE, what="a restore")
        else:
            roots = [node.disk(self.cluster.ray_dir) for node in nodes]
            unfinished = lambda: any(  # noqa: E731
                0 < size < self.big for root in roots for size in map(_size, root.glob(self.working_file))
            )
            wait_until(unfinished, PATIENCE, what="a restore", pause=0.001)
            for node in nodes:
                node.freeze()
            assert unfinished(), "the restore was over before the nodes could be stopped"
        self.lose(*nodes)
        for rule in self._held_restores:
            rule.release()

    def _part(self, rank: int) -> str:
        """What a path of storage has in it if it is of this rank."""
        return ""


class TrainLosses(Losses):
    """The same for the workers of Ray Train."""

    working_file = f"session_*/artifacts/{RUN}.artifacts/rank_*/big.bin"

    def _part(self, rank: int) -> str:
        return f"rank_{rank}/"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
