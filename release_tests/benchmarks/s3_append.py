"""64 KiB appended to an object on S3: the whole file again, or UploadPartCopy and the new bytes.

The server is JuiceFS' gateway, whose UploadPartCopy works. It shares cores and disk with the client: without a limit
on the bandwidth, the copy costs time here and the bytes that it saves cost nothing, which is the other way round over
most networks. The bytes sent are what an append is for.
"""

from __future__ import annotations

import os
import time
from typing import Any

from ray_artifact_sync.stores import open_store
from release_tests.benchmarks import clients
from release_tests.benchmarks.common import KIB, MIB, Row, main, make_large, medians, scratch
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_servers import BUCKET, JuicefsServer

ROUNDS = int(os.environ.get("ROUNDS", "5"))
SIZES = [int(size) * MIB for size in os.environ.get("APPEND_TO_MIB", "8,32,200").split(",")]
TAIL = int(os.environ.get("APPEND_KIB", "64")) * KIB
# Seconds added to each request, and bytes a second up: the same machine, a distance, a distance on 200 Mbit/s.
NETWORKS: tuple[tuple[float, float | None], ...] = ((0.0, None), (0.02, None), (0.02, 25e6))
MOST = MIB


class Growing:
    """A session with one file that grows.

    Args:
        directory: Its working dir.
        endpoint: The server, or the proxy in front of it.
        size: Bytes of the file at first.
        append: Whether the storage may append; from any size on, to see where it begins to pay.
    """

    def __init__(self, directory: str, endpoint: str, size: int, *, append: bool) -> None:
        self.path = make_large(os.path.join(directory, "log.bin"), size)
        name = os.path.basename(directory)
        self.store: Any = open_store(clients.filesystem_at(endpoint), f"{BUCKET}/{name}")
        self.store.min_append_size = 1 if append else 1 << 60
        self.artifacts = clients.session(directory, self.store)
        self.artifacts.sync()

    def grow(self) -> float:
        """Appends, syncs, and returns the seconds of the sync."""
        with open(self.path, "ab") as file:
            file.write(os.urandom(TAIL))
        time.sleep(0.06)  # beyond the clock's tick, as in life: a file written a moment ago is hashed twice
        started = time.perf_counter()
        self.artifacts.sync()
        return time.perf_counter() - started

    def close(self) -> None:
        self.artifacts.close(flush=False)
        self.store.delete(["log.bin"])


def compare(directory: str, proxy: FaultProxy, endpoint: str, size: int) -> Row:
    network = f"{proxy.latency * 1000:.0f} ms" + (
        f", {proxy.bandwidth * 8 / 1e6:.0f} Mbit/s" if proxy.bandwidth else ""
    )
    name = f"{size // MIB}-{network.replace(' ', '').replace('/', '').replace(',', '-')}"
    contestants = {
        "whole": Growing(os.path.join(directory, f"whole-{name}"), endpoint, size, append=False),
        "append": Growing(os.path.join(directory, f"append-{name}"), endpoint, size, append=True),
    }
    seconds: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    sent: dict[str, int] = {}
    for number in range(ROUNDS + 1):
        for contestant, growing in contestants.items():
            proxy.reset_counts()
            taken = growing.grow()
            if number:  # the first append proves the server, and reads everything back
                seconds[contestant].append(taken)
                sent[contestant] = max(sent.get(contestant, 0), sum(proxy.bytes_in.values()))
            print(f"  {number or 'warm-up':>7} {name:<8} {contestant:<8} {taken:8.3f} s", flush=True)
    assert contestants["append"].store.can_append
    for growing in contestants.values():
        growing.close()
        os.remove(growing.path)
    found = medians(seconds)
    counted = (
        f"{sent['append'] / KIB:.0f} KiB sent instead of {sent['whole'] / MIB:.1f} MiB" if any(sent.values()) else ""
    )
    row = Row(
        f"{TAIL // KIB} KiB appended to {size // MIB} MiB, S3 with UploadPartCopy, {network}",
        "<= 1 MiB sent" if counted else "",
        f"{counted or 'time only'}; {found['append']:.2f} s, whole {found['whole']:.2f} s",
        sent["append"] <= MOST if counted else None,
        seconds,
    )
    print(f"  {row.work}: {row.measured}", flush=True)
    return row


def run() -> list[Row]:
    rows = []
    with scratch() as directory, JuicefsServer() as server, FaultProxy(server.endpoint) as proxy:
        for latency, bandwidth in NETWORKS:
            proxy.latency, proxy.bandwidth = latency, bandwidth
            for size in SIZES:
                # Without latency, directly: the proxy would cost more than the rest. Bytes are counted with latency.
                rows.append(compare(directory, proxy, proxy.endpoint if latency else server.endpoint, size))
    return rows


if __name__ == "__main__":
    main("s3_append", run)
