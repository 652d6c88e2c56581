"""One trial with 20 GiB of sparse files: neither storage nor the node that they come back to needs 20 GiB for them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ray_artifact_sync import ArtifactSyncMixin
from ray_artifact_sync.stores.posix import PosixStore
from release_tests import trials
from release_tests.checks import storage_at
from release_tests.local_ray import local_ray
from release_tests.runs import tuner
from tests.support.sessions import abandon, open_session

NAME = "20 GiB of sparse files"
quick = False
TIMEOUT = 480

MIB, GIB = 1024**2, 1024**3
FILES = 5
SIZE = int(os.environ.get("SPARSE_GIB", "20")) * GIB // FILES
MARKS = (0, SIZE // 3 // MIB * MIB, SIZE // MIB * MIB - MIB)
"""Where a file has something beside zeros."""
MOST = GIB
"""Bytes on disk that all files of one place may take together."""


def block(number: int, position: int, n: int) -> bytes:
    return f"{number} {position} {n} ".encode().ljust(4096, b"x")


def newest(number: int, n: int) -> int:
    """The step that wrote a file last: the second step rewrites the first file only."""
    return n if number == 0 else 1


def write(directory: Path, number: int, n: int) -> None:
    with open(directory / f"{number}.bin", "r+b" if n > 1 else "wb") as file:
        file.truncate(SIZE)
        for position in MARKS:
            file.seek(position)
            file.write(block(number, position, n))


def check(directory: Path, n: int) -> int:
    """Reads what is not a hole, and takes that for all; returns the bytes on disk."""
    room = 0
    for number in range(FILES):
        path = directory / f"{number}.bin"
        stat = path.stat()
        assert stat.st_size == SIZE, path
        room += stat.st_blocks * 512
        with open(path, "rb") as file:
            position = 0
            while position < SIZE:
                try:
                    start = os.lseek(file.fileno(), position, os.SEEK_DATA)
                except OSError:
                    break  # a hole up to the end
                position = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                file.seek(start)
                data = bytearray(file.read(position - start))
                for mark in MARKS:
                    if start <= mark < position:
                        want = block(number, mark, newest(number, n))
                        assert data[mark - start : mark - start + 4096] == want, (path, mark)
                        data[mark - start : mark - start + 4096] = bytes(4096)
                assert not data.strip(b"\0"), f"{path}: something else than zeros at {start} to {position}"
    assert room < MOST, f"{room / MIB:.0f} MiB on disk for {directory}"
    return room


class Sparse(ArtifactSyncMixin, trials.Counting):
    def step(self) -> dict[str, Any]:
        self.n += 1
        for number in range(FILES) if self.n == 1 else (0,):
            write(Path(), number, self.n)
        return {"done": self.n == 2}


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    probe = workdir / "probe"
    with open(probe, "wb") as file:
        file.truncate(MIB)
    if probe.stat().st_blocks:
        return {"skipped": "this file system has no holes"}
    started = time.monotonic()
    with local_ray(), storage_at("local", workdir) as storage:
        result = tuner(Sparse, storage, {}, frequency=1, max_failures=0).fit()[0]
        assert result.error is None, result.error
        run_seconds = time.monotonic() - started
        trial = Path(result.path)
        stored = check(trial, 2)
        kept = sum(file.stat().st_blocks * 512 for file in trial.rglob("objects/*/*"))
        assert kept < MOST, f"{kept / MIB:.0f} MiB of preserved versions"
        started = time.monotonic()
        session = open_session(
            workdir / "elsewhere", PosixStore(trial), 10**19, trial=trial.name, set_aside=False, sync_timeout=300.0
        )
        assert session.restore("checkpoint_000000", fresh=True).exact
        restore_seconds = time.monotonic() - started
        restored = check(workdir / "elsewhere", 1)
        abandon(session)
    return {
        "on disk": f"stored {stored / MIB:.0f} MiB, preserved {kept / MIB:.0f}, restored {restored / MIB:.0f}",
        "run": f"{run_seconds:.0f} s",
        "restore": f"{restore_seconds:.0f} s",
    }
