"""Trials to look at, on a disk and on a real S3 server; and a way to run the command in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_artifact_sync.stores import ArtifactStore, open_uri
from tests.support.sessions import open_session, save

BIG = 9 * 1024 * 1024
"""Bytes of a file that is read by ranges rather than at once."""


@dataclass
class Spot:
    """Where trials are stored.

    Attributes:
        uri: From a path to the URI or path that names it.
        proxy: In front of the S3 server; None on a disk.
        scratch: A local directory.
    """

    uri: Callable[[str], str]
    proxy: Any
    scratch: Path

    def store(self, path: str = "") -> ArtifactStore:
        return open_uri(self.uri(path))

    def at(self, path: str, checkpoint: str) -> str:
        return f"{self.uri(path)}@{checkpoint}"


def make_trial(spot: Spot, name: str = "trial_1", *, experiment: str = "exp", big: bool = False) -> dict[str, dict]:
    """A trial with two checkpoints and newer artifacts. Gives what belongs to each: `checkpoint_...` and `newest`.

    `log.txt` grows, `rewritten.txt` is another each time, `plot.png` stays, `gone.txt` is in the first checkpoint only.
    """
    working_dir = spot.scratch / "work" / experiment / name
    working_dir.mkdir(parents=True)
    trees: dict[str, dict] = {}

    def write(files: dict[str, bytes]) -> dict[str, bytes]:
        for path, data in files.items():
            target = working_dir / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return files

    session = open_session(working_dir, spot.store(f"{experiment}/{name}"), 1, trial=name)
    plot = {"sub dir/plot [1].png": b"\x89PNG", "empty.txt": b""}
    first = write({"log.txt": b"1\n", "rewritten.txt": b"first", "gone.txt": b"gone", **plot})
    if big:
        first |= write({"big.bin": os.urandom(BIG)})
    (working_dir / "empty dir").mkdir()
    trees["checkpoint_000000"] = dict(first)
    assert save(session, "checkpoint_000000")
    (working_dir / "gone.txt").unlink()
    second = {**first, **write({"log.txt": b"1\n2\n", "rewritten.txt": b"the second"})}
    del second["gone.txt"]
    trees["checkpoint_000001"] = dict(second)
    assert save(session, "checkpoint_000001")
    newest = {**second, **write({"log.txt": b"1\n2\n3\n", "rewritten.txt": b"third"})}
    if big:
        newest |= write({"big.bin": os.urandom(BIG + 1)})
    trees["newest"] = newest
    session.sync()
    session.close()
    spot.store(f"{experiment}/{name}").put("progress.csv", b"a,b\n1,2\n")
    return trees


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def files_below(root: Path) -> dict[str, bytes]:
    """Path to content of every file below a local directory."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def everything(store: ArtifactStore) -> dict[str, bytes]:
    """Path to content of every file of a store."""
    return {file.path: store.read(file.path) for file in store.list()}
