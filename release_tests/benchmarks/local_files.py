"""Local directory to local (or mounted) directory: 2,000 small files, 1 GiB, and an append."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time

from pyarrow import fs as pafs
from ray.train._internal import storage as ray_storage

from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.directory_sync import DirectorySync
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.stores.posix import PosixStore
from release_tests.benchmarks import clients
from release_tests.benchmarks.common import KIB, MIB, Row, main, make_files, make_large, ratio, rounds, scratch, times

ROUNDS = int(os.environ.get("ROUNDS", "5"))


def contestants(directory: str, base: str) -> dict[str, clients.Run]:
    def ours(name: str) -> None:
        artifacts = clients.session(directory, PosixStore(f"{base}/{name}"))
        artifacts.sync()
        artifacts.close(flush=False)
        shutil.rmtree(f"{directory}/.ray_artifact_sync")

    def directory_sync(name: str) -> None:
        DirectorySync(directory, PosixStore(f"{base}/{name}"), options=SyncOptions(), verify_remote=False).sync_up(
            Deadline()
        )

    def cp(name: str) -> None:
        subprocess.run(["cp", "-r", directory, f"{base}/{name}"], check=True)

    def rays(name: str) -> None:
        ray_storage._create_directory = clients._ray_create_directory
        ray_storage._upload_to_fs_path(directory, pafs.LocalFileSystem(), f"{base}/{name}")

    def python(name: str) -> None:
        shutil.copytree(directory, f"{base}/{name}")

    return {"ours": ours, "cp -r": cp, "ours (DirectorySync)": directory_sync, "shutil.copytree": python, "Ray": rays}


def copy(directory: str, base: str, work: str, target: float, count: int) -> Row:
    seconds = rounds(
        contestants(directory, base), count, tidy=lambda name: shutil.rmtree(f"{base}/{name}", ignore_errors=True)
    )
    found = ratio(seconds, "ours", "cp -r")
    return Row(
        work,
        f"<= {target:g}x the time of `cp -r`",
        f"{found:.2f}x cp's ({times(seconds)})",
        found <= target,
        seconds,
        note="hashes and manifest included",
    )


def append(directory: str, base: str) -> Row:
    """64 KiB more at the end of 200 MiB."""
    path = make_large(f"{directory}/log.bin", 200 * MIB)
    artifacts = clients.session(directory, PosixStore(f"{base}/append"))
    artifacts.sync()
    seconds: dict[str, list[float]] = {"ours": [], "cp": []}
    written: list[int] = []
    for _ in range(ROUNDS):
        with open(path, "ab") as file:
            file.write(os.urandom(64 * KIB))
        time.sleep(0.06)  # beyond the clock's tick: a file written a moment ago is hashed twice
        before, started = written_bytes(), time.perf_counter()
        artifacts.sync()  # the manifest's bytes count too
        seconds["ours"].append(time.perf_counter() - started)
        written.append(written_bytes() - before)
        started = time.perf_counter()
        shutil.copy(path, f"{base}/copy")
        seconds["cp"].append(time.perf_counter() - started)
    artifacts.close(flush=False)
    most = max(written)
    return Row(
        "64 KiB appended to 200 MiB, local",
        "<= 1 MiB written",
        f"{most / KIB:.0f} KiB written, manifest included ({times(seconds)})",
        most <= MIB,
        seconds,
        note="the time is that of hashing 200 MiB once, which proves that it is an append",
    )


def written_bytes() -> int:
    """What this process has handed to write calls."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar"))


def run() -> list[Row]:
    with scratch() as directory:
        base = f"{directory}/storage"
        os.makedirs(base)
        small = make_files(f"{directory}/small", 2_000, 4 * KIB)
        make_large(f"{directory}/large/large.bin", 1024 * MIB)
        os.makedirs(f"{directory}/append")
        return [
            copy(small, base, "2,000 files of 4 KiB, local to local", 1.2, ROUNDS),
            copy(f"{directory}/large", base, "1 GiB, local to local", 2, min(ROUNDS, 3)),
            append(f"{directory}/append", base),
        ]


if __name__ == "__main__":
    # On a real file system: in memory, `cp` needs 20 us a file, less than any interpreter.
    tempfile.tempdir = os.environ.get("BENCHMARK_DIR")
    main("local_files", run)
