"""What the benchmarks share: data, servers, rounds of contestants side by side, and where results go."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from release_tests.benchmarks.proxy import Proxy
from tests.support.s3_servers import BUCKET, RcloneServer, environment

RESULTS = Path(__file__).with_name("results")
KIB, MIB, GIB = 1024, 1024**2, 1024**3


def use_memory() -> None:
    """Puts files and the server's data into memory where there is enough of it (or into `BENCHMARK_DIR`).

    On a disk, the disk would decide, and the kernel would throttle whoever comes last.
    """
    directory = os.environ.get("BENCHMARK_DIR", "")
    with contextlib.suppress(OSError):
        if not directory and shutil.disk_usage("/dev/shm").free > 12 * GIB:
            directory = "/dev/shm"
    tempfile.tempdir = directory or None


use_memory()

# For every S3 client; set before the first of them is imported.
os.environ.update(environment())
os.environ.setdefault("RAY_DEDUP_LOGS", "0")


@dataclass(slots=True)
class Row:
    """One line of the table.

    Attributes:
        work: What was done.
        target: What must be reached.
        measured: What was, in words.
        ok: Whether it was reached; None where nothing was asked.
        seconds: Contestant to the seconds of each round.
        note: What a reader must know.
    """

    work: str
    target: str
    measured: str
    ok: bool | None = None
    seconds: Mapping[str, list[float]] = field(default_factory=dict)
    note: str = ""


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def rounds(
    contestants: Mapping[str, Callable[[str], object]],
    count: int,
    *,
    prepare: Callable[[str, str], object] | None = None,
    tidy: Callable[[str], object] | None = None,
    warm_up: bool = True,
) -> dict[str, list[float]]:
    """Runs all contestants one after the other, `count` times, each into a new place.

    Args:
        contestants: Name to a function that gets the name of a place where nothing is yet.
        count: Rounds.
        prepare: Called with contestant and place before each run; not timed.
        tidy: Takes the place away again; not timed.
        warm_up: One round more, before the others, that does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(0 if warm_up else 1, count + 1):
        for name, run in contestants.items():
            place = f"{name.replace(' ', '-').replace('/', '-')}-{number}-{time.time_ns()}"
            if prepare is not None:
                prepare(name, place)
            gc.collect()
            started = time.perf_counter()
            run(place)
            taken = time.perf_counter() - started
            if tidy is not None:
                tidy(place)
            if number:
                seconds[name].append(taken)
            print(f"  {number or 'warm-up':>7} {name:<28} {taken:8.3f} s", flush=True)
    return seconds


def ratio(seconds: Mapping[str, list[float]], slower: str, faster: str) -> float:
    """Median of the ratios of each round: what both had to share in that round cancels out."""
    return statistics.median(a / b for a, b in zip(seconds[slower], seconds[faster], strict=True))


def times(seconds: Mapping[str, list[float]]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in medians(seconds).items()) + " s"


# --- places --------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """A directory that is gone afterwards."""
    directory = tempfile.mkdtemp(prefix="artifact-sync-bench-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def make_files(directory: str, count: int, size: int, *, seed: int = 0) -> str:
    """Fills a directory with `count` files of `size` bytes, all different; flat."""
    os.makedirs(directory, exist_ok=True)
    body = os.urandom(size)
    for number in range(count):
        with open(os.path.join(directory, f"f{number:06d}.bin"), "wb") as file:
            file.write(f"{seed} {number} ".encode() + body[: size - len(f"{seed} {number} ")])
    return directory


def make_large(path: str, size: int) -> str:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    block = os.urandom(16 * MIB)
    with open(path, "wb") as file:
        for number in range(0, size, len(block)):
            file.write(number.to_bytes(8, "big"))
            file.write(block[8 : min(len(block), size - number)])
    return path


class Server(RcloneServer):
    """The tests' server, but it remembers its directories: else it lists them again for every PUT, which is O(n^2)."""

    def command(self, port: int) -> list[str]:
        command = super().command(port)
        if "--dir-cache-time" in command:
            command[command.index("--dir-cache-time") + 1] = "1h"
        return command

    def forget(self) -> None:
        """After a change behind its back."""
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)
        time.sleep(0.05)


class Place:
    """An S3 server of this machine's, with or without added latency.

    Without latency, clients talk to it directly; else through a proxy, which also counts requests.
    """

    def __init__(self, server: Server, proxy: Proxy | None = None) -> None:
        self.server = server
        self.proxy = proxy
        self.latency = proxy.latency if proxy else 0.0
        self.endpoint = proxy.endpoint if proxy else server.endpoint
        self.bucket = BUCKET

    def directory(self, prefix: str) -> str:
        """Where the server keeps a prefix; made, because this server takes directory markers for files."""
        path = os.path.join(self.server.data, self.bucket, prefix)
        os.makedirs(path, exist_ok=True)
        self.server.forget()
        return path

    def remove(self, prefix: str) -> None:
        shutil.rmtree(os.path.join(self.server.data, self.bucket, prefix), ignore_errors=True)
        self.server.forget()

    def count(self, run: Callable[[], object]) -> dict[str, int]:
        """Requests by kind that `run` makes; needs the proxy."""
        assert self.proxy is not None
        self.proxy.take_counts()
        run()
        return self.proxy.take_counts()


@contextlib.contextmanager
def s3(latency: float = 0.0, *, proxied: bool = False) -> Iterator[Place]:
    with Server() as server, contextlib.ExitStack() as stack:
        proxy = stack.enter_context(Proxy(server.endpoint, latency)) if latency or proxied else None
        yield Place(server, proxy)


# --- results -------------------------------------------------------------------------------------


def save(name: str, rows: list[Row], started_load: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    body = {
        "rows": [asdict(row) for row in rows],
        "machine": machine(),
        "load": f"{started_load} before, {load()} after",
        "when": time.strftime("%Y-%m-%d"),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(body, indent=1) + "\n")
    print()
    for row in rows:
        print(f"{'ok ' if row.ok else '-- ' if row.ok is None else 'NO '} {row.work}: {row.measured}  [{row.target}]")


def load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def machine() -> dict[str, str]:
    import obstore
    import pyarrow as pa
    import ray
    import s3fs

    rclone = os.popen(f"{Path(sys.executable).with_name('rclone')} version 2>/dev/null").readline().strip()
    about = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in about if line.startswith("model name")), "unknown")
    return {
        "cpu": f"{os.cpu_count()} x {cpu}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.0f} GiB",
        "system": platform.release().partition("-")[0],
        "directory": "memory (tmpfs)" if tempfile.gettempdir() == "/dev/shm" else "disk",
        "python": platform.python_version(),
        "ray": ray.__version__,
        "pyarrow": pa.__version__,
        "obstore": obstore.__version__,
        "s3fs": s3fs.__version__,
        "rclone": rclone.removeprefix("rclone "),
    }


def main(name: str, run: Callable[[], list[Row]]) -> None:
    """The entry point of each benchmark."""
    before = load()
    save(name, run(), before)


# --- memory --------------------------------------------------------------------------------------


def peak_rss() -> int:
    """Peak memory of this process since `reset_peak`, in bytes (`ru_maxrss` begins with that of the parent)."""
    return status_bytes("VmHWM")


def reset_peak() -> int:
    """Sets the peak back to what is in use now, and returns that in bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(field_name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) * KIB
    raise KeyError(field_name)
