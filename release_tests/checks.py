"""Where a run stores, and whether everything that it stored is what it must be, as a stranger's reader sees it."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release_tests import trials
from tests.support import independent_reader
from tests.support.fault_proxy import FaultProxy
from tests.support.independent_reader import Place
from tests.support.s3_servers import BUCKET, MotoServer, RcloneServer, filesystem_at


@dataclass
class Storage:
    """A storage path for a run, and a way to look into it.

    Attributes:
        path: For `RunConfig(storage_path=...)`.
        filesystem: Likewise.
        proxy: Between clients and server; None on a local disk.
        look: From a path below the storage to what an independent reader sees there.
    """

    path: str
    filesystem: Any
    proxy: FaultProxy | None
    look: Any

    @property
    def run_options(self) -> dict[str, Any]:
        return {"storage_path": self.path, "storage_filesystem": self.filesystem}


@contextmanager
def storage_at(kind: str, workdir: Path) -> Iterator[Storage]:
    """`local`: a directory that all nodes see; `rclone`: S3 without preconditions; `moto`: S3 with them."""
    if kind == "local":
        root = workdir / "storage"
        root.mkdir()
        yield Storage(str(root), None, None, independent_reader.posix_place)
        return
    with ExitStack() as stack:
        server = stack.enter_context(RcloneServer() if kind == "rclone" else MotoServer())
        proxy = stack.enter_context(FaultProxy(server.endpoint, answer_markers=kind == "rclone"))
        if kind == "rclone":
            look = lambda below: independent_reader.posix_place(os.path.join(server.data, below))  # noqa: E731
        else:
            look = lambda below: _boto_place(server, below)  # noqa: E731
        yield Storage(f"{BUCKET}/{uuid.uuid4().hex[:8]}", filesystem_at(proxy.endpoint), proxy, look)


def _boto_place(server: MotoServer, below: str) -> Place:
    bucket, _, prefix = below.partition("/")
    client = server.boto()

    def names() -> Iterator[str]:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/"):
            for found in page.get("Contents", ()):
                yield found["Key"][len(prefix) + 1 :]

    def read(path: str) -> bytes:
        try:
            return client.get_object(Bucket=bucket, Key=f"{prefix}/{path}")["Body"].read()
        except client.exceptions.NoSuchKey:
            raise FileNotFoundError(path) from None

    return Place(names, read)


def digests(tree: dict[str, bytes | None]) -> dict[str, str]:
    return {path: hashlib.sha256(data or b"").hexdigest() for path, data in tree.items() if data is not None}


def rank_place(run: Place, rank: int) -> Place:
    """What one rank of Ray Train has in its run, as if it was a trial dir."""
    artifacts, own = f"artifacts/rank_{rank}/", f"/.ray_artifact_sync/rank_{rank}/"

    def names() -> Iterator[str]:
        for name in run.names():
            if name.startswith(artifacts):
                yield name.removeprefix(artifacts)
            elif name.startswith("checkpoint_") and ("/.ray_artifact_sync/" not in name or own in name):
                yield name.replace(own, "/")

    def read(path: str) -> bytes:
        folder, _, name = path.partition("/")
        if not folder.startswith("checkpoint_"):
            return run.read(artifacts + path)
        return run.read(f"{folder}{own}{name}" if name.startswith(".ray_artifact_sync-") else path)

    return Place(names, read)


def check_trial(
    place: Place,
    config: dict,
    *,
    steps: int,
    rank: int = 0,
    also: tuple[str, ...] = (),
    checkpoints: set[str] | None = None,
    expected: Callable[[int, dict, int], dict[str, str]] = trials.expected,
) -> int:
    """Compares the newest artifacts and those of every checkpoint with what they must be.

    Args:
        place: The trial dir.
        config: Of the trial.
        steps: How many steps it has taken at the end.
        rank: Of a Train worker.
        also: Artifacts that are there at the end beside those of the steps.
        checkpoints: Those that count; all that there are by default.
        expected: From step, configuration and rank to the digests of what must be there.

    Returns:
        Checkpoints that were compared.
    """
    newest = digests(independent_reader.head_tree(place))
    for name in also:
        assert newest.pop(name, None), f"{name} is missing"
    want = expected(steps, config, rank)
    assert newest == want, difference(newest, want)
    for path in want:
        assert hashlib.sha256(place.read(path)).hexdigest() == want[path], f"{path} at its own path is not the newest"
    if checkpoints is None:
        checkpoints = {path.partition("/")[0] for path in place.names() if path.startswith("checkpoint_")}
    found = independent_reader.snapshots(place)
    for name in checkpoints:
        assert name in found, f"{name} has no artifacts"
        snapshot = found[name]
        n = int(place.read(f"{name}/n"))
        tree = digests(independent_reader.tree_of(place, snapshot))
        want = expected(n, config, rank)
        assert tree == want, f"{name} of step {n}: {difference(tree, want)}"
    return len(checkpoints)


def difference(found: dict[str, str], want: dict[str, str]) -> str:
    return (
        f"missing: {sorted(want.keys() - found.keys())}, too many: {sorted(found.keys() - want.keys())}, "
        f"others: {sorted(path for path in want.keys() & found.keys() if want[path] != found[path])}"
    )


def lines_of(place: Place) -> tuple[int, int]:
    """How many steps a stored log has lost, and how many it has twice."""
    names = set(place.names())
    lines = place.read("log.txt").decode().split("\n")[:-1] if "log.txt" in names else []
    steps = [line.split()[0] for line in lines]
    return trials.STEPS - len(set(steps)), len(steps) - len(set(steps))
