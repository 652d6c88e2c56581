"""What a sync costs when little has changed: requests, time, and bookkeeping."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

from ray.train._internal import storage as ray_storage

from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.posix import PosixStore
from release_tests.benchmarks import clients
from release_tests.benchmarks.common import KIB, Place, Row, main, make_files, medians, s3, scratch, times
from release_tests.benchmarks.proxy import Proxy
from tests.support.s3_servers import MotoServer

ROUNDS = int(os.environ.get("ROUNDS", "5"))


def change(directory: str, names: list[str], number: int) -> None:
    for name in names:
        with open(os.path.join(directory, name), "r+b") as file:
            file.write(f"changed {number} ".encode())
    time.sleep(0.06)  # beyond the clock's tick, as in life: a file written a moment ago is hashed twice


def changed_ones(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.startswith("f"))[::400]


def requests_with_conditions(directory: str) -> dict[str, int]:
    """Requests of such a sync on a server that enforces conditional writes, as S3 does and this machine's does not."""
    with MotoServer() as server, Proxy(server.endpoint) as proxy:
        place = Place(server, proxy)
        store = open_store(clients.filesystem_at(place.endpoint), f"{place.bucket}/changes")
        artifacts = clients.session(directory, store)
        artifacts.sync()
        change(directory, changed_ones(directory), ROUNDS)
        counted = place.count(artifacts.sync)
        artifacts.close(flush=False)
        return counted


def five_of_many(directory: str, place: Place) -> Row:
    store = open_store(clients.filesystem_at(place.endpoint), f"{place.bucket}/changes")
    artifacts = clients.session(directory, store)
    artifacts.sync()
    names = changed_ones(directory)
    seconds: dict[str, list[float]] = {"ours": [], "nothing changed": [], "rclone": [], "Ray": []}
    most: dict[str, int] = {}
    idle: dict[str, int] = {}
    place.directory("rays")
    clients.rclone(directory, place, "--exclude", ".ray_artifact_sync/**")("rclone")
    for number in range(ROUNDS):
        change(directory, names, number)
        started = time.perf_counter()
        requests = place.count(artifacts.sync)
        seconds["ours"].append(time.perf_counter() - started)
        if sum(requests.values()) > sum(most.values()):
            most = requests
        started = time.perf_counter()
        idle = place.count(artifacts.sync)
        seconds["nothing changed"].append(time.perf_counter() - started)
        started = time.perf_counter()
        clients.rclone(directory, place, "--exclude", ".ray_artifact_sync/**")("rclone")
        seconds["rclone"].append(time.perf_counter() - started)
        if not number:  # it takes the better part of a minute, and always sends everything
            started = time.perf_counter()
            ray_storage._upload_to_fs_path(directory, clients.filesystem_at(place.endpoint), f"{place.bucket}/rays")
            seconds["Ray"].append(time.perf_counter() - started)
            print(f"  Ray {seconds['Ray'][-1]:.1f} s, ours {seconds['ours'][-1]:.3f} s", flush=True)
    artifacts.close(flush=False)
    found = medians(seconds)
    with_conditions = requests_with_conditions(directory)
    faster, total = found["Ray"] / found["ours"], sum(with_conditions.values())
    return Row(
        "5 of 2,000 files changed, S3 at 20 ms",
        ">= 100x Ray's; 5 uploads and at most 6 other requests; none at all with no change",
        f"{faster:.0f}x Ray's; {total} requests with conditional writes, {sum(most.values())} on this server, "
        f"which has none; {sum(idle.values())} with no change ({times(seconds)})",
        faster >= 100 and total <= 11,
        seconds,
        note=f"requests: {with_conditions}, on this server {most}; Ray's is measured once only",
    )


class Watched(PosixStore):
    """Counts what goes to the bookkeeping, and how often anything is listed."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.calls: Counter[str] = Counter()
        self.bookkeeping = 0

    def put(self, path: str, data: Any, **options: Any) -> Any:
        stored = super().put(path, data, **options)
        self.calls["put"] += 1
        if path.startswith(".ray_artifact_sync/"):
            self.bookkeeping += stored.size
        return stored

    def list(self, prefix: str = "") -> Any:
        self.calls["list"] += 1
        return super().list(prefix)

    def list_files(self, prefix: str = "") -> Any:
        self.calls["list_files"] += 1
        return super().list_files(prefix)


def bookkeeping(directory: str, base: str, count: int) -> Row:
    for number in range(100):
        make_files(f"{directory}/d{number:03d}", count // 100, 64, seed=number)
    store = Watched(base)
    artifacts = clients.session(directory, store)
    started = time.perf_counter()
    artifacts.sync()
    print(f"  first sync of {count} files: {time.perf_counter() - started:.1f} s", flush=True)
    seconds: dict[str, list[float]] = {"5 changed": [], "nothing changed": [], "scandir and stat": []}
    most, calls = 0, Counter()
    for number in range(ROUNDS):
        change(directory, [f"d{n:03d}/f{n:06d}.bin" for n in range(5)], number)
        store.calls.clear()
        store.bookkeeping = 0
        started = time.perf_counter()
        artifacts.sync()
        seconds["5 changed"].append(time.perf_counter() - started)
        most, calls = max(most, store.bookkeeping), calls | store.calls
        started = time.perf_counter()
        artifacts.sync()
        seconds["nothing changed"].append(time.perf_counter() - started)
        started = time.perf_counter()
        for folder, _, names in os.walk(directory):
            for name in names:
                os.stat(f"{folder}/{name}")
        seconds["scandir and stat"].append(time.perf_counter() - started)
    artifacts.close(flush=False)
    listed = calls["list"] + calls["list_files"]
    found = medians(seconds)["5 changed"]
    return Row(
        f"bookkeeping of a sync with 5 changes among {count:,} files, local",
        "<= 64 KiB written, no full re-list, < 1 s",
        f"{most / KIB:.1f} KiB written, {listed} listings of storage, {found:.2f} s ({times(seconds)})",
        most <= 64 * KIB and not listed and found < 1,
        seconds,
    )


def run() -> list[Row]:
    rows = []
    with scratch() as directory, s3(0.02) as place:
        rows.append(five_of_many(make_files(f"{directory}/many", 2_000, 4 * KIB), place))
    with scratch() as directory:
        rows.append(bookkeeping(f"{directory}/files", f"{directory}/storage", 100_000))
    return rows


if __name__ == "__main__":
    main("changes", run)
